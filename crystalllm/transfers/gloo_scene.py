"""One process of a measurement of gloo: `python -m crystalllm.transfers.gloo_scene FOLDER RANK`.

Reads FOLDER/scene.json and writes FOLDER/rank-RANK.json: of each repetition of the
scene the stamps of each call. The process computes, calls and waits in the order and for the
times in which a captured rank does, with tensors that it has just made. What comes before a
call, and how long, decides how soon gloo's threads get its core (docs/transfers.md).
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crystalllm.transfers import gloo_calls
from crystalllm.transfers.gloo_calls import UNEQUAL, compute, others_ns

_WARM_UP = 3
_LEAST_REPETITIONS = 5
# Blocks of computation from which the time of one step is known.
_BLOCKS, _STEPS_PER_BLOCK = 15, 10


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
        self.step_ns = _step_ns()
        # Calls of the last repetition for which it did not wait: their peers may make theirs
        # in the next one.
        self.left: list[Any] = []

    def play(self) -> list[list[int]]:
        """(arrival, return of the call, end or 0, time of other threads before it) of each call."""
        stamps = [[0, 0, 0, 0] for _ in self.calls]
        works: dict[int, Any] = {}
        for what, argument in self.steps:
            if what == "compute":
                compute(round(argument * self.chance.uniform(*UNEQUAL) / self.step_ns))
            elif what == "post":
                works[argument] = _post(self.calls[argument](), stamps[argument])
            else:
                for number in argument:
                    works.pop(number).wait()
                    stamps[number][2] = time.monotonic_ns()
        self.finish()
        self.left = list(works.values())
        return stamps

    def finish(self) -> None:
        for work in self.left:
            work.wait()
        self.left = []


def _post(call: Callable[[], Any], stamp: list[int]) -> Any:
    stamp[3] = others_ns()
    stamp[0] = time.monotonic_ns()
    work = call()
    stamp[1] = time.monotonic_ns()
    return work


def _step_ns() -> float:
    compute(_STEPS_PER_BLOCK)
    took = []
    for _ in range(_BLOCKS):
        begin = time.monotonic_ns()
        compute(_STEPS_PER_BLOCK)
        took.append((time.monotonic_ns() - begin) / _STEPS_PER_BLOCK)
    return sorted(took)[_BLOCKS // 2]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
