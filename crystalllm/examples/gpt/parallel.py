"""One model over many ranks: the meshes, the weights, TP, expert parallelism, FSDP2 or DDP."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from .config import Config
from .data import seed_of
from .model import DTYPES, GPT, Block, Groups
from .moe import Experts

SEQUENCE = Shard(1)


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where this rank stands and whom it talks to."""

    dense: DeviceMesh  # (pp, data, tp), where data is dp × cp
    experts: DeviceMesh | None  # (expert_pp, expert_data, ep): the same ranks, seen by experts
    groups: Groups
    device: torch.device
    dp_rank: int
    cp_rank: int

    @property
    def pp_rank(self) -> int:
        return self.dense.get_local_rank("pp")


def build_axes(config: Config, *, device: torch.device) -> Axes:
    """The process groups of a layout. Collective: every rank makes them in this order.

    Experts are not cut by tensor parallelism. Tensor-parallel ranks route
    different tokens, so to experts they are data ranks: expert_data is what
    dp × cp × tp leaves beside ep.
    """
    dense = init_device_mesh(
        config.device,
        (config.pp, config.data_ranks, config.tp),
        mesh_dim_names=("pp", "data", "tp"),
    )
    ranks = torch.arange(config.world_size)
    cp = experts = None
    if config.cp > 1:
        by_cp = ranks.view(config.pp, config.dp, config.cp, config.tp).transpose(2, 3)
        cp, _ = dist.new_subgroups_by_enumeration(by_cp.reshape(-1, config.cp).tolist())
    if config.num_experts:
        by_ep = ranks.view(config.pp, -1, config.ep, config.tp).transpose(2, 3)
        experts = DeviceMesh(
            config.device,
            by_ep.reshape(config.pp, -1, config.ep),
            mesh_dim_names=("expert_pp", "expert_data", "ep"),
        )
    data_rank = dense.get_local_rank("data")
    return Axes(
        dense=dense,
        experts=experts,
        groups=Groups(
            tp=dense.get_group("tp") if config.tp > 1 else None,
            cp=cp,
            ep=experts.get_group("ep") if config.ep > 1 else None,
        ),
        device=device,
        dp_rank=data_rank // config.cp,
        cp_rank=data_rank % config.cp,
    )


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter as this rank holds it."""

    name: str  # in the whole model
    value: torch.Tensor  # the shard: a DTensor wherever it is one of several
    leaf: nn.Parameter  # whose .grad the backward pass fills
    expert: bool

    @property
    def num_shards(self) -> int:
        """Parts that the ranks of a pipeline stage hold between them."""
        if not isinstance(self.value, DTensor):
            return 1
        placements = zip(self.value.device_mesh.shape, self.value.placements, strict=True)
        return math.prod(size for size, p in placements if not p.is_replicate())


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the model, ready to train, and its parameters."""

    index: int
    module: nn.Module
    weights: list[Weight]


def build_stage(config: Config, axes: Axes, *, index: int) -> Stage:
    """Stage `index` of pp × vp; under FSDP2 at most one layer of it is whole at any time.

    Modules start without storage; a layer gets its tensor-parallel slice of
    values and is at once cut further by FSDP2.
    """
    size = config.layers // config.num_stages
    with torch.device("meta"):
        model = GPT(config, axes.groups, layers=range(index * size, (index + 1) * size))
    _apply_tensor_and_expert_parallel(config, axes, model)
    for name, block in model.blocks.items():
        _materialise(config, axes, block, prefix=f"blocks.{name}.")
        if config.use_fsdp:
            _shard_block(config, axes, block)
    _materialise(config, axes, model)
    experts = _expert_names(model)
    if config.use_fsdp:
        fully_shard(model, **_fsdp_options(config, axes))
    values = dict(model.named_parameters())
    module: nn.Module = model
    if config.use_ddp:
        # Weights are equal by construction, so nothing is broadcast. Experts are
        # not replicated over `data`; the optimizer reduces their gradients.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        module = DistributedDataParallel(
            model,
            device_mesh=axes.dense["data"],
            init_sync=False,
            gradient_as_bucket_view=True,
        )
    # DDP replaces DTensors by their local parts, over the same storage.
    leaves = dict(model.named_parameters())
    return Stage(
        index=index,
        module=module,
        weights=[
            Weight(name=n, value=v, leaf=leaves[n], expert=n in experts) for n, v in values.items()
        ],
    )


