"""What a rank's memory comes to: peaks, what holds them, and requests that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from crystalllm.memory.blocks import CATEGORIES, PHASES, Blocks

_LARGEST = 10


def summarize(
    blocks: Blocks,
    refusals: list[dict[str, Any]],
    name_of: Callable[[int], str],
    *,
    limit_bytes: int | None = None,
) -> dict[str, Any]:
    """The account in numbers, ready for JSON.

    Args:
        blocks: The rank's blocks.
        refusals: Requests beyond the limit: `bytes`, `held_bytes`, `change` (the ordinal
            that it would have had), `at_ns`, `iteration`, `phase`, `by_library`.
        name_of: The name of an owner.
        limit_bytes: What the rank was allowed; None without a limit.

    Returns:
        - `limit_bytes`, `num_blocks`, and `end_bytes`, held at the end.
        - `peak`: `bytes`, `event`, `at_ns`, `iteration`, `phase` (of the allocation that
          reached it), `by_category`, and `largest`: the ten largest blocks that are held,
          each with `bytes`, `category`, `phase`, `iteration` (in which it was taken)
          and `name` (of its parameter; empty without one).
        - `category_peaks`: the most that each category held, not all at one time.
        - `iterations`: of each, from 0: `iteration`, `peak_bytes` (what it began with
          counts), `by_category` at that moment, and `end_bytes`.
        - `out_of_memory`: the refusals, each with `bytes`, `held_bytes`, `event`, `at_ns`,
          `iteration`, `phase`, `by_library`, `by_category` and `largest`.
    """
    total = blocks.total_bytes
    # Nothing was held before the first change.
    peak = int(np.argmax(total)) if len(total) and total.max() > 0 else -1
    moments = [peak, *(refusal["change"] - 1 for refusal in refusals)]
    held, *held_at_refusals = (
        {"by_category": by_category, "largest": _largest(blocks, moment, name_of)}
        for moment, by_category in zip(moments, _by_category(blocks, moments), strict=True)
    )
    return {
        "limit_bytes": limit_bytes,
        "num_blocks": len(blocks.bytes),
        "end_bytes": int(total[-1]) if len(total) else 0,
        "peak": {
            "bytes": _bytes_after(total, peak),
            "event": peak,
            "at_ns": int(blocks.at_ns[peak]) if peak >= 0 else 0,
            "iteration": int(blocks.iterations[peak]) if peak >= 0 else 0,
            "phase": PHASES[blocks.phase[blocks.changed[peak]]] if peak >= 0 else "other",
            **held,
        },
        "category_peaks": _category_peaks(blocks),
        "iterations": _iterations(blocks),
        "out_of_memory": [
            {
                "bytes": refusal["bytes"],
                "held_bytes": refusal["held_bytes"],
                "event": refusal["change"],
                "at_ns": refusal["at_ns"],
                "iteration": refusal["iteration"],
                "phase": refusal["phase"],
                "by_library": refusal["by_library"],
                **held_then,
            }
            for refusal, held_then in zip(refusals, held_at_refusals, strict=True)
        ],
    }


def _bytes_after(total: np.ndarray, change: int) -> int:
    return int(total[change]) if change >= 0 else 0


def _largest(blocks: Blocks, change: int, name_of: Callable[[int], str]) -> list[dict[str, Any]]:
    held = blocks.held_after(change)
    order = np.lexsort((held, -blocks.bytes[held]))[:_LARGEST]
    return [
        {
            "bytes": int(blocks.bytes[b]),
            "category": CATEGORIES[blocks.category[b]],
            "phase": PHASES[blocks.phase[b]],
            "iteration": int(blocks.taken_iteration[b]),
            "name": _name(blocks, b, name_of),
        }
        for b in held[order]
    ]


def _name(blocks: Blocks, block: int, name_of: Callable[[int], str]) -> str:
    name = name_of(int(blocks.owner[block]))
    return f"{name} and others" if name and blocks.is_shared[block] else name


def _by_category(blocks: Blocks, changes: Sequence[int]) -> list[dict[str, int]]:
    """What each category holds after each of these changes."""
    found: list[dict[str, int]] = [{} for _ in changes]
    for name, held in _held_by_category(blocks):
        for by_category, change in zip(found, changes, strict=True):
            by_category[name] = _bytes_after(held, change)
    return found


def _held_by_category(blocks: Blocks) -> Iterator[tuple[str, np.ndarray]]:
    """Each category and what it holds after every change; one array at a time."""
    category = blocks.category[blocks.changed]
    for code, name in enumerate(CATEGORIES):
        yield name, np.cumsum(np.where(category == code, blocks.change_bytes, 0))


def _category_peaks(blocks: Blocks) -> dict[str, int]:
    return {
        name: max(0, int(held.max())) if len(held) else 0
        for name, held in _held_by_category(blocks)
    }


def _iterations(blocks: Blocks) -> list[dict[str, Any]]:
    total = blocks.total_bytes
    # A thread that was late to take note belongs to the iteration that has begun.
    iteration = np.maximum.accumulate(blocks.iterations)
    bounds = np.searchsorted(iteration, np.arange(int(iteration[-1]) + 2)) if len(iteration) else []
    peaks = []
    for begin, end in pairwise(bounds):
        peak = begin - 1  # what the iteration began with
        if end > begin and total[begin:end].max() > _bytes_after(total, peak):
            peak = begin + int(np.argmax(total[begin:end]))
        peaks.append(peak)
    return [
        {
            "iteration": k,
            "peak_bytes": _bytes_after(total, peak),
            "by_category": by_category,
            "end_bytes": _bytes_after(total, bounds[k + 1] - 1),
        }
        for k, (peak, by_category) in enumerate(
            zip(peaks, _by_category(blocks, peaks), strict=True)
        )
    ]
