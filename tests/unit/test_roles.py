"""A few ranks tell what all do: the same tables as when every rank is captured."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import comb, prod
from operator import mul

import pyarrow as pa
import pytest

from crystalllm import native, tables
from crystalllm.capture import capture, results, roles
from crystalllm.capture.captured import Captured
from crystalllm.config import Job, Parallelism
from crystalllm.layout import Layout
from crystalllm.records import group_identity


class Made:
    """A rank that makes calls by hand; what it leaves is recorded as ever."""

    def __init__(self, job, rank):
        self.rank, self.size = rank, job.world_size
        self.world = native.load().World(rank=rank, size=job.world_size)
        self.world.keep_records(True)
        self.backend = "gloo"
        self.all = self.group(range(self.size))
        p = job.parallelism
        sizes = [(n, getattr(p, n)) for n in p.order.split("-")] if p else [("dp", self.size)]
        self.sizes = dict(sizes)
        strides = itertools.accumulate((n for _, n in sizes), mul, initial=1)
        self.strides = dict(zip(self.sizes, strides, strict=False))
        self.place = {n: rank // self.strides[n] % size for n, size in sizes}
        self.calls = []

    def group(self, members):
        return self.world.create_group(list(members), "", self.backend)

    def along(self, *axes):
        """The rank's group along these axes."""
        ranges = [
            range(self.sizes[a]) if a in axes else [self.place[a]] for a in reversed(self.sizes)
        ]
        strides = [self.strides[a] for a in reversed(self.sizes)]
        return self.group(
            sum(x * s for x, s in zip(place, strides, strict=True))
            for place in itertools.product(*ranges)
        )

    def near(self, axis, step):
        return self.rank + step * self.strides[axis]

    def call(self, kind, group=None, *, root=-1, peer=-1, count=4, dtype="float32", **options):
        """Root and peer are global ranks."""
        group = group or self.all
        self.world.record_call(
            group,
            kind,
            dtype=dtype,
            count=count,
            in_elements=count,
            out_elements=count,
            root=group.members.index(root) if root >= 0 else -1,
            peer=group.members.index(peer) if peer >= 0 else -1,
            **options,
        )

    def step(self):
        self.world.mark()

    def left(self):
        """What it left, with a wait after every call or batch."""
        left = Captured.of_world(self.world, [])
        calls = left.parts["calls"].to_pylist()
        kinds = {"send": "COMM_SEND", "recv": "COMM_RECV"}
        events = []
        for call, after in zip(calls, [*calls[1:], None], strict=True):
            kind = kinds.get(call["kind"], "COMM_COLL")
            events.append((kind, call))
            if call["batch"] < 0 or after is None or after["batch"] != call["batch"]:
                events.append(("WAIT", call))
        columns = {
            "rank": [self.rank] * len(events),
            "event": range(len(events)),
            "lane": ["host:0"] * len(events),
            "kind": [kind for kind, _ in events],
            "name": [call["kind"] if kind != "WAIT" else "" for kind, call in events],
            "mark": [call["mark"] for _, call in events],
            "call": [call["call"] for _, call in events],
            "after": [-1] * len(events),
            "bytes": [0] * len(events),
        }
        schema = tables.EVENTS.schema
        parts = left.parts | {
            "events": pa.table([pa.array(columns[f.name], f.type) for f in schema], schema)
        }
        return replace(left, parts=parts)


def train(made):
    """What ranks of any layout do: pipelines, tensors, contexts, replicas, tied embeddings."""
    sizes, place = made.sizes, made.place
    groups = {name: made.along(name) for name in sizes}
    data = made.along("dp", *(["cp"] if "cp" in sizes else []))
    pp = sizes.get("pp", 1)
    is_end = pp > 1 and place["pp"] in (0, pp - 1)
    if is_end:
        first = made.near("pp", -place["pp"])
        embedding = made.group([first, first + (pp - 1) * made.strides["pp"]])
    for _ in range(4):
        for _ in range(2):
            if pp > 1 and place["pp"] > 0:
                made.call("recv", peer=made.near("pp", -1))
            if sizes.get("tp", 1) > 1:
                made.call("all_reduce", groups["tp"], reduce_op="sum")
            if sizes.get("cp", 1) > 1:
                batch = made.world.new_batch()
                around = groups["cp"].members
                me = around.index(made.rank)
                made.call("send", groups["cp"], peer=around[(me + 1) % len(around)], batch=batch)
                made.call("recv", groups["cp"], peer=around[me - 1], batch=batch)
            if pp > 1 and place["pp"] < pp - 1:
                made.call("send", peer=made.near("pp", +1))
        if is_end:
            made.call("all_reduce", embedding, reduce_op="sum")
        made.call("all_reduce", data, reduce_op="avg")
        if pp > 1:
            made.call("broadcast", groups["pp"], root=groups["pp"].members[-1])
        made.step()


