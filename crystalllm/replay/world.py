"""What is replayed: programs, ranks, communicators, durations.

Plain data, read alike by the engine (`engine.py`) and by its reference
(`reference.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from crystalllm.rules import Ends


class Op(IntEnum):
    """What an instruction does with its lane, which is free at time t (nccl/replay/replay.h)."""

    RUN = 0
    POST = 1
    COMM = 2
    WAIT = 3
    SIGNAL = 4
    AWAIT = 5
    MARK = 6


class End(IntEnum):
    """How a participant's end follows from the arrivals."""

    ALL = 0
    ROOT = 1
    SELF = 2
    AFTER_DATA = 3


END_OF = {Ends.ALL: End.ALL, Ends.PAIR: End.ALL, Ends.ROOT: End.ROOT, Ends.SELF: End.SELF}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    Args:
        op: What it does.
        slot: Connection of the rank (POST, COMM), or its channel (SIGNAL, AWAIT).
        handle: Under which a POST is waited for.
        cls: Duration class of a RUN, transfer class of a call.
        end: Of a call.
        is_root: Of a rooted call, or an eager send.
        is_message: Between two.
        form: Equal for calls that fit together.
        call: Number that messages give.
    """

    op: Op
    slot: int = 0
    handle: int = 0
    cls: int = 0
    end: End = End.ALL
    is_root: bool = False
    is_message: bool = False
    form: int = 0
    call: int = 0


@dataclass(frozen=True)
class Lane:
    """A host thread or stream: instructions before, in and after the repeated body."""

    prologue: Sequence[Instruction] = ()
    body: Sequence[Instruction] = ()
    epilogue: Sequence[Instruction] = ()

    def sections(self, num_iterations: int) -> list[tuple[int, Sequence[Instruction]]]:
        """(iteration, instructions) in the order of a run; 0 is the prologue."""
        bodies = [(k, self.body) for k in range(1, num_iterations + 1)]
        return [(0, self.prologue), *bodies, (num_iterations + 1, self.epilogue)]


@dataclass(frozen=True)
class Program:
    """What all ranks of a role do."""

    lanes: Sequence[Lane]


@dataclass(frozen=True)
class Rank:
    """A program and, for each of its slots, the communicator."""

    program: int
    connections: Sequence[int]


class PerturbationKind(IntEnum):
    """What a perturbation does (nccl/replay/replay.h)."""

    SLOW = 0
    PAUSE_IN = 1
    PAUSE_AT = 2


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A rank that computes longer, or pauses.

    Args:
        kind: Slow in some iterations, a pause in some, or a pause at a time.
        rank: Who.
        first, every: Iterations first, first + every, …; every 0 is all from first on.
        factor: On RUN durations.
        pause_ns: In the first RUN of lane 0 of the iteration, or that ends after `at_ns`.
        at_ns: From the start of the replay.
    """

    kind: PerturbationKind
    rank: int
    first: int = 1
    every: int = 0
    factor: float = 1.0
    pause_ns: int = 0
    at_ns: int = 0


@dataclass
class Durations:
    """By class, in nanoseconds.

    Args:
        ns: The duration, or the median where it is drawn.
        spread: Sigma of a lognormal around it, 0 for a constant.
        drain_ns: What the receiver of an eager message adds.
        choices: By class, (ns, weight) of each duration that it may take, drawn.
        rank_factors: On the RUNs of each rank; empty for 1.
        link_factors: On the transfers of each communicator; empty for 1.
        link_classes: Of each communicator, -1 where its transfers were measured as
            they overlap; modelled ones that overlap at a rank in one class share
            its bandwidth. Empty for -1.
        seed: Of what is drawn.
        perturbations: What-ifs, in the order in which they apply.
    """

    ns: Sequence[int]
    spread: Sequence[float] = ()
    drain_ns: Sequence[int] = ()
    choices: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    rank_factors: Sequence[float] = ()
    link_factors: Sequence[float] = ()
    link_classes: Sequence[int] = ()
    seed: int = 0
    perturbations: Sequence[Perturbation] = ()


@dataclass
class World:
    """All of it.

    Args:
        programs: By number.
        communicators: Participants of each; a pair for messages in one direction
            is a communicator of two.
        ranks: By rank.
        durations: How long things take.
    """

    programs: list[Program]
    communicators: list[int]
    ranks: list[Rank]
    durations: Durations = field(default_factory=lambda: Durations(ns=[]))
