"""Two runs: what is configured otherwise, and what that makes of iterations, memory and ops.

Every difference comes with an interval. Intervals cover how iterations of these two runs vary;
how equal runs differ from each other is another spread, which takes several runs to know and
can be given (`between`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from crystalllm import __version__
from crystalllm.compare.runs import Run
from crystalllm.compare.statistics import Reference, deviations, discoveries
from crystalllm.errors import UserError
from crystalllm.sandbox.outcome import PARTS

# What a summary says of the result, not of how it came about.
_RESULTS = frozenset(
    {
        "deviation",
        "exit_code",
        "last_lines",
        "log",
        "notes",
        "out_of_memory",
        "rank",
        "ranks_of_interest",
        "reason",
        "status",
        "trust",
    }
)
# Of what it says under trust.
_POLICIES = ("policies", "assumptions", "peers")
_STRUCTURE = ("fingerprint", "world_size")
LEVEL = 0.95
# Of false ones among the ops that are said to differ.
_RATE = 0.05
_RESAMPLES = 4000


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Args:
        a, b: Their folders.
        configuration: setting, a, b; only what differs.
        iterations: One row per pair of ranks and part of the iteration: rank (a's), rank_b,
            part (iteration, compute, …), n_a, n_b, a_ns, b_ns (medians), difference_ns, low_ns,
            high_ns (its interval) and differs (the interval excludes 0).
        memory: rank, rank_b, what, a, b, difference; bytes, which do not vary.
        ops: One row per segment, transfer and wait: rank, rank_b, what, lane, place, a_ns, b_ns,
            difference_ns, ratio (b over a), low, high (its interval), differs.
        speeds: By pair of ranks, the common factor on all segments, which the ratios of
            segments have taken out.
        notes: What to bear in mind: structures that differ, ops without a counterpart.
    """

    a: str
    b: str
    configuration: pd.DataFrame
    iterations: pd.DataFrame
    memory: pd.DataFrame
    ops: pd.DataFrame
    speeds: pd.DataFrame
    notes: Sequence[str]

    def to_json(self) -> str:
        """All of it; tables are lists of rows."""
        frames = ("configuration", "iterations", "memory", "ops", "speeds")
        content = {
            "crystalllm": __version__,
            "a": self.a,
            "b": self.b,
            "level": LEVEL,
            "notes": list(self.notes),
            **{name: json.loads(getattr(self, name).to_json(orient="records")) for name in frames},
        }
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


def compare(
    a: Path,
    b: Path,
    *,
    force: bool = False,
    between: float | None = None,
    warm_up: int | None = None,
    seed: int = 0,
) -> Comparison:
    """Compares run `b` with run `a`.

    Args:
        a: Folder of a run, or of a job whose emulation it is.
        b: Another one.
        force: Compare runs of different structure, too: what has a counterpart.
        between: Relative standard deviation of equal runs; intervals of times of whole
            iterations get wider by it.
        warm_up: Iterations to leave out; as each run's summary says by default.
        seed: Of resampling.

    Raises:
        UserError: A run is missing or damaged, or the two have different structures.
    """
    first, second = (Run.read(path, warm_up=warm_up) for path in (a, b))
    notes = []
    structural = _structural(first, second)
    if structural and not force:
        raise UserError(
            "The runs have different structures: " + "; ".join(structural),
            where=f"Folders {first.folder} and {second.folder}",
            do="Compare runs of one capture, or pass --force to align what can be aligned",
        )
    notes += [f"the structures differ: {text}" for text in structural]
    pairs = _pairs(first, second)
    for run in (first, second):
        notes += [f"{run.folder} {text}" for text in run.reservations]
    if between is None:
        notes.append(
            "intervals cover iterations of these two runs; equal runs differ besides, by how much "
            "repeated runs tell (--between)"
        )
    draws = np.random.default_rng(seed)
    iterations, ops, speeds = [], [], []
    for pair in pairs:
        iterations += _iterations(first, second, pair, between or 0.0, draws)
        found, speed, missing = _ops(first, second, pair)
        ops.append(found)
        speeds.append(speed)
        notes += missing
    return Comparison(
        a=str(first.folder),
        b=str(second.folder),
        configuration=_configuration(first.summary, second.summary),
        iterations=pd.DataFrame(iterations),
        memory=_memory(first, second, pairs),
        ops=_judged(pd.concat(ops, ignore_index=True)),
        speeds=pd.DataFrame(speeds),
        notes=notes,
    )


