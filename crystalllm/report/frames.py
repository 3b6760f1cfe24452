"""What a report shows of one case: each question a table, from the files of its stages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crystalllm import artifacts, inspect, tables
from crystalllm.config import Job, load_cluster
from crystalllm.errors import UserError
from crystalllm.sandbox.outcome import PARTS, SUMMARY
from crystalllm.timeline.spans import TRANSFER, WAITING, WAITING_FOR_PEER
from crystalllm.transfers.sizes import WHOLE_IS_OUT, bus_factor

# Parts of an iteration, for people.
WORDS = {
    "compute": "computation",
    "exposed": "waiting for transfers",
    "wait": "waiting for others of a collective",
    "bubble": "waiting for the other side of a message",
    "host": "inside calls",
}
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
# Parts of spans in the timeline, as parts of an iteration.
_STATES = {WAITING: "wait", WAITING_FOR_PEER: "bubble", TRANSFER: "exposed"}
# Of a chart of memory, which is as wide as a page.
_MOST_POINTS = 600


@dataclass(frozen=True)
class Case:
    """The files of one emulation.

    Args:
        run: Folder of the emulation.
        capture: Folder of its capture.
        job: What was meant, if that is known: its cluster and its virtual stages.
    """

    run: Path
    capture: Path
    job: Job | None = None

    @cached_property
    def summary(self) -> dict[str, Any]:
        return artifacts.read_json(self.run / SUMMARY)

    @cached_property
    def captured(self) -> inspect.Capture:
        return inspect.Capture(self.capture)

    @property
    def ranks(self) -> list[int]:
        """Ranks of interest of which iterations were measured, the slowest first."""
        found = self.summary.get("ranks_of_interest", {})
        timed = {int(r): f["iteration_ns"] for r, f in found.items() if "iteration_ns" in f}
        return sorted(timed, key=lambda rank: (-timed[rank], rank))

    def of_rank(self, rank: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.summary["ranks_of_interest"][str(rank)]
        return found

    @property
    def capacity_bytes(self) -> int | None:
        """Memory of a device: the run's limit, else that of the job's cluster."""
        limit: int | None = (self.of_rank(self.ranks[0])["memory"] or {}).get("limit_bytes")
        if limit is not None or self.job is None or self.job.cluster is None:
            return limit
        return load_cluster(self.job.cluster).gpu.memory_bytes

    def counts(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Rows of measured iterations."""
        first = self.summary["warm_up"] + 1
        return frame[frame["iteration"].between(first, first + self.summary["iterations"] - 1)]

    def place(self, rank: int) -> str:
        """Its coordinates, for people."""
        axes = self.captured.axes
        row = axes.loc[rank] if rank in axes.index else {}
        return " ".join(f"{axis}={value}" for axis, value in dict(row).items() if value >= 0)


def breakdown(case: Case) -> pd.DataFrame:
    """Where the time of an iteration goes, of ranks of interest and of one rank of each role.

    Returns:
        Columns rank, is_real (else it was replayed), label, iteration_ms, low_ms and high_ms
        (deciles of ranks that ran, else the median) and of each of PARTS its ms; medians
        over measured iterations.
    """
    world = tables.ITERATIONS.read(case.run / "world" / "iterations.parquet")[0].to_pandas()
    world = case.counts(world)
    medians = world.groupby("rank")[["duration_ns", *(f"{p}_ns" for p in PARTS)]].median()
    rows = []
    for rank in case.ranks:
        found = case.of_rank(rank)
        rows.append(
            {
                "rank": rank,
                "is_real": True,
                "label": f"rank {rank} ran ({case.place(rank)})",
                "iteration_ms": found["iteration_ns"] / 1e6,
                "low_ms": found["iteration_low_ns"] / 1e6,
                "high_ms": found["iteration_high_ns"] / 1e6,
                **{part: found[f"{part}_ns"] / 1e6 for part in PARTS},
            }
        )
    for role, members in case.captured.ranks.groupby("role"):
        replayed = [r for r in members.index if r in medians.index and r not in case.ranks]
        if not replayed:
            continue
        of_rank = medians.loc[replayed[0]]
        ms = of_rank["duration_ns"] / 1e6
        rows.append(
            {
                "rank": replayed[0],
                "is_real": False,
                "label": f"role {role}, rank {replayed[0]} ({case.place(replayed[0])})",
                "iteration_ms": ms,
                "low_ms": ms,
                "high_ms": ms,
                **{part: of_rank[f"{part}_ns"] / 1e6 for part in PARTS},
            }
        )
    return pd.DataFrame(rows)


