"""The training log: a line of text per iteration, and the same as JSON lines."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch

from .config import Config


@dataclass(frozen=True, kw_only=True)
class Record:
    """One iteration, as this rank saw it."""

    iteration: int  # from 1
    loss: float  # mean over the global batch
    grad_norm: float  # of the whole model, before clipping
    time_s: float  # wall time, data included
    tokens_per_s: float  # of all ranks
    tflops: float  # TFLOP/s per rank
    peak_memory_bytes: int  # allocated on CUDA since the start, else resident in the process


def flops_per_step(config: Config) -> float:
    """Floating point operations of one step of the whole model, recomputation left out.

    The count of Narayanan et al. 2021 (arXiv:2104.04473, appendix): 2 per multiply
    and add, backward twice the forward pass, causality not exploited. Per layer
    and sequence the forward pass has 8sh² for projections, 4s²h for attention and
    16sh² for an MLP; the head adds 2shV. A token meets `top_k` MLPs of a layer of
    experts, and its router adds 2shE.
    """
    s, h = config.sequence, config.hidden
    mlp = 16 * s * h * h
    if config.num_experts:
        mlp = config.top_k * mlp + 2 * s * h * config.num_experts
    layer = 8 * s * h * h + 4 * s * s * h + mlp
    forward = config.layers * layer + 2 * s * h * config.vocabulary
    return 3.0 * config.global_batch * forward


class Log:
    """Writes records on the ranks that the run names; keeps them on all."""

    def __init__(self, config: Config, *, rank: int) -> None:
        self.config = config
        self.rank = rank
        self.speaks = config.logs(rank)
        self.records: list[Record] = []
        self.file: TextIO | None = None
        if self.speaks and config.json_log:
            path = Path(config.json_log.replace("{rank}", str(rank)))
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("w", encoding="utf-8")

    def write(self, *, iteration: int, loss: float, grad_norm: float, time_s: float) -> None:
        config = self.config
        record = Record(
            iteration=iteration,
            loss=loss,
            grad_norm=grad_norm,
            time_s=time_s,
            tokens_per_s=config.global_batch * config.sequence / time_s,
            tflops=flops_per_step(config) / time_s / config.world_size / 1e12,
            peak_memory_bytes=_peak_memory_bytes(config.device),
        )
        self.records.append(record)
        if self.speaks:
            print(
                f"rank {self.rank}/{config.world_size} "
                f"iteration {iteration}/{config.steps} | loss {loss:.4f} | "
                f"grad norm {grad_norm:.4f} | time {time_s * 1e3:.1f} ms | "
                f"{record.tokens_per_s:,.0f} tokens/s | {record.tflops:.3g} TFLOP/s | "
                f"peak memory {record.peak_memory_bytes / 2**20:,.0f} MiB",
                flush=True,
            )
        if self.file is not None:
            self.file.write(json.dumps(asdict(record)) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _peak_memory_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
