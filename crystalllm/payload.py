"""The payload book: what other ranks really sent, where that steers the program.

Sizes, seeds, shapes, pickled objects and store keys must be what the peer
would have sent. An entry is what one rank contributed to one call, under a key
that every rank of the group can form by itself: the group's identity, the
call's ordinal in it, and the contributing rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from crystalllm import tables


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contribution.

    Args:
        group: Identity of the group (`Group.identity`), "" for a store key.
        seq: Ordinal of the collective in its group; of a send among those of
            its ordered pair.
        rank: Global rank that contributed it.
        value: The bytes of the contributed tensor.
        dtype: Element type in torch's spelling, such as "int64".
        peer: Global rank that a send went to, -1 in a collective.
        iteration: -1 if `seq` counts from the group's creation, else the
            iteration of the period from whose mark it counts.
        splits: Elements for each peer of an uneven all_to_all.
        store_key: Key in the rendezvous store.
    """

    group: str = ""
    seq: int = 0
    rank: int = -1
    value: bytes = b""
    dtype: str = "uint8"
    peer: int = -1
    iteration: int = -1
    splits: tuple[int, ...] = ()
    store_key: str = ""


@dataclass
class PayloadBook:
    """Entries in the order in which they were added.

    Args:
        prologue_marks: Iteration marks before the period begins.
        period: Iterations after which the calls repeat; 0 if unknown.
    """

    entries: list[Entry] = field(default_factory=list)
    prologue_marks: int = 0
    period: int = 0

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    def save(self, path: Path) -> None:
        rows = sorted(
            self.entries,
            key=lambda e: (e.group, e.iteration, e.seq, e.rank, e.peer, e.store_key),
        )
        columns: dict[str, list[Any]] = {
            column.name: [
                list(e.splits) if column.name == "splits" else getattr(e, column.name) for e in rows
            ]
            for column in tables.PAYLOADS.columns
        }
        tables.PAYLOADS.write(
            path,
            columns,
            provenance={"prologue_marks": self.prologue_marks, "period": self.period},
        )

    @classmethod
    def load(cls, path: Path) -> PayloadBook:
        """Reads a book. Values stay bytes: nothing is unpickled here."""
        table, provenance = tables.PAYLOADS.read(path)
        entries = [Entry(**{**row, "splits": tuple(row["splits"])}) for row in table.to_pylist()]
        return cls(
            entries,
            prologue_marks=provenance.get("prologue_marks", 0),
            period=provenance.get("period", 0),
        )

    def serve(self, module: ModuleType, world: Any) -> None:
        """Makes the entries what `world`'s virtual peers send."""
        world.set_period(self.prologue_marks, self.period)
        for e in self.entries:
            if e.store_key:
                module.add_store_payload(e.store_key, e.value)
            else:
                payload = module.Payload(e.dtype, e.value, list(e.splits))
                world.add_payload(e.group, e.iteration, e.seq, e.rank, e.peer, payload)