class Capture:
    """The tables of a capture, and what they say of any rank."""

    def __init__(self, folder, structure):
        self.structure = structure
        self.ranks = tables.RANKS.read(folder / "ranks.parquet")[0].to_pylist()
        groups = tables.GROUPS.read(folder / "groups.parquet")[0].to_pylist()
        self.groups = {g.pop("identity"): g for g in groups}
        self.calls = {}
        for row in tables.CALLS.read(folder / "calls.parquet")[0].to_pylist():
            self.calls.setdefault(row.pop("rank"), []).append(row)
        sizes = [(name, size) for name, size in reversed(structure["layout"])]
        self.layout = Layout.of_sizes(sizes)

    def calls_of(self, rank):
        """A rank's calls: its own, or its representative's with groups and peers moved."""
        row = self.ranks[rank]
        speaker = row["representative"]
        assert (speaker == rank) == row["is_captured"]
        found = []
        for call in self.calls.get(speaker, ()):
            group = self.groups[call["group_identity"]]
            members = tuple(group["members"])
            moved, peer = self.layout.moved(members, speaker, rank, call["peer_rank"])
            root = call["root_rank"]
            found.append(
                call
                | {
                    "group_identity": group_identity(moved, group["creation"]),
                    "peer_rank": peer,
                    "root_rank": root if root < 0 else moved[members.index(root)],
                }
            )
        return found


@pytest.fixture
def captured(tmp_path, monkeypatch, virtual):
    monkeypatch.chdir(tmp_path)

    def run(job, strategy, **options):
        folder = tmp_path / strategy / "capture"
        return Capture(folder, capture(job, folder, strategy=strategy, **options))

    return run


def job_of(*, order="tp-cp-dp-pp", declared=True, world_size=None, **sizes):
    return Job(
        program="-m train",
        world_size=world_size or prod(sizes.values()),
        capture_iterations=4,
        parallelism=Parallelism(order=order, **sizes) if declared else None,
    )


class Ranks:
    """The ranks of a made world, by strategy all and by roles."""

    def __init__(self, job, program, folder):
        self.job, self.program, self.folder = job, program, folder
        self.known = {}
        self.learnt = results.layout_of(job, Layout.of_sizes([("rank", job.world_size)]))

    def run(self, captured, ranks):
        for rank in ranks:
            if rank not in self.known:
                made = Made(self.job, rank)
                self.program(made)
                self.known[rank] = made.left()
            captured[rank] = self.known[rank]

    def tables(self, captured, found, name):
        world = results.understand(self.job, 4, captured, found, group_identity)
        results.check_matching(world, eager_bytes=0)
        facts = dict.fromkeys(("program_digest", "crystalllm", "torch", "python"), "")
        out = self.folder / name
        return Capture(out, results.write(world, out, provenance=facts, warnings=()))

    def every(self):
        captured = {}
        self.run(captured, range(self.job.world_size))
        return self.tables(captured, roles.every_rank(self.learnt, captured), "all")

    def explore(self, num_checks=16, seed=0):
        captured = {}
        found = roles.explore(
            lambda ranks, stand_in: self.run(captured, ranks),
            captured,
            self.learnt,
            group_identity,
            num_checks=num_checks,
            seed=seed,
        )
        return captured, found

    def few(self, **options):
        return self.tables(*self.explore(**options), "roles")


@pytest.fixture
def made(tmp_path, virtual):
    return lambda job, program=train: Ranks(job, program, tmp_path)


SPLIT_SIZES = ("in_splits", "out_splits", "in_elements", "out_elements")


