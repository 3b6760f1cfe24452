"""Kineto traces of a real run, as the tables that capture writes: a captured baseline.

What a trace does not tell stays open and is counted in `structure.json`: reduce
ops ("?"), roots, split sizes (count -1 where they are uneven), members of
groups (the default group is assumed). Times are those of the hosts' clocks,
aligned on the ends of matched collectives.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crystalllm import __version__, tables
from crystalllm.errors import UserError
from crystalllm.table import Table
from crystalllm.traces.clocks import Clocks, estimate
from crystalllm.traces.communication import Found, communication_of
from crystalllm.traces.groups import GroupTable, Known
from crystalllm.traces.iterations import marks_of
from crystalllm.traces.matching import match
from crystalllm.traces.reading import MAX_WORLD_SIZE, Trace, read_traces
from crystalllm.traces.recording import RankImport
from crystalllm.traces.sizes import lacks_splits
from crystalllm.traces.vocabulary import ROOTED

_RANKS_PER_NODE = 8  # where no trace says how many


def import_traces(
    paths: Sequence[Path], out: Path, *, world_size: int | None = None
) -> dict[str, Any]:
    """Writes the tables of a captured run from Kineto traces, one per rank.

    Calls that not all captured members of a group have in their profile are left
    out of `calls` (their events stay), so that the n-th call of a group is the
    same call on every rank.

    Args:
        paths: `.json`, `.json.gz`, or `.tar.gz` with such members.
        out: Folder for ranks, groups, calls, call_times, events, event_times
            (Parquet) and structure.json.
        world_size: Of the run; needed only where no trace says it.

    Returns:
        What `structure.json` says.

    Raises:
        UserError: A file that is no readable trace, traces that are not of one
            run, calls that don't fit together, or no communication at all.
    """
    traces = read_traces(paths)
    size = _world_size(traces, world_size)
    found = {t.rank: communication_of(t) for t in traces}
    _refuse_silence(traces, found, size)
    marks, marks_from = marks_of(traces)
    groups = GroupTable(traces, size)
    ranks = {t.rank: RankImport(t, found[t.rank], groups) for t in traces}
    unmatched, matches = match(ranks, assumed=groups.assumed)
    clocks = estimate(sorted(ranks), matches)
    for rank, one in ranks.items():
        one.record(groups, marks[rank])
    structure = {
        "crystalllm": __version__,
        "source": "kineto",
        "world_size": size,
        "num_captured": len(ranks),
        "num_distinct": len({_digest(one) for one in ranks.values()}),
        "versions": _versions(traces),
        "traces": {str(t.rank): t.source.rsplit("/", 1)[-1] for t in traces},
        "marks_from": marks_from,
        "nodes_from": "host names" if all(t.host for t in traces) else "devices of a host",
        "groups_from": dict(groups.sources),
        "groups_unmatched": unmatched,
        "calls_left_out": {str(r): len(o.calls) - len(o.kept) for r, o in ranks.items()},
        "kernels_unlinked": {str(r): len(o.found.unlinked) for r, o in ranks.items()},
        "unknown": _unknown(ranks),
        "clock": {
            str(r): {
                "offset_ns": clocks.offset_ns[r],
                "residual_ns": clocks.residual_ns[r],
                "num_matches": clocks.num_matches[r],
            }
            for r in ranks
        },
        "clock_excluded_first_ns": clocks.excluded,
    }
    _write(out, ranks, groups, clocks, structure)
    return structure


def _world_size(traces: Sequence[Trace], given: int | None) -> int:
    said: dict[int, str] = {}
    for trace in traces:
        if trace.world_size is not None:
            said.setdefault(trace.world_size, trace.source)
    if given is not None:
        said.setdefault(given, "--world-size")
    if len(said) > 1:
        raise UserError(
            "Traces are of worlds of different size",
            where=", ".join(f"{n} by {source}" for n, source in sorted(said.items())),
            do="Pass traces of one run, and its world size if any",
        )
    if not said:
        raise UserError(
            "No trace says how many ranks the run had",
            where=f"File {traces[0].source}: distributedInfo has no world_size",
            do="Pass --world-size",
        )
    size = next(iter(said))
    if not traces[-1].rank < size <= MAX_WORLD_SIZE:
        raise UserError(
            f"A world of {size} has no rank {traces[-1].rank}",
            where=f"File {traces[-1].source}",
            do="Pass the world size of the run",
        )
    return size


def _refuse_silence(traces: Sequence[Trace], found: dict[int, Found], world_size: int) -> None:
    silent = [t for t in traces if not found[t.rank].calls]
    if world_size > 1 and silent:
        raise UserError(
            "No communication is in the trace of a run of several ranks",
            where=f"File {silent[0].source}: {len(silent[0].events)} events of rank "
            f"{silent[0].rank} of {world_size}; looked for c10d:: operators, record_param_comms, "
            "annotations such as nccl:all_reduce, and kernels named ncclKernel_, ncclDevKernel_ "
            "(any case) or nccl::",
            do="Profile a whole iteration of a job that uses NCCL or gloo",
        )


def _versions(traces: Sequence[Trace]) -> dict[str, str]:
    found: dict[str, set[str]] = defaultdict(set)
    for trace in traces:
        for name, value in trace.versions.items():
            found[name].add(value)
    return {name: ", ".join(sorted(values)) for name, values in sorted(found.items())}


def _unknown(ranks: dict[int, RankImport]) -> dict[str, int]:
    """How many calls lack what a call record has."""
    found = dict.fromkeys(("dtype", "end", "reduce_op", "root", "size", "splits"), 0)
    for one in ranks.values():
        for i in one.kept:
            call = one.calls[i]
            barrier = call.kind == "barrier"
            found["dtype"] += not barrier and not call.host.dtype
            found["end"] += call.lacks_kernel(one.trace)
            found["reduce_op"] += call.reduce_op == "?"
            found["root"] += call.kind in ROOTED and one.roots[i] < 0
            found["size"] += not barrier and max(call.host.in_elements, call.host.out_elements) < 0
            found["splits"] += lacks_splits(call)
    return found


def _digest(one: RankImport) -> str:
    return hashlib.sha256("\n".join(one.columns["key"]).encode()).hexdigest()[:16]


def _write(
    out: Path,
    ranks: dict[int, RankImport],
    groups: GroupTable,
    clocks: Clocks,
    structure: dict[str, Any],
) -> None:
    provenance = {k: structure[k] for k in ("crystalllm", "source", "world_size")}
    out.mkdir(parents=True, exist_ok=True)

    def write(table: Table, columns: dict[str, list[Any]]) -> None:
        table.write(out / f"{table.name}.parquet", columns, provenance=provenance)

    calls: dict[str, list[Any]] = defaultdict(list)
    events: dict[str, list[Any]] = defaultdict(list)
    for rank, one in ranks.items():
        offset = clocks.offset_ns[rank]
        for name in ("arrival_ns", "release_ns"):
            one.columns[name] = [t - offset for t in one.columns[name]]
        one.events["start_ns"] = [t - offset for t in one.events["start_ns"]]
        for name, values in one.columns.items():
            calls[name] += values
        for name, values in one.events.items():
            events[name] += values
    write(tables.CALLS, calls)
    write(tables.CALL_TIMES, calls)
    write(tables.EVENTS, events)
    write(tables.EVENT_TIMES, events)
    write(tables.RANKS, _rank_columns(ranks))
    write(tables.GROUPS, _group_columns(ranks, groups))
    text = json.dumps(structure, indent=2, sort_keys=True) + "\n"
    partial = out / f".structure.json.{os.getpid()}.partial"
    partial.write_text(text)
    partial.rename(out / "structure.json")


def _rank_columns(ranks: dict[int, RankImport]) -> dict[str, list[Any]]:
    digests = {rank: _digest(one) for rank, one in ranks.items()}
    first: dict[str, int] = {}
    for rank, digest in digests.items():
        first.setdefault(digest, rank)
    roles = {digest: i for i, digest in enumerate(first)}
    return {
        "rank": list(ranks),
        "node": _nodes(ranks),
        "coordinates": [{} for _ in ranks],
        "role": [roles[digests[r]] for r in ranks],
        "is_captured": [True] * len(ranks),
        "is_checked": [False] * len(ranks),
        "representative": [first[digests[r]] for r in ranks],
        "num_calls": [len(one.kept) for one in ranks.values()],
        "num_marks": [one.num_marks for one in ranks.values()],
        "num_invented": [0] * len(ranks),
        "keys_digest": list(digests.values()),
    }


def _nodes(ranks: dict[int, RankImport]) -> list[int]:
    traces = [one.trace for one in ranks.values()]
    if all(t.host for t in traces):
        hosts = {host: i for i, host in enumerate(dict.fromkeys(t.host for t in traces))}
        return [hosts[t.host] for t in traces]
    return [t.rank // (t.num_devices or _RANKS_PER_NODE) for t in traces]


def _group_columns(ranks: dict[int, RankImport], groups: GroupTable) -> dict[str, list[Any]]:
    rows: dict[str, tuple[Known, str, str]] = {}
    for rank, one in ranks.items():
        for known in groups.groups_of(rank):
            identity, signature = one.identities[known.key]
            backend = groups.backend_of(known, one.trace.backend)
            rows.setdefault(identity, (known, signature, backend))
    ordered = sorted(rows.items(), key=lambda row: (row[1][0].key, row[0]))
    return {
        "identity": [identity for identity, _ in ordered],
        "creation": [known.creation for _, (known, _, _) in ordered],
        "backend": [backend for _, (_, _, backend) in ordered],
        "signature": [signature for _, (_, signature, _) in ordered],
        "description": [known.description for _, (known, _, _) in ordered],
        "is_inferred": [False] * len(ordered),
        "members": [list(known.members) for _, (known, _, _) in ordered],
    }
