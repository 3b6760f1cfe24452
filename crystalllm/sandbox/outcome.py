"""What came of a run, as `summary.json`: outcomes are results, whatever they are."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crystalllm import __version__, artifacts, tables
from crystalllm.errors import UserError
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.program import Replayable
from crystalllm.sandbox.processes import Failure
from crystalllm.sandbox.setup import LOG, OUTCOME, Setup

SUMMARY = "summary.json"
PARTS = ("compute", "exposed", "wait", "bubble", "host")
_LAST_LINES = 20


def write(out: Path, summary: Mapping[str, Any]) -> None:
    text = json.dumps(summary, indent=2, sort_keys=True) + "\n"
    artifacts.write_atomically(out / SUMMARY, text.encode())


def refused(world_size: int, ranks: Sequence[int], error: UserError) -> dict[str, Any]:
    """The summary of a run that was not begun."""
    return {
        "crystalllm": __version__,
        "status": "invalid",
        "reason": str(error),
        "world_size": world_size,
        "ranks": list(ranks),
        "trust": {"valid": False, "why_not": [str(error)]},
    }


def summarize(
    setup: Setup,
    out: Path,
    made: Replayable,
    *,
    provenance: Mapping[str, Any],
    differences: Sequence[str],
    failure: Failure | None,
    replay_error: str | None,
) -> dict[str, Any]:
    """The summary of a run that has ended, in whichever way.

    Args:
        setup: What was to run.
        out: Where the ranks left their results.
        made: The world that was replayed.
        provenance: What the result depends on.
        differences: What of the program was not as captured.
        failure: The process that ended the run, if one did.
        replay_error: Why the replay of the others did not come to its end.
    """
    outcomes = {rank: _read_outcome(out, rank) for rank in setup.ranks}
    status, reason, where = _status(setup, out, outcomes, failure, replay_error)
    ran = {
        rank: _of_rank(setup, out / f"rank-{rank}", made, found)
        for rank, found in outcomes.items()
        if found is not None and (out / f"rank-{rank}" / "iterations.parquet").exists()
    }
    return {
        **provenance,
        "status": status,
        "reason": reason,
        **where,
        "ranks_of_interest": {str(rank): found for rank, found in ran.items()},
        "conditions": _conditions(setup),
        "trust": _trust(setup, ran, made, status, reason, differences),
    }


def _read_outcome(out: Path, rank: int) -> dict[str, Any] | None:
    path = out / f"rank-{rank}" / OUTCOME
    return artifacts.read_json(path) if path.exists() else None


def _status(
    setup: Setup,
    out: Path,
    outcomes: Mapping[int, dict[str, Any] | None],
    failure: Failure | None,
    replay_error: str | None,
) -> tuple[str, str, dict[str, Any]]:
    """Status, reason, and where it happened."""
    known = {rank: found for rank, found in outcomes.items() if found is not None}
    for found in known.values():
        if found.get("deviation"):
            return "deviation", found["deviation"]["text"], {"deviation": found["deviation"]}
    for rank, found in known.items():
        if found.get("out_of_memory") and found["exit_code"]:
            text = found["out_of_memory"]["text"]
            return "oom", text, {"rank": rank, "out_of_memory": found["out_of_memory"]}
    if failure is not None and failure.number < 0:
        return "crash", f"The run was {failure.what}.", {"exit_code": failure.exit_code}
    if failure is not None:
        rank = setup.ranks[failure.number]
        error = (outcomes[rank] or {}).get("error")
        what = f"{error['kind']}: {error['message']}" if error else failure.what
        text = f"Rank {rank} {failure.what}" + (f" after {what}" if error else "") + "."
        log = out / f"rank-{rank}" / LOG
        return "crash", text, {"rank": rank, "last_lines": last_lines(log), "log": log.name}
    missing = [rank for rank, found in outcomes.items() if found is None]
    if missing:
        return "crash", f"Rank {missing[0]} left no outcome.", {"rank": missing[0]}
    if replay_error is not None:
        return "invalid", replay_error, {}
    return "ok", "", {}


def last_lines(log: Path) -> list[str]:
    """The end of a rank's log; it may be long."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (64 << 10)))
            return file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
    except OSError:
        return []


