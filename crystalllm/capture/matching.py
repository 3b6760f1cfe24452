"""Whether the calls of all ranks fit together, and how.

Every rank goes through its calls and waits in order, as the real world would
with transfers that take no time. What is left over when nobody can go on any
more is a fault of the program: two sides that disagree, a partner that never
comes, or ranks that wait for each other in a circle.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
        lane: Host thread or stream.
        num_bytes: Of a message.
        in_splits, out_splits: Explicit split sizes.
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
    lane: str
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
                lane=str(row["stream"]),
                num_bytes=row["count"] * element_size(row["dtype"]),
                in_splits=tuple(row["in_splits"]),
                out_splits=tuple(row["out_splits"]),
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
        self.present: dict[str, int] = {}
        self.ready: deque[int] = deque(actors)

    def trouble(self) -> _Trouble | None:
        """What is wrong, None if every rank gets to its end with nothing left over."""
        while self.ready:
            rank = self.ready.popleft()
            for lane in range(len(self.at[rank])):
                found = self._advance(rank, lane)
                if found is not None:
                    return found
        for rank, at in self.at.items():
            for lane, position in enumerate(at):
                if position < len(self.actors[rank].program.lanes[lane]):
                    return self._stuck(rank, lane)
        return self._left_over()

    def _advance(self, rank: int, lane: int) -> _Trouble | None:
        program = self.actors[rank].program
        order = program.lanes[lane]
        at = self.at[rank]
        while at[lane] < len(order):
            number, is_wait = order[at[lane]]
            if is_wait:
                if not self._has_ended(rank, number):
                    return None
            else:
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
        if self.actors[rank].program.backends[call.group] != "nccl":
            return self._start(rank, call)
        # One kernel after the other on a communicator; the parts of a batch are one.
        key: tuple[int, ...] = (call.group,)
        if call.peer_offset >= 0 and call.batch < 0:  # torch gives each pair its own
            me = self.index[rank][call.group]
            size = len(self.actors[rank].groups[call.group][1])
            key = (call.group, *sorted((me, (me + call.peer_offset) % size)))
        queue = self.queues[rank].setdefault(key, deque())
        if call.batch >= 0 and queue and self._batch_of(rank, queue[-1]) == call.batch:
            queue[-1].append(call.number)
            return self._start(rank, call) if len(queue) == 1 else None
        queue.append([call.number])
        return self._start(rank, call) if len(queue) == 1 else None

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
            key = (group, call.seq)
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
                found = self._end(r, c)
                if found is not None:
                    return found
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

    def _end(self, rank: int, call: Call) -> _Trouble | None:
        if self.ended[rank][call.number]:
            return None
        self.ended[rank][call.number] = 1
        self.ready.append(rank)
        queues = self.queues.get(rank)
        if not queues:
            return None
        for queue in queues.values():
            if queue and call.number in queue[0]:
                if all(self.ended[rank][n] for n in queue[0]):
                    queue.popleft()
                    if queue:
                        calls = self.actors[rank].program.calls
                        for number in list(queue[0]):
                            found = self._start(rank, calls[number])
                            if found is not None:
                                return found
                break
        return None

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
        if self.check_splits and call.kind == "all_to_all" and call.in_splits and call.out_splits:
            me = self.index[rank][call.group]
            place = self.places[self.actors[rank].groups[call.group][0]]
            for other, theirs in meeting.arrived.values():
                if not theirs.in_splits or not theirs.out_splits:
                    continue
                them = place[other]
                if (
                    call.in_splits[them] != theirs.out_splits[me]
                    or call.out_splits[them] != theirs.in_splits[me]
                ):
                    return self._differ(
                        _Meeting(theirs, other), rank, call, "what one sends and the other expects"
                    )
        return None

    def _differ(self, meeting: _Meeting, rank: int, call: Call, what: str) -> _Trouble:
        return _Trouble(
            "Two ranks make calls that do not fit together",
            f"{self._name(meeting.rank, meeting.call)} and {self._name(rank, call)} differ in "
            f"{what}, group {self.actors[rank].groups[call.group][0]}, sequence number {call.seq}",
            "Make the calls of these ranks equal, in the same order",
        )

    def _stuck(self, rank: int, lane: int) -> _Trouble:
        """Follows who waits for whom until a rank comes twice or has nothing left to do."""
        path: list[tuple[int, Call]] = []
        seen: dict[int, int] = {}
        while True:
            call = self._waits_in(rank, lane)
            if rank in seen:
                circle = path[seen[rank] :]
                names = ", which waits for ".join(self._name(r, c) for r, c in circle)
                return _Trouble(
                    "Ranks wait for each other in a circle",
                    f"{names}, which waits for rank {circle[0][0]}",
                    "Change the order of the calls on one of them, or batch them "
                    "(batch_isend_irecv)",
                )
            seen[rank] = len(path)
            path.append((rank, call))
            missing = self._missing(rank, call)
            other = next((r for r in missing if self._unfinished(r) is not None), None)
            if other is None:
                absent = missing[0] if missing else rank
                return _Trouble(
                    "A rank waits for a call that another one never makes",
                    f"{self._name(rank, call)} in group {self.actors[rank].groups[call.group][0]}, "
                    f"sequence number {call.seq}; rank {absent} ends after "
                    f"{len(self.actors[absent].program.calls)} calls without it",
                    "Let both ranks make the call, or neither",
                )
            rank = other
            found = self._unfinished(rank)
            assert found is not None
            lane = found

    def _unfinished(self, rank: int) -> int | None:
        lanes = self.actors[rank].program.lanes
        return next((i for i, at in enumerate(self.at[rank]) if at < len(lanes[i])), None)

    def _waits_in(self, rank: int, lane: int) -> Call:
        """The call that keeps a lane: the one it waits for, or the one before it in a queue."""
        program = self.actors[rank].program
        number, _ = program.lanes[lane][self.at[rank][lane]]
        batch = program.calls[number].batch
        parts = [number] if batch < 0 else self.batches[rank][batch]
        number = next(n for n in parts if not self.ended[rank][n])
        for queue in self.queues.get(rank, {}).values():
            if any(number in kernel for kernel in queue) and number not in queue[0]:
                number = next(n for n in queue[0] if not self.ended[rank][n])
        return program.calls[number]

    def _missing(self, rank: int, call: Call) -> list[int]:
        """Who has not come to a call."""
        group, members = self.actors[rank].groups[call.group]
        if call.kind in ("send", "recv"):
            me = self.index[rank][call.group]
            return [members[(me + call.peer_offset) % len(members)]]
        meeting = self.meetings.get((group, call.seq))
        there = meeting.arrived if meeting is not None else {}
        rule = ends(call.kind, is_root=call.root >= 0 and members[call.root] == rank)
        if rule is Ends.ROOT:
            return [members[call.root]]
        return [m for m in members if m in self.actors and m not in there]

    def _left_over(self) -> _Trouble | None:
        """A communication that nobody waits for, but that not everybody came to."""
        for meeting in self.meetings.values():
            missing = self._missing(meeting.rank, meeting.call)
            if meeting.call.kind in ("send", "recv") or missing:
                absent = missing[0]
                return _Trouble(
                    "A communication has no counterpart",
                    f"{self._name(meeting.rank, meeting.call)}, sequence number "
                    f"{meeting.call.seq}; rank {absent} ends after "
                    f"{len(self.actors[absent].program.calls)} calls without it",
                    "Let both ranks make the call, or neither",
                )
        return None

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
