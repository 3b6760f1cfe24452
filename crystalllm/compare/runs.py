"""What a sandbox run left, as far as it is compared: its measured iterations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crystalllm import artifacts, tables
from crystalllm.errors import UserError
from crystalllm.sandbox.outcome import SUMMARY
from crystalllm.sandbox.setup import OUTCOME
from crystalllm.table import Table

# Bodies that a run goes through before it is measured, where its summary does not say.
_WARM_UP = 1
# Fewer iterations say nothing about how a duration varies.
MIN_ITERATIONS = 4
_CALL_COLUMNS = ("key", "kind", "group_desc", "group_identity", "transport")


@dataclass(frozen=True)
class Run:
    """One sandbox run.

    Args:
        folder: With summary.json and rank-R/.
        summary: What summary.json says.
        ranks: That ran, and left what they measured.
        first: First iteration that counts; those before warm up.
        last: Last iteration that counts: all ranks went through it.
        segments: `segments` of all ranks, in these iterations, with `taken_ns`: computation
            and the calls before it, as profiles have them.
        communication: `communication` of all ranks, in these iterations.
        iterations: `iterations` of all ranks, these.
        provenance: Of the tables of the lowest rank.
    """

    folder: Path
    summary: dict[str, Any]
    ranks: tuple[int, ...]
    first: int
    last: int
    segments: pd.DataFrame
    communication: pd.DataFrame
    iterations: pd.DataFrame
    provenance: dict[str, Any]

    @classmethod
    def read(cls, path: Path, *, warm_up: int | None = None) -> Run:
        """Reads a run.

        Args:
            path: Its folder, or that of a job whose last emulation it is.
            warm_up: Iterations to leave out; as the run's summary says by default.

        Raises:
            UserError: Nothing is there, files are damaged, or too few iterations were measured.
        """
        folder = run_folder(path)
        summary = artifacts.read_json(folder / SUMMARY)
        places = _rank_folders(folder)
        frames = {
            table.name: _concatenated(table, places)
            for table in (tables.SEGMENTS, tables.COMMUNICATION, tables.ITERATIONS)
        }
        segments = frames["segments"]
        segments = segments[segments["section"] == "body"]
        segments = segments.assign(taken_ns=segments["duration_ns"] + segments["call_ns"])
        if warm_up is None:
            said = summary.get("warm_up", _WARM_UP)
            warm_up = said if isinstance(said, int) and said >= 0 else _WARM_UP
        whole = _whole_iterations(segments, len(places))
        measured = [k for k in whole if k > warm_up]
        if len(measured) < MIN_ITERATIONS:
            raise UserError(
                "Too few iterations were measured to tell a deviation from noise",
                where=f"Folder {folder}: {len(whole)} whole iterations of all ranks, of which "
                f"{warm_up} warm up; status {summary.get('status', 'unknown')}",
                do=f"Run at least {MIN_ITERATIONS} more iterations than warm up, better ten",
            )
        first, last = min(measured), max(measured)
        return cls(
            folder=folder,
            summary=summary,
            ranks=tuple(places),
            first=first,
            last=last,
            segments=_within(segments, first, last),
            communication=_timed(_within(frames["communication"], first, last)),
            iterations=_within(frames["iterations"], first, last),
            provenance=tables.SEGMENTS.provenance(next(iter(places.values())) / "segments.parquet"),
        )

    @property
    def reservations(self) -> list[str]:
        """What its summary says against it: how it ended, and why it is not valid."""
        found = []
        if (status := self.summary.get("status", "ok")) != "ok":
            found.append(f"ended as {status}: only its whole iterations are compared")
        trust = self.summary.get("trust", {})
        if status == "ok" and not trust.get("valid", True):
            found.append(
                "is not valid: " + "; ".join(trust.get("why_not", ["its summary says so"]))
            )
        return found

    @property
    def num_iterations(self) -> int:
        return self.last - self.first + 1

    @cached_property
    def outcomes(self) -> dict[int, dict[str, Any]]:
        """By rank, what its outcome.json says; empty where there is none."""
        paths = {rank: self.folder / f"rank-{rank}" / OUTCOME for rank in self.ranks}
        return {r: artifacts.read_json(p) if p.exists() else {} for r, p in paths.items()}

    @cached_property
    def role_of(self) -> dict[int, int]:
        return {int(r): int(g["role"].iloc[0]) for r, g in self.segments.groupby("rank")}

    def iteration_ns(self, rank: int) -> float:
        """Median of the rank's iterations."""
        mine = self.iterations[self.iterations["rank"] == rank]
        return float(mine["duration_ns"].median())

    def segment_times(self, rank: int) -> tuple[pd.DataFrame, np.ndarray]:
        """The rank's segments of one body, and how long they took, calls before them included.

        Returns:
            Frame with lane and position, one row per segment; [segments, iterations] in ns.
        """
        mine = self.segments[self.segments["rank"] == rank]
        return by_iteration(mine, ["lane", "position"], "taken_ns")

    def calls(self, rank: int) -> pd.DataFrame:
        """The rank's communication, with `ordinal` on its lane in the iteration, from 0."""
        mine = self.communication[self.communication["rank"] == rank].sort_values("call")
        place = ["iteration", "lane"]
        return mine.assign(ordinal=mine.groupby(place, observed=True).cumcount())

    def call_times(self, rank: int, column: str) -> tuple[pd.DataFrame, np.ndarray]:
        """One column of the rank's calls.

        Returns:
            Frame with lane, ordinal, key, kind, group_desc, group_identity and transport, one
            row per call of an iteration; [calls, iterations] in ns.
        """
        return by_iteration(self.calls(rank), ["lane", "ordinal", *_CALL_COLUMNS], column)

    def places(self, rank: int) -> dict[tuple[str, int], str]:
        """By lane and position, between which calls a segment of the rank lies, for people."""
        segments = self.segments[self.segments["rank"] == rank]
        segments = segments[segments["iteration"] == self.last]
        calls = self.calls(rank)
        found = {}
        for lane, mine in segments.groupby("lane", observed=True):
            here = calls[(calls["lane"] == lane) & (calls["iteration"] == self.last)]
            arrivals = here["arrival_ns"].to_numpy()
            names = [f"{c.kind} {c.group_desc} ({c.ordinal})" for c in here.itertuples()]
            at = np.searchsorted(arrivals, mine["start_ns"].to_numpy(), side="right")
            for position, i in zip(mine["position"], at, strict=True):
                before = names[i - 1] if i else "the begin"
                after = names[i] if i < len(names) else "the end"
                found[str(lane), int(position)] = f"{before} to {after}"
        return found


