"""Tensors of ours, which are no memory of the program's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from crystalllm import native


@contextmanager
def unwatched() -> Iterator[None]:
    """What this thread allocates meanwhile is in no account of memory."""
    account = native.load().memory
    account.unwatch(True)
    try:
        yield
    finally:
        account.unwatch(False)
