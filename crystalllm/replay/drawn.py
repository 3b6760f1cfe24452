"""How long one thing takes in a run: medians, draws and what-ifs, as the engine takes them.

The engine (nccl/replay/durations.cpp, engine.cpp) has the same in C++; the references,
and whoever follows a lane afterwards, have it from here.
"""

from __future__ import annotations

import math
from typing import Any

from crystalllm.replay.world import Instruction, PerturbationKind, World


class Perturbed:
    """RUNs with what-ifs; called in the order of each lane."""

    def __init__(self, world: World, num_iterations: int) -> None:
        self.perturbations = world.durations.perturbations
        self.num_iterations = num_iterations
        self.used: set[Any] = set()

    def run_ns(self, start: int, ns: int, rank: int, lane: int, iteration: int) -> int:
        mine = [(n, p) for n, p in enumerate(self.perturbations) if p.rank == rank]
        pauses = 0
        for n, p in mine:
            since = iteration - p.first
            if not 1 <= iteration <= self.num_iterations or since < 0:
                continue
            if p.every and since % p.every:
                continue
            if p.kind == PerturbationKind.SLOW:
                ns = scaled(ns, p.factor)
            elif (
                p.kind == PerturbationKind.PAUSE_IN
                and lane == 0
                and (n, iteration) not in self.used
            ):
                self.used.add((n, iteration))
                pauses += p.pause_ns
        for n, p in mine:
            is_due = p.kind == PerturbationKind.PAUSE_AT and start + ns + pauses > p.at_ns
            if is_due and lane == 0 and n not in self.used:
                self.used.add(n)
                pauses += p.pause_ns
        return ns + pauses


def run_ns(world: World, rank: int, i: Instruction, where: int) -> int:
    """Of one RUN of a rank, what-ifs left out.

    Args:
        world: Whose durations.
        rank: Who runs it.
        i: The instruction.
        where: Iteration in the upper 32 bits, ordinal among the program's instructions below.
    """
    d = world.durations
    ns = duration_ns(world, i.cls, rank, where)
    return scaled(ns, d.rank_factors[rank]) if d.rank_factors else ns


def duration_ns(world: World, cls: int, entity: int, count: int) -> int:
    """The duration of a class, or what is drawn for this entity and count."""
    d = world.durations
    is_drawn = cls in d.choices or (d.spread and d.spread[cls] != 0)
    if not is_drawn:
        return d.ns[cls]
    key = _mix(_mix(_mix(d.seed ^ cls) ^ entity) ^ count)
    if cls in d.choices:
        values = [ns for ns, weight in d.choices[cls] for _ in range(weight)]
        return values[key % len(values)]
    u, v = _unit(key), _unit(_mix(key))
    normal = math.sqrt(-2.0 * math.log(u)) * math.cos(2.0 * math.pi * v)
    return scaled(d.ns[cls], math.exp(d.spread[cls] * normal))


def scaled(ns: int, factor: float) -> int:
    """Rounded half up."""
    return math.floor(ns * factor + 0.5)


def _mix(x: int) -> int:
    """splitmix64 (Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _unit(bits: int) -> float:
    return ((bits >> 11) + 1) * 2.0**-53
