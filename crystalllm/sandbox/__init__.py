"""Sandbox ranks run for real against the timed replay of everybody else.

Planning and emulation both do this: `run` starts the replay in this process and
each sandbox rank in one of its own, and leaves in its folder

- `summary.json`: what came of it, whatever it was;
- `rank-R/`: log, outcome, segments, communication and iterations of each rank;
- `world/iterations.parquet`: iterations of all ranks, by the replay;
- `timeline.json.gz`, and `timeline/` with a trace of each rank, on request.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crystalllm import __version__, native, tables
from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.payload import PayloadBook
from crystalllm.replay import offline, program, what_if
from crystalllm.replay.engine import Engine, ReplayError
from crystalllm.replay.live import Live
from crystalllm.replay.program import Capture
from crystalllm.run import Program
from crystalllm.sandbox import outcome, processes
from crystalllm.sandbox.followed import followed, program_iterations
from crystalllm.sandbox.setup import Assignment, Setup
from crystalllm.timeline import chosen_ranks, write_timeline

__all__ = ["Setup", "run"]

BOOK = "payloads.parquet"
# How long the replay's thread looks for calls before it sleeps. Waking it takes a caller some
# 30 us on a virtual machine, so it stays awake between calls where it has a core to itself.
_OWN_CORE_SPIN_NS = 20_000_000
_SHARED_SPIN_NS = 50_000
# Until the replay of the others has come to its end.
_SETTLE_LIMIT_S = 60.0


def run(
    setup: Setup,
    out: Path,
    *,
    capture: Capture | None = None,
    worker: str = "crystalllm.sandbox.worker",
) -> dict[str, Any]:
    """Runs the sandbox ranks into `out`; what lies there of an earlier run goes.

    Args:
        setup: What to run.
        out: Folder.
        capture: What `setup.capture` holds, if it has been read.
        worker: Module that runs as the process of a rank.

    Returns:
        What summary.json says. Its `status` is ok, oom, deviation, crash or invalid.
    """
    _clear(out)
    try:
        summary = _Run(setup, out, capture or Capture.read(setup.capture), worker).go()
    except UserError as error:
        summary = outcome.refused(setup.job.world_size, setup.ranks, error)
    outcome.write(out, summary)
    return summary


def _clear(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for path in (*out.glob("rank-*"), out / "world", out / "timeline"):
        shutil.rmtree(path, ignore_errors=True)
    old = (out / outcome.SUMMARY, out / "timeline.json.gz")
    # What was found in the earlier run says nothing of the new one.
    findings = out.glob("anomalies.*")
    for path in (*out.glob("assignment-*.json"), *findings, *old):
        path.unlink(missing_ok=True)


class _Run:
    def __init__(self, setup: Setup, out: Path, capture: Capture, worker: str) -> None:
        self.setup, self.out, self.capture, self.worker = setup, out, capture, worker
        self.num_bodies = setup.warm_up + setup.iterations
        iterations = program_iterations(capture, self.num_bodies)
        self.command = setup.job.command(iterations=iterations)
        differences = changes(setup.job, capture)
        if differences and not setup.changed:
            raise UserError(
                "The capture is of another program: " + "; ".join(differences),
                where=f"Folder {setup.capture}",
                do="Capture and plan again, or pass --changed to run it all the same",
            )
        self.differences = differences
        self.notes: list[str] = []
        book = PayloadBook.load(setup.capture / BOOK)
        self.extra_periods = book.extra_periods(iterations)
        declared = (
            []
            if setup.what_ifs is None
            else what_if.load(setup.what_ifs, world_size=setup.job.world_size)
        )
        self.made = program.build(
            capture,
            setup.durations.slowed(setup.slowness),
            seed=setup.seed,
            draw=setup.draw,
            eager_bytes=setup.eager_bytes,
            what_ifs=declared,
            share_links=setup.share_links,
        )
        self.watched = (
            chosen_ranks(capture, sandbox=setup.ranks) if setup.timeline and setup.timed else []
        )
        self.provenance = {
            "crystalllm": __version__,
            "fingerprint": capture.structure["fingerprint"],
            "program": list(self.command),
            "world_size": setup.job.world_size,
            "ranks": list(setup.ranks),
            "iterations": setup.iterations,
            "warm_up": setup.warm_up,
            "slowness": setup.slowness,
            "follows_speed": setup.follows_speed,
            "seed": setup.seed,
            "timed": setup.timed,
            "what_ifs": [w.model_dump() for w in declared],
        }

    def go(self) -> dict[str, Any]:
        with self._apart(), self._live() as live, self._rendezvous() as port:
            for number, rank in enumerate(self.setup.ranks):
                (self.out / f"rank-{rank}").mkdir()
                self._assignment(number, rank, live, port).write(
                    self.out / f"assignment-{number}.json"
                )
            failure = processes.run_workers(self.worker, self.out.resolve(), len(self.setup.ranks))
            replay_error = self._finish(live, failure is None) if live is not None else None
        for path in self.out.glob("assignment-*.json"):
            path.unlink()
        summary = outcome.summarize(
            self.setup,
            self.out,
            self.made,
            provenance=self.provenance,
            differences=self.differences,
            failure=failure,
            replay_error=replay_error,
        )
        return summary | {"notes": self.notes}

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Keeps this process, with the replay, off the cores of the workers."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores_of_replay() or before)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def _cores_of_replay(self) -> set[int]:
        """That no worker has; empty where workers have all, or none of their own."""
        if self.setup.cores is None:
            return set()
        return os.sched_getaffinity(0) - set(self.setup.cores)

    @contextlib.contextmanager
    def _live(self) -> Iterator[Live | None]:
        if not self.setup.timed:
            yield None
            return
        with Live(
            self.made.world,
            external=self.setup.ranks,
            num_iterations=self.num_bodies,
            watch=self.watched,
            # The ranks are processes of their own: nobody here waits and could help.
            helps=False,
            engine_spin_ns=_OWN_CORE_SPIN_NS if self._cores_of_replay() else _SHARED_SPIN_NS,
        ) as live:
            yield live

    @contextlib.contextmanager
    def _rendezvous(self) -> Iterator[int]:
        """Where several sandbox ranks find each other."""
        if len(self.setup.ranks) == 1:
            yield 0
            return
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield store.port
        del store

    def _assignment(self, number: int, rank: int, live: Live | None, port: int) -> Assignment:
        s = self.setup
        return Assignment(
            rank=rank,
            job=s.job.model_dump(mode="json"),
            command=list(self.command),
            folder=str((self.out / f"rank-{rank}").resolve()),
            book=str((s.capture / BOOK).resolve()),
            extra_periods=self.extra_periods,
            followed=followed(
                self.capture,
                self.made,
                rank,
                num_bodies=self.num_bodies,
                takes_core=s.takes_core,
            ),
            seed=s.seed,
            address=live.address if live is not None else None,
            library=str(native.replay_library()),
            mates=list(s.ranks),
            store_port=port,
            core=s.cores[number] if s.cores is not None else None,
            body_ns=self._body_ns(rank) if s.follows_speed else 0,
            memory=s.memory,
            memory_limit_bytes=s.memory_limit_bytes,
            profile=s.profile,
            limit_s=s.limit_s if s.timed else 0.0,
            wait_limit_s=s.wait_limit_s,
            on_terminal=s.on_terminal,
            measured=(s.warm_up + 1, self.num_bodies),
            provenance={**self.provenance, "rank": rank},
        )

    def _body_ns(self, rank: int) -> int:
        """Computation of the rank's main thread in one iteration, as the others are replayed."""
        role = int(self.capture.ranks.at[rank, "role"])
        durations = self.setup.durations.segments.items()
        whole = sum(d.ns for at, d in durations if at[:3] == (role, "host:0", "body"))
        return round(whole * self.setup.slowness)

    def _finish(self, live: Live, is_whole: bool) -> str | None:
        """Lets the others come to their end, and keeps what the replay knows of them."""
        error = None
        if is_whole:
            try:
                live.settle(_SETTLE_LIMIT_S)
            except ReplayError as failed:
                error = offline.with_groups(str(failed), self.made)
        engine = live.stop()
        has_prologue = self.capture.first_body_mark > 0
        frame = offline.iterations_of(engine, self.setup.job.world_size, has_prologue=has_prologue)
        tables.ITERATIONS.write(
            self.out / "world" / "iterations.parquet", frame, provenance=self.provenance
        )
        if is_whole and error is None and self.watched:
            try:
                self._write_timeline(engine)
            except UserError as failed:  # what was measured is none the worse for it
                self.notes.append(f"there is no timeline: {failed}")
        return error

    def _write_timeline(self, engine: Engine) -> None:
        happened = {
            rank: tuple(
                table.read(self.out / f"rank-{rank}" / f"{table.name}.parquet")[0].to_pandas()
                for table in (tables.SEGMENTS, tables.COMMUNICATION)
            )
            for rank in self.setup.ranks
        }
        write_timeline(
            self.out / "timeline.json.gz",
            capture=self.capture,
            made=self.made,
            engine=engine,
            num_iterations=self.num_bodies,
            sandbox=happened,
            ranks=self.watched,
            per_rank=self.out / "timeline",
        )


def changes(job: Job, capture: Capture) -> list[str]:
    """What of the program differs from the captured one, in words; empty if nothing."""
    s = capture.structure
    found = []
    command = list(job.command(iterations=s["iterations"]))
    if command != s["program"]:
        found.append(f"its command was {' '.join(s['program'])}, now it is {' '.join(command)}")
    if Program(command=tuple(command)).digest() != s["program_digest"]:
        found.append("its source files have changed")
    if job.world_size != s["world_size"]:
        found.append(f"its world had {s['world_size']} ranks, now {job.world_size}")
    return found
