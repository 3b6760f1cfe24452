"""The virtual backend against real gloo: same values, same errors, call by call."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import parity_cases
import pytest

TESTS = Path(parity_cases.__file__).parent
WORLD = 2

# Where we differ from real gloo on purpose.
DELIBERATE = {
    # torch's gloo refuses a Parameter because it gathers into views; NCCL does
    # not, and nothing about the call is wrong.
    "all_gather_into_tensor_requires_grad",
    # gloo checks nothing and moves only some rows.
    "all_to_all_single_indivisible",
    # gloo's future holds one view per rank, which costs O(world) for each call.
    "gather_future",
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What each of two real gloo ranks saw."""
    folder = tmp_path_factory.mktemp("gloo")
    done = subprocess.run(
        [sys.executable, str(TESTS / "real_gloo.py"), str(WORLD), str(folder)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.fixture(scope="module", params=range(WORLD))
def pair(request, real, virtual):
    rank = request.param

    def observe_all():
        return {name: parity_cases.observe(name, rank, WORLD) for name in parity_cases.CASES}

    seen = virtual(observe_all, rank=rank, world=WORLD)
    return real[rank], json.loads(json.dumps(seen))


def _normal(observation: object) -> object:
    """Without what differs between any two runs: log prefixes with time and line."""
    text = re.sub(r"\[rank\d+\]:\[F[^\]]*\] ", "", json.dumps(observation))
    return re.sub(r"Check failed: .*", "Check failed", text)


@pytest.mark.parametrize("name", sorted(set(parity_cases.CASES) - DELIBERATE))
def test_same_as_real_gloo(name, pair):
    real, seen = pair
    assert _normal(seen[name]) == _normal(real[name])


@pytest.mark.parametrize("name", sorted(DELIBERATE))
def test_deliberate_difference_is_one(name, pair):
    real, seen = pair
    assert _normal(seen[name]) != _normal(real[name]), "no longer a difference: remove it above"
