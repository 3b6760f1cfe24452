"""What one rank left, and the file that keeps it: Arrow streams, nothing that executes."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from crystalllm import tables
from crystalllm.errors import UserError
from crystalllm.records import call_columns, element_size
from crystalllm.tables import Table

# (group, seq, rank, peer): one contribution to one call.
Address = tuple[str, int, int, int]

_PARTS = (
    tables.CALLS,
    tables.CALL_TIMES,
    tables.EVENTS,
    tables.EVENT_TIMES,
    tables.GROUPS,
    tables.PAYLOADS,
)
_HEADER = b"crystalllm.captured"


@dataclass(frozen=True)
class Contribution:
    """What a rank contributed to one call whose values steer programs.

    Args:
        group: Identity of the group.
        seq: Ordinal in the group, or in the ordered pair of a send.
        rank: Who contributed it.
        peer: Receiver of a send, else -1.
        dtype: Element type in torch's spelling.
        value: The bytes.
        splits: Elements per peer of an uneven all_to_all.
    """

    group: str
    seq: int
    rank: int
    peer: int
    dtype: str
    value: bytes
    splits: tuple[int, ...] = ()

    @property
    def address(self) -> Address:
        return self.group, self.seq, self.rank, self.peer


@dataclass(frozen=True)
class Captured:
    """What one rank left.

    Args:
        rank: Who.
        num_marks: Iteration marks that it set.
        num_invented: Control values that had to be invented all the same.
        keys_digest: Of its call records: equal for ranks of one role.
        heard: Captured ranks whose control values it was given.
        parts: By name, the tables calls, call_times, events, event_times,
            groups (in the order of creation) and payloads (its contributions).
    """

    rank: int
    num_marks: int
    num_invented: int
    keys_digest: str
    heard: tuple[int, ...]
    parts: dict[str, pa.Table]

    @classmethod
    def of_world(
        cls, world: Any, contributions: Sequence[Contribution], heard: Iterable[int] = ()
    ) -> Captured:
        """From the logical world of the rank itself."""
        rank = world.rank
        events = world.event_columns()
        records = world.take_records()
        groups = world.groups
        calls = call_columns(records, groups, rank)
        parts = {
            "calls": _table(tables.CALLS, calls),
            "call_times": _table(tables.CALL_TIMES, calls),
            **_event_parts(events, records, rank),
            "groups": _table(
                tables.GROUPS,
                {
                    "identity": [g.identity for g in groups],
                    "creation": [g.creation for g in groups],
                    "backend": [g.backend for g in groups],
                    "signature": [g.signature for g in groups],
                    "description": [g.description for g in groups],
                    "is_inferred": [False] * len(groups),
                    "members": [g.members for g in groups],
                },
            ),
            "payloads": _table(tables.PAYLOADS, _payload_columns(contributions)),
        }
        digest = hashlib.sha256("\n".join(records["key"]).encode()).hexdigest()[:16]
        return cls(rank, world.marks, world.num_invented, digest, tuple(sorted(heard)), parts)

    @property
    def num_calls(self) -> int:
        return self.parts["calls"].num_rows

    @cached_property
    def contributions(self) -> list[Contribution]:
        return [
            Contribution(
                row["group"],
                row["seq"],
                row["rank"],
                row["peer"],
                row["dtype"],
                row["value"],
                tuple(row["splits"]),
            )
            for row in self.parts["payloads"].to_pylist()
        ]

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """Rows of the rank's groups, in the order of creation."""
        rows = self.parts["groups"].to_pylist()
        return [{**row, "members": tuple(row["members"])} for row in rows]

    @cached_property
    def keys(self) -> list[str]:
        return self.parts["calls"]["key"].to_pylist()

    @cached_property
    def marks(self) -> list[int]:
        return self.parts["calls"]["mark"].to_pylist()

    def to_bytes(self) -> bytes:
        head = {
            "rank": self.rank,
            "num_marks": self.num_marks,
            "num_invented": self.num_invented,
            "keys_digest": self.keys_digest,
            "heard": self.heard,
        }
        sink = pa.BufferOutputStream()
        for table in _PARTS:
            part = self.parts[table.name].replace_schema_metadata(
                {_HEADER: json.dumps({"table": f"{table.name}/{table.version}", **head})}
            )
            with pa.ipc.new_stream(sink, part.schema) as stream:
                stream.write_table(part)
        return sink.getvalue().to_pybytes()

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Captured:
        """Reads what `to_bytes` wrote.

        Raises:
            UserError: It is something else, or damaged.
        """
        parts: dict[str, pa.Table] = {}
        head: dict[str, Any] = {}
        try:
            source = pa.BufferReader(data)
            for table in _PARTS:
                with pa.ipc.open_stream(source) as stream:
                    parts[table.name] = stream.read_all()
                head = json.loads(parts[table.name].schema.metadata[_HEADER])
                if head.pop("table") != f"{table.name}/{table.version}":
                    raise ValueError(f"it has another version of the table {table.name}")
                if parts[table.name].schema.remove_metadata() != table.schema:
                    raise ValueError(f"the columns of {table.name} are not those of its version")
                parts[table.name].validate(full=True)
            return cls(parts=parts, heard=tuple(head.pop("heard")), **head)
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                "What a capture left of a rank cannot be read",
                where=f"{where}: {type(error).__name__}: {str(error).splitlines()[0]}",
                do="Delete it; the rank is then captured again",
            ) from error

    @classmethod
    def read(cls, path: Path) -> Captured:
        return cls.from_bytes(path.read_bytes(), where=f"File {path}")


