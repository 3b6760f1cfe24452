"""split_group on a machine without an accelerator."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest import mock

import wrapt
from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm.patching import Patch, replace_everywhere


def apply(module: ModuleType) -> None:
    """Problem: split_group asks which accelerator there is and stops where there
    is none, although the group is bound to a (logical) CUDA device.

    Change: during the call the bound device counts as the accelerator. Groups
    without a bound device are refused as ever.

    Effect on numbers: none.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.split-without-accelerator.
    """
    import torch

    def split(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        bound = module._get_default_group().bound_device_id
        if bound is None:
            return wrapped(*args, **kwargs)
        with (
            mock.patch.object(torch.accelerator, "is_available", return_value=True),
            mock.patch.object(torch.accelerator, "current_accelerator", return_value=bound),
        ):
            return wrapped(*args, **kwargs)

    original = module.split_group
    replace_everywhere(original, wrapt.FunctionWrapper(original, split))


def _has_accelerator() -> str | None:
    import torch

    return "there is an accelerator" if torch.accelerator.is_available() else None


PATCH = Patch(
    id="torch.split-without-accelerator",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
    skip=_has_accelerator,
)
