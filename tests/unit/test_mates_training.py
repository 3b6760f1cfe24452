"""Training with two ranks that run side by side, in worlds whose other ranks are virtual."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist
import training_programs
from torch import nn

from crystalllm import warm
from crystalllm.identity import Identity

pytestmark = pytest.mark.heavy

RANKS, WORLD = (1, 5), 8
HOLDERS = [1, 1, 1, 5, 1, 5, 1, 5]  # whose data rank v holds: its own, or mate v % 2's


def _batch(rank, step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def _bytes(tensors):
    return b"".join(t.detach().numpy().tobytes() for t in tensors)


def test_ddp_averages_the_gradients_of_all_ranks(together):
    def program():
        me = dist.get_rank()
        torch.manual_seed(me)  # DDP gives all ranks rank 0's parameters, which are mate 0's
        model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16), bucket_cap_mb=0.0001)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            expected = torch.zeros(16, 16)
            for rank in HOLDERS:
                weight = model.module.weight.detach().clone().requires_grad_()
                bias = model.module.bias.detach()
                nn.functional.linear(_batch(rank, step), weight, bias).square().sum().backward()
                expected += weight.grad / WORLD
            model(_batch(me, step)).square().sum().backward()
            torch.testing.assert_close(model.module.weight.grad, expected)
            optimizer.step()
            optimizer.zero_grad()
        return _bytes(model.parameters())

    first, second = together(program, RANKS, world=WORLD)
    assert first == second


@pytest.mark.parametrize("flavour", ["gloo", "nccl"])
def test_tensor_parallel_layers_add_the_parts_of_all_ranks(together, flavour):
    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        torch.manual_seed(0)
        width = 4 * WORLD
        model = nn.Sequential(
            nn.Linear(16, width, bias=False), nn.GELU(), nn.Linear(width, 16, bias=False)
        )
        into, out_of = (
            model[i].weight.detach().clone().chunk(WORLD, dim) for i, dim in ((0, 0), (2, 1))
        )
        mesh = init_device_mesh("cpu", (WORLD,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = _batch(0, 0).requires_grad_()
        y = model(x)
        y.square().sum().backward()

        whole = _batch(0, 0).requires_grad_()
        parts = [nn.functional.gelu(whole @ into[h].t()) @ out_of[h].t() for h in HOLDERS]
        expected = torch.stack(parts).sum(0)
        expected.square().sum().backward()
        torch.testing.assert_close(y.to_local() if hasattr(y, "to_local") else y, expected)
        torch.testing.assert_close(x.grad, whole.grad)
        return _bytes([y.detach(), x.grad])

    first, second = together(program, RANKS, world=WORLD, backend=flavour)
    assert first == second


def test_fsdp_over_mates_only_trains_as_on_real_ranks(together, tmp_path):
    def train(mesh, place):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            loss = model(_batch(place, step)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, _bytes(p.to_local() for p in model.parameters())

    def emulated():
        from torch.distributed.device_mesh import DeviceMesh

        pair = dist.new_group(list(RANKS))
        return train(DeviceMesh.from_group(pair, "cpu"), dist.get_rank(pair))

    def real():
        from torch.distributed.device_mesh import init_device_mesh

        rank = int(os.environ["RANK"])
        method = f"file://{tmp_path}/real"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
        return train(init_device_mesh("cpu", (2,)), rank)

    outcomes = warm.call_together(
        real, [Identity(rank=r, world_size=2) for r in range(2)], carried=True, limit_s=60
    )
    assert [o.error for o in outcomes] == [None, None]
    assert together(emulated, RANKS, world=WORLD) == [o.value for o in outcomes]


# In these the mates report the mean loss of all ranks and the norm of all gradients,
# so that both have to be the same on both.
@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        ("ddp_with_own_python_hook", "gloo"),
        ("fsdp1", "gloo"),
        ("fsdp2", "gloo"),
        ("fsdp2", "nccl"),
        ("fsdp2_hybrid", "nccl"),
        ("zero_redundancy_optimizer", "gloo"),
    ],
)
def test_mates_agree_on_what_all_ranks_compute(together, name, flavour):
    program = training_programs.PROGRAMS[name]
    first, second = together(program, RANKS, world=WORLD, backend=flavour)
    assert first == second
    assert all(map(math.isfinite, first["losses"] + first["norms"]))
    assert all(norm > 0 for norm in first["norms"])
    assert first["finite"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("fsdp2_and_tensor_parallel", (1, 2)),  # of one TP group
        ("fsdp2_and_tensor_parallel", (1, 5)),  # of one DP group
        ("pipeline_1f1b", (3, 4)),  # neighbours
        ("pipeline_zero_bubble_v", (0, 7)),
    ],
)
def test_trains_with_finite_numbers(together, name, ranks):
    for result in together(training_programs.PROGRAMS[name], ranks, world=WORLD):
        assert len(result["losses"]) == training_programs.ITERATIONS
        assert all(map(math.isfinite, result["losses"] + result["norms"]))
        assert all(norm > 0 for norm in result["norms"])
        assert result["finite"]
