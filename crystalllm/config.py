"""Jobs and clusters as YAML, checked before anything long starts.

The models are the one description: default files and JSON Schemas are
generated from them (`generated`).
"""

from __future__ import annotations

import ast
import difflib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from crystalllm.errors import UserError
from crystalllm.identity import Identity

Positive = Annotated[int, Field(gt=0, strict=True)]
PositiveNumber = Annotated[float, Field(gt=0)]

# Bool comes first: true is no number.
Parameter = (
    Annotated[bool, Field(strict=True)]
    | Annotated[int, Field(strict=True)]
    | Annotated[float, Field(strict=True)]
    | Annotated[str, Field(strict=True)]
)
ParameterName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]

JOBS = Path("config/jobs")
_SCHEMA_NAMES = {"study": "config"}
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


Amount = (
    Annotated[int, Field(strict=True)]
    | Annotated[float, Field(strict=True)]
    | Annotated[str, Field(strict=True)]
)
# Of a job's values: what decides nothing that a rank does.
ABOUT = frozenset({"cluster", "work"})


class Work(_Model):
    """What an iteration gets through. Numbers, or expressions with a job's sizes and parameters."""

    tokens: Amount = Field(description="tokens of all ranks", examples=["global_batch * 4096"])
    flops: Amount | None = Field(
        None,
        description="floating-point operations of the model for them, recomputation left out, as "
        "for MFU",
        examples=["6 * 70e9 * global_batch * 4096"],
    )


