"""The command line: each verb calls one library function and prints what it returns."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from crystalllm import arguments
from crystalllm.errors import UserError

USAGE_ERROR = 2
# Of emulate, by the status in summary.json.
EXIT_CODES = {"ok": 0, "invalid": USAGE_ERROR, "oom": 3, "deviation": 4, "crash": 5}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one verb; ends the process with its exit code."""
    _log_to_stderr()
    given, command = _split(list(sys.argv[1:] if argv is None else argv))
    parser = arguments.parser()
    args = parser.parse_args(given)
    if command is not None and args.verb not in ("run", "init"):
        parser.error("only run and init take a program after --")
    try:
        code = _VERBS[args.verb](args, command)
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
    from crystalllm.config import load_job, stem

    job = load_job(args.job)
    name = stem(args.job)
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
    from crystalllm.config import load_job, stem

    job = load_job(args.job)
    out = args.out or Path("results") / stem(args.job) / "capture"
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
    from crystalllm.config import load_job, stem
    from crystalllm.cores import separate
    from crystalllm.planning.show import show_explanation, show_summary

    job = load_job(args.job)
    results = Path("results") / stem(args.job)
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
    from crystalllm.config import load_job, stem
    from crystalllm.emulate import PROFILE, emulate
    from crystalllm.sandbox.show import show_summary

    job = load_job(args.job)
    results = Path("results") / stem(args.job)
    # A look with a debugger takes no timed result's place.
    out = args.out or results / ("untimed" if args.untimed else "emulate")
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
    from crystalllm.config import load_job
    from crystalllm.report import pages

    run = run_folder(args.run)
    job = load_job(args.job) if args.job is not None else None
    case = pages.Case(run, args.capture or run.parent / "capture", job)
    print(pages.write(case, args.out or run.parent / "report" / run.name))
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
    from crystalllm.config import load_job, stem
    from crystalllm.fits import fits

    results = Path("results") / stem(args.job)
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


_VERBS: dict[str, Callable[[argparse.Namespace, Any], int]] = {
    "run": _run,
    "init": _init,
    "capture": _capture,
    "import": _import,
    "export": _export,
    "merge": _merge,
    "replay": _replay,
    "planning": _planning,
    "emulate": _emulate,
    "anomalies": _anomalies,
    "report": _report,
    "compare": _compare,
    "fits": _fits,
    "inspect": _inspect,
    "pack": _pack,
    "unpack": _unpack,
    "calls": _calls,
    "doctor": _doctor,
    "build": _build,
    "generate": _generate,
    "bench": _bench,
}
