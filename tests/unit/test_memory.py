"""The account of memory: what counts as what, limits, summaries, and whether a job fits."""

from __future__ import annotations

import os
from typing import Any

import memory_ranks
import numpy as np
import pandas as pd
import pytest
from memory_ranks import Kept

from crystalllm import memory, tables
from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.memory.blocks import CATEGORIES, Blocks
from crystalllm.memory.summary import summarize

JOB = Job(program="none.py", arguments="{iterations}", world_size=2, capture_iterations=1)
KIB = 1024


def run(program: Any, *, rank: int = 0, **more: Any) -> Kept:
    """The account of `program` as one rank of two, inside a default group."""

    def inside() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        program()

    return memory_ranks.virtual(JOB, rank, program=inside, **more)


def blocks(kept: Kept) -> dict[int, tuple[str, str]]:
    """Category and phase of the block of each size; every size is to occur once."""
    taken = kept.rows[kept.rows["bytes"] > 0]
    assert taken["bytes"].is_unique
    kinds = zip(taken["category"], taken["phase"], strict=True)
    return dict(zip(taken["bytes"], kinds, strict=True))


def of_size(kept: Kept, size: int) -> list[tuple[str, str]]:
    """Category and phase of every block of that size."""
    found = kept.rows[kept.rows["bytes"] == size]
    return list(zip(found["category"], found["phase"], strict=True))


# --- categories


def test_what_blocks_are_for(virtual):
    def program() -> None:
        import torch
        import torch.distributed as dist

        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                draft = torch.randn(1001)  # gone before anybody computes
                self.weight = torch.nn.Parameter(torch.ones(1000) * draft[:1000])

            def forward(self, x):
                return (x * self.weight).tanh()

        model = torch.nn.Sequential(Block())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            model(torch.ones(1000)).sum().backward()
            with torch.no_grad():
                torch.ones(555)
            dist.all_reduce(torch.ones(333))
            optimizer.step()
            optimizer.zero_grad()

    kept = run(program)
    assert of_size(kept, 4 * 1001) == [("other", "other")]
    assert of_size(kept, 4 * 333) == [("communication", "forward")] * 2
    assert of_size(kept, 4 * 555) == [("other", "other")] * 2
    found = of_size(kept, 4000)
    assert found.count(("parameters", "other")) == 1
    assert found.count(("gradients", "backward")) == 2
    assert found.count(("optimizer", "optimizer")) == 1
    assert ("activations", "forward") in found
    names = {b["name"]: b["category"] for b in kept.summary["peak"]["largest"] if b["name"]}
    assert names["0.weight"] in ("parameters", "gradients")
    assert names["0.weight: momentum_buffer"] == "optimizer"
    assert kept.summary["iterations"][1]["end_bytes"] == kept.summary["iterations"][2]["peak_bytes"]


def test_what_is_computed_inside_a_function_of_the_program_is_an_activation(virtual):
    def program() -> None:
        import torch
        from torch.utils.checkpoint import checkpoint

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x.new_ones(777))
                return 2 * x

            @staticmethod
            def backward(ctx, grad):
                return 2 * grad

        layer = torch.nn.Linear(8, 8)
        x = checkpoint(lambda y: layer(y).repeat(5, 5), torch.ones(8, 8), use_reentrant=True)
        Twice.apply(layer(torch.ones(8, 8)) + x[:8, :8]).sum().backward()
        with torch.no_grad():
            torch.ones(999)  # no part of any forward

    kept = run(program)
    assert of_size(kept, 4 * 777) == [("activations", "forward")]
    assert of_size(kept, 4 * 999) == [("other", "other")]
    assert of_size(kept, 4 * 40 * 40)[0] == ("activations", "forward")


def test_gradients_that_no_optimizer_sees(virtual):
    def program() -> None:
        import torch

        weight = torch.nn.Parameter(torch.ones(1000))
        holder = torch.nn.Module()
        holder.weight = weight
        (weight * weight).sum().backward()
        weight.grad = None

    assert of_size(run(program), 4000).count(("gradients", "backward")) == 1


def test_parameters_that_no_module_registers(virtual):
    def program() -> None:
        import torch

        master = torch.zeros(1000)
        master.grad = torch.zeros(1000)
        torch.optim.Adam([master]).step()

    kept = run(program)
    categories = [category for category, _ in of_size(kept, 4000)]
    assert categories.count("parameters") == 1
    assert categories.count("gradients") == 1
    assert categories.count("optimizer") >= 2
    names = [b["name"] for b in kept.summary["peak"]["largest"]]
    assert "Adam.param_groups[0]['params'][0]" in names
    assert "Adam.param_groups[0]['params'][0]: exp_avg_sq" in names


