"""The passes: every slice runs against peers as fast as the last pass measured them.

The first pass takes what the capture saw of each role. After a pass the whole
world is replayed with what it measured; when the iteration time moves by less
than the tolerance, the estimates have settled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from crystalllm import artifacts, tables
from crystalllm.errors import UserError
from crystalllm.planning import profile
from crystalllm.planning.calibration import Calibration, Measure, Standard
from crystalllm.planning.plan import Plan, Slice
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.offline import replay
from crystalllm.replay.program import Capture
from crystalllm.sandbox.outcome import last_lines
from crystalllm.sandbox.setup import LOG

log = logging.getLogger("crystalllm.planning")

# Runs the ranks of a slice against peers with these durations, into a folder that
# does not exist yet, and returns its summary.
RunSlice = Callable[[Slice, DurationTable, Path], Mapping[str, Any]]
Say = Callable[[str], None]

# Of the world after each pass; the last one counts, when pipelines have filled.
_REPLAYED_ITERATIONS = 5
# What a slice leaves last.
FINISHED = "finished.json"
_LOG_LINES = 8
_INTERRUPTED = 128 + signal.SIGINT
_ADVICE = {
    "oom": "Use a host with more memory, or fewer sandbox ranks at a time (--cores)",
    "deviation": "Capture again: the program no longer does what was captured",
    "crash": "Mend what the log shows, and plan again: finished slices are kept",
    "invalid": "Mend what the reason says, and plan again: finished slices are kept",
}


@dataclass(frozen=True)
class Ran:
    """A slice that has run.

    Args:
        slice: Which.
        summary: What its run said.
        calibration: Readings around it.
        wall_s: How long it took, readings of the reference included.
        is_kept: It ran in an earlier planning, and was not run again.
        segments: Rows of `segments` of its ranks.
    """

    slice: Slice
    summary: Mapping[str, Any]
    calibration: Calibration
    wall_s: float
    is_kept: bool
    segments: pd.DataFrame


@dataclass(frozen=True)
class Pass:
    """What one pass found; pass 0 is the first estimates.

    Args:
        number: Of the pass.
        profile: Durations that it ends with.
        iteration_ns: Of the world with these durations.
        moved: By which the iteration time changed, as a share of it before; 0 in pass 0.
        replayed: What the replay of the world said.
        slices: In the order of the plan.
        rows: Rows of `slices`, of this pass.
        factors: By number of the slice and rank, its calibration.
        standard: The speed to which slices are brought; None in pass 0.
    """

    number: int
    profile: DurationTable
    iteration_ns: int
    moved: float
    replayed: Mapping[str, Any]
    slices: tuple[Ran, ...]
    rows: pd.DataFrame
    factors: Mapping[int, Mapping[int, float]]
    standard: Standard | None


def run_passes(
    plan: Plan,
    capture: Capture,
    first: DurationTable,
    work: Path,
    *,
    run_slice: RunSlice,
    measure: Measure,
    say: Say = lambda line: None,
) -> list[Pass]:
    """Runs passes until the iteration time settles, at most `plan.options.max_passes`.

    A slice that has finished lies in `work/pass-K/slice-I`, and is not run again as
    long as the plan and the durations of its peers are the same.

    Args:
        plan: What runs.
        capture: What is replayed.
        first: First estimates of all segments, and the times of all transfers.
        work: Folder for what is kept; nobody else may use it meanwhile.
        run_slice: Runs one slice.
        measure: Takes the reference.
        say: Called with lines that tell how it goes.

    Returns:
        Pass 0, the first estimates, and the passes that ran.

    Raises:
        UserError: A slice did not end well; the ones before it are kept.
        KeyboardInterrupt: The user stopped it; finished slices are kept.
    """
    passes = [_first(plan, capture, first, work)]
    while not is_settled(passes, plan) and len(passes) <= plan.options.max_passes:
        folder = work / f"pass-{len(passes)}"
        ran = _run_slices(plan, passes[-1].profile, folder, run_slice, measure, say)
        passes.append(_pass(plan, capture, passes, ran, folder))
        say(
            f"pass {passes[-1].number}: an iteration takes "
            f"{passes[-1].iteration_ns / 1e6:.3f} ms, moved by {passes[-1].moved:+.1%}"
        )
    return passes


def run_share(
    plan: Plan,
    capture: Capture,
    first: DurationTable,
    work: Path,
    *,
    number: int,
    share: tuple[int, int],
    run_slice: RunSlice,
    measure: Measure,
    say: Say = lambda line: None,
) -> None:
    """Runs some of the slices of one pass, where passes are spread over several runs.

    `run_passes` finds them afterwards, and runs what is missing.

    Args:
        plan, capture, first, work, run_slice, measure, say: As for `run_passes`.
        number: Of the pass; 1 is the first. All slices of those before have run.
        share: (i, n): the slices i, i + n, i + 2 n, …, counted from 0.

    Raises:
        UserError: As `run_passes`; a slice of an earlier pass has not run.
    """
    passes = [_first(plan, capture, first, work)]
    while len(passes) < number and not is_settled(passes, plan):
        folder = work / f"pass-{len(passes)}"
        key = _inputs(plan, passes[-1].profile, folder)
        ran = tuple(_finished(folder, slice_, key) for slice_ in plan.slices)
        passes.append(_pass(plan, capture, passes, ran, folder))
    if is_settled(passes, plan):
        say(f"pass {number} is not needed: the estimates have settled")
        return
    mine = plan.slices[share[0] :: share[1]]
    _run_slices(
        plan, passes[-1].profile, work / f"pass-{number}", run_slice, measure, say, only=mine
    )


def is_settled(passes: Sequence[Pass], plan: Plan) -> bool:
    """Whether the last pass moved the iteration time by less than the tolerance."""
    return len(passes) > 1 and abs(passes[-1].moved) < plan.options.tolerance


def _run_slices(
    plan: Plan,
    durations: DurationTable,
    folder: Path,
    run_slice: RunSlice,
    measure: Measure,
    say: Say,
    only: Sequence[Slice] | None = None,
) -> tuple[Ran, ...]:
    """Those that have not run yet with these durations, one after the other; all by default."""
    key = _inputs(plan, durations, folder)
    ran = []
    for slice_ in plan.slices if only is None else only:
        place = _place(folder, slice_)
        done = _kept(place, slice_, key)
        if done is None:
            done = _run(plan, slice_, durations, place, key, run_slice, measure)
        ran.append(done)
        took = "kept from before" if done.is_kept else f"{done.wall_s:.1f} s"
        say(
            f"{folder.name}, slice {slice_.number} of {len(plan.slices)}, "
            f"rank {_some(slice_.ranks)}: {took}"
        )
    return tuple(ran)


def _inputs(plan: Plan, durations: DurationTable, folder: Path) -> str:
    """Writes what the slices of a pass run against; its digest, with the plan's."""
    table = folder / "durations.parquet"
    durations.save(table, provenance={"plan": plan.digest})
    return hashlib.sha256(f"{plan.digest} {artifacts.sha256(table)}".encode()).hexdigest()


