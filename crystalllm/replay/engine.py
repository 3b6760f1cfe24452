"""The engine from Python: a world in, times out (nccl/replay/replay.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from crystalllm import native
from crystalllm.errors import UserError
from crystalllm.replay.world import Instruction, Program, World

INSTRUCTION = np.dtype(
    [
        ("op", np.uint8),
        ("ends", np.uint8),
        ("flags", np.uint16),
        ("slot", np.int32),
        ("handle", np.int32),
        ("cls", np.int32),
        ("form", np.int32),
        ("call", np.int32),
    ]
)
LANE = np.dtype(
    {
        "names": ["begin", "prologue", "body", "epilogue"],
        "formats": [np.int64, np.int32, np.int32, np.int32],
        "offsets": [0, 8, 12, 16],
        "itemsize": 24,
    }
)
EVENT = np.dtype(
    [
        ("rank", np.int32),
        ("lane", np.int32),
        ("iteration", np.int32),
        ("call", np.int32),
        ("arrival_ns", np.int64),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
    ]
)
STEP = np.dtype(
    [(name, np.int32) for name in ("rank", "lane", "position", "op", "call", "cls")]
    + [(name, np.int64) for name in ("start_ns", "end_ns", "slack_ns")]
)
PERTURBATION = np.dtype(
    [
        ("kind", np.int32),
        ("rank", np.int32),
        ("first", np.int32),
        ("every", np.int32),
        ("factor", np.float64),
        ("pause_ns", np.int64),
        ("at_ns", np.int64),
    ]
)
BREAKDOWN = np.dtype(
    [(f"{part}_ns", np.int64) for part in ("compute", "host", "wait", "bubble", "exposed")]
)
_ROOT, _MESSAGE = 1, 2
_DEADLOCK = -3


class ReplayError(UserError):
    """The engine refuses a world; the message names ranks and calls."""


class DeadlockError(ReplayError):
    """Ranks wait, and nobody can go on."""


class Engine:
    """One world in the engine. Use it as a context, or call `close`."""

    def __init__(self, world: World, *, library: Path | None = None) -> None:
        self.library = load_library(library or native.replay_library())
        self.handle = self.library.crystal_replay_new()
        self.num_ranks = len(world.ranks)
        try:
            self._fill(world)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        handle, self.handle = self.handle, None
        self.library.crystal_replay_free(handle)

    def watch(self, ranks: Iterable[int]) -> None:
        """Keeps the calls of these ranks."""
        for rank in ranks:
            self._check(self.library.crystal_replay_watch(self.handle, rank))

    def trace(self, iteration: int) -> None:
        """Keeps what the critical path of this iteration (from 1) needs."""
        self._check(self.library.crystal_replay_trace(self.handle, iteration))

    def run(self, num_iterations: int) -> None:
        """Goes through prologue, so many bodies, and epilogue.

        Raises:
            DeadlockError: Ranks wait in a circle, or for one that has ended.
            ReplayError: Calls do not fit together.
        """
        self._check(self.library.crystal_replay_run(self.handle, num_iterations))

    @property
    def num_participations(self) -> int:
        return self.library.crystal_replay_num_participations(self.handle)

    def events(self) -> np.ndarray:
        """Calls of watched ranks, with the fields of EVENT."""
        return self._out(self.library.crystal_replay_events, EVENT)

    def critical_path(self) -> np.ndarray:
        """The traced iteration from its last mark back, with the fields of STEP."""
        return self._out(self.library.crystal_replay_critical_path, STEP)

    def marks(self, rank: int) -> np.ndarray:
        """When the rank's iterations ended, in ns."""
        return self._out(self.library.crystal_replay_marks, np.dtype(np.int64), rank)

    def lane_ends(self, rank: int) -> np.ndarray:
        return self._out(self.library.crystal_replay_lane_ends, np.dtype(np.int64), rank)

    def breakdown(self, rank: int) -> np.ndarray:
        """Where the time before each mark went, with the fields of BREAKDOWN."""
        return self._out(self.library.crystal_replay_breakdown, BREAKDOWN, rank)

    def _fill(self, world: World) -> None:
        lib, handle = self.library, self.handle
        for program in world.programs:
            lanes, instructions, num_handles, num_channels = _flatten(program)
            self._check(
                lib.crystal_replay_add_program(
                    handle,
                    _pointer(lanes),
                    len(lanes),
                    _pointer(instructions),
                    len(instructions),
                    num_handles,
                    num_channels,
                )
            )
        sizes = np.asarray(world.communicators, np.int32)
        self._check(lib.crystal_replay_set_communicators(handle, _pointer(sizes), len(sizes)))
        programs = np.asarray([r.program for r in world.ranks], np.int32)
        counts = [len(r.connections) for r in world.ranks]
        begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        connections = np.fromiter((c for r in world.ranks for c in r.connections), np.int32)
        self._check(
            lib.crystal_replay_add_ranks(
                handle, len(programs), _pointer(programs), _pointer(begin), _pointer(connections)
            )
        )
        d = world.durations
        ns = np.asarray(d.ns, np.int64)
        spread, drain = _or_null(d.spread, np.float64), _or_null(d.drain_ns, np.int64)
        self._check(
            lib.crystal_replay_set_durations(
                handle, _pointer(ns), _pointer(spread), _pointer(drain), len(ns), d.seed
            )
        )
        for cls, choices in d.choices.items():
            values = np.array([c[0] for c in choices], np.int64)
            weights = np.array([c[1] for c in choices], np.int64)
            self._check(
                lib.crystal_replay_set_choices(
                    handle, cls, _pointer(values), _pointer(weights), len(choices)
                )
            )
        ranks, links = _or_null(d.rank_factors, np.float64), _or_null(d.link_factors, np.float64)
        self._check(lib.crystal_replay_set_rank_factors(handle, _pointer(ranks)))
        self._check(lib.crystal_replay_set_link_factors(handle, _pointer(links)))
        link_classes = _or_null(d.link_classes, np.int32)
        self._check(lib.crystal_replay_set_link_classes(handle, _pointer(link_classes)))
        rows = [
            (p.kind, p.rank, p.first, p.every, p.factor, p.pause_ns, p.at_ns)
            for p in d.perturbations
        ]
        perturbations = np.array(rows, PERTURBATION)
        self._check(
            lib.crystal_replay_set_perturbations(handle, _pointer(perturbations), len(rows))
        )

    def _out(self, function: Any, dtype: np.dtype, *where: int) -> np.ndarray:
        n = function(self.handle, *where, None, 0)
        if n < 0:
            raise ReplayError(
                "There is no such rank in the world",
                where=f"Rank {where[0]} of {self.num_ranks}",
                do="Ask for one that was added",
            )
        found = np.empty(n, dtype)
        function(self.handle, *where, _pointer(found), n)
        return found

    def _check(self, code: int) -> int:
        if code >= 0:
            return code
        kind = DeadlockError if code == _DEADLOCK else ReplayError
        raise error_of(self.library.crystal_replay_message(self.handle), kind)


