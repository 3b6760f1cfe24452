"""The cases of a study: its jobs, and the points of its sweeps, with names that stay.

A case is a job as it runs, and where its results lie: `results/<folder>/capture`,
`…/planning` and `…/<run>`. What only changes times (`LATE`) changes the run and not the folder,
so that such points share one capture and one planning.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crystalllm.config import (
    Job,
    Parallelism,
    check_fits,
    evaluate,
    find,
    load_cluster,
    load_job,
    stem,
)
from crystalllm.errors import UserError
from crystalllm.study.model import SWEEPS, Axis, Options, Study, Sweep, load_sweep

RUN = "emulate"
# What does not change the calls of a program, nor what its ranks compute.
LATE = ("cluster", "what_if")
_SIZES = tuple(name for name in Parallelism.model_fields if name != "order")
_KEYS = ("world_size", "ranks_per_node", "iterations", "seed", "cluster")
_STANDARD = "default"


@dataclass(frozen=True)
class Case:
    """One job as it runs, in one world and against one cluster.

    Args:
        folder: Of its results, below the study's; a job's name, or sweep and point.
        run: Name of its emulation in that folder.
        job: What runs, its parameters put into its arguments.
        options: How.
        cluster: Whose transfers the emulation has; None is the job's own.
        what_if: File of perturbations of its virtual ranks.
        sweep: That it is a point of; empty for a job by itself.
        values: By axis, what the point has.
    """

    folder: str
    run: str
    job: Job
    options: Options
    cluster: str | None = None
    what_if: Path | None = None
    sweep: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Infeasible:
    """A point that cannot be.

    Args:
        sweep: Of which.
        values: By axis, what it would have.
        reason: Why not.
    """

    sweep: str
    values: dict[str, Any]
    reason: str


def cases(study: Study) -> tuple[list[Case], list[Infeasible]]:
    """All cases of a study, and the points of its sweeps that cannot be.

    Raises:
        UserError: An unknown job, sweep, axis or value; two cases of one name.
    """
    found: list[Case] = []
    left_out: list[Infeasible] = []
    for name in study.jobs:
        folder = stem(name)
        found.append(Case(folder, RUN, load_job(name).resolved(), study.options(folder)))
    for name in study.sweeps:
        for one in _points(name, load_sweep(name), study):
            if isinstance(one, Case):
                found.append(one)
            else:
                left_out.append(one)
    known: dict[tuple[str, str], Case] = {}
    for case in found:
        other = known.setdefault((case.folder, case.run), case)
        if other is not case and other != case:
            raise UserError(
                f"Two cases have the name {case.folder}, {case.run}",
                where=f"Values {other.values} and {case.values}",
                do="Give jobs and sweeps different names, and an axis no default that others have",
            )
    return list(known.values()), left_out


def _points(name: str, sweep: Sweep, study: Study) -> Iterator[Case | Infeasible]:
    folder = stem(name)
    path = str(find(name, SWEEPS, "sweep"))
    base = load_job(sweep.job)
    _check_axes(sweep, base, path)
    for values in _combinations(sweep):
        if why := _forbidden(sweep, base, values, path):
            yield Infeasible(folder, values, why)
            continue
        try:
            job = _varied(base, values, path)
        except (ValueError, UserError) as error:
            yield Infeasible(folder, values, _said(error))
            continue
        early, late = (
            _named(sweep, {k: v for k, v in values.items() if (k in LATE) == is_late})
            for is_late in (False, True)
        )
        has_late = any(k in LATE for k in values) and late != _STANDARD
        yield Case(
            folder=f"{folder}/{early}",
            run=f"{RUN}_{late}" if has_late else RUN,
            job=job.model_copy(update={"cluster": base.cluster}).resolved(),
            options=study.options(folder),
            cluster=values.get("cluster"),
            what_if=Path(values["what_if"]) if values.get("what_if") else None,
            sweep=folder,
            values=values,
        )


def _check_axes(sweep: Sweep, base: Job, path: str) -> None:
    legal = [*_SIZES, *_KEYS, "what_if", *base.parameters]
    used = {*sweep.axes, *itertools.chain.from_iterable(sweep.points)}
    if unknown := sorted(used - set(legal)):
        raise UserError(
            f"A sweep varies what job {sweep.job} does not have: {', '.join(unknown)}",
            where=f"File {path}",
            do=f"Vary some of {', '.join(legal)}, or give the job a parameter of that name",
        )
    for name, axis in sweep.axes.items():
        if axis.default is not None and axis.default not in axis.values:
            raise UserError(
                f"The default of an axis is none of its values: {axis.default!r}",
                where=f"File {path}, axis {name}: {axis.values}",
                do="Name one of them, or add it",
            )


def _combinations(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """The values of every point; of a single point, axes that it leaves out have defaults."""
    if sweep.axes:
        for values in itertools.product(*(axis.values for axis in sweep.axes.values())):
            yield dict(zip(sweep.axes, values, strict=True))
    defaults = {k: a.default for k, a in sweep.axes.items() if a.default is not None}
    yield from ({**defaults, **point} for point in sweep.points)


def _forbidden(sweep: Sweep, base: Job, values: Mapping[str, Any], path: str) -> str:
    """Why a condition does not hold; empty if all do."""
    sizes = base.parallelism.model_dump() if base.parallelism else {}
    known = {
        **base.model_dump(include=set(_KEYS)),
        **base.parameters,
        **{k: v for k, v in sizes.items() if k in _SIZES},
        **values,
    }
    if "dp" not in values and "dp" in known:
        known["dp"] = known["world_size"] // (known["tp"] * known["pp"] * known["cp"])
    for condition, reason in sweep.where.items():
        try:
            holds = bool(evaluate(condition, known))
        except ValueError as error:
            raise UserError(
                f"A condition cannot be evaluated: {error}",
                where=f"File {path}, key where",
                do=f"Write such as tp * pp <= 64, with {', '.join(known)}",
            ) from error
        if not holds:
            return f"{reason} ({condition})"
    return ""


def _varied(base: Job, values: Mapping[str, Any], path: str) -> Job:
    """The job with these values; a dp that nobody names fills the world."""
    data = base.model_dump(exclude={"parallelism"})
    data |= {k: v for k, v in values.items() if k in _KEYS}
    data["parameters"] = {
        **base.parameters,
        **{k: v for k, v in values.items() if k in base.parameters},
    }
    sizes = base.parallelism.model_dump() if base.parallelism else {}
    sizes |= {k: v for k, v in values.items() if k in _SIZES}
    if sizes and "dp" not in values:
        rest = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
        sizes["dp"] = max(1, data["world_size"] // rest)
    data["parallelism"] = sizes or None
    job = Job.model_validate(data)
    if job.cluster is not None:
        check_fits(job, load_cluster(job.cluster), where=path)
    return job


def _said(error: Exception) -> str:
    """What went wrong with a point, in one line."""
    if isinstance(error, UserError):
        return str(error)
    problems = getattr(error, "errors", None)
    if problems is None:
        return str(error)
    return "; ".join(str(item.get("ctx", {}).get("error", item["msg"])) for item in problems())


def _named(sweep: Sweep, values: Mapping[str, Any]) -> str:
    """A readable name, without what is at its default; the order in the file does not count."""
    order = {name: i for i, name in enumerate(_SIZES)}
    parts = [
        _part(name, value)
        for name, value in sorted(values.items(), key=lambda v: (order.get(v[0], len(order)), v[0]))
        if value != sweep.axes.get(name, Axis(values=[value])).default
    ]
    return "_".join(parts) or _STANDARD


def _part(name: str, value: Any) -> str:
    """`tp4`, `recompute-full`, `offload_optimizer`, `no-offload_optimizer`."""
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, int | float):
        return f"{name}{value}"
    text = Path(str(value)).stem if name in LATE else str(value)
    return f"{name}-{re.sub(r'[^A-Za-z0-9.+-]+', '-', text)}"
