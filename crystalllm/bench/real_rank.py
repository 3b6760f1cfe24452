"""A rank of a real run: the unmodified program over real gloo, its iterations by turns.

`python -m crystalllm.bench.real_rank FOLDER`, started by torch elastic as on a cluster.
Nothing of ours is in the process but a hook after each optimizer step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from crystalllm.bench.gate import Gate
from crystalllm.run import Program, exit_code

SPEC = "real.json"


def settle(core: int, log: Path) -> None:
    """The process as its program finds it: on its core, with one thread, its words in a log."""
    os.sched_setaffinity(0, {core})
    words = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(words, 1)
    os.dup2(words, 2)
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it for several processes


def main(folder: Path) -> int:
    spec = json.loads((folder / SPEC).read_text())
    number = int(os.environ["LOCAL_RANK"])
    settle(spec["cores"][number], folder / f"rank-{number}.log")

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(Gate(spec["gate"], f"{spec['name']}-{number}"))
    return exit_code(Program(command=tuple(spec["command"])))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
