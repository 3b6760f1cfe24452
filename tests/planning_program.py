"""A program of two roles, and a job of it."""

from __future__ import annotations

import json
from pathlib import Path

from crystalllm.config import Job, load_job

# Two stages: one sends what the other waits for, and all average a number.
PROGRAM = """
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    print(f"step {step}", flush=True)
    if os.environ.get("FAIL") and step == 2:
        raise ValueError("the data has run out")
    x = torch.ones(4, 16)
    if rank % 2:
        dist.recv(x, rank - 1)
    model(x).sum().backward()
    if rank % 2 == 0:
        dist.send(x, rank + 1)
    loss = torch.ones(1)
    dist.all_reduce(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def make_job(folder: Path, **fields: object) -> Job:
    """The job, with its program and file in `folder`; four ranks, two of each role.

    With FAIL in its environment the program fails in its third step.
    """
    program = folder / "train.py"
    program.write_text(PROGRAM)
    content = {
        "program": str(program),
        "arguments": "--steps {iterations}",
        "world_size": 4,
        "ranks_per_node": 2,
        "iterations": 5,
        **fields,
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(content))
    return load_job(str(path))
