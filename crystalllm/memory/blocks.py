"""The blocks of a rank's tensors: when they were taken and given back, and what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "other",
)
_CODE = {name: code for code, name in enumerate(CATEGORIES)}
# As in nccl/core/ledger.h.
PHASES = ("other", "forward", "backward", "optimizer", "communication")
_RECOGNISED = ("", "communication", "optimizer", "gradients", "parameters")
_BY_PHASE = {
    "forward": "activations",
    "backward": "activations",
    "optimizer": "optimizer",
    "communication": "communication",
    "other": "other",
}


@dataclass(frozen=True, eq=False)
class Blocks:
    """Arrays with one element a block, in the order in which blocks were taken.

    Changes (a block taken, or given back) have ordinals from 0.

    Args:
        bytes: Of each block.
        taken: The change that took it.
        given: The change that gave it back; -1 if it is held.
        taken_ns: When, from the run's start.
        given_ns: The same of the end; not meaningful if it is held.
        taken_iteration: The iteration in which it was taken.
        given_iteration: The same of the end; not meaningful if it is held.
        owner: Number of the parameter or state that it belongs to; -1 without one.
        is_shared: It belongs to others besides (a bucket of gradients).
        category: Index into CATEGORIES.
        phase: Index into PHASES, of the thread that took it.
        by_library: Taken by the communication library itself.
    """

    bytes: np.ndarray
    taken: np.ndarray
    given: np.ndarray
    taken_ns: np.ndarray
    given_ns: np.ndarray
    taken_iteration: np.ndarray
    given_iteration: np.ndarray
    owner: np.ndarray
    is_shared: np.ndarray
    category: np.ndarray
    phase: np.ndarray
    by_library: np.ndarray

    @classmethod
    def of_account(
        cls,
        columns: dict[str, np.ndarray],
        *,
        epoch_ns: int,
        iteration_of: Callable[[np.ndarray], Any],
    ) -> Blocks:
        """From the columns of the native account (`memory.block_columns`)."""
        return cls(
            bytes=columns["bytes"],
            taken=columns["taken"],
            given=columns["given"],
            taken_ns=columns["taken_ns"] - epoch_ns,
            given_ns=columns["given_ns"] - epoch_ns,
            taken_iteration=np.asarray(iteration_of(columns["taken_mark"]), np.int32),
            given_iteration=np.asarray(iteration_of(columns["given_mark"]), np.int32),
            owner=columns["owner"],
            is_shared=columns["is_shared"],
            category=_categories(columns["as"], columns["phase"], columns["by_library"]),
            phase=columns["phase"],
            by_library=columns["by_library"],
        )

    @cached_property
    def num_changes(self) -> int:
        return len(self.taken) + int((self.given >= 0).sum())

    @cached_property
    def changed(self) -> np.ndarray:
        """The block that each change took or gave back, (num_changes,)."""
        blocks = np.empty(self.num_changes, np.int64)
        blocks[self.taken] = np.arange(len(self.taken))
        is_given = self.given >= 0
        blocks[self.given[is_given]] = np.flatnonzero(is_given)
        return blocks

    @cached_property
    def takes(self) -> np.ndarray:
        """Whether each change took a block, (num_changes,)."""
        takes = np.zeros(self.num_changes, bool)
        takes[self.taken] = True
        return takes

    @cached_property
    def change_bytes(self) -> np.ndarray:
        """Bytes of each change, above zero if taken, (num_changes,)."""
        return np.where(self.takes, 1, -1) * self.bytes[self.changed]

    @cached_property
    def total_bytes(self) -> np.ndarray:
        """Bytes that are held after each change, (num_changes,)."""
        return np.cumsum(self.change_bytes)

    @cached_property
    def iterations(self) -> np.ndarray:
        """The iteration of each change, (num_changes,)."""
        return self._of_change(self.taken_iteration, self.given_iteration)

    @cached_property
    def at_ns(self) -> np.ndarray:
        """The time of each change, (num_changes,)."""
        return self._of_change(self.taken_ns, self.given_ns)

    def held_after(self, change: int) -> np.ndarray:
        """Indices of the blocks that are held after a change; -1 is before all of them."""
        return np.flatnonzero((self.taken <= change) & ((self.given < 0) | (self.given > change)))

    def columns(self, rank: int) -> dict[str, Any]:
        """Columns of the table `memory`."""
        blocks = self.changed
        return {
            "rank": np.full(self.num_changes, rank, np.int32),
            "event": np.arange(self.num_changes),
            "iteration": self.iterations,
            "at_ns": self.at_ns,
            "block": blocks,
            "category": _text(self.category[blocks], CATEGORIES),
            "phase": _text(self.phase[blocks], PHASES),
            "by_library": self.by_library[blocks],
            "bytes": self.change_bytes,
            "total_bytes": self.total_bytes,
        }

    def _of_change(self, taken: np.ndarray, given: np.ndarray) -> np.ndarray:
        return np.where(self.takes, taken[self.changed], given[self.changed])


def _categories(recognised: np.ndarray, phase: np.ndarray, by_library: np.ndarray) -> np.ndarray:
    by_phase = np.array([_CODE[_BY_PHASE[name]] for name in PHASES], np.int8)[phase]
    by_phase = np.where(by_library, np.int8(_CODE["communication"]), by_phase)
    names = [_CODE.get(name, -1) for name in _RECOGNISED]
    known = np.array(names, np.int8)[recognised]
    return np.where(known >= 0, known, by_phase)


def _text(codes: np.ndarray, names: tuple[str, ...]) -> pa.DictionaryArray:
    """Only names that occur, in the order of `names`, so that equal content is equal bytes."""
    present, small = np.unique(codes, return_inverse=True)
    return pa.DictionaryArray.from_arrays(
        pa.array(small.astype(np.int32)), pa.array([names[code] for code in present], pa.string())
    )
