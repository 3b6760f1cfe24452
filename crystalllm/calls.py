"""Recorded calls as tables that a person reads."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from crystalllm import tables
from crystalllm.records import element_size


def by_group_and_kind(calls: pd.DataFrame) -> pd.DataFrame:
    """How often and how much each group communicates.

    Args:
        calls: Rows of the `calls` table.

    Returns:
        One row per group and kind: group, description, size, signature, kind,
        calls, bytes (what this rank puts in, or gets out where it puts nothing
        in).
    """
    rows: dict[tuple[int, str], dict[str, object]] = {}
    totals: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
    for call in calls.itertuples():
        at = (call.group, call.kind)
        rows.setdefault(
            at,
            {
                "group": call.group,
                "description": call.group_desc,
                "size": call.group_size,
                "signature": call.group_signature,
                "kind": call.kind,
            },
        )
        totals[at][0] += 1
        elements = call.in_elements or call.out_elements
        totals[at][1] += elements * element_size(call.dtype)
    return pd.DataFrame(
        [
            {**row, "calls": totals[at][0], "bytes": totals[at][1]}
            for at, row in sorted(rows.items())
        ]
    )


def show(path: Path) -> None:
    """Prints the summary of a `calls` file."""
    table, provenance = tables.CALLS.read(path)
    console = Console()
    summary = by_group_and_kind(table.to_pandas())
    title = (
        f"rank {provenance.get('rank')} of {provenance.get('world_size')}, {table.num_rows} calls"
    )
    if provenance.get("unverified"):
        title += ", unverified: control values of virtual ranks were invented"
    out = Table(title=title)
    for name in ("group", "description", "size", "signature", "kind", "calls", "bytes"):
        numeric = name in ("group", "size", "calls", "bytes")
        out.add_column(name, justify="right" if numeric else "left")
    for row in summary.itertuples(index=False):
        out.add_row(*(f"{v:,}" if isinstance(v, int) else str(v) for v in row))
    console.print(out)
