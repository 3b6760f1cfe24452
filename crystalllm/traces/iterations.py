"""Where iterations end in traces: profiler steps, else steps of the optimizer."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence

from crystalllm.errors import UserError
from crystalllm.traces.reading import Trace

_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
_OPTIMIZER = re.compile(r"Optimizer\.step#(\S+)")


def marks_of(traces: Sequence[Trace]) -> tuple[dict[int, tuple[int, list[int]]], str]:
    """Iteration marks of each rank, and what they come from.

    Returns:
        By rank: marks before its trace begins (counted from the earliest
        profiler step of any rank) and the ends of iterations, on the trace's
        own clock.

    Raises:
        UserError: Profiler steps that have none in common.
    """
    steps = {t.rank: _profiler_steps(t) for t in traces}
    if all(steps.values()):
        shared = set.intersection(*(set(s) for s in steps.values()))
        if not shared:
            texts = [f"rank {r}: {min(s)} to {max(s)}" for r, s in list(steps.items())[:4]]
            raise UserError(
                "Traces are of different iterations",
                where=f"Profiler steps of {', '.join(texts)}",
                do="Profile the same steps on all ranks",
            )
        numbers = {n: i for i, n in enumerate(sorted(set().union(*steps.values())))}
        marks = {
            r: (numbers[min(s)], [s[n] for n in sorted(s, key=lambda n: s[n])])
            for r, s in steps.items()
        }
        return marks, "profiler steps"
    marks = {t.rank: (0, _optimizer_steps(t)) for t in traces}
    return marks, "optimizer steps" if any(m for _, m in marks.values()) else "none"


def step_of(trace: Trace) -> Callable[[int], int]:
    """Tells the profiler step inside which the host was at a time; -1 between steps."""
    spans = sorted(
        (e.start_ns, e.end_ns, int(match[1]))
        for e in trace.events
        if e.category != "gpu_user_annotation" and (match := _STEP.fullmatch(e.name))
    )
    starts = [start for start, _, _ in spans]

    def step(time_ns: int) -> int:
        at = bisect_right(starts, time_ns) - 1
        return spans[at][2] if at >= 0 and time_ns <= spans[at][1] else -1

    return step


def _profiler_steps(trace: Trace) -> dict[int, int]:
    return {
        int(match[1]): e.end_ns
        for e in trace.events
        if e.category != "gpu_user_annotation" and (match := _STEP.fullmatch(e.name))
    }


def _optimizer_steps(trace: Trace) -> list[int]:
    """Ends of the steps of the optimizer that steps first; others belong to the same iteration."""
    ends: list[int] = []
    name = None
    for event in sorted(trace.events, key=lambda e: e.start_ns):
        match = _OPTIMIZER.fullmatch(event.name)
        if match is not None and event.category != "gpu_user_annotation":
            name = name or match[1]
            if match[1] == name:
                ends.append(event.end_ns)
    return sorted(ends)
