"""`capture`: runs logical ranks one after another and keeps what they communicated.

What it leaves in `results/<job>/capture/` is described in docs/capture.md and,
column by column, in docs/tables.md. Ranks that are captured already are not run
again: what they left lies in `results/<job>/.work/capture/<digest>/<strategy>/`
as long as program, job and library are the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crystalllm import __version__, artifacts, native, warm
from crystalllm.capture import results, roles
from crystalllm.capture.broker import Broker, StandIn, nobody
from crystalllm.capture.captured import Captured
from crystalllm.config import ABOUT, Job
from crystalllm.errors import UserError
from crystalllm.layout import Layout
from crystalllm.records import group_identity
from crystalllm.run import Program

log = logging.getLogger("crystalllm.capture")

DEFAULT_LIMIT_S = 600.0
DEFAULT_CHECKS = 16
# Smaller worlds are captured whole by default.
LARGE_WORLD = 64

Progress = Callable[[int, int], None]


def capture(
    job: Job,
    out: Path,
    *,
    strategy: str | None = None,
    ranks: Sequence[int] | None = None,
    shard: tuple[int, int] | None = None,
    iterations: int | None = None,
    num_checks: int = DEFAULT_CHECKS,
    eager_bytes: int = 0,
    keep_memory: bool = False,
    parallel: int | None = None,
    limit_s: float = DEFAULT_LIMIT_S,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Captures `job` into `out`.

    Args:
        job: What to run.
        out: Folder of the results; `.work` lies beside it.
        strategy: "all" runs every rank; "roles" runs some and infers the others
            (the default in worlds of more than `LARGE_WORLD` ranks).
        ranks: Only these, and those whose values they need; excludes `strategy`.
        shard: (i, n): only every n-th rank from the i-th; `out` is then a piece
            for `merge`.
        iterations: Instead of the job's.
        num_checks: Inferred ranks to run for comparison.
        eager_bytes: Messages up to this size need no receiver to be ready.
        keep_memory: Keep every allocation as an event, some ten times as many
            events as without.
        parallel: Ranks that compute at a time; one per core by default.
        limit_s: Seconds that one rank may take.
        progress: Called with ranks done and known to be needed.

    Returns:
        What `structure.json` (of a piece: `piece.json`) says.

    Raises:
        UserError: A rank fails, dies, hangs, waits for ever; the calls don't
            repeat, or don't fit together.
    """
    strategy = _strategy(job, strategy, ranks, shard)
    for rank in ranks or ():
        job.identity(rank)  # refuses ranks outside the world before anything runs
    iterations = iterations or job.capture_iterations or job.iterations
    program = Program(command=job.command(iterations=iterations))
    digest = _digest(job, program)
    work = out.parent / ".work" / "capture" / digest / (strategy + "-memory" * keep_memory)
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warm.prepare()
    ranks_left = _Ranks(job, program, work, parallel, limit_s, keep_memory, progress)
    learnt = results.layout_of(job, Layout.of_sizes([("rank", job.world_size)]))
    if strategy == "roles":
        found = roles.explore(
            ranks_left.run,
            ranks_left.captured,
            learnt,
            group_identity,
            num_checks=num_checks,
            seed=job.seed,
        )
    else:
        wanted = range(job.world_size) if ranks is None else sorted(set(ranks))
        if shard is not None:
            wanted = wanted[shard[0] :: shard[1]]
            ranks_left.run(wanted)
            return _write_piece(out, ranks_left, digest, iterations, shard)
        ranks_left.run(wanted)
        found = roles.every_rank(learnt, ranks_left.captured)
    return _finish(job, program, iterations, out, ranks_left.captured, found, strategy, eager_bytes)


def merge(job: Job, pieces: Sequence[Path], out: Path, *, eager_bytes: int = 0) -> dict[str, Any]:
    """Joins what `capture(shard=…)` left in several folders, as if captured in one.

    Raises:
        UserError: A piece is missing, damaged, or of another job or program.
    """
    files: dict[int, Path] = {}
    first: dict[str, Any] | None = None
    seen = set()
    for folder in pieces:
        piece = _read_piece(folder)
        if first is None:
            first = piece
        for key in ("digest", "num_shards"):
            if piece[key] != first[key]:
                raise UserError(
                    f"Two pieces of a capture have another {key}: {first[key]} and {piece[key]}",
                    where=f"Folders {pieces[0]} and {folder}",
                    do="Merge pieces of one job, program and version",
                )
        seen.add(piece["shard"])
        files.update({rank: folder / f"rank-{rank}.arrow" for rank in piece["ranks"]})
    missing = sorted(set(range(first["num_shards"] if first else 0)) - seen)
    if first is None or missing:
        raise UserError(
            f"Pieces {', '.join(map(str, missing))} of a capture are missing"
            if first
            else "There is nothing to merge",
            where="Folders " + ", ".join(map(str, pieces)),
            do="Capture them with --shard i/n, and pass all folders",
        )
    program = Program(command=tuple(first["command"]))
    if _digest(job, program) != first["digest"]:
        raise UserError(
            "The pieces are not of this job, program and version",
            where=f"Folder {pieces[0]}",
            do="Pass the job that they were captured with, or capture again",
        )
    captured = {rank: Captured.read(path) for rank, path in sorted(files.items())}
    learnt = results.layout_of(job, Layout.of_sizes([("rank", job.world_size)]))
    found = roles.every_rank(learnt, captured)
    return _finish(job, program, first["iterations"], out, captured, found, "all", eager_bytes)


