"""Iteration marks from optimizer steps."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm import marks
from crystalllm.patching import Patch


def apply(module: ModuleType) -> None:
    """Problem: nothing in a program says where an iteration ends.

    Change: torch's own hook after every optimizer step proposes a mark. A
    program that calls crystalllm.step() sets its marks itself, and the hook's
    are ignored from then on.

    Effect on numbers: none.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.optimizer-marks.
    """

    def propose(*_: Any) -> None:
        marks.mark(by_hand=False)

    module.register_optimizer_step_post_hook(propose)


PATCH = Patch(
    id="torch.optimizer-marks",
    target="torch.optim.optimizer",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)
