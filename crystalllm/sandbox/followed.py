"""What a sandbox rank repeats: the captured calls of its role, and their place in the replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crystalllm.errors import UserError
from crystalllm.replay.engine import INSTRUCTION, packed
from crystalllm.replay.program import Capture, Replayable
from crystalllm.replay.world import Op

# Ordinal in the capture, host thread, key.
Call = tuple[int, int, str]


@dataclass(frozen=True, kw_only=True)
class Followed:
    """The trace of one rank.

    Args:
        role: Of the rank.
        prologue, body, epilogue: Calls in order.
        num_bodies: How often a run goes through the body.
        instructions: By ordinal of the captured call, the INSTRUCTION that arrives
            in the replay, as hexadecimal text.
        cpu_ns: By ordinal of the captured call, the time that its library would take
            from the rank's core; empty if nothing is to be taken.
        call_ns: By ordinal of the captured call, the time that it would take; likewise.
        num_threads: Host threads that make calls.
        first_mark: Marks after which the bodies begin.
        period: Marks of one body.
        num_segments: By "lane section", how many segments of computation there are.
    """

    role: int
    prologue: Sequence[Call]
    body: Sequence[Call]
    epilogue: Sequence[Call]
    num_bodies: int
    instructions: str
    cpu_ns: Sequence[int]
    call_ns: Sequence[int]
    num_threads: int
    first_mark: int
    period: int
    num_segments: dict[str, int]


def followed(
    capture: Capture, made: Replayable, rank: int, *, num_bodies: int, takes_core: bool
) -> Followed:
    """The trace of `rank`, which its role's speaker has left.

    Args:
        capture: Of the whole world.
        made: The world that is replayed.
        rank: Who.
        num_bodies: Bodies of the run.
        takes_core: Whether transfers take time from the rank's core.
    """
    role = int(capture.ranks.at[rank, "role"])
    speaker = capture.speakers()[role]
    calls = capture.calls[capture.calls["rank"] == speaker]
    last_body = capture.num_marks - capture.period
    mark = calls["mark"]
    sections = {
        "prologue": calls[mark < capture.first_body_mark],
        "body": calls[(mark >= last_body) & (mark < capture.num_marks)],
        "epilogue": calls[mark >= capture.num_marks],
    }
    rows = np.zeros(int(calls["call"].max()) + 1 if len(calls) else 0, INSTRUCTION)
    cpu_ns, call_ns = [0] * len(rows), [0] * len(rows)
    program = made.world.programs[made.world.ranks[rank].program]
    for lane in program.lanes:
        for section in (lane.prologue, lane.body, lane.epilogue):
            for i in section:
                if i.op in (Op.POST, Op.COMM):
                    rows[i.call] = packed(i)
                    cpu_ns[i.call] = made.durations[i.cls].cpu_ns
                    call_ns[i.call] = made.durations[i.cls].call_ns
    events = capture.events[capture.events["rank"] == speaker]
    segments = events[(events["kind"] == "COMP") & ~_earlier_body(capture, events["mark"])]
    counts = segments.groupby(
        [segments["lane"].astype(str), segments["mark"].map(capture.section)]
    ).size()
    return Followed(
        role=role,
        **{
            name: list(
                zip(
                    of["call"].tolist(),
                    of["stream"].tolist(),
                    of["key"].astype(str).tolist(),
                    strict=True,
                )
            )
            for name, of in sections.items()
        },
        num_bodies=num_bodies,
        instructions=rows.tobytes().hex(),
        cpu_ns=cpu_ns if takes_core and any(cpu_ns) else [],
        call_ns=call_ns if takes_core and any(call_ns) else [],
        num_threads=max(1, calls["stream"].nunique()),
        first_mark=capture.first_body_mark,
        period=capture.period,
        num_segments={f"{lane} {section}": int(n) for (lane, section), n in counts.items()},
    )


def _earlier_body(capture: Capture, mark: object) -> object:
    return (mark >= capture.first_body_mark) & (mark < capture.num_marks - capture.period)


def program_iterations(capture: Capture, num_bodies: int) -> int:
    """Iterations that the program has to be told to run, so that it goes through so many bodies.

    Raises:
        UserError: No whole number of iterations gives them.
    """
    s = capture.structure
    # As in PayloadBook.extra_periods: skipped steps before the body cost a mark or two.
    marks_per_iteration = max(1, round(capture.num_marks / s["iterations"]))
    extra_marks = (num_bodies - capture.num_bodies) * capture.period
    iterations = s["iterations"] + extra_marks // marks_per_iteration
    if extra_marks % marks_per_iteration or iterations < 1:
        raise UserError(
            "The program cannot run so many periods",
            where=f"{num_bodies} periods of {capture.period} marks; captured are "
            f"{capture.num_bodies} periods in {s['iterations']} iterations",
            do="Ask for more iterations, or for another number of them",
        )
    return iterations
