"""A real run's Kineto traces as a baseline: computation between calls, and transfers.

On a CPU a trace does not say what is computed between two communication calls, but when the
calls were made and ended. So an item is all computation between two calls of one host thread.
It is compared where the thread did nothing else in the sandbox run, so that the time between
the calls is the computation: not where it waited for another call meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crystalllm import artifacts, tables
from crystalllm.compare.baseline import ITEM_COLUMNS, Items, nothing
from crystalllm.compare.runs import Run, by_iteration
from crystalllm.compare.statistics import Reference
from crystalllm.errors import UserError
from crystalllm.records import element_size
from crystalllm.replay.program import Capture

# What of the time between two calls may be something else than segments: stamps, waits that
# found their call ended.
_OTHER_SHARE, _OTHER_NS = 0.1, 20_000
# What may have been computed between the call before and its wait, hidden behind the transfer:
# how much of it a trace counts to the time after the transfer is not known.
_HIDDEN_SHARE, _HIDDEN_NS = 0.25, 50_000
_FORM = ("kind", "group_size", "bytes")


class Imported:
    """Computation between calls, and transfers, of imported traces.

    Args:
        folder: That `import` wrote.

    Raises:
        UserError: It is damaged, or of a GPU: kernels say what was computed there, not calls.
    """

    def __init__(self, folder: Path) -> None:
        folder = artifacts.capture_folder(folder)
        self.name = f"imported traces {folder}"
        self.notes = ["the imported run was timed under a profiler, which slows host threads down"]
        structure = artifacts.read_json(folder / artifacts.STRUCTURE)
        if structure.get("source") != "kineto":
            raise UserError(
                "A capture's times are no baseline: several ranks computed at once",
                where=f"Folder {folder}",
                do="Pass planning's profile.parquet, or traces of a real run that "
                "python -m crystalllm import took in",
            )
        events, _ = tables.EVENTS.read(folder / "events.parquet", columns=["lane"])
        lanes = {str(lane) for lane in events["lane"].combine_chunks().dictionary.to_pylist()}
        if any(lane.startswith("stream:") for lane in lanes):
            raise UserError(
                "These traces are of a run on GPUs, and sandbox ranks on a CPU have no kernels",
                where=f"Folder {folder}, lanes {', '.join(sorted(lanes)[:4])}",
                do="Pass traces of a run on CPUs (gloo), or planning's profile.parquet",
            )
        calls = tables.CALLS.read(folder / "calls.parquet")[0].to_pandas()
        times = tables.CALL_TIMES.read(folder / "call_times.parquet")[0].to_pandas()
        elements = calls["in_elements"].where(calls["in_elements"] > 0, calls["out_elements"])
        calls["bytes"] = elements * calls["dtype"].astype(str).map(element_size)
        calls["kind"] = calls["kind"].astype(str)
        self.calls = _with_last_arrival(calls.merge(times, on=["rank", "call"]))

    def place(self, captured: Capture) -> None:
        """Calls are compared one by one, each with itself: where its group lies is inside."""

    def segments(self, run: Run, rank: int) -> Items:
        rows, ns = _gaps(run, rank)
        samples = {}
        for lane, ours in _forms(run, rank).items():
            bodies = self._bodies(run, rank, lane, ours)
            arrival, release = (
                np.array([body[name] for body in bodies]) for name in ("arrival_ns", "release_ns")
            )
            between = arrival[:, 1:] - release[:, :-1]
            samples |= {(lane, j + 1): between[:, j] for j in range(between.shape[1])}
            follows = np.diff([body["call"].iloc[0] for body in bodies]) == len(ours)
            if follows.any():
                samples[lane, 0] = (arrival[1:, 0] - release[:-1, -1])[follows]
        known = [(row.lane, row.ordinal) in samples for row in rows.itertuples()]
        rows, ns, num_unknown = rows[known], ns[known], len(rows) - sum(known)
        if rows.empty:
            return nothing()
        there = [samples[row.lane, row.ordinal] for row in rows.itertuples()]
        rows = rows.assign(what="segment", key="", group_identity="", per_iteration=1.0)
        return Items(
            rows[list(ITEM_COLUMNS)].reset_index(drop=True),
            ns,
            Reference.of_samples(there),
            num_unknown,
        )

    def transfers(self, run: Run, rank: int) -> Items:
        """Calls among real ranks against the time from the last arrival to the end."""
        found: list[tuple[Any, ...]] = []
        measured, there = [], []
        num_unknown = 0
        for lane, ours in _forms(run, rank).items():
            rows, ns = run.call_times(rank, "transfer_ns")
            here = (rows["lane"] == lane).to_numpy()
            bodies = self._bodies(run, rank, lane, ours)
            for row, times in zip(rows[here].itertuples(), ns[here], strict=True):
                if row.transport not in ("mixed", "real") or (times < 0).any():
                    continue
                last = np.array([body["last_arrival_ns"].iloc[row.ordinal] for body in bodies])
                if (last < 0).any():
                    num_unknown += 1
                    continue
                ends = np.array([body["release_ns"].iloc[row.ordinal] for body in bodies])
                found.append(("transfer", lane, row.ordinal, row.key, row.group_identity, 1.0, ()))
                measured.append(times)
                there.append(np.maximum(ends - last, 0))
        if not found:
            return nothing()
        rows = pd.DataFrame(found, columns=list(ITEM_COLUMNS))
        reference = Reference.of_samples(there)
        return Items(rows, np.array(measured), reference, num_unknown)

    def _bodies(self, run: Run, rank: int, lane: str, ours: Sequence[Any]) -> list[pd.DataFrame]:
        """The calls of each iteration in the traces: where the sequence of a body occurs."""
        theirs = self.calls[self.calls["rank"] == rank]
        if theirs.empty:
            raise UserError(
                f"The imported traces have no rank {rank}",
                where=f"{self.name}: ranks {sorted(set(self.calls['rank']))[:8]}",
                do="Import the traces of the ranks that ran as sandbox ranks",
            )
        streams = dict.fromkeys(theirs["stream"])
        number = _lanes(run, rank).index(lane)
        if number < len(streams):
            theirs = theirs[theirs["stream"] == list(streams)[number]]
            begins = _occurrences(
                [tuple(r) for r in theirs[list(_FORM)].itertuples(index=False)],
                theirs["mark"].to_numpy(),
                ours,
            )
            if len(begins) > 1:
                return [theirs.iloc[b : b + len(ours)] for b in begins]
        raise UserError(
            "The imported traces are not of this program: a body's calls do not occur in them",
            where=f"{self.name}, rank {rank}, thread {lane}: looked for {len(ours)} calls, "
            f"beginning with {ours[0][0]} of {ours[0][2]} bytes among {ours[0][1]} ranks",
            do="Import traces of the same program and layout, with at least two iterations",
        )


def _with_last_arrival(calls: pd.DataFrame) -> pd.DataFrame:
    """Adds last_arrival_ns of the call's group; -1 where not all members are in the traces."""
    place = ["group_identity", "seq", "kind"]
    of_call = calls.groupby(place, observed=True)
    is_whole = (of_call["rank"].transform("nunique") == calls["group_size"]) & ~calls["kind"].isin(
        ["send", "recv"]
    )
    return calls.assign(
        last_arrival_ns=of_call["arrival_ns"].transform("max").where(is_whole, -1)
    ).sort_values(["rank", "call"])


