"""A first job file for somebody's own training script, from what starts it today.

A torchrun line says the script, its arguments and the world. Arguments that are known to
say how many iterations there are, the seed, or the size of a parallel axis become
placeholders, so that stages run as many iterations as they need, and sweeps can vary sizes.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crystalllm import artifacts
from crystalllm.config import CLUSTERS, JOBS, Cluster, Job, Parallelism, check_fits, load
from crystalllm.errors import UserError
from crystalllm.generated import to_yaml
from crystalllm.run import Program

_DEFAULT_WORLD = 8
_DEFAULT_PER_NODE = 8
_ITERATIONS = 10
_CAPTURED = 4

# Options of training programs, without dashes and with "-" for "_": what they say. Those of
# Megatron-LM (megatron/training/arguments.py), torchtitan, Lightning, and what else is common.
_ITERATION_OPTIONS = (
    "steps", "max-steps", "num-steps", "train-steps", "total-steps", "training.steps",
    "iterations", "iters", "max-iters", "num-iters", "num-iterations", "train-iters",
)  # fmt: skip
_SEED_OPTIONS = ("seed", "random-seed", "training.seed", "debug.seed")
_AXIS_OPTIONS = {
    "tp": (
        "tp", "tp-size", "tensor-parallel", "tensor-parallel-size", "tensor-model-parallel-size",
        "parallelism.tensor-parallel-degree",
    ),
    "pp": (
        "pp", "pp-size", "pipeline-parallel", "pipeline-parallel-size",
        "pipeline-model-parallel-size", "parallelism.pipeline-parallel-degree",
    ),
    "cp": (
        "cp", "cp-size", "context-parallel", "context-parallel-size",
        "parallelism.context-parallel-degree",
    ),
    "ep": (
        "ep", "ep-size", "expert-parallel", "expert-parallel-size", "expert-model-parallel-size",
        "parallelism.expert-parallel-degree",
    ),
}  # fmt: skip


@dataclass
class FirstJob:
    """A job, and what is to be said of it.

    Args:
        name: Its name in config/jobs.
        job: What the file says.
        notes: What was guessed, and what has to be looked at; a sentence each.
    """

    name: str
    job: Job
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return JOBS / f"{self.name}.yaml"

    def write(self) -> Path:
        """Writes the file.

        Raises:
            UserError: There is one of that name.
        """
        if self.path.exists():
            raise UserError(
                "There is a job of this name",
                where=f"File {self.path}",
                do="Pass another name (--name), or edit the file that is there",
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = ["Written by python -m crystalllm init. Edit it; docs/guide.md says what follows."]
        text = to_yaml(self.job, [*head, *self.notes])
        artifacts.write_atomically(self.path, text.encode())
        return self.path


@dataclass(frozen=True)
class _Launch:
    """What starts a program."""

    program: str
    arguments: list[str]
    num_nodes: int | None = None
    per_node: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def first_job(
    command: Sequence[str],
    *,
    program: str | None = None,
    name: str | None = None,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
) -> FirstJob:
    """The job that a command line describes.

    Args:
        command: A torchrun line (with variables before it, as a shell takes them), a python line,
            or arguments of `program`.
        program: The script, or "-m module", if the command does not say it.
        name: Of the job; default is that of the script.
        world_size: Logical ranks, instead of what the command says.
        ranks_per_node: Likewise.

    Raises:
        UserError: There is no such program, or the sizes do not fit together.
    """
    launch = _Launch(program, list(command)) if program is not None else _of_command(list(command))
    Program(command=tuple(shlex.split(launch.program)))  # is there
    notes = list(launch.notes)
    per_node = ranks_per_node or launch.per_node or _DEFAULT_PER_NODE
    if world_size is None:
        if launch.num_nodes is None and launch.per_node is None:
            notes.append(f"world_size: nothing says how many ranks there are; {_DEFAULT_WORLD}.")
            world_size = _DEFAULT_WORLD
        else:
            world_size = (launch.num_nodes or 1) * per_node
    per_node = min(per_node, world_size)
    arguments, sizes = _with_placeholders(launch.arguments, notes)
    return FirstJob(
        name=name or _name_of(launch.program),
        job=_job(launch, arguments, sizes, world_size, per_node, notes),
        notes=notes,
    )


def _of_command(command: list[str]) -> _Launch:
    """A launch from what one would type."""
    environment: dict[str, str] = {}
    while command and re.fullmatch(r"[A-Za-z_]\w*=.*", command[0], re.DOTALL):
        key, _, value = command.pop(0).partition("=")
        environment[key] = value
    if not command:
        raise UserError(
            "Nothing says what to run",
            where="Verb init",
            do="Pass --program train.py, or after -- the line that starts it, "
            "such as -- torchrun --nnodes 64 --nproc-per-node 8 train.py --lr 1e-4",
        )
    runner = Path(command[0]).name
    if re.fullmatch(r"python[\d.]*", runner):
        rest = command[1:]
        if rest[:1] == ["-m"] and rest[1:2] in (
            ["torch.distributed.run"],
            ["torch.distributed.launch"],
        ):
            return _of_torchrun(rest[2:], environment)
        return _of_python(rest, environment)
    if runner == "torchrun":
        return _of_torchrun(command[1:], environment)
    if command[0].endswith(".py"):
        return _of_python(command, environment)
    raise UserError(
        "It is not known how this line starts a program",
        where=f"Command {shlex.join(command)}",
        do="Pass a torchrun or python line; of others --program, --world-size and, after --, "
        "the program's arguments",
    )


def _of_python(rest: list[str], environment: dict[str, str]) -> _Launch:
    length = 2 if rest[:1] == ["-m"] else 1
    return _Launch(shlex.join(rest[:length]), rest[length:], environment=environment)


def _of_torchrun(rest: list[str], environment: dict[str, str]) -> _Launch:
    """By torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            found = get_args_parser().parse_args(rest)
    except SystemExit:
        raise UserError(
            "torchrun would refuse this line",
            where=f"Arguments {shlex.join(rest)}",
            do="Mend it: " + (words.getvalue().strip().splitlines() or ["it says nothing"])[-1],
        ) from None
    notes = []
    least, _, nodes = str(found.nnodes).rpartition(":")
    if least not in ("", nodes):
        notes.append(f"world_size: of an elastic number of nodes ({found.nnodes}) the most.")
    num_nodes = int(nodes) if nodes.isdecimal() else 1
    if not nodes.isdecimal():
        notes.append(f"world_size: the number of nodes, {nodes}, is no number; 1.")
    per_node = str(found.nproc_per_node)
    if not per_node.isdecimal():
        notes.append(
            f"ranks_per_node: {per_node} depends on the host; {_DEFAULT_PER_NODE}, as on most."
        )
        per_node = str(_DEFAULT_PER_NODE)
    return _Launch(
        ("-m " if found.module else "") + shlex.quote(found.training_script),
        list(found.training_script_args),
        num_nodes,
        int(per_node),
        environment,
        tuple(notes),
    )


