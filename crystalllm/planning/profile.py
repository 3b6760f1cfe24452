"""The profile: durations of every role's segments, from what slices measured."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np
import pandas as pd

from crystalllm.replay.durations import Duration, DurationTable, Segment

# Between the first and the last decile of a normal distribution, in units of sigma.
_DECILES_APART = 2 * NormalDist().inv_cdf(0.9)
# Fewer measurements do not show a spread.
_LEAST_FOR_SPREAD = 5
_PLACE = ["role", "lane", "section", "position"]


def rows(
    segments: pd.DataFrame,
    *,
    pass_number: int,
    slice_number: int,
    factors: Mapping[int, float],
    warm_up: int,
) -> pd.DataFrame:
    """What one slice measured, as rows of `slices`.

    Args:
        segments: Rows of `segments` of all ranks of the slice.
        pass_number: From 1.
        slice_number: From 1.
        factors: By rank, what makes its durations those at the standard speed.
        warm_up: First bodies that do not count.
    """
    is_warm_up = (segments["section"] == "body") & (segments["iteration"] <= warm_up)
    factor = segments["rank"].map(factors)
    return segments.assign(
        **{"pass": pass_number, "slice": slice_number},
        is_measured=~is_warm_up,
        # A rank that is replayed makes its calls in no time.
        calibrated_ns=((segments["duration_ns"] + segments["call_ns"]) * factor)
        .round()
        .astype(np.int64),
    )


def durations(measured: pd.DataFrame) -> dict[Segment, Duration]:
    """Durations of the segments of one pass.

    The median over the ranks of a role, its slices and, in the body, its measured
    iterations. Prologue and epilogue occur once per rank. The deciles are those of all
    of these. The spread `sigma`, from which each segment is drawn by itself, leaves out what a
    whole iteration has in common, since a core that is slow for a while is not slow by turns:
    durations are taken relative to the rest of their iteration, if that narrows them. It is
    that of the lognormal with such deciles: an outlier does not widen it.

    Args:
        measured: Rows of `slices`; those that do not count are left out.
    """
    counted = measured[measured["is_measured"]]
    grouped = counted.groupby(_PLACE, observed=True)["calibrated_ns"]
    found = grouped.quantile([0.1, 0.5, 0.9]).unstack().set_axis(["low", "median", "high"], axis=1)
    found["n"] = grouped.size()
    within = counted.assign(ns=_within_iteration(counted)).groupby(_PLACE, observed=True)["ns"]
    found[["low_within", "high_within"]] = within.quantile([0.1, 0.9]).unstack()
    return {
        (int(role), str(lane), str(section), int(position)): Duration(
            round(row.median),
            sigma=min(
                _sigma(row.low, row.high, int(row.n)),
                _sigma(row.low_within, row.high_within, int(row.n)),
            ),
            count=int(row.n),
            source="measured",
            low_ns=round(row.low),
            high_ns=round(row.high),
        )
        for (role, lane, section, position), row in zip(
            found.index, found.itertuples(index=False), strict=True
        )
    }


def merged(first: DurationTable, measured: Mapping[Segment, Duration]) -> DurationTable:
    """The first estimates, with what was measured in their place."""
    return DurationTable({**first.segments, **measured}, first.transfers)


def body_compute_ns(table: DurationTable) -> dict[int, int]:
    """By role, the computation of one body: its segments of all lanes, added up."""
    found: dict[int, int] = {}
    for (role, _, section, _), d in sorted(table.segments.items()):
        if section == "body":
            found[role] = found.get(role, 0) + d.ns
    return found


def body_spread(measured: pd.DataFrame) -> dict[int, dict[str, float]]:
    """How the computation of whole bodies spreads, by role.

    Args:
        measured: Rows of `slices` of one pass.

    Returns:
        By role: `median_ns`, `low_ns` and `high_ns` (deciles) of a body's computation
        over ranks and iterations, and `of_medians`, the sum of the segments' medians
        as a share of that median: how much the profile makes of it.
    """
    body = measured[measured["is_measured"] & (measured["section"] == "body")]
    whole = body.groupby(["role", "rank", "slice", "iteration"])["calibrated_ns"].sum()
    medians = body.groupby(_PLACE, observed=True)["calibrated_ns"].median()
    sums = medians.groupby("role").sum()
    found = {}
    for role, of_role in whole.groupby("role"):
        low, median, high = of_role.quantile([0.1, 0.5, 0.9])
        found[int(role)] = {
            "median_ns": round(median),
            "low_ns": round(low),
            "high_ns": round(high),
            "of_medians": round(float(sums[role] / median), 4) if median else 1.0,
        }
    return found


def _within_iteration(measured: pd.DataFrame) -> pd.Series:
    """Durations as if the rest of their iteration had taken what it usually does."""
    ns = measured["calibrated_ns"]
    iteration = ["pass", "slice", "rank", "section", "iteration"]
    rest = measured.groupby(iteration, observed=True)["calibrated_ns"].transform("sum") - ns
    usual = rest.groupby([measured[name] for name in _PLACE], observed=True).transform("median")
    factor = (usual / rest).where((rest > 0) & (measured["section"] == "body"), 1.0)
    return ns * factor


def _sigma(low: float, high: float, count: int) -> float:
    if count < _LEAST_FOR_SPREAD or low <= 0:
        return 0.0
    return float(np.log(high / low) / _DECILES_APART)
