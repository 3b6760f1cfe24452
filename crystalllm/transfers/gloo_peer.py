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
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crystalllm.transfers import gloo_calls
from crystalllm.transfers.gloo_calls import UNEQUAL, Preparation, compute, others_ns

# How many times as long computation before a call takes: calls that come as regularly as
# the scheduler's ticks (4 ms at 250 Hz) would all meet them, or none.
_SPREAD = (0.25, 1.75)
_WARM_UP = 3
_LEAST_REPETITIONS = 10


def main(folder: Path, rank: int) -> None:
    spec = json.loads((folder / "cases.json").read_text())
    gloo_calls.join(folder, rank, spec)
    found = []
    for case in spec["cases"]:
        prepare = _preparation(case, rank)
        found.append(_measure(prepare, spec, _factors(case, rank)))
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    gloo_calls.leave()


def _preparation(case: Mapping[str, Any], rank: int) -> Preparation:
    """A message goes from process 0 to process 1; others only take part in the beginning."""
    kind, peer = case["kind"], -1
    if kind == "send":
        if rank > 1:
            return lambda: lambda: None
        kind, peer = ("send", 1) if rank == 0 else ("recv", 0)
    dtype = getattr(torch, case["dtype"] or "uint8")
    return gloo_calls.preparation(kind, case["elements"], dtype, peer=peer)


def _measure(
    prepare: Preparation, spec: Mapping[str, Any], factors: Iterator[float]
) -> list[list[int]]:
    """(arrival, return of the call, end, time of other threads after it) of each repetition, ns."""
    num_steps = gloo_calls.steps_in(spec["compute_ns"])
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
    # What other threads took from a call's return to the next arrival belongs to that call: the
    # program may compute all the while.
    return [[*stamp[:3], after[3] - stamp[4]] for stamp, after in itertools.pairwise(stamps)]


def _factors(case: Mapping[str, Any], rank: int) -> Iterator[float]:
    """By which computation before a call is longer than in the mean, call by call.

    All processes of a collective have about the same; the two ends of a message do not.
    """
    own = random.Random(f"{case} {rank}")
    common = own if case["kind"] in ("send", "recv") else random.Random(f"{case}")
    while True:
        yield common.uniform(*_SPREAD) * own.uniform(*UNEQUAL)


def _once(prepare: Preparation, num_steps: int) -> list[int]:
    compute(num_steps)
    call = prepare()
    before = others_ns()
    arrival = time.monotonic_ns()
    work = call()
    returned = time.monotonic_ns()
    after = others_ns()
    if work is not None:
        work.wait()
    end = time.monotonic_ns()
    return [arrival, returned, end, before, after]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
