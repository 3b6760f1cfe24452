"""Prints what `anomalies` and `compare` found: tables on a terminal, complete lines in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from crystalllm.compare.anomalies import Anomalies
from crystalllm.compare.compare import LEVEL, Comparison
from crystalllm.inspect import ranges
from crystalllm.show import Page

# Where only larger factors would have been seen, nothing can be told.
_TOO_NOISY = 10


def show_anomalies(found: Anomalies, *, limit: int | None = None) -> None:
    """Prints findings, most important first, and what was compared.

    Args:
        found: What to print.
        limit: Rows of each table, 0 for all; 50 by default on a terminal.
    """
    page, summary = Page(limit), found.summary
    page.line(
        f"run       {summary['run']}: {summary['status']}, ranks {_ranks(summary['ranks'])}, "
        f"{summary['iterations']} iterations from {summary['first_iteration']} on"
    )
    page.line(f"baseline  {summary['baseline']}")
    page.line(
        f"compared  {summary['num_segments']} segments and {summary['num_transfers']} transfers "
        f"among real ranks, {summary['num_tests']} tests with those against peers; "
        f"{summary['num_not_in_baseline']} are not in the baseline"
    )
    late = summary["lateness_us"]
    if late:
        page.line(
            f"replayed  {summary['num_replayed_calls']} calls per iteration, which cannot deviate, "
            f"only be late: {late['p50']:.1f} us at the median, {late['p99']:.1f} us at p99"
        )
    for note in summary["notes"]:
        page.line(f"note      {note}")
    page.title("Common speed (factor on all durations of a rank, taken out below)")
    page.table(_speeds(summary["speeds"]))
    page.title("Anomalies")
    rows = pd.DataFrame([_finding(i, f) for i, f in enumerate(summary["findings"])])
    if "over peers" in rows and not rows["over peers"].any():
        rows = rows.drop(columns="over peers")
    page.table(rows)
    if summary.get("replayed_iteration_ns"):
        usual, changed = (
            summary[name] / 1e6
            for name in ("replayed_iteration_ns", "replayed_iteration_with_findings_ns")
        )
        page.line(
            f"iteration of the world, replayed with the baseline: {usual:.3f} ms, with all "
            f"findings {changed:.3f} ms"
        )
    page.line(_seen(summary))


def _finding(number: int, f: Mapping[str, Any]) -> dict[str, Any]:
    where = f["place"] or f["key"] or "everything that it computes"
    low, high = f["ratio_interval"]
    known = f["effect_ns"] is not None
    return {
        "#": str(number + 1),
        "what": f["what"],
        "ranks": _ranks(f["ranks"]),
        "where": f"{f['lane']} {where}".strip(),
        "against": f["against"],
        "factor": f"{f['ratio']:.3f}",
        "interval": f"{low:.3f} .. {high:.3f}",
        "over peers": f"{f['peers_ratio']:.3f}" if f["peers_ratio"] else "",
        "direct ms": f"{f['direct_ns'] / 1e6:+.3f}",
        "iteration ms": f"{f['effect_ns'] / 1e6:+.3f}" if known else "unknown",
        "absorbed ms": f"{f['absorbed_ns'] / 1e6:.3f}" if known else "",
    }


def _speeds(speeds: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "rank": [s["rank"] for s in speeds],
            "threads": [s["lane"].rstrip(":") for s in speeds],
            "against": [s["against"] for s in speeds],
            "factor": [f"{s['factor']:.3f}" for s in speeds],
            "over iterations": [f"{s['low']:.3f} .. {s['high']:.3f}" for s in speeds],
            "segments vary by": [f"{s['between']:.1%}" for s in speeds],
        }
    )


def _seen(summary: Mapping[str, Any]) -> str:
    half, most = summary["detectable_half"], summary["detectable_most"]
    if half > _TOO_NOISY:
        return (
            "The run is too noisy to tell: in half of the compared time only a slowdown by a "
            f"factor above {_TOO_NOISY} would have been found"
        )
    rest = f"by {most:.2f}" if most <= _TOO_NOISY else f"by more than {_TOO_NOISY}"
    return (
        f"Would have been found in nine of ten cases: one segment slower by a factor of {half:.2f} "
        f"in half of the compared time, {rest} in nine tenths of it"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ranges(np.array(sorted(ranks)))


def show_comparison(found: Comparison, *, limit: int | None = None) -> None:
    """Prints configuration first, then iteration, breakdown, memory, and the ops that differ.

    Args:
        found: What to print.
        limit: Rows of each table, 0 for all; 50 by default on a terminal.
    """
    page = Page(limit)
    page.line(f"a  {found.a}")
    page.line(f"b  {found.b}")
    page.title("Configuration and conditions that differ")
    page.table(found.configuration)
    rows = found.iterations
    least = int(rows[["n_a", "n_b"]].min(axis=None))
    page.title(f"Iteration: medians of at least {least} iterations, intervals at {LEVEL:.0%}")
    page.table(_differences(rows[rows["part"] == "iteration"]))
    page.title("Where its time goes")
    page.table(_differences(rows[rows["part"] != "iteration"]))
    page.title("Memory (peaks in bytes, which do not vary)")
    page.table(found.memory)
    speeds = found.speeds
    page.title("Common speed of the segments, b over a; taken out of their factors below")
    page.table(
        pd.DataFrame(
            {
                "rank": _pair(speeds),
                "factor": [f"{factor:.3f}" for factor in speeds["factor"]],
                "over iterations": _interval(speeds["low"], speeds["high"]),
            }
        )
    )
    ops = found.ops[found.ops["differs"]]
    page.title(f"Ops that differ: {len(ops)} of {len(found.ops)}")
    page.table(
        pd.DataFrame(
            {
                "rank": _pair(ops),
                "what": ops["what"],
                "where": [f"{op.lane} {op.place}" for op in ops.itertuples()],
                "a ms": _ms(ops["a_ns"]),
                "b ms": _ms(ops["b_ns"]),
                "difference ms": _ms(ops["difference_ns"], sign="+"),
                "factor": [f"{ratio:.3f}" for ratio in ops["ratio"]],
                "interval": _interval(ops["low"], ops["high"]),
            }
        )
    )
    for note in found.notes:
        page.line(f"note: {note}")


def _differences(rows: pd.DataFrame) -> pd.DataFrame:
    limits = (_ms(rows[name], sign="+") for name in ("low_ns", "high_ns"))
    shares = rows["difference_ns"] / rows["a_ns"].where(rows["a_ns"] > 0)
    return pd.DataFrame(
        {
            "rank": _pair(rows),
            "part": rows["part"],
            "a ms": _ms(rows["a_ns"]),
            "b ms": _ms(rows["b_ns"]),
            "difference ms": _ms(rows["difference_ns"], sign="+"),
            "share": ["" if np.isnan(share) else f"{share:+.1%}" for share in shares],
            "interval": [f"{low} .. {high}" for low, high in zip(*limits, strict=True)],
            "differs": ["yes" if differs else "no" for differs in rows["differs"]],
        }
    )


def _pair(rows: pd.DataFrame) -> list[str]:
    """Ranks as text; both where they are not the same one."""
    return [
        str(a) if a == b else f"{a} / {b}"
        for a, b in zip(rows["rank"], rows["rank_b"], strict=True)
    ]


def _ms(ns: pd.Series, *, sign: str = "") -> list[str]:
    return [f"{value / 1e6:{sign}.3f}" for value in ns]


def _interval(low: pd.Series, high: pd.Series) -> list[str]:
    return [f"{begin:.3f} .. {end:.3f}" for begin, end in zip(low, high, strict=True)]
