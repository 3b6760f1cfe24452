"""Groups: identity, signature, splitting, meshes, initialisation at scale."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from crystalllm import logical, native


def test_signature_of_usual_layouts():
    signature = native.load().axis_signature
    assert signature([5]) == "1"
    assert signature(list(range(8))) == "8:1"
    assert signature([3, 11, 19, 27]) == "4:8"
    assert signature([0, 1, 8, 9]) == "2:1,2:8"
    assert signature([0, 2, 16, 18, 64, 66, 80, 82]) == "2:2,2:16,2:64"
    assert signature([0, 1, 3]).startswith("irregular:")
    assert signature([0, 1, 3]) == signature([10, 11, 13])
    assert signature([0, 1, 3]) != signature([0, 2, 3])
    assert signature([1, 0]) == "2:-1"


@given(
    axes=st.lists(st.tuples(st.integers(2, 4), st.integers(1, 5)), min_size=1, max_size=3),
    origin=st.integers(0, 1000),
)
@settings(deadline=None)
def test_signature_depends_on_the_shape_alone(axes, origin):
    """Equal for the same shape anywhere; different members never look like another shape."""
    offsets, stride = [0], 1
    for size, factor in axes:
        stride *= factor
        offsets = [o + i * stride for i in range(size) for o in offsets]
        stride *= size
    signature = native.load().axis_signature
    text = signature([origin + o for o in offsets])
    assert text == signature(offsets)
    rebuilt = [0]
    for axis in text.split(","):
        size, step = map(int, axis.split(":"))
        rebuilt = [o + i * step for i in range(size) for o in rebuilt]
    assert rebuilt == offsets


@given(st.lists(st.integers(0, 60), min_size=2, max_size=9, unique=True))
@settings(deadline=None)
def test_signature_of_any_list_is_reversible_or_irregular(members):
    text = native.load().axis_signature(members)
    if text.startswith("irregular:"):
        return
    rebuilt = [0]
    for axis in text.split(","):
        size, step = map(int, axis.split(":"))
        rebuilt = [o + i * step for i in range(size) for o in rebuilt]
    assert rebuilt == [m - members[0] for m in members]


def test_identity_is_members_and_creation_index(virtual):
    def program():
        dist.new_group([0, 1, 2])
        dist.new_group([0, 3])
        dist.new_group([2, 1, 0])  # the same group, once more
        return [(g.members, g.creation, g.identity) for g in logical.world().groups]

    world, first, second, again = virtual(program, rank=0, world=4)
    assert [world[1], first[1], second[1], again[1]] == [0, 0, 0, 1]
    assert first[2].split("#")[0] == again[2].split("#")[0]
    assert first[2] != again[2]
    other = virtual(lambda: dist.new_group([0, 1, 2]) and _last_identity(), rank=2, world=4)
    assert other == first[2]


def _last_identity():
    return logical.world().groups[-1].identity


def test_split_group_on_a_bound_device(virtual):
    def program():
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", device_id=device)
        sub = dist.split_group(split_ranks=[[0, 2, 4, 6], [1, 3, 5, 7]])
        subsub = dist.split_group(sub, split_ranks=[[0, 1], [2, 3]])
        x = torch.ones(2)
        dist.all_reduce(x, group=sub)
        seen = (dist.get_process_group_ranks(sub), dist.get_process_group_ranks(subsub))
        dist.destroy_process_group()
        return *seen, x.tolist(), dist.is_initialized()

    got = virtual(program, rank=5, world=8, backend=None)
    assert got == ([1, 3, 5, 7], [5, 7], [4.0, 4.0], False)


def test_split_group_of_the_process_group_itself(virtual):
    def program():
        child = dist.group.WORLD.split_group([1, 3])
        x = torch.ones(2)
        child.allreduce([x]).wait()
        return x.tolist(), child.size(), child.rank(), logical.world().groups[-1].members

    assert virtual(program, rank=3, world=8) == ([2.0, 2.0], 2, 1, [1, 3])


def test_device_mesh_of_three_axes(virtual):
    def program():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (4, 8, 16), mesh_dim_names=("pp", "dp", "tp"))
        flat = mesh["dp", "tp"]._flatten("both")
        x = torch.ones(1)
        dist.all_reduce(x, group=flat.get_group())
        return (
            mesh.get_coordinate(),
            sorted(g.signature for g in logical.world().groups),
            x.item(),
        )

    coordinate, signatures, total = virtual(program, rank=311, world=512)
    assert tuple(coordinate) == (2, 3, 7)
    assert signatures == ["128:1", "16:1", "4:128", "512:1", "8:16"]
    assert total == 128


def test_initialisation_at_8192_ranks_takes_no_round_trips(virtual):
    def program():
        start = time.perf_counter()
        dist.init_process_group("gloo")
        group = dist.new_group(list(range(0, 8192, 8)))
        took = time.perf_counter() - start
        return took, dist.get_rank(), dist.get_world_size(group)

    took, rank, size = virtual(program, rank=4096, world=8192, backend=None)
    assert took < 2.0
    assert (rank, size) == (4096, 1024)


def test_init_barrier_of_the_store_passes(virtual, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")

    def program():
        dist.init_process_group("gloo")
        group = dist.new_group([1, 5, 7], use_local_synchronization=True)
        return dist.get_world_size(group)

    start = time.perf_counter()
    assert virtual(program, rank=5, world=8192, backend=None, limit_s=60) == 3
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize(("keep", "expected"), [(False, "1"), (True, "5")])
def test_local_rank_names_a_cuda_device_that_exists(virtual, monkeypatch, keep, expected):
    # No GPU is needed to see which number the program is told; patches for CUDA
    # would want one, and are off.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CRYSTALLLM_PATCHES_OFF", "torch.nccl-with-cuda,torch.nccl-without-cuda")

    def program():
        return os.environ["LOCAL_RANK"], os.environ["RANK"]

    found = virtual(program, rank=13, world=16, backend=None, logical_local_rank=keep)
    assert found == (expected, "13")
