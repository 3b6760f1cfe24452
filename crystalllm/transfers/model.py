"""Transfer times from first principles: steps, latencies and bandwidths of NCCL's algorithms.

Every algorithm takes a latency (a fixed part and one for each step over a link
class) and the bytes of its busiest link over that link's bandwidth. As NCCL does
(`ncclTopoGetAlgoTime`), the algorithm and protocol with the least time is taken.

What each rank sends of an array of S bytes, n ranks, N nodes, p = n/N ranks per node:

- ring: all_reduce 2(n-1) steps and 2(n-1)/n S; all_gather and reduce_scatter half of
  both; 2(N-1) or N-1 of the steps are between nodes, where the p adapters of a node
  share the traffic. A broadcast or reduce is a chain of n-1 steps that carries S.
- tree (all_reduce): up and down, 2(p-1) steps in the node and 2 log2 N between nodes;
  2 S within a node, between nodes S for two nodes and 2 S for more (a node of the double
  binary tree has two children in one of the trees).
- NVLS (all_reduce where switches reduce): S (p+1)/p within a node in a fixed time; between
  nodes as the tree.
- PAT (all_gather, reduce_scatter with one rank per node): log2 N steps.
- all_to_all, gather, scatter: messages to all peers at a time, over both link classes.
- send, recv: one step.

Sources: NCCL, src/graph/tuning.cc (constants marked below); P. Sanders, J. Speck,
J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
(2009); NCCL's documentation for PAT and NVLS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from crystalllm.config import Cluster, Link
from crystalllm.errors import UserError
from crystalllm.placement import Placement

# NCCL's protocols: LL sends a flag with every 4 bytes, LL128 with every 120, Simple
# synchronises by chunks. Share of a link's payload that they reach (tuning.cc).
_SHARE = {"LL": 0.25, "LL128": 0.92, "Simple": 1.0}
# What a step takes beyond the latency of its link (tuning.cc, hwLatencies, Ring; what
# NVLINK and NET have over their LL).
_STEP_S = {
    "node": {"LL": 0.0, "LL128": 1.3e-6, "Simple": 2.8e-6},
    "cluster": {"LL": 0.0, "LL128": 1.3e-6, "Simple": 11.3e-6},
}
# Fixed part by protocol (tuning.cc, baseLatencies, Ring); of NVLS (hwLatencies, NVLINK,
# NVLS) and of PAT (baseLatencies), which know Simple only.
_BASE_S = {"LL": 6.6e-6, "LL128": 14.0e-6, "Simple": 8.4e-6}
_NVLS_S = 23e-6
_PAT_S = 8e-6
# PAT: a step takes less than one of a ring, and there is a part for each rank (tuning.cc).
_PAT_STEP_SHARE = 1 / 3.5
_PAT_RANK_S = 2.8e-6
_PAT_SHARE = 0.75
# Trees lose a little to branching; NVLS reaches so much of NVLink (tuning.cc, nvlsEfficiency).
_TREE_SHARE = 0.92
_NVLS_SHARE = 0.85
# Posting to a network adapter (tuning.cc, getNetOverhead; three times in Simple).
_POST_S = {"LL": 1e-6, "LL128": 1e-6, "Simple": 3e-6}


@dataclass(frozen=True)
class Estimate:
    """Time of a transfer by its fastest algorithm.

    Args:
        seconds: From the last arrival to the end.
        algorithm: ring, tree, nvls, nvls_tree, pat, chain, pairwise or message.
        protocol: LL, LL128 or Simple.
        latency_s: The part that does not depend on the bytes.
        links: Names of the link classes that it uses.
    """

    seconds: float
    algorithm: str
    protocol: str
    latency_s: float
    links: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.algorithm}/{self.protocol} over {' and '.join(self.links)}, "
            f"{self.latency_s * 1e6:.1f} µs of latency"
        )


def estimate(kind: str, num_bytes: int, placement: Placement, cluster: Cluster) -> Estimate:
    """The time of one transfer.

    Args:
        kind: As in `calls`.
        num_bytes: By the convention of `sizes`.
        placement: Of the group; of sender and receiver for a message.
        cluster: Whose links carry it.

    Raises:
        UserError: The group spans nodes, and the cluster has no links between them.
    """
    if placement.ranks == 1:
        return Estimate(0.0, "none", "", 0.0, ("nothing, for a group of one",))
    links = _Links(cluster, placement)
    return min(_ALGORITHMS[kind](num_bytes, links), key=lambda e: e.seconds)


class _Links:
    """The links of a group, and how it lies on them."""

    def __init__(self, cluster: Cluster, placement: Placement) -> None:
        self.ranks, self.nodes = placement.ranks, placement.nodes
        self.per_node = placement.ranks / placement.nodes
        # Only those over which the group sends.
        self.used: dict[str, Link] = {}
        names = []
        for scope, is_used in (("node", self.per_node > 1), ("cluster", self.nodes > 1)):
            if not is_used:
                continue
            found = cluster.link(scope)
            if found is None:
                raise UserError(
                    f"The cluster has no links of scope {scope}",
                    where=f"A group of {self.ranks} ranks on {self.nodes} nodes",
                    do="Add one to the cluster's file",
                )
            names.append(found[0])
            self.used[scope] = found[1]
        self.names = tuple(names)

    def rate(self, scope: str) -> float:
        """Payload bytes per second of one GPU; endless where the group does not use the link."""
        if scope not in self.used:
            return math.inf
        link = self.used[scope]
        return link.bandwidth_bytes_per_s * link.efficiency

    @property
    def node_rate(self) -> float:
        """Of all adapters of a node that the group uses."""
        return self.per_node * self.rate("cluster")

    def steps_s(self, within: float, between: float, protocol: str) -> float:
        """Latency of so many steps within nodes and between them."""
        return sum(
            number * (self.used[scope].latency_s + _STEP_S[scope][protocol])
            for scope, number in (("node", within), ("cluster", between))
            if number
        )

    @property
    def depth(self) -> int:
        """Levels of a binary tree over the nodes."""
        return math.ceil(math.log2(self.nodes))

    @property
    def has_nvls(self) -> bool:
        return "node" in self.used and self.used["node"].reduces_in_switch


def _found(
    algorithm: str, protocol: str, latency_s: float, transfer_s: float, links: _Links
) -> Estimate:
    return Estimate(latency_s + transfer_s, algorithm, protocol, latency_s, links.names)


def _pipelined(transfer_s: float, num_steps: float, steps_s: float) -> float:
    """Time beyond the latency of a transfer that goes through a pipeline, chunk by chunk.

    m chunks of t/m take k + m - 1 times what a step and a chunk take; with the best m that
    is 2 sqrt(t k s) more than t and the latency k s of the steps. One chunk takes k t.

    Args:
        transfer_s: t, the time of all bytes on the busiest link.
        num_steps: k.
        steps_s: k s, the latency of all steps.
    """
    return min(transfer_s + 2 * math.sqrt(steps_s * transfer_s), max(1, num_steps) * transfer_s)


def _one_step_s(links: _Links, protocol: str) -> float:
    """Over the slower of the links."""
    return links.steps_s(0, 1, protocol) if links.nodes > 1 else links.steps_s(1, 0, protocol)


def _streamed(transfer_s: float, links: _Links, protocol: str) -> float:
    """Of chunks that go over a link one after another: a pipeline of sending and receiving.

    Each takes a step on NVLink; to an adapter it is only posted, and many are on their way.
    """
    chunk = _POST_S[protocol] if links.nodes > 1 else links.steps_s(1, 0, protocol)
    return _pipelined(transfer_s, 2, chunk)


def _ring(num_bytes: int, links: _Links, *, rounds: int) -> Iterator[Estimate]:
    """Of one round (all_gather, reduce_scatter) or two (all_reduce)."""
    within = rounds * (links.ranks - links.nodes)
    between = rounds * (links.nodes - 1)
    rate = min(links.rate("node"), links.node_rate)
    sent = rounds * (links.ranks - 1) / links.ranks * num_bytes
    for protocol, share in _SHARE.items():
        latency = _BASE_S[protocol] + links.steps_s(within, between, protocol)
        transfer = _streamed(sent / (rate * share), links, protocol)
        yield _found("ring", protocol, latency, transfer, links)


def _between_nodes_s(num_bytes: int, links: _Links) -> float:
    """What a node's adapters take for their part of a tree over the nodes."""
    return (1 if links.nodes == 2 else 2) * num_bytes / links.node_rate