def assert_same(every, few, *, with_splits=True):
    def known(rows, *names):
        return [{k: row[k] for k in names} for row in rows]

    names = ("rank", "node", "role", "keys_digest", "coordinates", "num_calls", "num_marks")
    assert known(few.ranks, *names) == known(every.ranks, *names)
    names = ("members", "creation", "signature", "backend", "description")
    assert few.groups.keys() == every.groups.keys()
    for identity, group in every.groups.items():
        assert known([few.groups[identity]], *names) == known([group], *names)
        assert not group["is_inferred"]
    for row in every.ranks:
        ours, theirs = few.calls_of(row["rank"]), every.calls_of(row["rank"])
        for mine, real in zip(ours, theirs, strict=True):
            if not with_splits and mine["count"] < 0:
                mine |= {name: real[name] for name in SPLIT_SIZES}
            assert mine == real, f"rank {row['rank']} through {few.ranks[row['rank']]}"


LAYOUTS = {
    "dp64": {"dp": 64},
    "tp4-dp16": {"tp": 4, "dp": 16},
    "pp8-tp2-dp4": {"pp": 8, "tp": 2, "dp": 4},
    "pp4-cp4-dp4": {"pp": 4, "cp": 4, "dp": 4},
    "tp2-cp2-dp4-pp4": {"tp": 2, "cp": 2, "dp": 4, "pp": 4},
    "pp4-tp8-dp16": {"pp": 4, "tp": 8, "dp": 16},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "one": {"dp": 1},
}


@pytest.mark.parametrize(
    ("name", "order"),
    [(n, "tp-cp-dp-pp") for n in LAYOUTS]
    + [(n, "pp-dp-tp-cp") for n in LAYOUTS if prod(LAYOUTS[n].values()) <= 64],
)
def test_few_ranks_give_the_tables_of_all(name, order, made):
    ranks = made(job_of(order=order, **LAYOUTS[name]))
    every, few = ranks.every(), ranks.few()
    assert_same(every, few)
    assert few.structure["inferred_wrongly"] == []
    if ranks.job.world_size >= 64:
        assert few.structure["num_captured"] < ranks.job.world_size * 4 // 5


