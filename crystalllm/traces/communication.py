"""Communication of one rank: host calls joined with the kernels that carry them out.

A kernel belongs to the call that its External id names, else to the call inside
which the runtime call with its correlation id was made. Grouped calls have one
kernel, launched after the last of them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from crystalllm.errors import UserError
from crystalllm.traces.operators import HostCall, Threads, find, host_calls, within
from crystalllm.traces.reading import Event, Trace, whole
from crystalllm.traces.vocabulary import (
    REDUCING,
    is_foreign_kernel,
    is_nccl_kernel,
    kernel_kind,
    kernel_reduce_op,
)

GPU_ACTIVITIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "runtime"})


@dataclass
class Communication:
    """One call with its kernels.

    Args:
        host: What the host's events say of it.
        kernels: None for a call that the CPU carries out.
        batch: Ordinal of the batch that it is coalesced into; -1 alone.
    """

    host: HostCall
    kernels: list[Event] = field(default_factory=list)
    batch: int = -1

    @property
    def kind(self) -> str:
        return self.host.kind

    @property
    def start_ns(self) -> int:
        return self.host.start_ns

    @property
    def end_ns(self) -> int:
        """When it was over: its last kernel, else the worker that ran it, else the operator."""
        if self.kernels:
            return max(k.end_ns for k in self.kernels)
        return self.host.end_ns if self.host.run is None else self.host.run.end_ns

    def lacks_kernel(self, trace: Trace) -> bool:
        """On the GPU, but its kernel lies outside the trace: then nobody knows when it ended."""
        return not self.kernels and "nccl" in (self.host.backend or trace.backend)

    @property
    def reduce_op(self) -> str:
        """As the kernel's name has it, "?" where none tells; empty where nothing is reduced."""
        if self.kind not in REDUCING:
            return ""
        names = [k.name for k in self.kernels if kernel_kind(k.name) == self.kind]
        return kernel_reduce_op(names[0]) if names else "?"


@dataclass(frozen=True)
class Found:
    """What the communication of one rank is.

    Args:
        calls: In the order in which they were made.
        num_kernels: Communication kernels in the trace.
        unlinked: Communication kernels whose call lies outside the trace.
    """

    calls: list[Communication]
    num_kernels: int
    unlinked: list[Event]


def communication_of(trace: Trace) -> Found:
    """Finds the calls of one rank and their kernels.

    Raises:
        UserError: Kernels of another library, kernels that cannot be linked to
            calls, or calls on a GPU without any kernel.
    """
    calls = [Communication(host) for host in host_calls(trace.events)]
    kernels = sorted(
        (e for e in trace.events if e.category == "kernel" and is_nccl_kernel(e.name)),
        key=lambda e: (e.start_ns, e.thread, e.name),
    )
    _refuse_foreign(trace)
    unlinked = _link(trace, calls, kernels)
    _refuse_missing_kernels(trace, calls, kernels)
    if kernels and len(unlinked) == len(kernels):
        raise UserError(
            "Communication kernels cannot be linked to the calls that launched them",
            where=f"File {trace.source}: {len(kernels)} kernels such as {kernels[0].name[:60]}; "
            "looked for an External id that a c10d operator or record_param_comms has, and for "
            "the correlation id of a runtime call inside one",
            do="Record with ProfilerActivity.CPU and ProfilerActivity.CUDA together",
        )
    return Found(sorted(calls, key=lambda c: c.start_ns), len(kernels), unlinked)


def _link(trace: Trace, calls: list[Communication], kernels: list[Event]) -> list[Event]:
    """Gives calls their kernels, and kernels that say all themselves a call; returns the rest."""
    threads = within([c.host for c in calls])
    by_host = {id(c.host): c for c in calls}
    by_id = {i: c for c in reversed(calls) for i in c.host.external_ids}
    launches = launches_of(trace)
    apart: list[tuple[Event, Event | None]] = []
    for kernel in kernels:
        launch = launches.get(whole(kernel.args.get("correlation")))
        call = _named(kernel, by_id) or (_named(launch, by_id) if launch else None)
        if call is None and launch is not None and (host := find(threads, launch)) is not None:
            call = by_host[id(host)]
        if call is None:
            apart.append((kernel, launch))
            continue
        call.kernels.append(kernel)
        if not call.host.metadata and "Collective name" in kernel.args:
            call.host.read_metadata(kernel.args)
    unlinked = []
    num_batches = 0
    taken = {id(c.host) for c in calls if c.kernels}
    for kernel, launch in sorted(apart, key=lambda pair: (pair[1] or pair[0]).start_ns):
        members = [by_host[id(host)] for host in _batch(threads, taken, kernel, launch)]
        for member in members:
            member.kernels.append(kernel)
            member.batch = num_batches
            taken.add(id(member.host))
        num_batches += bool(members)
        if not members and (call := _by_itself(kernel, launch)) is not None:
            calls.append(call)
        elif not members:
            unlinked.append(kernel)
    return unlinked


def launches_of(trace: Trace) -> dict[int | None, Event]:
    """Runtime calls by correlation id."""
    found = {whole(e.args.get("correlation")): e for e in trace.events if e.category in RUNTIME}
    found.pop(None, None)
    return found


def _named(event: Event, by_id: dict[int, Communication]) -> Communication | None:
    """The call that an External id names; older traces repeat the correlation id there."""
    external = whole(event.args.get("External id"))
    if external is None or external == whole(event.args.get("correlation")):
        return None
    return by_id.get(external)


def _batch(
    threads: Threads, taken: set[int], kernel: Event, launch: Event | None
) -> list[HostCall]:
    """Calls that were made before a launch, one after another, and have no kernel of their own."""
    if launch is None or launch.thread not in threads:
        return []
    kind = kernel_kind(kernel.name)
    starts, calls = threads[launch.thread]
    members = []
    for call in reversed(calls[: bisect_right(starts, launch.start_ns)]):
        fits = call.kind in ("send", "recv") if kind is None else call.kind == kind
        if id(call) in taken or not fits:
            break
        members.append(call)
    return members[::-1]


def _by_itself(kernel: Event, launch: Event | None) -> Communication | None:
    """A call known only through what its kernel says of it."""
    if "Collective name" not in kernel.args:
        return None
    made = launch or kernel
    host = HostCall("", made.thread, made.start_ns, made.end_ns, backend="nccl")
    host.read_metadata(kernel.args)
    return Communication(host, [kernel]) if host.kind else None


def _refuse_foreign(trace: Trace) -> None:
    foreign = [e for e in trace.events if e.category == "kernel" and is_foreign_kernel(e.name)]
    if foreign:
        raise UserError(
            "Kernels of a communication library other than NCCL are in a trace",
            where=f"File {trace.source}: {len(foreign)} kernels such as {foreign[0].name[:60]}",
            do="Record the job with NCCL; traces of other libraries are not understood",
        )


def _refuse_missing_kernels(trace: Trace, calls: list[Communication], kernels: list[Event]) -> None:
    on_gpu = [c for c in calls if c.lacks_kernel(trace)]
    if kernels or not on_gpu:
        return
    num_activities = sum(e.category in GPU_ACTIVITIES for e in trace.events)
    raise UserError(
        "A rank calls NCCL, but no communication kernel is in its trace",
        where=f"File {trace.source}: {len(on_gpu)} calls, {num_activities} activities of the GPU; "
        "looked for kernels named ncclKernel_, ncclDevKernel_ (any case) or nccl::",
        do="Record with ProfilerActivity.CUDA; kernels of other libraries are not understood",
    )