def _lanes(run: Run, rank: int) -> list[str]:
    """Threads of a rank by their first call."""
    calls = run.calls(rank)
    return [str(lane) for lane in dict.fromkeys(calls["lane"])]


def _forms(run: Run, rank: int) -> dict[str, list[tuple[Any, ...]]]:
    """By thread, the calls of one iteration as far as traces tell them."""
    calls = run.calls(rank)
    calls = calls[calls["iteration"] == run.last].astype({"kind": str, "lane": str})
    return {
        str(lane): [tuple(r) for r in mine[list(_FORM)].itertuples(index=False)]
        for lane, mine in calls.groupby("lane", sort=False)
    }


def _occurrences(
    theirs: Sequence[tuple[Any, ...]], marks: np.ndarray, ours: Sequence[tuple[Any, ...]]
) -> list[int]:
    """Where the sequence `ours` begins in `theirs`, once per iteration.

    Iterations begin where the marks of the traces have them; where marks are set elsewhere in
    the program (a profiler's step, say), all by the same number of calls earlier or later.
    """
    size = len(ours)
    first = [i for i in range(len(theirs)) if i == 0 or marks[i] != marks[i - 1]]
    best: list[int] = []
    for shift in sorted(range(-size + 1, size), key=abs):
        begins: list[int] = []
        for at in (i + shift for i in first):
            is_free = not begins or at >= begins[-1] + size
            if at >= 0 and is_free and list(theirs[at : at + size]) == list(ours):
                begins.append(at)
        if len(begins) > len(best):
            best = begins
    return best


