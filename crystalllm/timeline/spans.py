"""What one rank did, as spans on tracks: the common form of sandbox and virtual ranks.

A track is a lane, or the calls of the groups of one description that a host thread
made and that go on by themselves. Waiting for others and the transfer are parts of
a call's span, and of the span in which a lane waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pandas as pd

from crystalllm.replay.program import Capture, Replayable
from crystalllm.replay.steps import Call, Step, Steps
from crystalllm.replay.world import Op
from crystalllm.timeline.calls import CallWords

WAITING = "waiting for peers"
WAITING_FOR_PEER = "waiting for the other side"
TRANSFER = "transfer"
LATE = "late"


class Part(NamedTuple):
    """A piece of a span, in nanoseconds from the start of the replay."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank did, in nanoseconds from the start of the replay.

    Args:
        track: "host:0", or "communication" and the description of a group.
        kind: compute, call, wait (of a lane) or host (a host thread that serves streams).
        name: For people.
        iteration: 0 is the prologue, k the k-th body, then the epilogue.
        start_ns: When it began.
        end_ns: When it was over.
        args: What is known of it.
        parts: Pieces, one after another.
        meeting: Communicator and ordinal of a call's communication, where that is known.
    """

    track: str
    kind: str
    name: str
    iteration: int
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    meeting: tuple[int, int] | None = None


@dataclass(frozen=True)
class Words:
    """What the lanes, segments and calls of a capture's ranks are called."""

    capture: Capture
    calls: CallWords
    _lanes: dict[int, list[str]] = field(default_factory=dict)
    _segments: dict[int, dict[tuple[str, str, int], str]] = field(default_factory=dict)

    @classmethod
    def of(cls, capture: Capture) -> Words:
        return cls(capture, CallWords(capture))

    def lanes(self, rank: int) -> list[str]:
        """In the order of the rank's program."""
        speaker = self.calls.speaker(rank)
        if speaker not in self._lanes:
            events = self.capture.events
            of_rank = events.loc[events["rank"] == speaker, "lane"]
            self._lanes[speaker] = [str(lane) for lane in dict.fromkeys(of_rank)]
        return self._lanes[speaker]

    def segment(self, rank: int, lane: str, section: str, position: int) -> str:
        """The captured kernel's or operator's name, or the place among the segments."""
        speaker = self.calls.speaker(rank)
        if speaker not in self._segments:
            self._segments[speaker] = dict(self._named_segments(speaker))
        return self._segments[speaker].get((lane, section, position), f"computation {position}")

    def _named_segments(self, speaker: int) -> Iterable[tuple[tuple[str, str, int], str]]:
        capture = self.capture
        events = capture.events
        rows = events[(events["rank"] == speaker) & (events["kind"] == "COMP")]
        last_body = capture.num_marks - capture.period
        counts: dict[tuple[str, str], int] = {}
        for lane, mark, name in zip(rows["lane"], rows["mark"], rows["name"], strict=True):
            section = capture.section(mark)
            if section == "body" and mark < last_body:
                continue
            place = str(lane), section
            position = counts[place] = counts.get(place, -1) + 1
            if name:
                yield (*place, position), str(name)


def of_virtual(
    words: Words, made: Replayable, rank: int, steps: Steps, iterations: Iterable[int]
) -> list[Span]:
    """Spans of a rank that was replayed, in these iterations."""
    wanted = set(iterations)
    lanes = words.lanes(rank)
    has_streams = any(not lane.startswith("host:") for lane in lanes)
    found = []
    for step in steps.steps:
        if step.iteration not in wanted:
            continue
        lane = lanes[step.lane]
        if step.op == Op.RUN:
            _, role, _, section, position = made.classes[step.cls]
            found.append(
                Span(
                    lane,
                    "host" if has_streams and lane.startswith("host:") else "compute",
                    words.segment(rank, lane, section, position),
                    step.iteration,
                    step.start_ns,
                    step.end_ns,
                    {"role": role, "section": section, "position": position},
                )
            )
        elif step.op == Op.WAIT:
            found.append(_wait(words, rank, lane, step))
        elif step.op == Op.AWAIT:
            name = "waiting for another lane"
            found.append(Span(lane, "wait", name, step.iteration, step.start_ns, step.end_ns))
    for call in steps.calls:
        if call.iteration in wanted and call.end_ns >= 0:
            found.append(_call(words, rank, lanes[call.lane], call))
    return found


def _call(words: Words, rank: int, lane: str, call: Call) -> Span:
    number = call.instruction.call
    args = words.calls.args(rank, number) | {
        "Arrival (ns)": call.arrival_ns,
        "Transfer start (ns)": call.start_ns,
        "End (ns)": call.end_ns,
        "Transport": "replayed",
    }
    # A call of a stream is the stream's own work; a host thread's goes on beside it.
    is_own = call.instruction.op == Op.COMM
    track = lane if is_own else f"communication {args['Process Group Description']}"
    kind = words.calls.kind(rank, number)
    parts = _parts(kind, call.arrival_ns, call.start_ns, call.end_ns)
    return Span(
        track,
        "call",
        kind,
        call.iteration,
        call.arrival_ns,
        call.end_ns,
        args,
        parts,
        (call.comm, call.seq),
    )


