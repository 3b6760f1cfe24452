"""Whose memory it is: numbers for parameters and what belongs to them, and their names."""

from __future__ import annotations

from typing import Any
from weakref import ref

# A module that contains itself would have a path without an end.
_MAX_DEPTH = 100


class Owners:
    """Gives parameters and optimizer states numbers, and tells the names of those.

    Modules are kept as numbers, too: names are asked for when the model may be gone.
    """

    def __init__(self) -> None:
        # By id, since a module may be compared and hashed as its class likes.
        self._modules: dict[int, tuple[ref[Any], int]] = {}
        self._num_modules = 0
        self._parents: dict[int, tuple[int, str]] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._keys: list[tuple[object, ...]] = []

    def contains(self, module: Any, name: str, child: Any) -> None:
        """`child` is `module`'s submodule `name`."""
        self._parents[self._module(child)] = (self._module(module), name)

    def parameter(self, module: Any, name: str) -> int:
        """The number of a module's parameter."""
        return self._number("module", self._module(module), name)

    def position(self, optimizer: str, group: int, position: int) -> int:
        """The number of a parameter that only an optimizer knows."""
        return self._number("optimizer", optimizer, group, position)

    def state(self, parameter: int, key: str) -> int:
        """The number of an optimizer's state of the parameter with that number."""
        return self._number("state", parameter, key)

    def name(self, number: int) -> str:
        """Such as `layers.0.mlp.up.weight`, and for a state `layers.0.mlp.up.weight: exp_avg`.

        Empty for -1.
        """
        if number < 0:
            return ""
        match self._keys[number]:
            case ("module", module, name):
                return ".".join([*self._path(module), name])
            case ("optimizer", optimizer, group, position):
                return f"{optimizer}.param_groups[{group}]['params'][{position}]"
            case (_, parameter, key):
                return f"{self.name(parameter) or 'optimizer'}: {key}"

    def _path(self, module: int) -> list[str]:
        names: list[str] = []
        while module in self._parents and len(names) < _MAX_DEPTH:
            module, name = self._parents[module]
            names.append(name)
        return names[::-1]

    def _module(self, module: Any) -> int:
        known = self._modules.get(id(module))
        if known is None or known[0]() is not module:
            known = self._modules[id(module)] = (ref(module), self._num_modules)
            self._num_modules += 1
        return known[1]

    def _number(self, *key: object) -> int:
        number = self._numbers.setdefault(key, len(self._keys))
        if number == len(self._keys):
            self._keys.append(key)
        return number
