"""What the lanes of a replayed rank did, step by step.

The engine keeps calls and marks of watched ranks. What lies between them follows
from the rank's program: lanes are gone through once more, with the ends of calls
as the engine gave them, and every arrival has to come out as the engine has it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from crystalllm.errors import UserError
from crystalllm.replay.drawn import Perturbed, run_ns
from crystalllm.replay.world import Instruction, Op, World

_UNKNOWN = -1


class Call(NamedTuple):
    """One call of one rank, in nanoseconds from the start of the replay.

    Args:
        lane: Ordinal among the rank's lanes.
        iteration: 0 is the prologue, k the k-th body, then the epilogue.
        instruction: What arrived.
        comm: Communicator, a number of the world.
        seq: Ordinal among the communicator's communications.
        arrival_ns: When the rank came.
        start_ns: When the transfer began; -1 if the replay ended before.
        end_ns: When it ended for the rank; -1 if the replay ended before.
    """

    lane: int
    iteration: int
    instruction: Instruction
    comm: int
    seq: int
    arrival_ns: int
    start_ns: int
    end_ns: int


class Step(NamedTuple):
    """What a lane did from one moment to a later one.

    Args:
        lane: Ordinal among the rank's lanes.
        iteration: As of a call.
        op: RUN; COMM or WAIT, which wait for a call; or AWAIT, for another lane.
        cls: Duration class of a RUN.
        start_ns: From the start of the replay.
        end_ns: Likewise.
        call: What a COMM or WAIT waited for.
    """

    lane: int
    iteration: int
    op: Op
    cls: int
    start_ns: int
    end_ns: int
    call: Call | None = None


@dataclass(frozen=True)
class Steps:
    """All of a rank.

    Args:
        steps: By lane, in order; those that took no time are left out.
        calls: By lane, in order.
        marks: When iterations ended, as far as the replay came.
        ends: By lane, when it ended; empty where the replay ended before the program.
    """

    steps: list[Step]
    calls: list[Call]
    marks: list[int]
    ends: list[int]


def follow(world: World, rank: int, events: np.ndarray, num_iterations: int) -> Steps:
    """Goes through the lanes of one rank.

    Args:
        world: What was replayed.
        rank: Who; its calls were watched.
        events: Of this rank, as `Engine.events` gives them.
        num_iterations: Bodies that were replayed.

    Raises:
        UserError: The events are not those of this world.
    """
    return _Rank(world, rank, events, num_iterations).follow()


class _Rank:
    def __init__(self, world: World, rank: int, events: np.ndarray, num_iterations: int) -> None:
        self.world, self.rank, self.num_iterations = world, rank, num_iterations
        self.lanes = world.programs[world.ranks[rank].program].lanes
        self.connections: Sequence[int] = world.ranks[rank].connections
        self.events = {
            lane: deque(events[events["lane"] == lane].tolist()) for lane in range(len(self.lanes))
        }
        self.perturbed = Perturbed(world, num_iterations)
        self.is_perturbed = any(p.rank == rank for p in world.durations.perturbations)
        d = world.durations
        self.is_plain = not (d.choices or d.spread or d.rank_factors or self.is_perturbed)
        self.handles: dict[int, Call] = {}
        # A slot belongs to one lane.
        self.counts: dict[int, int] = defaultdict(int)
        self.channels: dict[int, deque[int]] = defaultdict(deque)
        self.steps: list[list[Step]] = [[] for _ in self.lanes]
        self.calls: list[list[Call]] = [[] for _ in self.lanes]
        self.marks: list[int] = []
        self.num_signals = 0
        self.ends: dict[int, int] = {}

    def follow(self) -> Steps:
        lanes = [self._lane(number) for number in range(len(self.lanes))]
        while lanes:
            before = self.num_signals
            lanes = [lane for lane in lanes if next(lane, None) is not None]
            if self.num_signals == before:
                break
        left = sum(map(len, self.events.values()))
        if left:
            self._refuse(f"{left} calls more than the program has")
        is_whole = len(self.ends) == len(self.lanes)
        return Steps(
            steps=[step for steps in self.steps for step in steps],
            calls=[call for calls in self.calls for call in calls],
            marks=self.marks,
            ends=[self.ends[n] for n in sorted(self.ends)] if is_whole else [],
        )

    def _lane(self, number: int) -> Iterator[bool]:
        """Goes as far as it can; yields where it needs another lane's signal."""
        t = 0
        steps, events = self.steps[number], self.events[number]
        # Before the lane's own instructions come those of the lanes before it.
        base = sum(
            len(lane.prologue) + len(lane.body) + len(lane.epilogue) for lane in self.lanes[:number]
        )
        lane = self.lanes[number]
        starts = {0: base, self.num_iterations + 1: base + len(lane.prologue) + len(lane.body)}
        for iteration, section in lane.sections(self.num_iterations):
            first = starts.get(iteration, base + len(lane.prologue))
            for position, i in enumerate(section, first):
                before, call = t, None
                if i.op == Op.RUN:
                    t += self._run_ns(t, i, number, iteration, position)
                elif i.op in (Op.POST, Op.COMM):
                    if not events:
                        self._cut(steps, number)
                        return
                    call = self._call(number, iteration, i, t, events.popleft())
                    if i.op == Op.POST:
                        self.handles[i.handle] = call
                elif i.op == Op.WAIT:
                    call = self.handles.pop(i.handle, None)
                elif i.op == Op.SIGNAL:
                    self.channels[i.slot].append(t)
                    self.num_signals += 1
                elif i.op == Op.AWAIT:
                    while not self.channels[i.slot]:
                        yield True
                    t = max(t, self.channels[i.slot].popleft())
                elif i.op == Op.MARK:
                    self.marks.append(t)
                if call is not None and i.op != Op.POST:
                    if call.end_ns == _UNKNOWN:
                        self._cut(steps, number)
                        return
                    t = max(t, call.end_ns)
                if t > before:
                    steps.append(Step(number, iteration, i.op, i.cls, before, t, call))
        self.ends[number] = t

    def _run_ns(self, t: int, i: Instruction, lane: int, iteration: int, position: int) -> int:
        if self.is_plain:
            return self.world.durations.ns[i.cls]
        ns = run_ns(self.world, self.rank, i, (iteration << 32) | position)
        if self.is_perturbed:
            ns = self.perturbed.run_ns(t, ns, self.rank, lane, iteration)
        return ns

    def _call(
        self, lane: int, iteration: int, i: Instruction, t: int, event: tuple[int, ...]
    ) -> Call:
        _, _, in_iteration, number, arrival, start, end = event
        if (in_iteration, number, arrival) != (iteration, i.call, t):
            self._refuse(
                f"lane {lane}, call {number} of iteration {in_iteration} at {arrival} ns instead "
                f"of call {i.call} of iteration {iteration} at {t} ns"
            )
        seq = self.counts[i.slot]
        self.counts[i.slot] += 1
        call = Call(lane, iteration, i, self.connections[i.slot], seq, arrival, start, end)
        self.calls[lane].append(call)
        return call

    def _cut(self, steps: list[Step], lane: int) -> None:
        """The replay ended here; what comes after the last call may not have happened."""
        last = self.calls[lane][-1].arrival_ns if self.calls[lane] else 0
        while steps and steps[-1].start_ns >= last and steps[-1].op == Op.RUN:
            steps.pop()

    def _refuse(self, what: str) -> None:
        raise UserError(
            "The events of a replay are not those of its world",
            where=f"Rank {self.rank}: {what}",
            do="Pass the engine that ran this world, with the iterations that it ran",
        )