def _gaps(run: Run, rank: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Computation between two calls of a thread, where it did little else.

    That of a body before its first call and after its last one is one gap, the 0th, since
    bodies follow each other.

    Returns:
        Frame with lane, ordinal (of the call after), position (of its first segment) and
        positions; [gaps, iterations] in ns.
    """
    segments = run.segments[run.segments["rank"] == rank].astype({"lane": str})
    calls = run.calls(rank).astype({"lane": str})
    rows = []
    for lane, of_lane in segments.groupby("lane"):
        before = None  # when the thread went on after the last call of the body before
        for iteration, mine in of_lane.groupby("iteration"):
            here = calls[(calls["lane"] == lane) & (calls["iteration"] == iteration)]
            arrival = here["arrival_ns"].to_numpy()
            if not len(arrival):
                continue
            # After its call the program goes on at the end of its wait, or at once.
            went_on = np.maximum(here["end_ns"].to_numpy(), arrival)
            start = mine["start_ns"].to_numpy()
            # What lies between a call and its wait is hidden behind the transfer.
            gap = np.searchsorted(arrival, start, side="right")
            is_hidden = start < went_on[np.maximum(gap - 1, 0)]
            is_hidden &= gap > 0
            gap %= len(arrival)
            wall = arrival[1:] - went_on[:-1]
            walls = [np.nan if before is None else arrival[0] - before, *wall]
            before = went_on[-1]
            for ordinal, wall_ns in enumerate(walls):
                inside = mine[(gap == ordinal) & ~is_hidden]
                hidden = mine.loc[(gap == ordinal) & is_hidden, "duration_ns"].sum()
                computed = inside["duration_ns"].sum()
                if inside.empty:
                    continue
                rows.append(
                    {
                        "lane": lane,
                        "iteration": iteration,
                        "ordinal": ordinal,
                        "position": int(inside["position"].iloc[0]),
                        "positions": tuple(int(p) for p in inside["position"]),
                        "ns": computed,
                        "other": wall_ns - computed,
                        "hidden": hidden,
                    }
                )
    names = ["lane", "ordinal", "position", "positions"]
    if not rows:
        return pd.DataFrame(columns=names), np.zeros((0, 0))
    frame = pd.DataFrame(rows)
    usual = frame.groupby(names)[["ns", "other", "hidden"]].transform("median")
    is_pure = usual["other"] <= np.maximum(_OTHER_SHARE * usual["ns"], _OTHER_NS)
    is_pure &= usual["hidden"] <= np.maximum(_HIDDEN_SHARE * usual["ns"], _HIDDEN_NS)
    return by_iteration(frame[is_pure], names, "ns")
