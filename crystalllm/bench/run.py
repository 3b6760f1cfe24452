"""`bench run`: what it costs to be a logical rank on this machine.

Prints a table of what it does and, as its last line, one JSON object:

- `init_8192_s`: seconds of init_process_group in a world of 8192, and
  `device_mesh_8192_s` of a 3-d DeviceMesh over it. Median of five processes,
  beyond imports.
- `op_us`: microseconds per blocking call by collective, 1024 float32 elements
  per rank in a group of 512. Median of the repetitions.
- `mates_us`: the same with two ranks side by side in a group of 8, and in gloo's own
  group of the two ("pair_…"); "4m" are four million elements per rank.
- `overshoot_us`: by how much a timed call ends after its release time, as
  {"50us": {"p50": …, "p99": …}, …}.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from crystalllm import warm
from crystalllm.identity import Identity
from crystalllm.mates import Mates

_ELEMENTS = 1024
_GROUP = 512
_WORLD = 8192
_INIT_RUNS = 5
_OVERSHOOT_RUNS = {50_000: 1000, 1_000_000: 500, 20_000_000: 100}
_OP_RUNS = 300
_MATES = (1, 5)
_LARGE_RUNS = 20  # of a sum that grows eightfold each time


def main() -> None:
    """Runs all of it, in forks of one warm process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warm.prepare()
    runs = [
        warm.call(_initialise, Identity(rank=_WORLD // 2 + 1 + i, world_size=_WORLD))
        for i in range(_INIT_RUNS)
    ]
    init = statistics.median(r[0] for r in runs)
    mesh = statistics.median(r[1] for r in runs)
    print(f"init_process_group at {_WORLD} ranks: {init:.4f} s; 3-d DeviceMesh: {mesh:.3f} s")

    ops = warm.call(_time_ops, Identity(rank=137, world_size=_GROUP))
    for name, micros in ops.items():
        print(f"{name:24s} {micros:9.1f} us")

    mates = _of_mates()
    for name, micros in mates.items():
        print(f"two ranks: {name:24s} {micros:9.1f} us")

    overshoot = {}
    for release_ns, repetitions in _OVERSHOOT_RUNS.items():
        late = warm.call(
            lambda n=repetitions, t=release_ns: _time_release(n, t),
            Identity(rank=0, world_size=_GROUP),
            transfer_ns=release_ns,
        )
        label = f"{release_ns // 1000}us" if release_ns < 1_000_000 else f"{release_ns // 10**6}ms"
        overshoot[label] = {"p50": _quantile(late, 0.5), "p99": _quantile(late, 0.99)}
        print(f"release after {label}: late by {overshoot[label]} us")
    print(
        json.dumps(
            {
                "init_8192_s": round(init, 5),
                "device_mesh_8192_s": round(mesh, 4),
                "op_us": ops,
                "mates_us": mates,
                "overshoot_us": overshoot,
            }
        )
    )


def _initialise() -> tuple[float, float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    start = time.perf_counter()
    dist.init_process_group("gloo")
    initialised = time.perf_counter()
    init_device_mesh("cpu", (_WORLD // 64, 8, 8), mesh_dim_names=("dp", "pp", "tp"))
    return initialised - start, time.perf_counter() - initialised


def _time_ops() -> dict[str, float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    n = _GROUP
    x = torch.ones(_ELEMENTS)
    chunk = torch.ones(_ELEMENTS // n)
    many = torch.ones(_ELEMENTS * n)
    parts = list(many.chunk(n))
    ops: dict[str, Callable[[], Any]] = {
        # A sum would grow from call to call, and infinite numbers are slower.
        "all_reduce": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX),
        "all_reduce_sum": lambda: dist.all_reduce(x.fill_(1.0)),
        "broadcast": lambda: dist.broadcast(x, src=0),
        "reduce": lambda: dist.reduce(x, dst=0),
        "all_gather": lambda: dist.all_gather(parts, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(many, x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(chunk, x),
        "all_to_all_single": lambda: dist.all_to_all_single(x, x.clone()),
        "gather": lambda: dist.gather(x, None, dst=0),
        "scatter": lambda: dist.scatter(x, None, src=0),
        "send": lambda: dist.send(x, 0),
        "recv": lambda: dist.recv(x, 0),
        "barrier": dist.barrier,
    }
    return {name: round(_median_us(op), 2) for name, op in ops.items()}


def _of_mates() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = warm.call_together(
            _time_mates,
            [Identity(rank=rank, world_size=8) for rank in _MATES],
            mates=Mates(ranks=_MATES, store=f"file://{folder}/store", limit_s=60),
        )
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return outcomes[0].value


def _time_mates() -> dict[str, float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    pair = dist.new_group(list(_MATES))
    is_first = dist.get_rank() == _MATES[0]
    x = torch.ones(_ELEMENTS)

    def message() -> None:
        dist.send(x, _MATES[1]) if is_first else dist.recv(x, _MATES[0])

    ops: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX),
        "pair_all_reduce": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX, group=pair),
        "broadcast": lambda: dist.broadcast(x, src=_MATES[0]),
        "message": message,
        "barrier": dist.barrier,
    }
    found = {name: round(_median_us(op), 2) for name, op in ops.items()}
    for dtype in (torch.float32, torch.bfloat16):
        for prefix, group in (("", None), ("pair_", pair)):
            large = torch.ones(4_000_000, dtype=dtype)
            sum_of_large = functools.partial(dist.all_reduce, large, group=group)
            micros = _median_us(sum_of_large, warm_up=2, runs=_LARGE_RUNS)
            found[f"{prefix}all_reduce_4m_{str(dtype).removeprefix('torch.')}"] = round(micros, 2)
    return found


def _median_us(op: Callable[[], Any], *, warm_up: int = 20, runs: int = _OP_RUNS) -> float:
    for _ in range(warm_up):
        op()
    times = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        op()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def _time_release(repetitions: int, transfer_ns: int) -> list[float]:
    """Microseconds by which each wait ended after its release time."""
    import torch
    import torch.distributed as dist

    from crystalllm import logical, native

    dist.init_process_group("gloo")
    world, now_ns = logical.world(), native.load().now_ns
    world.keep_records(True)
    x = torch.ones(_ELEMENTS)
    late = []
    for _ in range(repetitions):
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        ended = now_ns()
        (release,) = world.take_records()["release_ns"]
        late.append((ended - release) / 1000)
    return late


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 2)
