"""Capture in pieces: shards, merging, resuming by roles, the file of one rank."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crystalllm.capture import capture, merge
from crystalllm.capture.captured import Captured
from crystalllm.config import load_job
from crystalllm.errors import UserError

PROGRAM = """
import argparse, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
pairs = [dist.new_group([r, r + 1]) for r in range(0, world, 2)]
columns = [dist.new_group(list(range(c, world, 2))) for c in range(2)]
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
n = torch.tensor([rank % 2])
dist.all_reduce(n, group=pairs[rank // 2])
assert n.item() == 1
for step in range(steps):
    model(torch.randn(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad, group=columns[rank % 2])
    optimizer.step()
    optimizer.zero_grad()
"""


class Folder:
    def __init__(self, path):
        self.path = path

    def write(self, *, world, program=PROGRAM, **more):
        (self.path / "train.py").write_text(program)
        job = {
            "program": "train.py",
            "arguments": "--steps {iterations}",
            "world_size": world,
            "iterations": 4,
            **more,
        }
        (self.path / "job.yaml").write_text(json.dumps(job))
        return load_job("job.yaml")

    def contents(self, name):
        folder = self.path / name
        return {f.name: f.read_bytes() for f in folder.iterdir() if not f.stem.endswith("_times")}

    def logs(self):
        return sorted(self.path.rglob(".work/capture/*/*/*.log"))


@pytest.fixture
def folder(tmp_path, monkeypatch, virtual):
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path)


def test_merged_shards_are_what_one_capture_leaves(folder):
    job = folder.write(world=8)
    capture(job, folder.path / "whole", limit_s=60)
    for i in range(3):
        capture(job, folder.path / f"machine-{i}" / "piece", shard=(i, 3), limit_s=60)
    pieces = [folder.path / f"machine-{i}" / "piece" for i in range(3)]
    # Values that a rank needs come from ranks of other shards, which are run for them.
    assert sum(len(list(p.glob("rank-*.arrow"))) for p in pieces) > 8
    found = merge(job, pieces, folder.path / "merged")
    assert found["num_captured"] == 8
    assert folder.contents("merged") == folder.contents("whole")


def test_pieces_that_do_not_belong_together_are_refused(folder):
    job = folder.write(world=4)
    pieces = [folder.path / f"machine-{i}" / "piece" for i in range(2)]
    for i, piece in enumerate(pieces):
        capture(job, piece, shard=(i, 2), limit_s=60)
    out = folder.path / "merged"
    with pytest.raises(UserError, match=r"Pieces 1 of a capture are missing"):
        merge(job, pieces[:1], out)
    with pytest.raises(UserError, match=r"no piece of a capture\. File .*elsewhere"):
        merge(job, [*pieces, folder.path / "elsewhere"], out)
    with pytest.raises(UserError, match="nothing to merge"):
        merge(job, [], out)
    changed = folder.write(world=4, program=PROGRAM + "\n# changed\n")
    with pytest.raises(UserError, match="not of this job, program and version"):
        merge(changed, pieces, out)
    job = folder.write(world=4)
    for piece in pieces:  # both have it, since others needed its value
        (piece / "rank-0.arrow").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"cannot be read\. File .*rank-0\.arrow"):
        merge(job, pieces, out)
    assert not out.exists()
    with pytest.raises(UserError, match=r"no shard 2 of 2"):
        capture(job, out, shard=(2, 2))
    with pytest.raises(UserError, match="chooses its ranks itself"):
        capture(job, out, shard=(0, 2), strategy="roles")


def test_roles_are_the_default_of_large_worlds_and_resume(folder):
    job = folder.write(world=128)
    found = capture(job, folder.path / "first", limit_s=60)
    assert found["strategy"] == "roles"
    assert found["num_captured"] < 60
    assert found["num_ranks"] == 128
    before = [(log, log.stat().st_mtime_ns) for log in folder.logs()]
    assert len(before) == found["num_captured"]
    again = capture(job, folder.path / "first", limit_s=60)
    assert again == found
    assert [(log, log.stat().st_mtime_ns) for log in folder.logs()] == before


def test_roles_give_identical_bytes_whatever_ends_first(folder):
    job = folder.write(world=128)
    for name, parallel in (("one/capture", 1), ("four/capture", 4)):
        capture(job, folder.path / name, limit_s=60, parallel=parallel)
    assert folder.contents("one/capture") == folder.contents("four/capture")


def test_a_program_that_compares_ranks_is_told_of_the_strategy(folder):
    compares = PROGRAM + (
        "got = [None] * world\n"
        "dist.all_gather_object(got, rank)\n"
        "assert got == list(range(world)), got\n"
    )
    job = folder.write(world=256, program=compares)
    with pytest.raises(
        UserError, match=r"AssertionError.*that did not run .* spoke through others; --strategy all"
    ):
        capture(job, folder.path / "out", limit_s=60)


# --- the file of one rank --------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, virtual):
    def program():
        import torch
        import torch.distributed as dist

        from crystalllm import logical
        from crystalllm.capture.captured import Contribution

        dist.all_reduce(torch.ones(3))
        given = Contribution("g#0", 0, 1, -1, "int64", b"12345678", (1, 2))
        return Captured.of_world(logical.world(), [given]).to_bytes()

    return virtual(program, rank=1, world=4, keep_records=True)


def test_what_a_rank_left_survives_its_file(one_rank):
    left = Captured.from_bytes(one_rank, where="here")
    assert (left.rank, left.num_calls, left.num_marks) == (1, 1, 0)
    assert left.keys == ["all_reduce op=sum dtype=float32 count=3 group=4:1/4#0 stream=0"]
    assert left.groups[0]["members"] == (0, 1, 2, 3)
    assert left.groups[0]["backend"] == "gloo"
    (given,) = left.contributions
    assert given.address == ("g#0", 0, 1, -1)
    assert (given.value, given.splits) == (b"12345678", (1, 2))
    assert left.to_bytes() == one_rank


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_file_is_an_error_that_names_it(one_rank, data):
    damaged = bytearray(one_rank)
    if data.draw(st.booleans(), "cut"):
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    assert _error_or_calls(bytes(damaged)) in ("File x", 1)


def _error_or_calls(data):
    """What the error names; the number of calls where only a value has changed."""
    try:
        return Captured.from_bytes(data, where="File x").num_calls
    except UserError as error:
        return "File x" if "File x" in str(error) else str(error)
