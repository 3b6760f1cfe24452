"""What the command line takes: verbs, their arguments, and the types of those."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from crystalllm import __version__

BENCHES = ("capture", "fidelity", "live", "memory", "overhead", "replay", "run", "transfers")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def parser() -> argparse.ArgumentParser:
    """Of all verbs; `verb` of what it parses is the one that was given."""
    made = argparse.ArgumentParser(
        prog="python -m crystalllm",
        description="Study a distributed training job at its intended logical scale.",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=__version__)
    verbs = made.add_subparsers(dest="verb", required=True)

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

    imports = verbs.add_parser(
        "import", allow_abbrev=False, help="make a captured baseline of a real run's Kineto traces"
    )
    imports.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="one per rank")
    imports.add_argument("--out", type=Path, required=True, help="folder")
    imports.add_argument("--world-size", type=int, help="where no trace says it")

    export = verbs.add_parser(
        "export", allow_abbrev=False, help="write Chakra execution traces of captured ranks"
    )
    export.add_argument("capture", type=Path, help="folder that capture or import wrote")
    export.add_argument("--out", type=Path, required=True, help="folder")

    merge = verbs.add_parser("merge", allow_abbrev=False, help="join the pieces of a capture")
    merge.add_argument("pieces", type=Path, nargs="+", help="folders of capture --shard")
    merge.add_argument("--job", required=True, help="a job's name in config/jobs, or its file")
    merge.add_argument("--out", type=Path, help="folder (default results/<job>/capture)")
    merge.add_argument("--eager-bytes", type=_from(0), default=0, help="as for capture")

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
    emulate.add_argument(
        "--out", type=Path, help="folder (default results/<job>/emulate, or untimed)"
    )
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

    report = verbs.add_parser("report", allow_abbrev=False, help="pictures and tables of a run")
    report.add_argument("run", type=Path, help="results/<job>, or the folder of a run")
    report.add_argument(
        "--capture", type=Path, help="folder that capture wrote (default: beside the run)"
    )
    report.add_argument(
        "--job", help="whose cluster is the capacity, and whose pipeline has a closed form"
    )
    report.add_argument("--out", type=Path, help="folder (default results/<job>/report/<run>)")

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

    pack = verbs.add_parser("pack", allow_abbrev=False, help="one file of a job, to send")
    pack.add_argument("folder", type=Path, help="results/<job>, or its capture folder")
    pack.add_argument("--out", type=Path, required=True, metavar="FILE")

    unpack = verbs.add_parser("unpack", allow_abbrev=False, help="check and unpack such a file")
    unpack.add_argument("file", type=Path)
    unpack.add_argument("--out", type=Path, required=True, metavar="DIR")
    unpack.add_argument(
        "--trust", action="store_true", help="take payloads that could run code, after a review"
    )
    unpack.add_argument(
        "--limit-gib", type=float, default=64.0, help="refuse more, unpacked (default 64)"
    )

    calls = verbs.add_parser("calls", help="show the calls that run --record wrote")
    calls.add_argument("file", type=Path)

    doctor = verbs.add_parser("doctor", help="say what this machine has and lacks")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument("--bundle", type=Path, metavar="FILE", help="write what an issue asks for")
    doctor.add_argument("--of", type=Path, metavar="DIR", help="with it: results/<job>, its runs")

    verbs.add_parser("build", help="build the native extension")

    verbs.add_parser("generate", help="write the files that follow from the models")

    bench = verbs.add_parser("bench", help="measure; the last line is one JSON object")
    bench.add_argument("name", choices=BENCHES)
    fidelity = bench.add_argument_group("of fidelity")
    fidelity.add_argument("--device", choices=["cpu"], help="where (default cpu)")
    fidelity.add_argument("--cases", nargs="+", help="such as ddp fsdp2 (default: all)")
    fidelity.add_argument("--max-pairs", type=_from(2), help="per case (default 60)")
    return made


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
