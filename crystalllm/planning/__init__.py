"""`planning`: measures how long everything takes, by running chosen ranks for real.

What it leaves in `results/<job>/planning/` is described in docs/planning.md and,
column by column, in docs/tables.md.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crystalllm import artifacts, sandbox
from crystalllm.config import Job, load_cluster
from crystalllm.errors import UserError
from crystalllm.planning import calibration, devices, explanation, passes, results
from crystalllm.planning import plan as plans
from crystalllm.planning.passes import RunSlice, Say
from crystalllm.planning.plan import Options, Plan, Slice
from crystalllm.replay.durations import Duration, DurationTable
from crystalllm.replay.program import Capture
from crystalllm.tables import MEASURED_TRANSFERS
from crystalllm.transfers.measured import MeasuredTransfers
from crystalllm.transfers.resolve import ToBeMeasured, transfer_durations
from crystalllm.transfers.resolve import measure as measure_transfers
from crystalllm.transfers.table import TransferTable

__all__ = ["Options", "Plan", "explain", "planning", "run_share", "transfers_from"]

# How long the transfers of a capture take, for `DurationTable.transfers`.
Transfers = Callable[[Capture], Mapping[str | tuple[str, str], Duration]]


def transfers_from(
    job: Job,
    *,
    cluster: str | None = None,
    files: Sequence[Path] = (),
    measured: Path | None = None,
    measure_on: Sequence[int] = (),
    later: bool = False,
) -> Transfers:
    """Transfer times as they were measured, then from tables, then from the model.

    Args:
        job: Whose target cluster the model is of.
        cluster: Another one, by name or path.
        files: Output of nccl-tests.
        measured: Transfers between real gloo processes of this host, which are their own
            target then (`transfers.measured`).
        measure_on: Cores, one for each process, on which they are measured into
            `measured` if that file is not there, or is of another capture.
        later: Nothing is measured yet; what nothing else tells takes no time until it is.

    Raises:
        UserError: A file cannot be read, or nothing says how long transfers take.
    """
    name = cluster or job.cluster
    if name is None and not files and measured is None and not later:
        raise UserError(
            "How long transfers take is not known",
            where="The job names no cluster, and there is no table",
            do="Name one (key cluster of the job, or --cluster), pass --nccl-tests FILE, or "
            "--measure-gloo",
        )
    model = load_cluster(name) if name is not None else None
    tables_ = [TransferTable.load(*files)] if files else []

    def find(captured: Capture) -> Mapping[str | tuple[str, str], Duration]:
        real = None
        if measured is not None:
            at = {"fingerprint": captured.structure["fingerprint"], "cores": list(measure_on)}
            if measure_on and not _is_measured(measured, at):
                measure_transfers(captured, measure_on).save(measured, provenance=at)
            real = MeasuredTransfers.load(measured) if measured.exists() else None
        sources = [*tables_, ToBeMeasured()] if later and model is None else tables_
        return transfer_durations(captured, cluster=model, tables=sources, measured=real)

    return find


def _is_measured(path: Path, at: Mapping[str, Any]) -> bool:
    """Whether there are transfers of this capture, on these cores."""
    return path.exists() and MEASURED_TRANSFERS.provenance(path) == at


def planning(
    job: Job,
    out: Path,
    *,
    capture: Path,
    transfers: Transfers,
    options: Options | None = None,
    cores: Sequence[int] | None = None,
    run_slice: RunSlice | None = None,
    measure: calibration.Measure = calibration.measure,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measures what `job` takes, into `out`.

    Args:
        job: What runs.
        out: Folder of the results; `.work` lies beside it.
        capture: Its capture.
        transfers: Tells how long they take, and what that rests on (`transfers_from`).
        options: How to plan.
        cores: Of this host that may be used; all by default.
        run_slice: Runs one slice; by default in the sandbox of this host.
        measure: Takes the reference of the calibration.
        say: Called with lines that tell how it goes.

    Returns:
        What planning.json says.

    Raises:
        UserError: The capture does not fit, a wish needs more devices than there
            are, another planning of the job is running, or a slice did not end well.
    """
    plan, captured, first = _prepare(job, capture, transfers, options, cores)
    run_slice = run_slice or _in_sandbox(plan, artifacts.capture_folder(capture), captured)
    with _alone(work_folder(out)):
        conditions = results.conditions()
        work = work_folder(out) / plan.digest
        plan.save(work / "plan.json")
        found = passes.run_passes(
            plan, captured, first, work, run_slice=run_slice, measure=measure, say=say
        )
        return results.write(plan, found, conditions, work, out)