def pipeline(case: Case) -> pd.DataFrame:
    """What one rank of each pipeline stage does in the last measured iteration.

    Of each stage the rank that has the other coordinates of the first rank of interest; where
    the timeline does not show it, another one of the stage.

    Returns:
        Columns stage, rank, state (one of PARTS but host), start_ms and end_ms from the
        beginning of the first stage's iteration; empty without a pipeline.
    """
    columns = ["stage", "rank", "state", "start_ms", "end_ms"]
    axes = case.captured.axes
    shown = _ranks_shown(case)
    if "pp" not in axes or axes["pp"].max() < 1 or not shown or not case.ranks:
        return pd.DataFrame(columns=columns)
    mine = axes.loc[case.ranks[0]]
    parts = []
    for stage, members in axes.loc[axes.index.isin(shown)].groupby("pp"):
        alike = (members.drop(columns="pp") == mine.drop("pp")).sum(axis=1)
        rank = int(alike.sort_values(ascending=False, kind="stable").index[0])
        parts.append(_states(case, rank).assign(stage=stage, rank=rank))
    found = pd.concat(parts, ignore_index=True)
    iteration = _last_whole(found)
    found = found[found["iteration"] == iteration]
    begin = found.loc[found["stage"] == found["stage"].min(), "start_us"].min()
    found = found.assign(
        start_ms=(found["start_us"] - begin) / 1e3,
        end_ms=(found["start_us"] + found["duration_us"] - begin) / 1e3,
    )
    return found[columns].reset_index(drop=True)


def _ranks_shown(case: Case) -> list[int]:
    files = (case.run / "timeline").glob("rank-*.json.gz")
    return sorted(int(path.name.split(".")[0].removeprefix("rank-")) for path in files)


def _states(case: Case, rank: int) -> pd.DataFrame:
    """What a rank's main lane did, as the timeline has it.

    Returns:
        Columns iteration, state, start_us, duration_us.
    """
    path = case.run / "timeline" / f"rank-{rank}.json.gz"
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise UserError(
            "A timeline cannot be read", where=f"File {path}: {error}", do="Emulate again"
        ) from error
    complete = [e for e in events if e["ph"] == "X"]
    computed = [e for e in complete if e["name"].startswith("computation ")]
    lanes = pd.Series([e["tid"] for e in computed]).mode()
    rows = []
    for e in complete:
        if len(lanes) == 0 or e["tid"] != lanes[0]:
            continue
        state = "compute" if e["name"].startswith("computation ") else _STATES.get(e["name"])
        if state is not None:
            at = e["args"]["iteration"] if "iteration" in e.get("args", {}) else -1
            rows.append((at, state, e["ts"], e["dur"]))
    frame = pd.DataFrame(rows, columns=["iteration", "state", "start_us", "duration_us"])
    frame = frame.sort_values("start_us", kind="stable")
    # Parts of a wait say no iteration; the computation before them does.
    frame["iteration"] = frame["iteration"].where(frame["iteration"] >= 0).ffill().bfill()
    return frame


def _last_whole(states: pd.DataFrame) -> int:
    """The last iteration that every stage has; the very last one may be cut off."""
    per_stage = states.groupby("stage")["iteration"].agg(["min", "max"])
    return int(max(per_stage["max"].min() - 1, per_stage["min"].max()))


