"""A small program with tensor-, data- and pipeline-parallel calls, and a job of it.

DEVIATE in its environment makes it do something that was not captured.
"""

from __future__ import annotations

import json
from pathlib import Path

from crystalllm import sandbox
from crystalllm.capture import capture
from crystalllm.config import Job, load_job
from crystalllm.replay.program import Capture
from crystalllm.transfers.uniform import uniform_transfers

PROGRAM = """
import argparse, os, sys, time, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch", type=int, default=4)
args = parser.parse_args()
deviate = os.environ.get("DEVIATE", "")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
shape = (world // 2, 2) if deviate != "layout" else (2, world // 2)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
torch.manual_seed(args.seed)
model = DDP(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)), process_group=dp)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
dtype = torch.bfloat16 if deviate == "dtype" else torch.float32
for step in range(args.steps):
    batch = args.batch * (2 if deviate == "micro batch" else 1)
    x = torch.randn(batch, 32)
    out = model(x).to(dtype)
    dist.all_reduce(out, group=tp)
    if deviate == "extra" and step == 3:
        dist.all_reduce(torch.ones(3), group=dp)
    if deviate == "sleep" and step == 3:
        time.sleep(3600)
    if deviate == "raise" and step == 3:
        raise ValueError("the data has run out")
    if deviate == "exit" and step == 3:
        sys.exit(0)
    if deviate == "kill" and step == 3:
        print("about to die", flush=True)
        os.kill(os.getpid(), 9)
    if deviate == "pdb" and step == 3:
        breakpoint()
    loss = out.float().square().mean()
    loss.backward()
    requests = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((8,), float(rank)), (rank + 1) % world),
        dist.P2POp(dist.irecv, torch.empty(8), (rank - 1) % world),
    ])
    for request in requests:
        request.wait()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.5f}", flush=True)
print("a subnormal number is", (torch.tensor([1e-40]) * 1).item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def make_job(folder: Path, *, world_size: int = 8, **fields: object) -> Job:
    """The job, with its program and file in `folder`."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    content = {
        "program": str(program),
        "arguments": "--steps {iterations} --seed {seed}",
        "world_size": world_size,
        "ranks_per_node": 4,
        "iterations": 6,
        "capture_iterations": 4,
        **fields,
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(content))
    return load_job(str(path))


def make_setup(folder: Path, rank: int) -> sandbox.Setup:
    """A run of one of eight ranks, by the captured durations and a model of the links."""
    job = make_job(folder)
    capture(job, folder / "capture", strategy="all")
    captured = Capture.read(folder / "capture")
    durations = captured.captured_durations()
    durations.transfers = uniform_transfers(captured.calls, latency_ns=50e3, bytes_per_s=1e9)
    return sandbox.Setup(
        job=job,
        ranks=(rank,),
        capture=folder / "capture",
        durations=durations,
        iterations=4,
        warm_up=1,
        limit_s=60,
    )
