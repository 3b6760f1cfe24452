"""The sandbox rank of `bench fidelity`: a worker like every other, its iterations by turns."""

from __future__ import annotations

import os
import sys

from crystalllm.bench.gate import Gate
from crystalllm.sandbox.worker import Worker, assigned

GATE = "CRYSTALLLM_BENCH_GATE"
NAME = "emulated"


class _Gated(Worker):
    def follow(self) -> None:
        super().follow()
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(Gate(os.environ[GATE], NAME))


if __name__ == "__main__":
    sys.exit(_Gated(assigned()).run())
