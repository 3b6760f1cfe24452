"""One process of a measurement of gloo: `python -m crystalllm.transfers.gloo_scene FOLDER RANK`.

Reads FOLDER/scene.json and writes FOLDER/rank-RANK.json: of each repetition of the
scene the stamps of each call. The process computes, calls and waits in the order and for the
times in which a captured rank does, with tensors that it has just made. What comes before a
call, and how long, decides how soon gloo's threads get its core (docs/transfers.md).

A call ends when the program's wait for it returns or, if the program computes until later,
when gloo's thread says so. Messages and reduce_scatter have no future, through which it would:
of them only a wait tells, that comes at once or in which the program slept.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crystalllm import native
from crystalllm.transfers import gloo_calls
from crystalllm.transfers.gloo_calls import UNEQUAL, compute, others_ns

_WARM_UP = 3
_LEAST_REPETITIONS = 5
# What ended before a wait that came so soon ended just then.
_AT_ONCE_NS = 100_000
# Blocks of computation from which the time of one step is known.
_BLOCKS, _STEPS_PER_BLOCK = 15, 160


def main(folder: Path, rank: int) -> None:
    spec = json.loads((folder / "scene.json").read_text())
    gloo_calls.join(folder, rank, spec)
    everybody = list(range(spec["num_ranks"]))
    groups = [None if g == everybody else dist.new_group(g) for g in spec["groups"]]
    part = _Part(spec["steps"][rank], spec["posts"][rank], groups, random.Random(rank))
    for _ in range(_WARM_UP):
        part.play()
    began = time.monotonic()
    part.play()
    fitting = spec["scene_limit_s"] / (time.monotonic() - began)
    # All processes repeat as often as the first one wants to.
    agreed = torch.tensor(int(min(spec["repetitions"], max(_LEAST_REPETITIONS, fitting))))
    dist.broadcast(agreed, 0)
    stamps = []
    gc.disable()
    for _ in range(int(agreed)):
        if os.getppid() != spec["parent"]:
            sys.exit("the process that measures has ended")
        stamps.append(part.play())
    gc.enable()
    part.finish()
    (folder / f"rank-{rank}.json").write_text(json.dumps(stamps))
    gloo_calls.leave()


class _Part:
    """What one process does in a repetition.

    Args:
        steps: ["compute", ns], ["post", number] and ["wait", [numbers]].
        posts: By number, arguments of `gloo_calls.preparation`.
        groups: That posts name by their place.
        chance: Of how much longer computation takes than here.
    """

    def __init__(
        self,
        steps: Sequence[tuple[str, Any]],
        posts: Sequence[Mapping[str, Any]],
        groups: Sequence[Any],
        chance: random.Random,
    ) -> None:
        self.steps, self.chance = steps, chance
        self.calls = [
            gloo_calls.preparation(
                p["kind"],
                p["elements"],
                getattr(torch, p["dtype"] or "uint8"),
                group=groups[p["group"]],
                root=p["root"],
                peer=p["peer"],
                tag=p["tag"],
            )
            for p in posts
        ]
        self.kinds = [p["kind"] for p in posts]
        # By kind, whether its works have a future.
        self.has_future: dict[str, bool] = {}
        self.step_ns = _step_ns()
        # Calls of the last repetition for which it did not wait: their peers may make theirs
        # in the next one.
        self.left: list[_Outstanding] = []

    def play(self) -> list[list[int]]:
        """Stamps of each call.

        Returns:
            (arrival, return of the call, end, time of other threads after it, whether the end
            is exact). The end is at most what it says, and 0 if nobody waited yet. The time of
            other threads is what they have, until the next call, while this process neither
            makes a call nor waits: what they take from the program's computation. Where the
            program waits longer for the call than its computation took, it has lost nothing.
        """
        stamps = [[0] * 5 for _ in self.calls]
        outstanding: dict[int, _Outstanding] = {}
        others, latest = others_ns(), [0] * 5
        for what, argument in self.steps:
            if what == "compute":
                compute(round(argument * self.chance.uniform(*UNEQUAL) / self.step_ns))
                continue
            if what == "post":
                call, stamp = self.calls[argument](), stamps[argument]
                latest[3] += others_ns() - others
                outstanding[argument] = self._post(call, stamp, self.kinds[argument])
                latest = stamp
            else:
                taken = others_ns() - others
                for number in argument:
                    call = outstanding.pop(number)
                    early_ns = call.wait()
                    if call.stamp is latest:
                        taken = min(taken, early_ns)
                latest[3] += taken
            others = others_ns()
        latest[3] += others_ns() - others
        self.finish()
        self.left = list(outstanding.values())
        return stamps

    def finish(self) -> None:
        for call in self.left:
            call.wait()
        self.left = []

    def _post(self, call: Callable[[], Any], stamp: list[int], kind: str) -> _Outstanding:
        stamp[0] = time.monotonic_ns()
        work = call()
        stamp[1] = time.monotonic_ns()
        completion = None
        if self.has_future.get(kind, True):
            try:
                completion = native.load().Completion(work)
            except RuntimeError:
                self.has_future[kind] = False
        return _Outstanding(work, stamp, completion)


@dataclass
class _Outstanding:
    """A call for which the program has not waited."""

    work: Any
    stamp: list[int]
    completion: Any

    def wait(self) -> int:
        """Returns for how long before the wait, at most, the call had ended, in ns."""
        begin, sleeps = time.monotonic_ns(), _num_sleeps()
        self.work.wait()
        end = time.monotonic_ns()
        has_slept = _num_sleeps() > sleeps
        is_exact = begin - self.stamp[1] <= _AT_ONCE_NS or has_slept
        if self.completion is not None:
            is_exact = True
            if 0 < self.completion.ns < begin:
                end = self.completion.ns
        self.stamp[2], self.stamp[4] = end, int(is_exact)
        if self.completion is None and not has_slept:
            return begin - self.stamp[1]
        return max(0, begin - end)


def _num_sleeps() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _step_ns() -> float:
    """The same for all processes: equal work shall be as unequal as their cores make it."""
    compute(_STEPS_PER_BLOCK)
    took = []
    for _ in range(_BLOCKS):
        begin = time.monotonic_ns()
        compute(_STEPS_PER_BLOCK)
        took.append((time.monotonic_ns() - begin) / _STEPS_PER_BLOCK)
    found = torch.tensor(sorted(took)[_BLOCKS // 2])
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
