"""A program of equal ranks, and what tests of comparisons need of it.

SLOW="rank block ms" in its environment makes one rank compute one block longer; TRACES is the
folder into which a profiler writes.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from crystalllm import warm
from crystalllm.config import Job, load_job
from crystalllm.run import Program

WORLD_SIZE = 2
PROGRAM = """
import argparse, contextlib, os, time, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--blocks", type=int, default=12)
args = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
slow_rank, slow_block, slow_ms = map(float, os.environ.get("SLOW", "-1 -1 0").split())
torch.manual_seed(0)
blocks = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(args.blocks))
optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-3)
traces = os.environ.get("TRACES")
profiler = contextlib.nullcontext()
if traces:
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=2, warmup=1, active=args.steps - 3, repeat=1),
        record_shapes=True,
        on_trace_ready=lambda p: p.export_chrome_trace(f"{traces}/rank-{rank}.json"),
    )
profiler.__enter__()
for step in range(args.steps):
    x = torch.randn(64, 256)
    for number, block in enumerate(blocks):
        for _ in range(4):
            x = block(x).relu()
        if (rank, number) == (slow_rank, slow_block):
            until = time.perf_counter() + slow_ms / 1e3
            while time.perf_counter() < until:
                pass
        dist.all_reduce(x)
        x = x / dist.get_world_size()
    x.square().mean().backward()
    for p in blocks.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    if traces:
        profiler.step()
profiler.__exit__(None, None, None)
dist.barrier()
dist.destroy_process_group()
"""

RANK, BLOCK = 1, 3  # of those that are slowed


def make_job(folder: Path, **fields: object) -> Job:
    (folder / "program.py").write_text(PROGRAM)
    content = {
        "program": str(folder / "program.py"),
        "arguments": "--steps {iterations}",
        "world_size": WORLD_SIZE,
        "iterations": 10,
        "capture_iterations": 4,
        **fields,
    }
    (folder / "job.yaml").write_text(json.dumps(content))
    return load_job(str(folder / "job.yaml"))


def real_traces(job: Job, folder: Path, *, steps: int = 12, limit_s: float = 300) -> list[Path]:
    """Kineto traces of the program on real gloo ranks, forked from this process."""
    folder.mkdir()
    warm.prepare()
    pids = {}
    for rank in range(job.world_size):
        pid = warm.fork()
        if pid == 0:
            _be_real(job, rank, folder, steps)
        pids[pid] = rank
    deadline = time.monotonic() + limit_s
    failed = []
    while pids and time.monotonic() < deadline and not failed:
        for pid in list(pids):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                rank = pids.pop(pid)
                failed += [rank] if status else []
        time.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    logs = {r: (folder / f"log-{r}.txt").read_text()[-2000:] for r in failed or pids.values()}
    assert not logs, logs
    return [folder / f"rank-{rank}.json" for rank in range(job.world_size)]


def _be_real(job: Job, rank: int, folder: Path, steps: int) -> None:
    code = 1
    try:
        log = os.open(folder / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(job.identity(rank).variables() | {"TRACES": str(folder)})
        # A file is their rendezvous: no port is needed that somebody else may take.
        import torch.distributed as dist

        address = f"file://{folder}/rendezvous"
        init = functools.partial(
            dist.init_process_group, init_method=address, rank=rank, world_size=job.world_size
        )
        dist.init_process_group = init
        Program(command=job.command(iterations=steps)).execute()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
