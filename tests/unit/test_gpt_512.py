"""The shipped job: the bundled GPT in a world of 512 ranks, as one of them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAYOUT = (
    "--tp 4 --pp 8 --dp 16 --layers 8 --hidden 256 --sequence 128 --micro-batch 1 "
    "--num-microbatches 8 --steps 10 --log-ranks all"
)


@pytest.mark.parametrize("rank", [0, 137, 311, 511])
def test_runs_as_any_rank_with_finite_losses(rank: int, root: Path, tmp_path: Path):
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    run = f"-m crystalllm run --world-size 512 --ranks-per-node 8 --rank {rank} --"
    program = f"-m crystalllm.examples.gpt {LAYOUT} --json-log {tmp_path}/{{rank}}.jsonl"
    done = subprocess.run(
        [sys.executable, *run.split(), *program.split()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,  # the first run builds the native backend
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    records = [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").open()]
    assert [r["iteration"] for r in records] == list(range(1, 11))
    for record in records:
        assert math.isfinite(record["loss"])
        assert math.isfinite(record["grad_norm"])
        assert record["grad_norm"] > 0
    assert f"rank {rank}/512 iteration 10/10" in done.stdout
