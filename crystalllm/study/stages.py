"""The arguments with which stages are called, from the options of a study."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crystalllm import planning
from crystalllm.config import Job
from crystalllm.cores import separate


def planning_request(
    job: Job, options: Mapping[str, Any], *, capture: Path, measure_in: Path | None = None
) -> dict[str, Any]:
    """What `planning.planning` and `planning.explain` are called with.

    Args:
        job: What runs.
        options: As `PlanningOptions` has them.
        capture: Folder of the job's capture.
        measure_in: Folder for transfers that are measured; None measures none.
    """
    measures = options["measure_gloo"] and measure_in is not None
    return {
        "capture": capture,
        "transfers": planning.transfers_from(
            job,
            cluster=None,
            files=[Path(file) for file in options["nccl_tests"]],
            measured=measure_in / "measured_transfers.parquet" if measures else None,
            measure_on=separate() if measures else (),
            later=options["measure_gloo"] and not measures,
        ),
        "options": planning.Options(
            iterations=options["iterations"],
            warm_up=options["warm_up"],
            max_passes=options["passes"],
            tolerance=options["tolerance"],
            ranks_per_role=options["ranks_per_role"],
            wishes=tuple(options["sandbox"]),
        ),
    }


def plan_text(explained: Mapping[str, Any]) -> str:
    """What of an explained plan is the same whenever the structure is: no times."""
    kept = ("job", "num_ranks", "num_roles", "options", "digest")
    found = {name: explained[name] for name in kept}
    found["slices"] = [[s["ranks"], s["roles"]] for s in explained["slices"]]
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def emulate_request(
    options: Mapping[str, Any],
    *,
    cluster: str | None,
    nccl_tests: Sequence[str],
    what_if: Path | None,
) -> dict[str, Any]:
    """What `emulate` is called with, besides job and files.

    Args:
        options: As `EmulateOptions` has them.
        cluster: Whose transfers count; None leaves those of the profile.
        nccl_tests: Output of nccl-tests that comes before the model's transfers.
        what_if: Perturbations of virtual ranks.
    """
    return {
        "ranks": options["ranks"],
        "iterations": options["iterations"],
        "warm_up": options["warm_up"],
        "cluster": cluster,
        "nccl_tests": [Path(file) for file in nccl_tests],
        "what_ifs": what_if,
        "memory": options["memory"],
        "memory_limit_bytes": options["memory_limit"],
        "follows_speed": options["follow_speed"],
        "draw": options["draw"],
        "profile": options["profile"],
        "limit_s": options["limit_s"],
    }
