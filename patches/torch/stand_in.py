"""Messages that stand in for those of a virtual rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crystalllm import native


@contextmanager
def standing_in(
    world: Any, group: Any, seq: int, root: int, peer: int, messages: list[tuple[str, bytes]]
) -> Iterator[None]:
    """Serves invented messages of virtual rank `root` while it lasts.

    Args:
        world: The logical world.
        group: The group (`crystal_group`) in which they are sent.
        seq: Ordinal of the first message in the group, or in the ordered pair.
        root: Global rank that sends them.
        peer: Global rank that receives them, -1 in a collective.
        messages: Dtype and bytes of each, in order.
    """
    payload = native.load().Payload
    for i, (dtype, value) in enumerate(messages):
        world.add_payload(group.identity, seq + i, root, peer, payload(dtype, value))
    try:
        yield
    finally:
        for i in range(len(messages)):
            world.drop_payload(group.identity, seq + i, root, peer)
