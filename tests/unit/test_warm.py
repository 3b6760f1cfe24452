"""Ranks forked from a warm process: results, errors, limits, nothing left behind."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from crystalllm import warm
from crystalllm.errors import UserError
from crystalllm.identity import Identity
from crystalllm.warm import RankError

ME = Identity(rank=3, world_size=8)


def test_a_fork_returns_its_value(virtual):
    assert virtual(lambda: {"rank": os.environ["RANK"]}, rank=3, backend=None) == {"rank": "3"}


def test_a_large_value_passes_the_pipe(virtual):
    assert len(virtual(lambda: b"x" * 20_000_000, backend=None)) == 20_000_000


def test_an_exception_comes_back_with_its_trace(virtual):
    def program():
        raise LookupError("gone")

    with pytest.raises(RankError, match="LookupError: gone") as caught:
        virtual(program, backend=None)
    assert caught.value.kind == "LookupError"
    assert "in program" in caught.value.trace


def test_exit_is_an_exception_too(virtual):
    with pytest.raises(RankError, match="SystemExit: 3"):
        virtual(lambda: exit(3), backend=None)


def test_a_killed_rank_is_named(virtual):
    with pytest.raises(UserError, match=r"died with signal SIGKILL.*Rank 3 of 8"):
        warm.call(lambda: os.kill(os.getpid(), signal.SIGKILL), ME)


def test_a_rank_past_its_limit_is_killed(virtual):
    before = set(psutil.Process().children())
    start = time.perf_counter()
    with pytest.raises(UserError, match=r"did not end within 0\.5 s\. Rank 3 of 8"):
        warm.call(lambda: time.sleep(60), ME, limit_s=0.5)
    assert time.perf_counter() - start < 10
    assert set(psutil.Process().children()) == before


def test_what_cannot_be_pickled_is_an_error(virtual):
    with pytest.raises(RankError, match="pickle"):
        virtual(lambda: lambda: 1, backend=None)


def test_forks_at_the_same_time_leave_an_outcome_each(virtual, tmp_path):
    def program():
        rank = int(os.environ["RANK"])
        (tmp_path / str(rank)).touch()
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        if rank == 1:
            raise LookupError("gone")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank, len(list(tmp_path.iterdir()))

    before = set(psutil.Process().children())
    identities = [Identity(rank=rank, world_size=8) for rank in (3, 1, 2, 0)]
    three, one, two, zero = warm.call_together(program, identities, limit_s=60)
    assert (three.value, zero.value) == ((3, 4), (0, 4))
    assert (one.error.kind, one.value) == ("LookupError", None)
    assert "died with signal SIGKILL" in str(two.error)
    assert set(psutil.Process().children()) == before
