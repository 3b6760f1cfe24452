"""The execution graph: events of captured ranks, their order, and where ranks meet.

A communication is one node of its own between the calls that enter it and the
waits that it ends: with n participants that takes 2n edges instead of n².
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import pyarrow as pa

from crystalllm import tables
from crystalllm.rules import Ends, ends

# The node-link JSON is for looking at; larger graphs are read from the tables.
MOST_JSON_NODES = 5000


@dataclass(frozen=True)
class Graph:
    """Nodes and edges with the columns of their tables."""

    nodes: pd.DataFrame
    edges: pd.DataFrame


def build(
    events: pa.Table,
    calls: pa.Table,
    *,
    members: Mapping[str, Sequence[int]],
    eager_bytes: int = 0,
) -> Graph:
    """The graph of all captured ranks.

    Args:
        events: Rows of the `events` table, by rank and then in order.
        calls: Rows of the `calls` table of the same ranks.
        members: Global ranks of each group, by identity.
        eager_bytes: A send of up to so many bytes ends by itself.
    """
    e = events.to_pandas()
    # Memory has no dependencies of its own.
    e = e[~e["kind"].isin(["ALLOC", "FREE"])].reset_index(drop=True)
    c = _meetings(calls.to_pandas(), members)
    e["node"] = np.arange(len(e))
    edges = [_program_edges(e), _after_edges(e)]

    # The communication event of each call, and the waits for it.
    comm = e[e["kind"].str.startswith("COMM")][["rank", "call", "node", "bytes"]]
    c = c.merge(comm, on=["rank", "call"], how="left", validate="one_to_one")
    c["match"] = len(e) + c["meeting"]
    # Who waits for the root only goes on as soon as that one has come, whoever else is late.
    roots = c[c["root"] == "me"].set_index("meeting")["node"]
    c["ends_by"] = c["match"].where(c["needs"] != Ends.ROOT, c["meeting"].map(roots))
    is_eager = (c["kind"] == "send") & (c["bytes"] <= eager_bytes) & (eager_bytes > 0)
    c.loc[(c["needs"] == Ends.SELF) | is_eager, "ends_by"] = np.nan
    edges.append(_edges(c["node"], c["match"], "enter"))
    waits = e[(e["kind"] == "WAIT") & (e["call"] >= 0)][["rank", "call", "node"]]
    waits = _over_batches(waits, c)
    edges.append(_edges(waits["node_call"], waits["node"], "wait"))
    ended = waits[waits["ends_by"].notna()]
    edges.append(_edges(ended["ends_by"], ended["node"], "leave"))

    of_events = pd.DataFrame(
        {
            "node": e["node"],
            "rank": e["rank"],
            "event": e["event"],
            "kind": e["kind"].astype(str),
            "group_identity": "",
            "seq": -1,
            "source": -1,
            "target": -1,
            "num_participants": 1,
        }
    )
    met = c.drop_duplicates("meeting").sort_values("meeting")
    of_matches = pd.DataFrame(
        {
            "node": met["match"],
            "rank": -1,
            "event": -1,
            "kind": "MATCH",
            "group_identity": met["group_identity"].astype(str),
            "seq": met["seq"],
            "source": met["source"],
            "target": met["target"],
            "num_participants": met["participants"],
        }
    )
    joined = pd.concat(edges, ignore_index=True).drop_duplicates()
    joined = joined.sort_values(["target", "source", "kind"], ignore_index=True)
    return Graph(pd.concat([of_events, of_matches], ignore_index=True), joined)


def write(out: Path, graph: Graph, *, provenance: Mapping[str, Any]) -> None:
    """Writes nodes.parquet, edges.parquet and, for small worlds, graph.json."""
    for table, frame in ((tables.NODES, graph.nodes), (tables.EDGES, graph.edges)):
        columns = {c.name: pa.array(frame[c.name]) for c in table.columns}
        table.write(out / f"{table.name}.parquet", columns, provenance=provenance)
    path = out / "graph.json"
    path.unlink(missing_ok=True)
    if len(graph.nodes) <= MOST_JSON_NODES:
        data = nx.node_link_data(to_networkx(graph), edges="edges")
        path.write_text(json.dumps(data, sort_keys=True) + "\n")


def read(folder: Path) -> Graph:
    """Reads what `write` wrote."""
    nodes, _ = tables.NODES.read(folder / "nodes.parquet")
    edges, _ = tables.EDGES.read(folder / "edges.parquet")
    return Graph(nodes.to_pandas(), edges.to_pandas())


def to_networkx(graph: Graph) -> nx.MultiDiGraph:
    """Nodes by number with the table's columns as attributes; edges with their kind."""
    made = nx.MultiDiGraph()
    for row in graph.nodes.to_dict("records"):
        made.add_node(row.pop("node"), **row)
    for row in graph.edges.to_dict("records"):
        made.add_edge(row["source"], row["target"], kind=row["kind"])
    return made


