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
from dataclasses import dataclass, field, replace
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
        low_ns: First decile of the measurements; -1 where it is unknown.
        high_ns: Last decile of the measurements; -1 where it is unknown.
        cpu_ns: Time that a transfer takes from its rank's core after the call, while the
            program computes.
        call_ns: Time that its call takes, until the program goes on.
        parts_ns: Means of equal parts of the measurements, ascending: what is drawn where
            the replay draws. Empty where they are not known.
        assumptions: What it rests on besides, for people.
    """

    ns: int
    sigma: float = 0.0
    count: int = 0
    source: str = "given"
    choices: tuple[tuple[int, int], ...] = ()
    low_ns: int = -1
    high_ns: int = -1
    cpu_ns: int = 0
    call_ns: int = 0
    parts_ns: tuple[int, ...] = ()
    assumptions: str = ""


@dataclass
class DurationTable:
    """Durations of segments and of transfers.

    Args:
        segments: By role, lane, section and position.
        transfers: By key of the call record, or by (key, placement) where it depends
            on how many nodes the group spans ("16x2": 16 ranks on 2 nodes).
    """

    segments: dict[Segment, Duration] = field(default_factory=dict)
    transfers: dict[str | tuple[str, str], Duration] = field(default_factory=dict)

    def slowed(self, factor: float) -> DurationTable:
        """The same, but computation takes `factor` times as long; transfers do not."""
        if factor == 1.0:
            return self

        def longer(d: Duration) -> Duration:
            low, high = (round(ns * factor) if ns >= 0 else ns for ns in (d.low_ns, d.high_ns))
            return replace(d, ns=round(d.ns * factor), low_ns=low, high_ns=high)

        return DurationTable({at: longer(d) for at, d in self.segments.items()}, self.transfers)

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

    def transfer(self, key: str, placement: str = "") -> Duration:
        """Raises UserError where the table has none, neither for the placement nor for any."""
        found = self.transfers.get((key, placement)) or self.transfers.get(key)
        if found is None:
            raise UserError(
                "A call has no transfer time",
                where=f"Call {key}" + (f", placement {placement}" if placement else ""),
                do="Add it to the duration table",
            )
        return found

    @property
    def by_placement(self) -> bool:
        """Whether a transfer depends on how its group lies on the nodes."""
        return any(not isinstance(at, str) for at in self.transfers)

    def save(self, path: Path, *, provenance: Mapping[str, Any]) -> None:
        """Writes the table; a transfer with choices takes a row for each of them."""
        rows = [
            _row("segment", (*at, "", ""), d, d.ns, d.count)
            for at, d in sorted(self.segments.items())
        ]
        for (key, placement), d in sorted(
            ((at, "") if isinstance(at, str) else at, d) for at, d in self.transfers.items()
        ):
            at = (-1, "", "", -1, key, placement)
            for ns, count in d.choices or ((d.ns, d.count),):
                rows.append(_row("transfer", at, d, ns, count))
        columns = {
            column.name: [row[i] for row in rows]
            for i, column in enumerate(tables.DURATIONS.columns)
        }
        tables.DURATIONS.write(path, columns, provenance=provenance)

    @classmethod
    def load(cls, path: Path) -> DurationTable:
        table, _ = tables.DURATIONS.read(path)
        found = cls()
        of_key: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for row in table.to_pylist():
            if row["kind"] == "transfer":
                of_key[row["key"], row["placement"]].append(row)
            else:
                at = (row["role"], row["lane"], row["section"], row["position"])
                found.segments[at] = _of_row(row)
        for (key, placement), rows in of_key.items():
            d = _of_row(rows[0])
            if len(rows) > 1:
                choices = [(row["median_ns"], row["count"]) for row in rows]
                d = replace(
                    of_choices(choices, source=d.source),
                    cpu_ns=d.cpu_ns,
                    call_ns=d.call_ns,
                    assumptions=d.assumptions,
                )
            found.transfers[(key, placement) if placement else key] = d
        return found


def _row(kind: str, at: tuple[Any, ...], d: Duration, ns: int, count: int) -> tuple[Any, ...]:
    """Values of the columns of `durations`, in their order."""
    spread = (d.low_ns, d.high_ns, d.sigma, count)
    return (kind, *at, ns, *spread, d.cpu_ns, d.call_ns, list(d.parts_ns), d.source, d.assumptions)


def _of_row(row: Mapping[str, Any]) -> Duration:
    return Duration(
        row["median_ns"],
        row["sigma"],
        row["count"],
        row["source"],
        low_ns=row["low_ns"],
        high_ns=row["high_ns"],
        cpu_ns=row["cpu_ns"],
        call_ns=row["call_ns"],
        parts_ns=tuple(row["parts_ns"]),
        assumptions=row["assumptions"],
    )


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
    section_of: Callable[[int], str],
    period: int,
) -> dict[Segment, Duration]:
    """Medians over the captured ranks of a role, and over the repeats of the body.

    Args:
        events: `events` joined with `event_times`, in order.
        role_of: By rank.
        section_of: Section of a mark.
        period: Marks of one body.

    They are those of a machine that computed several ranks at once.
    """
    comp = events[events["kind"] == "COMP"].copy()
    comp["section"] = comp["mark"].map({m: section_of(m) for m in comp["mark"].unique()})
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