def _of_rank(
    setup: Setup, folder: Path, made: Replayable, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Medians over the iterations that count."""
    first = setup.warm_up + 1
    last = setup.warm_up + setup.iterations
    iterations = tables.ITERATIONS.read(folder / "iterations.parquet")[0].to_pandas()
    counted = iterations[iterations["iteration"].between(first, last)]
    calls = tables.COMMUNICATION.read(folder / "communication.parquet")[0].to_pandas()
    calls = calls[calls["iteration"].between(first, last)]
    summary: dict[str, Any] = {
        "num_iterations": len(counted),
        "num_calls": found.get("num_calls", 0),
        "num_invented": found.get("num_invented", 0),
        "memory": found.get("memory"),
        "notes": found.get("notes", []),
    }
    if counted.empty:
        return summary
    duration = counted["duration_ns"]
    segments = tables.SEGMENTS.read(folder / "segments.parquet")[0].to_pandas()
    summary |= {
        "slowness": slowness(segments[segments["iteration"].between(first, last)], setup.durations),
        "iteration_ns": int(duration.median()),
        "iteration_low_ns": int(duration.quantile(0.1)),
        "iteration_high_ns": int(duration.quantile(0.9)),
        **{f"{part}_ns": int(counted[f"{part}_ns"].median()) for part in PARTS},
        "shares_by_source": _shares(counted, calls, setup),
    }
    late = lateness(calls)
    if len(late):
        summary["lateness_ns"] = {
            "num": len(late),
            **{f"p{q}": int(np.percentile(late, q)) for q in (50, 99)},
            "max": int(late.max()),
        }
    return summary


def slowness(segments: pd.DataFrame, durations: DurationTable) -> float | None:
    """How many times as long as `durations` say a rank computed, and was inside calls.

    Args:
        segments: Of bodies of one rank.
        durations: With all segments of its role.

    Returns:
        The median body over the sum of its durations, which is to say of their medians; None
        where the durations do not know its segments.
    """
    body = segments[segments["section"] == "body"]
    places = body[["role", "lane", "position"]].astype({"lane": str}).drop_duplicates()
    at = [(int(r), lane, "body", int(p)) for r, lane, p in places.itertuples(index=False)]
    expected = sum(durations.segments[a].ns for a in at if a in durations.segments)
    if not expected or not all(a in durations.segments for a in at):
        return None
    taken = body["duration_ns"] + body["call_ns"]
    whole = taken.groupby(body["iteration"]).sum().median()
    return round(float(whole) / expected, 4)


def lateness(calls: pd.DataFrame) -> pd.Series:
    """In ns, of calls that the program waited for and whose release was known."""
    is_timed = (calls["transport"] != "real") & (calls["release_ns"] >= 0)
    return calls.loc[is_timed & (calls["waited_ns"] > 0), "lateness_ns"]


def _shares(iterations: pd.DataFrame, calls: pd.DataFrame, setup: Setup) -> dict[str, float]:
    """Which share of the iteration rests on what.

    Computation and time in calls happened here; waits for others rest on the
    durations of their segments, exposed transfers on the source of their times.
    """
    total = max(1, int(iterations["duration_ns"].sum()))
    found = {"executed": int(iterations[["compute_ns", "host_ns"]].sum().sum())}
    sources = {d.source for d in setup.durations.segments.values()}
    peers = "peers " + "/".join(sorted(sources)) if sources else "peers"
    found[peers] = int(iterations[["wait_ns", "bubble_ns"]].sum().sum())
    exposed = int(iterations["exposed_ns"].sum())
    on_main = calls[(calls["waited_ns"] > 0) & (calls["lane"] == "host:0")]
    begin = on_main["end_ns"] - on_main["waited_ns"]
    starts = on_main["start_ns"].where(on_main["start_ns"] >= 0, begin)
    waited = (on_main["end_ns"] - pd.concat([begin, starts], axis=1).max(axis=1)).clip(lower=0)
    source = [
        "transfers real" if transport == "real" else f"transfers {_source(setup, str(key))}"
        for transport, key in zip(on_main["transport"], on_main["key"], strict=True)
    ]
    by_source = waited.groupby(np.array(source, dtype=object)).sum()
    whole = max(1, int(by_source.sum()))
    for name, ns in by_source.items():
        found[str(name)] = round(exposed * int(ns) / whole)
    return {name: round(ns / total, 6) for name, ns in found.items() if ns}


def _source(setup: Setup, key: str) -> str:
    transfers = setup.durations.transfers
    if key in transfers:
        return transfers[key].source
    return next((d.source for at, d in transfers.items() if at[0] == key), "none")


def _conditions(setup: Setup) -> dict[str, Any]:
    import torch

    return {
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "pinned": list(setup.cores) if setup.cores is not None else None,
    }


def _trust(
    setup: Setup,
    ran: Mapping[int, Mapping[str, Any]],
    made: Replayable,
    status: str,
    reason: str,
    differences: Sequence[str],
) -> dict[str, Any]:
    """How far the numbers can be trusted."""
    why_not = [] if status == "ok" else [reason]
    why_not += [f"the program is not the captured one: {d}" for d in differences]
    if not setup.timed:
        why_not.append("nothing was timed (--untimed)")
    if setup.profile:
        why_not.append("a profiler ran, which takes time itself")
    if setup.what_ifs is not None:
        why_not.append("what-ifs were declared: this is not the job as it is")
    for rank, found in ran.items():
        if found["num_invented"]:
            why_not.append(f"rank {rank} was given {found['num_invented']} invented control values")
    segments = setup.durations.segments.values()
    takes_core = any(d.cpu_ns for d in setup.durations.transfers.values())
    return {
        "valid": not why_not,
        "why_not": why_not,
        "shares_by_source": {str(rank): f.get("shares_by_source", {}) for rank, f in ran.items()},
        "lateness_ns": {str(rank): f.get("lateness_ns") for rank, f in ran.items()},
        "slowness": {
            "of_ranks": {str(rank): f.get("slowness") for rank, f in ran.items()},
            "of_others": None if setup.follows_speed else setup.slowness,
        },
        "peers": {
            "num_segments": len(segments),
            "sources": sorted({d.source for d in segments}),
        },
        "assumptions": sorted({d.assumptions for d in made.durations if d.assumptions}),
        "policies": {
            "content": "mirror",
            "transport": "timed",
            "speed of others": "follows the ranks that run" if setup.follows_speed else "planned",
            "core_time": "taken" if setup.takes_core and takes_core else "not taken",
            "subnormal numbers": "zero" if len(setup.ranks) < setup.job.world_size else "kept",
        },
    }
