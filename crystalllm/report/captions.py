"""What a report says under its pictures: this run's numbers, as reStructuredText."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from crystalllm.report.frames import WORDS, Case
from crystalllm.sandbox.outcome import PARTS
from crystalllm.sandbox.show import nearest_case, shares

_MIB = 1 << 20


def breakdown(case: Case, frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    whole = first["iteration_ms"]
    parts = ", ".join(f"{first[p] / whole:.1%} {WORDS[p]}" for p in PARTS)
    trust = case.summary["trust"]
    text = (
        f"Rank {first['rank']} took {whole:.1f} ms for an iteration (median of "
        f"{case.of_rank(int(first['rank']))['num_iterations']}; deciles {first['low_ms']:.1f} and "
        f"{first['high_ms']:.1f}): {parts}. The bars below are ranks that were replayed, one of "
        f"each of {len(frame) - int(frame['is_real'].sum())} roles."
    )
    return text + ("" if trust["valid"] else " Not valid: " + "; ".join(trust["why_not"]))


def pipeline(frame: pd.DataFrame, bubble: Mapping[str, float]) -> str:
    if frame.empty:
        return "The job has no pipeline, or its timeline shows none."
    text = (
        f"One rank of each of {frame['stage'].nunique()} stages over {frame['end_ms'].max():.1f} "
        f"ms, the last whole iteration that was measured. Waiting for messages is "
        f"{bubble['measured']:.1%} of the iteration of the rank of interest"
    )
    if "closed_form" in bubble:
        text += (
            f"; stages that all take equally long would idle for {bubble['closed_form']:.1%}, with "
            f"{bubble['stages']:.0f} stages, {bubble['microbatches']:.0f} microbatches and "
            f"{bubble['virtual']:.0f} virtual stage(s) each"
        )
    return text + "."


def memory(case: Case, frame: pd.DataFrame) -> str:
    if frame.empty:
        return "No account of memory was kept."
    rank, capacity_bytes = case.ranks[0], case.capacity_bytes
    peak = case.of_rank(rank)["memory"]["peak"]
    held = sorted(peak["by_category"].items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {size / _MIB:.1f} MiB" for name, size in held if size)
    text = (
        f"Tensors of rank {rank} take {peak['bytes'] / _MIB:.1f} MiB at the most, in the "
        f"{peak['phase']} phase of iteration {peak['iteration']}: {parts}."
    )
    if capacity_bytes is not None:
        text += (
            f" The device has {capacity_bytes / _MIB:,.0f} MiB; the peak is "
            f"{peak['bytes'] / capacity_bytes:.1%} of it."
        )
    return text


def bandwidth(case: Case, frame: pd.DataFrame) -> str:
    if frame.empty:
        return "No transfer took any time."
    sources = case.of_rank(case.ranks[0]).get("shares_by_source", {})
    rests = ", ".join(name for name in sources if name.startswith("transfers")) or "no transfers"
    fastest = frame.loc[frame["bus_gb_s"].idxmax()]
    return (
        f"{frame['n'].sum():.0f} calls of an iteration of rank {case.ranks[0]} in "
        f"{len(frame)} kinds and sizes; larger marks are made more often. The fastest is "
        f"{fastest['kind']} of {fastest['bytes']:,.0f} bytes in {fastest['transfer_us']:.1f} us, "
        f"{fastest['bus_gb_s']:.1f} GB/s. Times rest on: {rests}."
    )


def roles(frame: pd.DataFrame) -> str:
    ranks, captured = int(frame["ranks"].sum()), int(frame["captured"].sum())
    return (
        f"{ranks} ranks are of {len(frame)} roles; {captured} ran to be captured, "
        f"{int(frame['checked'].sum())} of them to check what had been inferred."
    )


def anomalies(summary: Mapping[str, Any]) -> str:
    findings = len(summary["findings"])
    notes = "; ".join(summary.get("notes", []))
    text = f"{findings or 'No'} deviation(s) from {summary['baseline']}."
    return text + (f" {notes}." if notes else "")


def trust(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The trust box: what, and what of it."""
    box = summary["trust"]
    rows = [("valid", "yes" if box["valid"] else "no: " + "; ".join(box["why_not"]))]
    for rank, of_rank in box.get("shares_by_source", {}).items():
        rows.append((f"rank {rank} rests on", shares(of_rank) or "nothing that was timed"))
    for rank, late in box.get("lateness_ns", {}).items():
        if late:
            text = f"{late['p50'] / 1e3:.0f} us median, {late['p99'] / 1e3:.0f} us p99"
            rows.append((f"rank {rank} was released late by", text))
    gap = box.get("speed", {}).get("gap")
    if gap is not None:
        rows.append(("speed against planning", f"{gap:+.1%}"))
    near = box.get("nearest_fidelity_case")
    if near:
        rows.append(("nearest measured case", nearest_case(near)))
    rows += [(name, str(value)) for name, value in box.get("policies", {}).items()]
    return rows
