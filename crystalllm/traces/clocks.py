"""Clocks of different hosts, and profiles that begin at different times.

All members leave a collective together (within microseconds in real traces),
while they may enter it far apart. So the ends of matched collectives tell how
far each rank's clock is off, and durations never do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# Shifts that are tried around the one at which two ranks' first ends are closest.
_WINDOW = 64
_MAX_ROUNDS = 50
_LIKELY_NS = 1_000_000
_LIKELY_FACTOR = 4
_OUTLIER_NS = 20_000
_OUTLIER_FACTOR = 5


@dataclass(frozen=True)
class Step:
    """One member's part in one call of a group."""

    signature: Hashable  # equal on all members
    end_ns: int
    seq: int = -1  # the program's count in the group, where the trace has it
    iteration: int = -1  # profiler step inside which it was made, where the trace has it

    def fits(self, other: Step) -> bool:
        """Whether the two can be parts of one call."""
        known = self.iteration >= 0 and other.iteration >= 0
        return self.signature == other.signature and not (
            known and self.iteration != other.iteration
        )


@dataclass(frozen=True)
class Mismatch:
    """Two members whose calls do not fit together; `at` is the call of each that differs first."""

    ranks: tuple[int, int]
    at: tuple[int, int]


def common_part(
    sequences: Mapping[int, Sequence[Step]],
) -> dict[int, range] | Mismatch:
    """Which calls of each member are those that all members' profiles saw.

    Args:
        sequences: By rank, in the order of the member's calls.

    Returns:
        Indices by rank, equally many for each; or who does not fit.
    """
    longest = max(sorted(sequences), key=lambda r: len(sequences[r]))
    reference = sequences[longest]
    shifts = {longest: 0}
    for rank in sorted(sequences):
        if rank != longest:
            shift = _shift(reference, sequences[rank])
            if shift is None:
                at = next(
                    (
                        i
                        for i, (a, b) in enumerate(zip(reference, sequences[rank], strict=False))
                        if not a.fits(b)
                    ),
                    min(len(reference), len(sequences[rank])),
                )
                return Mismatch((longest, rank), (at, at))
            shifts[rank] = shift
    first = max(shifts.values())
    end = min(shifts[r] + len(sequences[r]) for r in shifts)
    if end <= first:
        rank = max(shifts, key=lambda r: shifts[r])
        return Mismatch((longest, rank), (0, 0))
    return {r: range(first - shifts[r], end - shifts[r]) for r in sorted(shifts)}


def _shift(reference: Sequence[Step], other: Sequence[Step]) -> int | None:
    """Where in `reference` the calls of `other` begin (negative: before it)."""
    if not other:
        return None
    need = (min(len(reference), len(other)) + 1) // 2
    if reference[0].seq >= 0 and other[0].seq >= 0:
        candidates = [other[0].seq - reference[0].seq]
        need = 1
    else:
        nearest = bisect_left([s.end_ns for s in reference], other[0].end_ns)
        near = range(nearest - _WINDOW, nearest + _WINDOW + 1)
        candidates = sorted({0, len(reference) - len(other), *near})
    costs: dict[int, float] = {}
    for shift in candidates:
        low, high = max(0, shift), min(len(reference), shift + len(other))
        if high - low < need or any(
            not reference[i].fits(other[i - shift]) for i in range(low, high)
        ):
            continue
        apart = [other[i - shift].end_ns - reference[i].end_ns for i in range(low, high)]
        middle = median(apart)
        # Of shifts by whole iterations, the one at which ends are close and equally far apart.
        costs[shift] = abs(middle) + median(abs(a - middle) for a in apart)
    if not costs:
        return None
    # Ends of messages differ by more than clocks: profiles that begin together are likelier.
    enough = _LIKELY_FACTOR * min(costs.values()) + _LIKELY_NS
    return min((s for s in costs if costs[s] <= enough), key=lambda s: (abs(s), s))


