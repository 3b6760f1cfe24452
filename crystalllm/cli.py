"""The command line: parses, calls one library function, prints what it returns."""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from crystalllm import __version__
from crystalllm.errors import UserError

USAGE_ERROR = 2
# Of emulate, by the status in summary.json.
EXIT_CODES = {"ok": 0, "invalid": USAGE_ERROR, "oom": 3, "deviation": 4, "crash": 5}
BENCHES = ("capture", "fidelity", "live", "memory", "overhead", "replay", "run", "transfers")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one verb; ends the process with its exit code."""
    _log_to_stderr()
    arguments, command = _split(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    args = parser.parse_args(arguments)
    if command is not None and args.verb not in ("run", "init"):
        parser.error("only run and init take a program after --")
    try:
        code = args.function(args, command)
    except UserError as error:
        print(f"crystalllm: {error}", file=sys.stderr)
        code = USAGE_ERROR
    sys.exit(code)


def _log_to_stderr() -> None:
    """Our own log; the root logger is the program's to configure."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger = logging.getLogger("crystalllm")
    logger.setLevel(os.environ.get("CRYSTALLLM_LOG", "WARNING").upper())
    logger.addHandler(handler)
    logger.propagate = False


def _split(argv: list[str]) -> tuple[list[str], list[str] | None]:
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m crystalllm",
        description="Study a distributed training job at its intended logical scale.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    run = verbs.add_parser(
        "run",
        allow_abbrev=False,
        help="run a program as one rank of a logical world",
        usage="python -m crystalllm run (--job J | --world-size N) --rank R [options] "
        "[-- program arguments]",
    )
    who = run.add_argument_group("which rank of which world")
    world = who.add_mutually_exclusive_group(required=True)
    world.add_argument("--job", help="a job's name in config/jobs, or its file")
    world.add_argument("--world-size", type=int, help="logical ranks")
    who.add_argument("--rank", type=int, required=True, help="which one to be")
    who.add_argument("--ranks-per-node", type=int, help="of a logical node (default 8)")
    who.add_argument("--iterations", type=_from(1), help="instead of the job's")
    who.add_argument("--seed", type=int, help="of everything that is invented (default 0)")
    run.add_argument("--book", type=Path, help="payload book: what other ranks really send")
    run.add_argument(
        "--strict", action="store_true", help="refuse control values that are not in the book"
    )
    run.add_argument("--record", type=Path, metavar="FILE", help="write every call (Parquet)")
    run.add_argument("--summary", type=Path, metavar="FILE", help="write what happened (JSON)")
    run.add_argument(
        "--transfer-us", type=float, default=0.0, help="how long each call takes (default 0)"
    )
    run.add_argument(
        "--logical-local-rank",
        action="store_true",
        help="keep LOCAL_RANK also where it names no CUDA device that exists",
    )
    run.set_defaults(function=_run)

    init = verbs.add_parser(
        "init",
        allow_abbrev=False,
        help="write a first job file for a program",
        usage="python -m crystalllm init [options] (--program P [-- arguments] | -- torchrun …)",
    )
    init.add_argument("--program", help="script, or '-m' and a module")
    init.add_argument("--name", help="of the job (default: the script's)")
    init.add_argument("--world-size", type=_from(1), help="logical ranks")
    init.add_argument("--ranks-per-node", type=_from(1), help="of a logical node (default 8)")
    init.set_defaults(function=_init)

    capture = verbs.add_parser(
        "capture", allow_abbrev=False, help="run logical ranks and keep what they communicate"
    )
    capture.add_argument("--job", required=True, help="a job's name in config/jobs, or its file")
    capture.add_argument(
        "--strategy",
        choices=["all", "roles"],
        help="run every rank, or a few and infer the others (default: roles above 64 ranks)",
    )
    capture.add_argument("--ranks", help="only these, such as 0,5,8-11")
    capture.add_argument("--shard", metavar="I/N", help="only every N-th rank: a piece for merge")
    capture.add_argument(
        "--check",
        type=_from(0),
        default=16,
        help="inferred ranks to run for comparison (default 16)",
    )
    capture.add_argument(
        "--eager-bytes",
        type=_from(0),
        default=0,
        help="messages up to this size need no receiver to be ready (default 0)",
    )
    capture.add_argument("--out", type=Path, help="folder (default results/<job>/capture)")
    capture.add_argument("--memory", action="store_true", help="keep every allocation as an event")
    capture.add_argument("--iterations", type=_from(1), help="instead of the job's")
    capture.add_argument(
        "--parallel", type=_from(1), help="ranks at a time (default: one per core)"
    )
    capture.add_argument("--limit", type=float, default=600.0, help="seconds for one rank")
    capture.set_defaults(function=_capture)

    imports = verbs.add_parser(
        "import", allow_abbrev=False, help="make a captured baseline of a real run's Kineto traces"
    )
    imports.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="one per rank")
    imports.add_argument("--out", type=Path, required=True, help="folder")
    imports.add_argument("--world-size", type=int, help="where no trace says it")
    imports.set_defaults(function=_import)

    export = verbs.add_parser(
        "export", allow_abbrev=False, help="write Chakra execution traces of captured ranks"
    )
    export.add_argument("capture", type=Path, help="folder that capture or import wrote")
    export.add_argument("--out", type=Path, required=True, help="folder")
    export.set_defaults(function=_export)

    merge = verbs.add_parser("merge", allow_abbrev=False, help="join the pieces of a capture")
    merge.add_argument("pieces", type=Path, nargs="+", help="folders of capture --shard")
    merge.add_argument("--job", required=True, help="a job's name in config/jobs, or its file")
    merge.add_argument("--out", type=Path, help="folder (default results/<job>/capture)")
    merge.add_argument("--eager-bytes", type=_from(0), default=0, help="as for capture")
    merge.set_defaults(function=_merge)

    replay = verbs.add_parser(
        "replay", allow_abbrev=False, help="when every call of a captured world starts and ends"
    )
    replay.add_argument("folder", type=Path, help="results/<job>, or its capture folder")
    replay.add_argument("--out", type=Path, help="folder (default results/<job>/replay)")
    replay.add_argument(
        "--durations", type=Path, help="duration table (default: computation as captured)"
    )
    replay.add_argument(
        "--latency-us", type=float, help="of every transfer, without a duration table"
    )
    replay.add_argument(
        "--bandwidth-gb-s", type=float, help="of every transfer, without a duration table"
    )
    replay.add_argument("--iterations", type=_from(1), default=10, help="bodies (default 10)")
    replay.add_argument("--ranks", default="", help="whose calls to keep, such as 0,5,8-11")
    replay.add_argument("--what-if", type=Path, help="YAML file (docs/replay.md)")
    replay.add_argument("--draw", action="store_true", help="draw durations, no medians")
    replay.add_argument(
        "--share-links",
        action="store_true",
        help="modelled transfers of a rank that overlap share its bandwidth",
    )
    replay.add_argument(
        "--one-connection",
        action="store_true",
        help="the program sets CUDA_DEVICE_MAX_CONNECTIONS=1",
    )
    replay.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    replay.add_argument("--eager-bytes", type=_from(0), default=0, help="as for capture")
    replay.set_defaults(function=_replay)

    planning = verbs.add_parser(
        "planning", allow_abbrev=False, help="measure what ranks of every role take"
    )
    planning.add_argument("--job", required=True, help="a job's name in config/jobs, or its file")
    planning.add_argument(
        "--explain", action="store_true", help="say what would run and for how long; run nothing"
    )
    planning.add_argument("--json", action="store_true", help="with --explain, for programs")
    planning.add_argument(
        "--iterations", type=_from(1), default=10, help="measured in each slice (default 10)"
    )
    planning.add_argument(
        "--warm-up", type=_from(0), default=2, help="iterations before them (default 2)"
    )
    planning.add_argument("--passes", type=_from(1), default=3, help="at most (default 3)")
    planning.add_argument(
        "--tolerance",
        type=_positive,
        default=0.02,
        help="the last pass moves the iteration time by less (default 0.02)",
    )
    planning.add_argument("--cluster", help="whose transfers are modelled (default: the job's)")
    planning.add_argument(
        "--nccl-tests",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="output of nccl-tests: transfer times that come before the model's",
    )
    planning.add_argument(
        "--sandbox",
        action="append",
        default=[],
        metavar="WISH",
        help="ranks that run together: node, axes such as tp or tp+cp, ranks such as 0,5,8-11, "
        "or coordinates such as pp=5,tp=0",
    )
    planning.add_argument(
        "--measure-gloo",
        action="store_true",
        help="measure transfers between real gloo processes of this host, which is the target then",
    )
    planning.add_argument("--ranks-per-role", type=_from(1), default=1, help="that run (default 1)")
    planning.add_argument("--cores", help="that may be used, such as 0-3 (default: all)")
    planning.add_argument("--seed", type=_from(0), default=0, help="of what is invented")
    planning.add_argument("--share-links", action="store_true", help="as for replay")
    planning.add_argument("--eager-bytes", type=_from(0), default=0, help="as for capture")
    planning.add_argument(
        "--capture", type=Path, help="folder that capture wrote (default results/<job>/capture)"
    )
    planning.add_argument("--out", type=Path, help="folder (default results/<job>/planning)")
    planning.set_defaults(function=_planning)

    emulate = verbs.add_parser(
        "emulate", allow_abbrev=False, help="run ranks of interest against the replayed rest"
    )
    emulate.add_argument("--job", required=True, help="a job's name in config/jobs, or its file")
    emulate.add_argument(
        "--ranks", required=True, help='such as 0,137 or "pp=5,tp=0" (all that are there)'
    )
    emulate.add_argument("--iterations", type=_from(1), help="that count (default: the job's)")
    emulate.add_argument(
        "--warm-up", type=_from(0), default=2, help="iterations before them (default 2)"
    )
    emulate.add_argument("--out", type=Path, help="folder (default results/<job>/emulate)")
    emulate.add_argument(
        "--capture", type=Path, help="folder that capture wrote (default results/<job>/capture)"
    )
    emulate.add_argument(
        "--durations", type=Path, help="(default results/<job>/planning/profile.parquet)"
    )
    emulate.add_argument(
        "--slowness",
        type=_positive,
        default=1.0,
        help="the others compute so many times as long as planned (default 1)",
    )
    emulate.add_argument(
        "--follow-speed",
        action="store_true",
        help="the others compute as slowly as the ranks of interest do on this host, now",
    )
    emulate.add_argument(
        "--cluster", help="whose transfers count (default: those of the durations)"
    )
    emulate.add_argument("--seed", type=_from(0), default=0, help="of what is drawn or invented")
    emulate.add_argument("--draw", action="store_true", help="draw durations, no medians")
    emulate.add_argument("--what-if", type=Path, help="YAML file (docs/replay.md)")
    emulate.add_argument("--share-links", action="store_true", help="as for replay")
    emulate.add_argument("--eager-bytes", type=_from(0), default=0, help="as for capture")
    emulate.add_argument(
        "--memory-limit", type=_bytes, metavar="SIZE", help="more is out of memory, such as 80GiB"
    )
    emulate.add_argument(
        "--no-memory",
        action="store_true",
        help="keep no account of memory, which takes time from the program",
    )
    emulate.add_argument(
        "--profile", action="store_true", help="write a Kineto trace; times are not valid then"
    )
    emulate.add_argument(
        "--untimed", action="store_true", help="no deadlines, on this terminal: for debuggers"
    )
    emulate.add_argument(
        "--changed", action="store_true", help="run a program that is not the captured one"
    )
    emulate.add_argument("--no-pin", action="store_true", help="leave cores to the system")
    emulate.add_argument(
        "--limit", type=float, default=3600.0, help="seconds for the run (default 3600)"
    )
    emulate.set_defaults(function=_emulate)

    anomalies = verbs.add_parser(
        "anomalies", allow_abbrev=False, help="what in a run deviates from its baseline"
    )
    anomalies.add_argument("run", type=Path, help="results/<job>, or the folder of a run")
    anomalies.add_argument(
        "--baseline",
        type=Path,
        help="profile.parquet, or a folder of imported traces (default: planning beside the run)",
    )
    anomalies.add_argument(
        "--capture", type=Path, help="to replay the world with (default: beside the run)"
    )
    anomalies.add_argument(
        "--durations", type=Path, help="to replay the world with (default: the profile)"
    )
    anomalies.add_argument(
        "--warm-up", type=_from(0), help="iterations to leave out (default: the run's)"
    )
    anomalies.add_argument(
        "--least",
        type=_percent,
        default=5.0,
        metavar="PERCENT",
        help="smaller deviations of an op are left out (default 5)",
    )
    anomalies.add_argument("--out", type=Path, help="folder (default: the run's)")
    anomalies.add_argument("--json", action="store_true", help="for programs")
    anomalies.add_argument("--limit", type=int, help="rows of each table, as for inspect")
    anomalies.set_defaults(function=_anomalies)

    report = verbs.add_parser("report", allow_abbrev=False, help="pictures and tables of a run")
    report.add_argument("run", type=Path, help="results/<job>, or the folder of a run")
    report.add_argument(
        "--capture", type=Path, help="folder that capture wrote (default: beside the run)"
    )
    report.add_argument("--cluster", help="whose devices' memory is the capacity")
    report.add_argument("--out", type=Path, help="folder (default results/<job>/report/<run>)")
    report.set_defaults(function=_report)

    compare = verbs.add_parser("compare", allow_abbrev=False, help="compare two runs")
    compare.add_argument("a", type=Path, help="results/<job>, or the folder of a run")
    compare.add_argument("b", type=Path, help="another one")
    compare.add_argument(
        "--force", action="store_true", help="runs of different structure, as far as they align"
    )
    compare.add_argument(
        "--between",
        type=_percent,
        metavar="PERCENT",
        help="standard deviation of equal runs' iteration times, for the intervals",
    )
    compare.add_argument(
        "--warm-up", type=_from(0), help="iterations to leave out (default: each run's)"
    )
    compare.add_argument("--json", action="store_true", help="for programs")
    compare.add_argument("--limit", type=int, help="rows of each table, as for inspect")
    compare.set_defaults(function=_compare)

    fits = verbs.add_parser(
        "fits", allow_abbrev=False, help="say whether every role of a job has enough memory"
    )
    fits.add_argument("--job", required=True, help="a job's name in config/jobs, or its file")
    fits.add_argument(
        "--memory", type=_bytes, required=True, metavar="SIZE", help="of each rank, such as 80GiB"
    )
    fits.add_argument(
        "--capture", type=Path, help="folder that capture wrote (default results/<job>/capture)"
    )
    fits.add_argument("--out", type=Path, help="folder (default results/<job>/fits)")
    fits.add_argument("--changed", action="store_true", help="as for emulate")
    fits.set_defaults(function=_fits)

    inspect = verbs.add_parser(
        "inspect", allow_abbrev=False, help="show what a capture or a calls file holds"
    )
    inspect.add_argument("path", type=Path, help="results/<job>, its capture folder, or a file")
    whom = inspect.add_mutually_exclusive_group()
    whom.add_argument("--rank", type=int, help="show the calls of this rank")
    whom.add_argument("--coord", metavar="pp=5,tp=0", help="show those of the rank here")
    inspect.add_argument("--summary", action="store_true", help="roles and what is unchecked only")
    inspect.add_argument(
        "--limit", type=int, help="rows of each table, 0 for all (default: 50 on a terminal)"
    )
    inspect.set_defaults(function=_inspect)

    pack = verbs.add_parser("pack", allow_abbrev=False, help="one file of a job, to send")
    pack.add_argument("folder", type=Path, help="results/<job>, or its capture folder")
    pack.add_argument("--out", type=Path, required=True, metavar="FILE")
    pack.set_defaults(function=_pack)

    unpack = verbs.add_parser("unpack", allow_abbrev=False, help="check and unpack such a file")
    unpack.add_argument("file", type=Path)
    unpack.add_argument("--out", type=Path, required=True, metavar="DIR")
    unpack.add_argument(
        "--trust", action="store_true", help="take payloads that could run code, after a review"
    )
    unpack.add_argument(
        "--limit-gib", type=float, default=64.0, help="refuse more, unpacked (default 64)"
    )
    unpack.set_defaults(function=_unpack)

    calls = verbs.add_parser("calls", help="show the calls that run --record wrote")
    calls.add_argument("file", type=Path)
    calls.set_defaults(function=_calls)

    doctor = verbs.add_parser("doctor", help="say what this machine has and lacks")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument("--bundle", type=Path, metavar="FILE", help="write what an issue asks for")
    doctor.add_argument("--of", type=Path, metavar="DIR", help="with it: results/<job>, its runs")
    doctor.set_defaults(function=_doctor)

    build = verbs.add_parser("build", help="build the native extension")
    build.set_defaults(function=_build)

    generate = verbs.add_parser("generate", help="write the files that follow from the models")
    generate.set_defaults(function=_generate)

    bench = verbs.add_parser("bench", help="measure; the last line is one JSON object")
    bench.add_argument("name", choices=BENCHES)
    fidelity = bench.add_argument_group("of fidelity")
    fidelity.add_argument("--device", choices=["cpu"], help="where (default cpu)")
    fidelity.add_argument("--cases", nargs="+", help="such as ddp fsdp2 (default: all)")
    fidelity.add_argument("--max-pairs", type=_from(2), help="per case (default 60)")
    bench.set_defaults(function=_bench)
    return parser


