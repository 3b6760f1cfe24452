"""Finding the iterations of a program from marks and call records.

Hooks only propose marks: an optimizer step may fire twice per iteration, once
per parameter, or not at all. The body is a number of marks whose calls repeat
at least twice, up to the end; of several, the one that leaves the least to
prologue and body together. The smallest period alone would not do: where every
third iteration logs, the two between look like a period of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crystalllm.errors import UserError


@dataclass(frozen=True)
class Structure:
    """Where a rank's calls repeat.

    Args:
        prologue_marks: Marks before the first repeated segment.
        period: Segments (one per mark) after which the calls repeat.
        repeats: How often the body was seen, at least two.
        body_calls: Calls of one body.
    """

    prologue_marks: int
    period: int
    repeats: int
    body_calls: int


def segments(keys: Sequence[str], marks: Sequence[int]) -> list[tuple[str, ...]]:
    """The calls between marks.

    Args:
        keys: Call records as text, in order.
        marks: Marks before each call; rises from 0.

    Returns:
        Segment 0 are the calls before the first mark, segment i those after
        the i-th; empty segments are kept. The last one is the epilogue, as
        what follows the last mark is not followed by another.
    """
    found: list[list[str]] = [[] for _ in range((max(marks) if len(marks) else 0) + 1)]
    for key, mark in zip(keys, marks, strict=True):
        found[mark].append(key)
    return [tuple(segment) for segment in found]


def find(parts: Sequence[tuple[str, ...]], *, num_marks: int, rank: int) -> Structure:
    """The body that leaves the fewest segments to prologue and body together.

    Args:
        parts: From `segments`; segments past the last call are empty.
        num_marks: Marks that the rank set in all.
        rank: For the message.

    Raises:
        UserError: Nothing repeats twice; says where iterations differ.
    """
    # Complete segments lie between two marks. The one before the first mark is
    # initialisation and first iteration, the one after the last the epilogue.
    whole = [*parts, *[()] * (num_marks + 1 - len(parts))][: num_marks + 1]
    complete = whole[1:num_marks]
    best: Structure | None = None
    for period in range(1, len(complete) // 2 + 1):
        first = _first_repeating(complete, period)
        repeats = (len(complete) - first) // period
        if repeats < 2 or not any(complete[first:]):
            continue
        if best is None or first + 1 + period < best.prologue_marks + best.period:
            best = Structure(
                prologue_marks=first + 1,
                period=period,
                repeats=repeats,
                body_calls=sum(len(s) for s in complete[first : first + period]),
            )
    if best is not None:
        return best
    raise UserError(
        "The program's calls do not repeat from iteration to iteration",
        where=f"Rank {rank}, {num_marks} marks, {_difference(complete)}",
        do="Capture more iterations (--iterations), or set marks with crystalllm.step()",
    )


def _first_repeating(complete: Sequence[tuple[str, ...]], period: int) -> int:
    """Index from which every segment equals the one `period` later."""
    at = len(complete) - period
    while at > 0 and complete[at - 1] == complete[at - 1 + period]:
        at -= 1
    return at


def _difference(complete: Sequence[tuple[str, ...]]) -> str:
    """The first place where two neighbouring segments at the end differ."""
    if len(complete) < 2:
        return f"only {len(complete)} complete iterations"
    before, after = complete[-2], complete[-1]
    for i, (a, b) in enumerate(zip(before, after, strict=False)):
        if a != b:
            return f"call {i} of the last two iterations: {a} and {b}"
    if len(before) == len(after):
        return "the last two iterations are equal, earlier ones are not"
    longer = before if len(before) > len(after) else after
    i = min(len(before), len(after))
    return (
        f"the last two iterations have {len(before)} and {len(after)} calls; call {i} is "
        + (longer[i])
    )