@dataclass
class _Ranks:
    """Captured ranks, kept in files as they come.

    An earlier capture's ranks are taken from their files when they are asked for,
    so that a resumed capture is the one that was not interrupted.
    """

    job: Job
    program: Program
    work: Path
    parallel: int | None
    limit_s: float
    keep_memory: bool
    progress: Progress
    captured: dict[int, Captured] = field(default_factory=dict)

    def run(self, wanted: Sequence[int], stand_in: StandIn = nobody) -> None:
        """Captures those of `wanted` that are not there yet, and whom they need."""

        def keep(rank: int, data: bytes) -> None:
            artifacts.write_atomically(self._path(rank), data)
            self.captured[rank] = Captured.from_bytes(data, where=f"File {self._path(rank)}")
            self.report(wanted)

        def recall(rank: int) -> Captured | None:
            if not self._path(rank).exists():
                return None
            self.captured[rank] = left = Captured.read(self._path(rank))
            self.report(wanted)
            return left

        self.report(wanted)
        Broker(
            self.job.identity,
            self.program.execute,
            output=lambda rank: str(self.work / f"rank-{rank}.log"),
            parallel=self.parallel or len(os.sched_getaffinity(0)),
            limit_s=self.limit_s,
            on_done=keep,
            known=list(self.captured.values()),
            recall=recall,
            stand_in=stand_in,
            keep_memory=self.keep_memory,
        ).run(wanted)

    def report(self, wanted: Sequence[int]) -> None:
        others = [r for r in wanted if r not in self.captured]
        kept = sum(self._path(r).exists() for r in others)
        self.progress(len(self.captured) + kept, len(self.captured) + len(others))

    def _path(self, rank: int) -> Path:
        return self.work / f"rank-{rank}.arrow"


def _strategy(
    job: Job, strategy: str | None, ranks: Sequence[int] | None, shard: tuple[int, int] | None
) -> str:
    if ranks is not None or shard is not None:
        if strategy == "roles":
            raise UserError(
                "The strategy roles chooses its ranks itself, one after the other",
                where="Options --ranks or --shard with --strategy roles",
                do="Leave one of them out; --shard is for --strategy all",
            )
        if shard is not None and not 0 <= shard[0] < shard[1]:
            raise UserError(
                f"There is no shard {shard[0]} of {shard[1]}",
                where="Option --shard i/n",
                do=f"Use i from 0 to {shard[1] - 1}",
            )
        return "all"
    if strategy is None:
        return "roles" if job.world_size > LARGE_WORLD else "all"
    return strategy


def _finish(
    job: Job,
    program: Program,
    iterations: int,
    out: Path,
    captured: dict[int, Captured],
    found: roles.Roles,
    strategy: str,
    eager_bytes: int,
) -> dict[str, Any]:
    import torch

    world = results.understand(job, iterations, captured, found, group_identity)
    warnings = results.check_matching(world, eager_bytes=eager_bytes)
    for warning in warnings:
        log.warning("%s", warning)
    provenance = {
        "crystalllm": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "program": list(program.command),
        "program_digest": program.digest(),
        "world_size": job.world_size,
        "strategy": strategy,
    }
    return results.write(
        world, out, provenance=provenance, warnings=warnings, eager_bytes=eager_bytes
    )


def _write_piece(
    out: Path, ranks: _Ranks, digest: str, iterations: int, shard: tuple[int, int]
) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    captured = sorted(ranks.captured)
    for rank in captured:
        shutil.copyfile(ranks.work / f"rank-{rank}.arrow", out / f"rank-{rank}.arrow")
    piece = {
        "crystalllm": __version__,
        "digest": digest,
        "command": list(ranks.program.command),
        "iterations": iterations,
        "shard": shard[0],
        "num_shards": shard[1],
        "ranks": captured,
    }
    artifacts.write_atomically(out / "piece.json", (json.dumps(piece, indent=2) + "\n").encode())
    return piece


def _read_piece(folder: Path) -> dict[str, Any]:
    path = folder / "piece.json"
    names = ("digest", "command", "iterations", "shard", "num_shards", "ranks")
    try:
        piece = json.loads(path.read_text())
        return {k: piece[k] for k in names}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "This is no piece of a capture",
            where=f"File {path}: {type(error).__name__}: {error}",
            do="Pass folders that capture --shard i/n wrote",
        ) from error


def _digest(job: Job, program: Program) -> str:
    """Of everything that decides what a rank does."""
    digest = hashlib.sha256()
    for part in (
        job.model_dump_json(exclude=set(ABOUT)),
        json.dumps(program.command),
        native.source_digest(),
        native.target().parent.name,
        sys.version,
        __version__,
        program.digest(),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]