class Job(_Model):
    """A training program and the logical world that it runs in."""

    program: str = Field(
        description="script, relative to the working directory, or '-m' and a module",
        examples=["train.py", "-m crystalllm.examples.fsdp_tp"],
    )
    arguments: str = Field(
        "",
        description="the program's arguments, split as a shell would; {iterations}, {seed}, the "
        "parallel sizes ({tp}, {pp}, …) and parameters are replaced, {{ and }} stand for braces",
    )
    parameters: dict[ParameterName, Parameter] = Field(
        default_factory=dict,
        description="values for arguments, by which sweeps can vary them; true stands for the "
        "flag of that name (offload_optimizer: --offload-optimizer), false for nothing",
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
    work: Work | None = Field(
        None, description="tokens and operations of an iteration, for tokens per second and MFU"
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
                f"keys parallelism and world_size: {p.factors} = {p.product} ranks, but world_size "
                f"is {self.world_size}; {hint}"
            )
        taken = sorted(set(self.parameters) & set(self._own_values(1)))
        if taken:
            raise ValueError(
                f"parameters {', '.join(taken)} have a meaning already; use other names"
            )
        self.command()  # an unknown placeholder is an error here, not in the middle of a stage
        self.amounts()
        return self

    def command(self, *, iterations: int | None = None) -> tuple[str, ...]:
        """The program and its arguments for so many iterations."""
        values: dict[str, Any] = {
            **self._own_values(iterations if iterations is not None else self.iterations),
            **{name: _as_argument(name, value) for name, value in self.parameters.items()},
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

    def resolved(self) -> Job:
        """The same job with its parameters put into its arguments.

        Two jobs that are equal then run the same, also where one has a parameter more.
        """
        values = {
            name: _as_argument(name, value).replace("{", "{{").replace("}", "}}")
            for name, value in self.parameters.items()
        }
        text = re.sub(
            r"\{\{|\}\}|\{(\w+)\}",
            lambda match: values.get(match[1] or "", match[0]),
            self.arguments,
        )
        arguments = shlex.join(shlex.split(text))
        work = self.work
        if work is not None:
            work = work.model_copy(update=self.amounts())
        update = {"arguments": arguments, "parameters": {}, "work": work}
        return self.model_copy(update=update)

    def amounts(self) -> dict[str, float]:
        """`tokens` and `flops` of an iteration, those that are known.

        Raises:
            ValueError: An expression cannot be evaluated, or gives no positive number.
        """
        if self.work is None:
            return {}
        names = {**self._own_values(self.iterations), **self.parameters}
        found = {}
        for name in ("tokens", "flops"):
            expression = getattr(self.work, name)
            if expression is None:
                continue
            amount = evaluate(str(expression), names)
            if not 0 < float(amount) < float("inf"):
                raise ValueError(f"{name}: {expression} is {amount}; it must be above 0")
            found[name] = float(amount)
        return found

    def _own_values(self, iterations: int) -> dict[str, Any]:
        return {
            "iterations": iterations,
            "seed": self.seed,
            "world_size": self.world_size,
            **(self.parallelism.model_dump(exclude={"order"}) if self.parallelism else {}),
        }

    def identity(self, rank: int) -> Identity:
        return Identity(
            rank=rank,
            world_size=self.world_size,
            ranks_per_node=self.ranks_per_node,
            seed=self.seed,
            environment=self.environment,
        )


def stem(name: str) -> str:
    """The name of a job or sweep that is given by name or by file; it may have dots."""
    return Path(name).name.removesuffix(".yaml").removesuffix(".yml")


# What an expression may consist of: no calls, no attributes, no bits.
_IN_EXPRESSIONS = (
    *(ast.Expression, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.UnaryOp, ast.USub, ast.UAdd, ast.Not, ast.BoolOp, ast.And, ast.Or),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
)


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """What an expression such as `tp * pp <= 64` is, in Python's arithmetic.

    Raises:
        ValueError: It cannot be evaluated.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        for node in ast.walk(tree):
            if not isinstance(node, _IN_EXPRESSIONS):
                raise SyntaxError(f"{type(node).__name__} has no place here")
        return eval(compile(tree, "<expression>", "eval"), {"__builtins__": {}}, dict(names))
    except (SyntaxError, NameError, ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(
            f"{expression} cannot be evaluated ({type(error).__name__}: {error}); write such as "
            f"tp * pp, with {', '.join(names)}"
        ) from error


def _as_argument(name: str, value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return f"--{name.replace('_', '-')}" if value else ""
    return str(value)


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
    bandwidth_bytes_per_s: PositiveNumber = Field(description="bytes per second at line rate")
    latency_s: Annotated[float, Field(ge=0)] = Field(
        description="time that a few bytes take from one GPU to the next"
    )
    efficiency: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the line rate that the payload of large transfers reaches"
    )
    reduces_in_switch: bool = Field(
        False,
        description="its switches add up and multicast (NVLS: NVSwitch from the third generation "
        "on); read for links of scope node",
    )


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

    def link(self, scope: Literal["node", "cluster"]) -> tuple[str, Link] | None:
        """Name and class of the fastest link of a scope; None if there is none."""
        found = [(name, link) for name, link in self.links.items() if link.scope == scope]
        return max(found, key=lambda f: f[1].bandwidth_bytes_per_s * f[1].efficiency, default=None)

    @property
    def num_gpus(self) -> int:
        return sum(n.count * n.gpus_per_node for n in self.nodes)


ModelT = TypeVar("ModelT", bound=BaseModel)


def load_job(name: str) -> Job:
    """The job of this name in config/jobs, or of this path; its cluster is checked too."""
    path = find(name, JOBS, "job")
    job = load(path, Job)
    if job.cluster is not None:
        check_fits(job, load_cluster(job.cluster), where=str(path))
    return job


def load_cluster(name: str) -> Cluster:
    """The cluster of this name in config/clusters, or of this path."""
    return load(find(name, CLUSTERS, "cluster"), Cluster)


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


def find(name: str, folder: Path, what: str) -> Path:
    """The file of this name in a folder, or of this path.

    Raises:
        UserError: Names those that there are.
    """
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


def load(path: Path, model: type[ModelT]) -> ModelT:
    """What a YAML file says.

    Raises:
        UserError: Names the file, the key, the value and what would be legal.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(
            f"A configuration file cannot be read: {error.strerror}",
            where=f"File {path}, from folder {Path.cwd()}",
            do="Run from the folder that holds it, or pass its path",
        ) from error
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
    return parse(data, model, path)


def parse(data: Mapping[str, Any], model: type[ModelT], path: Path) -> ModelT:
    """What the keys and values of a file say; raises as `load`."""
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
            what = str(item["ctx"]["error"])
            problems.append(f"key {key}: {what}" if item["loc"] else what)
        else:
            problems.append(f"key {key}: value {value!r}: {item['msg']}")
    name = model.__name__.lower()
    return UserError(
        f"The configuration is wrong: {'; '.join(problems)}",
        where=f"File {path}",
        do=f"Mend it; the schema is config/schema/{_SCHEMA_NAMES.get(name, name)}.schema.json",
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
