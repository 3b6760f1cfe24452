"""What-ifs: a rank that computes longer, a link that is slower, a pause. Off by default.

A small YAML file declares them:

    - {what: slow-rank, rank: 137, factor: 1.2}
    - {what: slow-rank, rank: 3, factor: 2, first: 5, every: 10}
    - {what: pause, rank: 7, pause_ms: 50, at_ms: 1200}
    - {what: pause, rank: 7, pause_ms: 5, first: 1, every: 4}
    - {what: slow-link, group: mesh_pp, factor: 3}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from crystalllm.errors import UserError
from crystalllm.replay.world import Perturbation, PerturbationKind

_Rank = Annotated[int, Field(ge=0, strict=True)]
_Factor = Annotated[float, Field(ge=0)]
_Iteration = Annotated[int, Field(ge=1, strict=True)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SlowRank(_Model):
    """The rank computes `factor` times as long, in every `every`-th iteration from `first` on."""

    what: Literal["slow-rank"]
    rank: _Rank
    factor: _Factor
    first: _Iteration = 1
    every: Annotated[int, Field(ge=0, strict=True)] = 0

    def perturbation(self) -> Perturbation:
        return Perturbation(
            kind=PerturbationKind.SLOW,
            rank=self.rank,
            first=self.first,
            every=self.every,
            factor=self.factor,
        )


class Pause(_Model):
    """The rank stops computing once, `at_ms` after the start, or in certain iterations."""

    what: Literal["pause"]
    rank: _Rank
    pause_ms: Annotated[float, Field(ge=0)]
    at_ms: Annotated[float, Field(ge=0)] | None = None
    first: _Iteration | None = None
    every: Annotated[int, Field(ge=0, strict=True)] = 0

    @model_validator(mode="after")
    def _one_of_two(self) -> Pause:
        if (self.at_ms is None) == (self.first is None):
            raise ValueError("give either at_ms or first (and every)")
        return self

    def perturbation(self) -> Perturbation:
        pause_ns = round(self.pause_ms * 1e6)
        if self.at_ms is not None:
            kind, at_ns = PerturbationKind.PAUSE_AT, round(self.at_ms * 1e6)
            return Perturbation(kind=kind, rank=self.rank, pause_ns=pause_ns, at_ns=at_ns)
        return Perturbation(
            kind=PerturbationKind.PAUSE_IN,
            rank=self.rank,
            first=self.first or 1,
            every=self.every,
            pause_ns=pause_ns,
        )


class SlowLink(_Model):
    """Transfers in groups of this description or signature take `factor` times as long."""

    what: Literal["slow-link"]
    group: str
    factor: _Factor


WhatIf = Annotated[SlowRank | Pause | SlowLink, Field(discriminator="what")]


def load(path: Path, *, world_size: int) -> list[SlowRank | Pause | SlowLink]:
    """Reads a what-if file.

    Raises:
        UserError: No such file, no YAML, an unknown key, a rank outside the world.
    """
    try:
        declared = TypeAdapter(list[WhatIf]).validate_python(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            "A what-if file cannot be read",
            where=f"File {path}: {str(error).splitlines()[0]}",
            do="Pass a YAML file with a list of what-ifs (docs/replay.md)",
        ) from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()
        )
        raise UserError(
            f"The what-ifs are wrong: {problems}",
            where=f"File {path}",
            do="Mend them; docs/replay.md shows each kind",
        ) from None
    for item in declared:
        if not isinstance(item, SlowLink) and item.rank >= world_size:
            raise UserError(
                f"Rank {item.rank} is outside the world",
                where=f"File {path}, {item.what}",
                do=f"Use a rank from 0 to {world_size - 1}",
            )
    return declared
