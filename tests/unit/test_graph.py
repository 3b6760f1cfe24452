"""The execution graph of a small captured world."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest

from crystalllm import graph, tables
from crystalllm.capture import capture
from crystalllm.config import Job
from crystalllm.errors import UserError

# Rank 0 hands the broadcast's end on to rank 2, which joins it only then.
PROGRAM = """
import sys, torch, torch.distributed as dist
import crystalllm
dist.init_process_group(sys.argv[1])
rank, world = dist.get_rank(), dist.get_world_size()
x, y = torch.ones(4), torch.ones(4)
for _ in range(4):
    forgotten = dist.all_reduce(torch.ones(9), async_op=True)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % world)]
    ops.append(dist.P2POp(dist.irecv, y, (rank - 1) % world))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if rank == 2:
        dist.recv(x, 0)
    dist.broadcast(x, 1)
    if rank == 0:
        dist.send(x, 2)
    dist.reduce(x, 3)
    dist.barrier()
    crystalllm.step()
"""


class World:
    """Rows of the graph, with what each node is."""

    def __init__(self, folder):
        found = graph.read(folder)
        self.graph = graph.to_networkx(found)
        self.edges = found.edges
        events, _ = tables.EVENTS.read(folder / "events.parquet")
        calls, _ = tables.CALLS.read(folder / "calls.parquet")
        events = events.to_pandas()[["rank", "event", "call"]]
        calls = calls.to_pandas()[["rank", "call", "kind", "root", "batch", "mark"]]
        calls = calls.rename(columns={"kind": "what"})
        nodes = found.nodes.merge(events, on=["rank", "event"], how="left")
        self.nodes = nodes.merge(calls, on=["rank", "call"], how="left").set_index("node")
        self.comm = self.nodes[self.nodes["kind"].str.startswith("COMM")]

    def of(self, what, **facts):
        """Communication events of a kind."""
        found = self.comm[self.comm["what"] == what]
        for name, value in facts.items():
            found = found[found[name] == value]
        assert len(found)
        return found.index

    def before(self, node, kind):
        return sorted(
            self.edges[(self.edges["target"] == node) & (self.edges["kind"] == kind)].source
        )

    def after(self, node, kind):
        return sorted(
            self.edges[(self.edges["source"] == node) & (self.edges["kind"] == kind)].target
        )

    def match(self, node):
        (found,) = self.after(node, "enter")
        return found


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def world(request, virtual, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    (folder / "train.py").write_text(PROGRAM)
    job = Job(program=str(folder / "train.py"), arguments=request.param, world_size=4)
    capture(job, folder / "job" / "capture", strategy="all")
    made = World(folder / "job" / "capture")
    made.backend = request.param
    return made


def test_nothing_waits_for_itself(world):
    assert nx.is_directed_acyclic_graph(world.graph)


def test_every_call_enters_one_communication(world):
    for node in world.comm.index:
        match = world.match(node)
        assert world.nodes.kind[match] == "MATCH"
    for match in world.nodes.index[world.nodes["kind"] == "MATCH"]:
        entered = world.before(match, "enter")
        assert len(entered) == world.nodes.num_participants[match]
        assert len({world.nodes["rank"][n] for n in entered}) == len(entered)
        assert len({world.nodes.mark[n] for n in entered}) == 1


def test_messages_meet_their_other_side(world):
    for node in world.of("send"):
        match = world.match(node)
        (other,) = set(world.before(match, "enter")) - {node}
        assert world.nodes.what[other] == "recv"
        assert world.nodes.source[match] == world.nodes["rank"][node]
        assert world.nodes.target[match] == world.nodes["rank"][other]


def test_who_needs_everybody_leaves_when_all_have_come(world):
    for node in world.of("barrier"):
        (wait,) = world.after(node, "wait")
        assert world.before(wait, "leave") == [world.match(node)]


def test_receivers_of_a_broadcast_wait_for_the_root_only(world):
    for root in world.of("broadcast", root="me"):
        (wait,) = world.after(root, "wait")
        assert world.before(wait, "leave") == []
        others = set(world.before(world.match(root), "enter")) - {root}
        assert len(others) == 3
        for node in others:
            (wait,) = world.after(node, "wait")
            assert world.before(wait, "leave") == [root]
        assert world.after(world.match(root), "leave") == []


def test_only_the_root_of_a_reduce_waits_for_the_others(world):
    for node in world.of("reduce", root="other"):
        (wait,) = world.after(node, "wait")
        assert world.before(wait, "leave") == []
    for node in world.of("reduce", root="me"):
        (wait,) = world.after(node, "wait")
        assert world.before(wait, "leave") == [world.match(node)]


def test_work_that_nobody_waits_for_has_no_consumer(world):
    for node in world.of("all_reduce"):
        assert world.after(node, "wait") == []
        assert world.after(world.match(node), "leave") == []


def test_a_wait_for_a_batch_is_for_all_of_it(world):
    if world.backend == "gloo":  # it makes no batches: every call has its own wait
        assert set(world.comm["batch"]) == {-1}
    for rank in range(4):
        of_rank = world.comm[(world.comm["rank"] == rank) & (world.comm["mark"] == 2)]
        sent, received = of_rank.index[of_rank["what"].isin(["send", "recv"])][:2]
        assert list(world.nodes.what[[sent, received]]) == ["send", "recv"]
        waits = world.after(sent, "wait")
        if world.backend == "nccl":
            assert world.nodes.batch[sent] == world.nodes.batch[received] >= 0
            assert world.after(received, "wait") == waits
            for wait in waits:
                assert world.before(wait, "leave") == sorted(map(world.match, (sent, received)))
        else:
            for node in (sent, received):
                (wait,) = world.after(node, "wait")
                assert world.before(wait, "leave") == [world.match(node)]


def test_the_order_of_a_lane_is_kept(world):
    for _, of_rank in world.nodes[world.nodes["rank"] >= 0].groupby("rank"):
        numbers = of_rank.index.to_numpy()
        program = world.edges[world.edges["kind"] == "program"]
        pairs = set(zip(program["source"], program["target"], strict=True))
        assert set(itertools.pairwise(numbers)) <= pairs


BUFFERED = """
import torch, torch.distributed as dist
import crystalllm
dist.init_process_group("gloo")
for _ in range(4):
    dist.send(torch.ones(4), 1 - dist.get_rank())
    dist.recv(torch.ones(4), 1 - dist.get_rank())
    crystalllm.step()
"""


def test_a_program_that_relies_on_buffering(virtual, tmp_path):  # NVIDIA/nccl#479
    (tmp_path / "train.py").write_text(BUFFERED)
    job = Job(program=str(tmp_path / "train.py"), world_size=2)
    folder = tmp_path / "job" / "capture"
    with pytest.raises(UserError, match=r"rank 0 in call 0 .* rank 1 in call 0"):
        capture(job, folder, strategy="all")
    (warning,) = capture(job, folder, strategy="all", eager_bytes=16)["warnings"]
    assert "relies on buffering" in warning
    world = World(folder)
    assert nx.is_directed_acyclic_graph(world.graph)
    for node in world.of("send"):
        (wait,) = world.after(node, "wait")
        assert world.before(wait, "leave") == []
    for node in world.of("recv"):
        (wait,) = world.after(node, "wait")
        assert world.before(wait, "leave") == [world.match(node)]
