"""Tests of what a run's ranks took against references, and what of it deviates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from crystalllm.compare.baseline import Items
from crystalllm.compare.runs import Run
from crystalllm.compare.statistics import (
    HOST_JITTER_NS,
    STREAM_JITTER_NS,
    Deviations,
    Reference,
    deviations,
    discoveries,
)


@dataclass(frozen=True)
class Limits:
    """What counts as a deviation.

    Args:
        rate: Of false findings among findings, over all tests of a run; also the chance that
            an unchanged run has a finding.
        min_ratio: Smallest relative deviation, 0.05 for 5 %.
        min_share: Smallest deviation as a share of the rank's iteration.
        speed: By how much equal runs may differ as a whole, 0.35 for 35 %.
        num_effects: Findings for which the world is replayed, the largest ones.
    """

    rate: float = 0.01
    min_ratio: float = 0.05
    min_share: float = 0.002
    speed: float = 0.35
    num_effects: int = 10


DEFAULT_LIMITS = Limits()


class Trials:
    """All tests of a run.

    Args:
        run: Whose.
        limits: What counts.
    """

    def __init__(self, run: Run, limits: Limits) -> None:
        self.run, self.limits = run, limits
        self.tests: list[pd.DataFrame] = []
        self.speeds: list[dict[str, Any]] = []
        self.parts: list[tuple[Items, Deviations, float]] = []
        self.num_items = self.num_unknown = self.num_transfers = 0
        self.iteration_ns = {rank: run.iteration_ns(rank) for rank in run.ranks}

    def add(self, rank: int, against: str, *items: Items) -> None:
        """Tests a rank's items against one reference; those of one kind share a speed."""
        for found in items:
            if against == "baseline":
                self.num_unknown += found.num_unknown
            lanes = (str(lane).partition(":")[0] for lane in found.rows["lane"])
            kinds = np.array(list(zip(found.rows["what"], lanes, strict=True)), str)
            for kind in np.unique(kinds, axis=0):
                here = np.flatnonzero((kinds == kind).all(axis=1))
                self._add(rank, against, _some_of(found, here))

    def _add(self, rank: int, against: str, items: Items) -> None:
        rows = items.rows
        what, lane = str(rows["what"].iloc[0]), str(rows["lane"].iloc[0]).partition(":")[0]
        jitter_ns = STREAM_JITTER_NS if lane == "stream" else HOST_JITTER_NS
        d = deviations(items.ns, items.reference, jitter_ns=jitter_ns)
        if against == "baseline":
            self.num_items += len(rows)
            self.num_transfers += len(rows) if what == "transfer" else 0
            self.parts.append((items, d, self.iteration_ns[rank]))
        if d.has_speed and what == "segment":
            self.speeds.append(
                {
                    "rank": rank,
                    "against": against,
                    "lane": f"{lane}:",
                    "factor": d.speed(),
                    "low": d.speed(0.1),
                    "high": d.speed(0.9),
                    "between": d.between,
                    "computed_ns": float(np.median(items.ns.sum(axis=0))),
                }
            )
        measured = np.median(items.ns / np.exp(d.speeds), axis=1)
        low, high = d.interval()
        self.tests.append(
            rows.assign(
                rank=rank,
                against=against,
                role=self.run.role_of[rank],
                measured_ns=measured.round().astype(int),
                baseline_ns=items.reference.median_ns.round().astype(int),
                ratio=np.exp(d.log_ratio),
                ratio_low=low,
                ratio_high=high,
                p=d.p,
                is_unusual=d.is_unusual,
                direct_ns=(measured - items.reference.median_ns) * rows["per_iteration"],
            )
        )

    def findings(self) -> pd.DataFrame:
        """Rows of what deviates: columns of `anomalies` but for effects; finding by finding."""
        tests = pd.concat(self.tests, ignore_index=True)
        limits = self.limits
        is_large = (np.abs(tests["ratio"] - 1) >= limits.min_ratio) & (
            tests["direct_ns"].abs() >= limits.min_share * tests["rank"].map(self.iteration_ns)
        )
        holds = discoveries(tests["p"].to_numpy(), limits.rate)
        rows = _once(tests, holds & (is_large & tests["is_unusual"]).to_numpy())
        rows = pd.concat([rows, self._speed_rows()], ignore_index=True)
        deviating = [r for r in self.run.ranks if r in set(rows["rank"])]
        return _grouped(rows, {rank: self.run.places(rank) for rank in deviating})

    def _speed_rows(self) -> pd.DataFrame:
        """Ranks that are slower or faster as a whole than equal runs and peers differ."""
        found = []
        for speed in self.speeds:
            usual = 1 + self.limits.speed
            is_faster = speed["high"] < 1 / usual and speed["against"] != "peers"
            if speed["low"] <= usual and not is_faster:
                continue  # usual in some iterations, or only its peers are slow
            there = speed["computed_ns"] / speed["factor"]
            found.append(
                {
                    "what": "speed",
                    "rank": speed["rank"],
                    "against": speed["against"],
                    "role": self.run.role_of[speed["rank"]],
                    "lane": speed["lane"],
                    "position": -1,
                    "positions": (),
                    "key": "",
                    "group_identity": "",
                    "measured_ns": round(speed["computed_ns"]),
                    "baseline_ns": round(there),
                    "ratio": speed["factor"],
                    "ratio_low": speed["low"],
                    "ratio_high": speed["high"],
                    "peers_ratio": 0.0,
                    "p": 0.0,
                    "direct_ns": speed["computed_ns"] - there,
                }
            )
        frame = pd.DataFrame(found)
        return _once(frame, np.ones(len(frame), bool)) if found else frame

    def summary(self) -> dict[str, Any]:
        timed = self.run.communication["transport"] == "timed"
        num_tests = sum(len(t) for t in self.tests)
        seen = [_detectable(*part, self.limits, num_tests) for part in self.parts]
        ratios, weights = (np.concatenate(values) for values in zip(*seen, strict=True))
        return {
            "ranks": [int(r) for r in self.run.ranks],
            "iterations": self.run.num_iterations,
            "first_iteration": self.run.first,
            "num_tests": num_tests,
            "num_segments": self.num_items - self.num_transfers,
            "num_transfers": self.num_transfers,
            "num_not_in_baseline": self.num_unknown,
            "num_replayed_calls": int(timed.sum()) // self.run.num_iterations,
            "speeds": self.speeds,
            "between": max(d.between for _, d, _ in self.parts),
            # Of the compared time, half and nine tenths lie in items with at most this.
            "detectable_half": _quantile(ratios, weights, 0.5),
            "detectable_most": _quantile(ratios, weights, 0.9),
        }


