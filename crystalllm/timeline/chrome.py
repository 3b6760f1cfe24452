"""Spans as events of the Chrome trace format, in the form that Kineto gives them.

Perfetto takes a complete event ("X") only where it lies inside the one that is open
on its thread, or after it: what overlaps partly is dropped. So spans of a track that
overlap go to further threads. Thread numbers are unique across processes, as Perfetto
names threads by them.

HolisticTraceAnalysis (0.5) takes for kernels what has a `stream`, keeps those whose
`correlation` some host event has, calls those communication whose name begins with
"nccl" and contains "Kernel" after it, and knows iterations by the name ProfilerStep#.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crystalllm import artifacts
from crystalllm.timeline.spans import Span

Event = dict[str, Any]
Time = Callable[[int], float]

_THREADS_PER_PROCESS = 100_000
# Of the first kernel's launch. HolisticTraceAnalysis puts row numbers where correlations
# were, so that these must not fit into a smaller type than those.
_LAUNCH = 1_000_000_000
_CATEGORIES = {"compute": "kernel", "call": "kernel", "wait": "cpu_op", "host": "cpu_op"}


@dataclass(frozen=True)
class Iteration:
    """One iteration of a rank.

    Args:
        number: 0 is the prologue.
        start_ns: From the start of the replay.
        end_ns: Likewise.
        args: What is known of it.
    """

    number: int
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """What a timeline has of one rank.

    Args:
        rank: Who; the number of the process.
        name: For people.
        label: sandbox or virtual.
        iterations: In order.
        spans: On any tracks.
    """

    rank: int
    name: str
    label: str
    iterations: Sequence[Iteration]
    spans: Sequence[Span]


def exact_us(ns: int) -> float:
    """Microseconds from which a reader gets the nanosecond back, cutting or rounding."""
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)


def whole_us(ns: int) -> int:
    """Microseconds, rounded half up: what meets stays so, and no sum is off by more than one."""
    return (ns + 500) // 1000


def events_of(
    process: Process, tids: Threads, *, time: Time, order: int, as_kernels: bool
) -> list[Event]:
    """The events of one rank; of those that share a thread, outer ones come first.

    Args:
        process: The rank.
        tids: Its threads.
        time: exact_us or whole_us.
        order: Place among the processes.
        as_kernels: In the form in which HolisticTraceAnalysis finds them.
    """
    found = _names(process, tids, order)
    for iteration in process.iterations:
        name = "ProfilerStep#" if as_kernels else "iteration "
        args = {"correlation": _LAUNCH + iteration.number} if as_kernels else {}
        found.append(
            _complete(
                f"{name}{iteration.number}",
                "user_annotation",
                (process.rank, tids.iterations),
                (iteration.start_ns, iteration.end_ns),
                args | dict(iteration.args),
                time,
            )
        )
    for span, tid in tids.placed:
        category = _CATEGORIES[span.kind]
        name, args = span.name, {**span.args, "iteration": span.iteration}
        if as_kernels and category == "kernel":
            # All kernels of an iteration are launched by its step.
            args |= {
                "stream": tids.stream(tid),
                "correlation": _LAUNCH + span.iteration,
                "device": 0,
            }
            name = kernel_name(span)
        where = process.rank, tid
        found.append(_complete(name, category, where, (span.start_ns, span.end_ns), args, time))
        for part in span.parts:
            found.append(
                _complete(part.name, "phase", where, (part.start_ns, part.end_ns), {}, time)
            )
    return found


def kernel_name(span: Span) -> str:
    """The name by which HolisticTraceAnalysis tells communication from computation."""
    return f"nccl_{span.name}_VirtualKernel" if span.kind == "call" else span.name


class Threads:
    """Threads of a process: its iterations, then its tracks, each with as many as it needs.

    Args:
        process: Whose spans.

    Attributes:
        iterations: Of the iterations.
        names: By thread.
        placed: Spans with their threads, by track and time.
    """

    def __init__(self, process: Process) -> None:
        self._first = (process.rank + 1) * _THREADS_PER_PROCESS
        self.iterations = self._first
        self.names = {self.iterations: "iterations"}
        self.placed: list[tuple[Span, int]] = []
        tracks: dict[str, list[Span]] = defaultdict(list)
        for span in process.spans:
            tracks[span.track].append(span)
        for track in sorted(tracks, key=_rank_of_track):
            self._place(track, tracks[track])

    def stream(self, tid: int) -> int:
        """A number above 0, which is what HolisticTraceAnalysis wants of a stream."""
        return tid - self._first

    def _place(self, track: str, spans: list[Span]) -> None:
        ends: list[int] = []
        tids: list[int] = []
        for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
            at = next((i for i, end in enumerate(ends) if end <= span.start_ns), len(ends))
            if at == len(ends):
                ends.append(0)
                tids.append(self._first + len(self.names))
                self.names[tids[at]] = track if at == 0 else f"{track} ({at + 1})"
            ends[at] = span.end_ns
            self.placed.append((span, tids[at]))


def _rank_of_track(track: str) -> tuple[int, str]:
    """Lanes come before communication."""
    return int(track.startswith("communication")), track


def arrows(processes: Iterable[tuple[Process, Threads]], *, time: Time) -> list[Event]:
    """From each send to its recv, where both are there."""
    sends: dict[tuple[int, int], tuple[int, int, Span]] = {}
    receives: dict[tuple[int, int], tuple[int, int, Span]] = {}
    for process, tids in processes:
        for span, tid in tids.placed:
            if span.kind == "call" and span.meeting is not None and span.name in ("send", "recv"):
                side = sends if span.name == "send" else receives
                side[span.meeting] = process.rank, tid, span
    found: list[Event] = []
    for number, meeting in enumerate(sorted(sends.keys() & receives.keys()), 1):
        # An arrow is tied to what is open at its moment: there both sides have come.
        begin = max(side[meeting][2].start_ns for side in (sends, receives))
        if any(side[meeting][2].end_ns <= begin for side in (sends, receives)):
            continue
        for phase, side in (("s", sends), ("f", receives)):
            pid, tid, _ = side[meeting]
            event = {"ph": phase, "id": number, "cat": "message", "name": "message"}
            event |= {"pid": pid, "tid": tid, "ts": time(begin)}
            found.append(event | {"bp": "e"} if phase == "f" else event)
    return found


def about(pid: int, span_ns: tuple[int, int], text: str, args: Mapping[str, Any]) -> list[Event]:
    """A process that says what is shown, where everybody sees it."""
    tid = (pid + 1) * _THREADS_PER_PROCESS
    return [
        _named("process_name", pid, tid, {"name": "about this timeline"}),
        _named("process_sort_index", pid, tid, {"sort_index": -1}),
        _named("thread_name", pid, tid, {"name": "about"}),
        # Readers of Kineto traces leave out what has this category.
        _complete(text, "Trace", (pid, tid), span_ns, args, exact_us),
    ]


def write(path: Path, head: Mapping[str, Any], events: Sequence[Event]) -> None:
    """Writes a trace; equal content gives equal bytes.

    Args:
        path: Ends in .gz.
        head: What stands before the events; readers look for `distributedInfo` there.
        events: Of the trace.
    """
    # HolisticTraceAnalysis finds the rank by text, and wants a space after the colon.
    first = json.dumps(head, separators=(",", ": "))[:-1]
    text = f'{first},"traceEvents":\n{json.dumps(events, separators=(",", ":"))}}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_atomically(path, gzip.compress(text.encode(), 6, mtime=0))


def _names(process: Process, tids: Threads, order: int) -> list[Event]:
    pid = process.rank
    found = [
        _named("process_name", pid, tids.iterations, {"name": process.name}),
        _named("process_labels", pid, tids.iterations, {"labels": process.label}),
        _named("process_sort_index", pid, tids.iterations, {"sort_index": order}),
    ]
    for place, (tid, name) in enumerate(tids.names.items()):
        found.append(_named("thread_name", pid, tid, {"name": name}))
        found.append(_named("thread_sort_index", pid, tid, {"sort_index": place}))
    return found


def _named(name: str, pid: int, tid: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": dict(args)}


def _complete(
    name: str,
    category: str,
    where: tuple[int, int],
    span_ns: tuple[int, int],
    args: Mapping[str, Any],
    time: Time,
) -> Event:
    start, end = span_ns
    pid, tid = where
    duration = time(end) - time(start) if time is whole_us else time(end - start)
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
    event |= {"ts": time(start), "dur": duration}
    return event | {"args": dict(args)} if args else event
