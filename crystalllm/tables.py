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
    4,
    "how long one segment of computation, or one kind of transfer, takes",
    (
        Column("kind", TEXT, "segment or transfer"),
        Column("role", pa.int32(), "of a segment, else -1"),
        Column("lane", TEXT, "of a segment, else empty"),
        Column("section", TEXT, "of a segment: prologue, body or epilogue; else empty"),
        Column("position", pa.int64(), "of a segment among those of lane and section; else -1"),
        Column("key", TEXT, "call record of a transfer as text, else empty"),
        Column(
            "placement",
            TEXT,
            "of a transfer: ranks x nodes that its group spans, such as 16x2; empty for any",
        ),
        Column("median_ns", pa.int64(), "the duration"),
        Column("low_ns", pa.int64(), "first decile of the measurements; -1 if unknown"),
        Column("high_ns", pa.int64(), "last decile of the measurements; -1 if unknown"),
        Column("sigma", pa.float64(), "of a lognormal around it; 0 if constant or unknown"),
        Column("count", pa.int64(), "measurements that it rests on"),
        Column("cpu_ns", pa.int64(), "of a transfer: what it takes of the core after its call"),
        Column("call_ns", pa.int64(), "of a transfer: time until its call returns to the program"),
        Column("parts_ns", pa.list_(pa.int64()), "of a transfer: what may be drawn; else empty"),
        Column("source", TEXT, "measured, captured, table, model or given"),
        Column("assumptions", TEXT, "what the duration rests on besides, else empty"),
    ),
)

MEASURED_TRANSFERS = Table(
    "measured_transfers",
    4,
    "how long transfers of one kind and size took between processes of one host",
    (
        Column("kind", TEXT, "as in calls"),
        Column("dtype", TEXT, "element type in torch's spelling; empty for a barrier"),
        Column("ranks", pa.int32(), "processes that took part"),
        Column("bytes", pa.int64(), "as nccl-tests counts them"),
        Column("count", pa.int64(), "repetitions"),
        Column("mean_ns", pa.int64(), "from the last arrival to the end"),
        Column("median_ns", pa.int64(), "of the same"),
        Column("low_ns", pa.int64(), "first decile"),
        Column("high_ns", pa.int64(), "last decile"),
        Column("cpu_ns", pa.int64(), "mean time that other threads take from the program after it"),
        Column("call_ns", pa.int64(), "mean time until the call returns to the program"),
        Column("parts_ns", pa.list_(pa.int64()), "means of equal parts of them, ascending"),
    ),
)

SEGMENTS = Table(
    "segments",
    2,
    "one segment of computation of a rank that ran: between two events of a lane",
    (
        _RANK,
        Column("role", pa.int32(), "of the rank"),
        Column("iteration", pa.int32(), "0 is the prologue, k the k-th body, then the epilogue"),
        Column("lane", TEXT, "host:N, a host thread by order of first use; stream:N on a GPU"),
        Column("section", TEXT, "prologue, body or epilogue"),
        Column("position", pa.int64(), "among the segments of lane, section and iteration"),
        Column("start_ns", pa.int64(), "from the start of the replay"),
        Column("duration_ns", pa.int64(), "how long it took"),
        Column("call_ns", pa.int64(), "time inside the calls right before it; 0 after a wait"),
    ),
)

SLICES = Table(
    "slices",
    2,
    "one segment of computation of a sandbox rank in a slice of planning",
    (
        Column("pass", pa.int32(), "of planning, from 1"),
        Column("slice", pa.int32(), "in the plan, from 1"),
        *SEGMENTS.columns,
        Column("is_measured", pa.bool_(), "counts for the profile; else it was a warm-up"),
        Column(
            "calibrated_ns",
            pa.int64(),
            "duration and calls before it, at the usual speed of the first pass (planning.json has "
            "factors)",
        ),
    ),
)

