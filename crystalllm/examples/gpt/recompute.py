"""Which activations of a layer are kept for the backward pass and which are computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Body = Callable[[torch.Tensor], torch.Tensor]

# Dear to compute again, or a transfer: kept by `selective`. All else is cheap.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def _policy(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def around(mode: str) -> Callable[[Body, torch.Tensor], torch.Tensor]:
    """How a layer runs its body: none keeps everything, full keeps only the layer's input."""
    if mode == "none":
        return lambda body, x: body(x)
    if mode == "full":
        return partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
