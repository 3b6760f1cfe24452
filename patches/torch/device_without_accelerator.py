"""Groups bound to a device on a machine without an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import wrapt
from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm.patching import Patch, replace_everywhere


def apply(module: ModuleType) -> None:
    """Problem: init_process_group(device_id=…) and split_group ask which
    accelerator there is, and stop where there is none.

    Change: during these calls the given or bound (logical) CUDA device counts
    as the accelerator. Groups without a device are treated as ever.

    Effect on numbers: none.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.device-without-accelerator.
    """

    def init(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device_id")
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return _with_accelerator(device, wrapped, args, kwargs)

    def split(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        device = module._get_default_group().bound_device_id
        return _with_accelerator(device, wrapped, args, kwargs)

    for name, wrapper in (("init_process_group", init), ("split_group", split)):
        original = getattr(module, name)
        replace_everywhere(original, wrapt.FunctionWrapper(original, wrapper))


def _with_accelerator(
    device: torch.device | None, wrapped: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    if device is None or device.type == "cpu":
        return wrapped(*args, **kwargs)
    count = max(torch.accelerator.device_count(), (device.index or 0) + 1)
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(
            torch.accelerator, "current_accelerator", return_value=torch.device(device.type)
        ),
        mock.patch.object(torch.accelerator, "device_count", return_value=count),
    ):
        return wrapped(*args, **kwargs)


def _has_accelerator(_: ModuleType) -> str | None:
    return "there is an accelerator" if torch.accelerator.is_available() else None


PATCH = Patch(
    id="torch.device-without-accelerator",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
    skip=_has_accelerator,
)
