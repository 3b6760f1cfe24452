"""Starting and supervising the processes of sandbox ranks, by torch elastic."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_RUN_ID = "crystalllm"
# The program's own clean-up, once a process is asked to end.
_END_LIMIT_S = 10


@dataclass(frozen=True)
class Failure:
    """The process that ended a run.

    Args:
        number: Of the worker, from 0.
        exit_code: Negative is a signal; 128 and the signal's number if the run was stopped.
        what: For people.
    """

    number: int
    exit_code: int
    what: str


def run_workers(module: str, folder: Path, num_workers: int) -> Failure | None:
    """Runs `python -m module folder` in so many processes; returns when all have ended.

    The first that fails ends the others. Ending this process, or interrupting it,
    ends them too. Worker i finds i in LOCAL_RANK.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=_RUN_ID,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    command = [sys.executable, "-m", module, str(folder)]
    with _own_words(), _own_signals(), _quick_end():
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            number, first = min(error.failures.items(), key=lambda item: item[1].timestamp)
            return Failure(number, first.exitcode, _described(first.exitcode))
        except SignalException as stop:
            return Failure(-1, 128 + stop.sigval, f"stopped by {stop.sigval.name}")
        except KeyboardInterrupt:
            return Failure(-1, 128 + signal.SIGINT, "stopped by SIGINT")
    return None


def _described(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; a kill without a message is often memory" if name == "SIGKILL" else ""
    return f"died of {name}{hint}"


@contextmanager
def _own_words() -> Iterator[None]:
    """Torch elastic reports failures at length; the summary says it in our words."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Torch elastic takes signals for its own and keeps them; afterwards they are ours again."""
    taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in taken}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _quick_end() -> Iterator[None]:
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    before = os.environ.get(name)
    os.environ.setdefault(name, str(_END_LIMIT_S))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
