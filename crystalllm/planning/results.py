"""The files that planning leaves, and what its summary says."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow as pa

from crystalllm import __version__, artifacts, tables
from crystalllm.planning import calibration, passes, profile
from crystalllm.planning.calibration import BOUND
from crystalllm.planning.passes import Pass
from crystalllm.planning.plan import Plan

PLANNING = "planning.json"


def conditions() -> dict[str, Any]:
    """Of the host as planning finds it."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "num_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": list(os.getloadavg()),
    }


def write(
    plan: Plan, found: Sequence[Pass], conditions: Mapping[str, Any], work: Path, out: Path
) -> dict[str, Any]:
    """Writes all files; they are made before the first appears, planning.json comes last.

    Args:
        plan: What ran.
        found: All passes, the first estimates first.
        conditions: Of the host before anything ran.
        work: Folder of the same file system in which they are made.
        out: Where they appear.

    Returns:
        What planning.json says.
    """
    made = work / "results"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    provenance = {
        "crystalllm": __version__,
        "fingerprint": plan.fingerprint,
        "plan": plan.digest,
    }
    plan.save(made / "plan.json")
    rows = pd.concat([p.rows for p in found[1:]], ignore_index=True)
    columns = pa.Table.from_pandas(rows, preserve_index=False)
    tables.SLICES.write(made / "slices.parquet", columns, provenance=provenance)
    standard = found[-1].standard
    at_speed = {} if standard is None else {"reference_ns": standard.ns}
    found[-1].profile.save(made / "profile.parquet", provenance=provenance | at_speed)
    summary = {**provenance, **_summary(plan, found), "conditions": conditions}
    text = json.dumps(summary, indent=2, sort_keys=True) + "\n"
    artifacts.write_atomically(made / PLANNING, text.encode())
    out.mkdir(parents=True, exist_ok=True)
    for name in ("plan.json", "slices.parquet", "profile.parquet", PLANNING):
        (made / name).replace(out / name)
    made.rmdir()
    return summary


def _summary(plan: Plan, found: Sequence[Pass]) -> dict[str, Any]:
    last = found[-1]
    is_settled = passes.is_settled(found, plan)
    roles = profile.body_spread(last.rows)
    warnings = [line for p in found[1:] for line in _of_slices(p)]
    warnings += [
        f"role {role}: the medians of its segments add up to {body['of_medians']:.0%} of the "
        "median iteration's computation: now and then something else took time"
        for role, body in roles.items()
        if abs(body["of_medians"] - 1) > BOUND
    ]
    if not is_settled:
        warnings.append(
            f"the last pass still moved the iteration time by {last.moved:+.1%}, more than the "
            f"tolerance of {plan.options.tolerance:.1%}"
        )
    return {
        "iteration_ns": last.iteration_ns,
        "is_settled": is_settled,
        "sources": last.replayed["sources"],
        "roles": roles,
        "passes": [_pass_summary(p) for p in found],
        "warnings": warnings,
    }


def _of_slices(p: Pass) -> Iterator[str]:
    """What should be known of the slices of a pass by who uses their numbers."""
    for ran in p.slices:
        where = f"pass {p.number}, slice {ran.slice.number}"
        for reason in ran.summary.get("trust", {}).get("why_not", ()):
            yield f"{where}: {reason}"
        if p.standard is not None:
            yield from calibration.warnings(ran.calibration, p.standard, where=where)


def _pass_summary(p: Pass) -> dict[str, Any]:
    """How the estimates moved, and on which readings their calibration rests."""
    return {
        "pass": p.number,
        "iteration_ns": p.iteration_ns,
        "moved": round(p.moved, 6),
        "compute_ns": profile.body_compute_ns(p.profile),
        "sources": p.replayed["sources"],
        "standard": None if p.standard is None else asdict(p.standard),
        "slices": [
            {
                "slice": ran.slice.number,
                "ranks": ran.slice.ranks,
                "wall_s": round(ran.wall_s, 3),
                "is_kept": ran.is_kept,
                "lateness_ns": ran.summary.get("trust", {}).get("lateness_ns", {}),
                "factors": p.factors[ran.slice.number],
                "calibration": ran.calibration.to_json(),
            }
            for ran in p.slices
        ],
    }