def run_share(
    job: Job,
    out: Path,
    *,
    capture: Path,
    transfers: Transfers,
    number: int,
    share: tuple[int, int],
    options: Options | None = None,
    cores: Sequence[int] | None = None,
    say: Say = lambda line: None,
) -> None:
    """A part of one pass of `planning`, for several hosts that work on a pass together.

    `planning` with the same arguments goes on from what its shares have left in `.work`.

    Args:
        job, out, capture, transfers, options, cores, say: As for `planning`.
        number: Of the pass, from 1.
        share: (i, n): every n-th slice from the i-th, counted from 0.

    Raises:
        UserError: As `planning`.
    """
    plan, captured, first = _prepare(job, capture, transfers, options, cores)
    with _alone(work_folder(out), among_shares=True):
        work = work_folder(out) / plan.digest
        plan.save(work / "plan.json")
        passes.run_share(
            plan,
            captured,
            first,
            work,
            number=number,
            share=share,
            run_slice=_in_sandbox(plan, artifacts.capture_folder(capture), captured),
            measure=calibration.measure,
            say=say,
        )


def explain(
    job: Job,
    out: Path,
    *,
    capture: Path,
    transfers: Transfers,
    options: Options | None = None,
    cores: Sequence[int] | None = None,
) -> dict[str, Any]:
    """What `planning` with these arguments would do (see `explanation.explain`); runs nothing.

    Raises:
        UserError: As `planning`, before its first slice.
    """
    plan, captured, first = _prepare(job, capture, transfers, options, cores)
    with tempfile.TemporaryDirectory() as folder:
        world = passes.replay_world(plan, captured, first, Path(folder))
    return explanation.explain(
        plan,
        captured,
        first,
        replayed=world,
        earlier=explanation.finished_slices(work_folder(out), plan.roles),
    )


def _prepare(
    job: Job,
    capture: Path,
    transfers: Transfers,
    options: Options | None,
    cores: Sequence[int] | None,
) -> tuple[Plan, Capture, DurationTable]:
    """The plan, what was captured, and first estimates: every role as it took while capturing."""
    captured = Capture.read(capture)
    plan = plans.make(job, captured, options or Options(), devices.of_this_host(cores))
    first = captured.captured_durations()
    first.transfers = dict(transfers(captured))
    return plan, captured, first


def _in_sandbox(plan: Plan, folder: Path, captured: Capture) -> RunSlice:
    """Runs slices on this host, their peers replayed live."""

    def run_slice(slice_: Slice, durations: DurationTable, out: Path) -> Mapping[str, Any]:
        setup = sandbox.Setup(
            job=plan.job,
            ranks=slice_.ranks,
            capture=folder,
            durations=durations,
            iterations=plan.options.iterations,
            warm_up=plan.options.warm_up,
            seed=plan.options.seed,
            cores=slice_.cores,
            memory=False,  # a timeline of memory takes time from what is measured
            share_links=plan.options.share_links,
            eager_bytes=plan.options.eager_bytes,
        )
        return sandbox.run(setup, out, capture=captured)

    return run_slice


def work_folder(out: Path) -> Path:
    """What plannings of the job keep, each in a folder named by the digest of its plan."""
    return out.parent / ".work" / "planning"


@contextmanager
def _alone(work: Path, *, among_shares: bool = False) -> Iterator[None]:
    """Two plannings of a job at a time would run each other's slices, and spoil their times.

    Shares of one planning have slices of their own, on hosts of their own.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if among_shares else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                "Another planning of this job is running",
                where=f"Folder {work}",
                do="Wait for it, or end it",
            ) from None
        yield
