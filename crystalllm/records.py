"""What the native world recorded, as columns of our tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crystalllm import native, tables


def call_columns(
    records: Mapping[str, list[Any]], groups: Sequence[Any], rank: int
) -> dict[str, Sequence[Any]]:
    """The columns of `calls` and `call_times`.

    Args:
        records: From `World.take_records`; empty if there were no calls.
        groups: From `World.groups`, by the ids in `records`.
        rank: Whose calls.
    """
    filled: dict[str, Sequence[Any]] = {
        c.name: records.get(c.name, []) for c in (*tables.CALLS.columns, *tables.CALL_TIMES.columns)
    }
    filled["rank"] = [rank] * len(filled["call"])
    for name in ("identity", "signature", "size"):
        filled[f"group_{name}"] = [getattr(groups[i], name) for i in filled["group"]]
    filled["group_desc"] = [groups[i].description for i in filled["group"]]
    return filled


def element_size(dtype: str) -> int:
    """Bytes of one element; 0 for the empty dtype of a barrier."""
    if not dtype:
        return 0
    if dtype == "bool" or dtype.startswith("float8"):
        return 1
    digits = "".join(c for c in dtype if c.isdigit())
    return int(digits or 0) // 8


def group_identity(members: Sequence[int], creation: int) -> str:
    """As `Group.identity` gives it, for the group that so many with these members came before."""
    return f"{native.load().digest(list(members))}#{creation}"
