"""Iteration marks: who sets them, and who hears of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crystalllm import native

# Called with the number of marks so far, after each mark, by the thread that set it.
Listener = Callable[[int], None]
_listeners: list[Listener] = []


def mark(*, by_hand: bool) -> None:
    """Sets a mark in this process's logical world, or proposes one; without a world nothing.

    Args:
        by_hand: The program says so itself; then what hooks propose counts no more.
    """
    module = native.loaded()
    world = module.the_world() if module is not None else None
    if world is None:
        return
    before = world.marks
    world.mark(by_hand=by_hand)
    if world.marks > before:
        for listener in list(_listeners):
            listener(world.marks)


@contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """Tells `listener` of each mark as long as the context lasts."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
