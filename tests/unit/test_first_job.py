"""`init`: a first job file from what starts a program today."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crystalllm.config import load_job
from crystalllm.errors import UserError
from crystalllm.first_job import first_job

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """A folder with somebody's program and the shipped clusters."""
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])\n")
    shutil.copytree(ROOT / "config/clusters", tmp_path / "config/clusters")
    monkeypatch.chdir(tmp_path)


def _written(command, **options):
    made = first_job(command.split(), **options)
    return load_job(str(made.write())), made.notes


def test_a_torchrun_line_becomes_a_job():
    job, notes = _written(
        "NCCL_DEBUG=INFO torchrun --nnodes=64 --nproc-per-node 8 --rdzv-backend c10d train.py "
        "--lr 1e-4 --tensor-model-parallel-size 4 --pp=8 --train-iters 500 --seed 7 --tag {x}"
    )
    assert (job.world_size, job.ranks_per_node, job.seed) == (512, 8, 7)
    p = job.parallelism
    assert (p.tp, p.pp, p.cp, p.dp) == (4, 8, 1, 16)
    assert job.environment == {"NCCL_DEBUG": "INFO"}
    assert job.cluster == "h200-64x8"
    assert " ".join(job.command(iterations=3)) == (
        "train.py --lr 1e-4 --tensor-model-parallel-size 4 --pp=8 --train-iters 3 --seed 7 "
        "--tag {x}"
    )
    assert [note.partition(":")[0] for note in notes] == ["cluster"]


@pytest.mark.parametrize(
    ("command", "program", "world_size"),
    [
        ("torchrun --standalone --nproc_per_node 4 -m json.tool --steps 9", "-m json.tool", 4),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "train.py", 2),
        ("python3.11 train.py --max_steps=5", "train.py", 8),
        ("train.py", "train.py", 8),
        ("torchrun --nnodes 2:4 --nproc-per-node gpu train.py", "train.py", 32),
    ],
)
def test_other_lines(command, program, world_size):
    job, _ = _written(command)
    assert (job.program, job.world_size) == (program, world_size)
    assert job.command(iterations=77)[-1] in ("77", "--max_steps=77", "train.py")


def test_options_say_what_no_line_says():
    job, notes = _written(
        "--hidden 64", program="train.py", name="mine", world_size=24, ranks_per_node=4
    )
    assert (job.world_size, job.ranks_per_node, job.arguments) == (24, 4, "--hidden 64")
    assert job.parallelism is None
    about = [note.partition(":")[0] for note in notes]
    assert about == ["arguments", "parallelism", "cluster"]
    # People read it in the file, too.
    assert "{iterations}" in Path("config/jobs/mine.yaml").read_text().partition("program:")[0]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("", {}, "Nothing says what to run"),
        ("", {"program": "-m"}, "no program to run"),
        ("torchrun trian.py", {}, "program trian.py does not exist"),
        ("torchrun --bogus 3 train.py", {}, "torchrun would refuse.*--bogus"),
        ("torchrun --nnodes 3 train.py --tp 2", {}, "2 does not divide 3"),
        ("bash run.sh", {}, "not known how this line starts"),
    ],
)
def test_what_cannot_be_a_job_is_refused(command, options, message):
    with pytest.raises(UserError, match=message):
        first_job(command.split(), **options)
    assert not list(Path("config").glob("jobs/*"))


def test_a_job_that_is_there_is_kept():
    _written("train.py")
    before = Path("config/jobs/train.yaml").read_text()
    with pytest.raises(UserError, match=r"a job of this name.*--name"):
        _written("train.py --steps 3")
    assert Path("config/jobs/train.yaml").read_text() == before


def test_the_command_says_what_comes_next():
    done = subprocess.run(
        [sys.executable, "-m", "crystalllm", "init", "--name", "mine", "--", "train.py", "--steps"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "config/jobs/mine.yaml: 8 ranks of train.py" in done.stdout
    assert "run --job mine --rank 0" in done.stdout