@pytest.mark.parametrize("stack", ["fsdp1", "fsdp2"])
def test_sharded_parameters_and_their_gradients(stack, virtual):
    def program() -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        model = torch.nn.Linear(64, 64, bias=False)
        if stack == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model(torch.ones(3, 64)).sum().backward()
        # No optimizer steps: an account that ends here has to know all the same.

    kept = run(program)
    whole = [category for category, _ in of_size(kept, 4 * 64 * 64)]
    half = [category for category, _ in of_size(kept, 4 * 64 * 32)]
    assert whole.count("parameters") >= 2  # before it is sharded, and unsharded
    assert "gradients" in whole
    assert "parameters" in half
    assert "gradients" in half


def test_tensor_parallel_parameters(virtual):
    def program() -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(3, 64)).sum().backward()
        optimizer.step()

    kept = run(program)
    names = [(b["category"], b["name"]) for b in kept.summary["peak"]["largest"]]
    assert ("parameters", "0.weight") in names
    half = [category for category, _ in of_size(kept, 4 * 64 * 32)]
    assert {"parameters", "gradients", "optimizer"} <= {*half}


def test_without_the_hooks_less_is_known(virtual, monkeypatch):
    """Turning off a patch of the account is as for any other; phases remain."""
    monkeypatch.setenv("CRYSTALLLM_PATCHES_OFF", "torch.memory-modules,torch.memory-optimizers")

    def program() -> None:
        import torch

        model = torch.nn.Linear(10, 100, bias=False)
        model(torch.ones(1, 10)).sum().backward()

    assert {category for category, _ in of_size(run(program), 4000)} == {"other", "activations"}


# --- what the communication library holds, and what is ours


def test_what_gloo_holds_ends_with_the_transfer(virtual):
    def program() -> None:
        import time

        import torch
        import torch.distributed as dist

        whole, mine = torch.zeros(2000), torch.ones(1000)
        dist.all_gather_into_tensor(whole, mine, async_op=True)  # nobody waits
        torch.zeros(11)
        time.sleep(0.2)
        torch.zeros(12)

    kept = run(program, transfer_ns=150_000_000)
    rows = kept.rows.set_index("bytes")
    held = rows[rows["by_library"]]
    assert held.index.tolist() == [8000, -8000]  # gloo's flat output
    assert rows.loc[44, "total_bytes"] == 8000 + 4000 + 8000 + 44
    assert rows.loc[48, "total_bytes"] == 8000 + 4000 + 48
    lasted_ns = held.loc[-8000, "at_ns"] - held.loc[8000, "at_ns"]
    assert 149_000_000 < lasted_ns < 160_000_000  # not until the next allocation


def test_what_gloo_s_queue_holds_outlives_names_and_handles(virtual):
    def program() -> None:
        import time

        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1000), async_op=True)
        torch.zeros(11)
        time.sleep(0.1)
        torch.zeros(12)
        work = dist.all_reduce(torch.ones(2000), async_op=True)
        work.wait()
        torch.zeros(13)  # the handle still has it
        del work
        torch.zeros(14)

    kept = run(program, transfer_ns=50_000_000)
    total = kept.rows.set_index("bytes")["total_bytes"]
    assert [total[4 * n] - 4 * n for n in (11, 12, 13, 14)] == [4000, 0, 8000, 0]


def test_invented_data_takes_no_memory_of_the_program(virtual):
    def program() -> None:
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        numbers = torch.arange(100)  # steers: they go through the payloads
        across = torch.ones(30, 20).t()
        for t in (numbers, across):
            dist.all_reduce(t)
            dist.broadcast(t, 1 - rank)
        dist.recv(torch.zeros(30, 20), 1 - rank)
        dist.all_to_all_single(torch.zeros(70), torch.zeros(50), [30, 40], [20, 30])

    kept = run(program)
    assert not kept.rows["by_library"].any()
    sizes = sorted(b for b in kept.rows["bytes"] if b > 0)
    assert sizes == sorted([800, 2400, 2400, 280, 200])


def test_invented_objects_take_no_memory_of_the_program(virtual):
    def program() -> None:
        import torch.distributed as dist

        dist.broadcast_object_list(["x" * 5000], src=0)

    kept = run(program, rank=1)
    # The one in which they arrive, and none from which they are sent.
    assert (kept.rows["bytes"] > 5000).sum() == 1


