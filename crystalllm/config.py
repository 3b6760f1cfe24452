"""Jobs and clusters as YAML, checked before anything long starts.

The models are the one description: default files and JSON Schemas are
generated from them (`python -m crystalllm generate`).
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from crystalllm.errors import UserError
from crystalllm.identity import Identity

Positive = Annotated[int, Field(gt=0, strict=True)]
PositiveNumber = Annotated[float, Field(gt=0)]

JOBS = Path("config/jobs")
CLUSTERS = Path("config/clusters")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parallelism(_Model):
    """Sizes of the parallel axes. tp, pp, cp and dp fill the world; ep and vp lie within them."""

    tp: Positive = Field(1, description="tensor parallel size")
    pp: Positive = Field(1, description="pipeline stages")
    cp: Positive = Field(1, description="context parallel size")
    dp: Positive = Field(1, description="data parallel size (replicas and shards together)")
    ep: Positive = Field(1, description="expert parallel size, a divisor of cp × dp")
    vp: Positive = Field(1, description="virtual stages per pipeline stage")
    order: Annotated[str, Field(pattern=r"^(tp|cp|dp|pp)(-(tp|cp|dp|pp)){3}$")] = Field(
        "tp-cp-dp-pp", description="axes from neighbouring ranks to distant ones"
    )

    @property
    def factors(self) -> str:
        return " × ".join(f"{name}={getattr(self, name)}" for name in ("tp", "pp", "cp", "dp"))

    @property
    def product(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @model_validator(mode="after")
    def _order_is_complete(self) -> Parallelism:
        if len(set(self.order.split("-"))) != 4:
            raise ValueError(f"order={self.order} must have each of tp, cp, dp and pp once")
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> Parallelism:
        if (self.cp * self.dp) % self.ep:
            legal = [n for n in range(1, self.cp * self.dp + 1) if (self.cp * self.dp) % n == 0]
            raise ValueError(
                f"ep={self.ep} does not divide cp × dp = {self.cp} × {self.dp} = "
                f"{self.cp * self.dp}; legal are {_some(legal)}"
            )
        return self


class Job(_Model):
    """A training program and the logical world that it runs in."""

    program: str = Field(
        description="script, relative to the working directory, or '-m' and a module",
        examples=["train.py", "-m crystalllm.examples.fsdp_tp"],
    )
    arguments: str = Field(
        "",
        description="the program's arguments, split as a shell would; {iterations}, {seed} and "
        "the parallel sizes ({tp}, {pp}, …) are replaced, {{ and }} stand for braces",
    )
    world_size: Positive = Field(description="logical ranks")
    ranks_per_node: Positive = Field(8, description="logical ranks of one node")
    iterations: Positive = Field(10, description="iterations, unless a stage asks for others")
    capture_iterations: Positive | None = Field(
        None,
        description="iterations that capture runs (default: iterations); enough for what happens "
        "before the calls repeat, and two periods",
    )
    parallelism: Parallelism | None = Field(
        None, description="sizes of the parallel axes; their product must be the world size"
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="variables that the program finds set"
    )
    seed: Annotated[int, Field(ge=0, strict=True)] = Field(
        0, description="seed of everything that is invented"
    )
    cluster: str | None = Field(
        None, description="name of the target cluster in config/clusters, or a path"
    )

    @model_validator(mode="after")
    def _world_is_filled(self) -> Job:
        p = self.parallelism
        if p is not None and p.product != self.world_size:
            rest = p.tp * p.pp * p.cp
            hint = (
                f"dp={self.world_size // rest} would fill it"
                if self.world_size % rest == 0
                else f"tp × pp × cp = {rest} does not divide it, legal are world sizes of "
                f"{rest}, {2 * rest}, {3 * rest}, … with dp to match"
            )
            raise ValueError(
                f"{p.factors} = {p.product} ranks, but world_size is {self.world_size}; {hint}"
            )
        self.command()  # an unknown placeholder is an error here, not in the middle of a stage
        return self

    def command(self, *, iterations: int | None = None) -> tuple[str, ...]:
        """The program and its arguments for so many iterations."""
        values: dict[str, Any] = {
            "iterations": iterations if iterations is not None else self.iterations,
            "seed": self.seed,
            "world_size": self.world_size,
            **(self.parallelism.model_dump(exclude={"order"}) if self.parallelism else {}),
        }

        def replace(match: re.Match[str]) -> str:
            if match[0] in ("{{", "}}"):
                return match[0][0]
            if match[1] not in values:
                raise ValueError(
                    f"unknown placeholder {match[0]} in arguments{_suggest(match[1], values)}; "
                    f"legal are {', '.join('{' + v + '}' for v in values)}; write {{{{ and }}}} "
                    "for braces"
                )
            return str(values[match[1]])

        text = re.sub(r"\{\{|\}\}|\{(\w+)\}", replace, self.arguments)
        return (*shlex.split(self.program), *shlex.split(text))

    def identity(self, rank: int) -> Identity:
        return Identity(
            rank=rank,
            world_size=self.world_size,
            ranks_per_node=self.ranks_per_node,
            seed=self.seed,
            environment=self.environment,
        )


class Gpu(_Model):
    """One model of GPU."""

    model: str = Field(description="name as nvidia-smi shows it", examples=["NVIDIA H200"])
    memory_bytes: Positive = Field(description="device memory")
    peak_flops: dict[Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"], PositiveNumber] = (
        Field(description="dense peak per second by precision, for MFU")
    )


class Nodes(_Model):
    """Nodes of one kind."""

    count: Positive = Field(description="how many")
    gpus_per_node: Positive = Field(8, description="GPUs in each")
    gpu: Gpu


class Link(_Model):
    """A class of links, seen from one GPU, in one direction."""

    scope: Literal["node", "cluster"] = Field(description="whom it connects")
    bandwidth_bytes_per_s: PositiveNumber = Field(description="payload bytes per second")
    latency_s: Annotated[float, Field(ge=0)] = Field(description="time of an empty message")


class Cluster(_Model):
    """The machine that the job is meant for."""

    nodes: Annotated[list[Nodes], Field(min_length=1)]
    links: Annotated[dict[str, Link], Field(min_length=1)] = Field(
        description="link classes by name"
    )

    @model_validator(mode="after")
    def _one_gpu_model(self) -> Cluster:
        models = sorted({n.gpu.model for n in self.nodes})
        if len(models) > 1:
            raise ValueError(
                f"mixed GPU models {' and '.join(models)}; all nodes of a cluster must have the "
                "same, since a rank's times are measured on one kind"
            )
        scopes = {link.scope for link in self.links.values()}
        if "node" not in scopes or (self.num_nodes > 1 and "cluster" not in scopes):
            raise ValueError(
                f"links of scope {', '.join(sorted(scopes))} only; a cluster of "
                f"{self.num_nodes} nodes needs one of scope node"
                + (" and one of scope cluster" if self.num_nodes > 1 else "")
            )
        return self

    @property
    def gpu(self) -> Gpu:
        return self.nodes[0].gpu

    @property
    def num_nodes(self) -> int:
        return sum(n.count for n in self.nodes)

    @property
    def num_gpus(self) -> int:
        return sum(n.count * n.gpus_per_node for n in self.nodes)


ModelT = TypeVar("ModelT", Job, Cluster)


def load_job(name: str) -> Job:
    """The job of this name in config/jobs, or of this path; its cluster is checked too."""
    path = _find(name, JOBS, "job")
    job = _load(path, Job)
    if job.cluster is not None:
        check_fits(job, load_cluster(job.cluster), where=str(path))
    return job


def load_cluster(name: str) -> Cluster:
    """The cluster of this name in config/clusters, or of this path."""
    return _load(_find(name, CLUSTERS, "cluster"), Cluster)


def check_fits(job: Job, cluster: Cluster, *, where: str) -> None:
    """Refuses a world that the cluster has not enough GPUs for."""
    if job.world_size > cluster.num_gpus:
        nodes = " + ".join(f"{n.count} × {n.gpus_per_node}" for n in cluster.nodes)
        raise UserError(
            f"The cluster is too small for the world: {job.world_size} ranks, "
            f"{nodes} = {cluster.num_gpus} GPUs",
            where=f"File {where}, keys world_size and cluster",
            do=f"Name a cluster with at least {job.world_size} GPUs, or shrink the world",
        )
    most = max(n.gpus_per_node for n in cluster.nodes)
    if job.ranks_per_node > most:
        raise UserError(
            f"More ranks per node than the cluster's nodes have GPUs: "
            f"{job.ranks_per_node} ranks, {most} GPUs",
            where=f"File {where}, key ranks_per_node",
            do=f"Use at most {most}",
        )


def _find(name: str, folder: Path, what: str) -> Path:
    direct = Path(name)
    if direct.suffix in (".yaml", ".yml"):
        if direct.is_file():
            return direct
        known = []
    else:
        path = folder / f"{name}.yaml"
        if path.exists():
            return path
        known = sorted(p.stem for p in folder.glob("*.yaml"))
    raise UserError(
        f"There is no {what} {name}{_suggest(name, known)}",
        where=f"Folder {(direct.parent if direct.suffix else folder).resolve()}",
        do=f"Known {what}s: {', '.join(known)}" if known else f"Pass the path of a {what} file",
    )


def _load(path: Path, model: type[ModelT]) -> ModelT:
    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            "A configuration file is no YAML",
            where=f"File {path}: {str(error).splitlines()[0]}",
            do="Mend the syntax",
        ) from error
    if not isinstance(data, dict):
        raise UserError(
            "A configuration file must hold keys and values",
            where=f"File {path}: {type(data).__name__}",
            do=f"Start from one in {JOBS} or {CLUSTERS}",
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(error, path, model) from None


def _explain(error: ValidationError, path: Path, model: type[BaseModel]) -> UserError:
    problems = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
        value = item.get("input")
        if item["type"] == "extra_forbidden":
            fields = list(_fields_at(model, item["loc"][:-1]))
            name = str(item["loc"][-1])
            problems.append(
                f"unknown key {key} (value {value!r}){_suggest(name, fields)}; legal keys are "
                f"{', '.join(fields)}"
            )
        elif item["type"] == "missing":
            problems.append(f"key {key} is missing")
        elif item["type"] == "value_error":
            name = f"key {key}: " if item["loc"] else "keys parallelism and world_size: "
            what = str(item["ctx"]["error"])
            problems.append(what if model is not Job and not item["loc"] else name + what)
        else:
            problems.append(f"key {key}: value {value!r}: {item['msg']}")
    return UserError(
        f"The configuration is wrong: {'; '.join(problems)}",
        where=f"File {path}",
        do=f"Mend it; the schema is config/schema/{model.__name__.lower()}.schema.json",
    )


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the model that lies at `location` below `model`."""
    current: Any = model
    for part in location:
        if isinstance(part, int) or not hasattr(current, "model_fields"):
            continue
        found = current.model_fields.get(part)
        current = _model_in(found.annotation) if found is not None else current
    return list(getattr(current, "model_fields", {}))


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _model_in(inner)) is not None:
            return found
    return None


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _some(numbers: list[int]) -> str:
    shown = [str(n) for n in numbers[:12]]
    return ", ".join(shown) + (", …" if len(numbers) > len(shown) else "")


