"""Capture: control values on demand, iterations, resuming, errors instead of hangs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crystalllm import tables
from crystalllm.capture import capture
from crystalllm.capture.iterations import find, segments
from crystalllm.config import load_job
from crystalllm.errors import UserError
from crystalllm.payload import PayloadBook

HEADER = """
import argparse, sys, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
"""

STEPS = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(args.steps):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Every rank checks that it got what the others really hold.
EXCHANGE = (
    HEADER
    + """
got = [None] * world
dist.all_gather_object(got, {"rank": rank, "pad": "x" * (7 * rank)})
assert [g["rank"] for g in got] == list(range(world)), got
settings = [{"seed": 1234}] if rank == 2 else [None]
dist.broadcast_object_list(settings, src=2)
assert settings[0]["seed"] == 1234
mine = [None]
dist.scatter_object_list(mine, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
assert mine[0] == f"for {rank}"
if rank > 0:  # a chain, as pipeline stages exchange shapes
    x = torch.zeros(1, dtype=torch.int64)
    dist.recv(x, rank - 1)
    assert x.item() == 10 * rank
if rank + 1 < world:
    dist.send(torch.tensor([10 * (rank + 1)]), rank + 1)
"""
    + STEPS.replace(
        "    model(torch",
        "    n = torch.tensor([rank + step])\n"
        "    dist.all_reduce(n)\n"
        "    assert n.item() == sum(range(world)) + step * world, n\n"
        "    if step % 3 == 2:\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "    model(torch",
    )
)


# Ranks that need nothing of each other.
APART = """
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(args.steps):
    model(torch.randn(2, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


class Project:
    """A folder with a program and its job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "results" / "job" / "capture"

    def write(self, program, world=4, iterations=9):
        (self.folder / "train.py").write_text(program)
        (self.folder / "job.yaml").write_text(
            "program: train.py\narguments: --steps {iterations}\n"
            f"world_size: {world}\niterations: {iterations}\n"
        )

    def capture(self, **options):
        """Captures in this process, which is the warm parent."""
        done = []
        options = {"out": self.out, "limit_s": 60, **options}
        capture(load_job("job.yaml"), progress=lambda n, of: done.append((n, of)), **options)
        self.progress = done
        return json.loads((options["out"] / "structure.json").read_text())

    def command(self, *arguments):
        return [sys.executable, "-m", "crystalllm", *map(str, arguments)]

    def run(self, *arguments):
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=150,
            cwd=self.folder,
            check=False,
        )

    def logs(self):
        return {p: p.stat().st_mtime_ns for p in self.folder.rglob(".work/capture/*/*/*.log")}


@pytest.fixture
def project(tmp_path, monkeypatch, virtual):
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


def test_every_rank_gets_what_the_others_hold(project):
    project.write(EXCHANGE)
    structure = project.capture()
    assert structure["num_captured"] == 4
    assert structure["num_invented"] == 0
    assert structure["period"] == 3
    calls, _ = tables.CALLS.read(project.out / "calls.parquet")
    assert set(calls["rank"].to_pylist()) == {0, 1, 2, 3}
    ranks, _ = tables.RANKS.read(project.out / "ranks.parquet")
    assert ranks["rank"].to_pylist() == [0, 1, 2, 3]
    assert ranks["is_captured"].to_pylist() == [True] * 4
    groups, _ = tables.GROUPS.read(project.out / "groups.parquet")
    assert groups["members"].to_pylist() == [[0, 1, 2, 3]]
    book = PayloadBook.load(project.out / "payloads.parquet")
    assert book.period == 3
    assert {e.rank for e in book.entries} == {0, 1, 2, 3}


def test_the_book_lets_any_rank_run_alone(project):
    project.write(EXCHANGE)
    project.capture()
    book = project.out / "payloads.parquet"
    done = project.run("run", "--job", "job.yaml", "--rank", 3, "--book", book, "--strict")
    assert done.returncode == 0, done.stderr
    without = project.run("run", "--job", "job.yaml", "--rank", 3, "--strict")
    assert without.returncode == 1


def test_the_command_says_what_came_out(project):
    project.write(EXCHANGE)
    done = project.run("capture", "--job", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 ranks captured, 4 roles" in done.stdout
    assert "calls repeat every 3 marks" in done.stdout
    assert done.stderr.splitlines()[-1] == "captured 4 of 4 ranks"
    for ranks, word in (("9", "Rank 9 is outside"), ("a-b", "no rank and no range")):
        wrong = project.run("capture", "--job", "job.yaml", "--ranks", ranks)
        assert wrong.returncode == 2
        assert word in wrong.stderr


def test_asking_for_one_rank_captures_whom_it_needs(project):
    project.write(EXCHANGE)
    assert project.capture(ranks=[3])["num_captured"] == 4


def test_independent_ranks_are_captured_alone(project):
    project.write(HEADER + APART, world=512)
    structure = project.capture(ranks=[0, 137, 500, 501])
    assert structure["num_captured"] == 4
    assert structure["num_roles"] == 1
    assert structure["period"] == 1


def test_the_same_capture_gives_the_same_bytes(project):
    project.write(EXCHANGE)
    contents = []
    for out in ("a", "b"):
        project.capture(out=project.folder / out / "capture")
        files = sorted((project.folder / out / "capture").rglob("*.*"))
        contents.append(
            {f.name: f.read_bytes() for f in files if not f.name.endswith("times.parquet")}
        )
    assert {"calls.parquet", "events.parquet", "edges.parquet", "graph.json"} <= set(contents[0])
    assert contents[0] == contents[1]


def test_what_is_captured_is_not_run_again(project):
    project.write(EXCHANGE)
    project.capture()
    before = project.logs()
    assert len(before) == 4
    project.capture()
    assert project.logs() == before
    project.write(EXCHANGE + "print('changed')\n")
    project.capture()
    assert len(project.logs()) == 8


def test_a_killed_rank_is_named_and_the_rest_is_kept(project):
    project.write(
        HEADER + "import os, pathlib, signal\n"
        "if rank == 2 and not pathlib.Path('mended').exists():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n" + APART
    )
    with pytest.raises(UserError, match=r"died with SIGKILL before it gave its calls\. Rank 2"):
        project.capture(parallel=1)
    (project.folder / "mended").touch()
    project.capture(parallel=1)
    assert project.progress[0] == (2, 4)


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_leaves_nothing_running_and_resumes(project, kill):
    project.write(HEADER + APART + "import time\nif rank == 2: time.sleep(3)\n")
    process = subprocess.Popen(
        project.command("capture", "--job", "job.yaml", "--parallel", 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=project.folder,
    )
    for line in process.stderr:
        if "captured 2 of" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(kill)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, "a rank outlived the capture"
    project.capture(parallel=1)
    assert project.progress[0][0] >= 2


def test_a_failing_program_is_named_with_its_output(project):
    project.write(HEADER + "if rank == 1: raise ValueError('no such layer')\n" + APART)
    with pytest.raises(UserError, match=r"ValueError: no such layer\. Rank 1, output in"):
        project.capture()


def test_ranks_that_wait_for_each_other_are_an_error_not_a_hang(project):
    project.write(
        HEADER + "x = torch.zeros(1, dtype=torch.int64)\n"
        "if rank < 2:\n"
        "    dist.recv(x, 1 - rank)\n"
        "    dist.send(x, 1 - rank)\n" + APART
    )
    start = time.perf_counter()
    with pytest.raises(
        UserError,
        match=r"a value that nobody will send\. Rank 0 in recv.* rank 1 itself waits in recv",
    ):
        project.capture()
    assert time.perf_counter() - start < 30


def test_a_value_that_nobody_sends_is_an_error(project):
    project.write(
        HEADER + "x = torch.zeros(1, dtype=torch.int64)\nif rank == 1: dist.recv(x, 0)\n" + APART
    )
    with pytest.raises(
        UserError, match=r"Rank 1 in recv.* rank 0 has ended without making that call"
    ):
        project.capture()


def test_a_rank_past_its_limit_is_named(project):
    project.write(HEADER + "import time\nif rank == 1: time.sleep(600)\n" + APART)
    with pytest.raises(UserError, match=r"did not end within 3 s\. Rank 1, computing"):
        project.capture(limit_s=3)


def test_a_program_that_does_not_repeat_is_refused(project):
    project.write(
        HEADER
        + APART.replace(
            "    optimizer.step()",
            "    dist.all_reduce(torch.ones(step + 1))\n    optimizer.step()",
        )
    )
    with pytest.raises(
        UserError, match=r"do not repeat from iteration to iteration\..*call 1 of the last two"
    ):
        project.capture()


def test_a_checkpoint_is_planned_by_true_values(project):
    project.write(
        HEADER
        + APART
        + """
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (world,))
state = {"weight": distribute_tensor(torch.arange(64.0).reshape(16, 4), mesh, [Shard(0)])}
dcp.save(state, checkpoint_id="checkpoint")
fresh = {"weight": torch.zeros_like(state["weight"])}
dcp.load(fresh, checkpoint_id="checkpoint")
assert torch.equal(fresh["weight"].to_local(), state["weight"].to_local())
"""
    )
    project.capture()
    assert (project.folder / "checkpoint" / ".metadata").exists()


# --- finding iterations --------------------------------------------------------


def _calls(*parts):
    keys = [key for part in parts for key in part]
    marks = [i for i, part in enumerate(parts) for _ in part]
    return segments(keys, marks)


A, B, LOG = ["a", "b"], ["a"], ["log"]


def _find(*parts):
    return find(_calls(*parts), num_marks=len(parts) - 1, rank=0)


def test_plain_iterations():
    found = _find(["init", *A], A, A, A, ["end"])
    assert (found.prologue_marks, found.period, found.body_calls) == (1, 1, 2)


def test_two_marks_per_iteration():  # ZeroRedundancyOptimizer
    found = _find(["init", *A], B, A, B, A, B, ["end"])
    assert found.period == 2


def test_a_mark_per_parameter():  # optimizer in backward
    found = _find(["init"], ["a"], ["b"], ["c"], ["a"], ["b"], ["c"], ["a"], ["b"], ["c"], [])
    assert found.period == 3


def test_skipped_steps_are_prologue():  # GradScaler
    found = _find(["init"], A + A, A + A + A, A, A, A, [])
    assert (found.prologue_marks, found.period) == (3, 1)


def test_logging_every_kth_step():
    found = _find(["init"], A, A, A + LOG, A, A, A + LOG, A, A, A + LOG, A, A, [])
    assert (found.prologue_marks, found.period) == (1, 3)


def test_changing_calls_are_refused_with_the_place():
    with pytest.raises(UserError, match="call 1 of the last two iterations: c and d"):
        _find(["init"], ["a", "b"], ["a", "c"], ["a", "d"], [])
    with pytest.raises(UserError, match="have 1 and 2 calls; call 1 is b"):
        _find(["init"], ["x"], ["a"], ["a", "b"], [])
    with pytest.raises(UserError, match="only 1 complete iterations"):
        _find(["init"], ["a"], [])


@given(
    prologue=st.lists(st.lists(st.sampled_from("abc"), max_size=2), max_size=3),
    body=st.lists(st.lists(st.sampled_from("abc"), max_size=2), min_size=1, max_size=4),
    repeats=st.integers(3, 4),
)
def test_whatever_repeats_is_found_and_describes_the_calls(prologue, body, repeats):
    parts = [["init"], *prologue, *body * repeats, ["end"]]
    if not any(body):
        return
    found = _find(*parts)
    complete = [tuple(p) for p in parts[1:-1]]
    repeated = complete[found.prologue_marks - 1 :]
    assert found.repeats >= 2
    for i in range(len(repeated) - found.period):
        assert repeated[i] == repeated[i + found.period]
    assert found.prologue_marks + found.period <= 1 + len(prologue) + len(body)
