"""Communication as the host sees it: one `HostCall` per call that a rank made.

PyTorch writes one call up to three times, each inside the one before: the
dispatched operator (`c10d::allreduce_`), `record_param_comms` (with group and
sizes since 2.2) and the backend's annotation (`nccl:all_reduce`). Older
versions and other settings leave some of them out. gloo annotates the worker
thread that runs the call, later than the operator.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from crystalllm.traces.reading import Event, whole, whole_list
from crystalllm.traces.vocabulary import dtype_of, kind_of

_ANNOTATION = re.compile(r"(nccl|gloo|mpi|ucc):(\w+)(?: (\d+)(->|<-)(\d+))?")
_HOST_CATEGORIES = {"cpu_op", "user_annotation", "operator"}


class _Layout(NamedTuple):
    """Where an operator has its arguments; -1 where it has none."""

    output: int
    input: int
    root: int = -1
    peer: int = -1
    tag: int = -1
    splits: int = -1  # of the output; the input's come next


_LAYOUTS = {
    "allreduce_": _Layout(0, 0),
    "allreduce_coalesced_": _Layout(0, 0),
    "broadcast_": _Layout(0, 0, root=2),
    "reduce_": _Layout(0, 0, root=3),
    "allgather_": _Layout(0, 1),
    "_allgather_base_": _Layout(0, 1),
    "allgather_coalesced_": _Layout(0, 1),
    "allgather_into_tensor_coalesced_": _Layout(0, 1),
    "reduce_scatter_": _Layout(0, 1),
    "_reduce_scatter_base_": _Layout(0, 1),
    "reduce_scatter_tensor_coalesced_": _Layout(0, 1),
    "alltoall_base_": _Layout(0, 1, splits=3),
    "alltoall_": _Layout(0, 1),
    "gather_": _Layout(0, 1, root=3),
    "scatter_": _Layout(0, 1, root=3),
    "send": _Layout(0, 0, peer=2, tag=3),
    "recv_": _Layout(0, 0, peer=2, tag=3),
}


@dataclass
class HostCall:
    """One call as far as the host's events tell.

    Sizes are elements, -1 where unknown; None for splits that the trace does
    not tell, an empty list for equal ones. Root is a group rank; the peer is
    one too unless `peer_is_global`.
    """

    kind: str
    thread: tuple[str, str]
    start_ns: int
    end_ns: int
    backend: str = ""
    external_ids: set[int] = field(default_factory=set)
    metadata: dict[str, Any] = field(default_factory=dict)
    run: Event | None = None  # the backend's annotation
    dtype: str = ""
    in_elements: int = -1
    out_elements: int = -1
    in_splits: list[int] | None = None
    out_splits: list[int] | None = None
    root: int = -1
    peer: int = -1
    peer_is_global: bool = False
    tag: int = 0
    is_async: bool = False

    def read_metadata(self, args: dict[str, Any]) -> None:
        """Takes in what an operator or a kernel says of the collective that it belongs to."""
        self.metadata = args
        kind = kind_of(str(args["Collective name"]))
        self.kind = self.kind or kind or ""
        if kind != self.kind:
            return  # a barrier that is made of an all_reduce
        self.dtype = dtype_of(str(args.get("dtype", ""))) or self.dtype
        self.in_elements = _either(whole(args.get("In msg nelems")), self.in_elements)
        self.out_elements = _either(whole(args.get("Out msg nelems")), self.out_elements)
        for name, at in (("In split size", "in_splits"), ("Out split size", "out_splits")):
            splits = whole_list(args.get(name))
            if splits is not None and splits[1] and (splits[0] or getattr(self, at) is None):
                setattr(self, at, splits[0])
        rank = whole(args.get("Rank"))
        if self.kind in ("broadcast", "reduce", "gather", "scatter") and rank is not None:
            self.root = rank
        peer = whole(args.get("Dst Rank" if self.kind == "send" else "Src Rank"))
        if self.kind in ("send", "recv") and peer is not None:
            self.peer, self.peer_is_global = peer, True
        self.is_async |= args.get("Is asynchronized op") in (True, "true", "True", 1)


def host_calls(events: Iterable[Event]) -> list[HostCall]:
    """The calls of one rank, in the order in which they were made."""
    threads: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.category in _HOST_CATEGORIES and _is_communication(event):
            threads[event.thread].append(event)
    calls: list[HostCall] = []
    on_workers: list[Event] = []
    for thread in sorted(threads):
        made, alone = _of_thread(threads[thread])
        calls += made
        on_workers += alone
    calls += _join_workers(calls, on_workers)
    for call in calls:
        if call.run is not None:
            _read_annotation(call, call.run)
    return sorted(calls, key=lambda c: (c.start_ns, c.thread))


def _is_communication(event: Event) -> bool:
    return (
        event.name == "record_param_comms"
        or event.name.startswith("c10d::")
        or _ANNOTATION.match(event.name) is not None
    )


def _of_thread(events: list[Event]) -> tuple[list[HostCall], list[Event]]:
    """Calls of one thread, and annotations that lie in no operator of it."""
    nests: list[list[Event]] = []
    alone: list[Event] = []
    end_ns = -1
    for event in sorted(events, key=lambda e: (e.start_ns, -e.duration_ns)):
        if nests and event.start_ns < end_ns:
            nests[-1].append(event)
        elif _ANNOTATION.match(event.name):
            alone.append(event)
        else:
            nests.append([event])
            end_ns = event.end_ns
    calls = [call for nest in nests if (call := _call_of(nest)) is not None]
    return calls, alone


def _call_of(nest: list[Event]) -> HostCall | None:
    """The call that an operator with everything inside it is; None for a wait and the like."""
    operator = next((e for e in nest if e.name.startswith("c10d::")), None)
    record = next(
        (e for e in nest if e.name == "record_param_comms" and "Collective name" in e.args), None
    )
    run = next((e for e in nest if _ANNOTATION.match(e.name)), None)
    call = HostCall("", nest[0].thread, nest[0].start_ns, nest[0].end_ns, run=run)
    if operator is not None:
        call.kind = kind_of(operator.name.removeprefix("c10d::")) or ""
        _read_operator(call, operator)
    if record is not None:
        call.read_metadata(record.args)
    elif not call.kind and run is not None:
        call.kind = kind_of(run.name) or ""
    ids = (whole(e.args.get("External id")) for e in nest)
    call.external_ids = {i for i in ids if i is not None}
    return call if call.kind else None


def _read_operator(call: HostCall, operator: Event) -> None:
    layout = _LAYOUTS.get(operator.name.removeprefix("c10d::"))
    if layout is None:
        return
    shapes = _argument(operator, "Input Dims")
    words = _argument(operator, "Concrete Inputs")
    types = _argument(operator, "Input type")
    output, put_in = _sizes(_at(shapes, layout.output)), _sizes(_at(shapes, layout.input))
    if output is not None:
        call.out_elements = sum(output)
    if put_in is not None:
        call.in_elements = sum(put_in)
    call.dtype = dtype_of(str(_at(types, layout.input))) or call.dtype
    if operator.name == "c10d::alltoall_":
        call.in_splits, call.out_splits = _uneven(put_in), _uneven(output)
    if layout.splits >= 0:
        given = [whole_list(_at(words, layout.splits + i)) for i in (0, 1)]
        out_splits, in_splits = (g[0] if g is not None and g[1] else None for g in given)
        call.in_splits, call.out_splits = in_splits, out_splits
    call.root = _either(whole(_at(words, layout.root)), -1)
    call.peer = _either(whole(_at(words, layout.peer)), -1)
    tag = whole(_at(words, layout.tag))
    call.tag = tag if tag is not None and 0 <= tag < 2**31 else 0
    call.is_async = next((w for w in reversed(words) if w in ("True", "False")), "") == "True"


def _read_annotation(call: HostCall, run: Event) -> None:
    match = _ANNOTATION.match(run.name)
    assert match is not None  # it was chosen by that
    call.backend = match[1]
    if match[3] is not None and call.peer < 0:
        call.peer = int(match[5])
    shapes, types = _argument(run, "Input Dims"), _argument(run, "Input type")
    # An empty shape is a tensor of one element here: annotations hold tensors only.
    tensors = [
        [1] if s == [] and dtype_of(str(t)) else _sizes(s)
        for s, t in zip(shapes, types, strict=False)
    ]
    sizes = [s[0] for s in tensors if s is not None and len(s) == 1]
    if not call.dtype and types:
        call.dtype = dtype_of(str(types[0]))
    if len(sizes) != len(shapes) or not sizes:
        return
    if call.in_elements < 0:
        call.in_elements = sum(sizes)
    if call.kind == "all_to_all" and len(sizes) > 1 and call.in_splits in (None, []):
        # A list call: the annotation has the tensor for each peer, the rank's own included.
        call.in_splits = _uneven(sizes)


def _join_workers(calls: list[HostCall], runs: list[Event]) -> list[HostCall]:
    """Gives operators the annotations of worker threads; what is left is calls by itself.

    Workers take calls in order, so of the calls of this size that wait for an
    annotation the oldest gets it; a reduce_scatter may be annotated as the
    all_reduce that gloo makes of it.
    """
    waiting: dict[int | str, deque[HostCall]] = defaultdict(deque)
    for call in sorted(calls, key=lambda c: c.start_ns):
        if call.run is None:
            waiting[_matching_key(call)].append(call)
    left = []
    for run in sorted(runs, key=lambda e: (e.start_ns, e.thread)):
        call = HostCall(kind_of(run.name) or "", run.thread, run.start_ns, run.end_ns, run=run)
        if not call.kind:
            continue
        _read_annotation(call, run)
        # Older operators tell no size: then the kind has to do.
        queues = [waiting[_matching_key(call)], waiting[call.kind]]
        queue = next((q for q in queues if q and q[0].start_ns <= run.start_ns), None)
        if queue is not None:
            queue.popleft().run = run
        else:
            external_id = whole(run.args.get("External id"))
            call.external_ids = set() if external_id is None else {external_id}
            left.append(call)
    return left


def _matching_key(call: HostCall) -> int | str:
    return call.kind if call.kind == "barrier" or call.in_elements < 0 else call.in_elements


# By thread: starts of its calls, and the calls.
Threads = dict[tuple[str, str], tuple[list[int], list[HostCall]]]


def within(calls: list[HostCall]) -> Threads:
    """Calls of each thread by start, for `find`."""
    threads: dict[tuple[str, str], list[HostCall]] = defaultdict(list)
    for call in calls:
        threads[call.thread].append(call)
    return {t: ([c.start_ns for c in found], found) for t, found in threads.items()}


def find(threads: Threads, event: Event) -> HostCall | None:
    """The call inside which a host event began."""
    starts, calls = threads.get(event.thread, ([], []))
    at = bisect_right(starts, event.start_ns) - 1
    return calls[at] if at >= 0 and event.start_ns <= calls[at].end_ns else None


def _argument(event: Event, key: str) -> list[Any]:
    value = event.args.get(key)
    return value if isinstance(value, list) else []


def _at(values: list[Any], index: int) -> Any:
    return values[index] if 0 <= index < len(values) else None


def _sizes(shapes: Any, depth: int = 3) -> list[int] | None:
    """Elements of each tensor of an argument; None where the trace leaves them out."""
    if not isinstance(shapes, list) or not shapes or not depth:
        return None
    if all(isinstance(s, list) for s in shapes):
        inner = [_sizes(s, depth - 1) for s in shapes]
        return [n for sizes in inner if sizes is not None for n in sizes] if all(inner) else None
    dims = whole_list(shapes)
    size = -1 if dims is None or min(dims[0]) < 0 else math.prod(dims[0])
    return [size] if 0 <= size < 2**61 else None


def _uneven(sizes: list[int] | None) -> list[int] | None:
    if sizes is None:
        return None
    return sizes if len(set(sizes)) > 1 else []


def _either(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
