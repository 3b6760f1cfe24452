"""What `config/config.yaml` and the files of sweeps may say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from crystalllm.config import Parameter, Positive, find, load, parse

CONFIG = Path("config/config.yaml")
SWEEPS = Path("config/sweeps")

# Each is a rule's job, and a log.
MOST_SHARDS = 64

Values = Annotated[list[Parameter], Field(min_length=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CaptureOptions(_Model):
    """How worlds are captured."""

    strategy: Literal["roles", "all"] | None = Field(
        None, description="roles or all ranks (default: roles in worlds of more than 64 ranks)"
    )
    shards: Annotated[int, Field(ge=1, le=MOST_SHARDS, strict=True)] = Field(
        1, description="runs over which the ranks are spread; more than one needs strategy all"
    )
    checks: Annotated[int, Field(ge=0, strict=True)] = Field(
        16, description="inferred ranks that are run to check"
    )
    limit_s: Positive = Field(600, description="seconds that one rank may take")

    @model_validator(mode="after")
    def _shards_need_all(self) -> CaptureOptions:
        if self.shards > 1 and self.strategy != "all":
            raise ValueError(
                f"shards={self.shards} needs strategy: all; roles chooses its ranks one after "
                "the other"
            )
        return self


class PlanningOptions(_Model):
    """How ranks of every role are measured."""

    iterations: Positive = Field(10, description="measured in each slice")
    warm_up: Annotated[int, Field(ge=0, strict=True)] = Field(
        2, description="iterations before them"
    )
    passes: Positive = Field(3, description="at most")
    tolerance: Annotated[float, Field(gt=0)] = Field(
        0.02, description="the last pass moves the iteration time by less"
    )
    sandbox: list[str] = Field(
        default_factory=list, description="ranks that run together: node, tp, 0,1 or pp=0"
    )
    ranks_per_role: Positive = Field(1, description="that run")
    measure_gloo: bool = Field(
        False, description="measure transfers on this host, which is the target then"
    )
    nccl_tests: list[Path] = Field(
        default_factory=list, description="output of nccl-tests, which comes before the model"
    )
    shards: Annotated[int, Field(ge=1, le=MOST_SHARDS, strict=True)] = Field(
        1, description="runs over which the slices of each pass are spread, on hosts that are alike"
    )

    @model_validator(mode="after")
    def _shards_share_transfers(self) -> PlanningOptions:
        if self.shards > 1 and self.measure_gloo:
            raise ValueError(
                f"shards={self.shards} and measure_gloo: every host would measure other transfers"
            )
        return self


class EmulateOptions(_Model):
    """Which ranks run, and how."""

    ranks: str = Field("0", description="of interest: 0,137 or pp=5,tp=0")
    iterations: Positive | None = Field(None, description="that count (default: the job's)")
    warm_up: Annotated[int, Field(ge=0, strict=True)] = Field(
        2, description="iterations before them"
    )
    memory_limit: ByteSize | None = Field(
        None, description="of each rank, such as 80GiB; more is its out-of-memory error"
    )
    memory: bool = Field(True, description="keep account of memory, which takes time")
    follow_speed: bool = Field(
        False, description="the others compute as slowly as the ranks of interest do, now"
    )
    draw: bool = Field(
        False, description="draw durations from what was measured instead of taking medians"
    )
    profile: bool = Field(False, description="a Kineto trace; times are not valid then")
    limit_s: Positive = Field(3600, description="seconds after which a run is ended")
    nodes: Positive = Field(1, description="hosts of one emulation, as a scheduler gives them")
    gres: str = Field("", description="what it gives on each of them besides, such as gpu:8")


class Options(_Model):
    """Of the three stages."""

    capture: CaptureOptions = Field(default_factory=CaptureOptions)
    planning: PlanningOptions = Field(default_factory=PlanningOptions)
    emulate: EmulateOptions = Field(default_factory=EmulateOptions)


class Study(Options):
    """Jobs and sweeps that go through all stages."""

    jobs: list[str] = Field(
        default_factory=list, description="names in config/jobs, or files of jobs"
    )
    sweeps: list[str] = Field(
        default_factory=list, description="names in config/sweeps, or files of sweeps"
    )
    results: Path = Field(Path("results"), description="folder")
    container: str = Field(
        "crystalllm.sif",
        description="image in which rules run where containers are asked for "
        "(--software-deployment-method apptainer); made from the Containerfile",
    )
    keep_measurements: bool = Field(
        False, description="keep what was measured in each slice, not only what came of it"
    )
    overrides: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="by job or sweep, what of capture, planning and emulate is otherwise there",
    )

    @model_validator(mode="after")
    def _overrides_are_options(self) -> Study:
        for name in self.overrides:
            self.options(name)
        return self

    def options(self, name: str) -> Options:
        """Those of a job or a sweep."""
        values = self.model_dump(include=set(Options.model_fields))
        for stage, changed in self.overrides.get(name, {}).items():
            # A stage that there is not is refused below, with the legal ones.
            values[stage] = {**values.get(stage, {}), **changed}
        return Options.model_validate(values)


class Axis(_Model):
    """Values of one thing that a sweep varies."""

    values: Values = Field(description="all that it takes")
    default: Parameter | None = Field(None, description="the value that names of points leave out")

    @model_validator(mode="before")
    @classmethod
    def _list_alone(cls, data: Any) -> Any:
        return {"values": data} if isinstance(data, list) else data


class Sweep(_Model):
    """One job with some of its values varied."""

    job: str = Field(description="name in config/jobs, or its file")
    axes: dict[str, Axis] = Field(
        default_factory=dict,
        description="what varies, by the name of a parallel size, a key of the job, a parameter "
        "of the job, or what_if: every combination is a point",
    )
    points: list[dict[str, Parameter]] = Field(
        default_factory=list, description="instead of axes, or besides them: single points"
    )
    where: dict[str, str] = Field(
        default_factory=dict,
        description="conditions on a point's values, such as tp * pp <= 64, and why they must "
        "hold: points for which one does not are left out, and listed with the reason",
    )

    @model_validator(mode="after")
    def _has_points(self) -> Sweep:
        if not self.axes and not self.points:
            raise ValueError("a sweep needs axes or points")
        return self


def load_study(path: Path = CONFIG) -> Study:
    """The study in a file.

    Raises:
        UserError: Names the key, the value and what would be legal.
    """
    return load(path, Study)


def parse_study(data: Mapping[str, Any], path: Path = CONFIG) -> Study:
    """The study in the keys and values of a file, which somebody has read.

    Raises:
        UserError: As `load_study`.
    """
    return parse(data, Study, path)


def load_sweep(name: str) -> Sweep:
    """The sweep of this name in config/sweeps, or of this path."""
    return load(find(name, SWEEPS, "sweep"), Sweep)
