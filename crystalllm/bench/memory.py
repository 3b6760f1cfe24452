"""`bench memory`: what it costs to keep the account of a rank's memory.

Prints as its last line one JSON object:

- `ns_per_block`: nanoseconds by which taking and giving back a block of 64 bytes takes
  longer with the account than without. Pieces with and without take turns in one
  process; median of the differences between neighbours.
- `blocks_per_iteration` of a small GPT (FSDP2, four layers, hidden 256),
  `hooks_us_per_iteration` (what the hooks of modules, optimizers and FSDP take, and
  a look at all parameters after each backward), and `iteration_ms`. Medians.
- `overhead_fraction`: blocks and hooks of an iteration by its time. On a machine that
  others use, too, the difference of two iterations would drown in noise.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from crystalllm import logical, memory, native, warm
from crystalllm.identity import Identity

_PIECES = 300
_BLOCKS_PER_PIECE = 2000
_ITERATIONS = 40
_WARM_UP = 5
_LOOKS = 200
_GPT = {
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "sequence": 128,
    "data": "synthetic",
    "micro_batch": 2,
    "global_batch": 4,
}


def main() -> None:
    """Runs all of it, in a fork of a warm process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warm.prepare()
    blocks_ns, found = warm.call(_measure, Identity(rank=0, world_size=2))
    low, middle, high = statistics.quantiles(blocks_ns, n=4)
    print(f"a block: {middle:.0f} ns more (quartiles {low:.0f} and {high:.0f})")
    cost_ms = found["blocks_per_iteration"] * middle / 1e6 + found["hooks_us_per_iteration"] / 1e3
    print(f"an iteration: {cost_ms:.2f} of {found['iteration_ms']:.1f} ms")
    fraction = cost_ms / found["iteration_ms"]
    print(json.dumps({"ns_per_block": middle, **found, "overhead_fraction": fraction}))


def _measure() -> tuple[list[float], dict[str, float]]:
    """Differences between neighbouring pieces, and the rest of the result."""
    import torch
    import torch.distributed as dist

    memory.start(logical.world())
    account = native.load().memory

    def piece(is_kept: bool) -> float:
        account.unwatch(not is_kept)
        begin = time.perf_counter_ns()
        for _ in range(_BLOCKS_PER_PIECE):
            torch.empty(16)
        end = time.perf_counter_ns()
        account.unwatch(is_kept)
        return (end - begin) / _BLOCKS_PER_PIECE

    piece(True)
    blocks_ns = [piece(True) - piece(False) for _ in range(_PIECES)]
    dist.init_process_group("gloo")
    iterations_s, hooks_s, look_s = _train(account)
    columns, _ = memory.finish(logical.world(), epoch_ns=0)
    taken = columns["iteration"][columns["bytes"] > 0]
    return blocks_ns, {
        "blocks_per_iteration": float(np.median(np.bincount(taken)[_WARM_UP:_ITERATIONS])),
        "hooks_us_per_iteration": 1e6 * (statistics.median(hooks_s) + look_s),
        "iteration_ms": 1e3 * statistics.median(iterations_s),
    }


def _train(account: Any) -> tuple[list[float], list[float], float]:
    """Seconds of each iteration, of its hooks, and of one look at all parameters."""
    from crystalllm.examples.gpt import log, train
    from crystalllm.examples.gpt.config import Config

    in_hooks_s = _time_hooks()
    came: list[tuple[float, float]] = []  # when an iteration ended, time in hooks until then
    looks: list[float] = []

    class Timed(log.Log):
        def write(self, **values: Any) -> None:
            came.append((time.perf_counter(), in_hooks_s()))

        def close(self) -> None:  # the model is still there
            begin = time.perf_counter()
            for _ in range(_LOOKS):
                account.look_at_parameters()
            looks.append((time.perf_counter() - begin) / _LOOKS)

    train.Log = Timed
    train.train(Config(world_size=2, steps=_ITERATIONS, **_GPT))
    times = np.diff(np.array(came), axis=0)[_WARM_UP:]
    return times[:, 0].tolist(), times[:, 1].tolist(), looks[0]


def _time_hooks() -> Callable[[], float]:
    """Wraps what the hooks call; gives the seconds that it has taken so far."""
    from crystalllm.memory.observer import observer

    seen, total = observer(), [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                total[0] += time.perf_counter() - begin

        return call

    for name in ("step_begins", "step_ended", "parameters_made", "gradients_made"):
        setattr(seen, name, timed(getattr(seen, name)))
    return lambda: total[0]
