"""The virtual timeline of a world: what its ranks did, for Perfetto and HolisticTraceAnalysis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crystalllm import __version__
from crystalllm.errors import UserError
from crystalllm.replay.engine import Engine
from crystalllm.replay.program import Capture, Replayable
from crystalllm.replay.steps import Steps, follow
from crystalllm.replay.world import Op
from crystalllm.timeline import chrome
from crystalllm.timeline.choice import MAX_RANKS, chosen_ranks
from crystalllm.timeline.spans import Span, Words, of_sandbox, of_virtual

__all__ = ["MAX_EVENTS", "MAX_RANKS", "chosen_ranks", "write_timeline"]

MAX_EVENTS = 250_000
_LAST = 2
_PARTS = ("compute", "host", "wait", "bubble", "exposed")
# By rank, `segments` and `communication` of what it really did.
Sandbox = Mapping[int, tuple[pd.DataFrame, pd.DataFrame]]


def write_timeline(
    path: Path,
    *,
    capture: Capture,
    made: Replayable,
    engine: Engine,
    num_iterations: int,
    sandbox: Sandbox | None = None,
    ranks: Iterable[int] | None = None,
    iterations: Iterable[int] | None = None,
    per_rank: Path | None = None,
    max_events: int = MAX_EVENTS,
) -> dict[str, Any]:
    """Writes what ranks of a replayed world did, as a trace in Kineto's form.

    Args:
        path: The trace, `timeline.json.gz`. Of the first rank it has what
            HolisticTraceAnalysis reads, of the others what Perfetto shows.
        capture: What every rank does.
        made: The world that was replayed.
        engine: After its run, or after the stop of the live run; virtual ranks that
            are shown were watched. Sandbox ranks have marks like the others: at the
            end of the prologue if there is one, and of each body.
        num_iterations: Bodies that were replayed.
        sandbox: By rank, the tables `segments` and `communication` of a sandbox rank.
        ranks: Whom to show, the most wanted first; by default those of `chosen_ranks`
            that were watched.
        iterations: Which to show, 0 being the prologue; by default the last two that
            the first rank has begun.
        per_rank: A folder for one trace of each rank, as HolisticTraceAnalysis reads
            them, in whole microseconds (`rank-R.json.gz`).
        max_events: Ranks that would take the trace beyond so many are left out; the
            first one is always there.

    Returns:
        ranks and iterations that are shown, num_events, and left_out: what was
        wanted and is not there.

    Raises:
        UserError: A rank was not watched, or the engine ran another world.
    """
    timeline = _Timeline(capture, made, engine, num_iterations, sandbox or {})
    wanted = timeline.wanted(ranks)
    shown = timeline.iterations(wanted[0], iterations)
    processes: list[tuple[chrome.Process, chrome.Threads]] = []
    events: list[chrome.Event] = []
    left_out: list[int] = []
    for rank in wanted:
        process = timeline.process(rank, shown)
        tids = chrome.Threads(process)
        more = chrome.events_of(
            process, tids, time=chrome.exact_us, order=len(processes), as_kernels=not processes
        )
        if processes and len(events) + len(more) > max_events:
            left_out.append(rank)
            continue
        events += more
        processes.append((process, tids))
        if per_rank is not None:
            timeline.write_rank(per_rank / f"rank-{rank}.json.gz", process, tids)
    events += chrome.arrows(processes, time=chrome.exact_us)
    summary = {
        "ranks": [process.rank for process, _ in processes],
        "iterations": shown,
        "left_out": {
            "ranks": left_out,
            "num_other_ranks": len(capture.ranks) - len(wanted),
            "num_other_iterations": num_iterations - sum(0 < k <= num_iterations for k in shown),
        },
    }
    events += chrome.about(
        len(capture.ranks), _whole(processes), _text(summary, len(capture.ranks)), summary
    )
    summary["num_events"] = len(events)
    chrome.write(path, timeline.head(wanted[0], summary), events)
    return summary


class _Timeline:
    def __init__(
        self,
        capture: Capture,
        made: Replayable,
        engine: Engine,
        num_iterations: int,
        sandbox: Sandbox,
    ) -> None:
        self.capture, self.made, self.engine = capture, made, engine
        self.num_iterations, self.sandbox = num_iterations, sandbox
        self.words = Words.of(capture)
        self.has_prologue = capture.first_body_mark > 0
        events = engine.events()
        ordered = events[np.argsort(events["rank"], kind="stable")]
        ranks, begin = np.unique(ordered["rank"], return_index=True)
        parts = np.split(ordered, begin)[1:]  # nothing lies before the first
        self.events = dict(zip(ranks.tolist(), parts, strict=True))
        self.none = events[:0]

    def wanted(self, ranks: Iterable[int] | None) -> list[int]:
        if ranks is None:
            chosen = chosen_ranks(self.capture, sandbox=self.sandbox)
            wanted = [rank for rank in chosen if self._is_known(rank)]
        else:
            wanted = list(dict.fromkeys(ranks))
            for rank in wanted:
                self._check(rank)
        if not wanted:
            raise UserError(
                "A timeline needs a rank",
                where=f"{len(self.events)} ranks were watched",
                do="Watch those of chosen_ranks before the run, or name ranks that were watched",
            )
        return wanted

    def iterations(self, rank: int, wanted: Iterable[int] | None) -> list[int]:
        begun = self._last_begun(rank)
        if wanted is None:
            last = min(begun, self.num_iterations)
            return list(range(max(1, last - _LAST + 1), last + 1))
        found = sorted(set(wanted))
        wrong = [k for k in found if not 0 <= k <= self.num_iterations + 1]
        if wrong or not found:
            raise UserError(
                "A timeline shows iterations that were replayed",
                where=f"Iterations {wrong} of {self.num_iterations}",
                do=f"Name some of 0 (the prologue) to {self.num_iterations + 1} (the epilogue)",
            )
        return found

    def process(self, rank: int, iterations: Sequence[int]) -> chrome.Process:
        if rank in self.sandbox:
            segments, communication = self.sandbox[rank]
            spans = of_sandbox(self.words, self.made, rank, segments, communication, iterations)
        else:
            spans = of_virtual(self.words, self.made, rank, self._steps(rank), iterations)
        label = "sandbox" if rank in self.sandbox else "virtual"
        row = self.capture.ranks.loc[rank]
        place = " ".join(f"{axis}={at}" for axis, at in row["coordinates"])
        name = ", ".join(t for t in (f"rank {rank}", place, f"role {row['role']}", label) if t)
        windows = [w for k in iterations if (w := self._window(rank, k, spans)) is not None]
        return chrome.Process(rank, name, label, windows, spans)

    def write_rank(self, path: Path, process: chrome.Process, tids: chrome.Threads) -> None:
        events = chrome.events_of(process, tids, time=chrome.whole_us, order=0, as_kernels=True)
        chrome.write(
            path,
            self.head(process.rank, {"iterations": [w.number for w in process.iterations]}),
            events,
        )

    def head(self, rank: int, more: Mapping[str, Any]) -> dict[str, Any]:
        groups = self.words.calls.groups(rank)
        backends = self.capture.groups["backend"].astype(str)
        return {
            "schemaVersion": 1,
            "distributedInfo": {
                "backend": str(backends.iloc[0]) if len(backends) else "",
                "rank": rank,
                "world_size": len(self.capture.ranks),
                "pg_count": len(groups),
                "pg_config": groups,
            },
            "displayTimeUnit": "ms",
            "crystalllm": {
                "version": __version__,
                "fingerprint": self.capture.structure["fingerprint"],
                "note": _NOTE,
                **more,
            },
        }

    def _is_known(self, rank: int) -> bool:
        return rank in self.sandbox or rank in self.events or not self._has_calls(rank)

    def _has_calls(self, rank: int) -> bool:
        program = self.made.world.programs[self.made.world.ranks[rank].program]
        return any(
            i.op in (Op.POST, Op.COMM)
            for lane in program.lanes
            for section in (lane.prologue, lane.body, lane.epilogue)
            for i in section
        )

    def _check(self, rank: int) -> None:
        if not 0 <= rank < len(self.capture.ranks):
            raise UserError(
                f"There is no rank {rank}",
                where=f"A world of {len(self.capture.ranks)}",
                do="Name ranks of this world",
            )
        if not self._is_known(rank):
            raise UserError(
                f"Calls of rank {rank} were not kept",
                where=f"{len(self.events)} ranks were watched",
                do="Watch it before the run (Engine.watch, or watch= of Live)",
            )

    def _steps(self, rank: int) -> Steps:
        events = self.events.get(rank, self.none)
        return follow(self.made.world, rank, events, self.num_iterations)

    def _last_begun(self, rank: int) -> int:
        """The last body in which the rank made a call."""
        if rank in self.sandbox:
            _, communication = self.sandbox[rank]
            begun = communication["iteration"].to_numpy()
        else:
            begun = self.events.get(rank, self.none)["iteration"]
        bodies = begun[begun <= self.num_iterations]
        return int(bodies.max()) if len(bodies) else len(self.engine.marks(rank))

    def _window(self, rank: int, iteration: int, spans: Sequence[Span]) -> chrome.Iteration | None:
        """None for one that the rank has not begun."""
        marks = self.engine.marks(rank)
        at = iteration if self.has_prologue else iteration - 1
        of_it = [s for s in spans if s.iteration == iteration]
        if at > len(marks) or (at == len(marks) and not of_it) or at < 0:
            return None
        begin = int(marks[at - 1]) if at > 0 else 0
        if at == len(marks):  # it was not over when the replay ended, or it is the epilogue
            return chrome.Iteration(iteration, begin, max(begin, *(s.end_ns for s in of_it)))
        parts = self.engine.breakdown(rank)[at]
        args = {f"{name} (ms)": int(parts[f"{name}_ns"]) / 1e6 for name in _PARTS}
        # Of ranks that really run the engine has no parts.
        return chrome.Iteration(
            iteration, begin, int(marks[at]), args if any(args.values()) else {}
        )


_NOTE = (
    "Times are those of a replay, except where a rank is called sandbox: it really ran. Names "
    "nccl_..._VirtualKernel, streams and correlations of one rank are there for "
    "HolisticTraceAnalysis, whatever the backend: no kernel of NCCL ran."
)


def _whole(processes: Sequence[tuple[chrome.Process, chrome.Threads]]) -> tuple[int, int]:
    windows = [w for process, _ in processes for w in process.iterations]
    return (
        min((w.start_ns for w in windows), default=0),
        max((w.end_ns for w in windows), default=0),
    )


def _text(summary: Mapping[str, Any], world_size: int) -> str:
    text = (
        f"{len(summary['ranks'])} of {world_size} ranks, iterations "
        f"{', '.join(map(str, summary['iterations']))} of a replay"
    )
    dropped = len(summary["left_out"]["ranks"])
    return f"{text}; {dropped} ranks left out to stay small" if dropped else text
