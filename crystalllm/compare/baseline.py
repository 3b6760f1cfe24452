"""What a run is held against: a planning profile, the run's other ranks, an imported real run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from crystalllm import tables
from crystalllm.compare.runs import Run, by_iteration
from crystalllm.compare.statistics import DECILE, Reference, against
from crystalllm.placement import Placement
from crystalllm.planning import profile
from crystalllm.replay.durations import Duration, DurationTable
from crystalllm.replay.program import Capture

ITEM_COLUMNS = ("what", "lane", "position", "key", "group_identity", "per_iteration", "positions")


@dataclass(frozen=True)
class Items:
    """What of one rank is compared: its segments, or its transfers.

    Args:
        rows: One row per item: what (segment or transfer), lane and position of a segment (the
            first of several), key and group of a transfer, per_iteration (how often it occurs),
            positions (all segments that it is, of `lane`).
        ns: [items, iterations], what each took.
        reference: What it took there.
        num_unknown: Others of which the reference says nothing.
    """

    rows: pd.DataFrame
    ns: np.ndarray
    reference: Reference
    num_unknown: int = 0


class Baseline(Protocol):
    """Something that a rank of a run can be held against."""

    name: str
    notes: Sequence[str]

    def place(self, captured: Capture) -> None:
        """Tells how groups lie on the nodes."""

    def segments(self, run: Run, rank: int) -> Items: ...

    def transfers(self, run: Run, rank: int) -> Items: ...


class Profile:
    """A planning profile.

    Args:
        durations: The profile.
        name: What to call it.
    """

    def __init__(self, durations: DurationTable, name: str) -> None:
        self.durations, self.name = durations, name
        # With which the world is replayed.
        self.replayed = durations
        self.placements: dict[str, str] = {}
        self.notes: list[str] = []

    @classmethod
    def read(cls, path: Path) -> Profile:
        """From profile.parquet; where planning left its slices beside it, from all passes.

        The profile itself is of the last pass. Passes repeat the same computation, and how
        they differ from each other is how an unchanged run may differ from them.
        """
        found = cls(DurationTable.load(path), f"profile {path}")
        slices = path.with_name("slices.parquet")
        if slices.exists():
            measured = tables.SLICES.read(slices)[0].to_pandas()
            of_all = profile.durations(measured)
            found.durations = profile.merged(found.durations, of_all)
            passes = measured["pass"].nunique()
            found.name += f", all {passes} passes" if passes > 1 else ""
        return found

    def place(self, captured: Capture) -> None:
        node_of = captured.ranks["node"].to_dict()
        for identity, members in captured.groups["members"].items():
            self.placements[str(identity)] = str(Placement.of(members, node_of))

    def segments(self, run: Run, rank: int) -> Items:
        rows, ns = run.segment_times(rank)
        role = run.role_of[rank]
        found = []
        for lane, position in zip(rows["lane"], rows["position"], strict=True):
            d = self.durations.segments.get((role, str(lane), "body", int(position)))
            # While capturing, several ranks computed at once.
            found.append(d if d is not None and d.source != "captured" else None)
        return _items(_segment_rows(rows), ns, found)

    def transfers(self, run: Run, rank: int) -> Items:
        rows, ns = measured_transfers(run, rank)
        found = []
        for key, group in zip(rows["key"], rows["group_identity"], strict=True):
            at = key, self.placements.get(group, "")
            d = self.durations.transfers.get(at) or self.durations.transfers.get(key)
            # A modelled time has no spread, and how far a model is off is no anomaly; one
            # that depends on split sizes has no one median.
            is_measured = d is not None and d.source == "measured" and not d.choices
            found.append(d if is_measured else None)
        return _items(rows, ns, found)


class Peers:
    """Other ranks of the same role in the run, at least two: one alone might be the odd one."""

    MIN_PEERS = 2

    def __init__(self, run: Run) -> None:
        self.times = {rank: run.segment_times(rank) for rank in run.ranks}
        self.ranks: dict[int, list[int]] = {}
        for rank, role in run.role_of.items():
            self.ranks.setdefault(role, []).append(rank)

    def has(self, run: Run, rank: int) -> bool:
        """Whether the rank has enough of them."""
        return len(self.ranks[run.role_of[rank]]) > self.MIN_PEERS

    def segments(self, run: Run, rank: int) -> Items:
        rows, ns = self.times[rank]
        others = [self.times[r] for r in self.ranks[run.role_of[rank]] if r != rank]
        wide = [
            pd.DataFrame(times, index=pd.MultiIndex.from_frame(theirs)) for theirs, times in others
        ]
        joined = pd.concat(wide, axis=1, join="inner").reindex(pd.MultiIndex.from_frame(rows))
        known = joined.notna().all(axis=1).to_numpy()
        theirs = joined[known].to_numpy(float)
        if known.any():  # each peer, and each of its iterations, has a speed of its own
            theirs = theirs / np.exp(against(theirs, np.median(theirs, axis=1))[1])
        reference = Reference.of_samples(list(theirs))
        return Items(_segment_rows(rows[known]), ns[known], reference, int((~known).sum()))


def measured_transfers(run: Run, rank: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Transfers among real ranks by key and group, each iteration's median; others are replayed.

    Returns:
        Rows as of `Items`; [rows, iterations] in ns.
    """
    calls = run.calls(rank)
    calls = calls[calls["transport"].isin(["mixed", "real"]) & (calls["transfer_ns"] >= 0)]
    names = ["key", "group_identity"]
    calls = calls.astype(dict.fromkeys(names, str))
    medians = calls.groupby([*names, "iteration"], as_index=False)["transfer_ns"].agg(
        transfer_ns="median", per_iteration="size"
    )
    rows, ns = by_iteration(medians, names, "transfer_ns")
    counts, often = by_iteration(medians, names, "per_iteration")
    assert counts.equals(rows)
    return _complete(rows.assign(what="transfer", per_iteration=_medians(often))), ns


