"""What the processes of a measurement of gloo share: calls, and computation between them."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# By how much the same work takes one process longer than another: calls of tensor
# parallel and FSDP2 ranks came 4 % of their computation apart, in the median.
UNEQUAL = (0.93, 1.07)

# Some of a layer's activations, weights of many layers (more than a core's caches hold), each
# used for as many steps as give a whole layer's, and what goes through memory. A step takes some
# 36 us: computation between calls is often no more than 100.
_ACTIVATIONS = torch.ones(8, 256)
_WEIGHTS = [torch.full((256, 256), 1 / 256) for _ in range(64)]
_STEPS_PER_WEIGHT = 16
_STREAMED = torch.ones(1 << 20)
_STREAMED_PER_STEP = 1 << 12
_steps = itertools.count()

Call = Callable[[], Any]
Preparation = Callable[[], Call]

# Newer versions of torch have other names for them, and warn of these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def join(folder: Path, rank: int, spec: Mapping[str, Any]) -> None:
    """Makes this process a rank of a gloo world on its core, which ends with its time limit."""
    # Whatever happens to the others, no process stays.
    signal.alarm(spec["limit_s"])
    if spec["cores"]:
        os.sched_setaffinity(0, {spec["cores"][rank]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), spec["num_ranks"]),
        rank=rank,
        world_size=spec["num_ranks"],
        timeout=timedelta(seconds=spec["limit_s"]),
    )


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def others_ns() -> int:
    """Processor time that other threads of this process have taken."""
    return time.process_time_ns() - time.thread_time_ns()


def compute(num_steps: int) -> None:
    for step in itertools.islice(_steps, num_steps):
        weights = _WEIGHTS[step // _STEPS_PER_WEIGHT % len(_WEIGHTS)]
        torch.nn.functional.gelu(_ACTIVATIONS @ weights)
        begin = step * _STREAMED_PER_STEP % len(_STREAMED)
        part = _STREAMED[begin : begin + _STREAMED_PER_STEP]
        part.add_(part, alpha=1e-6)


def steps_in(ns: int) -> int:
    """How many steps of computation take so long."""
    num, begin = 0, time.monotonic_ns()
    while time.monotonic_ns() - begin < ns:
        compute(1)
        num += 1
    return num


def preparation(
    kind: str,
    elements: int,
    dtype: torch.dtype,
    *,
    group: Any = None,
    root: int = 0,
    peer: int = -1,
    tag: int = 0,
) -> Preparation:
    """What makes tensors, as the program's computation before it would, and gives their call.

    Args:
        kind: As in `calls`.
        elements: By the convention of `calls` (NCCL's).
        dtype: Of the elements.
        group: Of a collective; none is all processes.
        root: Process that is the root, where there is one.
        peer: Process at the other end of a message.
        tag: Of a message.

    Returns:
        Its call gives a Work.
    """
    rank, size = dist.get_rank(), dist.get_world_size(group)

    def one() -> torch.Tensor:
        return torch.ones(elements, dtype=dtype)

    def many() -> torch.Tensor:
        return torch.ones(elements * size, dtype=dtype)

    def parts() -> list[torch.Tensor] | None:
        return [one() for _ in range(size)] if rank == root else None

    among: dict[str, Any] = {"group": group, "async_op": True}
    calls: dict[str, Preparation] = {
        "all_reduce": lambda: partial(dist.all_reduce, one(), **among),
        "reduce": lambda: partial(dist.reduce, one(), root, **among),
        "broadcast": lambda: partial(dist.broadcast, one(), root, **among),
        "barrier": lambda: partial(dist.barrier, **among),
        "all_gather": lambda: partial(
            _all_gather, torch.empty(elements * size, dtype=dtype), one(), **among
        ),
        "reduce_scatter": lambda: partial(
            _reduce_scatter, torch.empty(elements, dtype=dtype), many(), **among
        ),
        "all_to_all": lambda: partial(
            dist.all_to_all_single, torch.empty_like(many()), many(), **among
        ),
        "gather": lambda: partial(dist.gather, one(), parts(), root, **among),
        "scatter": lambda: partial(dist.scatter, one(), parts(), root, **among),
        "send": lambda: partial(dist.isend, one(), peer, tag=tag),
        "recv": lambda: partial(dist.irecv, one(), peer, tag=tag),
    }
    if kind not in calls:
        raise ValueError(f"unknown kind {kind}")
    return calls[kind]
