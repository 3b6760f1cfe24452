"""Bytes of a transfer as nccl-tests counts them, and its bus bandwidth.

One kind of call has one size whoever looks at it: of all_gather and gather, of
reduce_scatter and scatter, and of all_to_all it is the whole array (what all ranks
together hold of it), of everything else what one rank holds. Source: nccl-tests,
doc/PERFORMANCE.md, and the functions …GetCollByteCount and …GetBw of its src/*.cu.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from crystalllm.records import element_size

# Of a barrier: the smallest all_reduce, one 4-byte element.
BARRIER_BYTES = 4

# Kinds whose size is what all ranks together hold.
WHOLE_IS_OUT = ("all_gather", "gather")
_WHOLE_IS_IN = ("reduce_scatter", "scatter")
WHOLE = (*WHOLE_IS_OUT, *_WHOLE_IS_IN, "all_to_all")


def bus_factor(kind: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth (size over time) of a kind, among so many ranks.

    all_reduce 2(n-1)/n; all_gather, reduce_scatter, all_to_all, gather and scatter
    (n-1)/n; broadcast, reduce and messages 1.
    """
    share = (num_ranks - 1) / num_ranks
    if kind in ("all_reduce", "barrier"):
        return 2 * share
    return share if kind in WHOLE else 1.0


def size_bytes(calls: pd.DataFrame) -> pd.Series:
    """Size of each call.

    Args:
        calls: Rows of `calls`. Of an uneven all_to_all the larger side of the rank counts.

    Returns:
        Bytes, int64, by the index of `calls`.
    """
    kind = calls["kind"].astype(str)
    put_in, out, ranks = (calls[c] for c in ("in_elements", "out_elements", "group_size"))
    elements = np.maximum(put_in, out)
    elements = elements.mask(kind.isin(WHOLE_IS_OUT), np.maximum(put_in * ranks, out))
    elements = elements.mask(kind.isin(_WHOLE_IS_IN), np.maximum(out * ranks, put_in))
    dtypes = calls["dtype"].astype(str)
    found = elements * dtypes.map({name: element_size(name) for name in dtypes.unique()})
    return found.mask(kind == "barrier", BARRIER_BYTES).astype("int64")
