"""Logical ranks forked from one warm process.

A fresh process pays seconds for importing torch; a fork of one that has it
pays milliseconds. The parent must not compute with torch before it forks,
since OpenMP's threads do not survive a fork.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crystalllm import logical, native
from crystalllm.errors import UserError
from crystalllm.identity import Identity

_DEFAULT_LIMIT_S = 300.0


class RankError(RuntimeError):
    """A forked rank ended with an exception.

    Args:
        kind: The exception's type name.
        message: Its text.
        trace: Its traceback, as text.
    """

    def __init__(self, kind: str, message: str, trace: str) -> None:
        self.kind, self.message, self.trace = kind, message, trace
        super().__init__(f"{kind}: {message}\n{trace}")

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError, (self.kind, self.message, self.trace)


@dataclass(frozen=True)
class Outcome:
    """What a forked rank left: a value, or what it raised or died of."""

    value: Any = None
    error: RankError | UserError | None = None


def prepare() -> None:
    """Imports what every rank needs. Call it once, early, in the parent."""
    import torch
    import torch._dynamo  # 1.6 s in each child otherwise, as optimizers import it
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    native.load()
    gc.collect()
    gc.freeze()  # a collection in a child would copy the parent's pages


def fork() -> int:
    """os.fork() from the warm process: 0 in the child, its process id in the parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks from processes with threads. The threads here
        # are idle pools of libraries that children don't use.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def call(
    function: Callable[[], Any],
    identity: Identity,
    *,
    limit_s: float = _DEFAULT_LIMIT_S,
    **world: Any,
) -> Any:
    """Runs `function` in a fork that is rank `identity.rank`; returns what it returns.

    Args:
        function: Called without arguments; its result must be picklable.
        identity: Who the fork is.
        limit_s: Seconds after which it is killed.
        world: Passed on to `logical.enter`.

    Raises:
        RankError: `function` raised.
        UserError: The fork died or ran past its limit.
    """
    (outcome,) = call_together(function, [identity], limit_s=limit_s, **world)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def call_together(
    function: Callable[[], Any],
    identities: Sequence[Identity],
    *,
    limit_s: float = _DEFAULT_LIMIT_S,
    **world: Any,
) -> list[Outcome]:
    """Runs `function` in one fork per identity, all at the same time.

    Args:
        function, limit_s, world: As for `call`.
        identities: Who the forks are.

    Returns:
        What each left, in that order; its error is what `call` would raise.
    """
    deadline = time.monotonic() + limit_s
    forks: list[tuple[Identity, int, int]] = []
    outcomes: list[Outcome] = []
    num_ended = 0
    try:
        for identity in identities:
            forks.append((identity, *_start(function, identity, world)))
        for identity, pid, read_end in forks:
            data = _read_all(read_end, deadline)
            if data is None:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            num_ended += 1
            outcomes.append(_outcome(identity, data, status, limit_s))
    finally:  # also when the parent is interrupted
        for _, _, read_end in forks:
            os.close(read_end)
        for _, pid, _ in forks[num_ended:]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return outcomes


def _start(
    function: Callable[[], Any], identity: Identity, world: dict[str, Any]
) -> tuple[int, int]:
    """Process id of a new fork, and the pipe that its outcome comes through."""
    read_end, write_end = os.pipe()
    pid = fork()
    if pid == 0:
        os.close(read_end)
        _be_child(function, identity, write_end, world)
    os.close(write_end)
    return pid, read_end


def _outcome(identity: Identity, data: bytes | None, status: int, limit_s: float) -> Outcome:
    """Of a fork that wrote `data` and ended with `status`; without data it was killed."""
    where = f"Rank {identity.rank} of {identity.world_size}"
    if data is None:
        return Outcome(
            error=UserError(
                f"A logical rank did not end within {limit_s:g} s",
                where=where,
                do="Look for a wait that never ends, or raise the limit",
            )
        )
    if not data:
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Outcome(
            error=UserError(
                f"A logical rank died with {how} before it gave its result",
                where=where,
                do="Read its output; a kill without a message is often memory",
            )
        )
    return pickle.loads(data)


def _be_child(
    function: Callable[[], Any], identity: Identity, write_end: int, world: dict[str, Any]
) -> None:
    code = 1
    try:
        os.environ.update(identity.variables())
        try:
            logical.enter(identity, **world)
            outcome = Outcome(value=function())
            data = pickle.dumps(outcome)
        except BaseException as error:
            described = RankError(type(error).__name__, str(error), traceback.format_exc())
            data = pickle.dumps(Outcome(error=described))
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(data)
        code = 0
    finally:
        os._exit(code)  # the parent's atexit handlers and buffers are not ours to run


def _read_all(fd: int, deadline: float) -> bytes | None:
    """Everything until the other end closes; None when the deadline comes first."""
    chunks = []
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(fd, 1 << 20)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
