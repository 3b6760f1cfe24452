"""TORCH_DISTRIBUTED_DEBUG=DETAIL."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm.patching import Patch

log = logging.getLogger("crystalllm")


def apply(module: ModuleType) -> None:
    """Problem: in this mode torch wraps every group in one that compares calls
    across ranks through an additional real gloo group.

    Change: the group stays unwrapped, and a warning says so. Emulation compares
    every call with the captured trace instead.

    Effect on numbers: the additional calls of the mode are missing.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.debug-wrapper; groups then fail.
    """

    def unwrapped(wrapped_pg: Any, **_: Any) -> Any:
        log.warning(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL compares calls between real ranks and is off here."
        )
        return wrapped_pg

    if not hasattr(module, "_create_process_group_wrapper"):
        raise AttributeError("torch.distributed has no _create_process_group_wrapper")
    module._create_process_group_wrapper = unwrapped


PATCH = Patch(
    id="torch.debug-wrapper",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)