def test_another_process_s_memory_is_its_own(virtual):
    def program() -> None:
        import torch

        mine = torch.zeros(1000)
        pid = os.fork()
        if pid == 0:
            kept = torch.zeros(1 << 20) + mine.sum()
            os._exit(0 if kept.numel() == 1 << 20 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        torch.zeros(500)

    kept = run(program, limit_bytes=100 * KIB)
    assert sorted(b for b in kept.rows["bytes"] if b > 0) == [2000, 4000]


# --- limits


def test_a_request_beyond_the_limit_is_out_of_memory(virtual):
    def program() -> None:
        import torch

        model = torch.nn.Linear(256, 256, bias=False)  # 256 KiB
        try:
            model(torch.ones(512, 256))  # 512 KiB twice
        except torch.OutOfMemoryError as error:
            text = str(error)
        assert "out of memory" in text
        assert "Tried to allocate 512.00 KiB" in text
        assert "(phase forward)" in text
        model(torch.ones(128, 256)).sum().backward()
        kept = [torch.zeros(1) for _ in range(3)]
        assert sum(t.numel() for t in kept) == 3

    kept = run(program, limit_bytes=1000 * KIB)
    assert kept.rows["total_bytes"].max() <= 1000 * KIB
    assert kept.rows["total_bytes"].iloc[-1] == kept.summary["end_bytes"]
    (refusal,) = kept.summary["out_of_memory"]
    assert refusal["bytes"] == 512 * KIB
    assert refusal["phase"] == "forward"
    assert refusal["held_bytes"] == sum(refusal["by_category"].values()) == 768 * KIB
    assert refusal["by_category"]["parameters"] == 256 * KIB
    assert refusal["by_category"]["other"] == 512 * KIB  # made before the model was called
    assert [b["name"] for b in refusal["largest"]] == ["", "weight"]
    assert kept.summary["limit_bytes"] == 1000 * KIB


def test_out_of_memory_in_backward_step_and_communication(virtual):
    def program() -> None:
        import torch
        import torch.distributed as dist

        caught = []
        weight = torch.nn.Parameter(torch.ones(16 * KIB))  # 64 KiB
        holder = torch.nn.Module()
        holder.weight = weight
        optimizer = torch.optim.Adam(holder.parameters())
        for is_tight in (True, False):
            ballast = torch.zeros(160 * 256 if is_tight else 0)
            loss = weight.exp().sum()
            try:
                loss.backward()
            except RuntimeError as error:  # as programs do that also run on old versions
                caught.append(type(error).__name__)
            del ballast, loss
        ballast = torch.zeros(128 * 256)
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            caught.append("in step")
        optimizer.state.clear()
        try:
            # The tensors fit, gloo's copy of them does not.
            dist.all_gather([torch.zeros(6 * KIB)] * 2, torch.zeros(6 * KIB))
        except torch.OutOfMemoryError:
            caught.append("in call")
        del ballast
        weight.data -= weight.grad
        assert caught == ["OutOfMemoryError", "in step", "in call"]

    kept = run(program, limit_bytes=320 * KIB)
    found = kept.summary["out_of_memory"]
    assert [r["phase"] for r in found] == ["backward", "optimizer", "communication"]
    assert found[1]["by_category"]["gradients"] == 64 * KIB
    assert all(r["held_bytes"] + r["bytes"] > 320 * KIB for r in found)
    assert kept.summary["peak"]["bytes"] <= 320 * KIB


def test_an_account_has_a_world_and_a_positive_limit():
    with pytest.raises(UserError, match="limit_bytes=0"):
        memory.start(None, limit_bytes=0)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        memory.start(None)


# --- summaries


def account(*changes: tuple[int, int, str], phase: str = "forward") -> Blocks:
    """Blocks from (block, bytes, iteration) per change; bytes 0 gives the block back."""
    count = 1 + max(block for block, _, _ in changes)
    given = np.full(count, -1)
    columns: dict[str, Any] = {
        name: np.zeros(count, np.int64)
        for name in ("bytes", "taken", "taken_ns", "taken_mark", "owner")
    }
    marks = np.full(count, -1)
    for i, (block, size, iteration) in enumerate(changes):
        if size:
            columns["bytes"][block] = size
            columns["taken"][block] = columns["taken_ns"][block] = i
            columns["taken_mark"][block] = iteration
        else:
            given[block], marks[block] = i, iteration
    columns |= {"given": given, "given_ns": given, "given_mark": marks}
    # parameter, gradient, then nothing: activations
    recognised = np.array([4, 3] + [0] * count)[:count]
    columns |= {
        "as": recognised,
        "phase": np.ones(count, np.int8),
        "by_library": np.zeros(count, bool),
        "is_shared": np.arange(count) == 1,
        "owner": np.where(recognised > 0, 0, -1),
    }
    return Blocks.of_account(columns, epoch_ns=0, iteration_of=lambda marks: marks)


def test_a_summary_by_hand():
    kept = account(
        (0, 100, 0), (1, 50, 0), (2, 30, 1), (2, 0, 1), (1, 0, 1), (3, 60, 3), (4, 1, 3), (3, 0, 3)
    )
    assert kept.total_bytes.tolist() == [100, 150, 180, 150, 100, 160, 161, 101]
    refusals = [
        {"bytes": 7, "held_bytes": 150, "change": 2, "at_ns": 2, "iteration": 0}
        | {"phase": "forward", "by_library": False}
    ]
    found = summarize(kept, refusals, lambda owner: f"p{owner}" if owner >= 0 else "")
    none = dict.fromkeys(CATEGORIES, 0)
    assert found["peak"]["bytes"] == 180
    assert found["peak"]["iteration"] == 1
    assert found["peak"]["by_category"] == none | {
        "parameters": 100,
        "gradients": 50,
        "activations": 30,
    }
    assert [(b["bytes"], b["name"]) for b in found["peak"]["largest"]] == [
        (100, "p0"),
        (50, "p0 and others"),
        (30, ""),
    ]
    assert found["category_peaks"] == none | {
        "parameters": 100,
        "gradients": 50,
        "activations": 61,
    }
    peaks = [(i["iteration"], i["peak_bytes"], i["end_bytes"]) for i in found["iterations"]]
    assert peaks == [(0, 150, 150), (1, 180, 100), (2, 100, 100), (3, 161, 101)]
    assert found["end_bytes"] == 101
    (refusal,) = found["out_of_memory"]
    assert refusal["by_category"] == none | {"parameters": 100, "gradients": 50}


def test_an_account_of_nothing():
    kept = run(lambda: None)
    assert kept.summary["peak"] == {
        "bytes": 0,
        "event": -1,
        "at_ns": 0,
        "iteration": 0,
        "phase": "other",
        "by_category": dict.fromkeys(CATEGORIES, 0),
        "largest": [],
    }
    assert kept.summary["iterations"] == []
    assert len(kept.rows) == 0


def test_the_table_is_written_and_read(virtual, tmp_path):
    def program() -> None:
        import torch

        torch.zeros(10)
        kept = torch.zeros(20)
        assert len(kept) == 20

    path = tmp_path / "memory.parquet"
    kept = run(program)
    tables.MEMORY.write(path, {c: kept.rows[c] for c in kept.rows}, provenance={})
    table, _ = tables.MEMORY.read(path)
    pd.testing.assert_frame_equal(table.to_pandas(), kept.rows)
    assert table["bytes"].to_pylist() == [40, -40, 80, -80]
    assert table["total_bytes"].to_pylist() == [40, 0, 80, 0]


# --- fits


def summary(peak: int, *, refused: int = 0) -> dict[str, Any]:
    held = {"by_category": {"parameters": peak}, "largest": [{"bytes": peak}]}
    asked = {"bytes": refused, "held_bytes": peak, **held}
    return {"peak": {"bytes": peak, **held}, "out_of_memory": [asked] if refused else []}


def test_the_worst_rank_decides():
    ranks = {"role 0": summary(70), "role 1": summary(90), "role 2": summary(80)}
    found = memory.verdict(ranks, 90)
    assert found["fits"]
    assert (found["worst"], found["peak_bytes"], found["margin_bytes"]) == ("role 1", 90, 0)
    assert found["by_category"] == {"parameters": 90}
    assert [r["name"] for r in found["ranks"]] == ["role 1", "role 2", "role 0"]
    found = memory.verdict({"role 0": summary(70), "role 1": summary(90)}, 89)
    assert not found["fits"]
    assert found["margin_bytes"] == -1
    assert [r["fits"] for r in found["ranks"]] == [False, True]
    assert not found["is_lower_bound"]


def test_a_rank_that_was_stopped_at_its_limit_needs_more():
    found = memory.verdict({"role 0": summary(70, refused=31), "role 1": summary(90)}, 100)
    assert not found["fits"]
    assert (found["worst"], found["peak_bytes"], found["is_lower_bound"]) == ("role 0", 101, True)


@pytest.mark.parametrize(("summaries", "limit"), [({}, 1), ({"a": summary(1)}, 0)])
def test_a_verdict_needs_ranks_and_a_limit(summaries, limit):
    with pytest.raises(UserError, match="cannot be told"):
        memory.verdict(summaries, limit)
