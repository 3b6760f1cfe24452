"""What all tests share: one warm process, from which every logical rank is forked.

pytest's own process is that parent, so it imports torch once (3 s) and never
computes with it.
"""

from __future__ import annotations

import os

# A machine with a GPU runs these tests as one without, so that both stacks test
# the same; tests marked gpu start processes of their own.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def virtual() -> Callable[..., Any]:
    """Runs a function as one rank of a logical world: `virtual(fn, rank=0, world=8)`.

    The function runs in a fork, inside an initialised default group unless
    `backend` is None; what it returns comes back, and what it raises is raised
    as a RankError.
    """
    from crystalllm import warm
    from crystalllm.identity import Identity

    warm.prepare()

    def run(
        function: Callable[[], Any],
        *,
        rank: int = 0,
        world: int = 8,
        backend: str | None = "gloo",
        ranks_per_node: int = 8,
        seed: int = 0,
        limit_s: float = 120,
        **enter: Any,
    ) -> Any:
        def program() -> Any:
            import torch.distributed as dist

            if backend is not None:
                dist.init_process_group(backend)
            return function()

        identity = Identity(rank=rank, world_size=world, ranks_per_node=ranks_per_node, seed=seed)
        return warm.call(program, identity, limit_s=limit_s, **enter)

    return run


@pytest.fixture
def together(virtual: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Runs a function as several ranks of one logical world, side by side and for real:
    `together(fn, (1, 5), world=8)` gives what each returned, or its outcomes with `check=False`.
    """
    from crystalllm import warm
    from crystalllm.identity import Identity
    from crystalllm.mates import Mates

    runs = itertools.count()

    def run(
        function: Callable[[], Any],
        ranks: Sequence[int],
        *,
        world: int = 8,
        backend: str | None = "gloo",
        check: bool = True,
        limit_s: float = 120,
        mates_limit_s: float | None = 60,
        **enter: Any,
    ) -> list[Any]:
        def program() -> Any:
            import torch.distributed as dist

            if backend is not None:
                dist.init_process_group(backend)
            return function()

        outcomes = warm.call_together(
            program,
            [Identity(rank=rank, world_size=world) for rank in ranks],
            limit_s=limit_s,
            mates=Mates(
                ranks=tuple(ranks),
                store=f"file://{tmp_path}/mates-{next(runs)}",
                limit_s=mates_limit_s,
            ),
            **enter,
        )
        if not check:
            return outcomes
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    return run


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT
