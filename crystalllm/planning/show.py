"""What planning says to people: before it starts, and when it has ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_SHOWN_WARNINGS = 10


def show_explanation(explained: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Prints what `planning.explain` says, as text and tables or as JSON."""
    if as_json:
        print(json.dumps(explained, indent=2))
        return
    console = Console(highlight=False)
    for part in explanation_parts(explained):
        console.print(part, soft_wrap=isinstance(part, Text))


def show_summary(found: Mapping[str, Any], out: Path) -> None:
    """Prints what came of a planning."""
    moves = ", ".join(
        f"pass {p['pass']}: {p['iteration_ns'] / 1e6:.3f} ms"
        + (f" ({p['moved']:+.1%})" if p["pass"] else " (first estimates)")
        for p in found["passes"]
    )
    rests = ", ".join(
        f"{what} {source} {share:.1%}"
        for what, shares in found["sources"].items()
        for source, share in shares.items()
    )
    settled = "settled" if found["is_settled"] else "not settled"
    print(f"an iteration takes {found['iteration_ns'] / 1e6:.3f} ms, {settled}: {moves}")
    print(f"it rests on {rests}")
    for line in found["warnings"][:_SHOWN_WARNINGS]:
        print(f"warning: {line}")
    if (more := len(found["warnings"]) - _SHOWN_WARNINGS) > 0:
        print(f"{more} more warnings in {out / 'planning.json'}")
    print(f"results in {out}")


def explanation_parts(explained: Mapping[str, Any]) -> list[Table | Text]:
    """The explanation for people, in the order in which it is read."""
    devices, expected = explained["devices"], explained["expected_s"]
    cores = ", ".join(map(str, devices["sandbox"]))
    engine = (
        f"core {devices['engine']} for the replay engine"
        if devices["engine"] is not None
        else "the replay engine shares it"
    )
    head = Text(
        f"{explained['num_ranks']} ranks of {explained['num_roles']} roles; "
        f"{len(explained['slices'])} slices in a pass, each of "
        f"{explained['options']['warm_up']} + {explained['options']['iterations']} iterations\n"
        f"devices: {devices['model']}, cores {cores} for sandbox ranks, {engine}\n"
        f"expected: {_duration(expected['pass'])} for a pass, {_duration(expected['usual'])} as a "
        f"rule, {_duration(expected['at_most'])} at most. This is an estimate:\n"
        + "\n".join(f"  {line}" for line in explained["assumptions"])
    )
    runs = _table(
        "What runs",
        ["slice", "ranks", "roles", "cores", "expected"],
        (
            (
                s["slice"],
                _list(s["ranks"]),
                _list(s["roles"]),
                _list(s["cores"]),
                _duration(s["expected_s"]),
            )
            for s in explained["slices"]
        ),
    )
    wishes = _table(
        "What wishes need (--sandbox)",
        ["wish", "cores for sandbox ranks", "here", "possible", "slices"],
        (
            (
                w["wish"],
                w["num_devices"],
                w["devices_here"],
                "yes" if w["is_possible"] else "no",
                w["slices"] if w["is_possible"] else "–",
            )
            for w in explained["wishes"]
        ),
    )
    transfers = _table(
        "Where transfer times come from",
        [
            "source",
            "kinds of calls",
            "calls per iteration",
            "share of the iteration",
            "assumptions",
        ],
        (
            (
                t["source"],
                t["kinds_of_calls"],
                f"{t['calls']:,}",
                f"{t['share']:.1%}",
                "; ".join(dict.fromkeys(a.partition(",")[0] for a in t["assumptions"])) or "–",
            )
            for t in explained["transfers"]
        ),
    )
    return [head, runs, wishes, transfers]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _list(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f", … ({len(numbers)})" if len(numbers) > 8 else "")


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return table
