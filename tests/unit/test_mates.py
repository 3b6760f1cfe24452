"""Several ranks of one logical world that run for real side by side."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.distributed as dist

from crystalllm import logical, native, warm
from crystalllm.errors import UserError
from crystalllm.identity import Identity
from crystalllm.mates import Mates
from crystalllm.payload import Entry, PayloadBook

GLOO_EXCHANGES_LISTS = torch.__version__ >= (2, 12)

# Ranks that run for real, the size of their world, and the flavour of their group.
WORLDS = [((1, 5), 8, "gloo"), ((2, 3, 11), 16, "nccl"), ((0, 7), 8, "nccl")]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def _mates():
    """This group's members that run for real."""
    return dist.group.WORLD._get_backend(torch.device("cpu")).crystal_group.mates


def _holder(v):
    """The member whose data member v holds: the rule that these tests are about."""
    mates = _mates()
    return v if v in mates else mates[v % len(mates)]


def _numbers(rank, *shape, dtype=torch.float32, salt=0):
    """Small whole numbers that only `rank` holds, so that sums of them are exact."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    lowest = 0 if dtype in (torch.uint8, torch.bool) else -3
    high = 2 if dtype == torch.bool else 4
    return torch.randint(lowest, high, shape, generator=generator).to(dtype)


def _all(make):
    return [make(_holder(v)) for v in range(dist.get_world_size())]


def _same(found, expected):
    __tracebackhide__ = True
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), f"{found} instead of {expected}"


# --- collectives ----------------------------------------------------------------


def _reduced(op, make, dtype):
    """In wide numbers, over all members; a product has each mate once."""
    wide = [t.to(torch.int64 if dtype in INTEGERS else torch.float64) for t in _all(make)]
    n = dist.get_world_size()
    if op == dist.ReduceOp.SUM:
        found = sum(wide)
    elif op == dist.ReduceOp.AVG:
        found = torch.div(sum(wide), n, rounding_mode="trunc" if dtype in INTEGERS else None)
    elif op == dist.ReduceOp.PRODUCT:
        found = functools.reduce(operator.mul, [make(m).to(wide[0].dtype) for m in _mates()])
    else:
        found = functools.reduce(
            {
                dist.ReduceOp.MIN: torch.minimum,
                dist.ReduceOp.MAX: torch.maximum,
                dist.ReduceOp.BAND: torch.bitwise_and,
                dist.ReduceOp.BOR: torch.bitwise_or,
                dist.ReduceOp.BXOR: torch.bitwise_xor,
            }[op],
            wide,
        )
    return found.to(dtype)


@pytest.mark.parametrize(("ranks", "world", "flavour"), WORLDS)
def test_reductions_follow_the_rule(together, ranks, world, flavour):
    def program():
        ops = [getattr(dist.ReduceOp, o) for o in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")]
        bitwise = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
        me = dist.get_rank()
        for dtype in FLOATS + INTEGERS:
            for op in ops + (bitwise if flavour == "gloo" and dtype in INTEGERS else []):
                if op == dist.ReduceOp.AVG and flavour == "gloo" and dtype in INTEGERS:
                    continue  # gloo refuses
                make = functools.partial(_numbers, dtype=dtype)
                x = make(me, 5)
                dist.all_reduce(x, op=op)
                _same(x, _reduced(op, lambda r, make=make: make(r, 5), dtype))
                whole = make(me, 3 * world)
                out = torch.empty(3, dtype=dtype)
                dist.reduce_scatter_tensor(out, whole, op=op)
                _same(
                    out,
                    _reduced(op, lambda r, make=make: make(r, 3 * world), dtype)[3 * me :][:3],
                )
        x = _numbers(me, 64, dtype=torch.bool)
        dist.all_reduce(x)
        _same(x, torch.stack(_all(lambda r: _numbers(r, 64, dtype=torch.bool))).any(0))
        return _mates()

    assert together(program, ranks, world=world, backend=flavour) == [list(ranks)] * len(ranks)


@pytest.mark.parametrize(("ranks", "world", "flavour"), WORLDS)
def test_other_collectives_follow_the_rule(together, ranks, world, flavour):
    def program():
        me, n = dist.get_rank(), dist.get_world_size()
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            make = functools.partial(_numbers, dtype=dtype)
            outs = [torch.empty(2, 3, dtype=dtype) for _ in range(n)]
            dist.all_gather(outs, make(me, 2, 3))
            for out, held in zip(outs, _all(lambda r, make=make: make(r, 2, 3)), strict=True):
                _same(out, held)
            out = torch.empty(4 * n, dtype=dtype)
            dist.all_gather_into_tensor(out, make(me, 4))
            _same(out, torch.cat(_all(lambda r, make=make: make(r, 4))))
            in_place = torch.empty(4 * n, dtype=dtype)
            mine = in_place[4 * me : 4 * me + 4].copy_(make(me, 4))
            dist.all_gather_into_tensor(in_place, mine)
            _same(in_place, out)
            for root in ranks:
                x = make(me, 7)
                dist.broadcast(x, src=root)
                _same(x, make(root, 7))
                x = make(me, 7)
                dist.reduce(x, dst=root)
                if root == me:
                    _same(x, _reduced(dist.ReduceOp.SUM, lambda r, make=make: make(r, 7), dtype))
                else:
                    _same(x, make(me, 7))
                outs = [torch.empty(3, dtype=dtype) for _ in range(n)] if root == me else None
                dist.gather(make(me, 3), outs, dst=root)
                if root == me:
                    _same(torch.stack(outs), torch.stack(_all(lambda r, make=make: make(r, 3))))
                x = torch.empty(3, dtype=dtype)
                parts = [make(root, 3, salt=v) for v in range(n)]
                dist.scatter(x, parts if root == me else None, src=root)
                _same(x, parts[me])
            out = torch.empty(2 * n, dtype=dtype)
            dist.all_to_all_single(out, make(me, 2 * n))
            held = _all(lambda r, make=make: make(r, 2 * n))
            _same(out, torch.cat([h[2 * me : 2 * me + 2] for h in held]))
            # Member v, holding what h holds, sends (h + r) % 3 elements to rank r.
            sent = [[(_holder(v) + r) % 3 for r in range(n)] for v in range(n)]
            received = [sent[v][me] for v in range(n)]
            out = torch.empty(sum(received), dtype=dtype)
            dist.all_to_all_single(out, make(me, sum(sent[me])), received, sent[me])
            pieces = [make(_holder(v), sum(sent[v])).split(sent[v])[me] for v in range(n)]
            _same(out, torch.cat(pieces))
            if flavour == "nccl" or GLOO_EXCHANGES_LISTS:
                outs = [torch.empty(2, dtype=dtype) for _ in range(n)]
                dist.all_to_all(outs, [make(me, 2, salt=v) for v in range(n)])
                for v in range(n):
                    _same(outs[v], make(_holder(v), 2, salt=me))
            own = torch.empty(2, dtype=dtype)
            dist.reduce_scatter(own, [make(me, 2, salt=v) for v in range(n)])
            if dtype != torch.bool:
                expected = _reduced(
                    dist.ReduceOp.SUM, lambda r, make=make: make(r, 2, salt=me), dtype
                )
                _same(own, expected)
        dist.barrier()

    together(program, ranks, world=world, backend=flavour)


def test_lists_of_uneven_sizes_are_legal_with_nccl(together):
    def program():
        me, n = dist.get_rank(), dist.get_world_size()
        outs = [torch.empty(1 + r) for r in range(n)]
        dist.all_gather(outs, _numbers(me, 1 + me))
        for v, out in enumerate(outs):
            held = _numbers(_holder(v), 1 + _holder(v))
            _same(out, held.repeat(n)[: 1 + v])  # cut, or repeated to the size that v has
        own = torch.empty(1 + me)
        dist.reduce_scatter(own, [_numbers(me, 1 + r, salt=r) for r in range(n)])
        _same(own, sum(_all(lambda r: _numbers(r, 1 + me, salt=me))))
        outs = [torch.empty(1 + r) for r in range(n)] if me == 5 else None
        dist.gather(_numbers(me, 1 + me), outs, dst=5)
        parts = [_numbers(1, 1 + r) for r in range(n)]
        x = torch.empty(1 + me)
        dist.scatter(x, parts if me == 1 else None, src=1)
        _same(x, parts[me])
        return None if outs is None else [out.tolist() for out in outs]

    gathered = together(program, (1, 5), backend="nccl")[1]
    assert [len(g) for g in gathered] == [1 + r for r in range(8)]
    assert gathered[1] == _numbers(1, 2).tolist()
    assert gathered[5] == _numbers(5, 6).tolist()


def _observe(me_holds):
    """Every call of gloo's, by a rank that holds what rank `me_holds` has."""
    me, n = dist.get_rank(), dist.get_world_size()
    seen = []
    for op in ("SUM", "AVG", "MIN", "MAX"):
        x = _numbers(me_holds, 6)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        seen.append(x)
    many = _numbers(me_holds, 3 * n)
    outs = [torch.empty(2) for _ in range(n)]
    dist.all_gather(outs, _numbers(me_holds, 2))
    seen += outs
    out = torch.empty(2 * n)
    dist.all_gather_into_tensor(out, _numbers(me_holds, 2))
    seen.append(out)
    out = torch.empty(3)
    dist.reduce_scatter_tensor(out, many)
    seen.append(out)
    out = torch.empty(3 * n)
    dist.all_to_all_single(out, many)
    seen.append(out)
    sent = [[(h + r) % 3 for r in range(n)] for h in (1, 1, 2, 2)]  # by what each holds
    out = torch.empty(sum(s[me] for s in sent))
    dist.all_to_all_single(out, _numbers(me_holds, sum(sent[me])), [s[me] for s in sent], sent[me])
    seen.append(out)
    for root in (1, 2):
        x = _numbers(me_holds, 4)
        dist.reduce(x, dst=root)
        seen.append(x if me == root else torch.empty(0))
        x = _numbers(me_holds, 4)
        dist.broadcast(x, src=root)
        seen.append(x)
    return [x.tolist() for x in seen]


