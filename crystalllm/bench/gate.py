"""Programs that take turns: each runs a block of iterations, then stands still until its next turn.

So runs that are compared alternate every few seconds, in processes that have long warmed up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

_KEY = b"crystalllm"
# Until a program has come, and until it is its turn.
_LIMIT_S = 300.0
# A block takes some seconds.
_TURN_LIMIT_S = 60.0
_STOP = 0


class Gate:
    """The side of a program: to be called after each iteration.

    Args:
        address: Of the `Gates`.
        name: Who this is.
    """

    def __init__(self, address: str, name: str) -> None:
        self._connection = Client(address, authkey=_KEY)
        self._connection.send((name, os.getpid()))
        self._times: list[int] = []
        self._left = self._turn()

    def __call__(self, *_: Any) -> None:
        """Notes the time; at the end of a block waits for the next one, or ends the program."""
        self._times.append(time.monotonic_ns())
        self._left -= 1
        if self._left > 0:
            return
        self._connection.send(self._times)
        self._left = self._turn()
        if self._left == _STOP:
            raise SystemExit(0)
        # How long it stood still is part of no iteration.
        self._times = [time.monotonic_ns()]

    def _turn(self) -> int:
        if not self._connection.poll(_LIMIT_S):
            raise TimeoutError(f"No turn came within {_LIMIT_S:g} s.")
        return int(self._connection.recv())


class LateError(TimeoutError):
    """A program did not end its turn."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} did not end its turn within {_TURN_LIMIT_S:g} s.")
        self.name = name


class Gates:
    """The side that gives turns."""

    def __init__(self, folder: Path) -> None:
        self._listener = Listener(str(folder / "gate"), family="AF_UNIX", authkey=_KEY)
        self._connections: dict[str, Connection] = {}
        self._pids: dict[str, int] = {}

    @property
    def address(self) -> str:
        return str(self._listener.address)

    def accept(self, names: Iterable[str]) -> None:
        """Waits for these programs; each has a turn to wait for then."""
        missing = set(names) - set(self._connections)
        waiting = self._listener._listener._socket  # the class itself knows no limit
        while missing:
            if not wait([waiting], _LIMIT_S):
                raise TimeoutError(f"{', '.join(sorted(missing))} did not come.")
            connection = self._listener.accept()
            name, pid = connection.recv()
            self._connections[name], self._pids[name] = connection, pid
            missing.discard(name)

    def turn(self, names: Iterable[str], iterations: int) -> dict[str, list[int]]:
        """Lets these run together for so many iterations; the times of each, in ns.

        The first time is the turn's begin, except in the first one.

        Raises:
            EOFError: One has ended.
            LateError: One goes on for too long.
        """
        chosen = list(names)
        for name in chosen:
            self._connections[name].send(iterations)
        found = {}
        for name in chosen:
            if not self._connections[name].poll(_TURN_LIMIT_S):
                raise LateError(name)
            found[name] = self._connections[name].recv()
        return found

    def stop(self) -> None:
        """Ends all of them."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # it has ended
                connection.send(_STOP)
        self._listener.close()

    def kill(self) -> None:
        """Ends those too that do not come to their gate."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
