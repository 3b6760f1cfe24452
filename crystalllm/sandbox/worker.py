"""The process of one sandbox rank: `python -m crystalllm.sandbox.worker FOLDER`.

Started and supervised by torch elastic. The program runs as everywhere; what it
leaves besides its log is `outcome.json` and the tables of `results`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from crystalllm import artifacts, logical, memory, native, tables
from crystalllm.config import Job
from crystalllm.ending import Ending
from crystalllm.mates import Mates
from crystalllm.profiled import profiled
from crystalllm.run import Program, exit_code, join_threads
from crystalllm.sandbox import results
from crystalllm.sandbox.setup import LOG, OUTCOME, TRACE, Assignment

_PR_SET_PDEATHSIG = 1
# Iterations that a Kineto trace on request has.
_PROFILED = 2


def assigned() -> Assignment:
    """What this process is told; it dies with its supervisor from here on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    number = int(os.environ["LOCAL_RANK"])
    return Assignment.read(Path(sys.argv[1]) / f"assignment-{number}.json")


class Worker:
    """Runs the program as the rank that it is told to be, and writes what came of it."""

    def __init__(self, assignment: Assignment) -> None:
        self.to_do = assignment
        self.folder = Path(assignment.folder)
        self.error: dict[str, str] | None = None
        self.rule: Any = None
        self.trace: Any = None
        self.notes: list[str] = []
        self.keeps_memory = False

    def run(self) -> int:
        """Returns the program's exit code."""
        to_do = self.to_do
        if not to_do.on_terminal:
            _redirect(self.folder / LOG)
        if to_do.core is not None:
            os.sched_setaffinity(0, {to_do.core})
        faulthandler.enable()
        job = Job.model_validate(to_do.job)
        identity = job.identity(to_do.rank)
        ending = Ending(self.write)
        for name in [n for n in os.environ if n.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        os.environ.update(identity.variables())
        logical.enter(
            identity,
            book=Path(to_do.book),
            extra_periods=to_do.extra_periods,
            strict=True,
            keep_records=True,
            mates=self._mates(),
        )
        self.follow()
        self._keep_errors()
        if to_do.limit_s > 0:
            # Where it hangs is the log's last word.
            faulthandler.dump_traceback_later(to_do.limit_s, exit=True)
        with self._profiled():
            ending.code = exit_code(Program(command=tuple(to_do.command)))
        join_threads()
        return ending.code

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """On request, with a Kineto trace of the last iterations that count."""
        if not self.to_do.profile:
            yield
            return
        first, last = self.to_do.measured
        trace = self.to_do.followed
        wanted = range(max(first, last - _PROFILED + 1), last + 1)
        with profiled(
            self.folder / TRACE, wanted, first_mark=trace.first_mark, period=trace.period
        ) as found:
            yield
        if found.note:
            self.notes.append(f"profile: {found.note}")

    def _mates(self) -> Mates | None:
        to_do = self.to_do
        if len(to_do.mates) < 2:
            return None
        return Mates(
            ranks=tuple(to_do.mates),
            store=f"tcp://127.0.0.1:{to_do.store_port}",
            limit_s=to_do.wait_limit_s,
        )

    def follow(self) -> None:
        """From here on calls have to be those of the trace, and end when the replay says."""
        import torch  # the world is there once it is imported

        to_do, trace = self.to_do, self.to_do.followed
        module, world = native.load(), logical.world()
        if len(to_do.mates) < world.size:
            # What peers invent drives weights to where subnormal numbers come up, which CPUs
            # compute many times slower; in real runs they stay rare.
            torch.set_flush_denormal(True)
        self.trace = module.Trace(
            rank=to_do.rank,
            prologue=trace.prologue,
            body=trace.body,
            epilogue=trace.epilogue,
            num_bodies=trace.num_bodies,
        )
        world.follow(self.trace)
        if to_do.memory or to_do.memory_limit_bytes is not None:
            memory.start(world, limit_bytes=to_do.memory_limit_bytes)
            self.keeps_memory = True
        if to_do.address is None:
            return
        self.rule = module.LiveRule(
            library=to_do.library,
            address=to_do.address,
            rank=to_do.rank,
            num_threads=trace.num_threads,
            instructions=bytes.fromhex(trace.instructions),
            cpu_ns=trace.cpu_ns,
            call_ns=trace.call_ns,
            first_mark=trace.first_mark,
            period=trace.period,
            limit_ns=round(to_do.wait_limit_s * 1e9),
            body_ns=to_do.body_ns,
        )
        world.set_release_rule(self.rule)

    def _keep_errors(self) -> None:
        """The exception that ends the program is part of the outcome."""
        show = sys.excepthook

        def keep(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
            self.error = {"kind": kind.__name__, "message": str(error)}
            show(kind, error, tb)

        sys.excepthook = keep

    def write(self, code: int | None) -> None:
        """The last thing that the process does, unless it dies by a signal."""
        faulthandler.cancel_dump_traceback_later()
        world = logical.world()
        outcome: dict[str, Any] = {
            "rank": self.to_do.rank,
            "exit_code": code,
            "error": self.error,
            "notes": self.notes,
        }
        epoch_ns = 0
        if world is not None:
            if code == 0:
                self.trace.end(world.num_calls)
            outcome |= {
                "deviation": world.deviation,
                "num_calls": world.num_calls,
                "num_marks": world.marks,
                "num_invented": world.num_invented,
            }
            epoch_ns = self.rule.epoch_ns if self.rule is not None else world.begin_ns
            if self.keeps_memory:
                outcome |= self._memory(world, epoch_ns)
            ran = results.of_world(world, self.to_do.followed, epoch_ns)
            ran.write(self.folder, provenance=self.to_do.provenance)
        if self.rule is not None:
            self.rule.close()
        text = json.dumps(outcome, indent=2, sort_keys=True) + "\n"
        artifacts.write_atomically(self.folder / OUTCOME, text.encode())

    def _memory(self, world: Any, epoch_ns: int) -> dict[str, Any]:
        """Writes the timeline; the summary, and what was refused last, are part of the outcome."""
        columns, summary = memory.finish(
            world,
            epoch_ns=epoch_ns,
            iteration_of=lambda marks: results.iteration_of(marks, self.to_do.followed),
        )
        tables.MEMORY.write(
            self.folder / "memory.parquet", columns, provenance=self.to_do.provenance
        )
        found: dict[str, Any] = {"memory": summary}
        if summary["out_of_memory"]:
            last = summary["out_of_memory"][-1]
            held = sorted(last["by_category"].items(), key=lambda item: -item[1])
            text = (
                f"Rank {world.rank} ran out of memory. In iteration {last['iteration']}, phase "
                f"{last['phase']}, it asked for {last['bytes']:,} bytes while it held "
                f"{last['held_bytes']:,} of {summary['limit_bytes']:,}: "
                + ", ".join(f"{name} {num_bytes:,}" for name, num_bytes in held if num_bytes)
                + ". Give it more, recompute or offload more, or split the model further."
            )
            found["out_of_memory"] = {**last, "text": text}
        return found


def _redirect(path: Path) -> None:
    """What the program prints, its libraries and its threads too, goes to the log."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    sys.exit(Worker(assigned()).run())