def _from(least: int) -> Callable[[str], int]:
    """A whole number of at least `least`, as an argument's type."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    number.__name__ = "whole number"
    return number


def _percent(text: str) -> float:
    """A percentage of at least 0, as an argument's type."""
    value = float(text.removesuffix("%"))
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no percentage")
    return value


def _bytes(text: str) -> int:
    """Bytes from such as 80GiB, 512MiB or 1000000, as an argument's type."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(k|[KMG]i|[MG]|)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no size; write such as 80GiB")
    return round(float(match[1]) * _UNITS[match[2]])


def _positive(text: str) -> float:
    """A number above 0, as an argument's type."""
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _run(args: argparse.Namespace, command: list[str] | None) -> int:
    from crystalllm.config import load_job
    from crystalllm.identity import Identity
    from crystalllm.payload import PayloadBook
    from crystalllm.run import Program, run

    if args.transfer_us < 0:
        raise UserError(
            "A transfer cannot take less than no time",
            where=f"--transfer-us {args.transfer_us:g}",
            do="Pass 0 or more microseconds",
        )
    if args.job is not None:
        job = load_job(args.job)
        changes = {
            k: v
            for k, v in {"ranks_per_node": args.ranks_per_node, "seed": args.seed}.items()
            if v is not None
        }
        job = job.model_copy(update=changes)
        identity = job.identity(args.rank)
        program = Program(command=tuple(command or job.command(iterations=args.iterations)))
        iterations = args.iterations or job.iterations
    else:
        if args.iterations is not None:
            raise UserError(
                "--iterations needs a job, whose argument template says what it means",
                where="Command line",
                do="Pass --job, or put the number among the program's own arguments",
            )
        identity = Identity(
            rank=args.rank,
            world_size=args.world_size,
            ranks_per_node=args.ranks_per_node or 8,
            seed=args.seed or 0,
        )
        program = Program(command=tuple(command or ()))
        iterations = None
    book = PayloadBook.load(args.book) if args.book is not None else None
    extra = book.extra_periods(iterations) if book is not None and iterations else 0
    return run(
        program,
        identity,
        book=book,
        extra_periods=extra,
        strict=args.strict,
        record=args.record,
        summary=args.summary,
        transfer_ns=round(args.transfer_us * 1000),
        logical_local_rank=args.logical_local_rank,
    )


