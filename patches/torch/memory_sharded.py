"""Parameters and gradients that FSDP makes itself, past modules and optimizers."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import wrapt
from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm.memory.observer import observer
from crystalllm.patching import Patch


def apply_parameters(module: ModuleType) -> None:
    """Problem: FSDP2 puts sharded parameters into modules without registering them.

    Change: after it has made one, that one is reported.

    Effect on numbers: none; some microseconds for each parameter when a model is
    sharded.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.memory-fsdp2-parameters; sharded parameters
    are then known from the first optimizer step on.
    """
    original = module.FSDPParam.__init__

    def init(wrapped: Any, param: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        observer().parameters_made([param.sharded_param], [_owner(param)])

    module.FSDPParam.__init__ = wrapt.FunctionWrapper(original, init)


def apply_groups(module: ModuleType) -> None:
    """Problem: FSDP2's unsharded parameters and their gradients live for a moment, and
    nobody else sees them; at a rank's peak they may be the largest part.

    Change: after a group's parameters are unsharded, and before its gradients are
    reduced, they are reported.

    Effect on numbers: none; about a microsecond for each parameter and unshard.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.memory-fsdp2-groups; unsharded parameters and
    their gradients then count as activations.
    """
    group = module.FSDPParamGroup
    owners_of: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()

    def owners(self: Any) -> list[int]:
        if self not in owners_of:
            owners_of[self] = [_owner(param) for param in self.fsdp_params]
        return owners_of[self]

    def unsharded(wrapped: Any, self: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        observer().parameters_made([p.unsharded_param for p in self.fsdp_params], owners(self))

    def reducing(wrapped: Any, self: Any, args: Any, kwargs: Any) -> None:
        whole = [getattr(p, "_unsharded_param", None) for p in self.fsdp_params]
        seen = observer()
        seen.gradients_made([None if p is None else p.grad for p in whole], owners(self))
        kept = [p.unsharded_accumulated_grad for p in self.fsdp_params]
        seen.gradients_made(kept, owners(self))
        wrapped(*args, **kwargs)

    group._to_unsharded = wrapt.FunctionWrapper(group._to_unsharded, unsharded)
    group.post_backward = wrapt.FunctionWrapper(group.post_backward, reducing)


def _owner(param: Any) -> int:
    where = param._module_info
    return observer().owners.parameter(where.module, where.param_name)


def apply_flat(module: ModuleType) -> None:
    """Problem: FSDP1's flat parameter is registered by no module where the program keeps
    its own (use_orig_params), and its memory changes with every unshard.

    Change: after it is sharded and after every unshard it is reported.

    Effect on numbers: none; about a microsecond for each unshard.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.memory-fsdp1-parameters; unsharded parameters
    then count as communication.
    """
    handle = module.FlatParamHandle

    def report(wrapped: Any, self: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        owner = observer().owners.parameter(self._fully_sharded_module, "_flat_param")
        observer().parameters_made([self.flat_param], [owner])
        return result

    for name in ("shard", "unshard"):
        setattr(handle, name, wrapt.FunctionWrapper(getattr(handle, name), report))


def apply_flat_gradients(module: ModuleType) -> None:
    """Problem: FSDP1's unsharded gradient is gone before the optimizer steps.

    Change: before it is reduced it is reported.

    Effect on numbers: none; about a microsecond for each reduction.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.memory-fsdp1-gradients; unsharded gradients
    then count as communication or activations.
    """

    def reducing(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        handle = args[1] if len(args) > 1 else kwargs["handle"]
        owner = observer().owners.parameter(handle._fully_sharded_module, "_flat_param")
        observer().gradients_made([handle.flat_param.grad], [owner])
        return wrapped(*args, **kwargs)

    module._reduce_grad = wrapt.FunctionWrapper(module._reduce_grad, reducing)


PATCHES = (
    Patch(
        id="torch.memory-fsdp2-parameters",
        target="torch.distributed.fsdp._fully_shard._fsdp_param",
        package="torch",
        versions=SUPPORTED,
        apply=apply_parameters,
    ),
    Patch(
        id="torch.memory-fsdp2-groups",
        target="torch.distributed.fsdp._fully_shard._fsdp_param_group",
        package="torch",
        versions=SUPPORTED,
        apply=apply_groups,
    ),
    Patch(
        id="torch.memory-fsdp1-parameters",
        target="torch.distributed.fsdp._flat_param",
        package="torch",
        versions=SUPPORTED,
        apply=apply_flat,
    ),
    Patch(
        id="torch.memory-fsdp1-gradients",
        target="torch.distributed.fsdp._runtime_utils",
        package="torch",
        versions=SUPPORTED,
        apply=apply_flat_gradients,
    ),
)
