"""How far the memory of an emulated rank is from that of the same rank of a real run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crystalllm import sandbox
from crystalllm.bench.accounted_rank import SPEC
from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.program import Capture
from crystalllm.sandbox.followed import program_iterations
from crystalllm.sandbox.processes import run_workers

_BODIES = 3
# A thread lets go of a call's tensors a moment earlier in one run than in another, real or
# emulated, so that equal runs differ now and then: the least of some is what is compared.
_MOST_RUNS = 6


def memory_difference(
    job: Job,
    rank: int,
    folder: Path,
    *,
    capture: Path,
    captured: Capture,
    durations: DurationTable,
    cores: Sequence[int],
) -> dict[str, int]:
    """Differences of peaks, of all, of iterations and of categories; only what differs.

    Args:
        job: Its world has as many ranks as there are `cores`.
        rank: That is compared.
        folder: For what the runs leave; made here.
        capture, captured: Of the job.
        durations: With which the others are replayed.
        cores: One for each rank of the real run.

    Returns:
        By name of the peak, bytes of the emulated run less those of the real one.

    Raises:
        UserError: A run did not end well.
    """
    iterations = program_iterations(captured, _BODIES)
    setup = sandbox.Setup(
        job=job,
        ranks=(rank,),
        capture=capture,
        durations=durations,
        iterations=_BODIES - 1,
        warm_up=1,
        cores=(cores[rank],),
        memory=True,
    )
    real: dict[str, int] = {}
    emulated: dict[str, int] = {}
    for i in range(_MOST_RUNS):
        of_emulated = _of_emulated(setup, captured, folder / f"emulated-{i}")
        of_real = _of_real(job, rank, folder / f"real-{i}", iterations, cores)
        # The first iterations of a program may not be like the others; the sandbox counts
        # them together, as what comes before the first one.
        num_before = len(of_real["iterations"]) - len(of_emulated["iterations"])
        emulated = _least(emulated, peaks(of_emulated))
        real = _least(real, peaks(of_real, num_before))
        if real == emulated:
            break
    differences = {k: emulated.get(k, 0) - real.get(k, 0) for k in {**real, **emulated}}
    return {k: d for k, d in differences.items() if d}


def peaks(summary: Mapping[str, Any], num_before: int = 0) -> dict[str, int]:
    """By name, all peaks in what `memory.finish` says: bytes.

    Args:
        summary: As `memory.finish` says.
        num_before: Iterations after the first one that count as the first one, too.
    """
    of_iterations: dict[str, int] = {}
    for i in summary["iterations"]:
        name = f"iteration {max(0, i['iteration'] - num_before)}"
        of_iterations[name] = max(of_iterations.get(name, 0), i["peak_bytes"])
    of_categories = {f"most of {k}": v for k, v in summary["category_peaks"].items()}
    return {"peak": summary["peak"]["bytes"]} | of_iterations | of_categories


def _least(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {k: min(a.get(k, b[k]), b[k]) for k in b}


def _of_real(
    job: Job, rank: int, folder: Path, iterations: int, cores: Sequence[int]
) -> dict[str, Any]:
    folder.mkdir(parents=True)
    spec = {
        "job": job.model_dump(mode="json"),
        "command": list(job.command(iterations=iterations)),
        "cores": list(cores),
    }
    (folder / SPEC).write_text(json.dumps(spec))
    failure = run_workers("crystalllm.bench.accounted_rank", folder, job.world_size)
    if failure is not None:
        log = folder / f"accounted-{max(failure.number, 0)}.log"
        raise UserError(
            f"A real run that keeps account of its memory {failure.what}",
            where=f"{log}: {log.read_text(errors='replace')[-1000:] if log.exists() else ''}",
            do="Read what it says",
        )
    found: dict[str, Any] = json.loads((folder / f"memory-{rank}.json").read_text())
    return found


def _of_emulated(setup: sandbox.Setup, captured: Capture, folder: Path) -> dict[str, Any]:
    summary = sandbox.run(setup, folder, capture=captured)
    if summary["status"] != "ok":
        raise UserError(
            f"An emulated run ended as {summary['status']}: {summary['reason']}",
            where=f"Folder {folder}",
            do="Read what it says",
        )
    found: dict[str, Any] = summary["ranks_of_interest"][str(setup.ranks[0])]["memory"]
    return found
