"""Captured ranks as Chakra execution traces (MLCommons), one file per rank.

A file is a GlobalMetadata message and then Node messages, each with its length
before it as a varint. An event becomes a node: its id is the event's ordinal,
data_deps hold the order of its lane and the event on another lane that it comes
after; ctrl_deps repeat the latter. (Feeders resolve data_deps only.)

A group's pg_name is its ordinal in the groups table. Who is in it is said once:
in the metadata of its members' files (`comm_group.<pg_name>`), and for all groups
in `comm_groups.json`, where ASTRA-sim looks groups up by number. The
transfer itself is no CPU operator, also where a CPU carries it out: simulators
skip communication of CPU operators, which in PyTorch's traces wraps the real one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from crystalllm import __version__, tables
from crystalllm.errors import UserError

# The version that the field numbers below are of.
SCHEMA = "0.0.4"

_COMP, _SEND, _RECV, _COLL = 4, 5, 6, 7
_NODE_TYPES = {"COMM_SEND": _SEND, "COMM_RECV": _RECV, "COMM_COLL": _COLL}
COMM_TYPES = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}

# Fields of AttributeProto's value.
_INT32, _INT64, _UINT32_LIST, _BOOL, _STRING = 7, 9, 12, 27, 29


def export(capture: Path, out: Path) -> list[Path]:
    """Writes `chakra.<rank>.et` for each captured rank, and `comm_groups.json`.

    Args:
        capture: Folder with the calls, groups, events and event_times tables.
        out: Folder, made if need be.

    Returns:
        The execution traces, by rank.

    Raises:
        UserError: A table is missing or unreadable, or names a call, group or
            event that another does not have.
    """
    calls, _ = tables.CALLS.read(capture / "calls.parquet")
    groups, _ = tables.GROUPS.read(capture / "groups.parquet")
    events, provenance = tables.EVENTS.read(capture / "events.parquet")
    times, _ = tables.EVENT_TIMES.read(capture / "event_times.parquet")
    if not times.select(["rank", "event"]).equals(events.select(["rank", "event"])):
        raise _broken(capture, "event_times has other rows than events")
    named = {g["identity"]: (str(i), g["members"]) for i, g in enumerate(groups.to_pylist())}
    by_place = {(c["rank"], c["call"]): c for c in calls.to_pylist()}
    of_rank: dict[int, list[dict[str, Any]]] = {}
    for event, time in zip(events.to_pylist(), times.to_pylist(), strict=True):
        of_rank.setdefault(event["rank"], []).append({**time, **event})
    out.mkdir(parents=True, exist_ok=True)
    origin_ns = min((e["start_ns"] for found in of_rank.values() for e in found), default=0)
    paths = []
    for rank, found in sorted(of_rank.items()):
        path = out / f"chakra.{rank}.et"
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        world_size = provenance.get("world_size", 0)
        messages = [
            _metadata(rank, world_size, named),
            *_nodes(capture, found, by_place, named, origin_ns),
        ]
        partial.write_bytes(b"".join(_varint(len(m)) + m for m in messages))
        partial.rename(path)
        paths.append(path)
    text = json.dumps(dict(named.values()), indent=1) + "\n"
    (out / "comm_groups.json").write_text(text)
    return paths


def _metadata(rank: int, world_size: int, groups: dict[str, tuple[str, list[int]]]) -> bytes:
    attributes = [
        _attribute("crystalllm", _STRING, __version__),
        _attribute("rank", _INT64, rank),
        _attribute("world_size", _INT64, world_size),
    ]
    for name, members in groups.values():
        if rank in members:
            attributes.append(_attribute(f"comm_group.{name}", _UINT32_LIST, tuple(members)))
    return _text(1, SCHEMA) + b"".join(_bytes(2, a) for a in attributes)


def _nodes(
    capture: Path,
    events: list[dict[str, Any]],
    calls: dict[tuple[int, int], dict[str, Any]],
    groups: dict[str, tuple[str, list[int]]],
    origin_ns: int,
) -> Iterator[bytes]:
    last_of_lane: dict[str, int] = {}
    known = {e["event"]: e["start_ns"] for e in events}
    for event in events:
        number, after = event["event"], event["after"]
        call = None
        if event["call"] >= 0 and event["kind"] in _NODE_TYPES:
            call = calls.get((event["rank"], event["call"]))
            if call is None or call["group_identity"] not in groups:
                raise _broken(
                    capture, f"event {number} of rank {event['rank']} has a call or group unknown"
                )
        before = [last_of_lane[event["lane"]]] if event["lane"] in last_of_lane else []
        crossing = [] if after < 0 else [after]
        if crossing and after not in known:
            raise _broken(
                capture, f"event {number} of rank {event['rank']} comes after {after}, unknown"
            )
        last_of_lane[event["lane"]] = number
        yield _node(event, call, before, crossing, origin_ns, groups)


def _node(
    event: dict[str, Any],
    call: dict[str, Any] | None,
    before: list[int],
    crossing: list[int],
    origin_ns: int,
    groups: dict[str, tuple[str, list[int]]],
) -> bytes:
    # A communication outside the common part of all profiles has no call, so no size and group.
    kind = _NODE_TYPES.get(event["kind"], _COMP) if call is not None else _COMP
    start_ns, duration_ns = event["start_ns"] - origin_ns, event["duration_ns"]
    start_us = start_ns // 1000
    attributes = [
        _attribute("is_cpu_op", _BOOL, kind == _COMP and event["lane"].startswith("host:")),
        _attribute("lane", _STRING, event["lane"]),
        _attribute("kind", _STRING, event["kind"]),
        _attribute("iteration", _INT64, event["mark"]),
        # Nodes have whole microseconds only.
        _attribute("start_ns", _INT64, start_ns),
        _attribute("duration_ns", _INT64, duration_ns),
    ]
    if call is not None:
        attributes += _communication(event, call, kind, groups[call["group_identity"]][0])
    return b"".join(
        (
            _number(1, event["event"]),
            _text(2, event["name"] or event["kind"]),
            _number(3, kind),
            _packed(4, crossing),
            _packed(5, sorted({*before, *crossing})),
            _number(6, start_us),
            # Rounded up, so that nothing that takes time takes none.
            _number(7, -(-duration_ns // 1000)),
            *(_bytes(10, a) for a in attributes),
        )
    )


def _communication(
    event: dict[str, Any], call: dict[str, Any], kind: int, group_name: str
) -> list[bytes]:
    attributes = [
        _attribute("comm_size", _INT64, event["bytes"]),
        _attribute("pg_name", _STRING, group_name),
        _attribute("pg_identity", _STRING, call["group_identity"]),
        _attribute("pg_desc", _STRING, call["group_desc"]),
        _attribute("comm_seq", _INT64, call["seq"]),
    ]
    if kind == _COLL:
        attributes.append(_attribute("comm_type", _INT64, COMM_TYPES[call["kind"]]))
        if call["root_rank"] >= 0:
            attributes.append(_attribute("root_rank", _INT64, call["root_rank"]))
    else:
        me, peer = event["rank"], call["peer_rank"]
        source, target = (me, peer) if kind == _SEND else (peer, me)
        attributes += [
            _attribute("comm_src", _INT32, source),
            _attribute("comm_dst", _INT32, target),
            _attribute("comm_tag", _INT32, call["tag"]),
        ]
    return attributes


# --- protobuf on the wire ---------------------------------------------------------


def _varint(value: int) -> bytes:
    value &= 0xFFFF_FFFF_FFFF_FFFF  # negative numbers are sent as 64 bits
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    """proto3 leaves out a zero."""
    return _varint(field << 3) + _varint(value) if value else b""


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode()) if value else b""


def _packed(field: int, values: Iterable[int]) -> bytes:
    data = b"".join(_varint(v) for v in values)
    return _bytes(field, data) if data else b""


@lru_cache(maxsize=65536)
def _attribute(name: str, field: int, value: Any) -> bytes:
    """An AttributeProto; what its oneof holds is written also where it is zero."""
    if field == _STRING:
        data = _bytes(field, value.encode())
    elif field == _UINT32_LIST:
        data = _bytes(field, _packed(1, value))
    else:
        data = _varint(field << 3) + _varint(int(value))
    return _text(1, name) + data


def _broken(capture: Path, why: str) -> UserError:
    return UserError(
        "Tables of a capture do not fit together",
        where=f"Folder {capture}: {why}",
        do="Capture or import again; files of different runs were mixed",
    )