def _with_placeholders(arguments: list[str], notes: list[str]) -> tuple[str, dict[str, int]]:
    """The arguments as a job has them, and the sizes of the axes that they say."""
    meaning = {
        **dict.fromkeys(_ITERATION_OPTIONS, "iterations"),
        **dict.fromkeys(_SEED_OPTIONS, "seed"),
        **{option: axis for axis, options in _AXIS_OPTIONS.items() for option in options},
    }
    found: list[str] = []
    said: dict[str, int] = {}
    at = 0
    while at < len(arguments):
        option, equals, value = arguments[at].partition("=")
        what = meaning.get(option.lstrip("-").replace("_", "-")) if option.startswith("-") else None
        if not equals and at + 1 < len(arguments):
            value = arguments[at + 1]
        if what is not None and value.isdecimal():
            said[what] = int(value)
            found.append(f"{_quoted(option)}={{{what}}}" if equals else _quoted(option))
            if not equals:
                found.append(f"{{{what}}}")
                at += 1
        else:
            found.append(_quoted(arguments[at]))
        at += 1
    if "iterations" not in said:
        notes.append(
            "arguments: none is known to say how many iterations the program runs. Put "
            "{iterations} where it does, or every stage runs as many as the program wants."
        )
    return " ".join(found), said


def _quoted(argument: str) -> str:
    return shlex.quote(argument).replace("{", "{{").replace("}", "}}")


def _job(
    launch: _Launch,
    arguments: str,
    said: dict[str, int],
    world_size: int,
    per_node: int,
    notes: list[str],
) -> Job:
    axes = {axis: said[axis] for axis in _AXIS_OPTIONS if axis in said}
    if not axes:
        notes.append(
            "parallelism: no argument is known to say it. With it (tp, pp, cp, dp, ep) ranks have "
            "coordinates, and sweeps can vary sizes."
        )
    rest = axes.get("tp", 1) * axes.get("pp", 1) * axes.get("cp", 1)
    if world_size % rest:
        raise UserError(
            f"The parallel sizes do not fill the world: {rest} does not divide {world_size}",
            where="Arguments " + ", ".join(f"{axis}={n}" for axis, n in axes.items()),
            do="Pass the world they are meant for (--world-size)",
        )
    job = Job(
        program=launch.program,
        arguments=arguments,
        world_size=world_size,
        ranks_per_node=per_node,
        iterations=_ITERATIONS,
        capture_iterations=_CAPTURED,
        parallelism=Parallelism(**axes, dp=world_size // rest) if axes else None,
        environment=launch.environment,
        seed=said.get("seed", 0),
    )
    known = {path.stem: load(path, Cluster) for path in CLUSTERS.glob("*.yaml")}
    for name in sorted(known, key=lambda name: known[name].num_gpus):
        with contextlib.suppress(UserError):
            check_fits(job, known[name], where=name)
            notes.append(f"cluster: the smallest of {CLUSTERS} that holds {world_size} ranks.")
            return job.model_copy(update={"cluster": name})
    notes.append(f"cluster: none of {CLUSTERS} is large enough; write one (config/README.md).")
    return job


def _name_of(program: str) -> str:
    last = shlex.split(program)[-1]
    stem = Path(last).stem if last.endswith(".py") else last.rpartition(".")[2]
    return re.sub(r"[^a-z0-9-]+", "-", stem.lower()).strip("-") or "job"
