"""A small capture as its tables' own writers leave it, for tests of what reads it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from crystalllm import tables

PROVENANCE = {"crystalllm": "0", "program": ["train.py", "--steps", "4"], "world_size": 8}
NUM_MARKS = 4
AXES = (("pp", 2), ("dp", 2), ("tp", 2))


def write(folder: Path, *, values: list[bytes] | None = None, scale: int = 1) -> Path:
    """Writes the capture of pp=2, dp=2·scale, tp=2; two roles, the first rank of each captured.

    Args:
        folder: The capture folder.
        values: Payload values; two small pickles by default.
        scale: Enlarges dp.

    Returns:
        `folder`.
    """
    sizes = {"pp": 2, "dp": 2 * scale, "tp": 2}
    world = 8 * scale
    half = world // 2
    ranks = range(world)
    provenance = {**PROVENANCE, "world_size": world}
    tables.RANKS.write(
        folder / "ranks.parquet",
        {
            "rank": ranks,
            "node": [r // 8 for r in ranks],
            "coordinates": [
                [("pp", r // half), ("dp", r % half // 2), ("tp", r % 2)] for r in ranks
            ],
            "role": [r // half for r in ranks],
            "is_captured": [r in (0, half) for r in ranks],
            "is_checked": [r == half for r in ranks],
            "representative": [r // half * half for r in ranks],
            "num_calls": [14 for _ in ranks],
            "num_marks": [NUM_MARKS for _ in ranks],
            "num_invented": [0 for _ in ranks],
            "keys_digest": [str(r // half) for r in ranks],
        },
        provenance=provenance,
    )
    tp = [[r, r + 1] for r in ranks if r % 2 == 0]
    groups = [("tp", "2:1", pair, pair[0] not in (0, half)) for pair in tp]
    groups.append(("world", f"{world}:1", list(ranks), False))
    tables.GROUPS.write(
        folder / "groups.parquet",
        {
            "identity": [f"{description}{members[0]}#0" for description, _, members, _ in groups],
            "creation": [0] * len(groups),
            "backend": ["gloo"] * len(groups),
            "signature": [signature for _, signature, _, _ in groups],
            "description": [description for description, _, _, _ in groups],
            "is_inferred": [inferred for _, _, _, inferred in groups],
            "members": [members for _, _, members, _ in groups],
        },
        provenance=provenance,
    )
    rows = [row for rank in (0, half) for row in _calls(rank, world)]
    columns = {c.name: [row[c.name] for row in rows] for c in tables.CALLS.columns}
    tables.CALLS.write(folder / "calls.parquet", columns, provenance=provenance)
    values = values or [pickle.dumps({"seed": 1}), pickle.dumps([1, 2, 3])]
    tables.PAYLOADS.write(
        folder / "payloads.parquet",
        {
            "group": ["world0#0"] * len(values),
            "seq": list(range(len(values))),
            "rank": [0] * len(values),
            "peer": [-1] * len(values),
            "dtype": ["uint8"] * len(values),
            "splits": [[] for _ in values],
            "store_key": [""] * len(values),
            "body_end": [0] * len(values),
            "per_period": [0] * len(values),
            "value": values,
        },
        provenance=provenance,
    )
    structure = {
        **provenance,
        "chance_unseen": {"1": 6 / 7},
        "fingerprint": "f00d",
        "period": 1,
        "prologue_marks": 1,
        "num_payloads": len(values),
        "num_invented": 0,
        "axes": sizes,
    }
    (folder / "structure.json").write_text(json.dumps(structure) + "\n")
    return folder


def _calls(rank: int, world: int) -> list[dict[str, object]]:
    """Two calls of initialisation, three in each of the marks 1 to 3, three after the last."""
    first = [("broadcast", "world", "int64", 1), ("barrier", "world", "", 0)]
    body = [
        ("all_reduce", "tp", "float32", 100),
        ("all_reduce", "tp", "float32", 100),
        ("all_gather", "world", "bfloat16", 8 if rank == 0 else 16),
    ]
    plan = [(0, c) for c in first] + [(m, c) for m in range(1, NUM_MARKS + 1) for c in body]
    return [
        _row(rank, world, i, mark, kind, group, dtype, count)
        for i, (mark, (kind, group, dtype, count)) in enumerate(plan)
    ]


def _row(
    rank: int, world: int, call: int, mark: int, kind: str, group: str, dtype: str, count: int
) -> dict[str, object]:
    size = 2 if group == "tp" else world
    return {
        "rank": rank,
        "call": call,
        "key": f"{kind} {dtype} {count} {group}",
        "kind": kind,
        "reduce_op": "sum" if kind == "all_reduce" else "",
        "dtype": dtype,
        "count": count,
        "group": int(group == "tp"),
        "group_identity": f"{group}{rank if group == 'tp' else 0}#0",
        "group_signature": f"{size}:1",
        "group_size": size,
        "group_desc": group,
        "root": "other" if kind == "broadcast" else "none",
        "root_rank": 0 if kind == "broadcast" else -1,
        "peer_offset": -1,
        "peer_wraps": False,
        "peer_rank": -1,
        "any_source": False,
        "tag": 0,
        "batch": -1,
        "stream": 0,
        "seq": call,
        "mark": mark,
        "seq_in_mark": 0,
        "in_elements": count,
        "out_elements": count,
        "in_splits": [],
        "out_splits": [],
        "is_async": False,
    }
