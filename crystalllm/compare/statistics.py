"""How far measured times deviate from a reference, and how sure that is.

Everything is in logarithms of ratios, since noise of durations is relative. Machines are noisy
in three ways, and each is treated apart: a run as a whole is faster or slower (`speeds`, taken
out iteration by iteration), an item varies from iteration to iteration (its own deciles, and
those of the reference), and items vary from run to run by themselves, for where their memory
lies, say (`between`, estimated over all items, as most of them have not changed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

# A median absolute deviation times this is the standard deviation, for normal noise.
_MAD = 1 / NormalDist().inv_cdf(0.75)
# Standard error of a median of n normal values: this times sigma / sqrt(n).
_MEDIAN = np.sqrt(np.pi / 2)
DECILE = NormalDist().inv_cdf(0.9)  # from the median, in standard deviations
# Differences as small as this say nothing of an item: waking a thread and filling a cache
# take as long on a host; a kernel on a GPU starts and ends more exactly.
HOST_JITTER_NS, STREAM_JITTER_NS = 10_000, 1_000
# With fewer items than this (in effect) a common speed cannot be told from a deviation,
# nor how items vary from run to run, and the latter is taken to be so much.
_FEW = 5
_MAX_WEIGHT = 0.2
_BETWEEN_OF_FEW = 0.1
# Correlation between iterations of one run, within an item.
_SHARED = 0.1
_NOTHING = 20.0  # logarithm of a ratio that stands for any
_MAX_DOF = 30  # beyond it, Student's t is normal for what is asked here


@dataclass(frozen=True)
class Reference:
    """What items took elsewhere.

    Args:
        median_ns: [items].
        low_ns, high_ns: [items], first and last decile of single measurements; both the
            median where they are unknown.
        count: [items], measurements that the median rests on; 0 where it is unknown.
    """

    median_ns: np.ndarray
    low_ns: np.ndarray
    high_ns: np.ndarray
    count: np.ndarray

    @classmethod
    def of_samples(cls, samples: Sequence[np.ndarray]) -> Reference:
        """From the measurements of each item, in nanoseconds; negative ones count as 0."""
        parts = [np.quantile(np.maximum(ns, 0), [0.1, 0.5, 0.9]) for ns in samples]
        low, median, high = np.array(parts, float).reshape(-1, 3).T
        return cls(median, low, high, np.array([len(ns) for ns in samples]))


@dataclass(frozen=True)
class Deviations:
    """How far each item is off its reference.

    Args:
        speeds: [iterations], logarithm of the factor that all items share.
        has_speed: Whether there is one and enough items to tell it; else it is 0.
        between: Relative standard deviation of items from run to run, beyond their noise.
        log_ratio: [items], the median over iterations, speed removed.
        error: [items], standard error of it, `between` included.
        dof: [items], degrees of freedom of the error.
        p: [items], chance of such a ratio or a larger one if nothing deviates.
        slower_from, faster_from: [items], logarithms of ratios beyond which each median lies
            outside the deciles of the other side, so that what is usual here is not there.
    """

    speeds: np.ndarray
    has_speed: bool
    between: float
    log_ratio: np.ndarray
    error: np.ndarray
    dof: np.ndarray
    p: np.ndarray
    slower_from: np.ndarray
    faster_from: np.ndarray

    @property
    def is_unusual(self) -> np.ndarray:
        """[items], whether it is more than the same things in other shares."""
        return (self.log_ratio > self.slower_from) | (self.log_ratio < self.faster_from)

    def speed(self, quantile: float = 0.5) -> float:
        """The common factor on durations, by default its median over iterations."""
        return float(np.exp(np.quantile(self.speeds, quantile)))

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """[items] each: between which ratios the true one lies at this level."""
        width = critical(1 - level, self.dof) * self.error
        return np.exp(self.log_ratio - width), np.exp(self.log_ratio + width)

    def detectable(self, p: float, power: float = 0.9) -> np.ndarray:
        """[items], the ratio from which on a test at `p` finds slower ones with this chance."""
        sure = critical(p, self.dof) + critical(2 * (1 - power), self.dof)
        return np.exp(np.minimum(np.maximum(sure * self.error, self.slower_from), _NOTHING))


def deviations(
    ns: np.ndarray,
    reference: Reference,
    *,
    has_speed: bool = True,
    jitter_ns: float = HOST_JITTER_NS,
) -> Deviations:
    """Compares items of a run with their reference.

    Args:
        ns: [items, iterations], at least one item and two iterations.
        reference: Of the same items.
        has_speed: All items are slower on a slower machine, as computation is.
        jitter_ns: Differences that say nothing.

    The error of an item's median is that of its own noise and its reference's (the larger
    spread of both counts for the run) and `between`, which is chosen such that the median
    item is as far off as normal noise would have it: the random effects of meta-analysis
    (Paule and Mandel, 1982) with a median in place of the sum of squares, so that items
    that do deviate do not hide themselves. In medians over items these count by the root
    of their time, each at most a fifth: neither the longest nor the many tiny ones decide.
    """
    usual, usual_low, usual_high = (
        np.log(values + jitter_ns)
        for values in (reference.median_ns, reference.low_ns, reference.high_ns)
    )
    logs, speeds = against(ns, reference.median_ns, jitter_ns=jitter_ns)
    weights = _weights(reference.median_ns)
    num_effective = weights.sum() ** 2 / (weights**2).sum()
    are_few = bool(num_effective < _FEW)
    if are_few or not has_speed:
        speeds = np.zeros(len(speeds))
    rest = logs - speeds
    log_ratio = np.median(rest, axis=1)
    num = ns.shape[1]
    low, high = np.quantile(rest, [0.1, 0.9], axis=1)
    # What is slower than usual is uncertain by how much faster than its median it is at times,
    # and by how much slower the reference is; a few slow iterations more do not matter.
    is_slower = log_ratio > 0
    own = np.where(is_slower, log_ratio - low, high - log_ratio) / DECILE
    there = np.where(is_slower, usual_high - usual, usual - usual_low) / DECILE
    noise = _noise(own, there, num, reference.count)
    noise += (jitter_ns / (reference.median_ns + jitter_ns)) ** 2
    between = _between(log_ratio, noise, weights)
    if are_few:
        between = max(between, _BETWEEN_OF_FEW)
    error = np.sqrt(noise + between**2)
    # Welch and Satterthwaite: each part of the error is known as well as what it rests on.
    rests_on = np.where(there >= own, num + reference.count - 2, num - 1)
    of_between = _MAX_DOF if are_few else num_effective - 1
    parts = noise**2 / np.maximum(rests_on, 1) + between**4 / of_between
    dof = np.clip(np.floor(error**4 / parts), 1, _MAX_DOF).astype(int)
    return Deviations(
        speeds=speeds,
        has_speed=has_speed and not are_few,
        between=between,
        log_ratio=log_ratio,
        error=error,
        dof=dof,
        p=two_sided(log_ratio / error, dof),
        slower_from=np.maximum(usual_high - usual, log_ratio - low),
        faster_from=np.minimum(usual_low - usual, log_ratio - high),
    )


def against(
    ns: np.ndarray, median_ns: np.ndarray, *, jitter_ns: float = HOST_JITTER_NS
) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of ratios to the reference, [items, iterations], and the speed in each iteration.

    The speed is the weighted median over items, so that it is that of the many.
    """
    logs = np.log(ns + jitter_ns) - np.log(median_ns + jitter_ns)[:, None]
    return logs, weighted_median(logs, _weights(median_ns))