def _on_real_gloo(function, size, tmp_path):
    """What each of `size` real ranks returns."""

    def program():
        import os

        dist.init_process_group(
            "gloo",
            init_method=f"file://{tmp_path}/real",
            rank=int(os.environ["RANK"]),
            world_size=size,
        )
        return function()

    ranks = [Identity(rank=rank, world_size=size) for rank in range(size)]
    outcomes = warm.call_together(program, ranks, carried=True, limit_s=60)
    assert [outcome.error for outcome in outcomes] == [None] * size
    return [outcome.value for outcome in outcomes]


def test_mates_see_what_real_ranks_with_these_data_see(together, tmp_path):
    """Four real gloo ranks hold what the rule gives them; two mates emulate the other two."""
    holders = [1, 1, 2, 2]  # with mates 1 and 2: 0 % 2 and 3 % 2
    real = _on_real_gloo(lambda: _observe(holders[dist.get_rank()]), 4, tmp_path)
    emulated = together(lambda: _observe(dist.get_rank()), (1, 2), world=4)
    assert emulated == real[1:3]


def test_all_mates_get_the_same_bits(together):
    def program():
        me = dist.get_rank()
        torch.set_num_threads(1 + me % 2)
        torch.manual_seed(me)
        found = []
        for dtype in FLOATS:
            for shape in ((70_003,), (4, 20, 64)):
                x = torch.randn(shape).mul(10.0 ** (me % 4)).to(dtype)
                if len(shape) == 3:
                    x[1] = 0  # holes of partial activations, which get filled
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
                    y = x.clone()
                    dist.all_reduce(y, op=op)
                    assert y.isfinite().all()
                    assert op != dist.ReduceOp.SUM or len(shape) < 3 or y[1].ne(0).any()
                    found.append(y.view(torch.uint8).numpy().tobytes())
        return found

    first, *others = together(program, (2, 3, 11), world=16)
    for other in others:
        assert other == first


