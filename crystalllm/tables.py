"""Every table that CrystalLLM writes: columns, types, units, version.

Writers and readers go through here, so that a table is described once. The
unit is part of a column's name (`_ns`, `_bytes`); ranks are global ranks
unless the name says otherwise. Provenance rides in the Parquet metadata.
Identical content gives identical bytes: host and time of the run are columns
of tables of their own, never metadata.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from crystalllm.table import TEXT, Column, Table, name_in

_RANK = Column("rank", pa.int32(), "global rank")

CALLS = Table(
    "calls",
    2,
    "one communication call of one rank, in the order of the rank's calls",
    (
        _RANK,
        Column("call", pa.int64(), "ordinal among the rank's calls, from 0"),
        Column("key", TEXT, "the call record as text: equal for calls equal in structure"),
        Column(
            "kind",
            TEXT,
            "all_reduce, reduce, broadcast, all_gather, reduce_scatter, "
            "all_to_all, gather, scatter, send, recv or barrier",
        ),
        Column("reduce_op", TEXT, "sum, avg, …; empty where nothing is reduced"),
        Column("dtype", TEXT, "element type in torch's spelling; empty for a barrier"),
        Column("count", pa.int64(), "elements by NCCL's convention; -1 with explicit splits"),
        Column("group", pa.int32(), "the rank's group by order of creation"),
        Column("group_identity", TEXT, "digest of the members # creation index"),
        Column("group_signature", TEXT, "size:stride per axis, innermost first"),
        Column("group_size", pa.int32(), "members of the group"),
        Column("group_desc", TEXT, "what the program calls it"),
        Column("root", TEXT, "none, me or other"),
        Column("root_rank", pa.int32(), "-1 where there is no root"),
        Column("peer_offset", pa.int32(), "(peer - me) modulo group size; -1 without a peer"),
        Column("peer_wraps", pa.bool_(), "the step to the peer passes the end of the group"),
        Column("peer_rank", pa.int32(), "-1 without a peer"),
        Column("any_source", pa.bool_(), "received from any source; peer_rank is who it was"),
        Column("tag", pa.int32(), "of a point-to-point call"),
        Column(
            "batch", pa.int64(), "ordinal of the batch; calls coalesced into one share it; -1 alone"
        ),
        Column("stream", pa.int64(), "CUDA stream, or host thread by order of first call"),
        Column("seq", pa.int64(), "ordinal in the group, or in the pair for send and recv"),
        Column("mark", pa.int64(), "iteration marks before the call"),
        Column("seq_in_mark", pa.int64(), "as seq, from the last mark"),
        Column("in_elements", pa.int64(), "elements that the rank puts in"),
        Column("out_elements", pa.int64(), "elements that the rank gets out"),
        Column("in_splits", pa.list_(pa.int64()), "explicit split sizes; empty if equal"),
        Column("out_splits", pa.list_(pa.int64()), "explicit split sizes; empty if equal"),
        Column(
            "is_async", pa.bool_(), "the program asked for a handle; always true for send and recv"
        ),
    ),
)

CALL_TIMES = Table(
    "call_times",
    2,
    "when one call of one rank happened, on the clock of its host",
    (
        _RANK,
        Column("call", pa.int64(), "ordinal among the rank's calls, from 0"),
        Column("arrival_ns", pa.int64(), "CLOCK_MONOTONIC when the call was made"),
        Column("release_ns", pa.int64(), "CLOCK_MONOTONIC when it was due to end"),
    ),
)

EVENTS = Table(
    "events",
    1,
    "one event of one captured rank, in the order in which the rank's events began",
    (
        _RANK,
        Column("event", pa.int64(), "ordinal among the rank's events, from 0"),
        Column("lane", TEXT, "host:N, a host thread by order of first use; stream:N on a GPU"),
        Column(
            "kind", TEXT, "COMP, COMM_COLL, COMM_SEND, COMM_RECV, RECORD, WAIT, SYNC, ALLOC or FREE"
        ),
        Column("name", TEXT, "kernel or operator; the kind of call for communication; else empty"),
        Column("mark", pa.int64(), "iteration marks before the event"),
        Column("call", pa.int64(), "the call that it is or that it waits for; -1 without one"),
        Column(
            "after",
            pa.int64(),
            "event of the same rank on another lane that ends before this one begins (launch, "
            "record) or, for a WAIT, ends; -1 without one",
        ),
        Column(
            "bytes", pa.int64(), "put into a call (got out of it if nothing is put in), or memory"
        ),
    ),
)

EVENT_TIMES = Table(
    "event_times",
    1,
    "when one event of one captured rank happened, on the clock of its host",
    (
        _RANK,
        Column("event", pa.int64(), "ordinal among the rank's events, from 0"),
        Column("start_ns", pa.int64(), "when it began"),
        Column("duration_ns", pa.int64(), "how long it took, waiting for others included"),
    ),
)

PAYLOADS = Table(
    "payloads",
    2,
    "what one rank contributed to one call, or set in the store",
    (
        Column("group", TEXT, "identity of the group; empty for a store key"),
        Column("seq", pa.int64(), "ordinal in the group, or in the ordered pair for a send"),
        Column("rank", pa.int32(), "who contributed it"),
        Column("peer", pa.int32(), "who it was sent to; -1 in a collective"),
        Column("dtype", TEXT, "element type in torch's spelling"),
        Column("splits", pa.list_(pa.int64()), "elements per peer of an uneven all_to_all"),
        Column("store_key", TEXT, "key in the rendezvous store, else empty"),
        Column(
            "body_end", pa.int64(), "first call of the group or pair after the repeated iterations"
        ),
        Column("per_period", pa.int64(), "calls of the group or pair in one period; 0 if unknown"),
        Column("value", pa.binary(), "the bytes"),
    ),
)

RANKS = Table(
    "ranks",
    2,
    "one rank of the world, captured or inferred",
    (
        _RANK,
        Column("node", pa.int32(), "logical node"),
        Column(
            "coordinates",
            pa.map_(pa.string(), pa.int32()),
            "place on each axis of the layout, outermost axis first",
        ),
        Column("role", pa.int32(), "ranks of one role make equal calls; by lowest rank, from 0"),
        Column("is_captured", pa.bool_(), "ran itself; else it is inferred"),
        Column("is_checked", pa.bool_(), "ran to check what had been inferred of it"),
        Column("representative", pa.int32(), "captured rank of the role that speaks for it"),
        Column("num_calls", pa.int64(), "communication calls"),
        Column("num_marks", pa.int64(), "iteration marks"),
        Column("num_invented", pa.int64(), "control values without a producer"),
        Column("keys_digest", pa.string(), "equal for ranks whose call records are equal"),
    ),
)

GROUPS = Table(
    "groups",
    2,
    "one communicator",
    (
        Column("identity", pa.string(), "digest of the members # creation index"),
        Column("creation", pa.int32(), "groups with the same members that were made before it"),
        Column("backend", TEXT, "gloo or nccl"),
        Column("signature", TEXT, "size:stride per axis, innermost first"),
        Column("description", TEXT, "what the program calls it"),
        Column("is_inferred", pa.bool_(), "no captured rank made it: known by symmetry"),
        Column("members", pa.list_(pa.int32()), "global ranks in group order"),
    ),
)

NODES = Table(
    "nodes",
    1,
    "one node of the execution graph: an event of a captured rank, or a matched communication",
    (
        Column("node", pa.int64(), "ordinal, from 0"),
        Column("rank", pa.int32(), "whose event it is; -1 for a communication"),
        Column("event", pa.int64(), "ordinal among the rank's events; -1 for a communication"),
        Column("kind", TEXT, "as in events; MATCH for a communication"),
        Column("group_identity", TEXT, "of a communication, else empty"),
        Column("seq", pa.int64(), "of a communication in its group or pair, else -1"),
        Column("source", pa.int32(), "sender of a message, else -1"),
        Column("target", pa.int32(), "receiver of a message, else -1"),
        Column("num_participants", pa.int32(), "ranks that take part in a communication, else 1"),
    ),
)

EDGES = Table(
    "edges",
    1,
    "one dependency of the execution graph",
    (
        Column("source", pa.int64(), "node that comes first"),
        Column("target", pa.int64(), "node that depends on it"),
        Column(
            "kind",
            TEXT,
            "program (order on a lane), launch (host to stream), record (event to wait), wait "
            "(call to the wait for it), enter (call to its communication), leave (communication, "
            "or the root's call where only that is waited for, to the wait that it ends)",
        ),
    ),
)

SPLITS = Table(
    "splits",
    1,
    "how often one split size occurred in one call of the period, over ranks and iterations",
    (
        Column("role", pa.int32(), "of the ranks"),
        Column("call_in_period", pa.int64(), "ordinal of the call in the body, from 0"),
        Column("key", TEXT, "the call record as text"),
        Column("slot", pa.int32(), "group rank of the peer"),
        Column("direction", TEXT, "in (sent to the peer) or out (received from it)"),
        Column("elements", pa.int64(), "the split size"),
        Column("count", pa.int64(), "occurrences"),
    ),
)

DURATIONS = Table(
    "durations",
    1,
    "how long one segment of computation, or one kind of transfer, takes",
    (
        Column("kind", TEXT, "segment or transfer"),
        Column("role", pa.int32(), "of a segment, else -1"),
        Column("lane", TEXT, "of a segment, else empty"),
        Column("section", TEXT, "of a segment: prologue, body or epilogue; else empty"),
        Column("position", pa.int64(), "of a segment among those of lane and section; else -1"),
        Column("key", TEXT, "call record of a transfer as text, else empty"),
        Column("median_ns", pa.int64(), "the duration"),
        Column("sigma", pa.float64(), "of a lognormal around it; 0 if constant or unknown"),
        Column("count", pa.int64(), "measurements that it rests on"),
        Column("source", TEXT, "measured, captured, table, model or given"),
    ),
)

REPLAYED_CALLS = Table(
    "replayed_calls",
    1,
    "one call of one rank in a replay",
    (
        _RANK,
        Column("iteration", pa.int32(), "0 is the prologue, k the k-th body, then the epilogue"),
        Column("lane", pa.int32(), "ordinal among the rank's lanes"),
        Column("call", pa.int32(), "ordinal of the call in the capture of the rank's role"),
        Column("kind", TEXT, "as in calls"),
        Column("key", TEXT, "call record as text"),
        Column("arrival_ns", pa.int64(), "when the rank came, from the start of the replay"),
        Column("start_ns", pa.int64(), "when the transfer began"),
        Column("end_ns", pa.int64(), "when it ended for the rank"),
    ),
)

ITERATIONS = Table(
    "iterations",
    1,
    "one iteration of one rank in a replay, and where its time went",
    (
        _RANK,
        Column("iteration", pa.int32(), "from 1; 0 is the prologue"),
        Column("end_ns", pa.int64(), "from the start of the replay"),
        Column("duration_ns", pa.int64(), "from the end of the last one; the sum of the parts"),
        Column("compute_ns", pa.int64(), "computation"),
        Column("host_ns", pa.int64(), "waits for another lane of the rank"),
        Column("wait_ns", pa.int64(), "waits for the last participant of a collective"),
        Column("bubble_ns", pa.int64(), "waits for the other side of a message"),
        Column("exposed_ns", pa.int64(), "waits for transfers"),
    ),
)

CRITICAL_PATH = Table(
    "critical_path",
    1,
    "one step of what an iteration had to wait for, from its end back to its begin",
    (
        Column("step", pa.int64(), "ordinal, from 0 at the end"),
        _RANK,
        Column("lane", pa.int32(), "ordinal among the rank's lanes"),
        Column("what", TEXT, "RUN, COMM, WAIT, …"),
        Column("name", TEXT, "segment, or record of the call as text; else empty"),
        Column("start_ns", pa.int64(), "from the start of the replay"),
        Column("end_ns", pa.int64(), "from the start of the replay"),
        Column(
            "slack_ns", pa.int64(), "earlier by so much, something else would bind; -1: nothing"
        ),
    ),
)

ALL = (
    DURATIONS,
    REPLAYED_CALLS,
    ITERATIONS,
    CRITICAL_PATH,
    CALLS,
    CALL_TIMES,
    EVENTS,
    EVENT_TIMES,
    RANKS,
    GROUPS,
    PAYLOADS,
    NODES,
    EDGES,
    SPLITS,
)


def document() -> str:
    """The tables as Markdown; `docs/tables.md` is this text."""
    lines = [
        "# Tables",
        "",
        "Generated from `crystalllm/tables.py` by `python -m crystalllm generate`.",
    ]
    for table in ALL:
        lines += [
            "",
            f"## {table.name} (version {table.version})",
            "",
            f"One row is {table.meaning}.",
            "",
            "| column | type | meaning |",
            "|---|---|---|",
        ]
        lines += [f"| `{c.name}` | {c.type} | {c.meaning} |" for c in table.columns]
    return "\n".join(lines) + "\n"


def table_in(path: Path) -> Table | None:
    """Which table of this version a file holds, by its metadata; None if none of them."""
    name = name_in(path)
    return next((t for t in ALL if f"{t.name}/{t.version}" == name), None)
