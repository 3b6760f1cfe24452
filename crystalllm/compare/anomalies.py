"""What in a run deviates from its baseline, and what that does to the iteration.

How it is decided is in `statistics.py` and docs/compare.md: a common speed is taken out and
reported by itself, every segment and transfer is tested, the rate of false findings is
controlled over all tests of the run together, and what is too small to matter is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from crystalllm import __version__, artifacts, tables
from crystalllm.compare.baseline import Baseline, Peers, Profile
from crystalllm.compare.effects import Computing, ReplayedWorld, Transferring
from crystalllm.compare.findings import DEFAULT_LIMITS, Limits, Trials
from crystalllm.compare.imported import Imported
from crystalllm.compare.runs import Run
from crystalllm.errors import UserError
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.program import Capture
from crystalllm.sandbox import outcome


@dataclass(frozen=True)
class Anomalies:
    """What was found.

    Args:
        frame: Columns of `anomalies`; most important first.
        summary: What was compared, the common speeds, what would have been seen, and the
            findings in short; ready for JSON.
    """

    frame: pd.DataFrame
    summary: dict[str, Any]

    def write(self, out: Path) -> None:
        """Writes anomalies.parquet and anomalies.json into a folder."""
        out.mkdir(parents=True, exist_ok=True)
        names = [c.name for c in tables.ANOMALIES.columns]
        provenance = {k: self.summary[k] for k in ("crystalllm", "baseline", "limits")}
        columns = {name: self.frame[name].tolist() for name in names}
        columns["direct_ns"] = [round(ns) for ns in columns["direct_ns"]]
        tables.ANOMALIES.write(out / "anomalies.parquet", columns, provenance=provenance)
        text = json.dumps(self.summary, indent=2, sort_keys=True) + "\n"
        artifacts.write_atomically(out / "anomalies.json", text.encode())


def find(
    path: Path,
    baseline: DurationTable | Path | None = None,
    *,
    capture: Path | None = None,
    durations: DurationTable | Path | None = None,
    limits: Limits = DEFAULT_LIMITS,
    warm_up: int | None = None,
) -> Anomalies:
    """Compares a sandbox run with a baseline, and its ranks with each other.

    Args:
        path: Folder of the run, or of a job whose emulation it is.
        baseline: A planning profile (table or file), or a folder of imported Kineto traces;
            planning/profile.parquet beside the run by default.
        capture: Folder of the capture; beside the run by default. Without one the world is
            not replayed, and effects on its iteration stay unknown.
        durations: With which the world is replayed; by default the baseline if it is a
            profile, else planning/profile.parquet beside the run.
        limits: What counts as a deviation.
        warm_up: Iterations to leave out; as the run's summary says by default.

    Raises:
        UserError: Something is missing or damaged, or the baseline is of something else.
    """
    run = Run.read(path, warm_up=warm_up)
    beside = run.folder.parent
    against = _baseline(run, baseline, beside)
    notes = [*against.notes, *(f"the run {text}" for text in run.reservations)]
    world = None
    try:
        captured = _captured(run, capture or beside / "capture")
        against.place(captured)
        world = ReplayedWorld(captured, _durations(against, durations, beside))
    except UserError as error:
        notes.append(f"effects on the world's iteration are not known: {error}")
    trials = _trials(run, against, limits)
    rows, effects = _with_effects(run, trials.findings(), world, limits)
    summary = {
        "crystalllm": __version__,
        "run": str(run.folder),
        "status": run.summary.get("status", "ok"),
        "baseline": against.name,
        "limits": vars(limits),
        "notes": notes,
        **trials.summary(),
        **effects,
        "lateness_us": _lateness(run),
        "findings": [_in_short(of_one) for _, of_one in rows.groupby("finding")],
    }
    return Anomalies(rows, summary)


def _baseline(run: Run, given: DurationTable | Path | None, beside: Path) -> Baseline:
    if isinstance(given, DurationTable):
        return Profile(given, "durations given")
    path = given
    if path is None:
        path = beside / "planning" / "profile.parquet"
        if not path.exists():
            raise UserError(
                "There is no baseline",
                where=f"File {path}",
                do="Run planning, or pass --baseline with a profile.parquet or a folder of "
                "imported traces",
            )
    if path.is_dir():
        for profile in (path / "profile.parquet", path / "planning" / "profile.parquet"):
            if profile.exists():
                return _profile(run, profile)
        return Imported(path)
    return _profile(run, path)


def _profile(run: Run, path: Path) -> Profile:
    of_run = run.provenance.get("fingerprint")
    of_profile = tables.DURATIONS.provenance(path).get("fingerprint")
    if of_run and of_profile and of_run != of_profile:
        raise UserError(
            "The profile is of another structure than the run",
            where=f"File {path}: fingerprint {of_profile}, the run's is {of_run}",
            do="Plan again with the capture that was emulated, or pass its profile",
        )
    return Profile.read(path)


def _captured(run: Run, folder: Path) -> Capture:
    found = Capture.read(folder)
    outside = [rank for rank in run.ranks if rank not in found.ranks.index]
    if outside:
        raise UserError(
            f"The capture has no rank {_some(outside)}",
            where=f"Folder {folder}",
            do="Pass the capture that was emulated",
        )
    return found


def _durations(
    baseline: Baseline, given: DurationTable | Path | None, beside: Path
) -> DurationTable:
    """With which the world is replayed."""
    if given is None and isinstance(baseline, Profile):
        return baseline.replayed
    if isinstance(given, DurationTable):
        return given
    return DurationTable.load(given or beside / "planning" / "profile.parquet")


def _trials(run: Run, baseline: Baseline, limits: Limits) -> Trials:
    trials = Trials(run, limits)
    for rank in run.ranks:
        segments, transfers = baseline.segments(run, rank), baseline.transfers(run, rank)
        trials.add(rank, "baseline", segments, transfers)
    if not trials.num_items:
        raise UserError(
            "The baseline knows nothing of what this run computed",
            where=f"{baseline.name}, ranks {_some(run.ranks)}: none of its segments is there",
            do="Pass the profile that was planned for this capture, or plan again",
        )
    peers = Peers(run)
    for rank in run.ranks:
        if peers.has(run, rank):
            trials.add(rank, "peers", peers.segments(run, rank))
    return trials


def _with_effects(
    run: Run, rows: pd.DataFrame, world: ReplayedWorld | None, limits: Limits
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Adds has_effect and effect_ns; findings by their effect. And the iteration with all."""
    rows = rows.assign(has_effect=False, effect_ns=0, absorbed_ns=0)
    if world is None:
        return rows, {}
    changes: dict[int, list[Computing | Transferring]] = {}
    for finding, of_one in rows.groupby("finding"):
        # All members of a group see the same transfer.
        parts = of_one.head(1) if of_one["what"].iloc[0] == "transfer" else of_one
        changes[int(finding)] = [_change(run, row) for row in parts.itertuples()]
    for finding in sorted(changes)[: limits.num_effects]:
        if not all(world.has(change) for change in changes[finding]):
            continue
        here = rows["finding"] == finding
        effect = world.iteration_ns(changes[finding]) - world.usual_ns
        # Of the rank with the largest part; both at the speed of the world's durations.
        excess = max((world.excess_ns(change) for change in changes[finding]), key=abs)
        rows.loc[here, "has_effect"] = True
        rows.loc[here, ["effect_ns", "absorbed_ns"]] = round(effect), round(excess - effect)
    everything = [c for of_one in changes.values() for c in of_one if world.has(c)]
    summary = {
        "replayed_iteration_ns": world.usual_ns,
        "replayed_iteration_with_findings_ns": world.iteration_ns(everything),
    }
    if rows.empty:
        return rows, summary
    # The largest effects first; then what was not replayed, by what it costs its rank.
    rows["effect_size"] = rows["effect_ns"].abs()
    order = ["has_effect", "effect_size", "cost", "finding", "rank"]
    rows = rows.sort_values(order, ascending=[False, False, False, True, True])
    return rows.assign(finding=pd.factorize(rows["finding"])[0]).reset_index(drop=True), summary