_ITEM = ["rank", "what", "lane", "position", "key", "group_identity"]
_FINDING = ["what", "of_role", "lane", "position", "key", "group_identity"]


def _some_of(items: Items, here: np.ndarray) -> Items:
    r = items.reference
    return Items(
        items.rows.iloc[here].reset_index(drop=True),
        items.ns[here],
        Reference(*(v[here] for v in (r.median_ns, r.low_ns, r.high_ns, r.count))),
    )


def _once(tests: pd.DataFrame, holds: np.ndarray) -> pd.DataFrame:
    """One row per item that deviates from baseline, peers or both, against the baseline if so."""
    held = tests[holds]
    if held.empty:
        return held.assign(peers_ratio=[])
    against = held.groupby(_ITEM)["against"].agg(lambda a: "both" if len(a) > 1 else a.iloc[0])
    ratio = tests[tests["against"] == "peers"].set_index(_ITEM)["ratio"]
    rows = held.sort_values("against").drop_duplicates(_ITEM).set_index(_ITEM)
    rows["against"] = against
    rows["peers_ratio"] = ratio.reindex(rows.index).fillna(0.0)
    return rows.reset_index()


def _grouped(rows: pd.DataFrame, places: dict[int, dict[tuple[str, int], str]]) -> pd.DataFrame:
    """Ranks that deviate alike become one finding; findings by what they cost their rank."""
    if rows.empty:
        return rows.assign(finding=[], place=[])
    rows = rows.assign(
        place=[places[row.rank].get((row.lane, row.position), "") for row in rows.itertuples()],
        is_slower=rows["ratio"] > 1,
        of_role=rows["role"].where(rows["what"] != "speed", -1),
    )
    of_one = rows.groupby([*_FINDING, "is_slower"])
    rows["cost"] = of_one["direct_ns"].transform(lambda ns: ns.abs().max())
    rows["finding"] = of_one.ngroup()
    rows = rows.sort_values(["cost", "finding", "rank"], ascending=[False, True, True])
    return rows.assign(finding=pd.factorize(rows["finding"])[0]).reset_index(drop=True)


def _detectable(
    items: Items, d: Deviations, iteration_ns: float, limits: Limits, num_tests: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of each item, the smallest slowdown that is found in nine of ten cases, and its time."""
    median = np.maximum(items.reference.median_ns, 1)
    least = limits.min_share * iteration_ns / (median * items.rows["per_iteration"].to_numpy())
    ratio = np.maximum(d.detectable(limits.rate / num_tests), 1 + limits.min_ratio)
    return np.maximum(ratio, 1 + least), median


def _quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, share * passed[-1])])
