"""Checkpoints by torch.distributed.checkpoint: each rank writes its shards, any layout reads."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from .optimizer import Optimizer


def save(folder: str, optimizer: Optimizer, *, step: int) -> None:
    """Writes weights, optimizer state and the number of finished steps. Collective."""
    dcp.save(_state(optimizer) | {"step": torch.tensor(step)}, checkpoint_id=folder)


@torch.no_grad()
def load(folder: str, optimizer: Optimizer) -> int:
    """Reads what `save` wrote, whatever its layout; returns the number of finished steps."""
    state = _state(optimizer) | {"step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder)
    for weight, shard, master in zip(
        optimizer.weights, optimizer.shards, optimizer.masters, strict=True
    ):
        master.copy_(shard)
        for key in ("exp_avg", "exp_avg_sq"):
            # A no-op, except that the host's copy is another tensor than the mesh's.
            optimizer.adamw.state[master][key].copy_(_local(state[f"{weight.name}.{key}"]))
        optimizer.adamw.state[master]["step"].copy_(state["step"])
    return int(state["step"])


def _state(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """By name in the whole model: weights, and AdamW's moments as shards like their weight."""
    state: dict[str, torch.Tensor] = {}
    for weight, master in zip(optimizer.weights, optimizer.masters, strict=True):
        state[weight.name] = weight.value.detach()
        moments = optimizer.adamw.state[master]
        if not moments:  # before the first step
            moments["step"] = torch.zeros(())
            moments["exp_avg"] = torch.zeros_like(master)
            moments["exp_avg_sq"] = torch.zeros_like(master)
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{weight.name}.{key}"] = _like(weight.value, moments[key])
    return state


def _like(weight: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