def _change(run: Run, row: Any) -> Computing | Transferring:
    if row.what == "transfer":
        calls = run.calls(row.rank)
        same = (calls["key"] == row.key) & (calls["group_identity"] == row.group_identity)
        return Transferring(row.rank, int(calls.loc[same, "captured_call"].iloc[0]), row.ratio)
    return Computing(row.rank, row.lane, row.positions, row.ratio)


def _in_short(of_one: pd.DataFrame) -> dict[str, Any]:
    """A finding for JSON; of the rank that it costs most."""
    first = of_one.loc[of_one["direct_ns"].abs().idxmax()]
    known = bool(first["has_effect"])
    return {
        "what": first["what"],
        "ranks": sorted(int(r) for r in of_one["rank"]),
        "against": first["against"],
        "role": int(first["role"]),
        "lane": first["lane"],
        "positions": [int(p) for p in first["positions"]],
        "key": first["key"],
        "group_identity": first["group_identity"],
        "place": first["place"],
        "ratio": float(first["ratio"]),
        "ratio_interval": [float(first["ratio_low"]), float(first["ratio_high"])],
        "peers_ratio": float(first["peers_ratio"]) or None,
        "p": float(first["p"]),
        "direct_ns": round(first["direct_ns"]),
        "effect_ns": int(first["effect_ns"]) if known else None,
        "absorbed_ns": int(first["absorbed_ns"]) if known else None,
    }


def _lateness(run: Run) -> dict[str, float]:
    """Of releases to the program; timed transfers are replayed, so that only this can deviate."""
    late = outcome.lateness(run.communication) / 1000
    if late.empty:
        return {}
    found = late.quantile([0.5, 0.99, 1.0])
    return dict(zip(("p50", "p99", "max"), map(float, found), strict=True))


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
