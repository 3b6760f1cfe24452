"""How close emulation comes to the real thing: two ranks over gloo, one core each.

Per case a real run of both ranks and an emulated run of rank 0 take turns, block by block
(real, emulated, real, emulated, …). The emulated rank has the core that it has in the real
run; the other rank is replayed by planning's profile, which was measured on the same core,
with transfer times and gloo's CPU time from a microbenchmark of the pair. Iterations are
taken at the same place in both, after the optimizer's step. Pairs of blocks are added until
the bootstrap interval of the median ratio is narrow enough, or there are enough of them.

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
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from crystalllm import cores, fidelity, planning, sandbox
from crystalllm.bench.emulated_rank import GATE, NAME
from crystalllm.bench.gate import Gates
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
_REAL = ("real-0", "real-1")
_WARM_UP = 5
_BLOCK = 12
_COLD = 2
_ITERATIONS = 12
_PLANNED = 40  # of each slice
_PASSES = 3
_LEAST_PAIRS = 5
_MOST_PAIRS = 60
_HALF_WIDTH = 0.015
_SIZE = 2


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
    real, emulated = [], []
    interval = (0.0, np.inf)
    with _running(case, max_pairs) as gates:
        gates.turn(_REAL, _WARM_UP)
        gates.turn([NAME], _WARM_UP)
        while len(real) < min(_LEAST_PAIRS, max_pairs) or (
            (interval[1] - interval[0]) / 2 > _HALF_WIDTH and len(real) < max_pairs
        ):
            real.append(_median(gates.turn(_REAL, _BLOCK)[_REAL[_RANK]]))
            emulated.append(_median(gates.turn([NAME], _BLOCK)[NAME]))
            interval = _interval(np.array(emulated) / np.array(real))
    ratios = np.array(emulated) / np.array(real)
    # Neighbours in time, as the real and the emulated block of a pair are.
    again = np.array(real[1:]) / np.array(real[:-1])
    return {
        "name": case.name,
        "world_size": _SIZE,
        "traits": fidelity.traits(case.captured),
        "ratio": round(float(np.median(ratios)), 5),
        "ratio_interval": [round(float(x), 5) for x in interval],
        "real_real_ratio": round(float(np.median(again)), 5),
        "real_real_interval": [round(float(x), 5) for x in _interval(again)],
        "real_ms": round(float(np.median(real)) / 1e6, 3),
        "emulated_ms": round(float(np.median(emulated)) / 1e6, 3),
        "n": len(ratios),
    }


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
    """95 % of the median, by the bootstrap."""
    draws = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(high)


@contextmanager
def _running(case: _Case, max_pairs: int) -> Iterator[Gates]:
    """Both runs, each waiting for its turn; they end with the context."""
    gates = Gates(case.folder)
    bodies = 2 * _WARM_UP + _BLOCK * max_pairs
    iterations = program_iterations(case.captured, bodies)
    spec = {
        "command": list(case.job.command(iterations=iterations)),
        "cores": case.cores,
        "gate": gates.address,
    }
    (case.folder / SPEC).write_text(json.dumps(spec))
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
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run_workers, "crystalllm.bench.real_rank", case.folder, _SIZE),
            pool.submit(
                sandbox.run,
                setup,
                case.folder / "emulated",
                capture=case.captured,
                worker="crystalllm.bench.emulated_rank",
            ),
        ]
        try:
            gates.accept([*_REAL, NAME])
            yield gates
        except (EOFError, OSError, TimeoutError) as error:
            logs = [*case.folder.glob("real-*.log"), *case.folder.glob("emulated/rank-*/log.txt")]
            raise UserError(
                f"A run of case {case.name} has ended: {error!r}",
                where="; ".join(f"{log.name}: {log.read_text()[-1000:]}" for log in logs),
                do="Read what it says",
            ) from error
        finally:
            gates.stop()
            for run in runs:
                run.result()