def test_finite_numbers_give_finite_sums(together):
    def program():
        found = []
        for dtype in FLOATS:
            most = torch.finfo(dtype).max
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
                x = torch.tensor([most, -most, float("inf"), float("nan")], dtype=dtype)
                dist.all_reduce(x, op=op)
                sign = -1 if op == dist.ReduceOp.SUM else 1  # of a product of two below zero
                found.append(x[:3].tolist() == [most, sign * most, float("inf")])
                assert x[3].isnan()
        return found

    assert together(program, (1, 5)) == [[True] * 2 * len(FLOATS)] * 2


def test_sums_of_sparse_tensors(together):
    def program():
        me = dist.get_rank()

        def held(rank):
            rows = torch.tensor([[rank % 4, 4 + rank % 3][: 1 + rank % 2]])
            values = torch.full((rows.shape[1], 2), 1.0 + rank)
            return torch.sparse_coo_tensor(rows, values, (8, 2))

        x = held(me)
        dist.all_reduce(x)
        _same(x.to_dense(), sum(h.to_dense() for h in _all(held)))

    together(program, (2, 5))


def test_a_premultiplied_sum_has_each_mates_own_factor(together):
    def program():
        me = dist.get_rank()
        x = _numbers(me, 4)
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(float(2 + me)))
        _same(x, sum(_all(lambda r: (2 + r) * _numbers(r, 4))))

    together(program, (1, 5), backend="nccl")


