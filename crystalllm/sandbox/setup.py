"""One run of sandbox ranks: what the caller asks for, and what a worker is told."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.replay.durations import DurationTable
from crystalllm.sandbox.followed import Followed

# In the folder of a rank: what the program printed, what came of it, and a Kineto trace.
LOG = "log.txt"
OUTCOME = "outcome.json"
TRACE = "trace.json.gz"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run of sandbox ranks against the replayed rest.

    Args:
        job: What runs.
        ranks: Sandbox ranks.
        capture: Folder of the job's capture.
        durations: How long everybody else takes.
        iterations: Periods of the program that count.
        warm_up: Periods before them that do not.
        slowness: Everybody else computes so many times as long as `durations` says: the ranks
            that run do, on this host and now, and the others are to run on hosts like it.
        follows_speed: From iteration to iteration they compute as slowly or as fast as the
            ranks that run do: for a host whose speed changes, as a shared one's does.
        seed: Of what is invented and drawn.
        timed: Calls end when the replay says so; else at once, and no wait has a limit.
        cores: Core of each worker; the replay gets the others. None leaves it to the system.
        takes_core: Transfers whose durations say so (those measured on this host) take
            CPU time from the rank's core, as the library that makes them would.
        memory: Keep a timeline of tensor storage.
        memory_limit_bytes: More is an out-of-memory error.
        profile: Write a Kineto trace of the last iterations; its times are the profiler's.
        what_ifs: YAML file of perturbations of the virtual ranks.
        draw: Draw durations instead of taking medians.
        share_links: Modelled transfers share links where they overlap.
        eager_bytes: Messages up to this size need no receiver to be ready.
        timeline: Write the timeline of the last iterations, of sandbox ranks and of those
            virtual ranks that have most to do with them.
        limit_s: Seconds after which a worker that has not ended is ended.
        wait_limit_s: Seconds that one communication call may wait.
        changed: Run a program that is not the captured one: each call is checked all the
            same, and the result is marked.
        on_terminal: The program keeps the terminal: for debuggers.
    """

    job: Job
    ranks: tuple[int, ...]
    capture: Path
    durations: DurationTable
    iterations: int
    warm_up: int = 2
    slowness: float = 1.0
    follows_speed: bool = False
    seed: int = 0
    timed: bool = True
    cores: tuple[int, ...] | None = None
    takes_core: bool = True
    memory: bool = True
    memory_limit_bytes: int | None = None
    profile: bool = False
    what_ifs: Path | None = None
    draw: bool = False
    share_links: bool = False
    eager_bytes: int = 0
    timeline: bool = False
    limit_s: float = 3600.0
    wait_limit_s: float = 300.0
    changed: bool = False
    on_terminal: bool = False

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise UserError(
                "The ranks of interest are missing or named twice",
                where=f"Ranks {', '.join(map(str, self.ranks)) or 'none'}",
                do="Name each rank once (--ranks 0,137)",
            )
        for rank in self.ranks:
            self.job.identity(rank)  # refuses ranks outside the world
        if self.iterations < 1 or self.warm_up < 0:
            raise UserError(
                "A run needs at least one iteration that counts",
                where=f"{self.iterations} iterations after {self.warm_up} to warm up",
                do="Pass a positive --iterations, and --warm-up of 0 or more",
            )
        if not 0 < self.slowness < math.inf:
            raise UserError(
                "The slowness of the other ranks is no positive number",
                where=f"Slowness {self.slowness}",
                do="Pass what a run reports, such as 1.1",
            )
        if self.cores is not None and len(self.cores) < len(self.ranks):
            raise UserError(
                "There are fewer cores than sandbox ranks",
                where=f"{len(self.cores)} cores, {len(self.ranks)} ranks",
                do="Name a core for each rank, or fewer ranks",
            )


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What one worker is told, in a file of its own.

    Args:
        rank: Who to be.
        job: As JSON.
        command: The program and its arguments.
        folder: Where the results of the rank go.
        book: Payload book.
        extra_periods: As in `logical.enter`.
        followed: The trace of the rank.
        seed: Of what is invented.
        address: Of the live replay; None if nothing is timed.
        library: The replay library.
        mates: All sandbox ranks.
        store_port: Of the sandbox ranks' own rendezvous on this host; 0 with a single rank.
        core: To stay on, or None.
        body_ns: Computation of one iteration of its main thread by the durations, where the
            others follow its speed; else 0.
        memory, memory_limit_bytes, profile, limit_s, wait_limit_s, on_terminal: As in `Setup`.
        measured: First and last iteration that count.
        provenance: Of the tables that are written.
    """

    rank: int
    job: dict[str, Any]
    command: list[str]
    folder: str
    book: str
    extra_periods: int
    followed: Followed
    seed: int
    address: str | None
    library: str
    mates: list[int]
    store_port: int
    core: int | None
    body_ns: int
    memory: bool
    memory_limit_bytes: int | None
    profile: bool
    limit_s: float
    wait_limit_s: float
    on_terminal: bool
    measured: tuple[int, int]
    provenance: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Assignment:
        content = json.loads(path.read_text())
        trace = content.pop("followed")
        sections = ("prologue", "body", "epilogue")
        trace.update({name: [tuple(call) for call in trace[name]] for name in sections})
        return cls(followed=Followed(**trace), **content)