def _init(args: argparse.Namespace, command: list[str] | None) -> int:
    from crystalllm.first_job import first_job

    made = first_job(
        command or [],
        program=args.program,
        name=args.name,
        world_size=args.world_size,
        ranks_per_node=args.ranks_per_node,
    )
    path = made.write()
    print(f"{path}: {made.job.world_size} ranks of {made.job.program}")
    for note in made.notes:
        print(f"- {note}")
    print("Then:")
    print(f"  python -m crystalllm run --job {made.name} --rank 0      # one rank, nothing timed")
    print(f"  snakemake --cores all --config 'jobs=[{made.name}]'       # all stages, the table")
    return 0


def _capture(args: argparse.Namespace, _: object) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from crystalllm.capture import capture
    from crystalllm.chosen import numbers
    from crystalllm.config import load_job

    job = load_job(args.job)
    name = Path(args.job).stem
    out = args.out or Path("results") / name / "capture"
    ranks = None if args.ranks is None else numbers(args.ranks, option=f"--ranks {args.ranks}")
    shard = None if args.shard is None else _shard(args.shard)
    console = Console(stderr=True)
    columns = (TextColumn("captured"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("capture")

        said_at = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal said_at
            bar.update(task, completed=done, total=total)
            # A log wants a line per rank of a small world, and of a large one now and then.
            is_due = total <= 20 or done == total or time.monotonic() > said_at + 5
            if not console.is_terminal and is_due:
                print(f"captured {done} of {total} ranks", file=sys.stderr, flush=True)
                said_at = time.monotonic()

        found = capture(
            job,
            out,
            strategy=args.strategy,
            ranks=ranks,
            shard=shard,
            iterations=args.iterations,
            num_checks=args.check,
            eager_bytes=args.eager_bytes,
            keep_memory=args.memory,
            parallel=args.parallel,
            limit_s=args.limit,
            progress=progress,
        )
    if shard is not None:
        print(f"shard {args.shard}: {len(found['ranks'])} ranks captured; piece in {out}")
    else:
        _say_what_was_captured(found, out)
    return 0


def _merge(args: argparse.Namespace, _: object) -> int:
    from crystalllm.capture import merge
    from crystalllm.config import load_job

    job = load_job(args.job)
    out = args.out or Path("results") / Path(args.job).stem / "capture"
    _say_what_was_captured(merge(job, args.pieces, out, eager_bytes=args.eager_bytes), out)
    return 0


def _say_what_was_captured(found: dict[str, Any], out: Path) -> None:
    print(
        f"{found['num_captured']} of {found['world_size']} ranks captured, {found['num_roles']} "
        f"roles; calls repeat every {found['period']} marks after {found['prologue_marks']}; "
        f"{found['num_payloads']} control values"
    )
    if found["num_inferred"]:
        wrong = len(found["inferred_wrongly"])
        print(
            f"{found['num_sampled']} of {found['num_inferred']} inferred ranks were run to check: "
            f"{wrong or 'none'} inferred wrongly. The chance that 1, 10 or 100 odd ranks stay "
            "unseen by this sample is "
            + ", ".join(f"{c:.0%}" for c in found["chance_unseen"].values())
            + "; the calls of all ranks were matched besides"
        )
    print(f"results in {out}")


def _shard(text: str) -> tuple[int, int]:
    """(i, n) from "i/n"."""
    i, _, n = text.partition("/")
    try:
        return int(i), int(n)
    except ValueError:
        raise UserError(
            f"{text!r} is no shard", where=f"--shard {text}", do="Write such as 0/4"
        ) from None


def _import(args: argparse.Namespace, _: object) -> int:
    from crystalllm.traces.kineto import import_traces

    structure = import_traces(args.traces, args.out, world_size=args.world_size)
    left_out = sum(structure["calls_left_out"].values())
    print(
        f"{structure['num_captured']} of {structure['world_size']} ranks imported, "
        f"{structure['num_distinct']} of them different; {left_out} calls left out that not all "
        f"profiles saw; results in {args.out}"
    )
    return 0


def _export(args: argparse.Namespace, _: object) -> int:
    from crystalllm.traces.chakra import export

    paths = export(args.capture, args.out)
    print(f"{len(paths)} execution traces in {args.out}")
    return 0


def _calls(args: argparse.Namespace, _: object) -> int:
    from crystalllm.show import show_calls

    show_calls(args.file)
    return 0


def _replay(args: argparse.Namespace, _: object) -> int:
    from crystalllm import artifacts
    from crystalllm.chosen import numbers
    from crystalllm.replay import program
    from crystalllm.replay.durations import DurationTable
    from crystalllm.replay.offline import replay
    from crystalllm.transfers.uniform import uniform_transfers

    folder = artifacts.capture_folder(args.folder)
    capture = program.Capture.read(folder)
    if args.durations is not None:
        durations = DurationTable.load(args.durations)
    elif not args.latency_us or not args.bandwidth_gb_s:
        raise UserError(
            "How long transfers take is not known",
            where="Options --durations, --latency-us and --bandwidth-gb-s",
            do="Pass a duration table, or one latency and one bandwidth for a first look",
        )
    else:
        durations = capture.captured_durations()
        durations.transfers = uniform_transfers(
            capture.calls,
            latency_ns=args.latency_us * 1e3,
            bytes_per_s=args.bandwidth_gb_s * 1e9,
        )
    out = args.out or folder.parent / "replay"
    found = replay(
        capture,
        out,
        durations,
        iterations=args.iterations,
        ranks=numbers(args.ranks, option=f"--ranks {args.ranks}") if args.ranks else (),
        what_ifs=args.what_if,
        draw=args.draw,
        seed=args.seed,
        eager_bytes=args.eager_bytes,
        share_links=args.share_links,
        one_connection=args.one_connection,
    )
    shares = ", ".join(
        f"{name} {found[f'{name}_share']:.1%}"
        for name in ("compute", "exposed", "wait", "bubble", "host")
    )
    print(
        f"{found['num_ranks']} ranks, the last of {args.iterations} iterations takes "
        f"{found['iteration_ns'] / 1e6:.3f} ms: {shares}; results in {out}"
    )
    return 0


def _planning(args: argparse.Namespace, _: object) -> int:
    from crystalllm import planning
    from crystalllm.chosen import numbers
    from crystalllm.config import load_job
    from crystalllm.cores import separate
    from crystalllm.planning.show import show_explanation, show_summary

    job = load_job(args.job)
    results = Path("results") / Path(args.job).stem
    out = args.out or results / "planning"
    cores = args.cores and numbers(args.cores, option=f"--cores {args.cores}", what="core")
    request: dict[str, Any] = {
        "capture": args.capture or results / "capture",
        "transfers": planning.transfers_from(
            job,
            cluster=args.cluster,
            files=args.nccl_tests,
            measured=out / "measured_transfers.parquet" if args.measure_gloo else None,
            measure_on=() if args.explain else cores or separate(),
            later=args.measure_gloo and args.explain,
        ),
        "options": planning.Options(
            iterations=args.iterations,
            warm_up=args.warm_up,
            max_passes=args.passes,
            tolerance=args.tolerance,
            ranks_per_role=args.ranks_per_role,
            wishes=tuple(args.sandbox),
            seed=args.seed,
            eager_bytes=args.eager_bytes,
            share_links=args.share_links,
        ),
        "cores": cores,
    }
    if args.explain:
        show_explanation(planning.explain(job, out, **request), as_json=args.json)
        return 0
    try:
        found = planning.planning(
            job, out, **request, say=lambda line: print(line, file=sys.stderr, flush=True)
        )
    except KeyboardInterrupt:
        print(
            "crystalllm: interrupted; finished slices are kept, and the same command goes on",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    show_summary(found, out)
    return 0


def _emulate(args: argparse.Namespace, _: object) -> int:
    from crystalllm.config import load_job
    from crystalllm.emulate import PROFILE, emulate
    from crystalllm.sandbox.show import show_summary

    job = load_job(args.job)
    results = Path("results") / Path(args.job).stem
    out = args.out or results / "emulate"
    found = emulate(
        job,
        out,
        ranks=args.ranks,
        captured=args.capture or results,
        durations=args.durations or results / "planning" / PROFILE,
        iterations=args.iterations,
        warm_up=args.warm_up,
        pin=not args.no_pin,
        slowness=args.slowness,
        follows_speed=args.follow_speed,
        cluster=args.cluster,
        seed=args.seed,
        draw=args.draw,
        what_ifs=args.what_if,
        share_links=args.share_links,
        eager_bytes=args.eager_bytes,
        memory=not args.no_memory,
        memory_limit_bytes=args.memory_limit,
        profile=args.profile,
        timed=not args.untimed,
        on_terminal=args.untimed,
        changed=args.changed,
        limit_s=args.limit,
    )
    show_summary(found, out)
    return EXIT_CODES[found["status"]]


def _anomalies(args: argparse.Namespace, _: object) -> int:
    import json

    from crystalllm.compare.anomalies import find
    from crystalllm.compare.findings import Limits
    from crystalllm.compare.runs import run_folder
    from crystalllm.compare.show import show_anomalies

    found = find(
        args.run,
        args.baseline,
        capture=args.capture,
        durations=args.durations,
        limits=Limits(min_ratio=args.least / 100),
        warm_up=args.warm_up,
    )
    out = args.out or run_folder(args.run)
    found.write(out)
    if args.json:
        print(json.dumps(found.summary, indent=2, sort_keys=True))
    else:
        show_anomalies(found, limit=args.limit)
        print(f"results in {out}")
    return 0


def _report(args: argparse.Namespace, _: object) -> int:
    from crystalllm.compare.runs import run_folder
    from crystalllm.config import load_cluster
    from crystalllm.report import pages

    run = run_folder(args.run)
    case = pages.Case(run, args.capture or run.parent / "capture")
    cluster = load_cluster(args.cluster) if args.cluster is not None else None
    print(pages.write(case, args.out or run.parent / "report" / run.name, cluster=cluster))
    return 0


def _compare(args: argparse.Namespace, _: object) -> int:
    from crystalllm.compare.compare import compare
    from crystalllm.compare.show import show_comparison

    found = compare(
        args.a,
        args.b,
        force=args.force,
        between=None if args.between is None else args.between / 100,
        warm_up=args.warm_up,
    )
    if args.json:
        print(found.to_json(), end="")
    else:
        show_comparison(found, limit=args.limit)
    return 0


def _fits(args: argparse.Namespace, _: object) -> int:
    from crystalllm.config import load_job
    from crystalllm.fits import fits

    results = Path("results") / Path(args.job).stem
    out = args.out or results / "fits"
    found = fits(
        load_job(args.job),
        out,
        captured=args.capture or results,
        limit_bytes=args.memory,
        changed=args.changed,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    held = sorted(found["by_category"].items(), key=lambda item: -item[1])
    at_least = "at least " if found["is_lower_bound"] else ""
    print(
        f"{'yes' if found['fits'] else 'no'}: the worst rank ({found['worst']}) needs {at_least}"
        f"{found['peak_bytes']:,} of {found['limit_bytes']:,} bytes, margin "
        f"{found['margin_bytes']:,}; held by "
        + ", ".join(f"{name} {num_bytes:,}" for name, num_bytes in held if num_bytes)
    )
    print(f"results in {out}")
    return 0 if found["fits"] else EXIT_CODES["oom"]


def _inspect(args: argparse.Namespace, _: object) -> int:
    from crystalllm.show import show

    show(
        args.path,
        rank=args.rank,
        coordinates=args.coord,
        summary=args.summary,
        limit=args.limit,
    )
    return 0


def _pack(args: argparse.Namespace, _: object) -> int:
    from crystalllm.sharing.pack import pack

    manifest = pack(args.folder, args.out)
    num_scrubbed = sum(entry["count"] for entry in manifest["scrubbed"])
    print(
        f"{len(manifest['files'])} files in {args.out}, {args.out.stat().st_size:,} bytes; "
        f"{num_scrubbed} secrets and names removed, {len(manifest['left_out'])} files left out: "
        "its manifest.json lists them"
    )
    return 0


def _unpack(args: argparse.Namespace, _: object) -> int:
    from crystalllm.sharing.unpack import unpack

    limit_bytes = round(args.limit_gib * (1 << 30))
    manifest = unpack(args.file, args.out, trust=args.trust, limit_bytes=limit_bytes)
    print(
        f"{len(manifest['files'])} files in {args.out}, made by crystalllm "
        f"{manifest.get('crystalllm')} with torch {manifest.get('torch')}"
    )
    return 0


def _doctor(args: argparse.Namespace, _: object) -> int:
    from crystalllm import doctor

    findings = doctor.examine()
    if args.bundle is not None:
        from crystalllm import artifacts
        from crystalllm.bundle import bundle

        artifacts.write_atomically(args.bundle, bundle(findings, args.of).encode())
        print(f"{args.bundle}: read it before you send it")
        return 0
    doctor.show(findings, as_json=args.json)
    return 0 if all(f.ok or not f.required for f in findings) else 1


def _build(args: argparse.Namespace, _: object) -> int:
    from crystalllm import native

    print(native.build(echo=True))
    print(native.replay_library(echo=True))
    return 0


def _generate(args: argparse.Namespace, _: object) -> int:
    from crystalllm.generated import generated_files

    for path, text in generated_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)
    return 0


def _bench(args: argparse.Namespace, _: object) -> int:
    names = ("device", "cases", "max_pairs")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if options and args.name != "fidelity":
        raise UserError(
            f"bench {args.name} has no options",
            where=f"Options {', '.join(options)}",
            do="Leave them out; they are those of bench fidelity",
        )
    importlib.import_module(f"crystalllm.bench.{args.name}").main(**options)
    return 0
