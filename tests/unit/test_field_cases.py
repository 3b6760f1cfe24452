"""Faults reported from the field, each as a small input and the right behaviour.

Named after what they show; the issue is named where it is public.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from crystalllm import logical, native
from crystalllm.errors import UserError
from crystalllm.identity import Identity
from crystalllm.payload import Entry, PayloadBook
from crystalllm.warm import RankError


def test_reduce_op_is_not_ignored(virtual):  # pytorch#194530
    def program():
        found = []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            x = torch.ones(3)
            dist.all_reduce(x, op=op)
            found.append(x.tolist())
        return found

    assert virtual(program, world=16) == [[16.0] * 3, [1.0] * 3, [1.0] * 3]


def test_all_to_all_keeps_the_split_structure(virtual):  # pytorch#194530
    def program():
        world, rank = dist.get_world_size(), dist.get_rank()
        splits = list(range(1, world + 1))
        x = torch.cat([torch.full((n, 2), float(peer)) for peer, n in enumerate(splits)])
        out = torch.full(((rank + 1) * world, 2), float("nan"))
        dist.all_to_all_single(out, x, [rank + 1] * world, splits)
        return [out[i * (rank + 1) : (i + 1) * (rank + 1)] for i in range(world)]

    for peer, slot in enumerate(virtual(program, rank=4, world=16)):
        assert slot.shape == (5, 2)
        assert (slot == peer).all(), "a slot holds what I send to that peer, cut or repeated"


def test_gathering_a_parameter_does_not_meet_autograd(virtual):  # pytorch#181774
    def program():
        out = torch.zeros(6)
        dist.all_gather_into_tensor(out, torch.nn.Parameter(torch.arange(3.0)))
        return out.tolist()

    assert virtual(program, world=2) == [0, 1, 2, 0, 1, 2]


def test_every_way_of_making_a_group_reaches_dispatch(virtual):  # pytorch#162129
    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.utils._python_dispatch import TorchDispatchMode

        class Seen(TorchDispatchMode):
            ops: list[str] = []  # noqa: RUF012  shared on purpose

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.ops.append(str(func))
                return func(*args, **(kwargs or {}))

        groups = [
            dist.group.WORLD,
            dist.new_group([0, 1]),
            init_device_mesh("cpu", (4, 2)).get_group(1),
            dist.group.WORLD.split_group([0, 2]),
        ]
        with Seen() as seen:
            for group in groups:
                group.allreduce([torch.ones(1)]).wait()
        by_dispatch = sum("allreduce_" in op for op in seen.ops)
        # A backend built by hand is below dispatch in torch too; its call is recorded.
        direct = dist.ProcessGroupGloo(dist.HashStore(), 0, 8)
        direct.allreduce([torch.ones(1)]).wait()
        return by_dispatch, len(logical.world().take_records()["call"])

    assert virtual(program, world=8, keep_records=True) == (4, 5)


def test_virtual_groups_have_sequence_numbers(virtual):  # torchtitan#2275
    def program():
        group = dist.new_group(list(range(0, 8, 2)))
        numbers = [group._get_sequence_number_for_group()]
        for _ in range(3):
            dist.barrier(group=group)
            numbers.append(group._get_sequence_number_for_group())
        return numbers

    assert virtual(program, world=8) == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", [0, 9, 63])
def test_any_rank_can_be_chosen(virtual, rank):  # torchtitan#4018
    def program():
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (8, 8), mesh_dim_names=("pp", "dp")).get_local_rank("pp")

    assert virtual(program, rank=rank, world=64) == rank // 8


def test_a_rank_outside_the_world_is_an_error():  # torchtitan#4018
    with pytest.raises(UserError, match=r"Rank 64 is outside the world\. World size 64.* 0 to 63"):
        Identity(rank=64, world_size=64)
    with pytest.raises(UserError, match="outside"):
        Identity(rank=-1, world_size=64)


def test_a_whole_step_runs_with_initialised_weights(virtual):  # torchtitan#2057
    def program():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        mesh = init_device_mesh("cpu", (512,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        for p in model.parameters():
            torch.nn.init.trunc_normal_(p, std=0.02)
        optimizer = torch.optim.AdamW(model.parameters())
        before = [p.to_local().clone() for p in model.parameters()]
        model(torch.randn(2, 512)).sum().backward()
        optimizer.step()
        after = [p.to_local() for p in model.parameters()]
        changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return changed, all(a.isfinite().all().item() for a in after)

    assert virtual(program, rank=300, world=512) == (True, True)


def _object_payloads(group, seq, values, *, length):
    """What each rank would send in all_gather_object or gather_object, as two calls."""
    import pickle

    pickled = [pickle.dumps(v) for v in values]
    for rank, data in enumerate(pickled):
        yield Entry(
            group=group, seq=seq, rank=rank, dtype="int64", value=len(data).to_bytes(8, "little")
        )
        yield Entry(group=group, seq=seq + 1, rank=rank, dtype="uint8", value=data)


def test_object_collectives_give_the_peers_objects(virtual):  # unpickling errors in forks
    world = 8
    values = [{"rank": r, "text": "x" * (3 * r)} for r in range(world)]
    identity = native.load().digest(list(range(world))) + "#0"
    book = PayloadBook(
        [
            *_object_payloads(identity, 0, values, length=world),
            *_object_payloads(identity, 2, values, length=world),
        ]
    )

    def program():
        got = [None] * world
        dist.all_gather_object(got, values[dist.get_rank()])
        gathered = [None] * world
        dist.gather_object(values[dist.get_rank()], gathered, dst=3)
        return got, gathered, logical.world().num_invented

    got, gathered, invented = virtual(program, rank=3, world=world, book=book, strict=True)
    assert got == values
    assert gathered == values
    assert invented == 0


def test_broadcast_objects_come_from_the_book(virtual):
    import pickle

    identity = native.load().digest(list(range(8))) + "#0"
    data = [pickle.dumps(v) for v in ("a long configuration " * 5, {"seed": 7})]
    sizes = b"".join(len(d).to_bytes(8, "little") for d in data)
    book = PayloadBook(
        [
            Entry(group=identity, seq=0, rank=2, dtype="int64", value=sizes),
            Entry(group=identity, seq=1, rank=2, dtype="uint8", value=b"".join(data)),
        ]
    )

    def program():
        objects = [None, None]
        dist.broadcast_object_list(objects, src=2)
        return objects

    assert virtual(program, rank=5, book=book, strict=True) == [
        "a long configuration " * 5,
        {"seed": 7},
    ]


def test_an_unknown_object_is_a_clear_error(virtual):
    def program():
        dist.broadcast_object_list([None], src=2)

    with pytest.raises(
        RankError, match=r"virtual rank's object is not known.* Rank 5, broadcast_object_list from"
    ):
        virtual(program, rank=5)


def test_zero_splits_finish(virtual):  # pytorch#146468, NVIDIA/nccl#1593
    def program():
        out = torch.zeros(20, 3)
        dist.all_to_all_single(out, torch.ones(5, 3), [5, 5, 5, 5], [0, 0, 5, 0])
        nothing = torch.zeros(0, 3)
        dist.all_to_all_single(nothing, torch.ones(0, 3), [0] * 4, [0] * 4)
        return out.isfinite().all().item(), nothing.shape

    assert virtual(program, rank=2, world=4) == (True, torch.Size([0, 3]))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_equal_splits_must_divide_the_rows(virtual, backend):  # pytorch#101380
    def program():
        dist.all_to_all_single(torch.zeros(10), torch.ones(10))

    with pytest.raises(RankError, match="does not divide equally across group size"):
        virtual(program, world=4, backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_order_within_a_batch_is_free(virtual, backend):  # torchcomms#2885
    def program():
        x = torch.full((2,), float("nan"))
        ops = [dist.P2POp(dist.irecv, x, 1), dist.P2POp(dist.isend, torch.ones(2), 1)]
        for order in (ops, ops[::-1]):
            for work in dist.batch_isend_irecv(order):
                work.wait()
        return x.isfinite().all().item()

    assert virtual(program, world=2, backend=backend)


def test_receiving_from_any_source(virtual):  # pytorch#47137, #49383, #42332
    def program():
        handle = dist.irecv(torch.zeros(2), src=None)
        handle.wait()
        return [handle._source_rank(), *(dist.recv(torch.zeros(2)) for _ in range(2))], [
            (r, any_) for r, any_ in zip(*_columns("peer_rank", "any_source"), strict=True)
        ]

    sources, recorded = virtual(program, rank=0, world=4, keep_records=True)
    assert sorted(sources) == [1, 2, 3]
    assert recorded == [(source, True) for source in sources]


def _columns(*names):
    records = logical.world().take_records()
    return [records[name] for name in names]


@pytest.mark.parametrize("rank", [0, 2])
def test_local_synchronisation_waits_for_nobody(virtual, rank):  # pytorch#129965
    def program():
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", device_id=device)
        if dist.get_rank() > 1:  # not members, and they don't call
            return None
        group = dist.new_group([0, 1], use_local_synchronization=True)
        return dist.get_process_group_ranks(group)

    expected = [0, 1] if rank == 0 else None
    assert virtual(program, rank=rank, world=4, backend=None, limit_s=30) == expected


@pytest.mark.parametrize("order", ["abc", "bac", "cba"])
def test_a_groups_identity_does_not_depend_on_what_else_was_split(virtual, order):  # pytorch#190431
    splits = {"a": [0, 1, 2, 3], "b": [0, 4], "c": [0, 2, 4, 6]}

    def program():
        for name in order:
            dist.group.WORLD.split_group(splits[name])
        found = {tuple(g.members): g.identity for g in logical.world().groups}
        dist.destroy_process_group()
        return found

    digest = native.load().digest
    found = virtual(program, world=8)
    for members in splits.values():
        assert found[tuple(members)] == digest(members) + "#0"


def test_coalesced_gather_keeps_its_options(virtual):  # pytorch#175379
    def program():
        out, other = torch.zeros(16), torch.zeros(24)
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_gather_into_tensor(out, torch.ones(2))
            dist.all_gather_into_tensor(other, torch.ones(3))
        done_at_once = manager.works[0].is_completed()
        manager.wait()
        return done_at_once, manager.works[0].is_completed(), _columns("is_async")[0]

    got = virtual(program, world=8, keep_records=True, transfer_ns=50_000_000)
    assert got == (False, True, [True, True])


def test_buffers_live_until_the_call_completes(virtual):  # pytorch#148994
    def program():
        inputs = [torch.ones(1000 + 10 * r) for r in range(8)]
        reference = inputs[3].untyped_storage()._weak_ref()
        out = torch.zeros(1000)
        work = dist.reduce_scatter(out, inputs, async_op=True)
        del inputs
        during = torch.UntypedStorage._expired(reference)
        work.wait()
        after = torch.UntypedStorage._expired(reference)
        torch.UntypedStorage._free_weak_ref(reference)
        return during, after, out[0].item()

    assert virtual(program, world=8, transfer_ns=100_000_000) == (False, True, 8.0)


def test_eight_bit_floats_gather_and_reduce_where_the_real_backend_does(virtual):
    # pytorch#152706, #126556, #148344, #151594
    def table(backend):
        def attempt(call):
            try:
                call()
                return True
            except (RuntimeError, TypeError):
                return False

        found = {}
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz):
            x = torch.ones(4).to(dtype)
            out = torch.zeros(4 * dist.get_world_size()).to(dtype)
            as_bytes = (out.view(torch.uint8), x.view(torch.uint8))
            found[str(dtype)] = (
                attempt(lambda out=out, x=x: dist.all_gather_into_tensor(out, x)),
                attempt(lambda b=as_bytes: dist.all_gather_into_tensor(*b)),
                attempt(lambda x=x: dist.all_reduce(x)),
            )
        return found

    nccl = virtual(lambda: table("nccl"), backend="nccl")
    gloo = virtual(lambda: table("gloo"))
    assert nccl == {
        "torch.float8_e4m3fn": (True, True, True),
        "torch.float8_e5m2": (True, True, True),
        "torch.float8_e4m3fnuz": (False, True, False),
    }
    assert set(gloo.values()) == {(False, True, False)}
