"""Whether the calls of all ranks fit together, and how.

Every rank goes through its calls and waits in order, as the real world would
with transfers that take no time. What is left over when nobody can go on any
more is a fault of the program: two sides that disagree, a partner that never
comes, or ranks that wait for each other in a circle.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from crystalllm.capture.captured import Captured
from crystalllm.errors import UserError
from crystalllm.records import element_size
from crystalllm.rules import Ends, ends


@dataclass(frozen=True)
class Call:
    """What the matcher needs to know of a call.

    Args:
        number: Ordinal among the rank's calls.
        kind: As in the call record.
        group: Ordinal of the group among the rank's.
        seq: In the group, or in the ordered pair.
        form: What has to be equal on both sides: dtype, count, reduce op.
        root: Group rank, or -1.
        peer_offset: Modulo the group's size, or -1.
        batch: Calls of one batch start together, or -1.
        num_bytes: Of a message.
        in_splits, out_splits: Elements for and of each peer; empty if equal.
        key: The call record as text.
    """

    number: int
    kind: str
    group: int
    seq: int
    form: tuple[str, int, str]
    root: int
    peer_offset: int
    batch: int
    num_bytes: int
    in_splits: tuple[int, ...]
    out_splits: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class Program:
    """A role's calls and, by lane, the order of calls and waits (call, is it a wait)."""

    calls: tuple[Call, ...]
    lanes: tuple[tuple[tuple[int, bool], ...], ...]
    backends: tuple[str, ...]  # of each group

    @cached_property
    def before(self) -> dict[int, int]:
        """By call, the one before it on the same communicator, if on another lane.

        NCCL's communicators run calls in the order in which all threads together made them.
        """
        found: dict[int, int] = {}
        if len(self.lanes) > 1:
            lane_of = {
                n: i for i, lane in enumerate(self.lanes) for n, is_wait in lane if not is_wait
            }
            last: dict[int, int] = {}
            for call in self.calls:
                if self.backends[call.group] == "nccl":
                    previous = last.get(call.group, call.number)
                    if lane_of[previous] != lane_of[call.number]:
                        found[call.number] = previous
                    last[call.group] = call.number
        return found

    @classmethod
    def of(cls, left: Captured) -> Program:
        """The program of a captured rank."""
        place = [{m: i for i, m in enumerate(g["members"])} for g in left.groups]
        calls = tuple(
            Call(
                number=row["call"],
                kind=row["kind"],
                group=row["group"],
                seq=row["seq"],
                form=(row["dtype"], row["count"], row["reduce_op"]),
                root=place[row["group"]].get(row["root_rank"], -1),
                peer_offset=row["peer_offset"],
                batch=row["batch"],
                num_bytes=row["count"] * element_size(row["dtype"]),
                in_splits=_in_elements(row["in_splits"], row["in_elements"], row),
                out_splits=_in_elements(row["out_splits"], row["out_elements"], row),
                key=row["key"],
            )
            for row in left.parts["calls"].to_pylist()
        )
        lanes: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        events = left.parts["events"]
        for lane, kind, call in zip(
            *(events[name].to_pylist() for name in ("lane", "kind", "call")), strict=True
        ):
            if call >= 0:
                lanes[lane].append((call, kind == "WAIT"))
        return cls(
            calls, tuple(map(tuple, lanes.values())), tuple(g["backend"] for g in left.groups)
        )