def _noise(own: np.ndarray, there: np.ndarray, num: int, count: np.ndarray) -> np.ndarray:
    """Variance of the difference of two medians, from the spreads on both sides.

    The run's spread is at least the reference's, of which there are more measurements as a
    rule; where the reference's is not known, it is the run's.
    """
    # Iterations of one run share its conditions, so that many of them do not average out.
    shared = _SHARED + (1 - _SHARED) / num
    of_run = np.maximum(own, there) ** 2 * shared
    of_reference = np.where(there > 0, there, own) ** 2 / np.maximum(count, 1)
    return _MEDIAN**2 * (of_run + np.where(count > 0, of_reference, 0))


def weighted_median(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Median over the first axis, where half of the weight is reached."""
    order = np.argsort(values, axis=0, kind="stable")
    passed = np.cumsum(np.take(weights, order), axis=0)
    at = (passed < passed[-1] / 2).sum(axis=0)
    ordered = np.take_along_axis(values, order, axis=0)
    return np.take_along_axis(ordered, at[None, ...], axis=0)[0]


def discoveries(p: np.ndarray, rate: float) -> np.ndarray:
    """Which tests hold when at most `rate` of those that hold shall be false.

    Benjamini and Hochberg (1995): the k smallest, for the largest k of which the k-th is
    at most k / n of `rate`. If nothing deviates at all, something is found at `rate`.
    """
    order = np.argsort(p, kind="stable")
    fits = p[order] <= rate * np.arange(1, len(p) + 1) / max(len(p), 1)
    found = np.zeros(len(p), bool)
    if fits.any():
        found[order[: np.flatnonzero(fits)[-1] + 1]] = True
    return found


def two_sided(t: np.ndarray, dof: np.ndarray) -> np.ndarray:
    """Chance of |t| or more under Student's distribution with whole degrees of freedom.

    By the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    t, dof = np.broadcast_arrays(np.abs(np.asarray(t, float)), np.asarray(dof))
    p = np.empty(t.shape)
    for number in np.unique(dof):
        here = dof == number
        angle = np.arctan(t[here] / np.sqrt(number))
        cosine = np.cos(angle)
        is_odd = bool(number % 2)
        term = cosine if is_odd else np.ones(angle.shape)
        total = np.zeros(angle.shape)
        for k in range(int(number) // 2):
            total = total + term
            over = (2 * k + 2) / (2 * k + 3) if is_odd else (2 * k + 1) / (2 * k + 2)
            term = term * cosine**2 * over
        inside = np.sin(angle) * total
        if is_odd:
            inside = 2 / np.pi * (angle + inside)
        p[here] = np.clip(1 - inside, 0, 1)
    return p


def critical(p: float, dof: np.ndarray) -> np.ndarray:
    """The |t| that is reached with chance `p`, by bisection of `two_sided`."""
    low, high = np.zeros(len(dof)), np.full(len(dof), 1e6)
    for _ in range(80):
        middle = (low + high) / 2
        above = two_sided(middle, dof) > p
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return high


def _weights(median_ns: np.ndarray) -> np.ndarray:
    """The root of the time, but no item has more than a fifth of the whole weight."""
    weights = np.sqrt(median_ns + 1)
    for _ in range(8):  # each round comes closer
        weights = np.minimum(weights, _MAX_WEIGHT * weights.sum())
    return weights


def _between(log_ratio: np.ndarray, noise: np.ndarray, weights: np.ndarray) -> float:
    def typical(between: float) -> float:
        off = np.abs(log_ratio) / np.sqrt(noise + between**2)
        return float(weighted_median(off, weights)) * _MAD

    if typical(0.0) <= 1:
        return 0.0
    low, high = 0.0, float(np.abs(log_ratio).max()) * _MAD
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if typical(middle) > 1 else (low, middle)
    return high
