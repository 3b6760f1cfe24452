"""Every table that CrystalLLM writes: columns, types, units, version.

Writers and readers go through here, so that a table is described once. The
unit is part of a column's name (`_ns`, `_bytes`); ranks are global ranks
unless the name says otherwise. Provenance rides in the Parquet metadata.
Identical content gives identical bytes: host and time of the run are columns
of tables of their own, never metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from crystalllm.errors import UserError

_PROVENANCE = b"crystalllm.provenance"
_TABLE = b"crystalllm.table"


@dataclass(frozen=True)
class Column:
    name: str
    type: pa.DataType
    meaning: str


@dataclass(frozen=True)
class Table:
    """A kind of table.

    Args:
        name: As in the metadata of its files.
        version: Raised when a reader of an older one would be wrong.
        columns: In the order of the file.
        meaning: What one row is.
    """

    name: str
    version: int
    meaning: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(c.name, c.type) for c in self.columns])

    def write(
        self,
        path: Path,
        columns: Mapping[str, Sequence[Any]],
        *,
        provenance: Mapping[str, Any],
    ) -> None:
        """Writes `columns` to `path`, which appears whole or not at all."""
        arrays = [pa.array(columns[c.name], type=c.type) for c in self.columns]
        schema = self.schema.with_metadata(
            {
                _TABLE: f"{self.name}/{self.version}".encode(),
                _PROVENANCE: json.dumps(provenance, sort_keys=True).encode(),
            }
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            pq.write_table(pa.Table.from_arrays(arrays, schema=schema), partial, compression="zstd")
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

    def read(self, path: Path) -> tuple[pa.Table, dict[str, Any]]:
        """Reads a file of this kind.

        Returns:
            The table and its provenance.

        Raises:
            UserError: Missing, not Parquet, another table, or another version.
        """
        expected = f"{self.name}/{self.version}"
        try:
            table = pq.read_table(path)
        except FileNotFoundError:
            raise UserError(
                f"There is no {self.name} table here",
                where=f"File {path}",
                do="Check the path, or run the stage that writes it",
            ) from None
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                "A table cannot be read",
                where=f"File {path}: {str(error).splitlines()[0]}",
                do="Write it again; it is truncated or no Parquet file",
            ) from error
        metadata = table.schema.metadata or {}
        found = metadata.get(_TABLE, b"none").decode(errors="replace")
        if found != expected:
            raise UserError(
                "A file holds another table than expected",
                where=f"File {path}: {found} instead of {expected}",
                do="Pass the right file, or write it again with this version",
            )
        missing = [c.name for c in self.columns if c.name not in table.column_names]
        wrong = [
            c.name
            for c in self.columns
            if c.name not in missing and table.schema.field(c.name).type != c.type
        ]
        if missing or wrong:
            raise UserError(
                "A table's columns are not those of its version",
                where=f"File {path}: missing {missing}, of another type {wrong}",
                do="Write it again",
            )
        return table, json.loads(metadata.get(_PROVENANCE, b"{}"))


def prepare() -> None:
    """Imports what writing imports, which fails once the interpreter is ending."""
    pa.array([""])


CALLS = Table(
    "calls",
    1,
    "one communication call of one rank, in the order of the calls",
    (
        Column("call", pa.int64(), "ordinal among the rank's calls, from 0"),
        Column("key", pa.string(), "the call record as text: equal for calls equal in structure"),
        Column(
            "kind",
            pa.string(),
            "all_reduce, reduce, broadcast, all_gather, reduce_scatter, "
            "all_to_all, gather, scatter, send, recv or barrier",
        ),
        Column("reduce_op", pa.string(), "sum, avg, …; empty where nothing is reduced"),
        Column("dtype", pa.string(), "element type in torch's spelling; empty for a barrier"),
        Column("count", pa.int64(), "elements by NCCL's convention; -1 with explicit splits"),
        Column("group", pa.int32(), "the rank's group by order of creation"),
        Column("group_identity", pa.string(), "digest of the members # creation index"),
        Column("group_signature", pa.string(), "size:stride per axis, innermost first"),
        Column("group_size", pa.int32(), "members of the group"),
        Column("group_desc", pa.string(), "what the program calls it"),
        Column("root", pa.string(), "none, me or other"),
        Column("root_rank", pa.int32(), "-1 where there is no root"),
        Column("peer_offset", pa.int32(), "(peer - me) modulo group size; -1 without a peer"),
        Column("peer_wraps", pa.bool_(), "the step to the peer passes the end of the group"),
        Column("peer_rank", pa.int32(), "-1 without a peer"),
        Column("any_source", pa.bool_(), "received from any source; peer_rank is who it was"),
        Column("tag", pa.int32(), "of a point-to-point call"),
        Column(
            "batch", pa.int64(), "ordinal of the batch; calls coalesced into one share it; -1 alone"
        ),
        Column("stream", pa.int64(), "CUDA stream, or host thread by order of first call"),
        Column("seq", pa.int64(), "ordinal in the group, or in the pair for send and recv"),
        Column("mark", pa.int64(), "iteration marks before the call"),
        Column("seq_in_mark", pa.int64(), "as seq, from the last mark"),
        Column("in_elements", pa.int64(), "elements that the rank puts in"),
        Column("out_elements", pa.int64(), "elements that the rank gets out"),
        Column("in_splits", pa.list_(pa.int64()), "explicit split sizes; empty if equal"),
        Column("out_splits", pa.list_(pa.int64()), "explicit split sizes; empty if equal"),
        Column(
            "is_async", pa.bool_(), "the program asked for a handle; always true for send and recv"
        ),
    ),
)

CALL_TIMES = Table(
    "call_times",
    1,
    "when one call of one rank happened, on the clock of its host",
    (
        Column("call", pa.int64(), "ordinal among the rank's calls, from 0"),
        Column("arrival_ns", pa.int64(), "CLOCK_MONOTONIC when the call was made"),
        Column("release_ns", pa.int64(), "CLOCK_MONOTONIC when it was due to end"),
    ),
)

PAYLOADS = Table(
    "payloads",
    1,
    "what one rank contributed to one call, or set in the store",
    (
        Column("group", pa.string(), "identity of the group; empty for a store key"),
        Column(
            "iteration",
            pa.int64(),
            "-1: seq counts from the group's creation; k: from the k-th mark of the period",
        ),
        Column("seq", pa.int64(), "ordinal in the group, or in the pair for a send"),
        Column("rank", pa.int32(), "who contributed it"),
        Column("peer", pa.int32(), "who it was sent to; -1 in a collective"),
        Column("dtype", pa.string(), "element type in torch's spelling"),
        Column("splits", pa.list_(pa.int64()), "elements per peer of an uneven all_to_all"),
        Column("store_key", pa.string(), "key in the rendezvous store, else empty"),
        Column("value", pa.binary(), "the bytes"),
    ),
)

RANKS = Table(
    "ranks",
    1,
    "one captured rank",
    (
        Column("rank", pa.int32(), "global rank"),
        Column("node", pa.int32(), "logical node"),
        Column("num_calls", pa.int64(), "communication calls"),
        Column("num_marks", pa.int64(), "iteration marks"),
        Column("num_invented", pa.int64(), "control values without a producer"),
        Column("keys_digest", pa.string(), "equal for ranks whose call records are equal"),
    ),
)

GROUPS = Table(
    "groups",
    1,
    "one communicator that a captured rank created",
    (
        Column("identity", pa.string(), "digest of the members # creation index"),
        Column("signature", pa.string(), "size:stride per axis, innermost first"),
        Column("description", pa.string(), "what the program calls it"),
        Column("members", pa.list_(pa.int32()), "global ranks in group order"),
    ),
)

ALL = (CALLS, CALL_TIMES, PAYLOADS, RANKS, GROUPS)


def document() -> str:
    """The tables as Markdown; `docs/tables.md` is this text."""
    lines = [
        "# Tables",
        "",
        "Generated from `crystalllm/tables.py` by `python -m crystalllm generate`.",
    ]
    for table in ALL:
        lines += [
            "",
            f"## {table.name} (version {table.version})",
            "",
            f"One row is {table.meaning}.",
            "",
            "| column | type | meaning |",
            "|---|---|---|",
        ]
        lines += [f"| `{c.name}` | {c.type} | {c.meaning} |" for c in table.columns]
    return "\n".join(lines) + "\n"
