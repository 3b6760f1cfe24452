"""The payload book: format, serving, strictness."""

from __future__ import annotations

import struct

import pytest
import torch
import torch.distributed as dist

from crystalllm import logical, native
from crystalllm.errors import UserError
from crystalllm.layout import Layout
from crystalllm.payload import Entry, PayloadBook
from crystalllm.warm import RankError


def _longs(*numbers):
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _world_identity(world=8):
    return native.load().digest(list(range(world))) + "#0"


def _entry(seq, rank, *numbers, **more):
    return Entry(
        group=_world_identity(), seq=seq, rank=rank, dtype="int64", value=_longs(*numbers), **more
    )


def test_every_kind_of_call_serves_its_payloads(virtual):
    world = 8
    book = PayloadBook(
        [
            *[_entry(0, r, r, 10 * r) for r in range(world)],  # all_gather
            *[_entry(1, r, 100 + r) for r in range(world)],  # all_reduce sum
            *[_entry(2, r, 100 + r) for r in range(world)],  # all_reduce max
            _entry(3, 5, 42, 43),  # broadcast from 5
            _entry(4, 6, *range(50, 58)),  # scatter from 6
            *[_entry(5, r, *range(r * world, (r + 1) * world)) for r in range(world)],  # r_s
            *[_entry(6, r, *(10 * r + p for p in range(world))) for r in range(world)],  # a2a
            *[_entry(7, r, r, r + 1, splits=(0, 0, 2, 0, 0, 0, 0, 0)) for r in range(world)],
            _entry(0, 1, 77, peer=2),  # first message from 1 to 2
            _entry(1, 1, 78, peer=2),
            _entry(0, 3, 79, peer=2),
        ]
    )

    def program():
        me = dist.get_rank()
        seen = {}
        out = [torch.zeros(2, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(out, torch.tensor([me, 10 * me]))
        seen["all_gather"] = [o.tolist() for o in out]
        x = torch.tensor([100 + me])
        dist.all_reduce(x)
        seen["sum"] = x.item()
        x = torch.tensor([100 + me])
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        seen["max"] = x.item()
        x = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(x, src=5)
        seen["broadcast"] = x.tolist()
        x = torch.zeros(1, dtype=torch.int64)
        dist.scatter(x, src=6)
        seen["scatter"] = x.item()
        x = torch.zeros(1, dtype=torch.int64)
        dist.reduce_scatter_tensor(x, torch.arange(me * world, (me + 1) * world))
        seen["reduce_scatter"] = x.item()
        x = torch.zeros(world, dtype=torch.int64)
        dist.all_to_all_single(x, torch.arange(10 * me, 10 * me + world))
        seen["all_to_all"] = x.tolist()
        x = torch.zeros(2 * world, dtype=torch.int64)
        dist.all_to_all_single(x, torch.tensor([me, me + 1]), [2] * world, [0, 0, 2, 0, 0, 0, 0, 0])
        seen["uneven"] = x.tolist()
        x = torch.zeros(1, dtype=torch.int64)
        seen["p2p"] = []
        for source in (1, 3, 1):
            dist.recv(x, source)
            seen["p2p"].append(x.item())
        return seen, logical.world().num_invented

    seen, invented = virtual(program, rank=2, world=world, book=book, strict=True)
    assert seen == {
        "all_gather": [[r, 10 * r] for r in range(world)],
        "sum": sum(100 + r for r in range(world)),
        "max": 107,
        "broadcast": [42, 43],
        "scatter": 52,
        "reduce_scatter": sum(r * world + 2 for r in range(world)),
        "all_to_all": [10 * r + 2 for r in range(world)],
        "uneven": [n for r in range(world) for n in (r, r + 1)],
        "p2p": [77, 79, 78],
    }
    assert invented == 0


def test_some_payloads_and_mirrors_mix(virtual):
    book = PayloadBook([_entry(0, 5, 1000)])

    def program():
        x = torch.tensor([1])
        dist.all_reduce(x)
        return x.item(), logical.world().num_invented

    assert virtual(program, rank=2, world=8, book=book) == (1000 + 7, 1)


def _receive(n=1):
    x = torch.zeros(1, dtype=torch.int64)
    received = []
    for _ in range(n):
        dist.broadcast(x, src=0)
        received.append(x.item())
    return received


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (0, [-1, 0, 1, 10, 11, 99]),
        # The last captured period stands for those that were not captured.
        (2, [-1, 0, 1, 10, 11, 10, 11, 10, 11, 99]),
        (-1, [-1, 0, 1, 99]),
    ],
)
def test_longer_and_shorter_runs_find_their_values(virtual, extra, expected):
    # One call before, two periods of two calls, and one call at the end.
    counter = {"body_end": 5, "per_period": 2}
    values = [-1, 0, 1, 10, 11, 99]
    book = PayloadBook([_entry(seq, 0, v, **counter) for seq, v in enumerate(values)])
    book.period, book.num_marks, book.iterations = 1, 3, 3

    def program():
        module = native.load()
        book.serve(module, logical.world(), extra_periods=book.extra_periods(3 + extra))
        return _receive(len(expected))

    assert virtual(program, rank=1, world=8, strict=True) == expected


