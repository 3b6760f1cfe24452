"""Whether calls of all ranks fit together; the graph that follows from them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crystalllm.capture import capture, matching
from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.records import element_size

REDUCING = ("all_reduce", "reduce", "reduce_scatter")


class Rank:
    """Calls of one rank, in the order in which they are made."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.groups = [(n, m) for n, m in world.groups.items() if rank in m]
        self.calls: list[matching.Call] = []
        self.lanes: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        self.seqs: Counter[object] = Counter()

    def call(
        self,
        kind: str,
        group: str = "all",
        *,
        root: int = -1,
        peer: int = -1,
        count: int = 4,
        dtype: str = "float32",
        op: str | None = None,
        batch: int = -1,
        splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        wait: bool = True,
        lane: int = 0,
    ) -> int:
        """Root and peer are global ranks; returns the call's number."""
        members = self.world.groups[group]
        me, number = members.index(self.rank), len(self.calls)
        counter = (group, kind, peer) if peer >= 0 else group
        seq = self.seqs[counter]
        self.seqs[counter] += 1
        self.calls.append(
            matching.Call(
                number=number,
                kind=kind,
                group=[n for n, _ in self.groups].index(group),
                seq=seq,
                form=(dtype, -1 if any(splits) else count, op or "sum" * (kind in REDUCING)),
                root=members.index(root) if root >= 0 else -1,
                peer_offset=(members.index(peer) - me) % len(members) if peer >= 0 else -1,
                batch=batch,
                num_bytes=count * element_size(dtype),
                in_splits=splits[0],
                out_splits=splits[1],
                key=f"{kind} group={group}",
            )
        )
        self.lanes[lane].append((number, False))
        if wait and batch < 0:
            self.wait(number, lane=lane)
        return number

    def wait(self, number: int, *, lane: int = 0) -> None:
        self.lanes[lane].append((number, True))

    def send(self, peer: int, **options: object) -> int:
        return self.call("send", peer=peer, **options)

    def recv(self, peer: int, **options: object) -> int:
        return self.call("recv", peer=peer, **options)

    def exchange(self, peer: int, *, batch: int, order: tuple[str, str]) -> None:
        """One batch of a send and a receive, then a wait for each."""
        for number in [self.call(kind, peer=peer, batch=batch) for kind in order]:
            self.wait(number)


class World:
    def __init__(self, size: int, *, backend: str = "gloo", **groups: list[int]) -> None:
        self.groups = {"all": list(range(size)), **groups}
        self.backend = backend
        self.ranks = [Rank(self, r) for r in range(size)]

    def check(self, *, only: list[int] | None = None, **options: object) -> list[str]:
        actors = {
            r.rank: matching.Actor(
                matching.Program(
                    tuple(r.calls),
                    tuple(tuple(lane) for lane in r.lanes.values()),
                    (self.backend,) * len(r.groups),
                ),
                r.groups,
            )
            for r in self.ranks
            if only is None or r.rank in only
        }
        return matching.check(actors, **options)

    def refuse(self, pattern: str, **options: object) -> str:
        """Checks that it is refused with this text, which it returns."""
        with pytest.raises(UserError, match=pattern) as caught:
            self.check(**options)
        return str(caught.value)


both_backends = pytest.mark.parametrize("backend", ["gloo", "nccl"])


# --- messages -------------------------------------------------------------------


@both_backends
def test_both_ranks_send_before_they_receive(backend):  # NVIDIA/nccl#479, #389, #584, #783
    world = World(2, backend=backend)
    for a in world.ranks:
        a.call("barrier")
        a.send(1 - a.rank)
        a.recv(1 - a.rank)
    text = world.refuse("wait for each other in a circle")
    assert "rank 0 in call 1 (send group=all), which waits for rank 1 in call 1 (send" in text
    assert "batch_isend_irecv" in text
    (warning,) = world.check(eager_bytes=16)
    assert "relies on buffering of messages up to 16 bytes" in warning
    assert "rank 1 in call 1" in warning
    world.refuse("circle", eager_bytes=15)


