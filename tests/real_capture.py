"""Runs a job's program on real gloo ranks that record what they do, for comparison with capture.

The ranks are forked from the calling process, which has torch; as under torchrun, that
process holds the rendezvous store.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

from crystalllm import logical, warm
from crystalllm.capture.captured import Captured
from crystalllm.config import Job
from crystalllm.run import Program


def run(job: Job, folder: Path, *, limit_s: float = 60) -> list[Captured]:
    """What every rank of the job's world left when all were real."""
    import torch.distributed as dist

    warm.prepare()
    folder.mkdir(parents=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = {}
    for rank in range(job.world_size):
        pid = warm.fork()
        if pid == 0:
            _be_rank(job, rank, store.port, folder)
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
    return [Captured.read(folder / f"rank-{rank}.arrow") for rank in range(job.world_size)]


def _be_rank(job: Job, rank: int, port: int, folder: Path) -> None:
    code = 1
    try:
        sys.stdout = sys.stderr = open(folder / f"rank-{rank}.log", "w", buffering=1)  # noqa: SIM115
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        identity = job.identity(rank)
        os.environ.update(identity.variables() | {"MASTER_PORT": str(port)})
        logical.enter(identity, keep_records=True, carried=True)
        Program(command=job.command(iterations=job.capture_iterations)).execute()
        left = Captured.of_world(logical.world(), []).to_bytes()
        (folder / f"rank-{rank}.arrow").write_bytes(left)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
