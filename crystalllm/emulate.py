"""`emulate`: ranks of interest run for real, all others are replayed by the runtime profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from crystalllm import artifacts, cores, fidelity, inspect, sandbox, tables
from crystalllm.chosen import ranks_from
from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.planning import calibration, transfers_from
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.program import Capture
from crystalllm.sandbox import outcome

PROFILE = "profile.parquet"
DEFAULT_WARM_UP = 2


def emulate(
    job: Job,
    out: Path,
    *,
    ranks: str,
    captured: Path,
    durations: Path,
    iterations: int | None = None,
    warm_up: int = DEFAULT_WARM_UP,
    pin: bool = True,
    cluster: str | None = None,
    nccl_tests: Sequence[Path] = (),
    **options: Any,
) -> dict[str, Any]:
    """Emulates ranks of `job` into `out`.

    Args:
        job: What runs.
        out: Folder of the results (`crystalllm.sandbox` says what is in it).
        ranks: Ranks of interest, such as "0,137" or "pp=5,tp=0" (all that are there).
        captured: Folder of the job's capture.
        durations: The runtime profile that planning has left, or another duration table.
        iterations: Periods of the program that count; the job's iterations by default.
        warm_up: Periods before them.
        pin: Keep each sandbox rank on a core of its own, and the replay on the others,
            where there are enough cores.
        cluster: Whose transfers count, by name or path; None leaves those of `durations`.
        nccl_tests: With a cluster, output of nccl-tests that comes before its model.
        options: Further fields of `sandbox.Setup`.

    Returns:
        What summary.json says; it is written whatever happens.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        setup, capture = _set_up(
            job,
            ranks=ranks,
            captured=captured,
            durations=durations,
            iterations=iterations or job.iterations,
            warm_up=warm_up,
            pin=pin,
            cluster=cluster,
            nccl_tests=nccl_tests,
            options=options,
        )
    except UserError as error:
        summary = outcome.refused(job.world_size, (), error)
        outcome.write(out, summary)
        return summary
    cores_used = (setup.cores or ()) if setup.timed else ()
    before = calibration.measure(cores_used)
    summary = sandbox.run(setup, out, capture=capture)
    after = calibration.measure(cores_used) if summary["status"] == "ok" else []
    summary["trust"] |= {
        "speed": _speed(tables.DURATIONS.provenance(durations).get("reference_ns"), before, after),
        "nearest_fidelity_case": fidelity.nearest(capture),
    }
    outcome.write(out, summary)
    return summary


def _speed(
    planned_ns: float | None,
    before: Sequence[calibration.Reading],
    after: Sequence[calibration.Reading],
) -> dict[str, Any]:
    """How fast the cores of the sandbox ranks were, against planning's: the gap of their clocks.

    Returns:
        `reference_ns` at planning, before and after, and `gap`: by which share the reference
        took longer than at planning; None where one of them is not known.
    """
    now = {"before": [r.ns for r in before], "after": [r.ns for r in after]}
    is_known = planned_ns is not None and all(now.values())
    taken = geometric_mean([*now["before"], *now["after"]]) if is_known else 0.0
    return {
        "reference_ns": {"planning": planned_ns, **now},
        "gap": round(taken / planned_ns - 1, 4) if planned_ns is not None and is_known else None,
    }


def _set_up(
    job: Job,
    *,
    ranks: str,
    captured: Path,
    durations: Path,
    iterations: int,
    warm_up: int,
    pin: bool,
    cluster: str | None,
    nccl_tests: Sequence[Path],
    options: dict[str, Any],
) -> tuple[sandbox.Setup, Capture]:
    folder = artifacts.capture_folder(captured)
    chosen = ranks_from(ranks, inspect.Capture(folder).axes)
    if not durations.exists():
        raise UserError(
            "There is no runtime profile, by which the other ranks would be replayed",
            where=f"File {durations}",
            do="Run: python -m crystalllm planning --job <job>, or pass --durations FILE",
        )
    capture = Capture.read(folder)
    table = DurationTable.load(durations)
    if cluster is not None:
        find = transfers_from(job, cluster=cluster, files=nccl_tests, measured=None)
        table.transfers = dict(find(capture))
    setup = sandbox.Setup(
        job=job,
        ranks=chosen,
        capture=folder,
        durations=table,
        iterations=iterations,
        warm_up=warm_up,
        cores=cores_for(len(chosen)) if pin else None,
        timeline=True,
        **options,
    )
    return setup, capture


def cores_for(num_ranks: int) -> tuple[int, ...] | None:
    """A core for each sandbox rank, if one is left for the replay: the first, as in planning."""
    free = cores.separate()[1:]
    return tuple(free[:num_ranks]) if num_ranks <= len(free) else None
