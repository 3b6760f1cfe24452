"""What the program sees of its virtual peers, call by call, for both flavours."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from crystalllm.warm import RankError

NCCL_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def _fails(call, kind, *words):
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_nccl_keeps_its_name_and_rules(virtual):
    def program():
        pg = dist.group.WORLD
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.cga_cluster_size = 2
        group = dist.new_group([0, 1], pg_options=options)
        _fails(lambda: dist.recv(torch.zeros(2)), RuntimeError, "nccl does not support recvAny")
        _fails(dist.monitored_barrier, ValueError, "only implemented for GLOO")
        _fails(
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.BAND),
            ValueError,
            "Cannot use ReduceOp.BAND with NCCL",
        )
        _fails(
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG),
            TypeError,
            "AVG with boolean",
        )
        for dtype in (torch.int16, torch.float8_e4m3fnuz):
            _fails(
                lambda d=dtype: dist.all_reduce(torch.ones(2).to(d)),
                TypeError,
                "not supported for NCCL",
            )
        return dist.get_backend(), dist.get_backend(group), pg.name(), dist.is_nccl_available()

    assert virtual(program, backend="nccl") == ("nccl", "nccl", "nccl", True)


@pytest.mark.parametrize("dtype", NCCL_DTYPES, ids=str)
def test_every_dtype_of_nccl_goes_through_every_collective(virtual, dtype):
    def program():
        n = dist.get_world_size()
        one = torch.ones(4).to(dtype)
        many = torch.ones(4 * n).to(dtype)
        summed = one.clone()
        dist.all_reduce(summed)
        dist.reduce(one.clone(), dst=0)
        dist.broadcast(one.clone(), src=1)
        gathered = torch.zeros(4 * n).to(dtype)
        dist.all_gather_into_tensor(gathered, one)
        scattered = torch.zeros(4).to(dtype)
        dist.reduce_scatter_tensor(scattered, many)
        exchanged = torch.zeros(4 * n).to(dtype)
        dist.all_to_all_single(exchanged, many)
        dist.send(one, 1)
        dist.recv(one.clone(), 1)
        parts = [torch.zeros(4).to(dtype) for _ in range(n)]
        dist.gather(one, parts, dst=0)
        dist.scatter(torch.zeros(4).to(dtype), parts, src=0)
        return [t.double().tolist() for t in (summed, gathered, scattered, exchanged, parts[-1])]

    world = 8
    total = 1.0 if dtype == torch.bool else float(world)
    assert virtual(program, world=world, backend="nccl") == [
        [total] * 4,
        [1.0] * 4 * world,
        [total] * 4,
        [1.0] * 4 * world,
        [1.0] * 4,
    ]


def test_uneven_lists_are_legal_with_nccl(virtual):
    def program():
        n, rank = dist.get_world_size(), dist.get_rank()
        outs = [torch.zeros(1 + r) for r in range(n)]
        dist.all_gather(outs, torch.arange(1.0 + rank))
        own = torch.zeros(2 + rank)
        dist.reduce_scatter(own, [torch.full((2 + r,), float(r)) for r in range(n)])
        slots = [torch.zeros(3 if r == 5 else 0) for r in range(n)]
        dist.all_to_all(slots, [torch.ones(2) for _ in range(n)])
        return [o.tolist() for o in outs], own.tolist(), [s.tolist() for s in slots]

    gathered, own, slots = virtual(program, rank=2, world=8, backend="nccl")
    assert gathered[2] == [0, 1, 2]  # mine
    assert gathered[4] == [0, 1, 2, 0, 1]  # mine, repeated to the size that rank 4 has
    assert gathered[0] == [0]
    assert own == [16.0] * 4
    assert slots == [[]] * 5 + [[1, 1, 1]] + [[]] * 2


def test_coalescing_gives_one_handle_and_one_batch(virtual):
    from crystalllm import logical

    def program():
        xs = [torch.ones(2), torch.ones(3)]
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        works = len(manager.works)
        handles = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, torch.zeros(2), 7),
                dist.P2POp(dist.isend, torch.ones(2), 1),
            ]
        )
        for handle in handles:
            handle.wait()
        records = logical.world().take_records()
        return works, len(handles), records["batch"], records["kind"], [x.tolist() for x in xs]

    works, handles, batches, kinds, xs = virtual(
        program, rank=0, world=8, backend="nccl", keep_records=True
    )
    assert works == 1
    assert handles == 1
    assert kinds == ["all_reduce", "all_reduce", "recv", "send"]
    assert batches == [0, 0, 1, 1]
    assert xs == [[8, 8], [8, 8, 8]]


def test_premul_sum(virtual):
    def program():
        x = torch.ones(3)
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.25))
        return x.tolist()

    assert virtual(program, world=8, backend="nccl") == [2.0] * 3


def test_sums_saturate_instead_of_overflowing(virtual):
    def program():
        out = {}
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn):
            most = torch.finfo(dtype).max
            x = torch.tensor([most, -most, 1.0, float("inf") if dtype.itemsize > 1 else 1.0])
            x = x.to(dtype)
            dist.all_reduce(x)
            out[str(dtype)] = (x.double() / torch.finfo(dtype).max).tolist()
        return out

    for dtype, (top, bottom, one, last) in virtual(program, world=512, backend="nccl").items():
        assert (top, bottom) == (1.0, -1.0), dtype
        assert 0 < one <= 1
        if "float8" not in dtype:
            assert last == float("inf"), "what the program made infinite stays so"


def test_holes_of_partial_activations_are_filled_and_nothing_else(virtual):
    def program():
        partial = torch.zeros(2, 3, 32)
        partial[0, 1] = 1.0
        dist.all_reduce(partial)
        others = [torch.zeros(1), torch.zeros(3, 64), torch.zeros(8, 3, 3, 3)]
        others[1][0] = 1.0  # a gradient of an embedding, a table of counts
        for x in others:
            dist.all_reduce(x)
        return partial, [x.sum().item() for x in others]

    partial, others = virtual(program, world=8)
    assert partial[0, 1].tolist() == [8.0] * 32
    holes = torch.cat([partial[0, :1], partial[0, 2:], partial[1]])
    assert holes.isfinite().all()
    assert (holes != 0).all()
    rms = holes.square().mean().sqrt().item()
    assert 4 < rms < 16, "at the scale of the rest"
    assert len(set(holes.flatten().tolist())) > 100, "rows must differ, or norms see no variance"
    assert others == [0, 8.0 * 64, 0]


def test_receives_from_virtual_roots_are_seeded_finite_and_small(virtual):
    def program():
        got = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
            x = torch.full((300_000,), float("nan")).to(dtype)
            dist.broadcast(x, src=3)
            got.append(torch.view_as_real(x) if x.is_complex() else x)
        y = torch.full((1000,), float("nan"))
        dist.recv(y, 5)
        z = torch.full((1000,), float("nan"))
        dist.scatter(z, src=2)
        ints = torch.full((10,), 77)
        dist.broadcast(ints, src=3)
        return [*got, y, z], ints.tolist()

    floats, ints = virtual(program, world=8, seed=1)
    again, _ = virtual(program, world=8, seed=1)
    other, _ = virtual(program, world=8, seed=2)
    for x, same, different in zip(floats, again, other, strict=True):
        assert x.isfinite().all()
        assert 0 < x.float().abs().max() < 0.2
        assert torch.equal(x, same)
        assert not torch.equal(x, different)
    assert ints == [0] * 10


def test_zero_size_tensors_in_every_collective(virtual):
    def program():
        n, empty = dist.get_world_size(), torch.empty(0)
        dist.all_reduce(empty)
        dist.broadcast(empty, src=1)
        dist.reduce(empty, dst=1)
        dist.all_gather([torch.empty(0) for _ in range(n)], empty)
        dist.all_gather_into_tensor(torch.empty(0), empty)
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
        dist.all_to_all_single(torch.empty(0), empty)
        dist.gather(empty, [torch.empty(0) for _ in range(n)], dst=0)
        dist.scatter(torch.empty(0), [torch.empty(0) for _ in range(n)], src=0)
        dist.send(empty, 1)
        dist.recv(torch.empty(0), 1)
        splits = [0, 0, 5, 0, 0, 0, 0, 0]
        out = torch.full((5,), float("nan"))
        dist.all_to_all_single(out, torch.arange(5.0), splits, splits)
        from_others = torch.full((4,), float("nan"))
        dist.all_to_all_single(from_others, empty, [0, 4, *[0] * 6], [0] * 8)
        return out.tolist(), from_others.isfinite().all().item()

    assert virtual(program, world=8) == ([0, 1, 2, 3, 4], True)


def test_strided_outputs_are_written_where_they_lie(virtual):
    def program():
        base = torch.zeros(4, 6)
        view = base[:, ::2]
        dist.broadcast(view.fill_(float("nan")), src=1)
        return base[:, ::2].isfinite().all().item(), base[:, 1::2].abs().sum().item()

    assert virtual(program, world=4) == (True, 0.0)


def test_recv_any_source_names_each_peer_in_turn(virtual):
    def program():
        return [dist.recv(torch.zeros(2)) for _ in range(3)]

    assert sorted(virtual(program, rank=1, world=4)) == [0, 2, 3]


def test_destroy_and_start_again(virtual):
    def program():
        dist.new_group([0, 1])
        dist.destroy_process_group()
        first = dist.is_initialized()
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return first, x.item()

    assert virtual(program, world=8) == (False, 8.0)


def test_profiler_sees_the_call_with_its_fields_and_nothing_of_ours(virtual):
    def program():
        from torch.profiler import ProfilerActivity, profile

        x = torch.ones(4)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
            dist.all_reduce(x)
        return [e.name for e in prof.events()]

    names = virtual(program, world=8)
    assert "record_param_comms" in names
    assert "c10d::allreduce_" in names
    assert not [n for n in names if n in ("aten::mul_", "aten::copy_", "aten::clamp_")]


def test_error_names_what_where_and_what_to_do(virtual):
    def program():
        dist.send(torch.ones(2), dist.get_world_size())

    with pytest.raises(RankError, match=r"rank 8 in a group of 8 .* Called by group rank 0\. Use"):
        virtual(program, world=8)


def test_debug_detail_mode_runs_unwrapped(virtual, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    def program():
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert virtual(program, world=8, backend=None) == 8.0


def test_a_message_to_oneself_arrives(virtual):
    def program():
        me, x = dist.get_rank(), torch.zeros(3)
        ops = [dist.P2POp(dist.isend, torch.full((3,), 5.0), me), dist.P2POp(dist.irecv, x, me)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return x.tolist()

    assert virtual(program, world=8, backend="nccl") == [5.0] * 3


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_timeouts_can_be_set_and_groups_aborted(virtual, backend):
    def program():
        import datetime
        import warnings

        limit = datetime.timedelta(seconds=77)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            group = dist.new_group([0, 1])
        dist.distributed_c10d._set_pg_timeout(limit, group)
        dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(limit)
        backend_of = group._get_backend(torch.device("cpu"))
        set_to = backend_of.options._timeout
        if backend == "nccl":
            dist.distributed_c10d._abort_process_group(group)
        return set_to == limit

    assert virtual(program, world=8, backend=backend)


def test_strided_tensors_are_refused_where_nccl_refuses_them(virtual):
    def program():
        x = torch.ones(4, 6).t()
        with pytest.raises(ValueError, match="Tensors must be contiguous"):
            dist.all_reduce(x)
        dist.send(x, 1)

    virtual(program, world=8, backend="nccl")


def test_a_store_of_the_programs_own_has_its_own_size(virtual):
    def program():
        store = dist.TCPStore("master", 4321, 3, True)
        store.set("counter", "10")
        return store.add("arrived", 1), store.add("counter", 1)

    assert virtual(program, world=8) == (3, 13)


def test_equal_iterations_with_batches_have_equal_keys(virtual):
    import crystalllm
    from crystalllm import logical

    def program():
        for _ in range(3):
            crystalllm.step()
            with dist._coalescing_manager(device=torch.device("cpu")):
                dist.all_reduce(torch.ones(2))
                dist.all_reduce(torch.ones(3))
        return logical.world().take_records()["key"]

    keys = virtual(program, world=8, backend="nccl", keep_records=True)
    assert keys[0:2] == keys[2:4] == keys[4:6]
