"""Keeps the account of a process's tensors, from `start` to `finish`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from crystalllm import native, patching
from crystalllm.errors import UserError
from crystalllm.memory import summary
from crystalllm.memory.blocks import Blocks

_limit_bytes: int | None = None


def start(world: Any, *, limit_bytes: int | None = None) -> None:
    """Begins the account; call it before the program's first tensors, once in a process.

    Args:
        world: The process's logical world (`logical.world()`).
        limit_bytes: What the rank's tensors may take together. A request beyond it ends in
            torch.OutOfMemoryError, as on a GPU, and nothing is allocated; the program
            may catch it and go on.

    Raises:
        UserError: The limit is no positive number.
    """
    if limit_bytes is not None and limit_bytes <= 0:
        raise UserError(
            "A memory limit is not positive",
            where=f"limit_bytes={limit_bytes}",
            do="Give the bytes that a rank has, or no limit",
        )
    global _limit_bytes
    native.load().memory.start(world, -1 if limit_bytes is None else limit_bytes)
    _limit_bytes = limit_bytes
    import crystalllm_patches

    patching.install(crystalllm_patches.MEMORY, known=crystalllm_patches.KNOWN)


def finish(
    world: Any,
    *,
    epoch_ns: int,
    iteration_of: Callable[[np.ndarray], Any] = lambda marks: marks,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the account; it goes on, and may be read again.

    Works on any way out of the process, also after an out-of-memory error and with the
    model gone.

    Args:
        world: As given to `start`.
        epoch_ns: Of CLOCK_MONOTONIC, where times begin.
        iteration_of: Gives the iterations after so many marks (an int64 array, with -1
            for ends that have not come); by default the number of marks itself.

    Returns:
        The columns of the table `memory`, and what `summary.summarize` gives.
    """
    from crystalllm.memory.observer import observer

    account = native.load().memory
    seen = observer()
    seen.look_at_all()
    blocks = Blocks.of_account(
        account.block_columns(), epoch_ns=epoch_ns, iteration_of=iteration_of
    )
    refusals = account.refusals()
    for refusal in refusals:
        refusal["iteration"] = int(np.asarray(iteration_of(np.array([refusal.pop("mark")])))[0])
        refusal["at_ns"] -= epoch_ns
    found = summary.summarize(blocks, refusals, seen.owners.name, limit_bytes=_limit_bytes)
    return blocks.columns(world.rank), found
