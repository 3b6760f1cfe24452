"""Gloo itself, with every call recorded."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm import native
from crystalllm.patching import Patch, replace_everywhere


def apply(module: ModuleType) -> None:
    """Problem: gloo does not say which calls were made, in which group, and
    when somebody waited for them.

    Change: torch builds our backend around a real ProcessGroupGloo, which
    carries out every call after it has been recorded.

    Effect on numbers: some microseconds per call.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.recorded-gloo; nothing is recorded then.
    """
    real = module.ProcessGroupGloo
    virtual = native.load().GlooBackend

    class RecordedGloo(virtual):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            super().__init__(store, rank, size, timeout=timeout)
            self.carry_by(real(store, rank, size, timeout=timeout))

    replace_everywhere(real, RecordedGloo)


PATCH = Patch(
    id="torch.recorded-gloo",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)
