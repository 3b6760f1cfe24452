"""What a sandbox rank leaves, from what its world recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crystalllm import tables
from crystalllm.records import call_columns, element_size
from crystalllm.sandbox.followed import Followed

_MESSAGES = ("send", "recv")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One rank's run, as frames.

    Args:
        segments: Columns of `segments`.
        communication: Columns of `communication`.
        iterations: Columns of `iterations`; what is not computation, nor a wait, is
            time inside calls and counts as host time.
    """

    segments: pd.DataFrame
    communication: pd.DataFrame
    iterations: pd.DataFrame

    def write(self, folder: Path, *, provenance: dict[str, Any]) -> None:
        """Writes segments.parquet, communication.parquet and iterations.parquet."""
        for table, frame in (
            (tables.SEGMENTS, self.segments),
            (tables.COMMUNICATION, self.communication),
            (tables.ITERATIONS, self.iterations),
        ):
            columns = {c.name: frame[c.name].tolist() for c in table.columns}
            table.write(folder / f"{table.name}.parquet", columns, provenance=provenance)


def of_world(world: Any, followed: Followed, epoch_ns: int) -> Ran:
    """From the rank's world, which has kept its records; they are taken from it.

    Args:
        world: The native world.
        followed: The trace that it followed.
        epoch_ns: Of CLOCK_MONOTONIC, where times of the replay begin.
    """
    rank = world.rank
    mark_ns = np.array(world.mark_times, np.int64) - epoch_ns
    events = pd.DataFrame(world.event_columns())
    outcomes = pd.DataFrame(world.outcome_columns())
    groups = world.groups
    calls = pd.DataFrame(call_columns(world.take_records(), groups, rank))
    for frame, columns in (
        (events, ["start_ns"]),
        (outcomes, ["arrival_ns", "start_ns", "release_ns", "wait_begin_ns", "wait_end_ns"]),
    ):
        for column in columns:
            frame[column] = frame[column].where(frame[column] < 0, frame[column] - epoch_ns)
    events["iteration"] = iteration_of(events["mark"], followed)
    events["lane"] = "host:" + events["lane"].astype(str)
    communication = _communication(calls, outcomes, followed)
    return Ran(
        segments=_segments(events, rank, followed),
        communication=communication,
        iterations=_iterations(events, communication, mark_ns, rank, followed),
    )


def iteration_of(marks: Any, followed: Followed) -> np.ndarray:
    """By marks before: 0 before the bodies, then from 1; one more than bodies after them."""
    marks = np.asarray(marks, np.int64)
    body = (marks - followed.first_mark) // followed.period + 1
    last = followed.num_bodies + 1
    return np.where(marks >= followed.first_mark, np.clip(body, 0, last), 0)


def _segments(events: pd.DataFrame, rank: int, followed: Followed) -> pd.DataFrame:
    columns = ["iteration", "lane", "start_ns", "duration_ns", "call_ns"]
    is_computed = events["kind"] == "COMP"
    found = events.assign(call_ns=_in_calls_before(events)).loc[is_computed, columns]
    section = np.select(
        [found["iteration"] == 0, found["iteration"] <= followed.num_bodies],
        ["prologue", "body"],
        "epilogue",
    )
    position = found.groupby(["lane", "iteration"], sort=False).cumcount()
    return found.assign(rank=rank, role=followed.role, section=section, position=position)


def _in_calls_before(events: pd.DataFrame) -> pd.Series:
    """Of each event, the time in the calls between it and the event of another kind before them."""
    is_call = events["kind"].str.startswith("COMM_")
    of_lane = events["lane"]
    follows_call = is_call.groupby(of_lane).shift(fill_value=False)
    # Where calls come one after the other, the first begins what they take together.
    first_ns = events["start_ns"].where(is_call & ~follows_call).groupby(of_lane).ffill()
    return (events["start_ns"] - first_ns).where(follows_call, 0).clip(lower=0).astype(np.int64)


def _communication(calls: pd.DataFrame, outcomes: pd.DataFrame, followed: Followed) -> pd.DataFrame:
    both = calls.drop(columns=["arrival_ns", "release_ns"]).merge(outcomes, on="call")
    elements = both["in_elements"].where(both["in_elements"] > 0, both["out_elements"])
    is_known = both["release_ns"] >= 0
    is_awaited = both["wait_end_ns"] >= 0
    due = both[["wait_begin_ns", "release_ns"]].max(axis=1)
    return both.assign(
        iteration=iteration_of(both["mark"], followed),
        lane="host:" + both["stream"].astype(str),
        bytes=elements * both["dtype"].map(element_size),
        transfer_ns=(both["release_ns"] - both["start_ns"]).where(is_known, -1),
        waited_ns=(both["wait_end_ns"] - both["wait_begin_ns"]).where(is_awaited, -1),
        end_ns=both["wait_end_ns"],
        lateness_ns=(both["wait_end_ns"] - due).clip(lower=0).where(is_awaited & is_known, 0),
    )


def _iterations(
    events: pd.DataFrame,
    communication: pd.DataFrame,
    mark_ns: np.ndarray,
    rank: int,
    followed: Followed,
) -> pd.DataFrame:
    """Of the first host thread, which sets the marks."""
    ends = (
        mark_ns[followed.first_mark - 1 :: followed.period]
        if followed.first_mark
        else (mark_ns[followed.period - 1 :: followed.period])
    )
    ends = ends[: followed.num_bodies + (followed.first_mark > 0)]
    first = 0 if followed.first_mark else 1
    begin = events["start_ns"].iloc[0] if len(events) and first else 0
    found = pd.DataFrame(
        {
            "rank": rank,
            "iteration": np.arange(len(ends)) + first,
            "end_ns": ends,
            "duration_ns": np.diff(ends, prepend=begin),
        }
    ).set_index("iteration", drop=False)
    main = events[events["lane"] == "host:0"]
    compute = main[main["kind"] == "COMP"].groupby("iteration")["duration_ns"].sum()
    waits = main[main["kind"] == "WAIT"].merge(
        communication[["call", "kind", "start_ns"]],
        on="call",
        suffixes=("", "_of_call"),
    )
    # Until the transfer begins one waits for others; without a known begin, for the transfer.
    starts = waits["start_ns_of_call"].where(waits["start_ns_of_call"] >= 0, waits["start_ns"])
    for_others = (starts - waits["start_ns"]).clip(0, waits["duration_ns"])
    is_message = waits["kind_of_call"].isin(_MESSAGES)
    parts = {
        "compute_ns": compute,
        "wait_ns": for_others[~is_message].groupby(waits["iteration"]).sum(),
        "bubble_ns": for_others[is_message].groupby(waits["iteration"]).sum(),
        "exposed_ns": (waits["duration_ns"] - for_others).groupby(waits["iteration"]).sum(),
    }
    for name, values in parts.items():
        found[name] = values.reindex(found.index, fill_value=0).astype(np.int64)
    found["host_ns"] = found["duration_ns"] - found[list(parts)].sum(axis=1)
    return found.reset_index(drop=True)
