"""What planning is going to do, said before anything starts."""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from crystalllm import artifacts
from crystalllm.errors import UserError
from crystalllm.planning import slices
from crystalllm.planning.passes import FINISHED
from crystalllm.planning.plan import Plan
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.program import Capture

# What a slice takes besides its program, until one has shown it: starting processes,
# importing torch in each, and the reference twice. gpt-512 took this on two cores.
START_UP_S = 15.0
# Where the first estimates are from a capture, the first pass moves them.
_USUAL_PASSES = 2


@dataclass(frozen=True)
class Earlier:
    """What a slice took.

    Args:
        wall_s: In all.
        program_s: From the first to the last line of its program.
        roles: Of its ranks.
        num_bodies: That it ran.
    """

    wall_s: float
    program_s: float
    roles: Sequence[int]
    num_bodies: int


def explain(
    plan: Plan,
    capture: Capture,
    first: DurationTable,
    *,
    replayed: Mapping[str, Any],
    earlier: Sequence[Earlier] = (),
) -> dict[str, Any]:
    """What will run, for how long, what wishes need, and where times come from.

    Args:
        plan: What runs.
        capture: What the ranks do.
        first: First estimates, and the times of transfers.
        replayed: What the replay of the world with them said.
        earlier: What slices of this job took.

    Returns:
        Ready for JSON: `slices`, `wishes`, `transfers`, `computation` (shares of the
        critical path by source), `expected_s` by pass and in all, and what these
        rest on.
    """
    computed = [_program_s(first, s.roles, plan.options.num_bodies, replayed) for s in plan.slices]
    start_up_s, pace = START_UP_S, 1.0
    if earlier:
        start_up_s = statistics.median(max(0.0, e.wall_s - e.program_s) for e in earlier)
        pace = statistics.median(
            e.program_s / _program_s(first, e.roles, e.num_bodies, replayed) for e in earlier
        )
    slice_rows = [
        {
            "slice": s.number,
            "ranks": list(s.ranks),
            "roles": list(s.roles),
            "cores": list(s.cores),
            "expected_s": round(start_up_s + pace * program_s, 1),
        }
        for s, program_s in zip(plan.slices, computed, strict=True)
    ]
    per_pass = sum(row["expected_s"] for row in slice_rows)
    usual = min(_USUAL_PASSES, plan.options.max_passes)
    return {
        "job": plan.job.program,
        "num_ranks": len(capture.ranks),
        "num_roles": len(plan.roles),
        "devices": plan.devices.model_dump(mode="json"),
        "options": plan.options.model_dump(mode="json"),
        "digest": plan.digest,
        "slices": slice_rows,
        "wishes": [
            _answer(wish, capture.ranks, len(plan.devices.sandbox))
            for wish in _wishes(plan, capture.ranks)
        ],
        "transfers": transfer_rows(capture, first, replayed),
        "computation": dict(replayed["sources"]["compute"]),
        "iteration_ns": replayed["iteration_ns"],
        "expected_s": {
            "pass": round(per_pass, 1),
            "usual": round(usual * per_pass, 1),
            "at_most": round(plan.options.max_passes * per_pass, 1),
        },
        "assumptions": [
            f"an iteration takes {replayed['iteration_ns'] / 1e6:.1f} ms, as the replay of the "
            "world with the first estimates says"
            + (f", times {pace:.2f} as in {len(earlier)} slices that ran before" * bool(earlier)),
            f"starting, calibrating and ending a slice takes {start_up_s:.1f} s"
            + (", until a slice of this job has shown it" if not earlier else ", as in these"),
            f"{usual} passes as a rule, {plan.options.max_passes} at most",
        ],
    }


def finished_slices(work: Path, roles: Container[int]) -> list[Earlier]:
    """Slices that earlier plannings of this job ran.

    Args:
        work: Folder in which each planning has one of its own.
        roles: Those that there are now; slices of others tell nothing.
    """
    found = []
    for path in sorted(work.glob(f"*/pass-*/slice-*/{FINISHED}")):
        try:
            finished = artifacts.read_json(path)
            earlier = Earlier(**{f.name: finished[f.name] for f in fields(Earlier)})
        except (UserError, KeyError):
            continue  # of another version: it is no help
        if all(role in roles for role in earlier.roles):
            found.append(earlier)
    return found


def transfer_rows(
    capture: Capture, first: DurationTable, replayed: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Where transfer times come from: by source, kinds of calls, and their part of the time.

    Returns:
        Rows with `source`, `kinds_of_calls`, `calls` (in one iteration of all ranks),
        `share` (of the critical path of an iteration) and `assumptions`.
    """
    by_source: dict[str, list[str]] = {}
    assumptions: dict[str, set[str]] = {}
    calls_of = _body_calls(capture)
    for at, d in first.transfers.items():
        by_source.setdefault(d.source, []).append(at if isinstance(at, str) else at[0])
        assumptions.setdefault(d.source, set()).update(filter(None, [d.assumptions]))
    shares = replayed["sources"]["transfers"]
    rows = []
    for source, keys in sorted(by_source.items()):
        kinds = sorted(set(keys))
        rows.append(
            {
                "source": source,
                "kinds_of_calls": len(kinds),
                "calls": int(sum(calls_of.get(key, 0) for key in kinds)),
                "share": float(shares.get(source, 0.0)),
                "assumptions": sorted(assumptions[source]),
            }
        )
    return rows


def _wishes(plan: Plan, ranks: pd.DataFrame) -> list[slices.Wish]:
    usual = slices.usual_wishes(ranks)
    named = {wish.text for wish in usual}
    own = [slices.read_wish(text, ranks) for text in plan.options.wishes if text not in named]
    return [*usual, *own]


def _answer(wish: slices.Wish, ranks: pd.DataFrame, num_devices: int) -> dict[str, Any]:
    is_possible = wish.num_devices <= num_devices
    return {
        "wish": wish.text,
        "num_devices": wish.num_devices,
        "devices_here": num_devices,
        "is_possible": is_possible,
        "slices": len(slices.choose(ranks, num_devices, wishes=[wish])) if is_possible else None,
    }


def _program_s(
    first: DurationTable, roles: Iterable[int], num_bodies: int, replayed: Mapping[str, Any]
) -> float:
    """Seconds from the first to the last line of a slice's program, by first estimates."""
    once = dict.fromkeys(roles, 0)
    for (role, _, section, _), d in first.segments.items():
        if role in once and section != "body":
            once[role] += d.ns
    return (max(once.values()) + num_bodies * replayed["iteration_ns"]) / 1e9


def _body_calls(capture: Capture) -> dict[str, int]:
    """By key, calls of one body, of all ranks."""
    last = capture.num_marks - capture.period
    speakers = {rank: role for role, rank in capture.speakers().items()}
    num_ranks = capture.ranks.groupby("role").size()
    calls = capture.calls[
        (capture.calls["mark"] >= last)
        & (capture.calls["mark"] < capture.num_marks)
        & capture.calls["rank"].isin(speakers)
    ]
    weights = calls["rank"].map(lambda rank: int(num_ranks[speakers[rank]]))
    counted = weights.groupby(calls["key"].astype(str)).sum()
    return {str(key): int(number) for key, number in counted.items()}
