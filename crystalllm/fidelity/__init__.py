"""How true emulation was where it could be compared: the measured cases, and the nearest to a job.

The files beside this one are what `python -m crystalllm bench fidelity` printed last, one for
each kind of device; docs/accuracy.md tells how they came about.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crystalllm.chosen import axes_of
from crystalllm.replay.program import Capture

_FOLDER = Path(__file__).parent


def traits(capture: Capture) -> list[str]:
    """What decides which case is near: kinds of calls, and axes along which there are ranks."""
    kinds = {str(kind) for kind in capture.calls["kind"].unique()}
    axes = axes_of(capture.ranks)
    return sorted(kinds | {f"axis {axis}" for axis in axes if axes[axis].nunique() > 1})


def measured(device: str = "cpu") -> dict[str, Any]:
    """What was measured on such devices; empty if nothing was."""
    path = _FOLDER / f"{device}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def nearest(capture: Capture, device: str = "cpu") -> dict[str, Any] | None:
    """The measured case that has most in common with a job.

    Args:
        capture: Of the job.
        device: On which it is emulated.

    Returns:
        `case`, the options that it was `emulated_with`, `ratio` (emulated over real) and
        `ratio_interval`, `n` pairs, `world_size`, and `not_covered`: what the job has and the
        case has not. None if nothing was measured.
    """
    of_job = set(traits(capture))

    def likeness(case: dict[str, Any]) -> float:
        of_case = set(case["traits"])
        return len(of_job & of_case) / max(1, len(of_job | of_case))

    found = measured(device)
    cases = found.get("cases", [])
    if not cases:
        return None
    case = max(cases, key=likeness)
    return {
        "case": case["name"],
        "emulated_with": found["emulated_with"],
        **{name: case[name] for name in ("ratio", "ratio_interval", "n", "world_size")},
        "not_covered": sorted(of_job - set(case["traits"])),
    }
