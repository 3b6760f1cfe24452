"""Turns this process into one rank of a logical world, before torch is imported."""

from __future__ import annotations

import atexit
import logging
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from crystalllm import native, patching
from crystalllm.errors import UserError
from crystalllm.identity import Identity
from crystalllm.mates import Mates
from crystalllm.payload import PayloadBook

log = logging.getLogger("crystalllm")

_mates: Mates | None = None


def enter(
    identity: Identity,
    *,
    book: PayloadBook | Path | None = None,
    extra_periods: int = 0,
    strict: bool = False,
    keep_records: bool = False,
    transfer_ns: int = 0,
    logical_local_rank: bool = False,
    carried: bool = False,
    mates: Mates | None = None,
) -> None:
    """Makes the process rank `identity.rank`: from here on torch's peers are virtual.

    The environment is the caller's to set (`Identity.variables`).

    Args:
        identity: Who to be.
        book: What virtual peers really send, where that is known.
        extra_periods: How much longer the run is than the one that the book is
            from (`PayloadBook.extra_periods`).
        strict: Refuse control values that are not in the book.
        keep_records: Keep a record of every call, for `world().take_records()`.
        transfer_ns: Every call ends so long after its arrival.
        logical_local_rank: Leave LOCAL_RANK logical also where it names no CUDA
            device that exists.
        carried: The peers are real: gloo moves the data between processes that
            somebody started, and calls are only recorded.
        mates: Ranks that run for real side by side, this one among them; None if
            all others are virtual.

    Raises:
        UserError: This rank is not among `mates`, or one of them is outside the world.
    """
    global _mates
    if mates is not None and not {identity.rank} <= set(mates.ranks) <= set(
        range(identity.world_size)
    ):
        raise UserError(
            "These ranks cannot run side by side",
            where=f"Ranks {', '.join(map(str, mates.ranks))}, for rank {identity.rank} of "
            f"{identity.world_size}",
            do="Name ranks of the world, this one among them",
        )
    _mates = mates
    if isinstance(book, Path):
        book = PayloadBook.load(book)

    def torch_imported(_: ModuleType) -> None:
        module = native.load()
        world = module.World(rank=identity.rank, size=identity.world_size, seed=identity.seed)
        world.set_strict(strict)
        world.keep_records(keep_records)
        world.set_transfer_ns(transfer_ns)
        if mates is not None:
            world.set_mates(list(mates.ranks), limit_ms=math.ceil(1000 * (mates.limit_s or 0)))
        module.reset_stores()
        module.set_world(world)
        if book is not None:
            book.serve(module, world, extra_periods=extra_periods)
        if not logical_local_rank:
            _name_existing_device(identity)
        import crystalllm_patches

        patches = crystalllm_patches.RECORDING if carried else crystalllm_patches.ALL
        patching.install(patches, known=crystalllm_patches.KNOWN)
        # Futures may be due after the program's last line, and their callbacks
        # need the interpreter.
        atexit.register(module.stop_timer)

    wrapt.register_post_import_hook(torch_imported, "torch")


def _name_existing_device(identity: Identity) -> None:
    """On CUDA, programs take LOCAL_RANK for a device number, so it has to be one."""
    import torch

    if not torch.cuda.is_available():
        return
    num_devices = torch.cuda.device_count()
    if identity.local_rank >= num_devices:
        device = identity.local_rank % num_devices
        os.environ["LOCAL_RANK"] = str(device)
        log.warning(
            "LOCAL_RANK is %d instead of %d, since %d CUDA devices are here "
            "(--logical-local-rank keeps it)",
            device,
            identity.local_rank,
            num_devices,
        )


def world() -> Any:
    """The process's logical world, or None while torch is not imported."""
    module = native.loaded()
    return module.the_world() if module is not None else None


def mates() -> Mates | None:
    """The ranks that run side by side with this one, or None."""
    return _mates
