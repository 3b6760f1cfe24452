"""One transfer: what its time depends on."""

from __future__ import annotations

from dataclasses import dataclass

from crystalllm.placement import Placement


@dataclass(frozen=True)
class Transfer:
    """What a transfer's time depends on.

    Args:
        kind: As in `calls`.
        num_bytes: By the convention of `sizes`.
        dtype: In torch's spelling; empty for a barrier.
        placement: Of the group; of sender and receiver for a message.
        backend: gloo or nccl.
    """

    kind: str
    num_bytes: int
    dtype: str
    placement: Placement
    backend: str