def _structural(a: Run, b: Run) -> list[str]:
    """What of the structure differs, in words."""
    found = []
    for name in _STRUCTURE:
        mine, other = (run.provenance.get(name, run.summary.get(name)) for run in (a, b))
        if mine != other:
            found.append(f"{name} {mine} and {other}")
    return found


def _pairs(a: Run, b: Run) -> list[tuple[int, int]]:
    """Ranks of a and b to hold against each other: the same ones, else those of equal roles."""
    if same := [rank for rank in a.ranks if rank in b.ranks]:
        return [(rank, rank) for rank in same]
    left = list(b.ranks)
    found = []
    for rank in a.ranks:
        other = next((r for r in left if b.role_of[r] == a.role_of[rank]), None)
        if other is not None:
            left.remove(other)
            found.append((rank, other))
    if not found:
        raise UserError(
            "The runs have no rank and no role in common",
            where=f"Ranks {a.ranks} of {a.folder}, ranks {b.ranks} of {b.folder}",
            do="Emulate the same ranks in both",
        )
    return found


def _configuration(a: Mapping[str, Any], b: Mapping[str, Any]) -> pd.DataFrame:
    """Settings and conditions that differ; structure first."""
    left, right = _settings(a), _settings(b)
    names = list(dict.fromkeys([*_STRUCTURE, *sorted(left), *sorted(right)]))
    rows = [
        (name, left.get(name, "none"), right.get(name, "none"))
        for name in names
        if left.get(name) != right.get(name)
    ]
    return pd.DataFrame(rows, columns=["setting", "a", "b"])


def _settings(summary: Mapping[str, Any]) -> dict[str, str]:
    found = {k: v for k, v in summary.items() if k not in _RESULTS}
    trust = summary.get("trust")
    if isinstance(trust, Mapping):
        found |= {k: trust[k] for k in _POLICIES if k in trust}
    return dict(_leaves(found))


def _leaves(value: Any, name: str = "") -> Iterable[tuple[str, str]]:
    """Names such as conditions.host, and values as text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        yield name, " ".join(map(str, value))
    else:
        yield name, str(value)


def _iterations(
    a: Run, b: Run, pair: tuple[int, int], between: float, draws: np.random.Generator
) -> list[dict[str, Any]]:
    frames = [
        run.iterations[run.iterations["rank"] == rank].sort_values("iteration")
        for run, rank in zip((a, b), pair, strict=True)
    ]
    found = []
    for part in ("duration", *PARTS):
        mine, other = (frame[f"{part}_ns"].to_numpy(float) for frame in frames)
        difference = float(np.median(other) - np.median(mine))
        low, high = median_difference(mine, other, draws)
        # Two runs, each off by so much.
        usual = between * np.sqrt(2) * max(float(np.median(mine)), float(np.median(other)))
        wider = NormalDist().inv_cdf((1 + LEVEL) / 2) * usual
        low = difference - float(np.hypot(difference - low, wider))
        high = difference + float(np.hypot(high - difference, wider))
        found.append(
            {
                "rank": pair[0],
                "rank_b": pair[1],
                "part": "iteration" if part == "duration" else part,
                "n_a": len(mine),
                "n_b": len(other),
                "a_ns": float(np.median(mine)),
                "b_ns": float(np.median(other)),
                "difference_ns": difference,
                "low_ns": low,
                "high_ns": high,
                "differs": bool(low > 0 or high < 0),
            }
        )
    return found


def median_difference(
    a: np.ndarray, b: np.ndarray, draws: np.random.Generator, *, level: float = LEVEL
) -> tuple[float, float]:
    """Interval of the difference of medians, b less a, by resampling.

    Blocks of neighbouring iterations are drawn, round the end to the begin (the circular block
    bootstrap), since neighbours have conditions in common.
    """
    medians = [np.median(values[_resampled(len(values), draws)], axis=1) for values in (a, b)]
    low, high = np.quantile(medians[1] - medians[0], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _resampled(n: int, draws: np.random.Generator) -> np.ndarray:
    """[resamples, n] indices."""
    block = max(1, round(n ** (1 / 3)))
    begins = draws.integers(0, n, (_RESAMPLES, -(-n // block)))
    return ((begins[..., None] + np.arange(block)) % n).reshape(_RESAMPLES, -1)[:, :n]


def _memory(a: Run, b: Run, pairs: Sequence[tuple[int, int]]) -> pd.DataFrame:
    rows = []
    for rank, other in pairs:
        left, right = (_peaks(run, r) for run, r in ((a, rank), (b, other)))
        for what in dict.fromkeys([*left, *right]):
            mine, theirs = left.get(what, 0), right.get(what, 0)
            rows.append((rank, other, what, mine, theirs, theirs - mine))
    return pd.DataFrame(rows, columns=["rank", "rank_b", "what", "a", "b", "difference"])


def _peaks(run: Run, rank: int) -> dict[str, int]:
    """Bytes at the rank's peak and by category, as its outcome says; empty if not watched."""
    memory = run.outcomes[rank].get("memory")
    if not isinstance(memory, Mapping):
        return {}
    peak = memory["peak"]
    found = {"peak": peak["bytes"]}
    found |= {f"{name} at the peak": n for name, n in peak["by_category"].items()}
    found |= {f"{name} at most": n for name, n in memory["category_peaks"].items()}
    return found


