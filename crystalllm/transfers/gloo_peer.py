"""One process of a measurement of gloo: `python -m crystalllm.transfers.gloo_peer FOLDER RANK`.

Reads FOLDER/cases.json and writes FOLDER/rank-RANK.json: of each case the stamps of
each repetition. A repetition is what a program does: all processes compute for the same
while, then make the call with tensors that they have just made, so that they come about the
same time. The two ends of a message come at different times, as stages of a pipeline do.
Nothing else aligns them: what a process has just done, and how far apart they come, decides
how soon gloo's threads get its core, and how often they then take some 3 ms of it
(docs/transfers.md); calls that began together did so far more often than those of programs.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# How many times as long computation before a call takes: calls that come as regularly as
# the scheduler's ticks (4 ms at 250 Hz) would all meet them, or none.
_SPREAD = (0.25, 1.75)
# And by how much the same work takes one process longer than another: calls of tensor
# parallel and FSDP2 ranks came 4 % of their computation apart, in the median.
_UNEQUAL = (0.93, 1.07)
# A layer's activations, weights of many layers (more than a core's caches hold), and what
# goes through memory.
_ACTIVATIONS = torch.ones(128, 256)
_WEIGHTS = [torch.full((256, 256), 1 / 256) for _ in range(64)]
_STREAMED = torch.ones(1 << 20)
_WARM_UP = 3
_LEAST_REPETITIONS = 10

Call = Callable[[], Any]
Preparation = Callable[[], Call]


def main(folder: Path, rank: int) -> None:
    spec = json.loads((folder / "cases.json").read_text())
    # Whatever happens to the others, no process stays.
    signal.alarm(spec["limit_s"])
    if spec["cores"]:
        os.sched_setaffinity(0, {spec["cores"][rank]})
    torch.set_num_threads(1)
    num_ranks = spec["num_ranks"]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=spec["limit_s"]),
    )
    found = []
    for case in spec["cases"]:
        prepare = _preparation(
            case["kind"], case["elements"], getattr(torch, case["dtype"] or "uint8")
        )
        stamps = _measure(prepare, spec, _factors(case, rank))
        found.append(stamps)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measure(
    prepare: Preparation, spec: Mapping[str, Any], factors: Iterator[float]
) -> list[list[int]]:
    """(arrival, return of the call, end, time of other threads) of each repetition, in ns."""
    num_steps = _steps_in(spec["compute_ns"])
    for _ in range(_WARM_UP):
        _once(prepare, num_steps)
    began = time.monotonic()
    _once(prepare, num_steps)
    fitting = spec["case_limit_s"] / (time.monotonic() - began)
    wanted = min(spec["repetitions"], max(_LEAST_REPETITIONS, fitting))
    # All processes repeat and compute as often as the first one wants to.
    agreed = torch.tensor([int(wanted), num_steps])
    dist.broadcast(agreed, 0)
    stamps = []
    gc.disable()
    try:
        for _ in range(int(agreed[0]) + 1):
            if os.getppid() != spec["parent"]:
                sys.exit("the process that measures has ended")
            stamps.append(_once(prepare, round(next(factors) * int(agreed[1]))))
    finally:
        gc.enable()
    # What other threads took from one arrival to the next belongs to the first call.
    return [[*stamp[:3], after[3] - stamp[3]] for stamp, after in itertools.pairwise(stamps)]


def _factors(case: Mapping[str, Any], rank: int) -> Iterator[float]:
    """By which computation before a call is longer than in the mean, call by call.

    All processes of a collective have about the same; the two ends of a message do not.
    """
    own = random.Random(f"{case} {rank}")
    common = own if case["kind"] in ("send", "recv") else random.Random(f"{case}")
    while True:
        yield common.uniform(*_SPREAD) * own.uniform(*_UNEQUAL)


def _compute(num_steps: int) -> None:
    for step in range(num_steps):
        torch.nn.functional.gelu(_ACTIVATIONS @ _WEIGHTS[step % len(_WEIGHTS)])
        part = _STREAMED[(step % 16) << 16 :][: 1 << 16]
        part.add_(part, alpha=1e-6)


def _steps_in(ns: int) -> int:
    """How many steps of computation take so long."""
    num, begin = 0, time.monotonic_ns()
    while time.monotonic_ns() - begin < ns:
        _compute(1)
        num += 1
    return num


def _once(prepare: Preparation, num_steps: int) -> list[int]:
    _compute(num_steps)
    call = prepare()
    others = time.process_time_ns() - time.thread_time_ns()
    arrival = time.monotonic_ns()
    work = call()
    returned = time.monotonic_ns()
    if work is not None:
        work.wait()
    end = time.monotonic_ns()
    return [arrival, returned, end, others]


def _preparation(kind: str, elements: int, dtype: torch.dtype) -> Preparation:
    """What makes tensors, as the program's computation before it would, and gives their call.

    Args:
        kind: As in `calls`; a message goes from rank 0 to rank 1, and others only take part
            in agreeing on the beginning.
        elements: By the convention of `calls` (NCCL's).
        dtype: Of the elements.

    Returns:
        Its call gives a Work, or None where this rank has no part.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def one() -> torch.Tensor:
        return torch.ones(elements, dtype=dtype)

    def many() -> torch.Tensor:
        return torch.ones(elements * size, dtype=dtype)

    def parts() -> list[torch.Tensor] | None:
        return [one() for _ in range(size)] if rank == 0 else None

    def message() -> Call:
        if rank > 1:
            return lambda: None
        return partial(dist.isend, one(), 1) if rank == 0 else partial(dist.irecv, one(), 0)

    collectives: dict[str, Callable[[], Call]] = {
        "all_reduce": lambda: partial(dist.all_reduce, one()),
        "reduce": lambda: partial(dist.reduce, one(), 0),
        "broadcast": lambda: partial(dist.broadcast, one(), 0),
        "barrier": lambda: dist.barrier,
        "all_gather": lambda: partial(
            dist.all_gather_into_tensor, torch.empty(elements * size, dtype=dtype), one()
        ),
        "reduce_scatter": lambda: partial(
            dist.reduce_scatter_tensor, torch.empty(elements, dtype=dtype), many()
        ),
        "all_to_all": lambda: partial(dist.all_to_all_single, torch.empty_like(many()), many()),
        "gather": lambda: partial(dist.gather, one(), parts(), 0),
        "scatter": lambda: partial(dist.scatter, one(), parts(), 0),
    }
    if kind in ("send", "recv"):
        return message
    if kind not in collectives:
        raise ValueError(f"unknown kind {kind}")
    prepare = collectives[kind]
    return lambda: partial(prepare(), async_op=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