def run_folder(path: Path) -> Path:
    """The folder of a run: `path`, or `path`/emulate.

    Raises:
        UserError: Neither is one.
    """
    for folder in (path, path / "emulate"):
        if (folder / SUMMARY).exists() and any(folder.glob("rank-*")):
            return folder
    raise UserError(
        "There is no run of sandbox ranks here",
        where=f"Folder {path}: neither {SUMMARY} and rank-R, nor such in emulate",
        do="Pass results/<job> or the folder of a run, or run: python -m crystalllm emulate",
    )


def _rank_folders(folder: Path) -> dict[int, Path]:
    """Those with measured segments, by rank."""
    found = {}
    for path in folder.glob("rank-*"):
        number = path.name.removeprefix("rank-")
        if number.isdecimal() and (path / "segments.parquet").exists():
            found[int(number)] = path
    if not found:
        raise UserError(
            "No rank of this run left what it measured",
            where=f"Folder {folder}: no rank-R/segments.parquet",
            do="See summary.json for how the run ended, and run it again",
        )
    return dict(sorted(found.items()))


def _concatenated(table: Table, places: dict[int, Path]) -> pd.DataFrame:
    frames = []
    for rank, place in places.items():
        path = place / f"{table.name}.parquet"
        frame = table.read(path)[0].to_pandas()
        if set(frame["rank"]) - {rank}:
            raise UserError(
                "A table is of another rank than its folder",
                where=f"File {path}: ranks {sorted(set(frame['rank']))[:5]}",
                do="Run it again",
            )
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _whole_iterations(segments: pd.DataFrame, num_ranks: int) -> list[int]:
    """Those of which every rank has all its segments; a run that ended early lacks some."""
    counts = segments.groupby(["iteration", "rank"]).size().unstack(fill_value=0)
    if counts.empty or len(counts.columns) < num_ranks:
        return []
    is_whole = (counts == counts.max()).all(axis=1)
    return [int(k) for k in counts.index[is_whole]]


def _within(frame: pd.DataFrame, first: int, last: int) -> pd.DataFrame:
    return frame[frame["iteration"].between(first, last)].reset_index(drop=True)


def _timed(calls: pd.DataFrame) -> pd.DataFrame:
    """Adds transfer times of collectives whose members all ran here and talked for real.

    Nobody times these, but all members are on one clock: a transfer takes from the last
    arrival until the first member goes on that had to wait for it.
    """
    is_real = (calls["transport"] == "real") & ~calls["kind"].isin(["send", "recv"])
    real = calls[is_real].sort_values(["rank", "call"]).astype({"group_identity": str})
    place = ["iteration", "group_identity"]
    real["ordinal"] = real.groupby(["rank", *place]).cumcount()
    had_to_wait = real["end_ns"].where(real["waited_ns"] > 0)
    of_call = real.assign(had_to_wait=had_to_wait).groupby([*place, "ordinal"])
    transfer = of_call["had_to_wait"].transform("min") - of_call["arrival_ns"].transform("max")
    is_whole = of_call["rank"].transform("nunique") == real["group_size"]
    calls = calls.copy()
    known = transfer[is_whole & (transfer >= 0)]
    calls.loc[known.index, "transfer_ns"] = known.astype(int)
    return calls


def by_iteration(
    rows: pd.DataFrame, names: list[str], column: str
) -> tuple[pd.DataFrame, np.ndarray]:
    """Frame of the different `names`, and [rows, iterations] of a column.

    Rows that some iteration lacks are left out.
    """
    rows = rows.astype({name: str for name in names if rows[name].dtype == "category"})
    wide = rows.pivot_table(
        index=names, columns="iteration", values=column, aggfunc="first", observed=True
    ).dropna()
    return wide.index.to_frame(index=False), wide.to_numpy(float)
