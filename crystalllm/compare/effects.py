"""What a deviation does to the iteration: the world is replayed with it, and without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from crystalllm.replay import program
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.engine import Engine
from crystalllm.replay.program import Capture
from crystalllm.replay.world import Instruction, Lane, Op, Program, Rank, World

# The first iteration fills pipelines; the others are averaged.
_ITERATIONS = 4


@dataclass(frozen=True)
class Computing:
    """Segments of one rank's body that take `factor` times as long.

    Args:
        rank: Whose.
        lane: Of the segments, or how their lanes' names begin, such as "host:".
        positions: Of the segments on it; all if empty.
        factor: At least 0.
    """

    rank: int
    lane: str
    positions: Collection[int]
    factor: float


@dataclass(frozen=True)
class Transferring:
    """Transfers of equal call records in one group that take `factor` times as long.

    Args:
        rank: One of the group.
        call: One of the calls, by its ordinal in the capture of the rank's role.
        factor: At least 0.
    """

    rank: int
    call: int
    factor: float


class ReplayedWorld:
    """The world of a capture, replayed with a baseline's durations.

    Args:
        capture: What every rank does.
        durations: How long it takes, in the whole world.

    Raises:
        UserError: A duration is missing, or the calls do not fit together.
    """

    def __init__(self, capture: Capture, durations: DurationTable) -> None:
        self.made = program.build(capture, durations)
        self.usual_ns = self.iteration_ns(())

    def has(self, change: Computing | Transferring) -> bool:
        """Whether the capture has what changes."""
        if isinstance(change, Computing):
            return bool(self._classes(change))
        return self._call(change) is not None

    def excess_ns(self, change: Computing | Transferring) -> float:
        """What it adds to an iteration of its rank, if nothing of it is absorbed."""
        ns = self.made.world.durations.ns
        if isinstance(change, Computing):
            usual = sum(ns[cls] for cls in self._classes(change))
        else:
            call = self._call(change)
            alike = (
                i for i in self._calls(change.rank) if (i.slot, i.cls) == (call.slot, call.cls)
            )
            usual = sum(ns[i.cls] for i in alike)
        return usual * (change.factor - 1)

    def iteration_ns(self, changes: Sequence[Computing | Transferring]) -> float:
        """Mean time of an iteration of the world with all of these changes."""
        world = self._changed(changes)
        with Engine(world) as engine:
            engine.run(_ITERATIONS)
            marks = [engine.marks(rank) for rank in range(len(world.ranks))]
        first = max(int(of_rank[-_ITERATIONS]) for of_rank in marks)
        last = max(int(of_rank[-1]) for of_rank in marks)
        return (last - first) / (_ITERATIONS - 1)

    def _changed(self, changes: Sequence[Computing | Transferring]) -> World:
        """Ranks that change get programs of their own, with duration classes of their own."""
        world = self.made.world
        runs: dict[int, dict[int, float]] = defaultdict(dict)  # by rank and class
        links: dict[int, dict[int, float]] = defaultdict(dict)  # by communicator and class
        for change in changes:
            if isinstance(change, Computing):
                for cls in self._classes(change):
                    of_rank = runs[change.rank]
                    of_rank[cls] = of_rank.get(cls, 1.0) * change.factor
            elif (call := self._call(change)) is not None:
                link = world.ranks[change.rank].connections[call.slot]
                links[link][call.cls] = links[link].get(call.cls, 1.0) * change.factor
        ns = list(world.durations.ns)
        programs, ranks = list(world.programs), list(world.ranks)
        numbers: dict[tuple[int, float], int] = {}

        def own(instruction: Instruction, factor: float) -> Instruction:
            if factor == 1:
                return instruction
            at = instruction.cls, factor
            if at not in numbers:
                numbers[at] = len(ns)
                ns.append(round(ns[instruction.cls] * factor))
            return replace(instruction, cls=numbers[at])

        for number, rank in enumerate(world.ranks):
            of_slot = [links.get(link, {}) for link in rank.connections]
            if number not in runs and not any(of_slot):
                continue
            of_rank = runs.get(number, {})

            def factor(i: Instruction, of_rank=of_rank, of_slot=of_slot) -> float:
                if i.op == Op.RUN:
                    return of_rank.get(i.cls, 1.0)
                return of_slot[i.slot].get(i.cls, 1.0) if i.op in (Op.POST, Op.COMM) else 1.0

            lanes = [
                Lane(
                    *(
                        [own(i, factor(i)) for i in section]
                        for section in (lane.prologue, lane.body, lane.epilogue)
                    )
                )
                for lane in world.programs[rank.program].lanes
            ]
            ranks[number] = Rank(len(programs), rank.connections)
            programs.append(Program(lanes))
        durations = replace(world.durations, ns=ns)
        return replace(world, programs=programs, ranks=ranks, durations=durations)

    def _classes(self, change: Computing) -> list[int]:
        """Duration classes of the segments that are meant."""
        role, _ = self.made.variants[self.made.world.ranks[change.rank].program]
        found = []
        for cls, (kind, *name) in enumerate(self.made.classes):
            if kind != "segment":
                continue
            of_role, lane, section, position = name
            is_lane = lane == change.lane or (
                change.lane.endswith(":") and lane.startswith(change.lane)
            )
            is_there = not change.positions or position in change.positions
            if of_role == role and section == "body" and is_lane and is_there:
                found.append(cls)
        return found

    def _call(self, change: Transferring) -> Instruction | None:
        """Its instruction in the body; None where the capture has no such call there."""
        return next((i for i in self._calls(change.rank) if i.call == change.call), None)

    def _calls(self, rank: int) -> Iterator[Instruction]:
        """Those of the body of a rank."""
        world = self.made.world
        for lane in world.programs[world.ranks[rank].program].lanes:
            yield from (i for i in lane.body if i.op in (Op.POST, Op.COMM))