def _all_reduce(num_bytes: int, links: _Links) -> Iterator[Estimate]:
    yield from _ring(num_bytes, links, rounds=2)
    between = _between_nodes_s(num_bytes, links)
    busiest = max(2 * num_bytes / (links.rate("node") * _TREE_SHARE), between)
    up, across = links.per_node - 1, links.depth
    for protocol, share in _SHARE.items():
        steps = links.steps_s(2 * up, 2 * across, protocol)
        transfer = _pipelined(busiest / share, 2 * (up + across), steps)
        yield _found("tree", protocol, _BASE_S[protocol] + steps, transfer, links)
    if links.has_nvls:
        # A GPU's part is added up in the switch, and the sum comes back: S and S/p each way.
        sent = (links.per_node + 1) / links.per_node * num_bytes
        busiest = max(sent / (links.rate("node") * _NVLS_SHARE), between)
        steps = links.steps_s(0, 2 * across, "Simple")
        transfer = _pipelined(busiest, 2 + 2 * across, links.steps_s(1, 2 * across, "Simple"))
        name = "nvls" if links.nodes == 1 else "nvls_tree"
        yield _found(name, "Simple", _NVLS_S + steps, transfer, links)


def _gathering(num_bytes: int, links: _Links) -> Iterator[Estimate]:
    """all_gather and reduce_scatter."""
    yield from _ring(num_bytes, links, rounds=1)
    if links.per_node == 1:
        step = links.steps_s(0, 1, "Simple") * _PAT_STEP_SHARE
        latency = _PAT_S + links.depth * step + links.ranks * _PAT_RANK_S
        sent = (links.ranks - 1) / links.ranks * num_bytes
        transfer = _streamed(sent / (links.node_rate * _PAT_SHARE), links, "Simple")
        yield _found("pat", "Simple", latency, transfer, links)