def _place(folder: Path, slice_: Slice) -> Path:
    return folder / f"slice-{slice_.number}"


def _finished(folder: Path, slice_: Slice, key: str) -> Ran:
    """A slice that another share has run; raises UserError where none has."""
    done = _kept(_place(folder, slice_), slice_, key)
    if done is None:
        raise UserError(
            "A slice of an earlier pass has not run",
            where=f"Slice {slice_.number}, rank {_some(slice_.ranks)}, folder {folder}",
            do="Run all shares of the passes before, on hosts that are alike",
        )
    return done


def _kept(place: Path, slice_: Slice, key: str) -> Ran | None:
    """A slice that has finished with these inputs."""
    if not (place / FINISHED).exists():
        return None
    try:
        finished = artifacts.read_json(place / FINISHED)
        if finished["key"] != key:
            return None
        return Ran(
            slice_,
            finished["summary"],
            Calibration.of_json(finished["calibration"]),
            float(finished["wall_s"]),
            True,
            _segments(place, slice_),
        )
    except (UserError, KeyError, TypeError, ValueError) as error:
        log.warning("slice %d is run again: %s", slice_.number, error)
        return None


def _run(
    plan: Plan,
    slice_: Slice,
    durations: DurationTable,
    place: Path,
    key: str,
    run_slice: RunSlice,
    measure: Measure,
) -> Ran:
    """Runs a slice between two readings; what is left of an interrupted one goes."""
    if place.exists():
        shutil.rmtree(place)
    start = time.monotonic()
    before = tuple(measure(slice_.cores))
    summary = dict(run_slice(slice_, durations, place))
    if summary.get("exit_code") == _INTERRUPTED:
        raise KeyboardInterrupt
    if summary["status"] != "ok":
        raise _failure(plan, slice_, summary, place)
    calibration = Calibration(before, tuple(measure(slice_.cores)))
    wall_s = time.monotonic() - start
    segments = _segments(place, slice_)
    program_ns = (segments["start_ns"] + segments["duration_ns"]).max() - segments["start_ns"].min()
    finished = {
        "key": key,
        "summary": summary,
        "calibration": calibration.to_json(),
        "roles": slice_.roles,
        "num_bodies": plan.options.num_bodies,
        "wall_s": wall_s,
        "program_s": float(program_ns / 1e9),
    }
    # Last: a slice without it has not finished.
    artifacts.write_atomically(
        place / FINISHED, (json.dumps(finished, indent=2, sort_keys=True) + "\n").encode()
    )
    return Ran(slice_, summary, calibration, wall_s, False, segments)


