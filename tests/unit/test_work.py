"""Handles and futures that complete at a given time."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from crystalllm import native
from crystalllm.warm import RankError

MS = 1_000_000


def _now():
    return native.load().now_ns()


def test_a_blocking_call_takes_its_transfer_time(virtual):
    def program():
        times = []
        for _ in range(20):
            start = _now()
            dist.all_reduce(torch.ones(2))
            times.append(_now() - start)
        return times

    times = virtual(program, transfer_ns=5 * MS)
    assert min(times) >= 5 * MS
    assert sorted(times)[len(times) // 2] < 7 * MS


def test_calls_overlap_with_each_other_and_with_the_program(virtual):
    def program():
        start = _now()
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(10)]
        issued = _now() - start
        done_early = [w.is_completed() for w in works]
        for w in works:
            w.wait()
        return issued, _now() - start, done_early, [w.is_completed() for w in works]

    issued, total, early, late = virtual(program, transfer_ns=100 * MS)
    assert issued < 90 * MS
    assert 100 * MS <= total < 180 * MS
    assert not any(early)
    assert all(late)


def test_futures_complete_on_time_and_run_their_callbacks(virtual):
    def program():
        start, order = _now(), []
        futures = []
        for i in range(3):
            future = dist.all_reduce(torch.full((2,), 1.0 + i), async_op=True).get_future()
            futures.append(future.then(lambda f, i=i: (order.append(i), _now() - start, f.value())))
        early = [f.done() for f in futures]
        found = [f.wait() for f in futures]
        return early, order, [f[1] for f in found], [f[2][0].tolist() for f in found]

    early, order, times, values = virtual(program, world=8, transfer_ns=30 * MS)
    assert early == [False] * 3
    assert order == [0, 1, 2]
    assert all(30 * MS <= t < 100 * MS for t in times)
    assert values == [[8.0] * 2, [16.0] * 2, [24.0] * 2]


def test_a_wait_past_its_limit_is_an_error_that_names_the_call(virtual):
    def program():
        import datetime

        work = dist.all_reduce(torch.ones(2), async_op=True)
        start = time.perf_counter()
        try:
            work.wait(datetime.timedelta(milliseconds=50))
        finally:
            assert time.perf_counter() - start < 1

    with pytest.raises(
        RankError, match=r"Timed out waiting 50ms.* Call 0 \(all_reduce op=sum dtype=float32"
    ):
        virtual(program, transfer_ns=10_000 * MS)


def test_the_groups_timeout_bounds_every_wait(virtual):
    def program():
        import datetime

        dist.init_process_group("gloo", timeout=datetime.timedelta(milliseconds=50))
        dist.barrier()

    with pytest.raises(RankError, match="Timed out waiting 50ms"):
        virtual(program, backend=None, transfer_ns=10_000 * MS)


def test_work_without_a_wait_ends_with_the_process(virtual):
    def program():
        work = dist.all_reduce(torch.ones(2), async_op=True)
        future = work.get_future()
        return future.done()

    start = time.perf_counter()
    assert virtual(program, transfer_ns=60_000 * MS) is False
    assert time.perf_counter() - start < 20


def test_threads_of_a_process_communicate_side_by_side(virtual):
    def program():
        from concurrent.futures import ThreadPoolExecutor

        from crystalllm import logical

        start = _now()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: dist.all_reduce(torch.ones(2)), range(4)))
        streams = logical.world().take_records()["stream"]
        return _now() - start, len(streams), len(set(streams)) > 1

    took, calls, several = virtual(program, transfer_ns=50 * MS, keep_records=True)
    assert took < 150 * MS
    assert (calls, several) == (4, True)


def test_a_callback_may_wait_for_another_call(virtual):
    def program():
        def then(future):
            return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

        first = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        return first.then(then).wait().tolist()

    assert virtual(program, world=8, transfer_ns=20 * MS, limit_s=30) == [64.0] * 3


def test_power_sgd_trains_with_transfer_times(virtual):
    def program():
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for _ in range(4):
            model(torch.randn(2, 64)).sum().backward()
        return model.module.weight.grad.isfinite().all().item()

    assert virtual(program, rank=3, world=8, transfer_ns=MS, limit_s=60)


def test_futures_that_nobody_keeps_complete_too(virtual):
    def program():
        done = []
        for _ in range(2000):
            work = dist.all_reduce(torch.ones(3), async_op=True)
            work.get_future().then(lambda f: done.append(1))
            del work
        deadline = time.monotonic() + 30  # of a loaded machine
        while len(done) < 2000 and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(done)

    assert virtual(program, world=8, transfer_ns=30_000, limit_s=60) == 2000


def test_calls_of_a_callback_belong_to_who_registered_it(virtual):
    def program():
        from crystalllm import logical

        def then(future):
            dist.all_reduce(torch.ones(1))

        dist.all_reduce(torch.ones(3), async_op=True).get_future().then(then).wait()
        return logical.world().take_records()["key"]

    at_once = virtual(program, world=8, keep_records=True)
    later = virtual(program, world=8, keep_records=True, transfer_ns=2 * MS)
    assert at_once == later
