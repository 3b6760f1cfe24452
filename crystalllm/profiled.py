"""A Kineto trace of some iterations of the program that runs in this process.

torch.profiler records operators and their shapes on the CPU, from one mark to
another. It takes time itself: nothing that is timed meanwhile is a measurement.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from crystalllm import marks


class Profiled:
    """What came of it.

    Attributes:
        note: Why there is no trace, or not of all iterations; empty where all is well.
        iterations: Of which the trace tells.
    """

    def __init__(self, path: Path, iterations: range, begin: int, period: int) -> None:
        self.note = ""
        self.iterations: list[int] = []
        self._path, self._wanted = path, iterations
        # Marks at which a wanted iteration begins.
        self._at = {begin + i * period: k for i, k in enumerate(iterations)}
        self._end = begin + len(iterations) * period
        self._profiler: Any = None
        self._thread = 0
        self._is_ours = False

    def at_mark(self, num_marks: int) -> None:
        """Starts, goes to the next iteration, or ends."""
        if num_marks not in self._at and num_marks != self._end:
            return
        if self._profiler is None:
            if num_marks == min(self._at, default=-1) and not self.note:
                self._start()
        elif threading.get_ident() != self._thread:
            # Profilers belong to threads, and this is not ours.
            self.note = "marks come from several threads, so the trace goes to the program's end"
            self._at, self._end = {}, -1
        elif num_marks == self._end:
            self.iterations.append(self._wanted[-1])
            self._stop(keep=True)
        else:
            self.iterations.append(self._at[num_marks] - 1)
            self._profiler.step()

    def give_way(self) -> None:
        """The program starts a profiler: there can be one at a time, and it is the program's."""
        if self._is_ours or (self._profiler is None and self.iterations):
            return  # ours, or after it
        self.note = "the program uses a profiler itself, so no trace was written"
        self.iterations.clear()
        if self._profiler is not None and threading.get_ident() == self._thread:
            self._stop(keep=False)

    def close(self) -> None:
        """At the program's end, whichever it is: keeps what there is."""
        if self._profiler is not None and threading.get_ident() == self._thread:
            self._stop(keep=True)
        if not self.note and len(self.iterations) < len(self._wanted):
            self.note = (
                f"the program ended in the profiled iterations: {len(self.iterations)} of "
                f"{len(self._wanted)} are whole"
                if self._path.exists()
                else f"the program never came to iteration {self._wanted[0]}"
            )

    def _start(self) -> None:
        from torch import profiler

        made = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU],
            # With a schedule it writes ProfilerStep#k; one that is none.
            schedule=lambda _: profiler.ProfilerAction.RECORD,
            record_shapes=True,
        )
        made.step_num = self._wanted[0]  # the number in ProfilerStep#
        self._is_ours = True
        try:
            made.start()
        finally:
            self._is_ours = False
        self._profiler, self._thread = made, threading.get_ident()

    def _stop(self, *, keep: bool) -> None:
        made, self._profiler = self._profiler, None
        made.stop()
        if keep:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(f".{self._path.name}.partial.json.gz")
            try:
                made.export_chrome_trace(str(partial))
                partial.rename(self._path)
            finally:
                partial.unlink(missing_ok=True)


@contextmanager
def profiled(
    path: Path, iterations: range, *, first_mark: int, period: int = 1
) -> Iterator[Profiled]:
    """Writes a trace of some iterations of what runs in the context, which imported torch before.

    A program that starts a profiler of its own before these are over keeps it, and no
    trace is written.

    Args:
        path: The trace, `trace.json.gz`; its ProfilerStep#k is iteration k.
        iterations: Consecutive ones, counted from 1; those before are there to warm up.
        first_mark: Marks before iteration 1.
        period: Marks of an iteration.
    """
    begin = first_mark + (iterations[0] - 1) * period
    found = Profiled(path, iterations, begin, period)
    with _noticed(found), marks.heard(found.at_mark):
        if begin == 0:
            found.at_mark(0)
        try:
            yield found
        finally:
            found.close()


@contextmanager
def _noticed(found: Profiled) -> Iterator[None]:
    """Hears of every profiler that is made ready in this process."""
    from torch.autograd import profiler, profiler_legacy

    with ExitStack() as undo:
        for kind, name in ((profiler.profile, "_prepare_trace"),
                           (profiler_legacy.profile, "_start_trace")):  # fmt: skip
            original = getattr(kind, name)

            def prepared(self: Any, *, original: Any = original) -> Any:
                found.give_way()
                return original(self)

            setattr(kind, name, prepared)
            undo.callback(setattr, kind, name, original)
        yield
