"""What a study is going to take, told before anything starts: time, and space on the disk."""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crystalllm.capture import LARGE_WORLD
from crystalllm.errors import UserError
from crystalllm.study.points import RUN, Case, Infeasible

STAGES = ("capture", "planning", "emulate")
# Seconds for a job of which nothing is known, on two cores: gpt-512 took about these.
_USUAL_S = {"capture": 45.0, "planning": 200.0, "emulate": 30.0}
# One more where every rank runs: forked, two at a time.
_PER_RANK_S = 0.4
# gpt-512 left so much: by the rank that ran (35 kB, and 186 kB with which a capture goes on),
# by the rank of the world, and per run.
_CAPTURED_BYTES = 225_000
_RANK_BYTES = 60
_PLANNED_BYTES = 600_000
_RUN_BYTES = 3_000_000
# Ranks that run where roles are explored; gpt-512 took 62.
_EXPLORED = 64
_SHOWN = 12


@dataclass(frozen=True)
class Prospect:
    """Of one folder of results.

    Args:
        folder: Which.
        runs: Its emulations.
        seconds: By stage.
        bytes: That it is going to leave.
        known: Stages whose times are of an earlier run.
    """

    folder: str
    runs: tuple[str, ...]
    seconds: dict[str, float]
    bytes: int
    known: frozenset[str] = field(default_factory=frozenset)


def outlook(cases: Iterable[Case], results: Path) -> list[Prospect]:
    """What each folder of results is going to take.

    Args:
        cases: Of a study.
        results: Its folder; what stages took before lies there.
    """
    of_folder: dict[str, list[Case]] = {}
    for case in cases:
        of_folder.setdefault(case.folder, []).append(case)
    return [_prospect(group, results) for group in of_folder.values()]


def minutes(prospects: Iterable[Prospect], folder: str, stage: str) -> int:
    """What a scheduler is to allow a stage: several times what is expected."""
    found = next(p for p in prospects if p.folder == folder)
    return max(10, math.ceil(4 * found.seconds[stage] / 60))


def text(prospects: Sequence[Prospect], infeasible: Sequence[Infeasible]) -> str:
    """For people, in a few lines."""
    lines = [f"{'results':<40} {'capture':>9} {'planning':>9} {'emulate':>9} {'disk':>9}"]
    for p in prospects[:_SHOWN]:
        times = " ".join(
            f"{('' if stage in p.known else '~') + _time(p.seconds[stage]):>9}" for stage in STAGES
        )
        lines.append(f"{p.folder:<40} {times} {p.bytes / 1e6:>6.0f} MB")
    if len(prospects) > _SHOWN:
        lines.append(f"… and {len(prospects) - _SHOWN} more")
    whole = sum(sum(p.seconds.values()) for p in prospects)
    space = sum(p.bytes for p in prospects)
    lines.append(
        f"All from the beginning: about {_time(whole)}, {space / 1e6:.0f} MB; what is there is not "
        "done again (~ guessed from gpt-512 on two cores, the others from earlier runs)"
    )
    if infeasible:
        lines.append(f"{len(infeasible)} points of sweeps cannot be: see infeasible.tsv")
    return "\n".join(lines)


def check(prospects: Iterable[Prospect], results: Path) -> None:
    """Refuses a study for which the disk is too small.

    Raises:
        UserError: Says what is needed and what is free.
    """
    needed = sum(p.bytes for p in prospects)
    place = next(p for p in (results.absolute(), *results.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"The disk is too small for the results: {needed / 1e9:.1f} GB are expected, "
            f"{free / 1e9:.1f} GB are free",
            where=f"Folder {place}",
            do="Name another folder (key results of config/config.yaml), or fewer jobs",
        )


def _prospect(group: Sequence[Case], results: Path) -> Prospect:
    case = group[0]
    benchmarks = results / case.folder / "benchmarks"
    world = case.job.world_size
    strategy = case.options.capture.strategy or ("roles" if world > LARGE_WORLD else "all")
    ran = world if strategy == "all" else min(world, _EXPLORED)
    seconds = dict(_USUAL_S)
    if strategy == "all":
        seconds["capture"] += _PER_RANK_S * world
    known = set()
    for stage in STAGES:
        took = _took(benchmarks / f"{RUN if stage == 'emulate' else stage}.tsv")
        if took is not None:
            seconds[stage] = took
            known.add(stage)
    return Prospect(
        folder=case.folder,
        runs=tuple(c.run for c in group),
        seconds=seconds,
        bytes=_CAPTURED_BYTES * ran
        + _RANK_BYTES * world
        + _PLANNED_BYTES
        + _RUN_BYTES * len(group),
        known=frozenset(known),
    )


def _took(path: Path) -> float | None:
    """Seconds, as the workflow measured them."""
    try:
        with path.open() as file:
            return float(next(csv.DictReader(file, delimiter="\t"))["s"])
    except (OSError, StopIteration, KeyError, ValueError):
        return None


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
