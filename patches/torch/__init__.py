"""Patches for torch's distributed packages, in the order in which they are applied."""

from __future__ import annotations

from crystalllm_patches.torch import (
    debug_wrapper,
    device_without_accelerator,
    dtensor_distribution,
    gloo_backend,
    initialised_buffers,
    mates,
    memory_modules,
    memory_optimizers,
    memory_sharded,
    nccl_without_cuda,
    object_collectives,
    optimizer_marks,
    pipeline_vote,
    recorded_gloo,
    stores,
    zero_optimizer,
)

PATCHES = (
    mates.PATCH,  # first, since it takes classes that others replace
    stores.PATCH,
    gloo_backend.PATCH,
    nccl_without_cuda.PATCH,
    nccl_without_cuda.PATCH_REFUSE,
    debug_wrapper.PATCH,
    device_without_accelerator.PATCH,
    object_collectives.PATCH,
    object_collectives.PATCH_SIZES,
    initialised_buffers.PATCH,
    dtensor_distribution.PATCH,
    pipeline_vote.PATCH,
    optimizer_marks.PATCH,
    zero_optimizer.PATCH,
    zero_optimizer.PATCH_OVERLAPPED,
)
# Where peers are real and calls are only recorded.
RECORDING = (recorded_gloo.PATCH, optimizer_marks.PATCH)
# Where an account of memory is kept.
MEMORY = (memory_modules.PATCH, memory_optimizers.PATCH, *memory_sharded.PATCHES)
