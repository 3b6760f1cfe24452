"""AdamW over this rank's shards, behind one gradient norm of the whole model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .config import Config
from .parallel import Axes, Weight


class Optimizer:
    """Finishes gradients, clips them, and steps.

    AdamW sees plain local shards: parameters that live on different meshes cannot
    share one multi-tensor call as DTensors. With offload it sees copies on the
    host, where its state then lives: gradients go out, weights come back.
    """

    def __init__(self, config: Config, axes: Axes, weights: list[Weight]) -> None:
        self.config = config
        self.axes = axes
        self.weights = weights
        with torch.no_grad():
            self.shards = [_local(w.value) for w in weights]
            self.masters = [self._to_host(s) for s in self.shards]
        ranks = config.data_ranks * config.tp
        self.copies = torch.tensor([ranks // w.num_shards for w in weights], device=axes.device)
        matrices = [m for m, w in zip(self.masters, weights, strict=True) if w.value.ndim > 1]
        vectors = [m for m, w in zip(self.masters, weights, strict=True) if w.value.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.learning_rate, betas=(0.9, 0.95)
        )

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """One update. Returns the gradient norm before clipping, a scalar, equal on all ranks."""
        gradients = [self._gradient(w) for w in self.weights]
        norm = self._norm(gradients)
        torch._foreach_mul_(gradients, (self.config.clip / (norm + 1e-6)).clamp(max=1.0))
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.to(master.device)
        self.adamw.step()
        for shard, master, weight in zip(self.shards, self.masters, self.weights, strict=True):
            if shard is not master:
                shard.copy_(master)
            master.grad = weight.leaf.grad = None
        return norm

    def _to_host(self, shard: torch.Tensor) -> torch.Tensor:
        if not self.config.offload_optimizer:
            return shard
        host = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)
        return host.copy_(shard)

    def _gradient(self, weight: Weight) -> torch.Tensor:
        """This shard's gradient of the mean loss over all data ranks."""
        gradient = weight.leaf.grad
        if gradient is None:
            raise RuntimeError(f"{weight.name} got no gradient in this step")
        if isinstance(gradient, DTensor) and gradient.placements != weight.value.placements:
            # Of a weight that tensor-parallel ranks share: they saw different tokens.
            gradient = gradient.redistribute(placements=weight.value.placements)
        gradient = _local(gradient)
        if weight.expert:
            self._finish_expert(gradient)
        return gradient

    def _finish_expert(self, gradient: torch.Tensor) -> None:
        """Sums over the ranks that hold this expert, in place, as a mean over data ranks.

        The tokens of other expert-parallel ranks are in the gradient already.
        FSDP2 has averaged over expert_data, whose size is not that of data.
        """
        holders = self.axes.experts["expert_data"]
        if self.config.use_fsdp:
            gradient *= holders.size() / self.config.data_ranks
            return
        if holders.size() > 1:
            dist.all_reduce(gradient, group=holders.get_group())
        gradient /= self.config.data_ranks

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The 2-norm over the whole model.

        All ranks' squares are added, each divided by the number of ranks of its
        stage that add the same: one reduction for any mixture of meshes.
        """
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        total = (squares / self.copies).sum()
        dist.all_reduce(total)
        return total.sqrt()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
