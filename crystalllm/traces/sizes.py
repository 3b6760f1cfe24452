"""Element counts of calls by the convention of call records."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from crystalllm.traces.communication import Communication


@dataclass
class Sizes:
    """As `World.record_call` takes them; count is -1 where chunks are uneven."""

    count: int = 0
    in_elements: int = 0
    out_elements: int = 0
    in_splits: list[int] = field(default_factory=list)
    out_splits: list[int] = field(default_factory=list)


def sizes_of(call: Communication, group_size: int, group_rank: int) -> Sizes:
    """Sizes of one call; a side that the trace leaves out follows from the other."""
    host, kind = call.host, call.kind
    put_in, out = max(host.in_elements, -1), max(host.out_elements, -1)
    if kind == "barrier" or (put_in < 0 and out < 0):
        return Sizes()
    if kind in ("all_gather", "gather"):
        put_in = out // group_size if put_in < 0 else put_in
        out = put_in * group_size if out < 0 else out
        if kind == "gather" and host.root >= 0:
            out = out if host.root == group_rank else 0
        uneven = host.out_splits or []
        return Sizes(put_in, put_in, out, [], uneven if kind == "all_gather" else [])
    if kind in ("reduce_scatter", "scatter"):
        out = put_in // group_size if out < 0 else out
        put_in = out * group_size if put_in < 0 else put_in
        if kind == "scatter" and host.root >= 0:
            put_in = put_in if host.root == group_rank else 0
        uneven = host.in_splits or []
        return Sizes(out, put_in, out, uneven if kind == "reduce_scatter" else [], [])
    if kind == "all_to_all":
        put_in = out if put_in < 0 else put_in
        out = put_in if out < 0 else out
        even = put_in == out and put_in % group_size == 0
        # Lists of another length than the group has members are none of its splits.
        splits = [
            s if s and len(s) == group_size else [] for s in (host.in_splits, host.out_splits)
        ]
        return Sizes(put_in // group_size if even else -1, put_in, out, *splits)
    count = max(put_in, out)
    if kind == "send":
        return Sizes(count, count, 0)
    if kind == "recv":
        return Sizes(count, 0, count)
    return Sizes(count, count, count)


def signature_of(call: Communication, sizes: Sizes) -> Hashable:
    """What is equal on all members of a call's group."""
    if call.kind == "barrier":
        return ("barrier",)
    if call.kind == "all_to_all" or sizes.in_splits or sizes.out_splits:
        return call.kind, call.host.dtype
    return call.kind, call.host.dtype, sizes.count


def lacks_splits(call: Communication) -> bool:
    """An all_to_all of which the trace does not say how it was split."""
    return call.kind == "all_to_all" and call.host.in_splits is None
