"""The reference measurement: a fixed small workload on one core, in a process of its own.

Run as a file (`python reference.py CORE`), so that it imports nothing of torch;
prints one JSON object. It says how fast the core computes and copies just now
(its clock, its caches, the memory behind them), and how much of it others use.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

# 33.6 million floating-point operations on matrices that a second-level cache holds.
MATRIX = 256
FLOPS = 2 * MATRIX**3
# Beyond a second-level cache.
COPY_BYTES = 16 << 20
REPEATS = 400
_WARM_UP = 10


def measure() -> dict[str, float]:
    """A matrix product and a copy in memory, in turn, so that both see the same machine.

    Returns:
        `matmul_ns` and `copy_ns`, medians of the time on the core, which others on
        the same core do not lengthen; and `others_share`, the share of the whole
        time in which the core was not ours.
    """
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((MATRIX, MATRIX), dtype=np.float32) for _ in range(2))
    product = np.empty_like(a)
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.empty_like(source)

    def both() -> tuple[int, int]:
        return (
            _taken(lambda: np.matmul(a, b, out=product)),
            _taken(lambda: np.copyto(target, source)),
        )

    for _ in range(_WARM_UP):
        both()
    start, used = time.perf_counter_ns(), time.thread_time_ns()
    times = [both() for _ in range(REPEATS)]
    passed, used = time.perf_counter_ns() - start, time.thread_time_ns() - used
    matmul, copy = (round(statistics.median(column)) for column in zip(*times, strict=True))
    return {
        "matmul_ns": matmul,
        "copy_ns": copy,
        "others_share": round(max(0.0, 1 - used / passed), 4),
    }


def _taken(work: Callable[[], object]) -> int:
    start = time.thread_time_ns()
    work()
    return time.thread_time_ns() - start


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    print(json.dumps(measure()))
