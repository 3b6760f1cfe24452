"""How long a running program waits for the live replay's answer, and how late releases are.

One rank of 8192 (TP8, PP8) arrives in real time: it computes 1 ms, calls, and does
so some 900 times per iteration. Measured in C++ (nccl/replay/bench/live_bench.cpp)
from arrive() to the known release, over the calls that this arrival determines.
An engine with a thread spins, so it wants a core to itself beside the program's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from crystalllm import native

_WORLD = 8192
_ITERATIONS = 2
_COMPUTE_US = 1000
# How the engine gets its time, and how long its thread and waits spin, in us.
_MODES = {"caller": 50, "help": 20, "thread": 1_000_000, "process": 1_000_000}
_REPEATS = 5
_LIMIT_S = 120


def query_us(*, repeats: int = 3) -> dict[str, Any]:
    """p50 and p99 of the answers where the caller's own thread computes: medians and ranges."""
    with tempfile.TemporaryDirectory() as folder:
        program = _build(Path(folder))
        runs = [_one(program, "caller", _MODES["caller"]) for _ in range(repeats)]
    return _spread(runs, "query_us")


def main() -> None:
    """Prints a line per run; the last line is one JSON object, medians and ranges of the runs."""
    with tempfile.TemporaryDirectory() as folder:
        program = _build(Path(folder))
        found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in _MODES}
        for _ in range(_REPEATS):
            for mode, spin_us in _MODES.items():
                found[mode].append(_one(program, mode, spin_us))
    result = {
        "name": "live",
        "query_us": {mode: _spread(runs, "query_us") for mode, runs in found.items()},
        "late_us": {mode: _spread(runs, "late_us") for mode, runs in found.items()},
        "late_share": {
            mode: sum(r["late"] for r in runs) / sum(r["releases"] for r in runs)
            for mode, runs in found.items()
        },
        "answers": sum(r["num_answers"] for runs in found.values() for r in runs),
    }
    print(json.dumps(result))


def _build(folder: Path) -> Path:
    program = folder / "live_bench"
    replay = native.SOURCES / "replay"
    sources = [*sorted(replay.glob("*.cpp")), replay / "bench" / "live_bench.cpp"]
    command = [os.environ.get("CXX", "g++"), "-O3", "-std=c++20", "-pthread"]
    subprocess.run(
        [*command, f"-I{native.SOURCES}", *sources, "-o", program], check=True, timeout=_LIMIT_S
    )
    return program


def _one(program: Path, mode: str, spin_us: int) -> dict[str, Any]:
    arguments = [_WORLD, _ITERATIONS, mode, spin_us, _COMPUTE_US]
    done = subprocess.run(
        [program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    print(done.stdout, end="", flush=True)
    return json.loads(done.stdout)


def _spread(runs: list[dict[str, Any]], what: str) -> dict[str, Any]:
    spread: dict[str, Any] = {}
    for quantile in ("p50", "p99", "max"):
        values = [run[what][quantile] for run in runs]
        spread[quantile] = statistics.median(values)
        spread[f"{quantile}_range"] = [min(values), max(values)]
    return spread