def _apply_tensor_and_expert_parallel(config: Config, axes: Axes, model: GPT) -> None:
    if config.tp > 1:
        tp = axes.dense["tp"]
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=SEQUENCE),
        }
        parallelize_module(
            model, tp, {n: style for n, style in ends.items() if getattr(model, n) is not None}
        )
        for block in model.blocks.values():
            parallelize_module(block, tp, _block_plan(moe=bool(config.num_experts)))
    if config.ep > 1:
        for block in model.blocks.values():
            for name, parameter in list(block.mlp.experts.named_parameters()):
                local = distribute_tensor(parameter, axes.experts["ep"], [Shard(0)])
                setattr(block.mlp.experts, name, nn.Parameter(local))


def _block_plan(*, moe: bool) -> dict[str, object]:
    plan: dict[str, object] = {
        "norm1": SequenceParallel(),
        "attention.qkv": ColwiseParallel(input_layouts=SEQUENCE),
        "attention.out": RowwiseParallel(output_layouts=SEQUENCE),
    }
    if moe:
        return plan | {
            "norm2": SequenceParallel(use_local_output=True),
            "mlp.router": SequenceParallel(sequence_dim=0, use_local_output=True),
        }
    return plan | {
        "norm2": SequenceParallel(),
        "mlp.up": ColwiseParallel(input_layouts=SEQUENCE),
        "mlp.down": RowwiseParallel(output_layouts=SEQUENCE),
    }


def _materialise(config: Config, axes: Axes, module: nn.Module, *, prefix: str = "") -> None:
    """Gives every parameter that is still on meta its values.

    A value depends on the seed and the parameter's name in the whole model
    alone, so the whole tensor is drawn, on the host, and this rank's part kept.
    """
    for path, parameter in list(module.named_parameters()):
        if not parameter.is_meta:
            continue
        full = _draw(config, name=prefix + path, shape=parameter.shape).to(axes.device)
        if isinstance(parameter, DTensor):
            # Every rank has the whole tensor: no source rank, nothing is sent.
            full = distribute_tensor(
                full, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(full))


def _draw(config: Config, *, name: str, shape: torch.Size) -> torch.Tensor:
    """fp32: ones and zeros for norms, else normal, narrower where a residual is added."""
    if "norm" in name:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    into_residual = name.endswith(("out.weight", "down.weight", "experts.down"))
    std = 0.02 / math.sqrt(2 * config.layers) if into_residual else 0.02
    generator = torch.Generator().manual_seed(seed_of(config.seed, name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _fsdp_options(config: Config, axes: Axes) -> dict[str, object]:
    # With microbatches in flight, gathering weights again for each of them costs
    # more than keeping them does.
    options: dict[str, object] = {
        "mesh": axes.dense["data"],
        "reshard_after_forward": config.pp == 1,
    }
    if config.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=DTYPES["bf16"], reduce_dtype=torch.float32
        )
    return options


def _shard_block(config: Config, axes: Axes, block: Block) -> None:
    if config.num_experts:
        mesh = axes.experts["expert_data"]
        # Few experts over many ranks: cut each along its next dimension instead.
        across = mesh.size() > config.num_experts // config.ep and config.hidden % mesh.size() == 0
        fully_shard(
            block.mlp.experts,
            **_fsdp_options(config, axes) | {"mesh": mesh},
            shard_placement_fn=(lambda _: Shard(1)) if across else None,
        )
    fully_shard(block, **_fsdp_options(config, axes))


def _expert_names(model: GPT) -> set[str]:
    owners = {n for n, m in model.named_modules() if isinstance(m, Experts)}
    return {n for n, _ in model.named_parameters() if n.rpartition(".")[0] in owners}
