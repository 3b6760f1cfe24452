"""A whole world, replayed: times of chosen ranks, iterations of all, the critical path."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from crystalllm import __version__, artifacts, tables
from crystalllm.errors import UserError
from crystalllm.replay import program, what_if
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.engine import Engine, ReplayError
from crystalllm.replay.program import Capture, Replayable
from crystalllm.replay.world import Op, Program
from crystalllm.timeline import write_timeline

_PARTS = ("compute", "host", "wait", "bubble", "exposed")


def replay(
    capture: Capture,
    out: Path,
    durations: DurationTable,
    *,
    iterations: int,
    ranks: Sequence[int] = (),
    what_ifs: Path | None = None,
    draw: bool = False,
    seed: int = 0,
    eager_bytes: int = 0,
    share_links: bool = False,
    one_connection: bool = False,
) -> dict[str, Any]:
    """Replays a capture into `out`.

    Args:
        capture: What every rank does.
        out: Gets iterations.parquet, calls.parquet (of `ranks`),
            critical_path.parquet (of the last iteration) and summary.json; for
            `ranks` also timeline.json.gz and timeline/ (see `write_timeline`).
        durations: How long things take.
        iterations: Bodies to go through, at least one.
        ranks: Whose calls to keep.
        what_ifs: YAML file of `what_if`.
        draw: Draw durations instead of taking medians.
        seed: Of what is drawn.
        eager_bytes: Messages up to this size end at their sender's side at once.
        share_links: Modelled transfers share links where they overlap.
        one_connection: The program runs with CUDA_DEVICE_MAX_CONNECTIONS=1.

    Returns:
        What summary.json says.

    Raises:
        UserError: Something is missing, or the ranks' calls do not fit together.
    """
    if iterations < 1:
        raise UserError(
            "A replay needs at least one iteration",
            where=f"{iterations} iterations",
            do="Pass a positive --iterations",
        )
    declared = [] if what_ifs is None else what_if.load(what_ifs, world_size=len(capture.ranks))
    made = program.build(
        capture,
        durations,
        seed=seed,
        draw=draw,
        eager_bytes=eager_bytes,
        what_ifs=declared,
        share_links=share_links,
        one_connection=one_connection,
    )
    provenance = {
        "crystalllm": __version__,
        "fingerprint": capture.structure["fingerprint"],
        "iterations": iterations,
        "seed": seed,
        "draw": draw,
        "eager_bytes": eager_bytes,
        "share_links": share_links,
        "one_connection": one_connection,
        "what_ifs": [w.model_dump() for w in declared],
    }
    with Engine(made.world) as engine:
        engine.watch(ranks)
        engine.trace(iterations)
        try:
            engine.run(iterations)
        except ReplayError as error:
            raise type(error)(
                error.what, where=with_groups(error.where, made), do=error.do
            ) from None
        frame = iterations_of(
            engine, len(made.world.ranks), has_prologue=capture.first_body_mark > 0
        )
        tables.ITERATIONS.write(out / "iterations.parquet", frame, provenance=provenance)
        _write_calls(engine, capture, out / "calls.parquet", provenance)
        steps = engine.critical_path()
        path = _critical_path(steps, made, capture)
        tables.CRITICAL_PATH.write(out / "critical_path.parquet", path, provenance=provenance)
        _write_timeline(engine, made, capture, out, iterations, ranks)
    summary = {**provenance, **_summary(frame, iterations), "sources": _sources(steps, made)}
    text = json.dumps(summary, indent=2, sort_keys=True) + "\n"
    artifacts.write_atomically(out / "summary.json", text.encode())
    return summary


def with_groups(text: str, made: Replayable) -> str:
    """The engine knows communicators by number; people know groups."""

    def name(match: re.Match[str]) -> str:
        description, signature = made.links[int(match[1])]
        return f"{match[0]} (group {description} {signature})"

    return re.sub(r"communicator (\d+)", name, text)


def iterations_of(engine: Engine, num_ranks: int, *, has_prologue: bool) -> dict[str, np.ndarray]:
    """Columns of `iterations` of all ranks, after a run."""
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in (c.name for c in tables.ITERATIONS.columns)
    }
    for rank in range(num_ranks):
        ends, parts = engine.marks(rank), engine.breakdown(rank)
        columns["rank"].append(np.full(len(ends), rank))
        columns["iteration"].append(np.arange(len(ends)) + (0 if has_prologue else 1))
        columns["end_ns"].append(ends)
        columns["duration_ns"].append(np.diff(ends, prepend=0))
        for part in _PARTS:
            columns[f"{part}_ns"].append(parts[f"{part}_ns"])
    return {name: np.concatenate(values) for name, values in columns.items()}


def _write_calls(engine: Engine, capture: Capture, path: Path, provenance: dict[str, Any]) -> None:
    events = pd.DataFrame(engine.events())
    # What a rank calls is in the calls of its role's speaker.
    speakers = capture.ranks["role"].map(capture.speakers())
    named = events.assign(speaker=events["rank"].map(speakers)).merge(
        capture.calls[["rank", "call", "kind", "key"]],
        left_on=["speaker", "call"],
        right_on=["rank", "call"],
        how="left",
        suffixes=("", "_of_speaker"),
    )
    columns = {c.name: pa.array(named[c.name]) for c in tables.REPLAYED_CALLS.columns}
    tables.REPLAYED_CALLS.write(path, columns, provenance=provenance)


def _write_timeline(
    engine: Engine,
    made: Replayable,
    capture: Capture,
    out: Path,
    iterations: int,
    ranks: Sequence[int],
) -> None:
    path, per_rank = out / "timeline.json.gz", out / "timeline"
    # Nothing of an earlier replay with other ranks is left.
    path.unlink(missing_ok=True)
    shutil.rmtree(per_rank, ignore_errors=True)
    if ranks:
        write_timeline(
            path,
            capture=capture,
            made=made,
            engine=engine,
            num_iterations=iterations,
            ranks=ranks,
            per_rank=per_rank,
        )


def _critical_path(steps: np.ndarray, made: Replayable, capture: Capture) -> dict[str, Any]:
    speakers = capture.speakers()
    of_role = capture.ranks["role"]
    calls = capture.calls
    keys = dict(zip(zip(calls["rank"], calls["call"], strict=True), calls["key"], strict=True))
    names = []
    for step in steps:
        op = Op(step["op"])
        if op == Op.RUN:
            names.append(" ".join(str(part) for part in made.classes[step["cls"]][1:]))
        elif op in (Op.POST, Op.COMM, Op.WAIT):
            names.append(str(keys[speakers[of_role[step["rank"]]], step["call"]]))
        else:
            names.append("")
    return {
        "step": np.arange(len(steps)),
        "rank": steps["rank"],
        "lane": steps["lane"],
        "what": [Op(op).name for op in steps["op"]],
        "name": names,
        "start_ns": steps["start_ns"],
        "end_ns": steps["end_ns"],
        "slack_ns": steps["slack_ns"],
    }


def _sources(steps: np.ndarray, made: Replayable) -> dict[str, dict[str, float]]:
    """On what the time of the critical path rests: its share by source.

    Every nanosecond of the traced iteration lies in one step: a segment of
    computation, or the transfer that a wait was for.
    """
    handles = [_transfer_classes(program) for program in made.world.programs]
    taken: dict[tuple[str, str], int] = defaultdict(int)
    for step in steps:
        ns = int(step["end_ns"] - step["start_ns"])
        number = made.world.ranks[step["rank"]].program
        at = made.world.programs[number].lanes[step["lane"]].body[step["position"]]
        if at.op == Op.RUN:
            taken["compute", made.durations[at.cls].source] += ns
        elif at.op in (Op.COMM, Op.WAIT):
            taken["transfers", made.durations[handles[number][at.handle]].source] += ns
    total = max(1, sum(taken.values()))
    found: dict[str, dict[str, float]] = {"compute": {}, "transfers": {}}
    for (what, source), ns in sorted(taken.items()):
        found[what][source] = round(ns / total, 6)
    return found


def _transfer_classes(program: Program) -> dict[int, int]:
    """By the handle under which calls are waited for, their duration class."""
    return {
        i.handle: i.cls
        for lane in program.lanes
        for section in (lane.prologue, lane.body, lane.epilogue)
        for i in section
        if i.op in (Op.POST, Op.COMM)
    }


def _summary(frame: dict[str, np.ndarray], iterations: int) -> dict[str, Any]:
    """The last iteration: it is over when its last rank is."""
    ends = {k: frame["end_ns"][frame["iteration"] == k] for k in range(iterations + 1)}
    begin = ends[iterations - 1].max() if len(ends.get(iterations - 1, ())) else 0
    last = frame["iteration"] == iterations
    shares = {
        f"{part}_share": round(
            float(frame[f"{part}_ns"][last].sum() / max(1, frame["duration_ns"][last].sum())), 6
        )
        for part in _PARTS
    }
    return {
        "num_ranks": len(np.unique(frame["rank"])),
        "iteration_ns": int(ends[iterations].max() - begin) if len(ends[iterations]) else 0,
        "slowest_rank": int(frame["rank"][last][frame["end_ns"][last].argmax()]),
        **shares,
    }
