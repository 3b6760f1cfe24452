"""DTensor's distribution of a tensor from one rank."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import wrapt
from crystalllm_patches.torch.initialised_buffers import keeping_buffers
from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm.patching import Patch, replace_everywhere


def apply(module: ModuleType) -> None:
    """Problem: distribute_tensor takes shards and replicas from group rank 0, so
    that on other ranks weights would be invented.

    Change: every rank holds the whole tensor at that point, so its own shard or
    replica is taken. The communication calls stay.

    Effect on numbers: none on times; weights stay the program's.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.dtensor-distribution.
    """

    def scatter(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        return _scatter(module, wrapped, *args, **kwargs)

    original = module.mesh_scatter
    replace_everywhere(original, wrapt.FunctionWrapper(original, scatter))
    original = module.mesh_broadcast
    replace_everywhere(original, wrapt.FunctionWrapper(original, keeping_buffers))


def _scatter(
    module: ModuleType,
    wrapped: Any,
    output: torch.Tensor,
    scatter_list: list[torch.Tensor],
    mesh: Any,
    mesh_dim: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    work = wrapped(output, scatter_list, mesh, mesh_dim, *args, **kwargs)
    if not output.is_meta:
        with torch.no_grad():
            output.copy_(scatter_list[mesh.get_local_rank(mesh_dim)])
    return work


PATCH = Patch(
    id="torch.dtensor-distribution",
    target="torch.distributed.tensor._collective_utils",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)
