"""The transformer, or the part of it that one pipeline stage holds.

Shapes: b sequences of a microbatch; s tokens of a sequence that attention sees
here (sequence / cp); t tokens that reach norms and residuals here (s / tp).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from .config import Config
from .moe import MoE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# torch 2.13 renames them and warns about the old names.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Whom the model itself talks to; None where an axis has one rank."""

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of [b, heads, s, d]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies  # [s, half]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def run(
    body: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, recompute: bool
) -> torch.Tensor:
    """body(x), of which only x is kept for the backward pass if the rest is recomputed there."""
    if not recompute:
        return body(x)
    # Nothing here draws random numbers, so there is no such state to keep.
    return checkpoint(body, x, use_reentrant=False, preserve_rng_state=False)


class Attention(nn.Module):
    """Causal self attention over the heads of this tensor-parallel rank.

    Under context parallelism queries stay, and keys and values of the whole
    sequence are gathered; the backward pass scatters their gradients. What lies
    between the projections, gathered tensors included, is what selective
    recomputation does not keep (Korthikanti et al. 2022, arXiv:2205.05198).
    """

    def __init__(self, config: Config, groups: Groups) -> None:
        super().__init__()
        self.heads = config.heads // config.tp
        self.cp = groups.cp
        self.recompute = config.recompute == "selective"
        # By head, then q, k, v: a tensor-parallel slice is a set of whole heads.
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, t, hidden] to the same; the projections gather and scatter t to s and back."""
        return self.out(run(self._core, self.qkv(x), recompute=self.recompute))

    def _core(self, qkv: torch.Tensor) -> torch.Tensor:
        """[b, s, 3 × hidden / tp] to [b, s, hidden / tp]."""
        b, s, _ = qkv.shape
        q, k, v = qkv.view(b, s, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        first = 0 if self.cp is None else self.cp.rank() * s
        positions = torch.arange(first, first + s, device=qkv.device)
        q, k = rotate(q, positions), rotate(k, positions)
        if self.cp is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = _Gather.apply(torch.stack((k, v)), self.cp)
            causal = positions[:, None] >= torch.arange(k.shape[2], device=qkv.device)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        return attended.transpose(1, 2).reshape(b, s, -1)


class _Gather(torch.autograd.Function):
    """[2, b, heads, s, d] to [2, b, heads, sequence, d], in order of rank."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = part.new_empty(group.size() * len(part), *part.shape[1:])
        ALL_GATHER(parts, part, group=group)
        return torch.cat(parts.chunk(group.size()), dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = torch.cat(grad.chunk(ctx.group.size(), dim=-2))
        part = torch.empty_like(parts[: len(grad)])
        REDUCE_SCATTER(part, parts, group=ctx.group)
        return part, None


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: Config, groups: Groups) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, groups)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MoE(config, groups) if config.num_experts else MLP(config)
        self.recompute = config.recompute == "full"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, t, hidden] to the same."""
        return run(self._body, x, recompute=self.recompute)

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Layers `layers` of the model, with the embedding if the first and the head if the last."""

    def __init__(self, config: Config, groups: Groups, *, layers: range) -> None:
        super().__init__()
        first, last = layers.start == 0, layers.stop == config.layers
        self.embed = nn.Embedding(config.vocabulary, config.hidden) if first else None
        # Named by their place in the whole model, whichever stage holds them.
        self.blocks = nn.ModuleDict({str(i): Block(config, groups) for i in layers})
        self.norm = nn.LayerNorm(config.hidden) if last else None
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False) if last else None
        self.dtype = DTYPES[config.precision]
        # FSDP2 casts by itself.
        self.autocast = config.precision == "bf16" and not config.use_fsdp
        self.device_type = config.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens int64 [b, s] or activations [b, t, hidden] to activations or logits.

        Logits are [b, s, vocabulary / tp]: each tensor-parallel rank has its part.
        """
        with self._precision():
            if self.embed is not None:
                x = self.embed(x).to(self.dtype)
            for block in self.blocks.values():
                x = block(x)
            return x if self.head is None else self.head(self.norm(x))

    def _precision(self) -> AbstractContextManager:
        return torch.autocast(self.device_type, self.dtype) if self.autocast else nullcontext()