# --- generated files ---------------------------------------------------------

# NVIDIA H200 SXM: 141 GB HBM3e; dense peaks from NVIDIA's H200 datasheet, which
# gives them with sparsity for the tensor cores (halved here). NVLink 4: 900 GB/s
# both ways together, so 450 GB/s one way; one 400 Gb/s adapter per GPU.
H200 = Gpu(
    model="NVIDIA H200",
    memory_bytes=141_000_000_000,
    peak_flops={
        "fp64": 34e12,
        "fp32": 67e12,
        "tf32": 494.5e12,
        "bf16": 989.5e12,
        "fp16": 989.5e12,
        "fp8": 1979e12,
    },
)
H200_CLUSTER = Cluster(
    nodes=[Nodes(count=64, gpus_per_node=8, gpu=H200)],
    links={
        "nvlink": Link(scope="node", bandwidth_bytes_per_s=450e9, latency_s=3e-6),
        "network": Link(scope="cluster", bandwidth_bytes_per_s=50e9, latency_s=8e-6),
    },
)
LARGE_H200_CLUSTER = H200_CLUSTER.model_copy(
    update={"nodes": [Nodes(count=1024, gpus_per_node=8, gpu=H200)]}
)

FSDP_TP_JOB = Job(
    program="-m crystalllm.examples.fsdp_tp",
    arguments="--steps {iterations} --tp {tp} --seed {seed}",
    world_size=512,
    ranks_per_node=8,
    iterations=10,
    capture_iterations=3,
    parallelism=Parallelism(tp=8, dp=64),
    cluster="h200-64x8",
)