def _meetings(calls: pd.DataFrame, members: Mapping[str, Sequence[int]]) -> pd.DataFrame:
    """The calls with the communication that each takes part in."""
    c = calls[["rank", "call", "kind", "root", "batch", "group_identity", "seq", "peer_rank"]]
    c = c.astype({"kind": str, "root": str, "group_identity": str})
    is_send, is_recv = c["kind"] == "send", c["kind"] == "recv"
    c["source"] = np.where(is_send, c["rank"], np.where(is_recv, c["peer_rank"], -1))
    c["target"] = np.where(is_send, c["peer_rank"], np.where(is_recv, c["rank"], -1))
    keys = ["group_identity", "seq", "source", "target"]
    c["meeting"] = c.groupby(keys, sort=True).ngroup()
    sizes = c["group_identity"].map({identity: len(m) for identity, m in members.items()})
    c["participants"] = np.where(is_send | is_recv, 2, sizes)
    pairs = list(zip(c["kind"], c["root"], strict=True))
    needs = {(kind, root): ends(kind, is_root=root == "me") for kind, root in set(pairs)}
    c["needs"] = [needs[pair] for pair in pairs]
    return c


def _edges(source: Any, target: Any, kind: str) -> pd.DataFrame:
    return pd.DataFrame(
        {"source": np.asarray(source), "target": np.asarray(target), "kind": kind}
    ).astype({"source": np.int64, "target": np.int64})


def _program_edges(e: pd.DataFrame) -> pd.DataFrame:
    """Order on each lane."""
    by_lane = e.sort_values(["rank", "lane", "node"], kind="stable")
    same = (by_lane["rank"].to_numpy()[1:] == by_lane["rank"].to_numpy()[:-1]) & (
        by_lane["lane"].astype(str).to_numpy()[1:] == by_lane["lane"].astype(str).to_numpy()[:-1]
    )
    nodes = by_lane["node"].to_numpy()
    return _edges(nodes[:-1][same], nodes[1:][same], "program")


def _after_edges(e: pd.DataFrame) -> pd.DataFrame:
    """What an event on one lane has to wait for on another; waits for calls are apart."""
    later = e[(e["after"] >= 0) & ~((e["kind"] == "WAIT") & (e["call"] >= 0))]
    before = later.merge(
        e[["rank", "event", "node"]],
        left_on=["rank", "after"],
        right_on=["rank", "event"],
        suffixes=("", "_before"),
    )
    kinds = np.where(before["kind"] == "WAIT", "record", "launch")
    return pd.DataFrame(
        {"source": before["node_before"], "target": before["node"], "kind": kinds}
    ).astype({"source": np.int64, "target": np.int64})


def _over_batches(waits: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Waits with every call that each ends: a wait for one call of a batch is for all."""
    columns = ["rank", "call", "batch", "node", "ends_by"]
    single = waits.merge(calls[columns], on=["rank", "call"], how="inner", suffixes=("", "_call"))
    batched = single[single["batch"] >= 0][["rank", "node", "batch"]].merge(
        calls[columns].rename(columns={"node": "node_call"}), on=["rank", "batch"]
    )
    return pd.concat([single[single["batch"] < 0], batched], ignore_index=True)