def _wait(words: Words, rank: int, lane: str, step: Step) -> Span:
    assert step.call is not None
    number = step.call.instruction.call
    kind = words.calls.kind(rank, number)
    parts = _parts(kind, step.start_ns, step.call.start_ns, step.end_ns)
    args = {"Key": words.calls.key(rank, number)}
    return Span(
        lane, "wait", f"wait {kind}", step.iteration, step.start_ns, step.end_ns, args, parts
    )


def _parts(kind: str, begin: int, transfer: int, end: int) -> tuple[Part, ...]:
    """Waiting from `begin` until the transfer begins, then the transfer; what is empty is not."""
    waiting = WAITING_FOR_PEER if kind in ("send", "recv") else WAITING
    middle = min(max(begin, transfer), end)
    parts = Part(waiting, begin, middle), Part(TRANSFER, middle, end)
    return tuple(p for p in parts if p.end_ns > p.start_ns)


def of_sandbox(
    words: Words,
    made: Replayable,
    rank: int,
    segments: pd.DataFrame,
    communication: pd.DataFrame,
    iterations: Iterable[int],
) -> list[Span]:
    """Spans of a rank that ran, in these iterations.

    Args:
        words: Of the capture.
        made: The world in which it took part.
        rank: Who.
        segments: Its `segments`.
        communication: Its `communication`.
        iterations: 0 is the prologue.
    """
    wanted = list(iterations)
    has_streams = any(not lane.startswith("host:") for lane in words.lanes(rank))
    found = []
    for row in segments[segments["iteration"].isin(wanted)].itertuples(index=False):
        lane, section, position = str(row.lane), str(row.section), int(row.position)
        found.append(
            Span(
                lane,
                "host" if has_streams and lane.startswith("host:") else "compute",
                words.segment(rank, lane, section, position),
                int(row.iteration),
                int(row.start_ns),
                int(row.start_ns) + int(row.duration_ns),
                {"role": int(row.role), "section": section, "position": position},
            )
        )
    meetings = _meetings(made, rank, communication)
    rows = communication[communication["iteration"].isin(wanted)]
    for row in rows.itertuples(index=False):
        found += _of_call_that_ran(words, rank, row, meetings.get(int(row.call)))
    return found


def _of_call_that_ran(
    words: Words, rank: int, row: Any, meeting: tuple[int, int] | None
) -> Iterable[Span]:
    arrival, start, release, end = (
        int(t) for t in (row.arrival_ns, row.start_ns, row.release_ns, row.end_ns)
    )
    over = release if release >= 0 else end
    kind, lane, iteration = str(row.kind), str(row.lane), int(row.iteration)
    if over >= 0:
        args = words.calls.args(rank, int(row.captured_call)) | {
            "Arrival (ns)": arrival,
            "Transfer start (ns)": start,
            "End (ns)": over,
            "Transport": str(row.transport),
            "Lateness (ns)": int(row.lateness_ns),
        }
        is_own = not lane.startswith("host:")
        track = lane if is_own else f"communication {args['Process Group Description']}"
        over = max(over, arrival)
        parts = _parts(kind, arrival, start, over) if start >= 0 else ()
        yield Span(track, "call", kind, iteration, arrival, over, args, parts, meeting)
    waited = int(row.waited_ns)
    if waited > 0 and end >= 0:
        span = Span(
            lane, "wait", f"wait {kind}", iteration, end - waited, end, {"Key": str(row.key)}
        )
        if start >= 0 and release >= 0:
            due = min(max(release, span.start_ns), end)
            late = (Part(LATE, due, end),) if end > due else ()
            span = replace(span, parts=(*_parts(kind, span.start_ns, start, due), *late))
        yield span


def _meetings(
    made: Replayable, rank: int, communication: pd.DataFrame
) -> dict[int, tuple[int, int]]:
    """By call of the rank; empty where not all calls from the first on are there."""
    rows = communication.sort_values("call")
    numbers = rows["call"].to_list()
    if numbers != list(range(len(numbers))):
        return {}
    placed = made.world.ranks[rank]
    slots = {
        i.call: i.slot
        for lane in made.world.programs[placed.program].lanes
        for section in (lane.prologue, lane.body, lane.epilogue)
        for i in section
        if i.op in (Op.POST, Op.COMM)
    }
    counts: dict[int, int] = {}
    found = {}
    for number, captured in zip(numbers, rows["captured_call"], strict=True):
        slot = slots.get(int(captured))
        if slot is None:
            return {}
        seq = counts[slot] = counts.get(slot, -1) + 1
        found[int(number)] = placed.connections[slot], seq
    return found