def _segments(place: Path, slice_: Slice) -> pd.DataFrame:
    """Raises UserError where a rank's are missing or damaged."""
    return pd.concat(
        [
            tables.SEGMENTS.read(place / f"rank-{rank}" / "segments.parquet")[0]
            .to_pandas()
            .astype({"lane": str, "section": str})
            for rank in slice_.ranks
        ],
        ignore_index=True,
    )


def _failure(plan: Plan, slice_: Slice, summary: Mapping[str, Any], place: Path) -> UserError:
    status = summary["status"]
    log_path = place / f"rank-{summary.get('rank', slice_.ranks[0])}" / LOG
    lines = last_lines(log_path)[-_LOG_LINES:]
    shown = "; its last lines are" + "".join(f"\n  {line}" for line in lines) if lines else ""
    return UserError(
        f"Slice {slice_.number} of {len(plan.slices)} ended with status {status}: "
        f"{summary['reason'].rstrip('.')}",
        where=f"Rank {_some(slice_.ranks)}, log {log_path}{shown}",
        do=_ADVICE.get(status, "Read the log"),
    )


def _first(plan: Plan, capture: Capture, first: DurationTable, work: Path) -> Pass:
    replayed = replay_world(plan, capture, first, work / "pass-0" / "replay")
    return Pass(
        0, first, int(replayed["iteration_ns"]), 0.0, replayed, (), pd.DataFrame(), {}, None
    )


def _pass(
    plan: Plan,
    capture: Capture,
    passes: Sequence[Pass],
    ran: tuple[Ran, ...],
    folder: Path,
) -> Pass:
    """What the slices of a pass found, with those of the passes before, and the world with it.

    A host is slower in one minute than in the next. Slices of one role are as far apart as a
    pass takes, so that all passes together tell more of it than the last one.
    """
    before = passes[-1]
    number = before.number + 1
    first_pass = passes[1].slices if len(passes) > 1 else ran
    standard = Standard.of([done.calibration for done in first_pass])
    factors = {
        done.slice.number: {
            rank: done.calibration.factor(core, standard)
            for rank, core in zip(done.slice.ranks, done.slice.cores, strict=True)
        }
        for done in ran
    }
    rows = pd.concat(
        [
            profile.rows(
                done.segments,
                pass_number=number,
                slice_number=done.slice.number,
                factors=factors[done.slice.number],
                warm_up=plan.options.warm_up,
            )
            for done in ran
        ],
        ignore_index=True,
    )
    measured = pd.concat([*(p.rows for p in passes[1:]), rows], ignore_index=True)
    found = profile.merged(before.profile, profile.durations(measured))
    replayed = replay_world(plan, capture, found, folder / "replay")
    iteration_ns = int(replayed["iteration_ns"])
    moved = iteration_ns / max(before.iteration_ns, 1) - 1
    return Pass(number, found, iteration_ns, moved, replayed, ran, rows, factors, standard)


def replay_world(
    plan: Plan, capture: Capture, durations: DurationTable, out: Path
) -> dict[str, Any]:
    """The whole world with these durations; what its summary says."""
    out.mkdir(parents=True, exist_ok=True)
    return replay(
        capture,
        out,
        durations,
        iterations=_REPLAYED_ITERATIONS,
        eager_bytes=plan.options.eager_bytes,
        share_links=plan.options.share_links,
    )


def _some(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