def packed(i: Instruction) -> tuple[int, ...]:
    """An instruction as a row of INSTRUCTION."""
    flags = _ROOT * i.is_root + _MESSAGE * i.is_message
    return (i.op, i.end, flags, i.slot, i.handle, i.cls, i.form, i.call)


def _flatten(program: Program) -> tuple[np.ndarray, np.ndarray, int, int]:
    lanes = np.zeros(len(program.lanes), LANE)
    rows = []
    num_handles = num_channels = 0
    for number, lane in enumerate(program.lanes):
        shape = (len(lane.prologue), len(lane.body), len(lane.epilogue))
        lanes[number] = (len(rows), *shape)
        for section in (lane.prologue, lane.body, lane.epilogue):
            for i in section:
                rows.append(packed(i))
                num_handles = max(num_handles, i.handle + 1)
                if i.op.name in ("SIGNAL", "AWAIT"):
                    num_channels = max(num_channels, i.slot + 1)
    return lanes, np.array(rows, INSTRUCTION), num_handles, num_channels


def _or_null(values: Sequence[Any], dtype: Any) -> np.ndarray | None:
    return np.asarray(values, dtype) if len(values) else None


def _pointer(array: np.ndarray | None) -> Any:
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)


def load_library(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    pointer, i32, i64, u64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
    signatures = {
        "new": (pointer, []),
        "free": (None, [pointer]),
        "message": (ctypes.c_char_p, [pointer]),
        "add_program": (ctypes.c_int, [pointer, pointer, i32, pointer, i64, i32, i32]),
        "set_communicators": (ctypes.c_int, [pointer, pointer, i32]),
        "add_ranks": (ctypes.c_int, [pointer, i32, pointer, pointer, pointer]),
        "set_durations": (ctypes.c_int, [pointer, pointer, pointer, pointer, i32, u64]),
        "set_choices": (ctypes.c_int, [pointer, i32, pointer, pointer, i32]),
        "set_rank_factors": (ctypes.c_int, [pointer, pointer]),
        "set_link_factors": (ctypes.c_int, [pointer, pointer]),
        "set_link_classes": (ctypes.c_int, [pointer, pointer]),
        "set_perturbations": (ctypes.c_int, [pointer, pointer, i32]),
        "trace": (ctypes.c_int, [pointer, i32]),
        "critical_path": (i64, [pointer, pointer, i64]),
        "watch": (ctypes.c_int, [pointer, i32]),
        "run": (ctypes.c_int, [pointer, i32]),
        "num_participations": (i64, [pointer]),
        "marks": (i64, [pointer, i32, pointer, i64]),
        "lane_ends": (i64, [pointer, i32, pointer, i64]),
        "breakdown": (i64, [pointer, i32, pointer, i64]),
        "events": (i64, [pointer, pointer, i64]),
    }
    declare(library, "crystal_replay_", signatures)
    return library


def declare(library: Any, prefix: str, signatures: Mapping[str, tuple[Any, list[Any]]]) -> None:
    """Tells ctypes the result and arguments of each function."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, prefix + name)
        function.restype, function.argtypes = result, arguments


def error_of(message: bytes, kind: type[ReplayError]) -> ReplayError:
    """The library's message of three sentences as an exception."""
    what, where, do = (part.strip() for part in message.decode().rstrip(".").split(". ", 2))
    return kind(what, where=where, do=do)
