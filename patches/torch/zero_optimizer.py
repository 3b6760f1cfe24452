"""ZeroRedundancyOptimizer's exchange of updated parameters."""

from __future__ import annotations

from types import ModuleType

import wrapt
from crystalllm_patches.torch.initialised_buffers import keeping_buffers
from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm.patching import Patch


def apply(module: ModuleType) -> None:
    """Problem: after each step every rank broadcasts the parameters that it
    updated; those of virtual ranks would be overwritten with invented values.

    Change: this rank keeps its own values of them.

    Effect on numbers: none on times; other ranks' parameters are not updated.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.zero-optimizer.
    """
    optimizer = module.ZeroRedundancyOptimizer
    optimizer._broadcast_params_from_rank = wrapt.FunctionWrapper(
        optimizer._broadcast_params_from_rank, keeping_buffers
    )


def apply_overlapped(module: ModuleType) -> None:
    """Problem, Change, Effect on numbers: as torch.zero-optimizer, for the hook
    that overlaps the optimizer with DDP's backward.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.zero-optimizer-overlapped.
    """
    module._broadcast_bucket = wrapt.FunctionWrapper(module._broadcast_bucket, keeping_buffers)


PATCH = Patch(
    id="torch.zero-optimizer",
    target="torch.distributed.optim.zero_redundancy_optimizer",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)

PATCH_OVERLAPPED = Patch(
    id="torch.zero-optimizer-overlapped",
    target="torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook",
    package="torch",
    versions=SUPPORTED,
    apply=apply_overlapped,
)
