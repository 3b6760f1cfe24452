"""The reference for worlds in which transfers share links: an event loop that fits on a page.

Lanes are generators that run until they need the end of a call or a signal that
is not there yet. When all of them wait, the earliest thing that is due happens:
a transfer begins, or ends. Transfers that overlap at a rank in one link class
divide its bandwidth.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from crystalllm.replay.drawn import Perturbed, duration_ns, scaled
from crystalllm.replay.reference import Deadlock, Event, transfer_ns
from crystalllm.replay.world import End, Instruction, Op, World


@dataclass
class _Meeting:
    comm: int
    seq: int
    arrivals: list[tuple[int, Instruction, int]] = field(default_factory=list)  # rank, call, time
    root_at: int | None = None
    end: int | None = None  # of those that end with all
    planned_end: int = 0
    divisor: int = 1


def replay(world: World, num_iterations: int) -> tuple[list[Event], dict[int, list[int]]]:
    """As `reference.replay`."""
    return _Run(world, num_iterations).run()


class _Run:
    def __init__(self, world: World, num_iterations: int) -> None:
        self.world, self.num_iterations = world, num_iterations
        self.meetings: dict[tuple[int, int], _Meeting] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.marks: dict[int, list[int]] = {r: [] for r in range(len(world.ranks))}
        self.counts: dict[tuple[int, int], int] = defaultdict(int)
        self.channels: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.perturbed = Perturbed(world, num_iterations)
        self.due: list[tuple[int, bool, int, int]] = []  # time, is it a start, comm, seq
        self.under_way: list[_Meeting] = []

    def run(self) -> tuple[list[Event], dict[int, list[int]]]:
        lanes = [
            self._lane(rank, number)
            for rank, r in enumerate(self.world.ranks)
            for number in range(len(self.world.programs[r.program].lanes))
        ]
        while lanes or self.due:
            lanes = self._go_on(lanes)
            if self.due:
                self.due.sort()
                self._happen(*self.due.pop(0))
            elif lanes:
                raise Deadlock("all lanes wait and nothing is due")
        for m in self.meetings.values():
            if len(m.arrivals) != self.world.communicators[m.comm]:
                raise Deadlock(f"not everybody comes to communicator {m.comm}, number {m.seq}")
        events = [
            Event(rank, lane, iteration, i.call, at, *self._span(m, rank, i, at))
            for rank, lane, iteration, i, at, m in self.calls
        ]
        return events, self.marks

    def _go_on(self, lanes: list[Iterator[None]]) -> list[Iterator[None]]:
        """Every lane as far as it gets; again until nobody has moved."""
        moved = True
        while moved:
            moved, left = False, []
            for lane in lanes:
                before = len(self.calls), sum(map(len, self.channels.values())), self._num_passed
                if next(lane, "ended") is None:
                    left.append(lane)
                after = len(self.calls), sum(map(len, self.channels.values())), self._num_passed
                moved |= before != after
            lanes = left
        return lanes

    _num_passed = 0

    def _lane(self, rank: int, number: int) -> Iterator[None]:
        r = self.world.ranks[rank]
        lanes = self.world.programs[r.program].lanes
        first = sum(len(x.prologue) + len(x.body) + len(x.epilogue) for x in lanes[:number])
        lane, handles, t = lanes[number], {}, 0
        for iteration, section in lane.sections(self.num_iterations):
            base = first + (len(lane.prologue) if iteration else 0)
            base += len(lane.body) if iteration > self.num_iterations else 0
            for position, i in enumerate(section):
                if i.op == Op.RUN:
                    ns = duration_ns(self.world, i.cls, rank, (iteration << 32) | (base + position))
                    factors = self.world.durations.rank_factors
                    ns = scaled(ns, factors[rank]) if factors else ns
                    t += self.perturbed.run_ns(t, ns, rank, number, iteration)
                elif i.op in (Op.POST, Op.COMM):
                    meeting = self._arrive(rank, r.connections[i.slot], i, t)
                    self.calls.append((rank, number, iteration, i, t, meeting))
                    if i.op == Op.POST:
                        handles[i.handle] = (meeting, i, t)
                    else:
                        while (span := self._span(meeting, rank, i, t)) is None:
                            yield
                        t = max(t, span[1])
                elif i.op == Op.WAIT and i.handle in handles:
                    meeting, call, at = handles.pop(i.handle)
                    while (span := self._span(meeting, rank, call, at)) is None:
                        yield
                    t = max(t, span[1])
                elif i.op == Op.SIGNAL:
                    self.channels[rank, i.slot].append(t)
                elif i.op == Op.AWAIT:
                    while not self.channels[rank, i.slot]:
                        yield
                    t = max(t, self.channels[rank, i.slot].popleft())
                elif i.op == Op.MARK:
                    self.marks[rank].append(t)
                self._num_passed += 1

    def _arrive(self, rank: int, comm: int, i: Instruction, at: int) -> _Meeting:
        seq = self.counts[rank, comm]
        self.counts[rank, comm] += 1
        m = self.meetings.setdefault((comm, seq), _Meeting(comm, seq))
        m.arrivals.append((rank, i, at))
        m.root_at = at if i.is_root else m.root_at
        if len(m.arrivals) == self.world.communicators[comm]:
            last = max(at for _, _, at in m.arrivals)
            if self._link_class(comm) >= 0 and self._of_all(m):
                self.due.append((last, True, comm, seq))
            else:
                m.end = last + self._transfer(m)
        return m

    def _happen(self, at: int, is_start: bool, comm: int, seq: int) -> None:
        m = self.meetings[comm, seq]
        if is_start:
            m.planned_end, m.divisor = at + self._transfer(m), 1
            self.under_way.append(m)
        elif m.end is None and m.planned_end == at:
            m.end = at
            self.under_way.remove(m)
        else:
            return  # planned anew since
        mine = set(self._of_all(m))
        for other in self.under_way:
            same_link = self._link_class(other.comm) == self._link_class(comm)
            if same_link and mine & set(self._of_all(other)):
                self._plan(other, at)
        if is_start:
            self.due.append((m.planned_end, False, comm, seq))

    def _plan(self, m: _Meeting, at: int) -> None:
        """With n transfers at its busiest rank, what is left takes n times as long."""
        link_class = self._link_class(m.comm)
        beside = [o for o in self.under_way if self._link_class(o.comm) == link_class]
        divisor = max(sum(r in self._of_all(o) for o in beside) for r in self._of_all(m))
        if divisor != m.divisor:
            m.planned_end = at + -(-(m.planned_end - at) * divisor // m.divisor)
            m.divisor = divisor
            self.due.append((m.planned_end, False, m.comm, m.seq))

    def _link_class(self, comm: int) -> int:
        classes = self.world.durations.link_classes
        return classes[comm] if classes else -1

    def _of_all(self, m: _Meeting) -> list[int]:
        return [rank for rank, i, _ in m.arrivals if i.end == End.ALL]

    def _transfer(self, m: _Meeting) -> int:
        of_all = (i for _, i, _ in m.arrivals if i.end == End.ALL)
        return max((transfer_ns(self.world, i, m.comm, m.seq) for i in of_all), default=0)

    def _span(self, m: _Meeting, rank: int, i: Instruction, at: int) -> tuple[int, int] | None:
        """Start and end of one participant's call, None while they are not known."""
        if i.end == End.ALL:
            return None if m.end is None else (max(t for _, _, t in m.arrivals), m.end)
        transfer = transfer_ns(self.world, i, m.comm, m.seq)
        if i.end == End.SELF:
            return at, at + transfer
        if m.root_at is None:
            return None
        if i.end == End.ROOT:
            start = max(at, m.root_at)
            return start, start + transfer
        drains = self.world.durations.drain_ns
        drain = drains[i.cls] if drains else 0
        return m.root_at, max(at, m.root_at + transfer) + drain
