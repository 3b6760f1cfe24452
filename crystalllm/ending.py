"""Something that has to be written once, whichever way the process ends."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


class Ending:
    """Calls `write` with the exit code (None if it is not known) at the end of the process.

    To be made before the program registers handlers of its own, since the last
    handlers are the first to be registered. Covers return, exit, exceptions and
    os._exit(), not a death by signal.
    """

    def __init__(self, write: Callable[[int | None], None]) -> None:
        self._write = write
        self._written = False
        self.code: int | None = None
        atexit.register(self._finish)
        os._exit = self._wrapped(os._exit)

    def write(self) -> None:
        """Writes now, if it has not happened yet."""
        if not self._written:
            self._written = True
            self._write(self.code)

    def _finish(self) -> None:
        """The last handler: writes, and dies of an interrupt as the interpreter would."""
        self.write()
        if self.code == INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    def _wrapped(self, exit_now: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        process = os.getpid()

        def write_and_exit(status: int) -> NoReturn:
            if os.getpid() == process:  # a fork's end is not the process's
                self.code = status
                self.write()
            exit_now(status)

        return write_and_exit
