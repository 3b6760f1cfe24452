"""Trains the bundled GPT in many layouts on real gloo ranks.

`gpt_worlds.py WORLD FOLDER [NAME …]` runs every layout of LAYOUTS and RESUMES
that has WORLD ranks (or those named), one after the other in one world, and
writes FOLDER/WORLD.json: by name, for each rank, the (loss, gradient norm) of
every iteration that it logged.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from crystalllm.examples.gpt.config import Config
from crystalllm.examples.gpt.train import train

STEPS = 3
# Small enough for two cores, large enough to be cut 4 ways on every axis.
SIZE = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "sequence": 32,
    "micro_batch": 1,
    "global_batch": 4,
    "steps": STEPS,
    "seed": 7,
}
DENSE = {}
MOE = {"num_experts": 4, "top_k": 2, "aux_loss": 0.05}
CAPACITY = MOE | {"capacity_factor": 0.75}
MODELS = {"dense": DENSE, "moe": MOE, "capacity": CAPACITY, "bf16": {"precision": "bf16"}}

# name: (ranks, model, what the layout adds)
LAYOUTS = {
    "ddp": (2, "dense", {"data_parallel": "ddp"}),
    "fsdp": (2, "dense", {}),
    "tp": (2, "dense", {"tp": 2}),
    "pp": (2, "dense", {"pp": 2}),
    "pp-vp": (2, "dense", {"pp": 2, "vp": 2}),
    "cp": (2, "dense", {"cp": 2}),
    "cp-ddp": (2, "dense", {"cp": 2, "data_parallel": "ddp"}),
    "micro-batch-2": (2, "dense", {"micro_batch": 2, "tp": 2}),
    "recompute-full": (2, "dense", {"recompute": "full"}),
    "recompute-selective-tp": (2, "dense", {"recompute": "selective", "tp": 2}),
    "offload": (2, "dense", {"offload_optimizer": True}),
    "moe-ddp": (2, "moe", {"data_parallel": "ddp"}),
    "moe-fsdp": (2, "moe", {}),
    "moe-ep": (2, "moe", {"ep": 2}),
    "moe-ep-ddp": (2, "moe", {"ep": 2, "data_parallel": "ddp"}),
    "moe-tp": (2, "moe", {"tp": 2, "micro_batch": 2}),
    "moe-pp": (2, "moe", {"pp": 2}),
    "moe-pp-vp": (2, "moe", {"pp": 2, "vp": 2}),
    "moe-cp": (2, "moe", {"cp": 2}),
    "moe-ep-recompute-full": (2, "moe", {"ep": 2, "recompute": "full"}),
    "moe-ep-recompute-selective": (2, "moe", {"ep": 2, "recompute": "selective"}),
    "capacity-tp": (2, "capacity", {"tp": 2}),
    "capacity-ep": (2, "capacity", {"ep": 2}),
    "tp-fsdp": (4, "dense", {"tp": 2}),
    "tp-ddp": (4, "dense", {"tp": 2, "data_parallel": "ddp"}),
    "pp-fsdp": (4, "dense", {"pp": 2}),
    "pp-ddp": (4, "dense", {"pp": 2, "data_parallel": "ddp"}),
    "pp-vp-fsdp": (4, "dense", {"pp": 2, "vp": 2}),
    "pp-vp-ddp": (4, "dense", {"pp": 2, "vp": 2, "data_parallel": "ddp"}),
    "pp4": (4, "dense", {"pp": 4}),
    "cp-tp": (4, "dense", {"cp": 2, "tp": 2}),
    "cp-pp": (4, "dense", {"cp": 2, "pp": 2}),
    "cp-dp": (4, "dense", {"cp": 2}),
    "moe-tp-ep-fsdp": (4, "moe", {"tp": 2, "ep": 2}),
    "moe-tp-ep-ddp": (4, "moe", {"tp": 2, "ep": 2, "data_parallel": "ddp"}),
    "moe-ep2-dp4": (4, "moe", {"ep": 2}),
    "moe-ep2-dp4-ddp": (4, "moe", {"ep": 2, "data_parallel": "ddp"}),
    "moe-ep4": (4, "moe", {"ep": 4}),
    "moe-pp-ep": (4, "moe", {"pp": 2, "ep": 2}),
    "moe-pp-vp-ep-recompute": (4, "moe", {"pp": 2, "vp": 2, "ep": 2, "recompute": "full"}),
    "moe-cp-ep": (4, "moe", {"cp": 2, "ep": 2}),
    "capacity-cp-tp": (4, "capacity", {"cp": 2, "tp": 2, "micro_batch": 2}),
    "bf16-tp-fsdp": (4, "bf16", {"tp": 2}),
    "bf16-tp-ddp": (4, "bf16", {"tp": 2, "data_parallel": "ddp"}),
    "bf16-pp-vp-fsdp": (4, "bf16", {"pp": 2, "vp": 2}),
    "tp-pp-fsdp": (8, "dense", {"tp": 2, "pp": 2}),
    "tp-pp-ddp": (8, "dense", {"tp": 2, "pp": 2, "data_parallel": "ddp"}),
    "tp-pp-vp-cp": (8, "dense", {"tp": 2, "pp": 2, "vp": 2, "cp": 2}),
    "moe-tp-pp-ep": (8, "moe", {"tp": 2, "pp": 2, "ep": 2}),
    "moe-tp-pp-ep-ddp": (8, "moe", {"tp": 2, "pp": 2, "ep": 2, "data_parallel": "ddp"}),
    "moe-tp-cp-ep4": (8, "moe", {"tp": 2, "cp": 2, "ep": 4}),
    "capacity-tp-pp-vp-ep": (8, "capacity", {"tp": 2, "pp": 2, "vp": 2, "ep": 2}),
}  # fmt: skip
# What every layout is compared with.
LAYOUTS |= {f"one-{name}": (1, name, {}) for name in MODELS}


# name: (ranks, model, layout of the first step, layout that loads its checkpoint). Two steps
# follow, since what AdamW remembered shows in the second.
RESUMES = {
    "fsdp-to-tp-offload": (2, "dense", {}, {"tp": 2, "offload_optimizer": True}),
    "moe-ep-ddp-to-pp": (2, "moe", {"ep": 2, "data_parallel": "ddp"}, {"pp": 2}),
    "tp-fsdp-to-pp-vp": (4, "dense", {"tp": 2}, {"pp": 2, "vp": 2}),
    "tp-ddp-to-pp-fsdp": (4, "dense", {"tp": 2, "data_parallel": "ddp"}, {"pp": 2}),
    "moe-tp-ep-to-ep4": (4, "moe", {"tp": 2, "ep": 2}, {"ep": 4}),
}  # fmt: skip


def curve(world: int, model: str, layout: dict[str, object]) -> list[tuple[float, float]]:
    config = Config(world_size=world, **(SIZE | MODELS[model] | layout))
    return [(record.loss, record.grad_norm) for record in train(config)]


def resumed(
    world: int, model: str, first: dict[str, object], then: dict[str, object], *, folder: str
) -> list[tuple[float, float]]:
    start = curve(world, model, first | {"steps": 1, "save": folder})
    return start + curve(world, model, then | {"load": folder})


def main(rank: int, world: int, folder: str, only: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{world}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    curves = {}
    for name, case in (LAYOUTS | RESUMES).items():
        if case[0] != world or (only and name not in only):
            continue
        if name in RESUMES:
            curves[name] = resumed(*case, folder=f"{folder}/{name}")
        else:
            curves[name] = curve(*case)
        dist.barrier()
    everyone: list[object] = [None] * world
    dist.all_gather_object(everyone, curves)
    if rank == 0:
        result = {name: [theirs[name] for theirs in everyone] for name in curves}
        (Path(folder) / f"{world}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # a hundred groups need not be taken down one by one


if __name__ == "__main__":
    size = int(sys.argv[1])
    # Forked, so that torch is imported once.
    mp.start_processes(main, (size, sys.argv[2], sys.argv[3:]), nprocs=size, start_method="fork")
