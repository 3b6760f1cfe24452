"""The plan: what planning is going to run, written down before anything runs."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from crystalllm import __version__, artifacts, native
from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.planning import slices
from crystalllm.planning.devices import Devices
from crystalllm.replay.program import Capture
from crystalllm.sandbox import changes
from crystalllm.sandbox.followed import program_iterations

_Count = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Options(_Model):
    """How to plan.

    Args:
        iterations: Measured ones of each slice.
        warm_up: Bodies before them that are not measured.
        max_passes: At most so many.
        tolerance: The last pass is the one that moves the iteration time by less,
            as a share of it.
        ranks_per_role: That run, as far as a role has so many.
        wishes: Sandbox ranks that are to run together (see `slices.read_wish`).
        seed: Of everything that is invented.
        eager_bytes: Messages up to this size need no receiver to be ready.
        share_links: Modelled transfers share links where they overlap.
    """

    iterations: _Count = 10
    warm_up: Annotated[int, Field(ge=0)] = 2
    max_passes: _Count = 3
    tolerance: Annotated[float, Field(gt=0)] = 0.02
    ranks_per_role: _Count = 1
    wishes: tuple[str, ...] = ()
    seed: Annotated[int, Field(ge=0)] = 0
    eager_bytes: Annotated[int, Field(ge=0)] = 0
    share_links: bool = False

    @property
    def num_bodies(self) -> int:
        """That each slice goes through."""
        return self.warm_up + self.iterations


class Slice(_Model):
    """Ranks that run together.

    Args:
        number: From 1.
        ranks: Sandbox ranks, ascending.
        roles: Of these ranks, one by one.
        cores: Where they run, one by one.
    """

    number: int
    ranks: tuple[int, ...]
    roles: tuple[int, ...]
    cores: tuple[int, ...]


class Plan(_Model):
    """What runs, and everything that decides what comes out of it.

    Args:
        job: Whose world.
        fingerprint: Of the captured structure, the program's sources included.
        versions: Of what takes part.
        options: How to plan.
        devices: On which slices run.
        slices: In the order in which they run.
    """

    job: Job
    fingerprint: str
    versions: dict[str, str]
    options: Options
    devices: Devices
    slices: tuple[Slice, ...]

    @property
    def roles(self) -> tuple[int, ...]:
        """All that slices cover, ascending."""
        return tuple(sorted({role for s in self.slices for role in s.roles}))

    @property
    def digest(self) -> str:
        """Equal for plans that are equal in everything."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_atomically(path, (self.model_dump_json(indent=2) + "\n").encode())


def make(job: Job, capture: Capture, options: Options, devices: Devices) -> Plan:
    """The plan for a capture of a job.

    Raises:
        UserError: The capture is of another job or an older program, or the
            devices are too few for a wish.
    """
    where = f"Capture with fingerprint {capture.structure['fingerprint']}"
    if not capture.period:
        raise UserError(
            "The calls of this capture do not repeat, so that there is no iteration to measure",
            where=where,
            do="Capture enough iterations: what comes before the calls repeat, and two more",
        )
    if differences := changes(job, capture):
        raise UserError(
            "The capture is of another program: " + "; ".join(differences),
            where=where,
            do="Capture again",
        )
    program_iterations(capture, options.num_bodies)  # refuses a number that it cannot run
    wishes = [slices.read_wish(text, capture.ranks) for text in options.wishes]
    chosen = slices.choose(
        capture.ranks,
        len(devices.sandbox),
        wishes=wishes,
        ranks_per_role=options.ranks_per_role,
    )
    return Plan(
        job=job,
        fingerprint=capture.structure["fingerprint"],
        versions=_versions(),
        options=options,
        devices=devices,
        slices=_numbered(chosen, capture, devices),
    )


def _numbered(
    chosen: Sequence[slices.Block], capture: Capture, devices: Devices
) -> tuple[Slice, ...]:
    role_of = capture.ranks["role"]
    return tuple(
        Slice(
            number=number,
            ranks=ranks,
            roles=tuple(int(role_of[rank]) for rank in ranks),
            cores=devices.sandbox[: len(ranks)],
        )
        for number, ranks in enumerate(chosen, 1)
    )


def _versions() -> dict[str, str]:
    return {
        "crystalllm": __version__,
        "library": _library_digest(),
        "native": native.source_digest(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def _library_digest() -> str:
    """Of the library's own modules and patches: what measures, and how."""
    digest = hashlib.sha256()
    for package in ("crystalllm", "crystalllm_patches"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
