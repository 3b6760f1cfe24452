"""Runs the parity cases on real gloo ranks: `real_gloo.py WORLD FOLDER` writes FOLDER/RANK.json."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

import parity_cases
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=20),
    )
    store = dist.distributed_c10d._get_default_store()
    seen = {}
    for name in parity_cases.CASES:
        seen[name] = parity_cases.observe(name, rank, world)
        # The next case only when all have ended this one, whichever way.
        store.set(f"done/{name}/{rank}", "1")
        store.wait([f"done/{name}/{r}" for r in range(world)], datetime.timedelta(seconds=60))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # groups that a failing case left half made would wait for each other


if __name__ == "__main__":
    mp.spawn(main, (int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]))