def _in_elements(splits: Sequence[int], elements: int, row: Mapping[str, Any]) -> tuple[int, ...]:
    """Split sizes in elements: all_to_all_single counts rows, other calls elements."""
    if row["count"] >= 0:
        return ()
    if not splits:
        return (elements // row["group_size"],) * row["group_size"]
    rows = sum(splits)
    return tuple(n * elements // rows if rows else 0 for n in splits)


@dataclass(frozen=True)
class Actor:
    """One rank of the world: a program, and the groups it has in mind.

    Args:
        program: Its own, or its representative's.
        groups: (identity, members) by the ordinals in the program.
    """

    program: Program
    groups: Sequence[tuple[str, Sequence[int]]]


@dataclass
class _Meeting:
    """A communication that some participants have reached."""

    call: Call  # of the first one that came
    rank: int
    # Who came: by rank, or by side ("send", "recv") since a rank may write to itself.
    arrived: dict[int | str, tuple[int, Call]] = field(default_factory=dict)


def check(
    actors: Mapping[int, Actor], *, eager_bytes: int = 0, check_splits: bool = True
) -> list[str]:
    """Goes through all calls of all ranks.

    Args:
        actors: By rank; ranks that are not there take part in everything.
        eager_bytes: Messages up to this size are buffered by their sender.
        check_splits: Whether split sizes are those of a real run, so that both
            sides have to agree.

    Returns:
        Warnings: what works only because messages are buffered.

    Raises:
        UserError: Calls that do not fit; names the ranks and their calls.
    """
    strictly = _Run(actors, -1, check_splits).trouble()
    if strictly is None:
        return []
    if eager_bytes > 0 and _Run(actors, eager_bytes, check_splits).trouble() is None:
        return [
            f"The program relies on buffering of messages up to {eager_bytes} bytes: without it, "
            f"{strictly.where}"
        ]
    raise UserError(strictly.what, where=strictly.where, do=strictly.do)


@dataclass(frozen=True)
class _Trouble:
    what: str
    where: str
    do: str


class _Run:
    """One pass of all ranks through their calls."""

    def __init__(self, actors: Mapping[int, Actor], eager_bytes: int, check_splits: bool) -> None:
        self.actors, self.eager_bytes, self.check_splits = actors, eager_bytes, check_splits
        self.meetings: dict[tuple[object, ...], _Meeting] = {}
        self.ended = {r: bytearray(len(a.program.calls)) for r, a in actors.items()}
        places: dict[str, dict[int, int]] = {}
        for a in actors.values():
            for identity, members in a.groups:
                if identity not in places:
                    places[identity] = {m: i for i, m in enumerate(members)}
        self.places = places
        self.index = {r: [places[i][r] for i, _ in a.groups] for r, a in actors.items()}
        self.at = {r: [0] * len(a.program.lanes) for r, a in actors.items()}
        # Calls of a communicator run in order under NCCL: those not started yet.
        self.queues: dict[int, dict[tuple[int, ...], deque[list[int]]]] = defaultdict(dict)
        self.batches: dict[int, dict[int, list[int]]] = {}
        by_program: dict[int, dict[int, list[int]]] = {}
        for r, a in actors.items():
            if id(a.program) not in by_program:
                of_batch: dict[int, list[int]] = defaultdict(list)
                for call in a.program.calls:
                    if call.batch >= 0:
                        of_batch[call.batch].append(call.number)
                by_program[id(a.program)] = dict(of_batch)
            self.batches[r] = by_program[id(a.program)]
        # Of ranks whose threads share a communicator.
        self.posted = {
            r: bytearray(len(e)) for r, e in self.ended.items() if actors[r].program.before
        }
        self.present: dict[str, int] = {}
        # Calls that have come to the head of a queue.
        self.due: deque[tuple[int, Call]] = deque()
        self.ready: deque[int] = deque(actors)

    def trouble(self) -> _Trouble | None:
        """What is wrong, None if every rank gets to its end with nothing left over."""
        while self.ready:
            rank = self.ready.popleft()
            for lane in range(len(self.at[rank])):
                found = self._advance(rank, lane)
                if found is not None:
                    return found
        for rank in self.at:
            lane = self._unfinished(rank)
            if lane is not None:
                return self._explain(rank, self._waits_in(rank, lane))
        for meeting in self.meetings.values():
            return self._explain(meeting.rank, meeting.call)
        return None

    def _advance(self, rank: int, lane: int) -> _Trouble | None:
        program = self.actors[rank].program
        order, before = program.lanes[lane], program.before
        at = self.at[rank]
        while at[lane] < len(order):
            number, is_wait = order[at[lane]]
            if is_wait:
                if not self._has_ended(rank, number):
                    return None
            else:
                if before:
                    previous = before.get(number)
                    if previous is not None and not self.posted[rank][previous]:
                        return None
                    self.posted[rank][number] = 1
                    self.ready.append(rank)
                found = self._post(rank, program.calls[number])
                if found is not None:
                    return found
            at[lane] += 1
        return None

    def _has_ended(self, rank: int, number: int) -> bool:
        ended = self.ended[rank]
        batch = self.actors[rank].program.calls[number].batch
        if batch < 0:
            return bool(ended[number])
        return all(ended[n] for n in self.batches[rank][batch])

    # --- starting ------------------------------------------------------------------

    def _post(self, rank: int, call: Call) -> _Trouble | None:
        self._enqueue(rank, call)
        while self.due:
            found = self._start(*self.due.popleft())
            if found is not None:
                return found
        return None

    def _enqueue(self, rank: int, call: Call) -> None:
        if self.actors[rank].program.backends[call.group] != "nccl":
            self.due.append((rank, call))
            return
        # One kernel after the other on a communicator; the parts of a batch are one.
        key: tuple[int, ...] = (call.group,)
        if call.peer_offset >= 0 and call.batch < 0:  # torch gives each pair its own
            me = self.index[rank][call.group]
            size = len(self.actors[rank].groups[call.group][1])
            key = (call.group, *sorted((me, (me + call.peer_offset) % size)))
        queue = self.queues[rank].setdefault(key, deque())
        if call.batch >= 0 and queue and self._batch_of(rank, queue[-1]) == call.batch:
            queue[-1].append(call.number)
        else:
            queue.append([call.number])
        if len(queue) == 1:
            self.due.append((rank, call))

    def _batch_of(self, rank: int, kernel: Sequence[int]) -> int:
        return self.actors[rank].program.calls[kernel[0]].batch

    def _start(self, rank: int, call: Call) -> _Trouble | None:
        group, members = self.actors[rank].groups[call.group]
        me = self.index[rank][call.group]
        side: int | str = rank
        if call.kind in ("send", "recv"):
            other = members[(me + call.peer_offset) % len(members)]
            pair = (rank, other) if call.kind == "send" else (other, rank)
            key: tuple[object, ...] = (group, call.seq, *pair)
            side = call.kind
            expected = 2 if other in self.actors else 1
        else:
            key = group, call.seq
            expected = self._num_present(group, members)
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = _Meeting(call, rank)
        else:
            found = self._compare(meeting, rank, call)
            if found is not None:
                return found
        meeting.arrived[side] = rank, call
        if len(meeting.arrived) >= expected:
            del self.meetings[key]
            for r, c in meeting.arrived.values():
                self._end(r, c)
        else:
            self._end_early(meeting, members)
        return None

    def _num_present(self, group: str, members: Sequence[int]) -> int:
        if group not in self.present:
            self.present[group] = sum(1 for m in members if m in self.actors)
        return self.present[group]

    def _end_early(self, meeting: _Meeting, members: Sequence[int]) -> None:
        """Ends those that do not need everybody."""
        root = meeting.call.root
        root_is_there = root >= 0 and (
            members[root] in meeting.arrived or members[root] not in self.actors
        )
        for rank, call in list(meeting.arrived.values()):
            if self.ended[rank][call.number]:
                continue
            rule = ends(call.kind, is_root=root >= 0 and members[root] == rank)
            if call.kind == "send" and 0 <= call.num_bytes <= self.eager_bytes:
                rule = Ends.SELF
            if rule is Ends.SELF or (rule is Ends.ROOT and root_is_there):
                self._end(rank, call)

    def _end(self, rank: int, call: Call) -> None:
        if self.ended[rank][call.number]:
            return
        self.ended[rank][call.number] = 1
        self.ready.append(rank)
        for queue in self.queues.get(rank, {}).values():
            if queue and call.number in queue[0]:
                if all(self.ended[rank][n] for n in queue[0]):
                    queue.popleft()
                    if queue:
                        calls = self.actors[rank].program.calls
                        self.due.extend((rank, calls[number]) for number in queue[0])
                break

    # --- what can be wrong ------------------------------------------------------------

    def _compare(self, meeting: _Meeting, rank: int, call: Call) -> _Trouble | None:
        first = meeting.call
        if call.kind in ("send", "recv"):
            if first.form != call.form:
                return self._differ(meeting, rank, call, "dtype or size")
            return None
        if first.kind != call.kind:
            return self._differ(meeting, rank, call, "kind")
        if first.root != call.root:
            return self._differ(meeting, rank, call, "root")
        if first.form != call.form and not (first.form[1] < 0 or call.form[1] < 0):
            return self._differ(meeting, rank, call, "dtype, count or reduce op")
        if self.check_splits and min(first.form[1], call.form[1]) < 0:
            for other, theirs in meeting.arrived.values():
                if not self._splits_fit(rank, call, other, theirs):
                    return self._differ(
                        _Meeting(theirs, other), rank, call, "what one sends and the other expects"
                    )
        return None

    def _splits_fit(self, rank: int, call: Call, other: int, theirs: Call) -> bool:
        place = self.places[self.actors[rank].groups[call.group][0]]
        me, them = place[rank], place[other]

        def slots(splits: Sequence[int], of: Call) -> Sequence[int]:
            return splits or (of.form[1],) * len(place)

        ins, outs = slots(call.in_splits, call), slots(call.out_splits, call)
        their_ins, their_outs = slots(theirs.in_splits, theirs), slots(theirs.out_splits, theirs)
        if call.kind == "all_to_all":
            return ins[them] == their_outs[me] and outs[them] == their_ins[me]
        # What each rank gathers or scatters is the same everywhere.
        if call.kind == "all_gather":
            return outs == their_outs
        return call.kind != "reduce_scatter" or ins == their_ins

    def _differ(self, meeting: _Meeting, rank: int, call: Call, what: str) -> _Trouble:
        return _Trouble(
            "Two ranks make calls that do not fit together",
            f"{self._name(meeting.rank, meeting.call)} and {self._name(rank, call)} differ in "
            f"{what}, group {self.actors[rank].groups[call.group][0]}, sequence number {call.seq}",
            "Make the calls of these ranks equal, in the same order",
        )

    def _explain(self, rank: int, call: Call) -> _Trouble:
        """Follows who waits for whom until a rank comes twice or has nothing left to do."""
        path: list[tuple[int, Call]] = []
        seen: dict[int, int] = {}
        while rank not in seen:
            seen[rank] = len(path)
            path.append((rank, call))
            missing = self._missing(rank, call)
            held = ((other, self._held_by(other, rank, call)) for other in missing)
            following = next(((other, by) for other, by in held if by is not None), None)
            if following is None:
                absent = missing[0]
                return _Trouble(
                    "A rank waits for a call that another one never makes"
                    if self._unfinished(rank) is not None
                    else "A communication has no counterpart",
                    f"{self._name(rank, call)} in group {self.actors[rank].groups[call.group][0]}, "
                    f"sequence number {call.seq}; rank {absent} ends after "
                    f"{len(self.actors[absent].program.calls)} calls without it",
                    "Let both ranks make the call, or neither",
                )
            rank, call = following
        circle = path[seen[rank] :]
        names = ", which waits for ".join(self._name(r, c) for r, c in circle)
        return _Trouble(
            "Ranks wait for each other in a circle",
            f"{names}, which waits for rank {circle[0][0]}",
            "Change the order of the calls on one of them, or batch them (batch_isend_irecv)",
        )

    def _held_by(self, other: int, rank: int, call: Call) -> Call | None:
        """What keeps `other` from a call of `rank`; None if it never makes that call."""
        group = self.actors[rank].groups[call.group][0]
        kinds = {"send": "recv", "recv": "send"}
        for queue in self.queues.get(other, {}).values():
            for number in itertools.chain.from_iterable(queue):
                theirs = self.actors[other].program.calls[number]
                if (
                    not self.ended[other][number]
                    and number not in queue[0]
                    and self.actors[other].groups[theirs.group][0] == group
                    and theirs.seq == call.seq
                    and theirs.kind == kinds.get(call.kind, call.kind)
                    and (theirs.peer_offset < 0 or self._peer(other, theirs) == rank)
                ):
                    return self._first_of(other, queue[0])
        lane = self._unfinished(other)
        return None if lane is None else self._waits_in(other, lane)

    def _peer(self, rank: int, call: Call) -> int:
        members = self.actors[rank].groups[call.group][1]
        return members[(self.index[rank][call.group] + call.peer_offset) % len(members)]

    def _first_of(self, rank: int, numbers: Sequence[int]) -> Call:
        """Of calls that have not all ended, the first that has not."""
        number = next(n for n in numbers if not self.ended[rank][n])
        return self.actors[rank].program.calls[number]

    def _unfinished(self, rank: int) -> int | None:
        """A lane that has not come to its end; one that waits, and not for another lane's call."""
        for lane, order in enumerate(self.actors[rank].program.lanes):
            at = self.at[rank][lane]
            if at < len(order) and order[at][1]:
                return lane
        return None

    def _waits_in(self, rank: int, lane: int) -> Call:
        """The call that keeps a lane: the one it waits for, or the one before it in a queue."""
        program = self.actors[rank].program
        number, _ = program.lanes[lane][self.at[rank][lane]]
        batch = program.calls[number].batch
        call = self._first_of(rank, [number] if batch < 0 else self.batches[rank][batch])
        for queue in self.queues.get(rank, {}).values():
            if any(call.number in kernel for kernel in queue) and call.number not in queue[0]:
                return self._first_of(rank, queue[0])
        return call

    def _missing(self, rank: int, call: Call) -> list[int]:
        """Who has not come to a call."""
        if call.kind in ("send", "recv"):
            return [self._peer(rank, call)]
        group, members = self.actors[rank].groups[call.group]
        there = self.meetings[group, call.seq].arrived
        rule = ends(call.kind, is_root=call.root >= 0 and members[call.root] == rank)
        root = members[call.root]
        if rule is Ends.ROOT and root in self.actors and root not in there:
            return [root]
        return [m for m in members if m in self.actors and m not in there]

    def _name(self, rank: int, call: Call) -> str:
        return f"rank {rank} in call {call.number} ({call.key})"


def actors_of(
    captured: Mapping[int, Captured],
    ranks: Iterable[int],
    representative: Mapping[int, int] | Sequence[int],
    groups_of: Mapping[int, Sequence[tuple[str, Sequence[int]]]],
) -> dict[int, Actor]:
    """Actors for `ranks`, with one program per representative.

    Args:
        captured: What the representatives left.
        ranks: Who takes part.
        representative: Whose program a rank follows.
        groups_of: By rank, (identity, members) of its groups in the order of creation.
    """
    programs: dict[int, Program] = {}
    actors = {}
    for rank in ranks:
        speaker = representative[rank]
        if speaker not in programs:
            programs[speaker] = Program.of(captured[speaker])
        actors[rank] = Actor(programs[speaker], groups_of[rank])
    return actors
