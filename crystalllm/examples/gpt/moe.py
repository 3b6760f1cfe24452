"""A layer of experts: router, dispatch over the expert-parallel ranks, combination.

Capacity and the load balancing loss are counted per *sequence*, over all ranks
that hold a part of it, so that neither depends on the layout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor

from .config import Config

if TYPE_CHECKING:
    from .model import Groups


class MoE(nn.Module):
    """Each token goes to its `top_k` experts; their outputs are weighted by the router's softmax.

    Tensor-parallel ranks hold different tokens (sequence parallelism), so each
    routes its own; experts are whole on every rank that holds them.
    """

    def __init__(self, config: Config, groups: Groups) -> None:
        super().__init__()
        self.config = config
        self.groups = groups
        self.router = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, t, hidden] to the same."""
        b, t, hidden = x.shape
        k, num_experts = self.config.top_k, self.config.num_experts
        # Tokens in a row: DTensor folds no sharded dimension into another.
        scores = self.router(x.reshape(b * t, hidden)).view(b, t, num_experts)
        probabilities = scores.float().softmax(dim=-1)
        weights, chosen = probabilities.topk(k, dim=-1)
        choice = F.one_hot(chosen.flatten(1), num_experts)  # [b, t × k, num_experts]

        kept = torch.arange(b * t * k, device=x.device)
        if self.config.capacity_factor is not None or self.config.aux_loss:
            before, total = self._counts(choice.sum(1))
            if self.config.capacity_factor is not None:
                kept = kept[self._within_capacity(choice, before)]
            if self.config.aux_loss:
                x = _WithLoss.apply(x, self._balance_loss(probabilities, total))

        experts = chosen.flatten()[kept]
        order = experts.argsort(stable=True)
        kept, counts = kept[order], torch.bincount(experts, minlength=num_experts)
        y = self._dispatch(x.reshape(-1, hidden)[kept // k], counts)
        y = y * weights.flatten()[kept, None].to(y.dtype)
        # Every choice has a row of its own, so the sum has one order, on CUDA too.
        rows = y.new_zeros(b * t * k, hidden).index_copy(0, kept, y)
        return rows.view(b, t, k, hidden).sum(2)

    def _counts(self, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choices per sequence and expert [b, num_experts]: of earlier parts, and of all parts."""
        parts, place = mine[None], 0
        for group in (self.groups.tp, self.groups.cp):  # tp is the inner one
            if group is not None:
                place += group.rank() * len(parts)
                gathered = [torch.empty_like(parts) for _ in range(group.size())]
                dist.all_gather(gathered, parts.contiguous(), group=group)
                parts = torch.cat(gathered)
        return parts[:place].sum(0), parts.sum(0)

    def _within_capacity(self, choice: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """bool [b × t × k]: an expert takes a sequence's tokens in their order until it is full."""
        share = self.config.sequence * self.config.top_k / self.config.num_experts
        capacity = math.ceil(self.config.capacity_factor * share)
        place = choice.cumsum(1) - choice + before[:, None]
        return ((place * choice).sum(-1) < capacity).flatten()

    def _balance_loss(self, probabilities: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Fedus et al. 2021 (arXiv:2101.03961) eq. 4, per sequence, of this rank's tokens.

        Linear in the probabilities, so the parts of a sequence add up to the
        whole. Scaled like the loss of one microbatch.
        """
        config = self.config
        load = total / (config.sequence * config.top_k)
        importance = probabilities.sum(1) / config.local_sequence
        loss = config.num_experts * (load * importance).sum(-1).mean()
        return config.aux_loss * loss / config.num_microbatches

    def _dispatch(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Tokens [n, hidden], sorted by expert, to those experts' outputs in the same order."""
        ep = self.groups.ep
        if ep is None:
            return self.experts(tokens, counts.tolist())
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=ep)
        arriving = arriving.view(ep.size(), -1)  # [source, local expert]
        sent, received = counts.view(ep.size(), -1).sum(1).tolist(), arriving.sum(1).tolist()

        tokens = all_to_all_single_autograd(tokens, received, sent, ep)
        labels = torch.arange(arriving.numel(), device=tokens.device) % arriving.shape[1]
        by_expert = labels.repeat_interleave(arriving.flatten()).argsort(stable=True)
        y = self.experts(tokens[by_expert], arriving.sum(0).tolist())
        return all_to_all_single_autograd(y[by_expert.argsort()], sent, received, ep)


class Experts(nn.Module):
    """The MLPs of this expert-parallel rank."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.num_experts, 4 * config.hidden, config.hidden))
        self.down = nn.Parameter(torch.empty(config.num_experts, config.hidden, 4 * config.hidden))

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[n, hidden], the first counts[0] of them for the first local expert, and so on."""
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = zip(tokens.split(counts), up, down, strict=True)
        # An expert without tokens takes part too: its gradient is zero, not missing.
        return torch.cat([F.linear(F.gelu(F.linear(x, u)), d) for x, u, d in parts])


class _WithLoss(torch.autograd.Function):
    """Returns x and adds a scalar loss to whatever is differentiated later.

    The loss needs no way to the last pipeline stage.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)