GPT_JOB = Job(
    program="-m crystalllm.examples.gpt",
    arguments="--tp {tp} --pp {pp} --dp {dp} --layers 8 --hidden 256 --sequence 128 "
    "--micro-batch 1 --num-microbatches 8 --steps {iterations} --seed {seed} --log-ranks all",
    world_size=512,
    ranks_per_node=8,
    iterations=10,
    capture_iterations=3,
    parallelism=Parallelism(tp=4, pp=8, dp=16),
    cluster="h200-64x8",
)


LARGE_GPT_JOB = GPT_JOB.model_copy(
    update={
        "world_size": 8192,
        "parallelism": Parallelism(tp=4, pp=8, dp=256),
        "cluster": "h200-1024x8",
    }
)


def generated_files() -> dict[Path, str]:
    """Every file that is generated from the models, with its content."""
    from crystalllm import tables

    return {
        JOBS / "fsdp-tp-512.yaml": _to_yaml(FSDP_TP_JOB),
        JOBS / "gpt-512.yaml": _to_yaml(GPT_JOB),
        JOBS / "gpt-8192.yaml": _to_yaml(LARGE_GPT_JOB),
        CLUSTERS / "h200-64x8.yaml": _to_yaml(H200_CLUSTER),
        CLUSTERS / "h200-1024x8.yaml": _to_yaml(LARGE_H200_CLUSTER),
        Path("config/schema/job.schema.json"): _schema(Job),
        Path("config/schema/cluster.schema.json"): _schema(Cluster),
        Path("docs/tables.md"): tables.document(),
    }


def _schema(model: type[BaseModel]) -> str:
    return json.dumps(model.model_json_schema(), indent=2) + "\n"


def _to_yaml(model: BaseModel) -> str:
    """The values with each field's description above it."""
    lines = [
        f"# {(type(model).__doc__ or '').strip().splitlines()[0]}",
        "# Generated by python -m crystalllm generate: copy it under another name to change it.",
    ]
    values = model.model_dump(mode="json", exclude_none=True)
    for name, field in type(model).model_fields.items():
        if name not in values:
            continue
        if field.description:
            lines.append(f"# {field.description}")
        text = yaml.safe_dump({name: _plain(values[name])}, sort_keys=False, width=90)
        lines.append(text.rstrip())
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """Whole numbers without a point and an exponent, so that YAML reads them as numbers."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value
