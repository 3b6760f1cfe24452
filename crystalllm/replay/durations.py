"""Duration tables: how long segments of computation and transfers take.

A segment is the computation between two events of a lane, named by role, lane,
section and position; a transfer is named by the key of its call record. Planning
measures both; from a capture alone come the segments as they took on the
capturing machine, and transfers from whatever the caller knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    """

    ns: int
    sigma: float = 0.0
    count: int = 0
    source: str = "given"


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
        rows = [
            {
                "kind": "segment",
                "role": r,
                "lane": lane,
                "section": s,
                "position": p,
                "key": "",
                "d": d,
            }
            for (r, lane, s, p), d in sorted(self.segments.items())
        ] + [
            {
                "kind": "transfer",
                "role": -1,
                "lane": "",
                "section": "",
                "position": -1,
                "key": k,
                "d": d,
            }
            for k, d in sorted(self.transfers.items())
        ]
        columns = {
            name: [row[name] for row in rows]
            for name in ("kind", "role", "lane", "section", "position", "key")
        }
        columns["median_ns"] = [row["d"].ns for row in rows]
        columns["sigma"] = [row["d"].sigma for row in rows]
        columns["count"] = [row["d"].count for row in rows]
        columns["source"] = [row["d"].source for row in rows]
        tables.DURATIONS.write(path, columns, provenance=provenance)

    @classmethod
    def load(cls, path: Path) -> DurationTable:
        table, _ = tables.DURATIONS.read(path)
        found = cls()
        for row in table.to_pylist():
            d = Duration(row["median_ns"], row["sigma"], row["count"], row["source"])
            if row["kind"] == "segment":
                found.segments[row["role"], row["lane"], row["section"], row["position"]] = d
            else:
                found.transfers[row["key"]] = d
        return found


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
