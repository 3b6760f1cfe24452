"""Transfer times by one latency and one bandwidth, for a first look at a structure."""

from __future__ import annotations

import pandas as pd

from crystalllm.records import element_size
from crystalllm.replay.durations import Duration, of_choices


def uniform_transfers(
    calls: pd.DataFrame, *, latency_ns: float, bytes_per_s: float
) -> dict[str, Duration]:
    """Transfer times by one latency and one bandwidth: a first look, no prediction.

    Args:
        calls: Rows of `calls`.
        latency_ns: Of every call.
        bytes_per_s: For what the rank puts in or gets out, whichever is more.

    Returns:
        By key; calls with split sizes take as long as the sizes that occurred.
    """
    c = calls.assign(
        elements=calls[["in_elements", "out_elements"]].max(axis=1),
        element_bytes=calls["dtype"].astype(str).map(element_size),
    )
    c["ns"] = (latency_ns + c["elements"] * c["element_bytes"] / bytes_per_s * 1e9).round()
    counts = c.astype({"key": str, "ns": int}).groupby(["key", "ns"]).size()
    found: dict[str, Duration] = {}
    for key, of_key in counts.groupby(level="key"):
        choices = [(int(ns), int(n)) for (_, ns), n in of_key.items()]
        if len(choices) == 1:
            found[str(key)] = Duration(choices[0][0], count=choices[0][1], source="model")
        else:
            found[str(key)] = of_choices(choices, source="model")
    return found
