"""The devices of this host on which slices run: its CPU cores."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from crystalllm import cores
from crystalllm.errors import UserError


class Devices(BaseModel):
    """What slices run on.

    Args:
        kind: Of all of them.
        model: As the system names it.
        sandbox: Cores for sandbox ranks, one rank on each.
        engine: Core of the replay engine; None where it shares the only one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    model: str
    sandbox: tuple[int, ...]
    engine: int | None


def of_this_host(chosen: Sequence[int] | None = None) -> Devices:
    """The physical cores that this process may use, or chosen CPUs.

    The first one is kept for the replay engine where there are two or more: an
    engine that takes its time from a sandbox rank's core would make it slower.

    Raises:
        UserError: A core is not there, or not for this process.
    """
    usable = sorted(os.sched_getaffinity(0))
    wanted = sorted(set(chosen)) if chosen is not None else cores.separate()
    if not wanted or not set(wanted) <= set(usable):
        raise UserError(
            "These cores are not all there",
            where=f"Cores {', '.join(map(str, wanted)) or 'none'}",
            do="Use some of " + ", ".join(map(str, usable)),
        )
    engine = wanted[0] if len(wanted) > 1 else None
    return Devices(
        kind="cpu",
        model=_cpu_model(),
        sandbox=tuple(c for c in wanted if c != engine),
        engine=engine,
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
