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
