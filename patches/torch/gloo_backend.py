"""The virtual backend in gloo's place."""

from __future__ import annotations

from types import ModuleType

from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm import native
from crystalllm.patching import Patch, replace_everywhere


def apply(module: ModuleType) -> None:
    """Problem: gloo connects to every peer when a group is created.

    Change: torch builds our backend where it would build ProcessGroupGloo. A
    registered backend cannot take a name that torch owns, so the class is
    replaced; get_backend(), errors and checks stay gloo's.

    Effect on numbers: gloo's own processor time is not there; the release time
    of a call comes from replay.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.gloo-backend; groups then hang.
    """
    backend = native.load().GlooBackend
    # ProcessGroupGloo.create_device and friends configure real sockets; a
    # program may call them, and what they return is of no use to us.
    for name in ("create_device", "create_default_device"):
        if hasattr(module.ProcessGroupGloo, name):
            setattr(backend, name, staticmethod(getattr(module.ProcessGroupGloo, name)))
    replace_everywhere(module.ProcessGroupGloo, backend)


PATCH = Patch(
    id="torch.gloo-backend",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)
