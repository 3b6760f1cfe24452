"""A kind of table, and reading and writing files of it.

The table's name and version and the provenance of its content ride in the
Parquet metadata. Identical content gives identical bytes.
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


# Text that repeats: one copy of each value in a file and in memory.
TEXT = pa.dictionary(pa.int32(), pa.string())


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
        columns: Mapping[str, Sequence[Any] | pa.Array | pa.ChunkedArray] | pa.Table,
        *,
        provenance: Mapping[str, Any],
    ) -> None:
        """Writes `columns` to `path`, which appears whole or not at all."""
        arrays = [_array(columns[c.name], c.type) for c in self.columns]
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

    def read(
        self,
        path: Path,
        *,
        columns: Sequence[str] | None = None,
        filters: Sequence[tuple[str, str, Any]] | None = None,
    ) -> tuple[pa.Table, dict[str, Any]]:
        """Reads a file of this kind.

        Args:
            path: The file.
            columns: Only these; all by default.
            filters: Only rows that meet all of these, as pyarrow writes them;
                row groups without such rows are not read.

        Returns:
            The table and its provenance.

        Raises:
            UserError: Missing, not Parquet, another table, another version,
                broken metadata, or values missing.
        """
        provenance = self.provenance(path)
        names = [c.name for c in self.columns] if columns is None else list(columns)
        try:
            # One file, never a folder that lies there: no data set is looked for.
            table = pq.read_table(path, columns=names, filters=filters, partitioning=None)
            table.validate(full=True)
        except _BROKEN as error:
            raise _unreadable(path, error) from error
        if empty := [name for name in names if _has_null(table[name])]:
            raise UserError(
                "A table lacks values",
                where=f"File {path}, columns {', '.join(empty)}",
                do="Write it again; every value must be there",
            )
        return table, provenance

    def provenance(self, path: Path) -> dict[str, Any]:
        """Provenance of a file of this kind; its rows are not read.

        Raises:
            UserError: As `read`, but for the values.
        """
        expected = f"{self.name}/{self.version}"
        if not path.exists():
            raise UserError(
                f"There is no {self.name} table here",
                where=f"File {path}",
                do="Check the path, or run the stage that writes it",
            )
        try:
            schema = pq.read_schema(path)
        except _BROKEN as error:
            raise _unreadable(path, error) from error
        metadata = schema.metadata or {}
        found = metadata.get(_TABLE, b"none").decode(errors="replace")
        if found != expected:
            raise UserError(
                "A file holds another table than expected",
                where=f"File {path}: {found} instead of {expected}",
                do="Pass the right file, or write it again with this version",
            )
        missing = [c.name for c in self.columns if c.name not in schema.names]
        twice = [c.name for c in self.columns if schema.names.count(c.name) > 1]
        wrong = [
            c.name
            for c in self.columns
            if c.name not in (*missing, *twice) and schema.field(c.name).type != c.type
        ]
        if missing or wrong or twice:
            raise UserError(
                "A table's columns are not those of its version",
                where=f"File {path}: missing {missing}, of another type {wrong}, twice {twice}",
                do="Write it again",
            )
        try:
            provenance = json.loads(metadata.get(_PROVENANCE, b"{}"))
        except (ValueError, RecursionError) as error:
            raise _unreadable(path, error) from error
        if not isinstance(provenance, dict):
            raise _unreadable(path, TypeError("its provenance is no JSON object"))
        return provenance


# What pyarrow raises on damaged files, by the place of the damage.
_BROKEN = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, MemoryError)


def _unreadable(path: Path, error: BaseException) -> UserError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return UserError(
        "A table cannot be read",
        where=f"File {path}: {reason}",
        do="Write it again; it is truncated, damaged or no Parquet file",
    )


def _has_null(values: pa.Array | pa.ChunkedArray) -> bool:
    """Whether a value is missing, inside lists and maps too."""
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    for chunk in chunks:
        if chunk.null_count:
            return True
        if pa.types.is_map(chunk.type):
            inner = [chunk.keys, chunk.items]
        elif pa.types.is_list(chunk.type):
            inner = [chunk.flatten()]
        elif pa.types.is_dictionary(chunk.type):
            inner = [chunk.dictionary]
        else:
            inner = []
        if any(map(_has_null, inner)):
            return True
    return False


def _array(values: Any, type: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if not isinstance(values, pa.Array | pa.ChunkedArray):
        return pa.array(values, type=type)
    if isinstance(values, pa.ChunkedArray) and pa.types.is_dictionary(type):
        values = values.unify_dictionaries()
    return values if values.type == type else values.cast(type)


def prepare() -> None:
    """Imports what writing imports, which fails once the interpreter is ending."""
    pa.array([""])


def name_in(path: Path) -> str | None:
    """Name and version ("calls/2") of the table in a file; None if it is none."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except _BROKEN:
        return None
    found = metadata.get(_TABLE)
    return None if found is None else found.decode(errors="replace")
