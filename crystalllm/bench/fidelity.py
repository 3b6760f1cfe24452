"""How close emulation comes to the real thing: two ranks over gloo, one core each.

Per case two real runs of both ranks and an emulated run of rank 0 take turns, block by block
(real, emulated, the other real, …). The emulated rank has the core that it has in the real
runs; the other rank is replayed by planning's profile, which was measured on the same core,
with transfer times and gloo's CPU time from a microbenchmark of the pair. Iterations are
taken at the same place in all, after the optimizer's step.

Equal real runs differ, too: how often gloo is slow differs from one pair of processes to the
next. So all runs are started anew several times; an emulated block is held against the mean of
both real ones, and one real run against the other. Starts are added until the interval of the
median ratio is narrow enough, or there are enough; the bootstrap draws starts, and their rounds.

A shared machine is faster and slower by a tenth and more from one second to the next, for both
ranks of the real run alike. So the replayed rank follows the speed of the one that runs
(`emulate --follow-speed`). And since the slower of two ranks is what counts, its computation is
drawn from the spread that planning saw (`--draw`), not always the median.

Memory is compared in runs of its own, since keeping account of it takes time.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from crystalllm import cores, fidelity, planning, sandbox
from crystalllm.bench.emulated_rank import GATE, NAME
from crystalllm.bench.gate import Gates, LateError
from crystalllm.bench.memory_fidelity import memory_difference
from crystalllm.bench.real_rank import SPEC
from crystalllm.capture import capture
from crystalllm.config import Job, Parallelism
from crystalllm.errors import UserError
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.program import Capture
from crystalllm.sandbox.followed import program_iterations
from crystalllm.sandbox.processes import run_workers
from crystalllm.transfers import resolve

_MODEL = (
    "--layers 4 --hidden 256 --heads 8 --sequence 128 --micro-batch 1 --steps {iterations} "
    "--seed {seed} --log-ranks all "
)
CASES = {
    "ddp": (Parallelism(dp=2), "--dp 2 --data-parallel ddp --num-microbatches 2"),
    "fsdp2": (Parallelism(dp=2), "--dp 2 --data-parallel fsdp --num-microbatches 2"),
    "tp": (Parallelism(tp=2), "--tp 2 --num-microbatches 2"),
    "pp": (Parallelism(pp=2), "--pp 2 --num-microbatches 4"),
}
_RANK = 0
_WORLDS = ("real-a", "real-b")
_WARM_UP = 5
_BLOCK = 12
_COLD = 2
_ITERATIONS = 12
_PLANNED = 40  # of each slice
_PASSES = 3
_LEAST_STARTS = 3
_STARTS = 8  # at most
_MOST_PAIRS = 60
_HALF_WIDTH = 0.015
_DRAWS = 4000
# Starts of a case in which a real rank may die of a signal or hang: gloo's threads do, now and
# then, in tensor parallel ranks (docs/accuracy.md).
_MOST_DIED = 3
_END_LIMIT_S = 60
_SIZE = 2


class _RealRankDiedError(UserError):
    """Of a signal, or it hung: neither the emulation nor the program has failed."""


@dataclass(frozen=True)
class _Case:
    name: str
    job: Job
    folder: Path
    cores: tuple[int, int]  # of rank 0 and of rank 1; planning keeps the lower one for the replay
    captured: Capture
    profile: DurationTable


def main(*, device: str = "cpu", cases: Sequence[str] = (), max_pairs: int = _MOST_PAIRS) -> None:
    """Prints a line per case; the last line is one JSON object."""
    here = cores.separate()
    unknown = sorted(set(cases) - set(CASES))
    if device != "cpu" or unknown or len(here) < _SIZE:
        raise UserError(
            "Fidelity cannot be measured so",
            where=f"Device {device}, {len(here)} physical cores, cases {', '.join(cases) or 'all'}",
            do=f"Use --device cpu with {_SIZE} cores or more, and cases of {', '.join(CASES)}",
        )
    found = []
    for name in cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            case = _prepare(name, Path(folder), (here[1], here[0]))
            found.append(_measure(case, max_pairs) | _memory(case))
        print(json.dumps(found[-1]), flush=True)
    result = {
        "name": "fidelity",
        "device": "cpu",
        "emulated_with": "--draw --follow-speed",
        "cases": found,
        "iterations_per_block": _BLOCK - _COLD,
        "cores": len(here),
        "machine": platform.machine(),
        "torch": _torch_version(),
        "load_before": round(psutil.getloadavg()[2], 2),
    }
    print(json.dumps(result))


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _prepare(name: str, folder: Path, pair: tuple[int, int]) -> _Case:
    parallelism, arguments = CASES[name]
    job = Job(
        program="-m crystalllm.examples.gpt",
        arguments=_MODEL + arguments,
        world_size=_SIZE,
        parallelism=parallelism,
        ranks_per_node=8,
        iterations=_ITERATIONS,
        capture_iterations=5,
    )
    capture(job, folder / "capture", strategy="all")
    captured = Capture.read(folder / "capture")
    times = resolve.measure(captured, pair)
    planning.planning(
        job,
        folder / "planning",
        capture=folder / "capture",
        transfers=lambda c: resolve.transfer_durations(c, measured=times),
        options=planning.Options(
            iterations=_PLANNED,
            warm_up=_WARM_UP,
            max_passes=_PASSES,
            tolerance=1e-9,  # all of them, settled or not
        ),
        cores=pair,
    )
    profile = DurationTable.load(folder / "planning" / "profile.parquet")
    return _Case(name, job, folder, pair, captured, profile)


def _measure(case: _Case, max_pairs: int) -> dict[str, Any]:
    num_rounds = max(1, max_pairs // _STARTS)
    # Starts x rounds x (one real run, emulated, the other real run); medians of blocks, in ns.
    found: list[np.ndarray] = []
    interval = (0.0, np.inf)
    died = 0
    while len(found) < _LEAST_STARTS or (
        (interval[1] - interval[0]) / 2 > _HALF_WIDTH and len(found) < _STARTS
    ):
        try:
            found.append(_start(case, num_rounds, case.folder / f"start-{len(found)}-{died}"))
        except _RealRankDiedError as error:
            died += 1
            if died > _MOST_DIED:
                raise
            print(f"Started again: {error}", file=sys.stderr, flush=True)
            continue
        taken = np.array(found)
        ratios = taken[:, :, 1] / taken[:, :, (0, 2)].mean(axis=2)
        interval = _interval(ratios)
        _tell(case.name, ratios, interval)
    between = taken[:, :, 2] / taken[:, :, 0]
    return {
        "name": case.name,
        "world_size": _SIZE,
        "traits": fidelity.traits(case.captured),
        "ratio": round(float(np.median(ratios)), 5),
        "ratio_interval": [round(x, 5) for x in interval],
        "real_real_ratio": round(float(np.median(between)), 5),
        "real_real_interval": [round(x, 5) for x in _interval(between)],
        "real_ms": round(float(np.median(taken[:, :, (0, 2)])) / 1e6, 3),
        "emulated_ms": round(float(np.median(taken[:, :, 1])) / 1e6, 3),
        "n": ratios.size,
        "starts": len(found),
        "starts_died": died,
    }


def _tell(name: str, ratios: np.ndarray, interval: tuple[float, float]) -> None:
    """How far it is."""
    low, high = interval
    print(
        f"{name}: start {len(ratios)} of at most {_STARTS}, ratio {np.median(ratios):.3f} "
        f"({low:.3f} to {high:.3f}, n {ratios.size})",
        file=sys.stderr,
        flush=True,
    )


def _start(case: _Case, num_rounds: int, folder: Path) -> np.ndarray:
    """Rounds of new processes; medians of blocks, as `_measure` has them."""
    folder.mkdir()
    with _running(case, num_rounds, folder) as gates:

        def block(name: str, iterations: int) -> float:
            ranks = [f"{name}-{rank}" for rank in range(_SIZE)] if name in _WORLDS else [name]
            return _median(gates.turn(ranks, iterations)[ranks[_RANK]])

        order = (_WORLDS[0], NAME, _WORLDS[1])
        for name in order:
            block(name, _WARM_UP)
        return np.array([[block(name, _BLOCK) for name in order] for _ in range(num_rounds)])


def _memory(case: _Case) -> dict[str, Any]:
    differences = memory_difference(
        case.job,
        _RANK,
        case.folder / "memory",
        capture=case.folder / "capture",
        captured=case.captured,
        durations=case.profile,
        cores=case.cores,
    )
    return {
        "memory_diff_bytes": max(map(abs, differences.values()), default=0),
        "memory_differs": differences,
    }


def _median(times: Sequence[int]) -> float:
    """Of a block's iterations, in ns; the first ones come from a standstill."""
    return float(np.median(np.diff(times)[_COLD:]))


