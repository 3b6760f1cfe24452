"""What a measurement of gloo measures."""

from __future__ import annotations

from dataclasses import dataclass

from crystalllm.records import element_size
from crystalllm.transfers.sizes import BARRIER_BYTES, WHOLE


@dataclass(frozen=True)
class Case:
    """What to measure.

    Args:
        kind: As in `calls`.
        num_bytes: By the convention of `sizes`; rounded up to whole elements.
        dtype: In torch's spelling; empty for a barrier.
    """

    kind: str
    num_bytes: int
    dtype: str = "float32"

    def elements(self, num_ranks: int) -> int:
        """Elements by the convention of `calls`, at least one."""
        if self.kind == "barrier":
            return 1
        per_element = element_size(self.dtype) * (num_ranks if self.kind in WHOLE else 1)
        return max(1, -(-self.num_bytes // per_element))

    def row_bytes(self, num_ranks: int) -> int:
        """Bytes of what is really measured."""
        if self.kind == "barrier":
            return BARRIER_BYTES
        whole = num_ranks if self.kind in WHOLE else 1
        return self.elements(num_ranks) * element_size(self.dtype) * whole
