"""Unmodified training programs as several ranks of a 512-rank world."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import training_programs

TESTS = Path(training_programs.__file__).parent
RANKS = (0, 137, 511)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", sorted(training_programs.PROGRAMS))
def test_trains_with_finite_numbers(virtual, name, rank):
    result = virtual(training_programs.PROGRAMS[name], rank=rank, world=512)
    assert len(result["losses"]) >= 10
    assert all(map(math.isfinite, result["losses"])), result["losses"]
    assert all(map(math.isfinite, result["norms"])), result["norms"]
    assert any(norm > 0 for norm in result["norms"]), "no gradient arrived"
    assert result["finite"]


_PLAIN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
import training_programs
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
print(json.dumps(training_programs.PROGRAMS["ddp"]()))
"""


def test_a_world_of_one_computes_what_the_plain_program_computes(virtual, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN, str(TESTS), str(tmp_path / "rendezvous")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    plain = json.loads(done.stdout.splitlines()[-1])
    assert virtual(training_programs.PROGRAMS["ddp"], rank=0, world=1) == plain