@both_backends
@pytest.mark.parametrize("order", [("recv", "send"), ("send", "recv")])
def test_order_within_a_batch_is_free(backend, order):  # NVIDIA/nccl#479, torchcomms#2885
    world = World(2, backend=backend)
    for a in world.ranks:
        for batch in range(2):
            a.exchange(1 - a.rank, batch=batch, order=order)
    assert world.check() == []


@both_backends
def test_a_ring_of_three_ranks(backend):
    world = World(3, backend=backend)
    for a in world.ranks:
        a.send((a.rank + 1) % 3)
        a.recv((a.rank - 1) % 3)
    text = world.refuse("circle")
    assert all(f"rank {r} in call 0" in text for r in range(3))
    world = World(3, backend=backend)
    for a in world.ranks:
        if a.rank:
            a.send((a.rank + 1) % 3)
            a.recv(a.rank - 1)
        else:
            a.recv(2)
            a.send(1)
    assert world.check() == []


def test_a_rank_writes_to_itself():
    world = World(2)
    sent = world.ranks[1].send(1, wait=False)
    world.ranks[1].recv(1)
    world.ranks[1].wait(sent)
    assert world.check() == []
    world = World(2)
    world.ranks[1].send(1)
    world.ranks[1].recv(1)
    world.refuse("rank 1 in call 0 .*, which waits for rank 1")


@both_backends
def test_a_message_that_nobody_receives(backend):
    world = World(2, backend=backend)
    world.ranks[0].send(1, wait=False)
    world.ranks[1].call("barrier", wait=False)
    world.ranks[0].call("barrier", wait=False)
    text = world.refuse("has no counterpart")
    assert "rank 0 in call 0 (send group=all)" in text
    assert "rank 1 ends after 1 calls without it" in text


@pytest.mark.parametrize("change", [{"dtype": "float64"}, {"count": 5}])
def test_a_message_of_another_size(change):
    world = World(2)
    world.ranks[0].send(1)
    world.ranks[1].call("barrier", wait=False)
    world.ranks[1].recv(0, **change)
    text = world.refuse("do not fit together")
    assert "rank 0 in call 0 (send group=all) and rank 1 in call 1 (recv group=all)" in text
    assert "dtype or size" in text


# --- collectives ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"kind": "all_gather", "op": "sum"}, "kind"),
        ({"dtype": "bfloat16"}, "dtype, count or reduce op"),
        ({"count": 5}, "dtype, count or reduce op"),
        ({"op": "max"}, "dtype, count or reduce op"),
    ],
)
def test_two_ranks_make_calls_that_differ(change, what):
    world = World(4, odd=[1, 3])
    for a in world.ranks:
        a.call("barrier")
        if a.rank % 2:
            usual = {"kind": "all_reduce", "group": "odd"}
            a.call(**(usual | change if a.rank == 3 else usual))
    text = world.refuse("do not fit together")
    assert re.search(r"rank [13] in call 1 \(.* group=odd\) and rank [31] in call 1 \(", text)
    assert "all_reduce group=odd" in text
    assert "rank 1" in text
    assert "rank 3" in text
    assert f"differ in {what}, group odd, sequence number 0" in text


def test_roots_that_differ():
    world = World(3)
    for a in world.ranks:
        a.call("broadcast", root=2 if a.rank == 1 else 0)
    assert "rank 0 in call 0" in (text := world.refuse("differ in root"))
    assert "rank 1 in call 0" in text


@both_backends
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("kind", "root"), [("all_reduce", -1), ("broadcast", 0), ("broadcast", 1), ("reduce", 0)]
)
@pytest.mark.parametrize("absent", [0, 2])
def test_someone_is_missing(kind, root, absent, wait, backend):
    world = World(3, backend=backend)
    for a in world.ranks:
        a.call("barrier")
    for a in world.ranks:
        if a.rank != absent:
            a.call(kind, root=root, wait=wait)
    text = world.refuse("another one never makes|has no counterpart")
    assert f"rank {absent} ends after 1 calls without it" in text
    assert re.search(rf"rank {'[12]' if absent == 0 else '[01]'} in call 1 \({kind}", text)


