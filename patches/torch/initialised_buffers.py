"""Broadcasts whose buffers are known to be initialised."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt
from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm import native
from crystalllm.patching import Patch, replace_everywhere


def keeping_buffers(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """Calls `wrapped`; receives from virtual roots leave their buffers as they are."""
    world = native.load().the_world()
    world.keep_buffers(True)
    try:
        return wrapped(*args, **kwargs)
    finally:
        world.keep_buffers(False)


def apply(module: ModuleType) -> None:
    """Problem: what a virtual root broadcasts is invented, since a buffer may be
    uninitialised. DDP and FSDP broadcast parameters and buffers that every rank
    has initialised; DDP also compares parameter shapes with rank 0's and takes
    its order of gradient buckets. Invented values would make a running variance
    negative, the comparison fail, and the reducer read past its parameters.

    Change: in those calls this rank keeps what it holds, which is what its
    peers hold too.

    Effect on numbers: none on times; parameters stay sensible.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.initialised-buffers.
    """
    for name in ("_broadcast_coalesced", "_verify_params_across_processes"):
        original = getattr(module, name)
        replace_everywhere(original, wrapt.FunctionWrapper(original, keeping_buffers))
    rebuild = module.Reducer._rebuild_buckets
    module.Reducer._rebuild_buckets = wrapt.FunctionWrapper(rebuild, keeping_buffers)


PATCH = Patch(
    id="torch.initialised-buffers",
    target="torch.distributed",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)