def test_what_virtual_roots_send_is_equal_on_all_mates(together):
    def program():
        me = dist.get_rank()
        x, y = torch.empty(300), torch.empty(5)
        dist.broadcast(x, src=0)
        dist.scatter(y, src=3)
        world = logical.world()
        kept = []
        world.keep_buffers(True)  # as around DDP's synchronisation
        for root in (2, 3):  # hold what mates 0 and 1 hold
            z = torch.full((3,), float(me))
            dist.broadcast(z, src=root)
            kept.append(z.tolist())
        world.keep_buffers(False)
        z = torch.full((3,), float(me))
        dist.reduce(z, dst=0)
        assert dist.gather(z, None, dst=0) is None
        return x.tolist(), y.tolist(), kept, z.tolist()

    first, second = together(program, (1, 5))
    assert first[:2] == second[:2]
    assert any(first[0])
    assert first[2] == second[2] == [[1.0] * 3, [5.0] * 3]
    assert (first[3], second[3]) == ([1.0] * 3, [5.0] * 3)


# --- groups ---------------------------------------------------------------------


def _crystal_group(group):
    return group._get_backend(torch.device("cpu")).crystal_group


def _sum_of_ranks(group):
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return x.item()


@pytest.mark.parametrize("flavour", ["gloo", "nccl"])
def test_each_group_is_as_real_as_its_members(together, flavour):
    def program():
        from torch.distributed.device_mesh import init_device_mesh

        me = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        groups = {
            "world": dist.group.WORLD,
            "dp": mesh.get_group("dp"),  # {1, 5}: wholly real
            "tp": mesh.get_group("tp"),  # {0..3} or {4..7}: this rank only
            "mixed": dist.new_group([1, 4, 5]),
        }
        other = dist.new_group([1, 2] if me == 1 else [4, 5], use_local_synchronization=True)
        groups["other"] = other
        return {name: (_crystal_group(g).mates, _sum_of_ranks(g)) for name, g in groups.items()}

    one, five = together(program, (1, 5), backend=flavour)
    assert one["world"] == five["world"] == ([1, 5], 5 * 1 + 3 * 5)
    assert one["dp"] == five["dp"] == ([0, 1], 6)
    assert (one["tp"], five["tp"]) == (([], 4), ([], 20))
    # Members 0 and 2 are mates 0 and 1; member 1 holds what mate 1 % 2 holds.
    assert one["mixed"] == five["mixed"] == ([0, 2], 11)
    assert (one["other"], five["other"]) == (([], 2), ([], 10))


@pytest.mark.parametrize("flavour", ["gloo", "nccl"])
def test_groups_that_are_split(together, flavour):
    def program():
        pairs = dist.new_group([1, 5])
        mixed = dist.group.WORLD.split_group([0, 1, 4, 5])
        real = mixed.split_group([1, 3])
        of_real = pairs.split_group([1, 0])
        return [
            (_crystal_group(g).members, _crystal_group(g).mates, _sum_of_ranks(g))
            for g in (pairs, mixed, real, of_real)
        ]

    one, five = together(program, (1, 5), backend=flavour)
    assert one == five
    assert one[:3] == [
        ([1, 5], [0, 1], 6),
        ([0, 1, 4, 5], [1, 3], 3 * 1 + 5),
        ([1, 5], [0, 1], 6),
    ]
    assert one[3][2] == 6


