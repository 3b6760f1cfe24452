"""Small training programs, one per way of parallelising, for any rank of any world.

Each returns the losses and gradient norms of its iterations and whether all
its parameters are finite at the end. They know nothing of CrystalLLM.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ITERATIONS = 10
HIDDEN = 64
# Every one of 512 shards holds at least one row of every parameter.
SHARDABLE = 512

PROGRAMS: dict[str, Callable[[], dict]] = {}


def program(fn: Callable[[], dict]) -> Callable[[], dict]:
    PROGRAMS[fn.__name__] = fn
    return fn


def _model(hidden: int = HIDDEN) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(hidden, 2 * hidden),
        nn.LayerNorm(2 * hidden),
        nn.GELU(),
        nn.Linear(2 * hidden, hidden),
        nn.LayerNorm(hidden),
        nn.Linear(hidden, hidden),
    )


def _batches(size: int = 4, hidden: int = HIDDEN) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        x = torch.randn(size, hidden, generator=generator)
        yield x, x.flip(-1)


def _train(model, parameters, step, *, clip=None, hidden: int = HIDDEN) -> dict:
    losses, norms = [], []
    parameters = list(parameters)
    clip = clip or (lambda: nn.utils.clip_grad_norm_(parameters, 1.0))
    for x, y in itertools.islice(_batches(hidden=hidden), ITERATIONS):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = clip()
        norms.append(norm.full_tensor().item() if hasattr(norm, "full_tensor") else float(norm))
        step()
        for p in parameters:
            p.grad = None
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return _result(losses, norms, parameters)


def _result(losses, norms, parameters) -> dict:
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    return {
        "losses": losses,
        "norms": norms,
        "finite": all(p.isfinite().all().item() for p in local),
    }


@program
def ddp() -> dict:
    model = nn.parallel.DistributedDataParallel(_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _train(model, model.parameters(), optimizer.step)


@program
def ddp_with_batch_norm_buffers() -> dict:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    result = _train(model, model.parameters(), optimizer.step)
    model.eval()  # uses the running variance, which must not have become negative
    result["finite"] &= model(torch.ones(2, HIDDEN)).isfinite().all().item()
    return result


@program
def ddp_with_communication_hook() -> dict:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(_model())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _train(model, model.parameters(), optimizer.step)


@program
def ddp_with_own_python_hook() -> dict:
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / dist.get_world_size())

    model = nn.parallel.DistributedDataParallel(_model())
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    result = _train(model, model.parameters(), optimizer.step)
    assert len(calls) >= ITERATIONS
    return result


@program
def zero_redundancy_optimizer() -> dict:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return _train(model, model.parameters(), optimizer.step)


@program
def fsdp1() -> dict:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = FSDP(_model(SHARDABLE), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clip = functools.partial(model.clip_grad_norm_, 1.0)
    return _train(model, model.parameters(), optimizer.step, clip=clip, hidden=SHARDABLE)


@program
def fsdp2() -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model(SHARDABLE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _train(model, model.parameters(), optimizer.step, hidden=SHARDABLE)


@program
def fsdp2_hybrid() -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 8, 8), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _train(model, model.parameters(), optimizer.step)


def _train_transformer(*, shard: bool) -> dict:
    """TP4 with sequence parallel norms; the rest data parallel, sharded or not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from crystalllm.examples.fsdp_tp import Transformer, parallelize

    world, tp, vocabulary = dist.get_world_size(), 4, 256
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Transformer(vocabulary, 4 * HIDDEN, 8, 2, tp)
    parallelize(model, mesh["tp"])
    if shard:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for _ in range(ITERATIONS):
        tokens = torch.randint(vocabulary, (2, 17))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _result(losses, norms, model.parameters())


@program
def tensor_parallel() -> dict:
    return _train_transformer(shard=False)


@program
def fsdp2_and_tensor_parallel() -> dict:
    return _train_transformer(shard=True)


def _pipeline(schedule_name: str, num_chunks: int) -> dict:
    """PP8 over neighbours, DDP-less replicas over the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleSingle,
        get_schedule_class,
    )

    num_stages_per_rank, pp = num_chunks, 8
    mesh = init_device_mesh("cpu", (dist.get_world_size() // pp, pp), mesh_dim_names=("dp", "pp"))
    group, rank = mesh.get_group("pp"), mesh.get_local_rank("pp")
    total = pp * num_stages_per_rank
    torch.manual_seed(0)
    stages = []
    for chunk in range(num_stages_per_rank):
        # Zero-bubble V puts a rank's second stage opposite its first.
        v_shape = "ZBV" in schedule_name
        index = total - 1 - rank if v_shape and chunk else chunk * pp + rank
        stages.append(
            PipelineStage(
                nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU()),
                index,
                total,
                torch.device("cpu"),
                input_args=(torch.zeros(2, HIDDEN, requires_grad=index > 0),),
                output_args=(torch.zeros(2, HIDDEN, requires_grad=True),),
                group=group,
            )
        )
    num_microbatches = 2 * pp
    schedule_class = get_schedule_class(schedule_name)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    schedule = schedule_class(stages[0] if single else stages, num_microbatches, loss_fn=F.mse_loss)
    parameters = [p for s in stages for p in s.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    has_first = any(s.is_first for s in stages)
    has_last = any(s.is_last for s in stages)
    losses, norms = [], []
    for x, y in itertools.islice(_batches(2 * num_microbatches), ITERATIONS):
        found: list[torch.Tensor] = []
        schedule.step(
            *((x,) if has_first else ()),
            target=y if has_last else None,
            losses=found if has_last else None,
        )
        loss = torch.stack(found).mean().detach() if has_last else torch.zeros(())
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _result(losses, norms, parameters)


@program
def pipeline_1f1b() -> dict:
    return _pipeline("1F1B", 1)


@program
def pipeline_interleaved() -> dict:
    return _pipeline("Interleaved1F1B", 2)


@program
def pipeline_zero_bubble() -> dict:
    return _pipeline("InterleavedZeroBubble", 2)


@program
def pipeline_zero_bubble_v() -> dict:
    return _pipeline("ZBVZeroBubble", 2)


@program
def object_collectives_then_ddp() -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody = [None] * world
    dist.all_gather_object(everybody, {"rank": rank, "name": "x" * (rank % 7)})
    assert everybody[rank]["rank"] == rank
    assert all(isinstance(e, dict) for e in everybody)
    settings = [{"lr": 1e-3}, "adamw"]  # every rank reads the same configuration
    dist.broadcast_object_list(settings, src=0)
    mine: list = [None]
    dist.scatter_object_list(mine, [{"shard": r} for r in range(world)], src=0)
    assert mine[0] == {"shard": rank}
    model = nn.parallel.DistributedDataParallel(_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings[0]["lr"])
    return _train(model, model.parameters(), optimizer.step)


@program
def loss_scaling_with_accumulation() -> dict:
    """Twenty iterations of float16 gradients, which no invented number may make infinite."""
    model = nn.parallel.DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses, norms = [], []
    for x, y in itertools.islice(_batches(), 20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        squares = sum(p.grad.square().sum() for p in model.parameters())
        dist.all_reduce(squares)  # of all shards, as sharded optimizers do
        norms.append(squares.sqrt().item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.get_scale() >= 1024.0, "a step was skipped"
    return _result(losses, norms, model.parameters())
