"""The payload book: what other ranks really sent, where that steers the program.

Sizes, seeds, shapes, pickled objects and store keys must be what the peer
would have sent. An entry is what one rank contributed to one call, under a key
that every rank of the group can form by itself: the group's identity, the
call's ordinal in it, and the contributing rank. A rank that was not captured
speaks through the captured one that represents it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from crystalllm import tables
from crystalllm.errors import UserError
from crystalllm.layout import Axis, Layout
from crystalllm.records import group_identity
from crystalllm.sharing import restricted


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
        splits: Elements for each peer of an uneven all_to_all.
        store_key: Key in the rendezvous store.
        body_end: Ordinal of the first call of the group, or pair, after the
            repeated iterations.
        per_period: Calls of the group, or pair, in one period; 0 if unknown.
    """

    group: str = ""
    seq: int = 0
    rank: int = -1
    value: bytes = b""
    dtype: str = "uint8"
    peer: int = -1
    splits: tuple[int, ...] = ()
    store_key: str = ""
    body_end: int = 0
    per_period: int = 0


@dataclass
class PayloadBook:
    """Entries in the order in which they were added.

    Args:
        period: Iteration marks after which the calls repeat; 0 if unknown.
        num_marks: Iteration marks of the run that the entries are from.
        iterations: That it was told to run; 0 if unknown.
        layout: How ranks and groups move; None if every rank was captured.
        representatives: By rank, the captured one that speaks for it.
    """

    entries: list[Entry] = field(default_factory=list)
    period: int = 0
    num_marks: int = 0
    iterations: int = 0
    layout: Layout | None = None
    representatives: Sequence[int] = ()

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    def save(self, path: Path) -> None:
        rows = sorted(self.entries, key=lambda e: (e.group, e.seq, e.rank, e.peer, e.store_key))
        columns: dict[str, list[Any]] = {
            column.name: [getattr(e, column.name) for e in rows]
            for column in tables.PAYLOADS.columns
        }
        axes = [[a.name, a.size, a.stride] for a in self.layout.axes] if self.layout else None
        tables.PAYLOADS.write(
            path,
            columns,
            provenance={
                "period": self.period,
                "num_marks": self.num_marks,
                "iterations": self.iterations,
                "layout": axes,
                "representatives": list(self.representatives),
            },
        )

    @classmethod
    def load(cls, path: Path) -> PayloadBook:
        """Reads a book. Values stay bytes: nothing is unpickled here.

        Raises:
            UserError: It cannot be read, or is a stranger's and could run code.
        """
        if restricted.is_untrusted(path.parent):
            restricted.check_table(path)
        table, provenance = tables.PAYLOADS.read(path)
        entries = [Entry(**{**row, "splits": tuple(row["splits"])}) for row in table.to_pylist()]
        axes = provenance.get("layout")
        return cls(
            entries,
            period=provenance.get("period", 0),
            num_marks=provenance.get("num_marks", 0),
            iterations=provenance.get("iterations", 0),
            layout=Layout(tuple(Axis(*a) for a in axes)) if axes is not None else None,
            representatives=tuple(provenance.get("representatives", ())),
        )

    def extra_periods(self, iterations: int) -> int:
        """How many periods a run of so many iterations has more than the captured one.

        Raises:
            UserError: No whole number, so that iterations would not line up.
        """
        if not self.iterations or iterations == self.iterations:
            return 0
        # Skipped optimizer steps before the body cost a mark or two.
        marks_per_iteration = max(1, round(self.num_marks / self.iterations))
        extra = (iterations - self.iterations) * marks_per_iteration
        if not self.period or extra % self.period:
            raise UserError(
                "The payload book has no values for a run of this length",
                where=f"{iterations} iterations; captured with {self.iterations}, which set "
                f"{self.num_marks} marks, period {self.period} marks",
                do="Choose iterations that differ from the captured ones by whole periods",
            )
        return extra // self.period

    def serve(self, module: ModuleType, world: Any, *, extra_periods: int = 0) -> None:
        """Makes the entries what `world`'s virtual peers send.

        Args:
            module: The native extension.
            world: Whose peers.
            extra_periods: How many periods this run is longer (or, negative,
                shorter) than the one that the book is from.
        """
        for e in self.entries:
            if e.store_key:
                module.add_store_payload(e.store_key, e.value)
        reader = _Reader(self, extra_periods)

        def ask(group: Any, seq: int, ranks: list[int], peer: int, key: str) -> None:
            for rank in ranks:
                entry = reader.find(group, seq, rank, peer)
                if entry is not None:
                    value = module.Payload(entry.dtype, entry.value, list(entry.splits))
                    world.add_payload(group.identity, seq, rank, peer, value)

        world.set_payload_source(ask, is_live=False)


class _Reader:
    """Finds what a rank contributed to a call, over runs of other lengths and by symmetry."""

    def __init__(self, book: PayloadBook, extra_periods: int) -> None:
        self.book, self.extra = book, extra_periods
        self.by_address = {(e.group, e.seq, e.rank, e.peer): e for e in book.entries}
        # The counter of a group is one for all members, that of a pair the sender's.
        self.counters = {
            (e.group, e.rank if e.peer >= 0 else -1, e.peer): (e.body_end, e.per_period)
            for e in book.entries
            if e.per_period
        }

    def find(self, group: Any, seq: int, rank: int, peer: int) -> Entry | None:
        found = self._entry(group.identity, seq, rank, peer)
        book = self.book
        if found is not None or book.layout is None or rank >= len(book.representatives):
            return found
        speaker = book.representatives[rank]
        moved = book.layout.moved(group.members, rank, speaker, peer)
        if speaker == rank or moved is None:
            return None
        members, their_peer = moved
        return self._entry(group_identity(members, group.creation), seq, speaker, their_peer)

    def _entry(self, identity: str, seq: int, rank: int, peer: int) -> Entry | None:
        counter = self.counters.get((identity, rank if peer >= 0 else -1, peer))
        if counter is not None:
            seq = _in_captured_run(seq, *counter, extra_periods=self.extra)
        return self.by_address.get((identity, seq, rank, peer))


def _in_captured_run(seq: int, body_end: int, per_period: int, *, extra_periods: int) -> int:
    """The call of the captured run that call `seq` of a longer or shorter one corresponds to."""
    added = extra_periods * per_period
    if added < 0:
        return seq if seq < body_end + added else seq - added
    if seq < body_end:
        return seq
    if seq < body_end + added:
        return body_end - per_period + (seq - body_end) % per_period
    return seq - added
