"""Parameters, as modules register them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm.memory.observer import observer
from crystalllm.patching import Patch


def apply(module: ModuleType) -> None:
    """Problem: a block of memory does not tell that it is a parameter, nor of which
    module; and initialisation computes with gradients on as a forward does.

    Change: torch's own hooks for registered modules and parameters report them. A hook
    before the first call of a module reports that, and takes itself away.

    Effect on numbers: none; about a microsecond for each parameter when a model is
    built.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.memory-modules; parameters are then known
    from optimizers only, and nothing counts as forward before the first backward.
    """
    seen = observer()

    def parameter(owner: Any, name: str, value: Any) -> None:
        seen.parameter_registered(owner, name, value)

    def child(owner: Any, name: str, value: Any) -> None:
        seen.module_registered(owner, name, value)

    def called(*_: Any) -> None:
        handle.remove()
        seen.forward_began()

    module.register_module_parameter_registration_hook(parameter)
    module.register_module_module_registration_hook(child)
    handle = module.register_module_forward_pre_hook(called)


PATCH = Patch(
    id="torch.memory-modules",
    target="torch.nn.modules.module",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)