def without_padding(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Pickled objects without the uninitialised bytes that pad them to the longest.

    Object collectives tell the sizes in a call of their own: before the bytes
    when they gather, after them when they scatter.
    """
    by_address = {c.address: c for c in contributions}

    def sizes(c: Contribution, step: int) -> list[int]:
        other = by_address.get((c.group, c.seq + step, c.rank, c.peer))
        if other is None or other.dtype != "int64":
            return []
        return [n for (n,) in struct.iter_unpack("<q", other.value)]

    tidy = []
    for c in contributions:
        value = c.value
        if c.dtype == "uint8" and value:
            before, after = sizes(c, -1), sizes(c, +1)
            if len(after) > 1 and len(value) % len(after) == 0:
                length = len(value) // len(after)
                parts = [value[i * length : (i + 1) * length] for i in range(len(after))]
                value = b"".join(
                    part[:n].ljust(length, b"\0") for part, n in zip(parts, after, strict=True)
                )
            elif len(before) == 1 and 0 < before[0] <= len(value):
                value = value[: before[0]]
        tidy.append(replace(c, value=value))
    return tidy


def _event_parts(
    events: dict[str, list[Any]], records: dict[str, list[Any]], rank: int
) -> dict[str, pa.Table]:
    num = len(events["kind"])
    first = records["call"][0] if records["call"] else 0
    names, sizes = [], []
    for kind, call, memory in zip(events["kind"], events["call"], events["bytes"], strict=True):
        if kind.startswith("COMM"):
            at = call - first
            elements = records["in_elements"][at] or records["out_elements"][at]
            names.append(records["kind"][at])
            sizes.append(elements * element_size(records["dtype"][at]))
        else:
            names.append("")
            sizes.append(memory)
    columns = {
        **events,
        "rank": [rank] * num,
        "event": range(num),
        "lane": [f"host:{lane}" for lane in events["lane"]],
        "name": names,
        "bytes": sizes,
    }
    return {
        "events": _table(tables.EVENTS, columns),
        "event_times": _table(tables.EVENT_TIMES, columns),
    }


def _payload_columns(contributions: Sequence[Contribution]) -> dict[str, list[Any]]:
    tidy = without_padding(contributions)
    columns = {
        name: [getattr(c, name) for c in tidy]
        for name in ("group", "seq", "rank", "peer", "dtype", "splits", "value")
    }
    zeros = [0] * len(tidy)
    return {**columns, "store_key": [""] * len(tidy), "body_end": zeros, "per_period": zeros}


def _table(table: Table, columns: dict[str, Any]) -> pa.Table:
    arrays = [pa.array(columns[c.name], type=c.type) for c in table.columns]
    return pa.Table.from_arrays(arrays, schema=table.schema)