def test_a_run_that_does_not_line_up_with_the_period_is_refused():
    book = PayloadBook(period=3, num_marks=9, iterations=9)
    assert book.extra_periods(12) == 1
    assert PayloadBook(period=6, num_marks=18, iterations=9).extra_periods(6) == -1
    with pytest.raises(UserError, match=r"no values for a run of this length\. 10 iterations"):
        book.extra_periods(10)


def test_messages_between_a_pair_count_for_themselves(virtual):
    counter = {"peer": 2, "body_end": 2, "per_period": 1}
    book = PayloadBook([_entry(seq, 1, v, **counter) for seq, v in enumerate([5, 6, 7])])

    def program():
        book.serve(native.load(), logical.world(), extra_periods=1)
        x = torch.zeros(1, dtype=torch.int64)
        seen = []
        for _ in range(4):
            dist.recv(x, 1)
            seen.append(x.item())
        return seen

    assert virtual(program, rank=2, world=8, strict=True) == [5, 6, 6, 7]


def test_inferred_ranks_speak_through_their_representative(virtual):
    # 2 x 4 ranks; groups of four neighbours. Ranks 4 to 7 do what 0 to 3 do.
    layout = Layout.of_sizes([("tp", 4), ("dp", 2)])
    of_group = f"{native.load().digest([0, 1, 2, 3])}#0"
    entries = [
        Entry(group=of_group, seq=0, rank=r, dtype="int64", value=_longs(10 * r)) for r in range(4)
    ]
    entries.append(Entry(group=of_group, seq=0, rank=1, peer=2, dtype="int64", value=_longs(1000)))
    book = PayloadBook(entries, layout=layout, representatives=[0, 1, 2, 3] * 2)

    def program():
        group = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])][1]
        out = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
        dist.all_gather(out, torch.tensor([-1]), group=group)
        x = torch.zeros(1, dtype=torch.int64)
        dist.recv(x, 5, group=group)
        return [o.item() for o in out], x.item()

    # Its own value is its own; the others' are those of ranks 0, 1 and 3.
    assert virtual(program, rank=6, world=8, book=book, strict=True) == ([0, 10, -1, 30], 1000)


def test_store_keys_come_from_the_book(virtual):
    book = PayloadBook([Entry(store_key="p/plan", rank=0, value=b"the plan")])

    def program():
        store = dist.PrefixStore("p", dist.TCPStore("master", 1, 8))
        return store.get("plan")

    assert virtual(program, rank=1, book=book, backend=None) == b"the plan"


def test_strict_refuses_what_the_book_does_not_have(virtual):
    def program():
        dist.all_reduce(torch.ones(4))  # data may be invented
        dist.all_reduce(torch.ones(100_000, dtype=torch.int64))  # also data: token ids
        dist.broadcast(torch.ones(2, dtype=torch.int64), src=3)

    with pytest.raises(
        RankError,
        match=r"not in the payload book\. Rank 1, call 2 \(broadcast dtype=int64 count=2.* Capture",
    ):
        virtual(program, rank=1, world=8, strict=True)


def test_without_a_book_control_values_are_counted(virtual):
    def program():
        dist.all_reduce(torch.ones(2, dtype=torch.int64))
        dist.broadcast(torch.ones(2, dtype=torch.int64), src=3)
        dist.all_reduce(torch.ones(2))
        world = logical.world()
        return world.num_invented, [(call, how) for call, _, how in world.inventions]

    assert virtual(program, rank=1, world=8) == (2, [(0, "mirrored"), (1, "zeros")])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "float32"}, "another dtype than the call.*float32 instead of int64"),
        ({"value": _longs(1, 2, 3)}, "another size than the call.*3 elements instead of 2"),
    ],
)
def test_a_payload_that_does_not_fit_is_an_error(virtual, entry, message):
    fields = {"group": _world_identity(), "seq": 0, "rank": 0, "dtype": "int64"}
    book = PayloadBook([Entry(**{**fields, "value": _longs(1, 2), **entry})])

    def program():
        dist.broadcast(torch.zeros(2, dtype=torch.int64), src=0)

    with pytest.raises(RankError, match=message):
        virtual(program, rank=1, world=8, book=book)


def test_a_book_survives_its_file(tmp_path):
    book = PayloadBook(
        [
            _entry(3, 1, 5, splits=(1, 2)),
            Entry(store_key="k", value=b"\0\xff"),
            _entry(0, 2, 1, peer=4, body_end=7, per_period=2),
        ],
        period=3,
        num_marks=9,
        iterations=9,
        layout=Layout.of_sizes([("tp", 2), ("dp", 4)]),
        representatives=(0, 1, 0, 1, 0, 1, 0, 1),
    )
    book.save(tmp_path / "book.parquet")
    loaded = PayloadBook.load(tmp_path / "book.parquet")
    for either in (loaded, book):
        either.entries.sort(key=repr)
    assert loaded == book
    loaded.save(tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "book.parquet").read_bytes()


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign", "other_table"])
def test_a_bad_file_is_an_error_that_names_it(tmp_path, damage):
    from crystalllm import tables

    path = tmp_path / "book.parquet"
    if damage == "truncated":
        PayloadBook([_entry(0, 0, 1)]).save(path)
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "foreign":
        path.write_text("not a table")
    elif damage == "other_table":
        columns = {c.name: [] for c in tables.CALL_TIMES.columns}
        tables.CALL_TIMES.write(path, columns, provenance={})
    with pytest.raises(UserError, match=r"book\.parquet"):
        PayloadBook.load(path)
