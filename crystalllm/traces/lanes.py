"""Events of one rank: what its host threads and GPU streams did, and what waited for what.

Of the host only what shapes the execution graph is kept: launches, records,
waits and synchronisations, and communication that the CPU carries out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from crystalllm.traces.communication import GPU_ACTIVITIES, Communication, launches_of
from crystalllm.traces.reading import Event, Trace, whole
from crystalllm.traces.vocabulary import kernel_kind

_SYNCHRONISING = frozenset(
    {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"}
)
_RECORD = frozenset({"cudaEventRecord", "cudaEventRecordWithFlags"})
_WAIT = "cudaStreamWaitEvent"


@dataclass
class _Row:
    lane: tuple[str, Any]  # ("host", thread) or ("stream", id)
    kind: str
    name: str
    start_ns: int
    duration_ns: int
    made_ns: int  # when the host asked for it
    call: int = -1
    bytes: int = 0
    after: _Row | None = None


def communication_kind(kind: str) -> str:
    """The kind of event that a call of this kind is."""
    return {"send": "COMM_SEND", "recv": "COMM_RECV"}.get(kind, "COMM_COLL")


def events_of(
    trace: Trace,
    calls: Sequence[tuple[Communication, int, int]],
    unlinked: Set[int],
    marks_ns: Sequence[int],
) -> dict[str, list[Any]]:
    """Columns of `events` and `event_times` without the rank, times on the trace's own clock.

    Args:
        trace: Where the events come from.
        calls: Each call with its ordinal in the `calls` table (-1 where it is
            left out there) and the bytes that it is about.
        unlinked: `id` of communication kernels without a call.
        marks_ns: When iterations ended, sorted.
    """
    rows: list[_Row] = []
    of_kernel: dict[int, list[tuple[Communication, int, int]]] = defaultdict(list)
    for part in calls:
        for kernel in part[0].kernels:
            of_kernel[id(kernel)].append(part)
        if not part[0].kernels:
            rows.append(_on_cpu(*part))
    hosts, gpu = _launched(trace, of_kernel, unlinked)
    rows += hosts
    rows += gpu
    rows += _synchronisation(trace, gpu)
    rows.sort(key=lambda r: (r.start_ns, r.lane, r.made_ns, r.kind, r.name))
    return _columns(rows, marks_ns)


def _on_cpu(call: Communication, number: int, size: int) -> _Row:
    run = call.host.run
    thread = call.host.thread if run is None else run.thread
    start = call.start_ns if run is None else run.start_ns
    return _Row(
        ("host", thread),
        communication_kind(call.kind),
        call.kind,
        start,
        max(0, call.end_ns - start),
        call.start_ns,
        number,
        size,
    )


def _launched(
    trace: Trace,
    of_kernel: Mapping[int, Sequence[tuple[Communication, int, int]]],
    unlinked: Set[int],
) -> tuple[list[_Row], list[_Row]]:
    """Launches, and what they launched."""
    launches = launches_of(trace)
    hosts: dict[int, _Row] = {}
    gpu: list[_Row] = []
    for event in trace.events:
        if event.category not in GPU_ACTIVITIES:
            continue
        launch = launches.get(whole(event.args.get("correlation")))
        after = None
        if launch is not None:
            after = hosts.get(id(launch))
            if after is None:
                after = hosts[id(launch)] = _Row(
                    ("host", launch.thread),
                    "COMP",
                    launch.name,
                    launch.start_ns,
                    launch.duration_ns,
                    launch.start_ns,
                )
        made_ns = event.start_ns if launch is None else launch.start_ns
        stream = _stream(event)
        row = _Row(
            ("stream", stream), "COMP", event.name, event.start_ns, event.duration_ns, made_ns
        )
        row.after = after
        if id(event) in unlinked:
            kind = kernel_kind(event.name)
            row.kind, row.name = communication_kind(kind or ""), kind or event.name
        parts = of_kernel.get(id(event), ())
        for call, number, size in parts:
            member = _Row(
                row.lane,
                communication_kind(call.kind),
                call.kind,
                event.start_ns,
                event.duration_ns,
                made_ns,
                number,
                size,
                after,
            )
            gpu.append(member)
        if not parts:
            gpu.append(row)
    return list(hosts.values()), gpu


def _synchronisation(trace: Trace, gpu: Sequence[_Row]) -> list[_Row]:
    """Records, waits and synchronisations.

    Where the trace tells the streams (category cuda_sync), a record and a wait
    stand on their streams: the record when everything launched before it there
    has ended, the wait from then until its record. Otherwise both are what the
    host did, and which event is waited for stays unknown.
    """
    streams: dict[Any, list[_Row]] = defaultdict(list)
    for row in sorted(gpu, key=lambda r: (r.made_ns, r.start_ns)):
        streams[row.lane[1]].append(row)
    launched = {stream: [r.made_ns for r in found] for stream, found in streams.items()}

    def free_ns(stream: Any, host: Event) -> int:
        """When a stream has done all that was launched before a call of the host."""
        before = bisect_right(launched.get(stream, []), host.start_ns)
        ended = streams[stream][before - 1] if before else None
        return max(host.start_ns, ended.start_ns + ended.duration_ns if ended else 0)

    runtime = launches_of(trace)
    waits: dict[int, tuple[Any, Any, int]] = {}  # correlation: stream, stream waited for, record
    for event in trace.events:
        if event.category == "cuda_sync" and "wait_on_cuda_event_record_corr_id" in event.args:
            record = whole(event.args["wait_on_cuda_event_record_corr_id"])
            number = whole(event.args.get("correlation"))
            stream = whole(event.args.get("stream"))
            other = whole(event.args.get("wait_on_stream"))
            known = None not in (record, number, stream, other) and record in runtime
            if known and stream >= 0 and other >= 0:
                waits[number] = (stream, other, record)
    recorded_on = {record: other for _, other, record in waits.values()}
    rows: list[_Row] = []
    records: dict[int, _Row] = {}
    for number, event in sorted(runtime.items(), key=lambda item: (item[1].start_ns, item[0])):
        host = ("host", event.thread)
        if event.name in _RECORD and number in recorded_on:
            stream = recorded_on[number]
            at = free_ns(stream, event)
            records[number] = _Row(("stream", stream), "RECORD", "", at, 0, event.start_ns)
            rows.append(records[number])
        elif event.name == _WAIT and number in waits and waits[number][2] in records:
            stream, _, record = waits[number]
            at, until = free_ns(stream, event), records[record].start_ns
            row = _Row(("stream", stream), "WAIT", "", at, max(0, until - at), event.start_ns)
            row.after = records[record]
            rows.append(row)
        elif event.name in _RECORD or event.name == _WAIT or event.name in _SYNCHRONISING:
            kind = "RECORD" if event.name in _RECORD else "WAIT" if event.name == _WAIT else "SYNC"
            rows.append(_Row(host, kind, "", event.start_ns, event.duration_ns, event.start_ns))
    return rows


def _stream(event: Event) -> int:
    for value in (event.args.get("stream"), event.thread[1]):
        if (stream := whole(value)) is not None:
            return stream
    return -1


def _columns(rows: Sequence[_Row], marks_ns: Sequence[int]) -> dict[str, list[Any]]:
    number = {id(row): i for i, row in enumerate(rows)}
    threads: dict[Any, int] = {}
    lanes = []
    for row in rows:
        where, which = row.lane
        if where == "host":
            which = threads.setdefault(which, len(threads))
        lanes.append(f"{where}:{which}")
    return {
        "event": list(range(len(rows))),
        "lane": lanes,
        "kind": [r.kind for r in rows],
        "name": [r.name for r in rows],
        "mark": [bisect_right(marks_ns, r.made_ns) for r in rows],
        "call": [r.call for r in rows],
        "after": [-1 if r.after is None else number[id(r.after)] for r in rows],
        "bytes": [r.bytes for r in rows],
        "start_ns": [r.start_ns for r in rows],
        "duration_ns": [r.duration_ns for r in rows],
    }
