"""When calls between ranks that run side by side end, and what ends them otherwise."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist

from crystalllm import logical, native

MS = 1_000_000


def _wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("flavour", ["gloo", "nccl"])
@pytest.mark.parametrize("how", ["wait", "future", "poll", "drop"])
def test_a_call_does_not_wait_for_the_others(together, tmp_path, flavour, how):
    gone_on = tmp_path / "gone-on"

    def program():
        me = dist.get_rank()
        x = torch.full((4,), float(me))
        if me == 5:
            _wait_for(gone_on)
            dist.all_reduce(x)
            return x.tolist()
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future() if how == "future" else None
        assert not (future.done() if future else work.is_completed())
        if how == "drop":
            del work
        gone_on.touch()
        if how == "poll":
            while not work.is_completed():
                time.sleep(0.001)
        elif how == "future":
            (x,) = future.wait()
        elif how == "wait":
            work.wait()
        else:  # it happens all the same
            while x.ne(20).any():
                time.sleep(0.001)
        return x.tolist()

    # Five members hold what rank 1 holds, three what rank 5 holds.
    assert together(program, (1, 5), backend=flavour, limit_s=60) == [[20.0] * 4] * 2


def test_a_call_ends_when_both_its_parts_have(together):
    def program():
        now = native.load().now_ns
        start = now()
        dist.all_reduce(torch.ones(2))
        mixed = now() - start
        pair = dist.new_group([1, 5])
        works = [dist.isend(torch.ones(2), 6 - dist.get_rank()), dist.barrier(pair, async_op=True)]
        x = torch.empty(2)
        dist.recv(x, 6 - dist.get_rank())
        for work in works:
            work.wait()
        return mixed, now() - start - mixed

    # What only mates take part in is not replayed: it takes what it takes.
    for mixed, real in together(program, (1, 5), transfer_ns=2_000 * MS):
        assert mixed >= 2_000 * MS
        assert real < 2_000 * MS


def test_what_mates_send_is_no_memory_of_the_program(together, virtual):
    def program():
        x = torch.ones(100_000)
        out = torch.empty(800_000)
        logical.world().keep_memory()
        holes = torch.zeros(4, 64, 32)
        for _ in range(3):
            dist.all_reduce(x)
            dist.all_reduce(holes.fill_(0))
            dist.all_reduce(out.view(800, 1000).t())
            dist.all_gather_into_tensor(out, x)
            dist.all_gather(list(out.view(8, -1)), x)
            dist.reduce_scatter_tensor(x, out)
            dist.all_to_all_single(out, out.clone())
        events = logical.world().event_columns()
        return [b for k, b in zip(events["kind"], events["bytes"], strict=True) if k == "ALLOC"]

    alone = virtual(program, rank=1, keep_records=True)
    assert together(program, (1, 5), keep_records=True) == [alone, alone]


# --- failures -------------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["gloo", "nccl"])
@pytest.mark.parametrize("members", [[1, 5], list(range(8))], ids=["real", "mixed"])
def test_a_dead_mate_ends_the_other(together, flavour, members):
    def program():
        group = dist.new_group(members, group_desc="the group")
        dist.all_reduce(torch.ones(2), group=group)
        if dist.get_rank() == 5:
            os._exit(3)
        dist.all_reduce(torch.ones(2), group=group)

    start = time.monotonic()
    one, five = together(program, (1, 5), backend=flavour, check=False)
    assert "died with exit code 3" in str(five.error)
    assert one.error.kind == "DistBackendError"
    for words in ("Rank 1, call 1 (all_reduce", "(the group)", "whose ranks 1 and 5 run here"):
        assert words in one.error.message
    assert one.error.message.count(". ") == 2, "three sentences"
    assert time.monotonic() - start < 50  # by the closed connection, not by the limit


@pytest.mark.parametrize("how", ["wait", "future", "poll"])
@pytest.mark.parametrize(
    ("flavour", "members"), [("gloo", [1, 5]), ("nccl", [1, 5]), ("gloo", list(range(8)))]
)
def test_a_mate_that_does_not_come_ends_the_other_after_the_groups_timeout(
    together, tmp_path, flavour, members, how
):
    ended = tmp_path / "ended"

    def program():
        group = dist.new_group(members, timeout=datetime.timedelta(seconds=1))
        if dist.get_rank() == 5:
            _wait_for(ended)
            return
        start = time.monotonic()
        try:
            work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
            if how == "wait":
                work.wait()
            elif how == "future":
                work.get_future().wait()
            else:
                while not work.is_completed():
                    time.sleep(0.001)
                work.wait()
        finally:
            assert time.monotonic() - start < 20
            ended.touch()

    one, _ = together(program, (1, 5), backend=flavour, check=False, mates_limit_s=None)
    assert "whose ranks 1 and 5 run here" in one.error.message


@pytest.mark.parametrize("members", [[1, 5], list(range(8))], ids=["real", "mixed"])
def test_a_limit_takes_the_place_of_the_groups_timeout(together, tmp_path, members):
    ended = tmp_path / "ended"

    def program():
        dist.barrier()
        group = dist.new_group(members)
        if dist.get_rank() == 5:
            _wait_for(ended)
            return
        try:
            dist.all_reduce(torch.ones(2), group=group)
        finally:
            ended.touch()

    one, _ = together(program, (1, 5), check=False, mates_limit_s=3)
    assert "whose ranks 1 and 5 run here" in one.error.message


def test_a_mate_that_does_not_create_a_group_is_missed(together):
    def program():
        if dist.get_rank() == 1:
            dist.new_group([1, 5])

    one, _ = together(program, (1, 5), check=False, mates_limit_s=1)
    assert "did not meet in a new group. Rank 1, group" in one.error.message
    assert "whose ranks 1 and 5 run here and had 1 s: " in one.error.message