def _chain(num_bytes: int, links: _Links) -> Iterator[Estimate]:
    """broadcast and reduce."""
    within, between = links.ranks - links.nodes, links.nodes - 1
    rate = min(links.rate("node"), links.node_rate)
    for protocol, share in _SHARE.items():
        steps = links.steps_s(within, between, protocol)
        transfer = _pipelined(num_bytes / (rate * share), within + between, steps)
        yield _found("chain", protocol, _BASE_S[protocol] + steps, transfer, links)


def _pairwise(num_bytes: int, links: _Links) -> Iterator[Estimate]:
    """all_to_all, and gather and scatter as their root sees them."""
    per_peer = num_bytes / links.ranks
    within = (links.per_node - 1) * per_peer / links.rate("node")
    num_far = links.ranks - links.per_node
    between = num_far * per_peer / links.rate("cluster")
    for protocol in ("LL", "Simple"):
        latency = _BASE_S[protocol] + _one_step_s(links, protocol) + num_far * _POST_S["LL"]
        transfer = _streamed(max(within, between) / _SHARE[protocol], links, protocol)
        yield _found("pairwise", protocol, latency, transfer, links)


def _message(num_bytes: int, links: _Links) -> Iterator[Estimate]:
    """send and recv."""
    rate = links.rate("node" if links.nodes == 1 else "cluster")
    for protocol in ("LL", "Simple"):
        latency = _BASE_S[protocol] + _one_step_s(links, protocol)
        transfer = _streamed(num_bytes / (rate * _SHARE[protocol]), links, protocol)
        yield _found("message", protocol, latency, transfer, links)


_ALGORITHMS = {
    "all_reduce": _all_reduce,
    "barrier": _all_reduce,
    "all_gather": _gathering,
    "reduce_scatter": _gathering,
    "broadcast": _chain,
    "reduce": _chain,
    "all_to_all": _pairwise,
    "gather": _pairwise,
    "scatter": _pairwise,
    "send": _message,
    "recv": _message,
}
