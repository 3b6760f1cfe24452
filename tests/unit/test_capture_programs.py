"""Capture of programs whose iterations are hard to see, and of distributed checkpoints."""

from __future__ import annotations

import json

import pytest

from crystalllm import tables
from crystalllm.capture import capture
from crystalllm.config import load_job
from crystalllm.errors import UserError
from crystalllm.payload import PayloadBook

HEADER = """
import argparse, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
"""

# Four steps whose gradients overflow: the scaler skips the optimizer, so that no
# hook fires in them.
SKIPPED_STEPS = """
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=1000)
for step in range(steps):
    loss = model(torch.randn(2, 8)).square().sum()
    if step < 4:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

# The optimizer inside steps too: two marks per iteration.
ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
model = DDP(model)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
for step in range(steps):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# One optimizer per parameter, stepped from the backward pass: four marks.
OPTIMIZER_IN_BACKWARD = """
def attach(parameter):
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    def step(p):
        dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    parameter.register_post_accumulate_grad_hook(step)
for p in model.parameters():
    attach(p)
for step in range(steps):
    model(torch.randn(2, 8)).sum().backward()
"""

ACCUMULATION = """
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    for micro in range(4):
        dist.all_reduce(torch.ones(1))
        if micro < 3:
            with model.no_sync():
                model(torch.randn(2, 8)).sum().backward()
        else:
            model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LOGGING = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    model(torch.randn(2, 8)).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    if step % 3 == 2:
        dist.reduce(torch.ones(1), dst=0)
    optimizer.step()
    optimizer.zero_grad()
"""

# Sizes that change from step to step, as tokens sent to experts do.
CHANGING_SPLITS = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    mine = torch.tensor([1 + (rank + step + peer) % 3 for peer in range(world)])
    theirs = torch.zeros_like(mine)
    dist.all_to_all_single(theirs, mine)
    out = torch.zeros(int(theirs.sum()), 8)
    dist.all_to_all_single(out, torch.ones(int(mine.sum()), 8), theirs.tolist(), mine.tolist())
    model(out).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def run(tmp_path, monkeypatch, virtual):
    """Captures a program; returns what structure.json says."""
    monkeypatch.chdir(tmp_path)

    def captured(program, *, world=2, iterations=9, **options):
        (tmp_path / "train.py").write_text(HEADER + program)
        job = {
            "program": "train.py",
            "arguments": "--steps {iterations}",
            "world_size": world,
            "iterations": iterations,
        }
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        capture(load_job("job.yaml"), tmp_path / "capture", limit_s=120, **options)
        return json.loads((tmp_path / "capture" / "structure.json").read_text())

    return captured


@pytest.mark.parametrize(
    ("program", "period", "marks", "calls"),
    [
        # all_reduce of the one bucket; five steps have marks, DDP's first is apart.
        (SKIPPED_STEPS, 1, 5, 1),
        # all_reduce, and a broadcast of each parameter from its owner.
        (ZERO, 2, 18, 5),
        (OPTIMIZER_IN_BACKWARD, 4, 36, 4),
        (ACCUMULATION, 1, 9, 5),
        (LOGGING, 3, 9, 13),
    ],
    ids=["skipped-steps", "zero", "optimizer-in-backward", "accumulation", "logging"],
)
def test_iterations_are_found(run, program, period, marks, calls):
    found = run(program)
    assert (found["period"], found["num_marks"]) == (period, marks)
    assert {role["body_calls"] for role in found["roles"].values()} == {calls}


def test_changing_split_sizes_are_a_distribution_not_a_structure(run, tmp_path):
    found = run(CHANGING_SPLITS, world=3)
    assert found["period"] == 1
    assert found["num_roles"] == 1
    splits, _ = tables.SPLITS.read(tmp_path / "capture" / "splits.parquet")
    rows = splits.to_pandas()
    assert set(rows["elements"]) == {1, 2, 3}
    # Three ranks, seven or eight iterations of the body, three slots, two directions.
    assert len(set(zip(rows["slot"], rows["direction"], strict=True))) == 6
    assert rows["count"].sum() == 3 * 8 * 3 * 2
    assert set(rows["call_in_period"]) == {1}


def test_a_change_of_the_kind_of_call_is_structure(run):
    changing = LOGGING.replace("if step % 3 == 2:", "if step in (2, 3, 7):")
    with pytest.raises(UserError, match=r"do not repeat.*Rank 0"):
        run(changing)


def test_memory_is_recorded_where_it_is_asked_for(run, tmp_path):
    program = LOGGING.replace(
        "    optimizer.step()", "    keep = torch.zeros(1_000_000)\n    optimizer.step()"
    )
    run(program, keep_memory=True)
    events, _ = tables.EVENTS.read(tmp_path / "capture" / "events.parquet")
    rows = events.to_pandas()
    rows = rows[rows["rank"] == 1]
    taken, given = (rows[rows["kind"] == kind]["bytes"] for kind in ("ALLOC", "FREE"))
    assert (taken == 4_000_000).sum() == 9
    # Each one is freed when the next takes its name.
    assert (given == 4_000_000).sum() >= 8
    assert taken.sum() >= given.sum()
    nodes, _ = tables.NODES.read(tmp_path / "capture" / "nodes.parquet")
    assert "ALLOC" not in set(nodes["kind"].to_pylist())
    run(program)
    events, _ = tables.EVENTS.read(tmp_path / "capture" / "events.parquet")
    assert set(events["kind"].to_pylist()) == {"COMP", "COMM_COLL", "WAIT"}


CHECKPOINT = """
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor import DTensor
mesh = init_device_mesh("cpu", (world,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    model(torch.randn(2, 8)).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
whole = torch.arange(world * 8.0).reshape(world * 2, 4)
mine = whole[2 * rank : 2 * rank + 2]
state = {"weight": DTensor.from_local(mine, mesh, [Shard(0)]), "version": 7}
dcp.save(state, checkpoint_id="checkpoint")
fresh = {"weight": DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)]), "version": 0}
dcp.load(fresh, checkpoint_id="checkpoint")
assert torch.equal(fresh["weight"].to_local(), mine), fresh
assert fresh["version"] == 7
open(f"loaded-{rank}", "w").close()
"""


def test_a_checkpoint_of_64_ranks_is_saved_and_loaded_by_every_one(run, tmp_path, virtual):
    found = run(CHECKPOINT, world=64, iterations=4, strategy="all")
    assert found["num_captured"] == 64
    assert found["num_invented"] == 0
    assert len(list(tmp_path.glob("loaded-*"))) == 64

    # Alone, with the book, and for another number of iterations.
    book = PayloadBook.load(tmp_path / "capture" / "payloads.parquet")
    from crystalllm.run import Program

    for rank, iterations in ((0, 4), (37, 6), (63, 4)):
        command = load_job("job.yaml").command(iterations=iterations)
        virtual(
            Program(command=command).execute,
            rank=rank,
            world=64,
            backend=None,
            book=book,
            extra_periods=book.extra_periods(iterations),
            strict=True,
        )
