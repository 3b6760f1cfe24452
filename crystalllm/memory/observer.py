"""Tells the native account of memory what blocks are for, from what torch's hooks show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from crystalllm import native
from crystalllm.memory.owners import Owners


class Observer:
    """What the patches of `patches/torch/memory_*.py` report to.

    Its methods run inside the program's calls: they allocate no tensors, change nothing
    and raise nothing.
    """

    def __init__(self) -> None:
        self.owners = Owners()
        self._groups: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()
        self._seen_states: WeakSet[Any] = WeakSet()

    @cached_property
    def account(self) -> ModuleType:
        return native.load().memory

    # --- modules

    def module_registered(self, module: Any, name: str, child: Any) -> None:
        if child is not None:
            self.owners.contains(module, name, child)

    def parameter_registered(self, module: Any, name: str, parameter: Any) -> None:
        if parameter is not None:
            self.account.know_parameters([parameter], [self.owners.parameter(module, name)])

    def forward_began(self) -> None:
        self.account.forward_begins()
        self.account.look_at_parameters()

    # --- sharded parameters

    def parameters_made(self, parameters: Sequence[Any], owners: Sequence[int]) -> None:
        """Parameters that no module registered, such as unsharded ones."""
        self.account.know_parameters(parameters, owners)

    def gradients_made(self, gradients: Sequence[Any], owners: Sequence[int]) -> None:
        for gradient, owner in zip(gradients, owners, strict=True):
            if gradient is not None:
                self.account.recognise([gradient], "gradient", owner)

    # --- optimizers

    def step_begins(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        sizes = tuple(len(group["params"]) for group in groups)
        if self._groups.get(optimizer) != sizes:
            self._groups[optimizer] = sizes
            for g, group in enumerate(groups):
                for i, parameter in enumerate(group["params"]):
                    self._know(optimizer, g, i, parameter)
        self.account.look_at_parameters()
        self.account.in_optimizer(True)

    def step_ended(self, optimizer: Any) -> None:
        self.account.in_optimizer(False)
        # States are made in the first step; later ones seldom make more.
        if optimizer not in self._seen_states or self.account.step_kept_memory():
            self._seen_states.add(optimizer)
            self.look_at_states(optimizer)

    def look_at_states(self, optimizer: Any) -> None:
        for parameter, states in list(optimizer.state.items()):
            is_tensor = isinstance(parameter, torch.Tensor)
            owner = self.account.owner_of(parameter) if is_tensor else -1
            for key, tensor in _tensors(states):
                self.account.recognise([tensor], "optimizer", self.owners.state(owner, key))

    def look_at_all(self) -> None:
        """Everything that is alive, for an account that is about to be read."""
        self.account.look_at_parameters()
        for optimizer in list(self._groups):
            self.look_at_states(optimizer)

    def _know(self, optimizer: Any, group: int, position: int, parameter: Any) -> None:
        owner = self.account.owner_of(parameter)
        if owner < 0:
            owner = self.owners.position(type(optimizer).__name__, group, position)
        self.account.know_parameters([parameter], [owner])


def _tensors(states: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """The tensors in an optimizer's state of one parameter, and by which key."""
    if isinstance(states, torch.Tensor):
        yield key, states
    elif isinstance(states, dict):
        for name, value in list(states.items()):
            yield from _tensors(value, f"{key}.{name}" if key else str(name))
    elif isinstance(states, list | tuple):
        for value in states:
            yield from _tensors(value, key)


_observer: Observer | None = None


def observer() -> Observer:
    """The process's."""
    global _observer
    if _observer is None:
        _observer = Observer()
    return _observer