def bubble(case: Case) -> dict[str, float]:
    """The pipeline bubble of the first rank of interest, and what a formula gives.

    Of a pipeline of p stages that take equally long, with m microbatches and v virtual stages,
    a share of (p - 1) / (v m + p - 1) is idle: 1F1B and GPipe (v = 1), interleaved 1F1B
    (Narayanan et al., 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", section 2.2, has it relative to the work).

    Returns:
        measured and, where the job is known and has a pipeline, closed_form, stages,
        microbatches and virtual.
    """
    rank = case.ranks[0]
    of_rank = case.of_rank(rank)
    found = {"measured": of_rank["bubble_ns"] / of_rank["iteration_ns"]}
    axes = case.captured.axes
    if case.job is None or case.job.parallelism is None or case.job.parallelism.pp == 1:
        return found
    stages, virtual = case.job.parallelism.pp, case.job.parallelism.vp
    calls = tables.COMMUNICATION.read(case.run / f"rank-{rank}" / "communication.parquet")[0]
    frame = case.counts(calls.to_pandas())
    of_one = frame[frame["iteration"] == frame["iteration"].max()]
    received = int((of_one["kind"].astype(str) == "recv").sum())
    is_end = axes.loc[rank, "pp"] in (0, stages - 1)
    # An end of the pipeline receives each microbatch once per pass, and of v chunks all but one
    # in the other direction as well.
    per_microbatch = 2 * virtual - 1 if is_end else 2 * virtual
    microbatches = received / per_microbatch
    if microbatches >= 1:
        found |= {
            "closed_form": (stages - 1) / (virtual * microbatches + stages - 1),
            "stages": stages,
            "microbatches": microbatches,
            "virtual": virtual,
        }
    return found


def memory(case: Case) -> pd.DataFrame:
    """What tensors of the first rank of interest take over the iteration with the peak.

    Returns:
        Columns at_ms (from the beginning of that iteration) and one of bytes for each of
        CATEGORIES; of as many changes as a page shows, with the peak among them.
    """
    path = case.run / f"rank-{case.ranks[0]}" / "memory.parquet"
    of_rank = case.of_rank(case.ranks[0])["memory"]
    if not path.exists() or not of_rank:
        return pd.DataFrame(columns=["at_ms", *CATEGORIES])
    frame = tables.MEMORY.read(path)[0].to_pandas()
    changes = pd.DataFrame(
        {
            category: frame["bytes"].where(frame["category"].astype(str) == category, 0)
            for category in CATEGORIES
        }
    ).cumsum()
    held = changes.assign(at_ns=frame["at_ns"], iteration=frame["iteration"])
    held = held[held["iteration"] == of_rank["peak"]["iteration"]]
    if len(held) > _MOST_POINTS:
        # The fullest moment of each of equally many changes.
        total = held[list(CATEGORIES)].sum(axis=1)
        part = np.arange(len(held)) * _MOST_POINTS // len(held)
        held = held.loc[total.groupby(part).idxmax()]
    at_ms = (held["at_ns"] - held["at_ns"].min()) / 1e6
    return held.assign(at_ms=at_ms)[["at_ms", *CATEGORIES]].reset_index(drop=True)


def bandwidth(case: Case) -> pd.DataFrame:
    """Sizes of the first rank of interest's calls against the bus bandwidth of their transfers.

    Returns:
        Columns kind, group, ranks, bytes (as nccl-tests counts them), transfer_us (median),
        bus_gb_s, and n (calls in an iteration); calls that take no time are left out.
    """
    rank = case.ranks[0]
    path = case.run / f"rank-{rank}" / "communication.parquet"
    frame = case.counts(tables.COMMUNICATION.read(path)[0].to_pandas())
    frame = frame[(frame["transfer_ns"] > 0) & (frame["bytes"] > 0)]
    frame = frame.astype({"kind": str, "group_desc": str})
    is_gathered = frame["kind"].isin(WHOLE_IS_OUT)
    frame["bytes"] = frame["bytes"] * frame["group_size"].where(is_gathered, 1)
    by = ["kind", "group_desc", "group_size", "bytes"]
    found = frame.groupby(by)["transfer_ns"].agg(["median", "size"]).reset_index()
    factors = [bus_factor(k, n) for k, n in zip(found["kind"], found["group_size"], strict=True)]
    num_iterations = max(1, frame["iteration"].nunique())
    return pd.DataFrame(
        {
            "kind": found["kind"],
            "group": found["group_desc"],
            "ranks": found["group_size"],
            "bytes": found["bytes"],
            "transfer_us": found["median"] / 1e3,
            "bus_gb_s": found["bytes"] * factors / found["median"],
            "n": found["size"] / num_iterations,
        }
    )


def roles(case: Case) -> pd.DataFrame:
    """As `inspect.roles`."""
    return inspect.roles(case.captured)
