"""How patches are described, chosen and applied.

A patch is data: what it changes, in which versions, under which condition. It
is applied when its target is imported, whether by the program or by torch
itself. One that should apply and cannot stops the program, since silently
wrong numbers are worse than none.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import wrapt
from packaging.specifiers import SpecifierSet
from packaging.version import Version

log = logging.getLogger("crystalllm.patches")

OFF_VARIABLE = "CRYSTALLLM_PATCHES_OFF"


class PatchError(RuntimeError):
    """A patch applies to what is installed but could not be applied."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to somebody else's code.

    Args:
        id: Stable name, "<stack>.<what>".
        target: Module whose import triggers it.
        package: Distribution whose version counts.
        versions: Versions that it was made for and tested with.
        apply: Changes the module. Its docstring says Problem, Change, Effect
            on numbers and Turn off.
        skip: Gives a reason not to apply it to the module here, or None.
    """

    id: str
    target: str
    package: str
    versions: str
    apply: Callable[[ModuleType], None]
    skip: Callable[[ModuleType], str | None] = lambda _: None

    @property
    def documentation(self) -> str:
        return inspect.getdoc(self.apply) or ""


def install(patches: Iterable[Patch], *, known: Iterable[Patch] = ()) -> None:
    """Arranges that each patch is applied once its target is imported.

    A target that is already there is patched at once.

    Args:
        patches: Those to apply.
        known: All that there are, so that turning off one of another set is no mistake.

    Raises:
        PatchError: One that is turned off does not exist.
    """
    off = {name for name in os.environ.get(OFF_VARIABLE, "").split(",") if name}
    patches = list(patches)
    ids = {patch.id for patch in (*patches, *known)}
    unknown = off - ids
    if unknown:
        raise PatchError(
            f"{OFF_VARIABLE} names no patch. {', '.join(sorted(unknown))}. "
            f"Known are {', '.join(sorted(ids))}."
        )
    for patch in patches:
        if patch.id in off:
            log.info("%s: skipped, turned off by %s", patch.id, OFF_VARIABLE)
            continue
        wrapt.register_post_import_hook(_hook(patch), patch.target)


def _hook(patch: Patch) -> Callable[[ModuleType], None]:
    def apply(module: ModuleType) -> None:
        if reason := patch.skip(module):
            log.info("%s: skipped, %s", patch.id, reason)
            return
        version = Version(Version(metadata.version(patch.package)).base_version)
        if version not in SpecifierSet(patch.versions, prereleases=True):
            raise PatchError(
                f"Patch {patch.id} is not made for this version. {patch.package} {version}, "
                f"made for {patch.versions}. Install one of those, or turn the patch off with "
                f"{OFF_VARIABLE}={patch.id} and expect wrong results."
            )
        try:
            patch.apply(module)
        except Exception as error:
            raise PatchError(
                f"Patch {patch.id} could not be applied. {patch.package} {version}, "
                f"{type(error).__name__}: {error}. Report it with the output of "
                "python -m crystalllm doctor."
            ) from error
        log.info("%s: applied to %s %s", patch.id, patch.package, version)

    return apply


def replace_everywhere(old: Any, new: Any, *, prefix: str = "torch") -> int:
    """Rebinds every module attribute below `prefix` that is `old` to `new`.

    `from x import y` copies a binding, so the module that defines a name is
    not the only one that has to learn of the new object.

    Returns:
        How many attributes were rebound, at least one.
    """
    count = 0
    for name, module in list(sys.modules.items()):
        if name != prefix and not name.startswith(prefix + "."):
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)
                count += 1
    if count == 0:
        raise PatchError(f"{old!r} is bound nowhere below {prefix}")
    return count