def nothing() -> Items:
    """No items."""
    rows = pd.DataFrame({name: [] for name in ITEM_COLUMNS})
    return Items(rows, np.zeros((0, 0)), Reference(*[np.zeros(0)] * 4))


def _segment_rows(rows: pd.DataFrame) -> pd.DataFrame:
    positions = [(int(p),) for p in rows["position"]]
    return _complete(rows.assign(what="segment", per_iteration=1.0, positions=positions))


def _complete(rows: pd.DataFrame) -> pd.DataFrame:
    usual: dict[str, Any] = {
        "lane": "",
        "position": -1,
        "key": "",
        "group_identity": "",
        "positions": (),
    }
    for name, value in usual.items():
        if name not in rows:
            rows = rows.assign(**{name: [value] * len(rows)})
    return rows[list(ITEM_COLUMNS)].reset_index(drop=True)


def _items(rows: pd.DataFrame, ns: np.ndarray, found: Sequence[Duration | None]) -> Items:
    """Items with their durations in a table; None where it has none."""
    known = np.array([d is not None for d in found], bool)
    there = [d for d in found if d is not None]
    deciles = [_deciles(d) for d in there]
    low, high = np.array(deciles, float).reshape(-1, 2).T
    median, count = (np.array([getattr(d, n) for d in there], float) for n in ("ns", "count"))
    reference = Reference(median, low, high, count)
    return Items(rows[known].reset_index(drop=True), ns[known], reference, int((~known).sum()))


def _deciles(d: Duration) -> tuple[float, float]:
    """As measured, or those of the lognormal, or the median itself where neither is known."""
    if 0 <= d.low_ns <= d.high_ns:
        return min(d.low_ns, d.ns), max(d.high_ns, d.ns)
    return d.ns / math.exp(DECILE * d.sigma), d.ns * math.exp(DECILE * d.sigma)


def _medians(values: np.ndarray) -> np.ndarray:
    return np.median(values, axis=1) if values.size else np.zeros(len(values))