def _ops(a: Run, b: Run, pair: tuple[int, int]) -> tuple[pd.DataFrame, dict[str, Any], list[str]]:
    """Rows of ops, the common speed of the segments, and what has no counterpart."""
    speed = {"rank": pair[0], "rank_b": pair[1], "factor": 1.0, "low": 1.0, "high": 1.0}
    frames, missing = [], []
    for what in ("segment", "transfer", "wait"):
        (left, ours), (right, theirs) = (
            _times(run, rank, what) for run, rank in zip((a, b), pair, strict=True)
        )
        both = left.reset_index().merge(right.reset_index(), on=list(left.columns))
        alone = len(left) + len(right) - 2 * len(both)
        if alone:
            missing.append(
                f"rank {pair[0]}: {alone} {what}s of one run have no counterpart in the other"
            )
        if both.empty:
            continue
        at_a, at_b = both["index_x"].to_numpy(), both["index_y"].to_numpy()
        d = deviations(
            theirs[at_b], Reference.of_samples(list(ours[at_a])), has_speed=what == "segment"
        )
        if d.has_speed:
            speed |= {"factor": d.speed(), "low": d.speed(0.1), "high": d.speed(0.9)}
        mine, other = np.median(ours[at_a], axis=1), np.median(theirs[at_b], axis=1)
        low, high = d.interval(LEVEL)
        frames.append(
            pd.DataFrame(
                {
                    "rank": pair[0],
                    "rank_b": pair[1],
                    "what": what,
                    "lane": both["lane"],
                    "place": both["place"],
                    "a_ns": mine,
                    "b_ns": other,
                    "difference_ns": other - mine,
                    "ratio": np.exp(d.log_ratio),
                    "low": low,
                    "high": high,
                    "p": d.p,
                    "is_unusual": d.is_unusual,
                }
            )
        )
    return pd.concat(frames, ignore_index=True), speed, missing


def _times(run: Run, rank: int, what: str) -> tuple[pd.DataFrame, np.ndarray]:
    """Where ops are (lane, place, the how-manieth there), and [ops, iterations] in ns."""
    if what == "segment":
        rows, ns = run.segment_times(rank)
        places = run.places(rank)
        rows = rows.assign(
            place=[
                places[str(lane), int(position)]
                for lane, position in zip(rows["lane"], rows["position"], strict=True)
            ]
        )
    else:
        rows, ns = run.call_times(rank, "transfer_ns" if what == "transfer" else "waited_ns")
        known = (ns >= 0).all(axis=1)
        rows, ns = rows[known], ns[known]
        # Equal calls have equal keys; the ordinal on the lane tells those apart.
        rows = rows.assign(place=rows["key"] + " (" + rows["ordinal"].astype(str) + ")")
    rows = rows.reset_index(drop=True)
    number = rows.groupby(["lane", "place"]).cumcount()
    return rows[["lane", "place"]].assign(number=number), ns


def _judged(ops: pd.DataFrame) -> pd.DataFrame:
    """Adds differs, with the rate of false ones held over all ops together; largest first."""
    differs = discoveries(ops["p"].to_numpy(), _RATE) & ops["is_unusual"].to_numpy()
    order = ops["difference_ns"].abs().sort_values(ascending=False, kind="stable").index
    return ops.assign(differs=differs).drop(columns="is_unusual").loc[order].reset_index(drop=True)