def test_a_root_or_a_leaf_does_not_wait_for_the_others():
    # Each is a deadlock as soon as more than the declared ones are waited for.
    world = World(3)
    world.ranks[0].call("broadcast", root=0)
    world.ranks[0].send(1)
    world.ranks[1].recv(0)
    world.ranks[1].call("broadcast", root=0)
    world.ranks[1].send(2)
    world.ranks[2].recv(1)
    world.ranks[2].call("broadcast", root=0)
    assert world.check() == []
    world = World(3)
    for kind in ("reduce", "gather"):
        world.ranks[1].call(kind, root=0)
        world.ranks[1].send(2)
        world.ranks[2].recv(1)
        world.ranks[2].call(kind, root=0)
        world.ranks[2].send(0)
        world.ranks[0].recv(2)
        world.ranks[0].call(kind, root=0)
    assert world.check() == []


def test_who_needs_the_root_waits_for_it():
    world = World(2)
    world.ranks[0].recv(1)
    world.ranks[0].call("broadcast", root=0)
    world.ranks[1].call("broadcast", root=0)
    world.ranks[1].send(0)
    text = world.refuse("circle")
    assert "rank 0 in call 0 (recv" in text
    assert "rank 1 in call 0 (broadcast" in text
    world = World(2)
    world.ranks[0].call("reduce", root=0)
    world.ranks[0].send(1)
    world.ranks[1].recv(0)
    world.ranks[1].call("reduce", root=0)
    world.refuse("circle")


def test_a_circle_through_three_groups():
    world = World(3, a=[0, 1], b=[1, 2], c=[0, 2])
    for rank, order in enumerate(("ca", "ab", "bc")):
        for group in order:
            world.ranks[rank].call("all_reduce", group)
    text = world.refuse("circle")
    assert "rank 0 in call 0 (all_reduce group=c), which waits for rank 2 in call 0" in text
    assert "rank 1 in call 0 (all_reduce group=a), which waits for rank 0" in text


def test_ranks_that_are_not_there_take_part_in_everything():
    world = World(4)
    for a in world.ranks:
        a.call("all_reduce")
        a.call("broadcast", root=0)
        a.call("reduce", root=3)
        a.send((a.rank + 1) % 4)
        a.recv((a.rank - 1) % 4)
    world.refuse("circle")
    assert world.check(only=[2]) == []
    assert world.check(only=[1, 3]) == []


# --- order on a communicator --------------------------------------------------------


def test_a_communicator_of_nccl_keeps_its_order_and_one_of_gloo_does_not():
    def world(backend):
        made = World(2, backend=backend)
        a, b = made.ranks
        reduced = a.call("all_reduce", wait=False)
        a.wait(a.send(1, batch=0))
        a.wait(reduced)
        b.wait(b.recv(0, batch=0))
        b.call("all_reduce")
        return made

    assert world("gloo").check() == []
    text = world("nccl").refuse("circle")
    assert "rank 0 in call 0 (all_reduce" in text, "what is before the send on its communicator"
    assert "rank 1 in call 0 (recv" in text


def test_without_a_wait_the_order_of_nccl_is_still_found():
    world = World(2, backend="nccl")
    a, b = world.ranks
    a.call("all_reduce", wait=False)
    a.send(1, batch=0)
    b.recv(0, batch=0)
    b.call("all_reduce", wait=False)
    text = world.refuse("circle")
    assert "rank 0 in call 0 (all_reduce" in text
    assert "rank 1 in call 0 (recv" in text


def test_single_messages_have_a_communicator_of_their_own():
    world = World(2, backend="nccl")
    a, b = world.ranks
    reduced = a.call("all_reduce", wait=False)
    a.send(1)
    a.wait(reduced)
    b.recv(0)
    b.call("all_reduce")
    assert world.check() == []


def test_calls_behind_a_queue_are_compared():
    world = World(4, backend="nccl")
    for a in world.ranks:
        a.call("all_reduce", wait=False)
        a.call("reduce", root=0, wait=False)
        a.call("all_gather", dtype="int64" if a.rank == 2 else "float32", wait=False)
    text = world.refuse("differ in dtype")
    assert "in call 2" in text
    assert "rank 2" in text


def test_a_long_queue_is_released_at_once():
    world = World(3, backend="nccl")
    world.ranks[1].recv(2, batch=0)
    world.ranks[2].send(1, batch=0)
    for a in world.ranks:
        for _ in range(3000):
            a.call("broadcast", root=0, wait=False)
    assert world.check() == []


