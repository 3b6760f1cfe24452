"""Times by size: what was measured, and what lies between and beyond."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Times of one collective on one placement, by bytes.

    Args:
        sizes: Bytes, ascending, at least one.
        times_ns: Medians of what was measured of each size.
        counts: Measurements of each size.
    """

    sizes: tuple[int, ...]
    times_ns: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, measurements: Iterable[tuple[int, float]]) -> Curve:
        """From bytes and nanoseconds, in any order."""
        of_size: dict[int, list[float]] = defaultdict(list)
        for num_bytes, ns in measurements:
            of_size[num_bytes].append(ns)
        sizes = sorted(of_size)
        return cls(
            tuple(sizes),
            tuple(statistics.median(of_size[s]) for s in sizes),
            tuple(len(of_size[s]) for s in sizes),
        )

    def at(self, num_bytes: int) -> tuple[float, int, str]:
        """Nanoseconds, measurements that they rest on, and how they follow from those.

        Between two sizes the logarithm of the time is linear in that of the size. A
        smaller size than measured takes as long as the smallest, which is latency. Beyond
        the largest the time grows with the bandwidth between the two largest; where the
        larger of them did not take longer, or there is only one, with that of the largest.
        """
        sizes, times = self.sizes, self.times_ns
        after = bisect.bisect_left(sizes, num_bytes)
        if after < len(sizes) and sizes[after] == num_bytes:
            return times[after], self.counts[after], f"as measured of {num_bytes} bytes"
        if after == 0:
            text = f"{num_bytes} bytes as the smallest measured, {sizes[0]} bytes"
            return times[0], self.counts[0], text
        if after == len(sizes):
            per_byte = times[-1] / sizes[-1]
            if len(sizes) > 1 and times[-1] > times[-2]:
                per_byte = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            text = (
                f"{num_bytes} bytes beyond the largest measured, {sizes[-1]} bytes, "
                f"at {1 / per_byte:.4g} GB/s"
            )
            return times[-1] + per_byte * (num_bytes - sizes[-1]), self.counts[-1], text
        (s0, t0), (s1, t1) = ((sizes[i], times[i]) for i in (after - 1, after))
        text = f"{num_bytes} bytes between {s0} and {s1} bytes"
        count = min(self.counts[after - 1], self.counts[after])
        return between(num_bytes, (s0, t0), (s1, t1)), count, text


def between(x: float, a: tuple[float, float], b: tuple[float, float]) -> float:
    """On the line through two points, all in logarithms; all numbers are positive."""
    share = (math.log(x) - math.log(a[0])) / (math.log(b[0]) - math.log(a[0]))
    return math.exp(math.log(a[1]) + share * (math.log(b[1]) - math.log(a[1])))
