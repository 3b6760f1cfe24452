"""The same as the engine, in the plainest way: a graph of moments, longest path by networkx.

Every instruction of every lane and iteration is a node whose value is the time
at which the lane goes on; every communication is a node (its last arrival) and,
where it has one, its root's arrival. An edge says "not before that, plus so
much". Slow and short: it is what the engine is compared with.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import networkx as nx

from crystalllm.replay.drawn import Perturbed, duration_ns, run_ns, scaled
from crystalllm.replay.world import End, Instruction, Op, World


@dataclass(frozen=True)
class Event:
    """One call of one rank, in nanoseconds from the start."""

    rank: int
    lane: int
    iteration: int
    call: int
    arrival_ns: int
    start_ns: int
    end_ns: int


class Deadlock(Exception):
    """Nobody can go on: the graph of moments has a circle, or somebody never comes."""


def replay(world: World, num_iterations: int) -> tuple[list[Event], dict[int, list[int]]]:
    """Events of all ranks, and each rank's marks, over so many bodies."""
    graph = nx.DiGraph()
    # Edge (a, b, ns): b is at least a + ns. A node's value is the largest of these.
    edge = _edges(graph)
    calls: list[tuple[Any, ...]] = []
    meetings: dict[tuple[int, int], list[Any]] = defaultdict(list)
    marks: dict[int, list[Any]] = {r: [] for r in range(len(world.ranks))}
    for r, rank in enumerate(world.ranks):
        counts: dict[int, int] = defaultdict(int)
        channels: dict[tuple[int, str], list[Any]] = defaultdict(list)
        lanes = world.programs[rank.program].lanes
        # Sequence numbers belong to slots, and no slot is used by two lanes.
        first = 0
        for number, lane in enumerate(lanes):
            handles: dict[int, Any] = {}
            before: Any = "start"
            graph.add_node(before)
            offset = 0
            for iteration, section in lane.sections(num_iterations):
                base = first + {0: 0}.get(iteration, len(lane.prologue))
                if iteration > num_iterations:
                    base += len(lane.body)
                for position, i in enumerate(section):
                    here = (r, number, offset)
                    offset += 1
                    edge(before, here, 0)
                    if i.op == Op.RUN:
                        where = (iteration << 32) | (base + position)
                        edge(before, here, run_ns(world, r, i, where))
                        graph.nodes[here]["run"] = (before, r, number, iteration)
                    elif i.op in (Op.POST, Op.COMM):
                        comm, seq = rank.connections[i.slot], counts[i.slot]
                        counts[i.slot] += 1
                        call = (r, number, iteration, i, before, comm, seq)
                        calls.append(call)
                        meetings[comm, seq].append(call)
                        end = ("end", r, number, here)
                        _end_edges(edge, world, call, end)
                        if i.op == Op.COMM:
                            edge(end, here, 0)
                        else:
                            handles[i.handle] = end
                        calls[-1] = (*call, end)
                    elif i.op == Op.WAIT and i.handle in handles:
                        edge(handles.pop(i.handle), here, 0)
                    elif i.op in (Op.SIGNAL, Op.AWAIT):
                        channels[i.slot, i.op.name].append(here)
                    elif i.op == Op.MARK:
                        marks[r].append(here)
                    before = here
            first += len(lane.prologue) + len(lane.body) + len(lane.epilogue)
        for (slot, kind), awaits in list(channels.items()):
            if kind == "AWAIT":
                signals = channels[slot, "SIGNAL"]
                if len(signals) < len(awaits):
                    raise Deadlock("a lane waits for a signal that never comes")
                for signal, wait in zip(signals, awaits, strict=False):
                    edge(signal, wait, 0)
    _meet(world, meetings, edge)
    if not nx.is_directed_acyclic_graph(graph):
        raise Deadlock("circle")
    at = _longest(graph, Perturbed(world, num_iterations))
    events = [
        Event(r, lane, iteration, i.call, at[before], _start(at, before, i, comm, seq), at[end])
        for r, lane, iteration, i, before, comm, seq, end in calls
    ]
    return events, {r: [at[m] for m in nodes] for r, nodes in marks.items()}


def _edges(graph: nx.DiGraph) -> Any:
    def edge(a: Any, b: Any, ns: int) -> None:
        if graph.has_edge(a, b):
            ns = max(ns, graph[a][b]["ns"])
        graph.add_edge(a, b, ns=ns)

    return edge


def _end_edges(edge: Any, world: World, call: tuple[Any, ...], end: Any) -> None:
    """When the call ends, by its rule."""
    _, _, _, i, before, comm, seq = call
    transfer = transfer_ns(world, i, comm, seq)
    if i.end == End.ALL:
        edge(("all", comm, seq), end, 0)  # the transfer is added where all have met
    elif i.end == End.SELF:
        edge(before, end, transfer)
    elif i.end == End.ROOT:
        edge(before, end, transfer)
        edge(("root", comm, seq), end, transfer)
    else:
        drain = world.durations.drain_ns[i.cls] if world.durations.drain_ns else 0
        edge(before, end, drain)
        edge(("root", comm, seq), end, transfer + drain)


def _meet(world: World, meetings: dict[tuple[int, int], list[Any]], edge: Any) -> None:
    for (comm, seq), participants in meetings.items():
        if len(participants) != world.communicators[comm]:
            raise Deadlock(f"not everybody comes to communicator {comm}, number {seq}")
        if len({c[3].form for c in participants}) > 1:
            raise Deadlock(f"calls of communicator {comm}, number {seq} do not fit together")
        all_end = [c for c in participants if c[3].end == End.ALL]
        transfer = max((transfer_ns(world, c[3], comm, seq) for c in all_end), default=0)
        roots = [c for c in participants if c[3].is_root]
        if not roots and any(c[3].end in (End.ROOT, End.AFTER_DATA) for c in participants):
            raise Deadlock(f"the root of communicator {comm}, number {seq} never comes")
        for c in participants:
            edge(c[4], ("last", comm, seq), 0)
        if all_end:
            edge(("last", comm, seq), ("all", comm, seq), transfer)
        for c in roots:
            edge(c[4], ("root", comm, seq), 0)


def _longest(graph: nx.DiGraph, perturbed: Perturbed) -> dict[Any, int]:
    at: dict[Any, int] = {}
    for node in nx.topological_sort(graph):
        at[node] = max((at[a] + d["ns"] for a, _, d in graph.in_edges(node, data=True)), default=0)
        if run := graph.nodes[node].get("run"):
            before, *where = run
            at[node] = at[before] + perturbed.run_ns(at[before], at[node] - at[before], *where)
    return at


def _start(at: dict[Any, int], before: Any, i: Instruction, comm: int, seq: int) -> int:
    if i.end == End.ALL:
        return at["last", comm, seq]
    if i.end == End.SELF:
        return at[before]
    root = at["root", comm, seq]
    return root if i.end == End.AFTER_DATA else max(at[before], root)


def transfer_ns(world: World, i: Instruction, comm: int, seq: int) -> int:
    """Of one call's class in one communication."""
    d = world.durations
    ns = duration_ns(world, i.cls, comm | (1 << 40), seq)
    return scaled(ns, d.link_factors[comm]) if d.link_factors else ns