@dataclass(frozen=True)
class Clocks:
    """How far clocks are off, in nanoseconds.

    Args:
        offset_ns: By rank; subtracted from its times they are on the common
            clock, on which the median rank of each set of ranks that
            communicate has offset 0.
        residual_ns: By rank, median distance of its ends from the common end.
        num_matches: By rank, collectives that its offset rests on.
        excluded: Names of first collectives whose ends lie far more apart than
            the rest, with that spread; the offsets do not rest on them.
    """

    offset_ns: dict[int, int]
    residual_ns: dict[int, int]
    num_matches: dict[int, int]
    excluded: dict[str, int]


def estimate(ranks: Sequence[int], matches: Mapping[str, Sequence[Mapping[int, int]]]) -> Clocks:
    """Estimates clock offsets.

    Args:
        ranks: All of them.
        matches: By group, in order: when each member left the collective.
    """
    # Counted from the first end: as floats, nanoseconds since 1970 are exact to 256 only.
    base_ns = min((t for found in matches.values() for m in found for t in m.values()), default=0)
    used = {
        (g, i): {r: t - base_ns for r, t in m.items()}
        for g, found in matches.items()
        for i, m in enumerate(found)
        if len(m) > 1
    }
    offsets = _solve(ranks, list(used.values()))
    spread = {
        at: max(t - offsets[r] for r, t in m.items()) - min(t - offsets[r] for r, t in m.items())
        for at, m in used.items()
    }
    usual = median(spread.values()) if spread else 0
    late = {
        at for at in used if at[1] == 0 and spread[at] > max(_OUTLIER_NS, _OUTLIER_FACTOR * usual)
    }
    if late and len(late) < len(used):
        kept = {at: m for at, m in used.items() if at not in late}
        again = _solve(ranks, list(kept.values()))
        if all(any(r in m for m in kept.values()) for at in late for r in used[at]):
            used, offsets = kept, again
        else:
            late = set()  # some rank has nothing else to go by
    else:
        late = set()
    apart = defaultdict(list)
    for match in used.values():
        middle = median(t - offsets[r] for r, t in match.items())
        for rank, end_ns in match.items():
            apart[rank].append(abs(end_ns - offsets[rank] - middle))
    return Clocks(
        offset_ns={r: round(offsets[r]) for r in ranks},
        residual_ns={r: round(median(apart[r])) if apart[r] else 0 for r in ranks},
        num_matches={r: len(apart[r]) for r in ranks},
        excluded={at[0]: round(spread[at]) for at in sorted(late)},
    )


def _solve(ranks: Sequence[int], matches: Sequence[Mapping[int, int]]) -> dict[int, float]:
    """Offsets with the smallest absolute residuals: pairs first, then medians in turn."""
    pairs: dict[int, dict[int, list[int]]] = {r: defaultdict(list) for r in ranks}
    of_rank: dict[int, list[Mapping[int, int]]] = defaultdict(list)
    for match in matches:
        first = min(match)
        for rank, end_ns in match.items():
            of_rank[rank].append(match)
            if rank != first:
                pairs[first][rank].append(end_ns - match[first])
                pairs[rank][first].append(match[first] - end_ns)
    offsets: dict[int, float] = {}
    islands: list[list[int]] = []
    for root in ranks:
        if root in offsets:
            continue
        offsets[root] = 0.0
        island, queue = [root], deque([root])
        while queue:
            near = queue.popleft()
            for rank in sorted(pairs[near]):
                if rank not in offsets:
                    offsets[rank] = offsets[near] + median(pairs[near][rank])
                    island.append(rank)
                    queue.append(rank)
        islands.append(island)
    for _ in range(_MAX_ROUNDS):
        moved = 0.0
        # A match's common end is that of the others, so that two ranks pull each other together.
        ends = {id(m): median(t - offsets[r] for r, t in m.items()) for m in matches}
        for rank, found in of_rank.items():
            better = median(m[rank] - ends[id(m)] for m in found)
            moved = max(moved, abs(better - offsets[rank]))
            offsets[rank] = better
        if moved < 1:
            break
    for island in islands:
        middle = median(offsets[r] for r in island)
        for rank in island:
            offsets[rank] -= middle
    return offsets
