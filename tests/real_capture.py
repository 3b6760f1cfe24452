"""Runs a job's program on real gloo ranks that record what they do, for comparison with ours.

The ranks are forked from the calling process, which has torch; as under torchrun, that
process holds the rendezvous store.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from crystalllm import logical, warm
from crystalllm.capture.captured import Captured
from crystalllm.config import Job
from crystalllm.run import Program


def run(job: Job, folder: Path, *, limit_s: float = 60) -> list[Captured]:
    """What every rank of the job's world left when all were real."""
    ranks = run_ranks(job, folder, leave=_leave_captured, limit_s=limit_s)
    return [Captured.from_bytes(left, where=f"rank {rank}") for rank, left in enumerate(ranks)]


def _leave_captured() -> bytes:
    return Captured.of_world(logical.world(), []).to_bytes()


def run_ranks(
    job: Job,
    folder: Path,
    *,
    begin: Callable[[], None] = lambda: None,
    leave: Callable[[], bytes],
    limit_s: float = 180,
) -> list[bytes]:
    """Runs all ranks of the job's world, and gives what each of them left.

    Args:
        job: The program and its world.
        folder: Of logs and results; made here.
        begin: Called in each rank before the program.
        leave: Called in each rank after it; gives what is left.
        limit_s: Seconds for all.
    """
    import torch.distributed as dist

    warm.prepare()
    folder.mkdir(parents=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = {}
    for rank in range(job.world_size):
        pid = warm.fork()
        if pid == 0:
            _be_rank(job, rank, store.port, folder, begin, leave)
        pids[pid] = rank
    failed = []
    deadline = time.monotonic() + limit_s
    while pids:
        pid, status = next((found for p in pids if (found := os.waitpid(p, os.WNOHANG))[0]), (0, 0))
        if pid:
            rank = pids.pop(pid)
            if status:
                failed.append(rank)
        elif failed or time.monotonic() > deadline:
            break
        else:
            time.sleep(0.01)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = {r: (folder / f"rank-{r}.log").read_text()[-3000:] for r in failed or pids.values()}
    assert not texts, f"real ranks failed or did not end within {limit_s:g} s: {texts}"
    return [(folder / f"rank-{rank}").read_bytes() for rank in range(job.world_size)]


def _be_rank(
    job: Job,
    rank: int,
    port: int,
    folder: Path,
    begin: Callable[[], None],
    leave: Callable[[], bytes],
) -> None:
    code = 1
    try:
        sys.stdout = sys.stderr = open(folder / f"rank-{rank}.log", "w", buffering=1)  # noqa: SIM115
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        identity = job.identity(rank)
        os.environ.update(identity.variables() | {"MASTER_PORT": str(port)})
        logical.enter(identity, keep_records=True, carried=True)
        begin()
        Program(command=job.command(iterations=job.capture_iterations)).execute()
        (folder / f"rank-{rank}").write_bytes(leave())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
