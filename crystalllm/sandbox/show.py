"""The summary of a run, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from crystalllm.sandbox.outcome import PARTS, SUMMARY

# From here on the speed of ranks that run and of those that are replayed is worth a word.
_FAR = 0.05


def show_summary(summary: Mapping[str, Any], out: Path) -> None:
    """Prints status, iteration times with their parts, memory, and the trust box."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print(f"status: {summary['status']}", markup=False)
    if summary["reason"]:
        console.print(summary["reason"], markup=False)
    for line in summary.get("last_lines", ()):
        console.print(f"  | {line}", markup=False)
    ran = {r: f for r, f in summary.get("ranks_of_interest", {}).items() if "iteration_ns" in f}
    if ran:
        console.print(_iterations(ran))
    trust = summary["trust"]
    console.print("valid" if trust["valid"] else "NOT VALID:", markup=False)
    for why in trust["why_not"]:
        console.print(f"  {why}", markup=False)
    for rank, of_rank in trust.get("shares_by_source", {}).items():
        if of_rank:
            console.print(f"rank {rank}: its iteration rests on: {shares(of_rank)}", markup=False)
    for line in _conditions(trust):
        console.print(line, markup=False)
    for note in summary.get("notes", ()):
        console.print(f"note: {note}", markup=False)
    console.print(f"results in {out} ({SUMMARY})", markup=False)


def _conditions(trust: Mapping[str, Any]) -> Iterator[str]:
    """Speed of the cores, and how true the nearest measured case was."""
    gap = trust.get("speed", {}).get("gap")
    if gap is not None:
        yield f"speed: a reference on these cores took {gap:+.1%} against planning"
    slowness = trust.get("slowness", {})
    others = slowness.get("of_others", 1.0)
    for rank, found in slowness.get("of_ranks", {}).items():
        if found is not None and others is not None and abs(found / others - 1) > _FAR:
            yield (
                f"rank {rank} computed {found:.2f} times as long as the durations say, the others "
                f"were replayed at {others:.2f}: plan again, or pass --follow-speed; keeping "
                "account of memory is part of it (--no-memory)"
            )
    near = trust.get("nearest_fidelity_case")
    if near:
        yield f"nearest measured case: {nearest_case(near)}"


def shares(by_source: Mapping[str, float]) -> str:
    """By what an iteration rests on, its share."""
    return ", ".join(f"{name} {share:.1%}" for name, share in by_source.items())


def nearest_case(near: Mapping[str, Any]) -> str:
    """How true the nearest measured case was."""
    low, high = near["ratio_interval"]
    text = f"{near['case']} on {near['world_size']} ranks, emulated with {near['emulated_with']} "
    text += f"over real {near['ratio']:.3f} ({low:.3f} .. {high:.3f}, n = {near['n']})"
    missing = ", ".join(near["not_covered"])
    return text + (f"; it does not cover {missing}" if missing else "")


def _iterations(ran: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="iterations, median in ms", title_justify="left")
    columns = ("rank", "n", "iteration", "10 % .. 90 %", *PARTS, "late p99 us", "peak MiB")
    for name in columns:
        table.add_column(name, justify="right")
    for rank, found in ran.items():
        late = found.get("lateness_ns")
        memory = found.get("memory")
        table.add_row(
            rank,
            str(found["num_iterations"]),
            _ms(found["iteration_ns"]),
            f"{_ms(found['iteration_low_ns'])} .. {_ms(found['iteration_high_ns'])}",
            *(_ms(found[f"{part}_ns"]) for part in PARTS),
            f"{late['p99'] / 1e3:.0f}" if late else "",
            f"{memory['peak']['bytes'] / (1 << 20):.1f}" if memory else "",
        )
    return table


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.2f}"
