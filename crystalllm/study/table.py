"""What came of all cases, side by side; which of them are too close to tell apart."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from crystalllm import artifacts, fidelity
from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.planning import reference
from crystalllm.planning.results import PLANNING

# Outcomes that say something of the job.
RESULTS = ("ok", "oom")
_CPU = (
    "Computation was timed on CPU cores. It says how these layouts differ here, not how they rank "
    "on GPUs."
)
_COLUMNS = {
    "status": "",
    "iteration_ms": "iteration ms",
    "spread_ms": "10 % .. 90 %",
    "tokens_per_s": "tokens/s/rank",
    "mfu": "MFU",
    "bubble": "bubble",
    "exposed": "exposed",
    "peak_mib": "peak MiB",
    "limit": "limited by",
    "place": "place",
    "note": "",
}
_NUMBERS = ("low_ms", "high_ms", "flops_per_s")
# Parts of an iteration, as what it is limited by.
_LIMITS = {
    "compute": "computation",
    "exposed": "transfers",
    "wait": "the slowest of its groups",
    "bubble": "the pipeline",
    "host": "calls",
}


@dataclass(frozen=True)
class Row:
    """One case and where its summary lies.

    Args:
        folder, run, sweep, values: As in `Case`.
        summary: File; its planning lies beside its folder.
        job: As in `Case`.
    """

    folder: str
    run: str
    sweep: str
    values: dict[str, Any]
    summary: Path
    job: Job


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """One row per case; of a sweep in the order of its iteration times.

    Returns:
        Columns case, sweep, world_size and sizes of the parallel axes, one for each axis of the
        sweep, status, iteration_ms (median of the slowest rank of interest), low_ms and high_ms
        (deciles), bubble and exposed (shares of the iteration), tokens_per_s and flops_per_s (of
        one rank, where the job says what an iteration gets through), mfu
        (`model_flops_utilization`), peak_mib (of the fullest), limit (the largest part of the
        iteration), place (in its sweep; those closer than emulation is true share one), valid,
        note and results (the folder).
    """
    if not rows:
        return pd.DataFrame(columns=["case", "sweep", "limit", *_NUMBERS, *_COLUMNS, "results"])
    frame = pd.DataFrame([_of_case(row) for row in rows])
    frame["place"] = ""
    parts = []
    for sweep, of_sweep in frame.groupby("sweep", sort=False):
        ordered = of_sweep.sort_values("iteration_ms", na_position="last", kind="stable")
        if sweep:
            ordered["place"] = _places(ordered["iteration_ms"].tolist(), error_band())
        parts.append(ordered)
    return pd.concat(parts, ignore_index=True) if parts else frame


def error_band(device: str = "cpu") -> float:
    """By which share emulation was off at most where it was measured; see docs/accuracy.md."""
    cases = fidelity.measured(device).get("cases", [])
    return max((abs(end - 1) for case in cases for end in case["ratio_interval"]), default=0.0)


def write(
    frame: pd.DataFrame,
    infeasible: Sequence[tuple[str, dict[str, Any], str]],
    *,
    tsv: Path,
    text: Path,
    infeasible_tsv: Path,
) -> None:
    """Writes the table for programs and for people, and the points that cannot be."""
    artifacts.write_atomically(tsv, frame.to_csv(sep="\t", index=False).encode())
    artifacts.write_atomically(text, (as_text(frame) + "\n").encode())
    left_out = pd.DataFrame(
        [
            {"sweep": sweep, "point": json.dumps(values), "reason": reason}
            for sweep, values, reason in infeasible
        ],
        columns=["sweep", "point", "reason"],
    )
    artifacts.write_atomically(infeasible_tsv, left_out.to_csv(sep="\t", index=False).encode())


def as_text(frame: pd.DataFrame) -> str:
    """For a terminal."""
    lines = []
    for sweep, rows in frame.groupby("sweep", sort=False):
        if sweep:
            band = f"each may be off by {error_band():.0%}, so that they cannot be told apart"
            lines.append(f"Sweep {sweep}. {_CPU} Equal places: {band}.")
        shown = rows.assign(
            spread_ms=[
                "" if pd.isna(low) else f"{low:.1f} .. {high:.1f}"
                for low, high in zip(rows["low_ms"], rows["high_ms"], strict=True)
            ],
            bubble=[share(v) for v in rows["bubble"]],
            tokens_per_s=[_number(v) for v in rows["tokens_per_s"]],
            mfu=[share(v) for v in rows["mfu"]],
            exposed=[share(v) for v in rows["exposed"]],
            iteration_ms=[_number(v) for v in rows["iteration_ms"]],
            peak_mib=[_number(v) for v in rows["peak_mib"]],
        )
        names = [n for n in _COLUMNS if (shown[n].astype(str) != "").any()]
        shown = shown.set_index("case")[names].rename(columns=lambda n: _COLUMNS[n] or n)
        shown.index.name = None
        lines.append(shown.to_string())
        lines.append("")
    lines += [f"{r.case}: {r.results}" for r in frame.itertuples()]
    return "\n".join(lines)


def check(frame: pd.DataFrame) -> None:
    """Refuses runs that ended in a way that is no result.

    Raises:
        UserError: Names them.
    """
    failed = frame[~frame["status"].isin(RESULTS)]
    if len(failed):
        raise UserError(
            f"{len(failed)} of {len(frame)} runs have no result",
            where="; ".join(f"{r.case}: {r.status}, {r.note}" for r in failed.itertuples()),
            do="Read rank-*/log.txt beside summary.json, mend the cause, and run again",
        )


def _of_case(row: Row) -> dict[str, Any]:
    summary = artifacts.read_json(row.summary)
    ranks = summary.get("ranks_of_interest", {}).values()
    timed = [r for r in ranks if "iteration_ns" in r]
    slowest = max(timed, key=lambda r: r["iteration_ns"], default=None)
    peaks = [r["memory"]["peak"]["bytes"] for r in ranks if r.get("memory")]
    name = row.folder if not row.sweep else row.folder.removeprefix(f"{row.sweep}/")
    late = row.run.partition("_")[2]
    sizes = row.job.parallelism.model_dump(exclude={"order"}) if row.job.parallelism else {}
    who = {"case": f"{name} {late}" if late else name, "sweep": row.sweep}
    found: dict[str, Any] = {
        **who,
        "world_size": row.job.world_size,
        **sizes,
        **row.values,
        **who,  # also where parameters have these names
        "status": summary["status"],
        "iteration_ms": None,
        "low_ms": None,
        "high_ms": None,
        "tokens_per_s": None,
        "flops_per_s": None,
        "mfu": None,
        "bubble": None,
        "exposed": None,
        "limit": "memory" if summary["status"] == "oom" else "",
        "peak_mib": max(peaks) / (1 << 20) if peaks else None,
        "valid": summary["trust"]["valid"],
        "note": _note(summary),
        "results": str(row.summary.parent),
    }
    if slowest is not None and summary["status"] == "ok":
        whole = slowest["iteration_ns"]
        found |= {
            "iteration_ms": whole / 1e6,
            "low_ms": slowest["iteration_low_ns"] / 1e6,
            "high_ms": slowest["iteration_high_ns"] / 1e6,
            "bubble": slowest["bubble_ns"] / whole,
            "exposed": slowest["exposed_ns"] / whole,
            "limit": _LIMITS[max(_LIMITS, key=lambda part: slowest[f"{part}_ns"])],
        }
        done = {k: v / whole * 1e9 / row.job.world_size for k, v in row.job.amounts().items()}
        if "tokens" in done:
            found["tokens_per_s"] = done["tokens"]
        if "flops" in done:
            found["flops_per_s"] = done["flops"]
            found["mfu"] = model_flops_utilization(row, done["flops"])
    return found


def model_flops_utilization(row: Row, flops_per_s: float) -> float | None:
    """The model's operations per second of one rank, as a share of what its core can do.

    That is what planning's reference, a product of matrices in fp32, reached on the cores of
    the last pass. It says nothing of GPUs.

    Returns:
        None if planning kept no reference.
    """
    planned = row.summary.parents[1] / "planning" / PLANNING
    if not planned.exists():
        return None
    readings = [
        reading["matmul_ns"]
        for of_slice in artifacts.read_json(planned)["passes"][-1]["slices"]
        for reading in of_slice["calibration"]["before"] + of_slice["calibration"]["after"]
    ]
    if not readings:
        return None
    return flops_per_s * statistics.median(readings) * 1e-9 / reference.FLOPS


def _note(summary: dict[str, Any]) -> str:
    text = summary["reason"] or "; ".join(summary["trust"]["why_not"])
    return " ".join(text.split())[:200]


def _places(times: Sequence[float], band: float) -> list[str]:
    """Ranks; each shares that of the fastest before it that it cannot be told from."""
    found: list[str] = []
    first = place = 0
    for i, ms in enumerate(times):
        if pd.isna(ms):
            found.append("")
            continue
        if i == 0 or ms > times[first] * (1 + band) / max(1e-9, 1 - band):
            first, place = i, i + 1
        found.append(str(place))
    return [f"{p}=" if p and found.count(p) > 1 else p for p in found]


def share(value: float) -> str:
    """For people; empty where it is not known."""
    return "" if pd.isna(value) else f"{value:.1%}"


def _number(value: float) -> str:
    return "" if pd.isna(value) else f"{value:,.1f}"
