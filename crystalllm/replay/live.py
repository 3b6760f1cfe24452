"""Live replay: some ranks are running programs, the others are computed ahead of them.

The engine's process starts a `Live`; every external rank has a `Client`, in the
same process (`Live.client`) or in another one of the host (`attach`). Times are
nanoseconds since the start of the run, on the monotonic clock.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from crystalllm import native
from crystalllm.replay.engine import (
    INSTRUCTION,
    DeadlockError,
    Engine,
    ReplayError,
    declare,
    error_of,
    load_library,
    packed,
)
from crystalllm.replay.world import Instruction, World

_BUCKETS = 40  # CRYSTAL_LIVE_BUCKETS
NOW = -1


class TimeLimitError(ReplayError):
    """A call was not released within its limit; the message says what it waits for."""


class ClosedError(ReplayError):
    """The run was stopped."""


class DiedError(ReplayError):
    """The process of an external rank, or the engine's, has died."""


class BusyError(ReplayError):
    """More calls are open than there is room for."""


_ERRORS = {-3: DeadlockError, -5: TimeLimitError, -6: ClosedError, -7: DiedError, -8: BusyError}


@dataclass(frozen=True)
class Release:
    """When a transfer starts, and when its call is to be released."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Stats:
    """What a run has done so far.

    Args:
        num_arrivals: Calls of external ranks.
        num_releases: Of these, calls whose end is known.
        num_late: Releases that became known after their time.
        late_sum_ns: How late, summed.
        late_max_ns: The latest.
        num_answers: Releases that their own arrival determined.
        answer_sum_ns: From the request to the known release, summed.
        answer_max_ns: The longest.
        late_log2: [k] counts releases that were 2^k to 2^(k+1) ns late.
        answer_log2: The same of answers.
    """

    num_arrivals: int
    num_releases: int
    num_late: int
    late_sum_ns: int
    late_max_ns: int
    num_answers: int
    answer_sum_ns: int
    answer_max_ns: int
    late_log2: tuple[int, ...]
    answer_log2: tuple[int, ...]


class _Options(ctypes.Structure):
    _fields_ = (
        ("num_iterations", ctypes.c_int32),
        ("ahead", ctypes.c_int32),
        ("engine_spin_ns", ctypes.c_int64),
        ("client_spin_ns", ctypes.c_int64),
        ("has_thread", ctypes.c_int32),
        ("helps", ctypes.c_int32),
    )


class _Release(ctypes.Structure):
    _fields_ = (("start_ns", ctypes.c_int64), ("end_ns", ctypes.c_int64))


class _Stats(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in list(Stats.__dataclass_fields__)[:8]),
        ("late_log2", ctypes.c_int64 * _BUCKETS),
        ("answer_log2", ctypes.c_int64 * _BUCKETS),
    )


class Live:
    """A run of a world whose `external` ranks are outside. Use it as a context, or `close`.

    Args:
        world: All ranks, the external ones with their connections.
        external: Ranks whose calls arrive.
        num_iterations: Bodies that the others go through.
        ahead: Iterations that they may be ahead of the slowest external rank.
        watch: Ranks whose calls are kept for `events`.
        engine_spin_ns: How long the engine's thread looks for work before it sleeps.
        client_spin_ns: How long a wait looks for its release before it sleeps.
        has_thread: Without one, only calls of this process make the engine go on.
        helps: Waiting threads of this process compute, too.
        library: The engine's shared object; built if need be.
    """

    def __init__(
        self,
        world: World,
        *,
        external: Sequence[int],
        num_iterations: int,
        ahead: int = 2,
        watch: Sequence[int] = (),
        engine_spin_ns: int = 50_000,
        client_spin_ns: int = 50_000,
        has_thread: bool = True,
        helps: bool = True,
        library: Path | None = None,
    ) -> None:
        library = library or native.replay_library()
        self.library = _load(library)
        self.engine = Engine(world, library=library)
        try:
            self.engine.watch(watch)
            ranks = np.asarray(external, np.int32)
            options = _Options(
                num_iterations, ahead, engine_spin_ns, client_spin_ns, has_thread, helps
            )
            handle = self.library.crystal_live_start(
                self.engine.handle, ranks.ctypes.data, len(ranks), ctypes.byref(options)
            )
            if not handle:
                _fail(self.library, -1)
        except BaseException:
            self.engine.close()
            raise
        self._handle = handle
        # The engine's thread must not outlive what it works on, however this object goes.
        self._stop = weakref.finalize(self, self.library.crystal_live_stop, handle)
        self._free = weakref.finalize(self, _free, self._stop, self.engine)
        self._free.atexit = False

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """By which other processes of this host attach."""
        return self.library.crystal_live_address(self._running()).decode()

    def client(self, rank: int, *, num_threads: int = 1) -> Client:
        """The end of an external rank in this process (see `attach`)."""
        handle = self.library.crystal_live_client(self._running(), rank, num_threads)
        return Client(self.library, handle, rank)

    def settle(self, limit_s: float) -> None:
        """Returns once everything is computed that arrivals so far determine."""
        code = self.library.crystal_live_settle(self._running(), _ns(limit_s))
        if code < 0:
            _fail(self.library, code)

    def stats(self) -> Stats:
        found = _Stats()
        self.library.crystal_live_get_stats(self._running(), ctypes.byref(found))
        values = (getattr(found, name) for name in Stats.__dataclass_fields__)
        return Stats(*(v if isinstance(v, int) else tuple(v) for v in values))

    def stop(self) -> Engine:
        """Ends the run, and gives the engine for its marks, breakdowns and events."""
        self._stop()
        return self.engine

    def close(self) -> None:
        """In any state; whoever waits gets a ClosedError."""
        self._stop()
        self._free()

    def _running(self) -> int:
        if not self._stop.alive:
            raise ClosedError(
                "The replay was stopped",
                where="A call of its live run",
                do="Ask before the stop, or start it again",
            )
        return self._handle


class Client:
    """The end of an external rank. Use it as a context, or `close`: it makes no more calls then."""

    def __init__(self, library: Any, handle: int | None, rank: int) -> None:
        if not handle:
            _fail(library, -1)
        self.library, self.rank = library, rank
        self._handle = handle
        self._detach = weakref.finalize(self, library.crystal_client_detach, handle)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Not while another thread is in a call of this client."""
        self._detach()

    def now_ns(self) -> int:
        """The run's time."""
        return self.library.crystal_client_now(self._attached())

    def arrive(self, call: Instruction, at_ns: int = NOW) -> int:
        """Makes the call, at `at_ns` or now; its ticket comes back at once.

        Raises:
            ReplayError: The run is over; the message says why.
        """
        row = np.zeros(1, INSTRUCTION)
        row[0] = packed(call)
        return self.arrive_raw(row.ctypes.data, at_ns)

    def arrive_raw(self, instruction: Any, at_ns: int = NOW) -> int:
        """The same with the address of an INSTRUCTION, for those who make many calls."""
        ticket = self.library.crystal_client_arrive(self._attached(), instruction, at_ns)
        return ticket if ticket >= 0 else _fail(self.library, ticket)

    def mark(self, at_ns: int = NOW) -> None:
        """An iteration of the rank ends."""
        code = self.library.crystal_client_mark(self._attached(), at_ns)
        if code < 0:
            _fail(self.library, code)

    def tell_slowness(self, factor: float) -> None:
        """From here on virtual ranks compute `factor` times as long as their durations say.

        Of several ranks that tell one, the mean counts. What is computed already stays.

        Raises:
            ReplayError: The run is over, or the factor is no positive number.
        """
        code = self.library.crystal_client_slowness(self._attached(), factor)
        if code < 0:
            _fail(self.library, code)

    def wait(self, ticket: int, limit_s: float) -> Release:
        """The call's release, as soon as it is known (not: due).

        Raises:
            TimeLimitError: It is not known within the limit; the message says what it waits for.
            ReplayError: The run is over; the message says why.
        """
        release = _Release()
        code = self.library.crystal_client_wait(
            self._attached(), ticket, max(_ns(limit_s), 1), ctypes.byref(release)
        )
        if code < 0:
            _fail(self.library, code)
        return Release(release.start_ns, release.end_ns)

    def poll(self, ticket: int) -> Release | None:
        """The call's release if it is known by now."""
        release = _Release()
        code = self.library.crystal_client_wait(self._attached(), ticket, 0, ctypes.byref(release))
        if code == -5:
            return None
        if code < 0:
            _fail(self.library, code)
        return Release(release.start_ns, release.end_ns)

    def wait_until(self, at_ns: int) -> None:
        """Returns at this time of the run; computes ahead meanwhile, where this process may."""
        code = self.library.crystal_client_wait_until(self._attached(), at_ns)
        if code < 0:
            _fail(self.library, code)

    def _attached(self) -> int:
        if not self._detach.alive:
            raise ClosedError(
                "The rank has been detached",
                where=f"Rank {self.rank}",
                do="Make its calls before",
            )
        return self._handle


