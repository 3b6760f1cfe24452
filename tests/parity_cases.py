"""Calls made both on a real process group and on a virtual one, for comparison.

Every rank of the real group holds the same data, which is what the mirror
policy invents; so values, and not only shapes and errors, have to agree.
Each case is a function of (rank, world) that returns what the program would
see; an exception is part of what it sees.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

CASES: dict[str, object] = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def _family(name, parameters):
    """Registers one case per parameter, so that each is compared on its own."""

    def wrap(fn):
        for label, value in parameters.items():
            CASES[f"{name}[{label}]"] = lambda rank, world, value=value: fn(rank, world, value)
        return fn

    return wrap


REDUCE_OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.AVG,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "BAND": dist.ReduceOp.BAND,
    "BOR": dist.ReduceOp.BOR,
    "BXOR": dist.ReduceOp.BXOR,
}
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
    )
}


def _ones(dtype, *shape):
    return torch.ones(*shape).to(dtype)


@_family(
    "all_reduce", {f"{o}-{d}": (op, t) for o, op in REDUCE_OPS.items() for d, t in DTYPES.items()}
)
def _all_reduce(rank, world, value):
    op, dtype = value
    x = _ones(dtype, 4)
    dist.all_reduce(x, op=op)
    return x


@_family("all_gather", DTYPES)
def _all_gather(rank, world, dtype):
    out = [torch.zeros(3).to(dtype) for _ in range(world)]
    dist.all_gather(out, _ones(dtype, 3))
    return out


@_family("all_gather_into_tensor", DTYPES)
def _all_gather_into_tensor(rank, world, dtype):
    out = torch.zeros(world * 3).to(dtype)
    dist.all_gather_into_tensor(out, _ones(dtype, 3))
    return out


@_family("reduce_scatter", DTYPES)
def _reduce_scatter(rank, world, dtype):
    out = torch.zeros(3).to(dtype)
    dist.reduce_scatter(out, [_ones(dtype, 3) for _ in range(world)])
    return out


@_family(
    "reduce_scatter_tensor",
    {
        f"{o}-{d}": (op, t)
        for o, op in REDUCE_OPS.items()
        for d, t in DTYPES.items()
        if d in ("float32", "bfloat16", "int64", "bool", "float8_e5m2")
    },
)
def _reduce_scatter_tensor(rank, world, value):
    op, dtype = value
    out = torch.zeros(3).to(dtype)
    dist.reduce_scatter_tensor(out, _ones(dtype, world * 3), op=op)
    return out


@_family("all_to_all_single", DTYPES)
def _all_to_all_single(rank, world, dtype):
    out = torch.zeros(2 * world).to(dtype)
    dist.all_to_all_single(out, _ones(dtype, 2 * world))
    return out


@_family("broadcast", DTYPES)
def _broadcast(rank, world, dtype):
    x = _ones(dtype, 5)
    dist.broadcast(x, src=rank if world == 1 else 0)
    return x.shape, x.dtype


@_family("reduce", DTYPES)
def _reduce(rank, world, dtype):
    x = _ones(dtype, 5)
    dist.reduce(x, dst=0)
    return x if rank == 0 else x.shape


@_family("gather", DTYPES)
def _gather(rank, world, dtype):
    out = [torch.zeros(2).to(dtype) for _ in range(world)] if rank == 0 else None
    dist.gather(_ones(dtype, 2), out, dst=0)
    return out


@_family("scatter", DTYPES)
def _scatter(rank, world, dtype):
    inputs = [_ones(dtype, 2) for _ in range(world)] if rank == 0 else None
    out = torch.zeros(2).to(dtype)
    dist.scatter(out, inputs, src=0)
    return out if rank == 0 else out.shape


@_family("send_recv", DTYPES)
def _send_recv(rank, world, dtype):
    x = _ones(dtype, 2)
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        return dist.recv(x, 0), x.shape
    return None


# --- shapes ----------------------------------------------------------------


@case
def all_gather_uneven(rank, world):
    out = [torch.zeros(3 + i) for i in range(world)]
    dist.all_gather(out, torch.ones(3 + rank))
    return [o.shape for o in out]


@case
def all_gather_short_list(rank, world):
    dist.all_gather([torch.zeros(3)], torch.ones(3))


@case
def all_gather_mixed_dtype(rank, world):
    dist.all_gather([torch.zeros(3, dtype=torch.float64)] * world, torch.ones(3))


@case
def all_gather_into_tensor_wrong_size(rank, world):
    dist.all_gather_into_tensor(torch.zeros(3), torch.ones(3))


@case
def all_gather_into_tensor_mixed_dtype(rank, world):
    dist.all_gather_into_tensor(torch.zeros(3 * world, dtype=torch.float64), torch.ones(3))


@case
def all_gather_into_tensor_requires_grad(rank, world):
    out = torch.zeros(world * 3)
    dist.all_gather_into_tensor(out, torch.nn.Parameter(torch.ones(3)))
    return out, out.requires_grad


@case
def all_gather_into_tensor_stacked(rank, world):
    out = torch.zeros(world, 3)
    dist.all_gather_into_tensor(out, torch.ones(3))
    return out


@case
def all_reduce_leaf_requires_grad(rank, world):
    p = torch.nn.Parameter(torch.ones(3))
    dist.all_reduce(p)
    return p.detach(), p._version


@case
def all_reduce_strided(rank, world):
    x = torch.arange(12.0).reshape(3, 4).t()
    dist.all_reduce(x)
    return x


@case
def all_reduce_empty(rank, world):
    x = torch.empty(0)
    dist.all_reduce(x)
    return x


@case
def all_reduce_sparse(rank, world):
    x = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,))
    dist.all_reduce(x)
    return x.to_dense()


@case
def all_reduce_sparse_max(rank, world):
    x = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,))
    dist.all_reduce(x, op=dist.ReduceOp.MAX)


@case
def all_reduce_coalesced(rank, world):
    xs = [torch.ones(2), torch.full((3,), 2.0)]
    dist.all_reduce_coalesced(xs)
    return xs


@case
def all_gather_coalesced(rank, world):
    outs = [[torch.zeros(2), torch.zeros(3)] for _ in range(world)]
    dist.all_gather_coalesced(outs, [torch.ones(2), torch.full((3,), 2.0)])
    return outs


@case
def reduce_scatter_uneven(rank, world):
    out = torch.zeros(2 + rank)
    dist.reduce_scatter(out, [torch.ones(2 + i) for i in range(world)])
    return out


@case
def reduce_scatter_tensor_wrong_size(rank, world):
    dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(4 * world))


@case
def reduce_scatter_short_list(rank, world):
    dist.reduce_scatter(torch.zeros(3), [torch.ones(3)])


@case
def all_to_all_single_uneven(rank, world):
    splits = [i + 1 for i in range(world)]
    out = torch.zeros((rank + 1) * world, 2)
    dist.all_to_all_single(out, torch.ones(sum(splits), 2), [rank + 1] * world, splits)
    return out


@case
def all_to_all_single_zero_splits(rank, world):
    out = torch.zeros(0)
    dist.all_to_all_single(out, torch.ones(0), [0] * world, [0] * world)
    return out


@case
def all_to_all_single_indivisible(rank, world):
    n = 2 * world + 1
    dist.all_to_all_single(torch.zeros(n), torch.ones(n))


@case
def all_to_all_single_wrong_sum(rank, world):
    dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1] * world, [3] * world)


@case
def all_to_all_single_wrong_length(rank, world):
    dist.all_to_all_single(torch.zeros(4), torch.ones(4), [4], [4])


@case
def all_to_all_single_mixed_dtype(rank, world):
    dist.all_to_all_single(torch.zeros(2 * world, dtype=torch.float64), torch.ones(2 * world))


@case
def all_to_all(rank, world):
    outs = [torch.zeros(2) for _ in range(world)]
    dist.all_to_all(outs, [torch.ones(2) for _ in range(world)])
    return outs


@case
def all_to_all_short_list(rank, world):
    dist.all_to_all([torch.zeros(2)], [torch.ones(2)])


@case
def all_to_all_uneven(rank, world):
    outs = [torch.zeros(1 + rank) for _ in range(world)]
    dist.all_to_all(outs, [torch.ones(1 + i) for i in range(world)])
    return outs


@case
def gather_short_list(rank, world):
    if rank == 0:  # the root finds out before it communicates; another rank would wait for it
        dist.gather(torch.ones(2), [torch.zeros(2)], dst=0)


@case
def broadcast_bad_root(rank, world):
    dist.broadcast(torch.ones(2), src=world)


@case
def reduce_bad_root(rank, world):
    dist.reduce(torch.ones(2), dst=world + 3)


@case
def send_to_self(rank, world):
    dist.send(torch.ones(2), rank)


@case
def low_level_bad_root(rank, world):
    opts = dist.BroadcastOptions()
    opts.rootRank = world
    opts.rootTensor = 0
    dist.group.WORLD.broadcast([torch.ones(2)], opts).wait()


@case
def low_level_bad_root_tensor(rank, world):
    opts = dist.BroadcastOptions()
    opts.rootRank = 0
    opts.rootTensor = 1
    dist.group.WORLD.broadcast([torch.ones(2)], opts).wait()


@case
def low_level_empty_list(rank, world):
    dist.group.WORLD.allreduce([], dist.AllreduceOptions()).wait()


@case
def low_level_mixed_sizes(rank, world):
    dist.group.WORLD.allreduce([torch.ones(2), torch.ones(3)], dist.AllreduceOptions()).wait()


@case
def low_level_send_two(rank, world):
    dist.group.WORLD.send([torch.ones(2), torch.ones(2)], 1 - rank, 0)


@case
def low_level_allgather_two_inputs(rank, world):
    outs = [[torch.zeros(2) for _ in range(2 * world)] for _ in range(2)]
    dist.group.WORLD.allgather(outs, [torch.ones(2), torch.ones(2)]).wait()
    return outs


# --- handles, groups, names -------------------------------------------------


@case
def backend_names(rank, world):
    pg = dist.group.WORLD
    b = pg._get_backend(torch.device("cpu"))
    return (
        dist.get_backend(),
        pg.name(),
        b.name(),
        b.supports_splitting,
        b.supports_coalescing,
        str(dist.get_backend_config()),
        pg.size(),
        pg.rank() == rank,
    )


@case
def work_handle(rank, world):
    w = dist.all_reduce(torch.ones(2), async_op=True)
    w.wait()
    return w.is_completed(), w.is_success(), [r.shape for r in w.result()]


@case
def work_future(rank, world):
    x = torch.ones(2)
    f = dist.all_reduce(x, async_op=True).get_future()
    f.wait()
    return [v.shape for v in f.value()], f.done()


@case
def gather_future(rank, world):
    out = torch.zeros(world * 2)
    f = dist.all_gather_into_tensor(out, torch.ones(2), async_op=True).get_future()
    return [v.shape for v in f.wait()]


@case
def barrier(rank, world):
    dist.barrier()
    w = dist.barrier(async_op=True)
    w.wait()
    return w.is_completed()


@case
def monitored_barrier(rank, world):
    return dist.monitored_barrier()


@case
def coalescing_all_reduce(rank, world):
    xs = [torch.ones(2), torch.ones(3)]
    with dist._coalescing_manager(async_ops=True) as cm:
        for x in xs:
            dist.all_reduce(x)
    cm.wait()
    return xs, len(cm.works)


@case
def coalescing_all_gather(rank, world):
    outs = [torch.zeros(2 * world), torch.zeros(3 * world)]
    with dist._coalescing_manager(async_ops=True) as cm:
        for o, n in zip(outs, (2, 3), strict=True):
            dist.all_gather_into_tensor(o, torch.ones(n))
    cm.wait()
    return outs, len(cm.works)


@case
def coalescing_reduce_scatter(rank, world):
    outs = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager(async_ops=True) as cm:
        for o, n in zip(outs, (2, 3), strict=True):
            dist.reduce_scatter_tensor(o, torch.ones(n * world))
    cm.wait()
    return outs, len(cm.works)


@case
def coalescing_with_device(rank, world):
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as cm:
        dist.all_reduce(torch.ones(2))
    cm.wait()
    return len(cm.works)


@case
def batch_isend_irecv(rank, world):
    peer, other = (rank + 1) % world, (rank - 1) % world
    x = torch.zeros(2)
    ops = [dist.P2POp(dist.irecv, x, other), dist.P2POp(dist.isend, torch.ones(2), peer)]
    works = dist.batch_isend_irecv(ops)
    for w in works:
        w.wait()
    return len(works), x.shape


@case
def recv_any_source(rank, world):
    x = torch.zeros(2)
    if rank == 0:
        src = dist.recv(x)
        return src in range(1, world), x.shape
    if rank == 1:
        dist.send(torch.ones(2), 0)
    return True, x.shape


@case
def new_group(rank, world):
    g = dist.new_group(list(range(world)))
    x = torch.ones(2)
    dist.all_reduce(x, group=g)
    return x, dist.get_world_size(g), dist.get_process_group_ranks(g)


@case
def sequence_numbers(rank, world):
    g = dist.new_group(list(range(world)))
    before = g._get_sequence_number_for_group()
    x = torch.ones(2)
    dist.all_reduce(x, group=g)
    dist.all_gather([torch.zeros(2) for _ in range(world)], x, group=g)
    dist.barrier(group=g)
    after = g._get_sequence_number_for_group()
    if rank == 0:
        dist.send(x, 1, group=g)
    elif rank == 1:
        dist.recv(x, 0, group=g)
    return before, after, g._get_sequence_number_for_group() if rank < 2 else None


@case
def split_group_without_device(rank, world):
    dist.split_group(split_ranks=[[0]])


@case
def object_collectives(rank, world):
    got = [None] * world
    dist.all_gather_object(got, {"a": 1})
    gathered = [None] * world if rank == 0 else None
    dist.gather_object({"b": 2}, gathered, dst=0)
    return got, gathered


@case
def functional_collectives(rank, world):
    import torch.distributed._functional_collectives as fc

    x = torch.ones(2 * world)
    return [
        fc.all_reduce(x, "sum", dist.group.WORLD) + 0,
        fc.all_gather_tensor(x, 0, dist.group.WORLD) + 0,
        fc.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0,
        fc.all_to_all_single(x, None, None, dist.group.WORLD) + 0,
        fc.all_gather_into_tensor_coalesced([x, x], dist.group.WORLD)[1] + 0,
        fc.all_reduce_coalesced([x, x], "sum", dist.group.WORLD)[1] + 0,
        fc.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], dist.group.WORLD)[1] + 0,
    ]


@case
def functional_autograd(rank, world):
    import torch.distributed._functional_collectives as fc

    x = torch.ones(2 * world, requires_grad=True)
    fc.all_gather_tensor_autograd(x, 0, dist.group.WORLD).sum().backward()
    y = torch.ones(2 * world, requires_grad=True)
    fc.all_to_all_single_autograd(y, None, None, dist.group.WORLD).sum().backward()
    return x.grad, y.grad


@case
def nn_functional_autograd(rank, world):
    import torch.distributed.nn.functional as nnf

    x = torch.ones(2, requires_grad=True)
    nnf.all_reduce(x).sum().backward()
    return x.grad


def describe(value):
    """A comparable form of what a case returned."""
    if isinstance(value, torch.Tensor):
        shown = value.detach()
        if shown.dtype.is_complex:
            shown = torch.view_as_real(shown)
        return (str(value.dtype), tuple(value.shape), shown.double().flatten().tolist())
    if isinstance(value, (list, tuple)):
        return [describe(v) for v in value]
    if isinstance(value, dict):
        return {k: describe(v) for k, v in value.items()}
    return repr(value)


def observe(name, rank, world):
    """What a program sees of case `name`: ("value", …) or ("error", type, first line)."""
    try:
        return ("value", describe(CASES[name](rank, world)))
    except Exception as error:  # the comparison is about exactly these
        return ("error", type(error).__name__, str(error).split("\n")[0])