@pytest.mark.parametrize("world_size", [1, 2, 12, 64])
def test_axes_are_learnt_from_groups(world_size, made):
    job = job_of(declared=False, world_size=world_size)
    tp = 4 if world_size > 2 else 1

    def program(made):
        made.sizes = {"tp": tp, "dp": world_size // tp}
        made.strides = {"tp": 1, "dp": tp}
        made.place = {"tp": made.rank % tp, "dp": made.rank // tp}
        train(made)

    ranks = made(job, program)
    every, few = ranks.every(), ranks.few(num_checks=4)
    assert_same(every, few)
    if world_size == 64:
        assert few.structure["layout"] == [["x4", 16], ["x1", 4]]
        assert few.structure["num_captured"] < 40


# --- programs that are not quite regular ------------------------------------------------


def saves(made):
    """Rank 0 logs and gathers a checkpoint; leaders of nodes and the ranks of each have groups."""
    nodes = made.job_nodes
    local = made.group(range(made.rank // nodes * nodes, made.rank // nodes * nodes + nodes))
    leaders = range(0, made.size, nodes)
    is_leader = made.rank in leaders
    group = made.group(leaders) if is_leader else None
    for _ in range(4):
        made.call("all_reduce", local)
        if is_leader:
            made.call("all_reduce", group, count=9)
        made.call("all_gather", local, count=5)
        if made.rank == 0:
            made.call("broadcast", root=0, count=2)
        else:
            made.call("broadcast", root=0, count=2)
        made.step()
    made.call("gather", root=0)


@pytest.mark.parametrize(
    "sizes", [{"dp": 64}, {"tp": 4, "dp": 16}, {"tp": 2, "pp": 8, "dp": 4}, {"tp": 16, "dp": 4}]
)
def test_savers_and_leaders_of_nodes(sizes, made):
    def program(made):
        made.job_nodes = 8
        saves(made)

    ranks = made(job_of(**sizes), program)
    every, few = ranks.every(), ranks.few()
    assert_same(every, few)
    assert len({row["role"] for row in every.ranks}) == 3, "rank 0, leaders and the others"
    assert few.structure["inferred_wrongly"] == []


def test_a_group_without_form(made):
    def program(made):
        if made.rank in (0, 5, 9):
            odd = made.group([0, 5, 9])
            made.call("all_reduce", odd)
        train(made)

    ranks = made(job_of(tp=4, dp=16), program)
    every, few = ranks.every(), ranks.few(num_checks=0)
    assert_same(every, few)
    assert {r["rank"] for r in few.ranks if r["is_captured"]} >= {0, 5, 9}


@pytest.mark.parametrize(
    "is_odd",
    [
        lambda place, rank: place["pp"] in (1, 2),  # layer split [1, 2, 2, 3]
        lambda place, rank: place["pp"] == 2,
        lambda place, rank: place["dp"] == 3,
        lambda place, rank: rank % 16 == 5,
        lambda place, rank: rank % 16 == 15,
    ],
    ids=["split", "stage", "replica", "inner", "corner"],
)
def test_an_odd_coordinate_is_found_without_a_sample(is_odd, made):
    def program(made):
        for _ in range(3 if is_odd(made.place, made.rank) else 1):
            made.call("all_gather", made.group([made.rank]), count=8)
        train(made)

    ranks = made(job_of(tp=4, dp=4, pp=4), program)
    every, few = ranks.every(), ranks.few(num_checks=0)
    assert_same(every, few)
    assert few.structure["num_captured"] < 64


def test_an_odd_coordinate_in_the_middle_of_a_long_line(made):
    def program(made):
        made.call("all_reduce", made.group([made.rank]), count=1 + (made.rank % 16 == 6))
        train(made)

    ranks = made(job_of(tp=4, dp=16), program)
    assert_same(ranks.every(), ranks.few(num_checks=0))


ODD = 38  # not looked at by probes of tp=4, dp=16


def _odd_by_itself(made):
    if made.rank == ODD:
        made.call("all_reduce", made.group([made.rank]))
    train(made)


def _odd_in_every_call(made):
    alone = made.group([made.rank])
    for _ in range(4):
        is_odd = made.rank == ODD
        made.call("all_reduce", alone, count=6 if is_odd else 4, dtype="float64")
        made.call("all_gather", alone, dtype="bfloat16" if is_odd else "float32")
        made.step()


@pytest.mark.parametrize("program", [_odd_by_itself, _odd_in_every_call])
def test_one_odd_rank_in_the_sample(program, made):
    ranks = made(job_of(tp=4, dp=16), program)
    captured, _ = ranks.explore(num_checks=0)
    assert ODD not in captured
    inferred = [r for r in range(64) if r not in captured]
    seed = next(s for s in range(1000) if ODD in random.Random(s).sample(inferred, 4))
    every, few = ranks.every(), ranks.few(num_checks=4, seed=seed)
    assert_same(every, few)
    assert few.structure["inferred_wrongly"] == [ODD]
    row = few.ranks[ODD]
    assert row["is_captured"]
    assert not row["is_checked"]
    assert [r["rank"] for r in few.ranks if r["role"] == row["role"]] == [ODD]
    assert sum(r["is_checked"] for r in few.ranks) == 3
    assert few.structure["num_roles"] == 2


def test_one_odd_rank_outside_the_sample_has_the_stated_chance(made):
    ranks = made(job_of(tp=4, dp=16), _odd_by_itself)
    num_unseen = 0
    for seed in range(100):
        captured, found = ranks.explore(num_checks=12, seed=seed)
        num_unseen += ODD not in captured
        for k in (1, 2, 5):
            of, seen = found.num_inferred, found.num_sampled
            expected = comb(of - k, seen) / comb(of, seen)
            assert found.chance_unseen(k) == pytest.approx(expected, rel=1e-12)
        assert (found.corrections == (ODD,)) == (ODD in captured)
    chance = found.chance_unseen(1)
    assert 0.3 < chance < 0.9
    deviation = (100 * chance * (1 - chance)) ** 0.5
    assert abs(num_unseen - 100 * chance) < 4 * deviation


def test_the_summary_states_the_chance(made):
    few = made(job_of(tp=4, dp=16)).few(num_checks=8)
    of, seen = few.structure["num_inferred"], few.structure["num_sampled"]
    assert seen == 8
    assert few.structure["chance_unseen"] == {
        str(k): pytest.approx(comb(max(0, of - k), seen) / comb(of, seen), abs=1e-6)
        for k in (1, 10, 100)
    }
    assert roles.Roles(Layout.of_sizes([]), [0], frozenset()).chance_unseen(1) == 0.0


@pytest.mark.parametrize("seen", ["sender", "receiver"])
def test_an_odd_message_shows_at_its_other_end(seen, made):
    # Whichever of the two ranks is looked at, the other one is then run too.
    looked_at, other = 36, ODD
    source, target = (looked_at, other) if seen == "sender" else (other, looked_at)

    def program(made):
        train(made)
        if made.rank == source:
            made.call("send", peer=target)
        if made.rank == target:
            made.call("recv", peer=source)

    ranks = made(job_of(tp=4, dp=16), program)
    captured, _ = ranks.explore(num_checks=0)
    if other not in captured:
        assert looked_at not in captured
    every = ranks.every()
    inferred = [r for r in range(64) if r not in captured]
    if looked_at in inferred:
        drawn = (set(random.Random(s).sample(inferred, 4)) for s in itertools.count())
        seed = next(i for i, d in enumerate(drawn) if looked_at in d and other not in d)
    else:
        seed = 0
    few = ranks.few(num_checks=4, seed=seed)
    assert_same(every, few)
    assert few.ranks[other]["is_captured"]


def test_a_line_that_probes_do_not_meet_is_understood_from_one_sampled_rank(made):
    def program(made):  # tp=2, dp=1 in every stage
        made.call("all_reduce", made.group([made.rank]), count=1 + (made.rank % 16 == 6))
        train(made)

    ranks = made(job_of(tp=4, dp=4, pp=4), program)
    every, num_found = ranks.every(), 0
    for seed in range(6):
        few = ranks.few(num_checks=5, seed=seed)
        if few.structure["inferred_wrongly"]:
            num_found += 1
            assert_same(every, few)
    assert num_found > 1


def test_the_partner_of_an_odd_rank_is_run_too(made):
    def program(made):
        pair = made.group([made.rank // 2 * 2, made.rank // 2 * 2 + 1])
        for _ in range(4):
            made.call("all_reduce", pair, count=7 if made.rank in (ODD, ODD + 1) else 4)
            made.step()

    ranks = made(job_of(tp=4, dp=16), program)
    captured, _ = ranks.explore(num_checks=0)
    inferred = [r for r in range(64) if r not in captured]
    assert {ODD, ODD + 1} <= set(inferred)
    drawn = (set(random.Random(s).sample(inferred, 4)) for s in itertools.count())
    seed = next(i for i, d in enumerate(drawn) if ODD in d and ODD + 1 not in d)
    assert_same(ranks.every(), ranks.few(num_checks=4, seed=seed))


GPT = (
    "--hidden 16 --heads 4 --sequence 16 --data synthetic --vocabulary 32 --steps {iterations} "
    "--tp {tp} --pp {pp} --vp {vp} --cp {cp} --dp {dp} --ep {ep} --layers "
)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["pp-vp-cp-dp", "moe"])
def test_the_bundled_gpt(name, captured, made):
    parallelism, more = {
        "pp-vp-cp-dp": ({"pp": 4, "vp": 2, "cp": 2, "dp": 8}, "8"),
        "moe": ({"dp": 32, "tp": 2, "ep": 4}, "1 --num-experts 4"),
    }[name]
    job = Job(
        program="-m crystalllm.examples.gpt",
        arguments=GPT + more,
        world_size=64,
        capture_iterations=3,
        parallelism=Parallelism(**parallelism),
    )
    every = captured(job, "all")
    if name == "moe":
        few = captured(job, "roles", num_checks=4)
        # Split sizes follow from data, and those of virtual peers are invented.
        assert_same(every, few, with_splits=False)
    else:  # from the ranks that are there already
        ranks = made(job)
        (work,) = ranks.folder.glob("all/.work/capture/*/all")
        ranks.known = {r: Captured.read(work / f"rank-{r}.arrow") for r in range(64)}
        few = ranks.few(num_checks=4)
        assert_same(every, few)
    assert few.structure["num_captured"] < 56
    assert few.structure["inferred_wrongly"] == []