def _interval(ratios: np.ndarray) -> tuple[float, float]:
    """95 % of the median, by the bootstrap over starts and their rounds.

    Args:
        ratios: Starts x rounds.
    """
    chance = np.random.default_rng(0)
    num_starts, num_rounds = ratios.shape
    starts = chance.integers(num_starts, size=(_DRAWS, num_starts, 1))
    rounds = chance.integers(num_rounds, size=(_DRAWS, num_starts, num_rounds))
    medians = np.median(ratios[starts, rounds].reshape(_DRAWS, -1), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


@contextmanager
def _running(case: _Case, num_rounds: int, folder: Path) -> Iterator[Gates]:
    """All runs, each waiting for its turn; they end with the context."""
    gates = Gates(folder)
    bodies = 2 * _WARM_UP + _BLOCK * num_rounds
    iterations = program_iterations(case.captured, bodies)
    for name in _WORLDS:
        (folder / name).mkdir()
        spec = {
            "name": name,
            "command": list(case.job.command(iterations=iterations)),
            "cores": case.cores,
            "gate": gates.address,
        }
        (folder / name / SPEC).write_text(json.dumps(spec))
    os.environ[GATE] = gates.address
    setup = sandbox.Setup(
        job=case.job,
        ranks=(_RANK,),
        capture=case.folder / "capture",
        durations=case.profile,
        iterations=bodies,
        warm_up=0,
        follows_speed=True,
        draw=True,
        cores=case.cores[:1],
        memory=False,
    )
    with ThreadPoolExecutor(len(_WORLDS) + 1) as pool:
        runs = [
            *(
                pool.submit(run_workers, "crystalllm.bench.real_rank", folder / name, _SIZE)
                for name in _WORLDS
            ),
            pool.submit(
                sandbox.run,
                setup,
                folder / "emulated",
                capture=case.captured,
                worker="crystalllm.bench.emulated_rank",
            ),
        ]
        try:
            ranks = [f"{name}-{rank}" for name in _WORLDS for rank in range(_SIZE)]
            gates.accept([*ranks, NAME])
            yield gates
        except (EOFError, OSError, TimeoutError) as error:
            if isinstance(error, LateError):
                is_real = error.name != NAME
                gates.kill()
            else:
                _end(gates, runs)
                ended = [run.result() for run in runs[: len(_WORLDS)]]
                is_real = any(failure is not None and failure.exit_code < 0 for failure in ended)
            logs = [*folder.glob("real-*/rank-*.log"), *folder.glob("emulated/rank-*/log.txt")]
            raise (_RealRankDiedError if is_real else UserError)(
                f"A run of case {case.name} has ended: {error!r}",
                where="; ".join(f"{log.name}: {log.read_text()[-1000:]}" for log in logs),
                do="Read what it says",
            ) from error
        finally:
            _end(gates, runs)


def _end(gates: Gates, runs: Sequence[Future[Any]]) -> None:
    gates.stop()
    if wait(runs, _END_LIMIT_S).not_done:
        gates.kill()
    for run in runs:
        run.result()
