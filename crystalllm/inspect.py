"""What a capture says, as tables that a person reads: one question, one DataFrame.

`show` prints them. Worlds of thousands of ranks are answered from the columns
and row groups that the question needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from crystalllm import artifacts, tables
from crystalllm.errors import UserError
from crystalllm.records import element_size

_KIND = ["description", "signature", "size", "kind"]
_VOLUME_COLUMNS = (
    "rank",
    "mark",
    "kind",
    "dtype",
    "group_desc",
    "group_signature",
    "group_size",
    "in_elements",
    "out_elements",
)
_CALL_COLUMNS = (
    *_VOLUME_COLUMNS,
    "call",
    "reduce_op",
    "count",
    "root",
    "root_rank",
    "peer_offset",
    "peer_rank",
    "seq",
    "batch",
)


@dataclass(frozen=True)
class Capture:
    """The artifacts of one capture, read when asked for.

    Args:
        path: A job's folder or its capture folder.
    """

    path: Path

    @cached_property
    def folder(self) -> Path:
        return artifacts.capture_folder(self.path)

    @cached_property
    def structure(self) -> dict[str, Any]:
        return artifacts.read_structure(self.folder)

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """The `ranks` table by rank, coordinates as columns of `axes`."""
        table, _ = tables.RANKS.read(self.folder / "ranks.parquet")
        frame = table.drop_columns(["coordinates"]).to_pandas().set_index("rank", drop=False)
        if not frame.index.is_unique or not set(frame["representative"]) <= set(frame.index):
            raise UserError(
                "The ranks of a capture do not fit together",
                where=f"File {self.folder / 'ranks.parquet'}: a rank is there twice, or a "
                "representative is not there",
                do="Capture again",
            )
        return frame.sort_index()

    @cached_property
    def axes(self) -> pd.DataFrame:
        """One column per axis, outermost first; -1 where a rank has no place on it."""
        table, _ = tables.RANKS.read(self.folder / "ranks.parquet", columns=["rank", "coordinates"])
        places = table["coordinates"].combine_chunks()
        of = np.repeat(np.arange(len(places)), np.diff(places.offsets.to_numpy()))
        first, last = places.offsets[0].as_py(), places.offsets[-1].as_py()
        names = places.keys.to_numpy(zero_copy_only=False)[first:last]
        values = places.items.to_numpy()[first:last]
        frame = pd.DataFrame(index=table["rank"].to_numpy())
        for axis in pd.unique(names):
            column = np.full(len(places), -1)
            column[of[names == axis]] = values[names == axis]
            frame[axis] = column
        return frame.sort_index()

    def calls(self, ranks: Sequence[int], columns: Sequence[str]) -> pd.DataFrame:
        return tables.CALLS.read(
            self.folder / "calls.parquet",
            columns=columns,
            filters=[("rank", "in", [int(r) for r in ranks])],
        )[0].to_pandas()


def roles(capture: Capture) -> pd.DataFrame:
    """Who makes equal calls.

    Returns:
        One row per role: role, ranks, captured, checked (ran to check what was
        inferred), inferred, representative, coordinates (short form), calls and
        marks (of the representative).
    """
    ranks, axes = capture.ranks, capture.axes
    everything = {axis: np.unique(axes[axis]) for axis in axes}
    rows = []
    for role, members in ranks.groupby("role"):
        speaker = ranks.loc[members["representative"].iloc[0]]
        rows.append(
            {
                "role": role,
                "ranks": len(members),
                "captured": int(members["is_captured"].sum()),
                "checked": int(members["is_checked"].sum()),
                "inferred": int((~members["is_captured"]).sum()),
                "representative": int(speaker["rank"]),
                "coordinates": _short(axes.loc[members.index], everything),
                "calls": int(speaker["num_calls"]),
                "marks": int(speaker["num_marks"]),
            }
        )
    return pd.DataFrame(rows)


def _short(axes: pd.DataFrame, everything: dict[str, np.ndarray]) -> str:
    """Such as `pp=3 tp=0-3 dp=*`; where not all combinations belong to it, how many do."""
    parts, product = [], 1
    for axis, legal in everything.items():
        values = np.unique(axes[axis])
        product *= len(values)
        parts.append(f"{axis}={'*' if len(values) == len(legal) else ranges(values)}")
    if product != len(axes) and parts:
        parts.append(f"({len(axes)} of these {product})")
    return " ".join(parts)


def ranges(values: np.ndarray) -> str:
    """Rising numbers as `0-3,7`."""
    if not len(values):
        return ""
    runs = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def groups(capture: Capture) -> pd.DataFrame:
    """Communicators by kind.

    Returns:
        One row per description, signature, size and backend: those, seen (made
        by a captured rank) and inferred.
    """
    columns = ["description", "signature", "backend", "is_inferred", "members"]
    table, _ = tables.GROUPS.read(capture.folder / "groups.parquet", columns=columns)
    sizes = pc.list_value_length(table["members"])
    frame = table.drop_columns(["members"]).append_column("size", sizes).to_pandas()
    frame["seen"] = ~frame["is_inferred"]
    by = ["description", "signature", "size", "backend"]
    summed = frame.groupby(by, observed=True)[["seen", "is_inferred"]].sum().reset_index()
    return summed.rename(columns={"is_inferred": "inferred"}).astype({"seen": int, "inferred": int})


def communication(capture: Capture) -> pd.DataFrame:
    """How often and how much each role's representative communicates.

    Returns:
        One row per role, group kind and call kind: role, description,
        signature, size, kind, calls_per_iteration, bytes_per_iteration (body
        only, means over its repetitions), calls, bytes (of the whole capture).
        Bytes are what the rank puts in, or gets out where it puts nothing in.
    """
    speakers = capture.ranks.drop_duplicates("role").set_index("representative")
    calls = capture.calls(list(speakers.index), _VOLUME_COLUMNS)
    calls = calls.assign(role=calls["rank"].map(speakers["role"]))
    calls["bodies"] = calls["rank"].map(_bodies(capture)).astype(float)
    return _volume(calls.assign(part=_parts(capture, calls)), ["role"])


def by_group_and_kind(calls: pd.DataFrame) -> pd.DataFrame:
    """As `communication`, of calls that belong to no capture: without iterations.

    Args:
        calls: Rows of the `calls` table.

    Returns:
        One row per rank, group kind and call kind.
    """
    summed = _volume(calls.assign(part="", bodies=1.0), ["rank"])
    return summed.drop(columns=["calls_per_iteration", "bytes_per_iteration"])


def _volume(calls: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    renamed = {
        "group_desc": "description",
        "group_signature": "signature",
        "group_size": "size",
    }
    frame = calls.rename(columns=renamed).assign(bytes=_bytes(calls), calls=1)
    in_body = (frame["part"] == "body").to_numpy()
    sums = ["calls", "bytes"]
    for name in sums:
        frame[f"{name}_per_iteration"] = frame[name].where(in_body, 0)
    # Categories would give every combination, and their own order.
    frame = frame.astype(dict.fromkeys(["description", "signature", "kind"], str))
    means = [f"{name}_per_iteration" for name in sums]
    grouped = frame.groupby([*by, *_KIND])
    summed = grouped[[*means, *sums]].sum()
    summed[means] = summed[means].div(grouped["bodies"].first().clip(lower=1), axis=0)
    return summed.reset_index()


def _bytes(calls: pd.DataFrame) -> pd.Series:
    sizes = {dtype: element_size(str(dtype)) for dtype in calls["dtype"].unique()}
    elements = calls["in_elements"].where(calls["in_elements"] != 0, calls["out_elements"])
    return elements * calls["dtype"].astype(str).map(sizes).astype("int64")


def _bodies(capture: Capture) -> pd.Series:
    """How often the body was seen, by rank; 0 without a period."""
    structure = capture.structure
    if not structure["period"]:
        return capture.ranks["num_marks"] * 0
    whole = capture.ranks["num_marks"] - structure["prologue_marks"]
    return (whole // structure["period"]).clip(lower=0)


def _parts(capture: Capture, calls: pd.DataFrame) -> np.ndarray:
    """prologue, body or epilogue of each call."""
    begin = capture.structure["prologue_marks"]
    end = begin + calls["rank"].map(_bodies(capture)) * capture.structure["period"]
    mark = calls["mark"]
    return np.where(mark < begin, "prologue", np.where(mark < end, "body", "epilogue"))


def parts(capture: Capture) -> pd.DataFrame:
    """Calls of each role's representative by part.

    Returns:
        One row per role: role, representative, prologue, body (of one
        iteration), repeats (of the body) and epilogue.
    """
    speakers = capture.ranks.drop_duplicates("role")["representative"]
    calls = capture.calls(list(speakers), ["rank", "mark"])
    counted = pd.crosstab(calls["rank"], _parts(capture, calls))
    counted = counted.reindex(speakers, fill_value=0)
    counted = counted.reindex(columns=["prologue", "body", "epilogue"], fill_value=0)
    repeats = _bodies(capture).reindex(speakers)
    frame = counted.assign(
        role=capture.ranks.loc[speakers, "role"].to_numpy(),
        representative=speakers.to_numpy(),
        repeats=repeats,
        body=counted["body"] // repeats.clip(lower=1),
    )
    order = ["role", "representative", "prologue", "body", "repeats", "epilogue"]
    return frame[order].reset_index(drop=True)


def unchecked(capture: Capture) -> list[str]:
    """What the capture rests on without having seen it, in sentences."""
    ranks = capture.ranks
    inferred = int((~ranks["is_captured"]).sum())
    checked = int(ranks["is_checked"].sum())
    lines = []
    if inferred:
        chances = [
            f"{k} odd {'rank' if k == '1' else 'ranks'} among them would have stayed unseen with "
            f"a chance of {chance:.1%}"
            for k, chance in capture.structure.get("chance_unseen", {}).items()
        ]
        lines.append(
            f"{inferred} of {len(ranks)} ranks are inferred, {checked} were run to check"
            + "".join(f"; {chance}" for chance in chances)
        )
        by_role = ranks.groupby("role")
        bare = by_role["is_checked"].any() | by_role["is_captured"].all()
        if not bare.all():
            lines.append(
                f"No inferred rank was checked in roles {ranges(bare.index[~bare].to_numpy())}"
            )
    made_up = int(groups(capture)["inferred"].sum())
    if made_up:
        lines.append(f"{made_up} communicators are known by symmetry only")
    invented = int(ranks["num_invented"].sum())
    if invented:
        lines.append(f"{invented} control values had no producer and were invented")
    missing = capture.structure["world_size"] - len(ranks)
    if missing:
        lines.append(f"{missing} ranks of the world are not described at all")
    return lines


def rank_calls(capture: Capture, rank: int) -> tuple[pd.DataFrame, int]:
    """The calls of one rank, or of the one that speaks for it.

    Returns:
        Rows as `list_calls` gives them, and whose they are.

    Raises:
        UserError: Names the legal ranks.
    """
    if rank not in capture.ranks.index:
        raise UserError(
            f"There is no rank {rank} in this capture",
            where=f"File {capture.folder / 'ranks.parquet'}",
            do=f"Legal are {ranges(capture.ranks.index.to_numpy())}",
        )
    row = capture.ranks.loc[rank]
    speaker = rank if row["is_captured"] else int(row["representative"])
    calls = capture.calls([speaker], _CALL_COLUMNS)
    return list_calls(calls.assign(part=_parts(capture, calls)), of_itself=speaker == rank), speaker


def list_calls(calls: pd.DataFrame, *, of_itself: bool = True) -> pd.DataFrame:
    """Calls one by one.

    Args:
        calls: Rows of the `calls` table, perhaps with a column `part`.
        of_itself: False for a rank that another one speaks for: peers are then
            offsets in the group, since the global ranks are the speaker's.

    Returns:
        One row per call: call, mark, part, kind, group, dtype, count, bytes,
        with (root or peer, if any), seq, batch.
    """
    calls = calls.sort_values(["rank", "call"])
    kind = calls["kind"].astype(str)
    reduce_op = calls["reduce_op"].astype(str)
    group = calls["group_desc"].astype(str) + " " + calls["group_signature"].astype(str)
    root, peer = calls["root_rank"].astype(str), calls["peer_rank"].astype(str)
    if not of_itself:
        root = calls["root"].astype(str)
        peer = "me+" + calls["peer_offset"].astype(str) + " in group"
    partner = np.where(
        calls["peer_offset"] >= 0,
        "peer " + peer,
        np.where(calls["root"].astype(str) != "none", "root " + root, ""),
    )
    return pd.DataFrame(
        {
            "rank": calls["rank"],
            "call": calls["call"],
            "mark": calls["mark"],
            "part": calls.get("part", ""),
            "kind": np.where(reduce_op != "", kind + " " + reduce_op, kind),
            "group": group,
            "dtype": calls["dtype"].astype(str),
            "count": calls["count"],
            "bytes": _bytes(calls),
            "with": partner,
            "seq": calls["seq"],
            "batch": np.where(calls["batch"] < 0, "", calls["batch"].astype(str)),
        }
    ).reset_index(drop=True)


def read_calls(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A calls file of `run --record`, and its provenance."""
    table, provenance = tables.CALLS.read(path, columns=_CALL_COLUMNS)
    return table.to_pandas(), provenance