COMMUNICATION = Table(
    "communication",
    1,
    "one communication call of a rank that ran",
    (
        _RANK,
        Column("iteration", pa.int32(), "0 is the prologue, k the k-th body, then the epilogue"),
        Column("call", pa.int64(), "ordinal among the rank's calls, from 0"),
        Column("captured_call", pa.int64(), "ordinal of the same call in the capture of its role"),
        Column("lane", TEXT, "host:N or stream:N, as in events"),
        Column("kind", TEXT, "as in calls"),
        Column("key", TEXT, "call record as text"),
        Column("group_identity", TEXT, "digest of the members # creation index"),
        Column("group_desc", TEXT, "what the program calls it"),
        Column("group_size", pa.int32(), "members of the group"),
        Column("bytes", pa.int64(), "put into the call, or got out of it if nothing is put in"),
        Column("transport", TEXT, "timed, mixed (some peers real) or real (all of them)"),
        Column("arrival_ns", pa.int64(), "when the rank came, from the start of the replay"),
        Column("start_ns", pa.int64(), "when the transfer began; -1 if not known"),
        Column("release_ns", pa.int64(), "when the call was due to end; -1 if not known"),
        Column("transfer_ns", pa.int64(), "how long the transfer took; -1 if not known"),
        Column("waited_ns", pa.int64(), "how long the program waited for it; -1 if it never did"),
        Column("end_ns", pa.int64(), "when the program went on after the wait; -1 without one"),
        Column("lateness_ns", pa.int64(), "how long after the release the waiting program went on"),
    ),
)

MEMORY = Table(
    "memory",
    1,
    "one change of the memory that a rank's tensors take: a block taken, or given back",
    (
        _RANK,
        Column("event", pa.int64(), "ordinal among the changes, from 0"),
        Column("iteration", pa.int32(), "0 is the prologue, k the k-th body, then the epilogue"),
        Column("at_ns", pa.int64(), "from the run's start"),
        Column("block", pa.int64(), "which block: ordinal among those that were taken"),
        Column(
            "category",
            TEXT,
            "of the block: parameters, gradients, optimizer, activations, communication or other",
        ),
        Column(
            "phase",
            TEXT,
            "in which it was taken: forward, backward, optimizer, communication or other",
        ),
        Column("by_library", pa.bool_(), "taken by the communication library, not the program"),
        Column("bytes", pa.int64(), "above zero when it is taken, below when it is given back"),
        Column("total_bytes", pa.int64(), "what is held after the change"),
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

ANOMALIES = Table(
    "anomalies",
    1,
    "one rank's part in one deviation of a run from its baseline",
    (
        Column("finding", pa.int32(), "ordinal of the deviation, from 0 for the most important"),
        _RANK,
        Column("what", TEXT, "segment, transfer, or speed (of everything that the rank computes)"),
        Column("against", TEXT, "baseline, peers (the rank's role in the same run) or both"),
        Column("role", pa.int32(), "of the rank"),
        Column("lane", TEXT, "of segments; host: or stream: for all of these"),
        Column("position", pa.int64(), "of the (first) segment in the body, else -1"),
        Column("positions", pa.list_(pa.int64()), "of all its segments"),
        Column("key", TEXT, "call record of a transfer as text, else empty"),
        Column("group_identity", TEXT, "of a transfer, else empty"),
        Column("place", TEXT, "the calls between which a segment lies, for people"),
        Column("measured_ns", pa.int64(), "median, at the baseline's speed"),
        Column("baseline_ns", pa.int64(), "median there"),
        Column("ratio", pa.float64(), "measured over baseline, at the baseline's speed"),
        Column("ratio_low", pa.float64(), "begin of its interval at 95 %"),
        Column("ratio_high", pa.float64(), "end of its interval at 95 %"),
        Column("peers_ratio", pa.float64(), "measured over peers; 0 with fewer than two"),
        Column("p", pa.float64(), "chance of such a ratio or a larger one without a cause"),
        Column("direct_ns", pa.int64(), "what it adds to the rank's own time in an iteration"),
        Column("has_effect", pa.bool_(), "the world was replayed with the deviation"),
        Column(
            "effect_ns", pa.int64(), "what all ranks' parts added to its iteration then, else 0"
        ),
        Column("absorbed_ns", pa.int64(), "of the largest part, what waiting absorbed, else 0"),
    ),
)

ALL = (
    ANOMALIES,
    DURATIONS,
    MEASURED_TRANSFERS,
    SEGMENTS,
    SLICES,
    COMMUNICATION,
    MEMORY,
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
