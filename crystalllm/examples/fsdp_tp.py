"""A small transformer under FSDP2 and tensor parallelism, from PyTorch's own parts.

torchrun --nproc-per-node 4 -m crystalllm.examples.fsdp_tp --tp 2
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, tp: int) -> None:
        super().__init__()
        self.heads = heads // tp
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x))  # x may be a part of the sequence, this is all of it
        batch, length, _ = qkv.shape
        q, k, v = qkv.view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, heads: int, layers: int, tp: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, tp) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor parallel linears, sequence parallel norms, in place."""
    sequence = Shard(1)
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(),
                "qkv": ColwiseParallel(input_layouts=sequence),
                "out": RowwiseParallel(output_layouts=sequence),
                "norm2": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=sequence),
                "down": RowwiseParallel(output_layouts=sequence),
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % args.tp or args.heads % args.tp:
        raise SystemExit(f"tp={args.tp} must divide world={world} and heads={args.heads}")
    mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(args.seed)  # the same weights everywhere
    model = Transformer(args.vocabulary, args.hidden, args.heads, args.layers, args.tp)
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(args.seed + mesh.get_local_rank("dp"))  # other data per replica
    for step in range(args.steps):
        start = time.perf_counter()
        tokens = torch.randint(args.vocabulary, (args.batch, args.sequence + 1))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        print(
            f"rank {rank}/{world} step {step} loss {mean.item():.4f} grad_norm {norm.item():.4f} "
            f"time_ms {(time.perf_counter() - start) * 1e3:.1f}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
