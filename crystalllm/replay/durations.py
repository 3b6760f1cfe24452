"""Duration tables: how long segments of computation and transfers take.

A segment is the computation between two events of a lane, named by role, lane,
section and position; a transfer is named by the key of its call record. Planning
measures both; from a capture alone come the segments as they took on the
capturing machine, and transfers from whatever the caller knows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from crystalllm import tables
from crystalllm.errors import UserError

# (role, lane, section, position among the segments of the section)
Segment = tuple[int, str, str, int]
SECTIONS = ("prologue", "body", "epilogue")


@dataclass(frozen=True)
class Duration:
    """One duration.

    Args:
        ns: Median, in nanoseconds.
        sigma: Of a lognormal around it; 0 where it is constant or unknown.
        count: Measurements that it rests on.
        source: measured, captured, table, model or given.
        choices: (ns, how often) of each duration that occurs, where it depends on
            split sizes; `ns` is their median.
    """

    ns: int
    sigma: float = 0.0
    count: int = 0
    source: str = "given"
    choices: tuple[tuple[int, int], ...] = ()


@dataclass
class DurationTable:
    """Durations of segments and of transfers."""

    segments: dict[Segment, Duration] = field(default_factory=dict)
    transfers: dict[str, Duration] = field(default_factory=dict)

    def segment(self, at: Segment) -> Duration:
        """Raises UserError where the table has none."""
        try:
            return self.segments[at]
        except KeyError:
            role, lane, section, position = at
            raise UserError(
                "A segment of computation has no duration",
                where=f"Role {role}, lane {lane}, {section}, segment {position}",
                do="Measure it (planning), or replay with a table of this capture",
            ) from None

    def transfer(self, key: str) -> Duration:
        """Raises UserError where the table has none."""
        try:
            return self.transfers[key]
        except KeyError:
            raise UserError(
                "A call has no transfer time",
                where=f"Call {key}",
                do="Add it to the duration table",
            ) from None

    def save(self, path: Path, *, provenance: Mapping[str, Any]) -> None:
        """Writes the table; a transfer with choices takes a row for each of them."""
        rows: list[tuple[Any, ...]] = []
        for (role, lane, section, position), d in sorted(self.segments.items()):
            rows.append(
                ("segment", role, lane, section, position, "", d.ns, d.sigma, d.count, d.source)
            )
        for key, d in sorted(self.transfers.items()):
            for ns, count in d.choices or ((d.ns, d.count),):
                rows.append(("transfer", -1, "", "", -1, key, ns, d.sigma, count, d.source))
        columns = {
            column.name: [row[i] for row in rows]
            for i, column in enumerate(tables.DURATIONS.columns)
        }
        tables.DURATIONS.write(path, columns, provenance=provenance)

    @classmethod
    def load(cls, path: Path) -> DurationTable:
        table, _ = tables.DURATIONS.read(path)
        found = cls()
        of_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in table.to_pylist():
            if row["kind"] == "transfer":
                of_key[row["key"]].append(row)
                continue
            d = Duration(row["median_ns"], row["sigma"], row["count"], row["source"])
            found.segments[row["role"], row["lane"], row["section"], row["position"]] = d
        for key, rows in of_key.items():
            first = rows[0]
            if len(rows) == 1:
                found.transfers[key] = Duration(
                    first["median_ns"], first["sigma"], first["count"], first["source"]
                )
            else:
                choices = [(row["median_ns"], row["count"]) for row in rows]
                found.transfers[key] = of_choices(choices, source=first["source"])
        return found


def of_choices(choices: Iterable[tuple[int, int]], *, source: str) -> Duration:
    """A duration that is one of several (ns, how often)."""
    ordered = sorted(choices)
    half = sum(count for _, count in ordered) / 2
    seen = 0
    for ns, count in ordered:  # noqa: B007 - the weighted median is where the loop stops
        seen += count
        if seen >= half:
            break
    total = sum(count for _, count in ordered)
    return Duration(ns, count=total, source=source, choices=tuple(ordered))


def captured_segments(
    events: pd.DataFrame,
    role_of: Mapping[int, int],
    sections: Callable[[int], str | None],
    period: int,
) -> dict[Segment, Duration]:
    """Medians over the captured ranks of a role, and over the repeats of the body.

    Args:
        events: `events` joined with `event_times`, in order.
        role_of: By rank.
        sections: Section of a mark, None for what is left out.
        period: Marks of one body.

    They are those of a machine that computed several ranks at once.
    """
    comp = events[events["kind"] == "COMP"].copy()
    comp["section"] = comp["mark"].map({m: sections(m) for m in comp["mark"].unique()})
    comp = comp[comp["section"].notna()]
    comp["role"] = comp["rank"].map(role_of)
    # Which repeat of the body an event lies in: positions count from its begin.
    first_body = comp.loc[comp["section"] == "body", "mark"].min()
    comp["repeat"] = 0
    in_body = comp["section"] == "body"
    comp.loc[in_body, "repeat"] = (comp.loc[in_body, "mark"] - first_body) // max(period, 1)
    place = ["rank", "lane", "section", "repeat"]
    comp["position"] = comp.groupby(place, observed=True, sort=False).cumcount()
    grouped = comp.groupby(["role", "lane", "section", "position"], observed=True)["duration_ns"]
    stats = grouped.agg(["median", "count", "std", "mean"])
    found = {}
    for (role, lane, section, position), row in stats.iterrows():
        spread = row["std"] / row["mean"] if row["count"] > 2 and row["mean"] > 0 else 0.0
        sigma = math.sqrt(math.log1p(spread**2))
        found[int(role), str(lane), str(section), int(position)] = Duration(
            round(row["median"]), sigma, int(row["count"]), "captured"
        )
    return found