def test_threads_share_the_order_of_a_communicator():
    # Rank 1 does not wait for its first call, rank 0 does; both made the calls in one order.
    world = World(2, backend="nccl")
    for a in world.ranks:  # a second thread makes the gathers
        first = a.call("all_reduce", wait=False)
        if a.rank == 0:
            a.wait(first)
        a.call("all_gather", lane=1)
        a.call("all_reduce")
        a.call("all_gather", lane=1)
    assert world.check() == []


# --- split sizes --------------------------------------------------------------------


def _exchange_splits(table, *, equal=()):
    """A world that exchanges table[i][j] elements from i to j; `equal` ranks give no sizes."""
    world = World(len(table))
    for a in world.ranks:
        ins, outs = tuple(table[a.rank]), tuple(row[a.rank] for row in table)
        if a.rank in equal:
            assert len({*ins, *outs}) == 1
            a.call("all_to_all", count=ins[0])
        else:
            a.call("all_to_all", splits=(ins, outs))
    return world


def test_nothing_may_be_sent():  # pytorch#146468, NVIDIA/nccl#1593
    for table in (
        [[0, 0, 5], [0, 0, 0], [1, 2, 0]],
        [[0] * 3] * 3,
    ):
        assert _exchange_splits(table).check() == []


def test_splits_that_disagree():
    world = _exchange_splits([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert world.check() == []
    odd = World(3)
    for a, right in zip(odd.ranks, world.ranks, strict=True):
        call = right.calls[0]
        ins = call.in_splits if a.rank != 2 else (7, 9, 8)
        a.call("all_to_all", splits=(ins, call.out_splits))
    text = odd.refuse("what one sends and the other expects")
    assert "rank 1 in call 0" in text
    assert "rank 2 in call 0" in text
    assert odd.check(check_splits=False) == []


def test_explicit_sizes_against_equal_ones():
    assert _exchange_splits([[3, 3], [3, 3]], equal=[0]).check() == []
    world = World(2)
    world.ranks[0].call("all_to_all", count=3)
    world.ranks[1].call("all_to_all", splits=((2, 3), (3, 3)))
    world.refuse("what one sends and the other expects")


def test_uneven_parts_are_the_same_for_everybody():
    for kind, good, bad in (
        ("all_gather", ((), (1, 2, 3)), ((), (1, 3, 2))),
        ("reduce_scatter", ((1, 2, 3), ()), ((2, 1, 3), ())),
    ):
        for odd in (None, 1):
            world = World(3)
            for a in world.ranks:
                a.call(kind, splits=bad if a.rank == odd else good)
            if odd is None:
                assert world.check() == []
            else:
                world.refuse("rank 0 in call 0 .* and rank 1 in call 0 ")


# --- captured programs ------------------------------------------------------------------

CAPTURED = """
import torch, torch.distributed as dist
import crystalllm
dist.init_process_group("{backend}")
rank = dist.get_rank()
for _ in range(4):
    {body}
    crystalllm.step()
"""


@pytest.fixture
def captured(virtual, tmp_path):
    def run(body, backend="gloo"):
        script = tmp_path / "train.py"
        script.write_text(CAPTURED.format(backend=backend, body=body))
        job = Job(program=str(script), world_size=2)
        return capture(job, tmp_path / "job" / "capture", strategy="all")

    return run


def test_rows_of_another_width_with_equal_bytes(captured):
    # Rank 1 sends and receives rows of three elements, rank 0 single ones.
    captured(
        "x, i = (torch.ones(4, 3), [1, 3]) if rank else (torch.ones(9), [3, 6])\n"
        "    y, o = (torch.ones(5, 3), [2, 3]) if rank else (torch.ones(6), [3, 3])\n"
        "    dist.all_to_all_single(y, x, o, i)"
    )


def test_rows_of_another_width_with_equal_splits(captured):
    with pytest.raises(UserError, match="what one sends and the other expects"):
        captured(
            "x, i = torch.ones(3, 2 + rank), [2 - rank, 1 + rank]\n"
            "    dist.all_to_all_single(torch.zeros_like(x), x, i, i)"
        )


def test_a_batch_to_oneself(captured):
    captured(
        "ops = [dist.P2POp(f, torch.ones(2), rank) for f in (dist.isend, dist.irecv)]\n"
        "    for work in dist.batch_isend_irecv(ops): work.wait()",
        "nccl",
    )


# --- any program ----------------------------------------------------------------------

KINDS = ("all_reduce", "all_gather", "broadcast", "reduce", "barrier", "all_to_all")


@st.composite
def global_orders(draw):
    """Steps that follow one another in a world: the groups, and who meets in each step."""
    size = draw(st.integers(2, 6))
    ranks = st.integers(0, size - 1)
    groups = draw(st.lists(st.lists(ranks, min_size=1, unique=True).map(sorted), max_size=4))
    names = {f"g{i}": members for i, members in enumerate(groups)}
    everybody = {"all": list(range(size)), **names}
    steps = draw(
        st.lists(
            st.one_of(
                st.tuples(st.sampled_from(sorted(everybody)), st.sampled_from(KINDS), ranks),
                st.tuples(ranks, ranks).filter(lambda pair: pair[0] != pair[1]),
            ),
            max_size=25,
        )
    )
    return size, names, steps


def _make(order, data, backend):
    """Every rank makes its part of the steps in their order, and waits at once or later."""
    size, names, steps = order
    world = World(size, backend=backend, **names)
    waiting: dict[int, list[int]] = defaultdict(list)

    def done(rank, number):
        waiting[rank].append(number)
        while waiting[rank] and data.draw(st.booleans()):
            chosen = data.draw(st.integers(0, len(waiting[rank]) - 1))
            world.ranks[rank].wait(waiting[rank].pop(chosen))

    for step in steps:
        if len(step) == 2:
            source, target = step
            done(source, world.ranks[source].send(target, wait=False))
            done(target, world.ranks[target].recv(source, wait=False))
        else:
            name, kind, root = step
            members = world.groups[name]
            rooted = kind in ("broadcast", "reduce")
            for rank in members:
                options = {"root": members[root % len(members)]} if rooted else {}
                done(rank, world.ranks[rank].call(kind, name, wait=False, **options))
    return world


@both_backends
@given(order=global_orders(), data=st.data())
def test_what_follows_one_global_order_fits(backend, order, data):
    assert _make(order, data, backend).check() == []


@both_backends
@given(
    order=global_orders(),
    kinds=st.lists(st.sampled_from(["all_reduce", "message"]), min_size=6, max_size=6),
    data=st.data(),
)
def test_two_swapped_calls_close_a_circle(backend, order, kinds, data):
    size, names, _ = order
    pairs = {f"pair{i}": sorted({i, (i + 1) % size}) for i in range(size)}
    for swap in (False, True):
        world = _make((size, {**names, **pairs}, order[2]), data, backend)
        before = [len(r.calls) for r in world.ranks]
        # Rank i meets i - 1 and then i + 1; rank 0 first 1, and at the end the last one.
        todo = {r: [r - 1, r] for r in range(1, size)} | {
            0: [size - 1, 0] if swap else [0, size - 1]
        }
        for rank, meetings in todo.items():
            for i in meetings:
                if kinds[i] == "all_reduce":
                    world.ranks[rank].call("all_reduce", f"pair{i}")
                elif rank == i:
                    world.ranks[rank].send((i + 1) % size, group=f"pair{i}")
                else:
                    world.ranks[rank].recv(i, group=f"pair{i}")
        if not swap:
            assert world.check() == []
            continue
        text = world.refuse("in a circle")
        for rank in range(size):
            assert f"rank {rank} in call {before[rank]} " in text


@both_backends
@given(order=global_orders(), data=st.data())
def test_a_call_left_out_is_found(backend, order, data):
    world = _make(order, data, backend)
    lonely = [
        (r, c)
        for r in world.ranks
        for c in r.calls
        if c.kind in ("send", "recv") or len(r.groups[c.group][1]) > 1
    ]
    if not lonely:
        return
    rank, call = data.draw(st.sampled_from(lonely))
    for lane in rank.lanes.values():
        lane[:] = [(n, w) for n, w in lane if n != call.number]
    with pytest.raises(UserError, match=f"rank {rank.rank}|circle"):
        world.check()