def attach(address: str, rank: int, *, num_threads: int = 1, library: Path | None = None) -> Client:
    """The end of an external rank, in another process than the engine's.

    Args:
        address: Of the run (`Live.address`).
        rank: Whose calls arrive here.
        num_threads: That make the rank's calls. When all of them wait, it makes no other;
            0 if that is not so, and no circle of waiting is found through this rank.
        library: The engine's shared object; built if need be.
    """
    loaded = _load(library or native.replay_library())
    handle = loaded.crystal_client_attach(address.encode(), rank, num_threads)
    return Client(loaded, handle, rank)


def _free(stop: Any, engine: Engine) -> None:
    stop()  # whichever of the finalizers comes first
    engine.close()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _fail(library: Any, code: int) -> Any:
    raise error_of(library.crystal_live_message(), _ERRORS.get(code, ReplayError))


def _load(path: Path) -> Any:
    library = load_library(path)
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures = {
        "live_message": (ctypes.c_char_p, []),
        "live_start": (pointer, [pointer, pointer, i32, pointer]),
        "live_stop": (None, [pointer]),
        "live_address": (ctypes.c_char_p, [pointer]),
        "live_settle": (ctypes.c_int, [pointer, i64]),
        "live_get_stats": (None, [pointer, pointer]),
        "live_client": (pointer, [pointer, i32, i32]),
        "client_attach": (pointer, [ctypes.c_char_p, i32, i32]),
        "client_detach": (None, [pointer]),
        "client_now": (i64, [pointer]),
        "client_arrive": (i64, [pointer, pointer, i64]),
        "client_mark": (ctypes.c_int, [pointer, i64]),
        "client_slowness": (ctypes.c_int, [pointer, ctypes.c_double]),
        "client_wait": (ctypes.c_int, [pointer, i64, i64, pointer]),
        "client_wait_until": (ctypes.c_int, [pointer, i64]),
    }
    declare(library, "crystal_", signatures)
    return library