def test_a_group_of_mates_only_computes_gloos_bits(together, tmp_path):
    def observe(group):
        torch.manual_seed(dist.get_rank())
        n = dist.get_world_size(group)
        found = []
        for op in ("SUM", "AVG", "MAX", "PRODUCT"):
            x = torch.randn(1001)
            dist.all_reduce(x, op=getattr(dist.ReduceOp, op), group=group)
            found.append(x)
        out = torch.empty(7)
        dist.reduce_scatter_tensor(out, torch.randn(7 * n), group=group)
        found.append(out)
        out = torch.empty(7 * n)
        dist.all_gather_into_tensor(out, torch.randn(7), group=group)
        found.append(out)
        return [x.tolist() for x in found]

    def emulated():
        group = dist.new_group([0, 1, 2])
        dist.all_reduce(torch.ones(2), group=group)
        calls = logical.world().take_records()
        assert calls["key"] == ["all_reduce op=sum dtype=float32 count=2 group=3:1/3#0 stream=0"]
        return observe(group)

    real = _on_real_gloo(lambda: observe(dist.group.WORLD), 3, tmp_path)
    assert together(emulated, (0, 1, 2), world=8, keep_records=True) == real


def test_who_runs_alone_runs_as_ever(together, virtual):
    def program():
        x = _numbers(dist.get_rank(), 4)
        dist.all_reduce(x)
        return x.tolist(), _mates()

    assert together(program, (3,)) == [virtual(program, rank=3)]
    assert virtual(program, rank=3)[1] == []


# --- point to point -------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["gloo", "nccl"])
def test_messages_between_mates_and_to_virtual_ranks(together, flavour):
    def program():
        me = dist.get_rank()
        other = 6 - me
        x = torch.empty(4)
        if me == 1:
            dist.send(_numbers(1, 4), 5)
            assert dist.recv(x, 5) == 5
        else:
            assert dist.recv(x, 1) == 1
            dist.send(_numbers(5, 4), 1)
        _same(x, _numbers(other, 4))
        dist.send(x, 3)  # to a virtual rank
        dist.recv(x, 3)
        template = x.clone()
        # Several at a time; gloo matches them by their tags.
        tags = (8, 7) if flavour == "gloo" else (0, 0)
        sent = [dist.isend(_numbers(me, 4, salt=i), other, tag=tags[i]) for i in range(2)]
        order = (1, 0) if flavour == "gloo" else (0, 1)
        for i in order:
            work = dist.irecv(x, other, tag=tags[i])
            assert work.wait()
            _same(x, _numbers(other, 4, salt=i))
        for work in sent:
            work.wait()
        return template.tolist()

    first, second = together(program, (1, 5), backend=flavour)
    assert first == second
    assert any(first)


def test_a_batch_holds_messages_of_both_kinds(together):
    def program():
        me = dist.get_rank()
        other = 6 - me
        grid = _numbers(me, 4, 3)
        column, from_virtual = torch.empty(4, 3).t()[1], torch.empty(4)  # strided is legal
        own = grid.t()[1]
        assert not own.is_contiguous()
        assert not column.is_contiguous()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, from_virtual, (me + 1) % 8),
                dist.P2POp(dist.isend, own, other),
                dist.P2POp(dist.isend, own.contiguous(), (me - 1) % 8),
                dist.P2POp(dist.irecv, column, other),
            ]
        )
        for work in works:
            work.wait()
        _same(column, _numbers(other, 4, 3)[:, 1])
        records = logical.world().take_records()
        return records["kind"], records["peer_rank"], len(works), from_virtual.tolist()

    first, second = together(program, (1, 5), backend="nccl", keep_records=True)
    assert first[:3] == (["recv", "send", "send", "recv"], [2, 5, 0, 5], 1)
    assert first[3] == second[3]


def test_coalesced_collectives_end_with_one_handle(together):
    def program():
        me = dist.get_rank()
        xs = [_numbers(me, 4), _numbers(me, 9, salt=1)]
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        _same(xs[0], sum(_all(lambda r: _numbers(r, 4))))
        _same(xs[1], sum(_all(lambda r: _numbers(r, 9, salt=1))))

    together(program, (1, 5), backend="nccl")


def test_a_receive_from_any_source_takes_mates_in_their_turn(together):
    def program():
        me = dist.get_rank()
        if me == 5:
            dist.send(_numbers(5, 4), 1)
            return None
        seen = {}
        for _ in range(dist.get_world_size() - 1):
            x = torch.empty(4)
            seen[dist.recv(x)] = x
        _same(seen[5], _numbers(5, 4))
        return sorted(seen)

    assert together(program, (1, 5)) == [[0, 2, 3, 4, 5, 6, 7], None]


