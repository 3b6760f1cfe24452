"""A Kineto trace of chosen iterations of a program, which may profile itself."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crystalllm.profiled import profiled

Virtual = Callable[..., Any]


def _train(
    path: Path, *, iterations: range, num_steps: int = 6, first_mark: int = 0, period: int = 1,
    each: Callable[[int], None] = lambda step: None, by_hand: bool = False,
) -> tuple[str, list[int]]:  # fmt: skip
    """A rank that all-reduces its gradients; marks come from the optimizer or by hand."""
    import torch
    import torch.distributed as dist

    import crystalllm

    weight = torch.nn.Parameter(torch.ones(16, 16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with profiled(path, iterations, first_mark=first_mark, period=period) as found:
        for step in range(num_steps):
            each(step)
            (torch.ones(4, 16) @ weight).sum().backward()
            dist.all_reduce(weight.grad)
            optimizer.step()
            if by_hand:
                crystalllm.step()
    return found.note, found.iterations


def _read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def _steps(trace: dict[str, Any]) -> list[str]:
    return [e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep#")]


@pytest.mark.parametrize("first_mark", [0, 1])
def test_the_trace_tells_of_these_iterations(
    virtual: Virtual, tmp_path: Path, first_mark: int
) -> None:
    path = tmp_path / "rank-3" / "trace.json.gz"
    note, iterations = virtual(
        lambda: _train(path, iterations=range(3, 5), first_mark=first_mark), rank=3
    )
    assert (note, iterations) == ("", [3, 4])
    trace = _read(path)
    assert _steps(trace) == ["ProfilerStep#3", "ProfilerStep#4"]
    assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (3, 8)
    events = trace["traceEvents"]
    names = [e["name"] for e in events if e.get("cat") == "cpu_op"]
    assert sum(name == "c10d::allreduce_" for name in names) == 2
    shapes = [e["args"]["Input Dims"] for e in events if e["name"] == "aten::mm"]
    assert [[4, 16], [16, 16]] in shapes
    assert list(path.parent.iterdir()) == [path]


def test_from_the_first_step_on(virtual: Virtual, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    assert virtual(lambda: _train(path, iterations=range(1, 3))) == ("", [1, 2])
    assert _steps(_read(path)) == ["ProfilerStep#1", "ProfilerStep#2"]


def test_a_program_may_train_in_a_thread(virtual: Virtual, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    path = tmp_path / "trace.json.gz"

    def program() -> tuple[str, list[int]]:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_train, path, iterations=range(2, 4)).result()

    assert virtual(program) == ("", [2, 3])
    assert _steps(_read(path)) == ["ProfilerStep#2", "ProfilerStep#3"]


def test_marks_by_hand_and_iterations_of_several_marks(virtual: Virtual, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    found = virtual(lambda: _train(path, iterations=range(2, 4), period=2, by_hand=True))
    assert found == ("", [2, 3])
    trace = _read(path)
    assert _steps(trace) == ["ProfilerStep#2", "ProfilerStep#3"]
    names = [e["name"] for e in trace["traceEvents"]]
    assert names.count("c10d::allreduce_") == 4


def test_a_program_that_ends_early_leaves_what_there_is(virtual: Virtual, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"

    def fail(step: int) -> None:
        if step == 4:
            raise ZeroDivisionError

    def program() -> str:
        with pytest.raises(ZeroDivisionError):
            _train(path, iterations=range(4, 7), each=fail)
        return _train(tmp_path / "never.json.gz", iterations=range(50, 52))[0]

    assert virtual(program) == "the program never came to iteration 50"
    assert _steps(_read(path)) == ["ProfilerStep#4", "ProfilerStep#5"]
    assert not (tmp_path / "never.json.gz").exists()


@pytest.mark.parametrize("begins_at", [0, 2, 3])
def test_a_program_that_profiles_itself_keeps_its_profiler(
    virtual: Virtual, tmp_path: Path, begins_at: int
) -> None:
    path, theirs = tmp_path / "trace.json.gz", tmp_path / "theirs.json"

    def program() -> tuple[str, list[int]]:
        from torch import profiler

        own = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU],
            schedule=profiler.schedule(wait=0, warmup=1, active=2),
            on_trace_ready=lambda made: made.export_chrome_trace(str(theirs)),
        )

        def each(step: int) -> None:
            if step == begins_at:
                own.start()
            elif begins_at < step < begins_at + 4:
                own.step()

        found = _train(path, iterations=range(2, 5), each=each)
        own.stop()
        return found

    assert virtual(program) == ("the program uses a profiler itself, so no trace was written", [])
    assert not path.exists()
    assert _steps(json.loads(theirs.read_text())) == ["ProfilerStep#1", "ProfilerStep#2"]


def test_a_profiler_after_ours_disturbs_nobody(virtual: Virtual, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"

    def program() -> tuple[Any, int]:
        from torch.autograd import profiler

        count = []

        def each(step: int) -> None:
            if step == 5:
                with profiler.profile() as own:
                    own_sum = sum(range(3))
                    import torch

                    torch.ones(own_sum)
                count.append(len(own.function_events))

        return _train(path, iterations=range(2, 4), each=each), count[0]

    found, num_events = virtual(program)
    assert found == ("", [2, 3])
    assert num_events > 0
    assert _steps(_read(path)) == ["ProfilerStep#2", "ProfilerStep#3"]
