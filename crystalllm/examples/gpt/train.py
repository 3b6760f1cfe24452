"""The loop."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import checkpoint
from .config import Config, parse
from .data import Data
from .log import Log, Record
from .optimizer import Optimizer
from .parallel import Axes, build_axes, build_stage
from .pipeline import build_schedule


def train(config: Config) -> list[Record]:
    """Trains in the process group that there is; returns this process's log."""
    device = _device(config)
    axes = build_axes(config, device=device)
    indices = range(axes.pp_rank, config.num_stages, config.pp)
    stages = [build_stage(config, axes, index=i) for i in indices]
    optimizer = Optimizer(config, axes, [w for stage in stages for w in stage.weights])
    run_batch = build_schedule(config, axes, stages)
    data = Data(config, dp_rank=axes.dp_rank, cp_rank=axes.cp_rank)
    done = checkpoint.load(config.load, optimizer) if config.load else 0

    log = Log(config, rank=dist.get_rank())
    for step in range(done, config.steps):
        start = time.perf_counter()
        inputs, targets = data.batch(step)
        loss = run_batch(inputs.to(device), targets.to(device))
        grad_norm = optimizer.step()
        loss = _mean_loss(config, axes, loss)
        values = {"loss": loss.item(), "grad_norm": grad_norm.item()}  # waits for the device
        log.write(iteration=step + 1, time_s=time.perf_counter() - start, **values)
    if config.save:
        checkpoint.save(config.save, optimizer, step=max(done, config.steps))
    log.close()
    return log.records


def _device(config: Config) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _mean_loss(config: Config, axes: Axes, loss: torch.Tensor) -> torch.Tensor:
    """Over data ranks on the last stage, which then tells the others."""
    if config.data_ranks > 1 and axes.pp_rank == config.pp - 1:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=axes.dense.get_group("data"))
    if config.pp > 1:
        dist.broadcast(loss, group=axes.dense.get_group("pp"), group_src=config.pp - 1)
    return loss


def _start(config: Config) -> None:
    backend = config.backend or ("nccl" if config.device == "cuda" else "gloo")
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device='cuda' needs a GPU that torch can use; device=cpu does not")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # without a launcher, a world of one
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """What the command line asks for, in the world that the launcher made."""
    try:
        config = parse(arguments, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        sys.exit(f"crystalllm.examples.gpt: {error}")
    # Logits under TP are a view, and nothing is done to them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    _start(config)
    try:
        train(config)
    finally:
        dist.destroy_process_group()