# --- control values -------------------------------------------------------------


def _book():
    identity = native.load().digest(list(range(8))) + "#0"

    def entry(seq, rank, number):
        value = number.to_bytes(8, "little")
        return Entry(group=identity, seq=seq, rank=rank, dtype="int64", value=value)

    # Those of ranks 1 and 5 are wrong on purpose: they speak for themselves.
    return PayloadBook([entry(seq, r, 100 + r) for seq in range(3) for r in range(8)])


def test_control_values_are_the_books_and_the_mates_own(together):
    def program():
        me = dist.get_rank()
        outs = [torch.empty(1, dtype=torch.int64) for _ in range(8)]
        dist.all_gather(outs, torch.tensor([me]))
        x = torch.tensor([me])
        dist.all_reduce(x)
        y = torch.tensor([me])
        dist.broadcast(y, src=6)
        return [o.item() for o in outs], x.item(), y.item()

    values = [100, 1, 102, 103, 104, 5, 106, 107]
    expected = (values, sum(values), 106)
    assert together(program, (1, 5), book=_book(), strict=True) == [expected] * 2
    for outcome in together(program, (1, 5), strict=True, check=False):
        assert "not in the payload book" in str(outcome.error)


def test_objects_between_mates(together):
    def program():
        me = dist.get_rank()
        objects = [{"from": me}, "x" * me]
        dist.broadcast_object_list(objects, src=5)
        gathered = [None] * 8
        dist.all_gather_object(gathered, ["of", me, "y" * 10 * me])
        collected = [None] * 8 if me == 1 else None
        dist.gather_object({"rank": me}, collected, dst=1)
        mine = [None]
        dist.scatter_object_list(mine, [f"for {r}" for r in range(8)] if me == 5 else None, src=5)
        message = [None]
        if me == 1:
            dist.send_object_list(["hello"], 5)
        else:
            dist.recv_object_list(message, 1)
        return objects, gathered, collected, mine, message

    one, five = together(program, (1, 5))
    assert one[0] == five[0] == [{"from": 5}, "xxxxx"]
    assert one[1] == five[1] == [["of", h, "y" * 10 * h] for h in (1, 1, 1, 5, 1, 5, 1, 5)]
    assert one[2] == [{"rank": h} for h in (1, 1, 1, 5, 1, 5, 1, 5)]
    assert (one[3], five[3]) == (["for 1"], ["for 5"])
    assert five[4] == ["hello"]


@pytest.mark.parametrize(
    ("ranks", "store", "limit_s", "words"),
    [
        ((1, 1), "file:///tmp/x", None, "different ranks"),
        ((1, 5), "http://x:1", None, "where ranks can meet"),
        ((1, 5), "tcp://x", None, "where ranks can meet"),
        ((1, 5), "tcp://x:99999", None, "where ranks can meet"),
        ((1, 5), "file://", None, "where ranks can meet"),
        ((1, 5), "file:///tmp/x", 0, "need time"),
    ],
)
def test_impossible_mates_are_refused(ranks, store, limit_s, words):
    with pytest.raises(UserError, match=words):
        Mates(ranks=ranks, store=store, limit_s=limit_s)


@pytest.mark.parametrize("ranks", [(2, 5), (1, 8)])
def test_mates_are_ranks_of_the_world_and_this_one_among_them(ranks):
    mates = Mates(ranks=ranks, store="file:///tmp/x")
    with pytest.raises(UserError, match="cannot run side by side"):
        logical.enter(Identity(rank=1, world_size=8), mates=mates)


_PROGRAM = """
import sys
from crystalllm import logical
from crystalllm.identity import Identity
from crystalllm.mates import Mates
import os
rank = int(sys.argv[1])
identity = Identity(rank=rank, world_size=8)
os.environ.update(identity.variables())
logical.enter(identity, mates=Mates(ranks=(1, 5), store=sys.argv[2], limit_s=60))
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
x = torch.tensor([float(rank)])
dist.all_reduce(x)
dist.destroy_process_group()
print(x.item())
"""


def test_fresh_processes_meet_in_a_tcp_store():
    import subprocess
    import sys

    store = torch._C._distributed_c10d.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    address = f"tcp://127.0.0.1:{store.port}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 5)
    ]
    try:
        ended = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err in ended:
        assert out.strip() == "20.0", err  # five members hold 1, three hold 5
