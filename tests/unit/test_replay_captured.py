"""Replay of what was captured: programs from events, duration tables, what-ifs."""

from __future__ import annotations

import json
from dataclasses import replace as changed
from types import SimpleNamespace

import numpy as np
import pytest

from crystalllm import tables
from crystalllm.capture import capture
from crystalllm.config import load_job
from crystalllm.errors import UserError
from crystalllm.replay import dependencies, program, reference, shared_reference, what_if
from crystalllm.replay.durations import Duration, DurationTable
from crystalllm.replay.engine import DeadlockError, Engine
from crystalllm.replay.offline import replay
from crystalllm.replay.world import Durations, Lane, Program, Rank, World
from crystalllm.transfers.uniform import uniform_transfers

# Two stages of two ranks: gradients within a stage, activations between them, a
# broadcast, messages in a batch, and tokens exchanged in changing numbers.
TRAIN = """
import argparse, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
dist.init_process_group("gloo")
rank = dist.get_rank()
stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Linear(64, 64), process_group=stages[rank // 2]
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = (rank + 2) % 4
for step in range(steps):
    x = torch.randn(8, 64)
    if rank >= 2:
        dist.recv(x, other)
    loss = model(x).square().mean()
    if rank < 2:
        dist.send(x, other)
    loss.backward()
    back = torch.zeros(8, 64)
    swaps = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, back, other)]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    mine = [1 + (rank + step) % 2] * 4
    theirs = [1 + (r + step) % 2 for r in range(4)]
    out = torch.zeros(sum(theirs), 8)
    dist.all_to_all_single(out, torch.ones(sum(mine), 8), theirs, mine)
    rate = torch.tensor([0.1])
    dist.broadcast(rate, src=3)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory, virtual):
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(TRAIN)
    job = {
        "program": str(folder / "train.py"),
        "arguments": "--steps {iterations}",
        "world_size": 4,
        "iterations": 6,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    capture(load_job(str(folder / "job.yaml")), folder / "capture", limit_s=60)
    return folder / "capture"


@pytest.fixture
def durations(captured):
    found = program.Capture.read(captured)
    table = found.captured_durations()
    table.transfers = uniform_transfers(found.calls, latency_ns=5000, bytes_per_s=1e9)
    return table


@pytest.mark.parametrize("draw", [False, True])
@pytest.mark.parametrize("eager_bytes", [0, 10_000])
def test_a_captured_world_is_replayed_as_the_reference_does(captured, durations, draw, eager_bytes):
    made = program.build(
        program.Capture.read(captured), durations, draw=draw, seed=3, eager_bytes=eager_bytes
    )
    expected, marks = reference.replay(made.world, 4)
    with Engine(made.world) as engine:
        engine.watch(range(4))
        engine.run(4)
        found = sorted(tuple(int(v) for v in e) for e in engine.events())
        assert found == sorted(
            (e.rank, e.lane, e.iteration, e.call, e.arrival_ns, e.start_ns, e.end_ns)
            for e in expected
        )
        assert [list(engine.marks(r)) for r in range(4)] == [marks[r] for r in range(4)]


def test_modelled_transfers_share_links(captured, durations):
    found = program.Capture.read(captured)
    made = program.build(found, durations, share_links=True)
    # All four ranks are one node.
    assert set(made.world.durations.link_classes) == {0}
    _, marks = shared_reference.replay(made.world, 3)
    with Engine(made.world) as engine:
        engine.run(3)
        assert {r: list(engine.marks(r)) for r in marks} == marks
    # What was measured as it overlaps shares nothing.
    measured = {k: changed(d, source="measured") for k, d in durations.transfers.items()}
    made = program.build(found, DurationTable(durations.segments, measured), share_links=True)
    assert set(made.world.durations.link_classes) == {-1}


def test_the_results_are_tables(captured, durations, tmp_path):
    found = replay(program.Capture.read(captured), tmp_path, durations, iterations=3, ranks=[0, 3])
    rows, provenance = tables.ITERATIONS.read(tmp_path / "iterations.parquet")
    frame = rows.to_pandas()
    assert set(frame["rank"]) == {0, 1, 2, 3}
    assert set(frame["iteration"]) == {0, 1, 2, 3}
    parts = frame[["compute_ns", "host_ns", "wait_ns", "bubble_ns", "exposed_ns"]].sum(axis=1)
    assert (parts == frame["duration_ns"]).all()
    assert provenance["iterations"] == 3
    calls, _ = tables.REPLAYED_CALLS.read(tmp_path / "calls.parquet")
    calls = calls.to_pandas()
    assert set(calls["rank"]) == {0, 3}
    of_body = calls[(calls["rank"] == 0) & (calls["iteration"] == 2)]["kind"].astype(str)
    assert sorted(of_body) == sorted(
        ["send", "all_reduce", "send", "recv", "all_to_all", "broadcast"]
    )
    assert (calls["start_ns"] >= 0).all()
    path, _ = tables.CRITICAL_PATH.read(tmp_path / "critical_path.parquet")
    path = path.to_pandas()
    assert path["what"].iloc[0] == "MARK"
    # Everything else says which segment or which call it is.
    assert (path["name"].iloc[1:] != "").all()
    assert (np.diff(path["end_ns"]) <= 0).all()
    # The path is gapless: each step begins where the next one in the list ends.
    assert (path["start_ns"].to_numpy()[:-1] == path["end_ns"].to_numpy()[1:]).all()
    assert path["end_ns"].iloc[0] == frame["end_ns"].max()
    assert 0 < found["iteration_ns"] <= frame["end_ns"].max()
    # What the critical path rests on is all of it.
    sources = found["sources"]
    assert set(sources["compute"]) == {"captured"}
    assert set(sources["transfers"]) == {"model"}
    in_steps = path["end_ns"] - path["start_ns"]
    computed = in_steps[path["what"] == "RUN"].sum() / in_steps.sum()
    assert sources["compute"]["captured"] == pytest.approx(computed, abs=1e-5)
    assert sources["transfers"]["model"] == pytest.approx(1 - computed, abs=1e-5)
    again = tmp_path / "again"
    replay(program.Capture.read(captured), again, durations, iterations=3, ranks=[0, 3])
    for name in ("iterations", "calls", "critical_path"):
        file = f"{name}.parquet"
        assert (again / file).read_bytes() == (tmp_path / file).read_bytes()


def test_what_ifs_change_what_they_say(captured, durations, tmp_path):
    def iteration_ns(text):
        path = tmp_path / "what-if.yaml"
        path.write_text(text)
        out = tmp_path / "out"
        return replay(program.Capture.read(captured), out, durations, iterations=4, what_ifs=path)[
            "iteration_ns"
        ]

    usual = replay(program.Capture.read(captured), tmp_path / "usual", durations, iterations=4)[
        "iteration_ns"
    ]
    assert iteration_ns("[]") == usual
    # All ranks meet in every iteration, so a pause of one delays all of them.
    paused = "[{what: pause, rank: 2, pause_ms: 50, first: 4, every: 0}]"
    assert usual + 45_000_000 < iteration_ns(paused) <= usual + 50_000_000
    assert iteration_ns("[{what: slow-rank, rank: 1, factor: 3}]") > usual
    assert iteration_ns("[{what: slow-link, group: default_pg, factor: 100}]") > usual


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{what: slow-rank, rank: 4, factor: 2}]", "Rank 4 is outside the world"),
        ("[{what: slow-rank, rank: 1, faktor: 2}]", "faktor"),
        ("[{what: slow-disk, rank: 1}]", "slow-disk"),
        ("[{what: pause, rank: 1, pause_ms: 2}]", "either at_ms or first"),
        ("{", "cannot be read"),
    ],
)
def test_wrong_what_ifs_are_explained(tmp_path, text, message):
    (tmp_path / "what-if.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        what_if.load(tmp_path / "what-if.yaml", world_size=4)
    with pytest.raises(UserError, match="cannot be read"):
        what_if.load(tmp_path / "none.yaml", world_size=4)


def test_a_link_that_is_not_there_is_refused(captured, durations, tmp_path):
    (tmp_path / "w.yaml").write_text("[{what: slow-link, group: mesh_tp, factor: 2}]")
    with pytest.raises(UserError, match=r"No group is called mesh_tp.*default_pg"):
        replay(
            program.Capture.read(captured),
            tmp_path,
            durations,
            iterations=1,
            what_ifs=tmp_path / "w.yaml",
        )


def test_a_duration_table_survives_its_file(durations, tmp_path):
    durations.save(tmp_path / "durations.parquet", provenance={})
    assert DurationTable.load(tmp_path / "durations.parquet") == durations
    split = [d for key, d in durations.transfers.items() if "count=split" in key]
    assert len(split) == 1
    assert len(split[0].choices) == 2


def test_parts_of_a_measurement_are_drawn(captured, durations):
    parts = {key: changed(d, parts_ns=(70, 90)) for key, d in durations.transfers.items()}
    of_parts = DurationTable(durations.segments, parts)
    found = program.Capture.read(captured)
    made = program.build(found, of_parts, draw=True)
    drawn = made.world.durations.choices
    assert ((70, 1), (90, 1)) in drawn.values()
    # A call whose size varies takes one of its sizes' times.
    assert {c for c in drawn.values() if c != ((70, 1), (90, 1))} == {
        d.choices for d in durations.transfers.values() if d.choices
    }
    assert not program.build(found, of_parts).world.durations.choices


def test_what_a_table_lacks_is_named(captured, durations):
    key = next(iter(durations.transfers))
    found = program.Capture.read(captured)
    fewer = DurationTable(
        durations.segments, {k: d for k, d in durations.transfers.items() if k != key}
    )
    with pytest.raises(UserError, match="no transfer time"):
        program.build(found, fewer)
    with pytest.raises(UserError, match="segment of computation has no duration"):
        program.build(found, DurationTable({}, durations.transfers))
    assert durations.transfer(key) == durations.transfers[key]
    assert isinstance(durations.transfers[key], Duration)


# --- streams ---------------------------------------------------------------------------


def _kernels(*rows):
    """Rows of `events` with a lane, a kind, and what each comes after."""
    names = ("event", "lane", "kind", "after", "call", "mark")
    return [SimpleNamespace(**dict(zip(names, (*row, -1, 0), strict=True))) for row in rows]


def _stream_program(rows, *, one_connection):
    """Compiled without a capture around it: one rank, every kernel takes 100 ns."""
    durations = DurationTable(
        {(0, lane, "body", i): Duration(100) for lane in ("stream:1", "stream:2") for i in range(9)}
        | {(0, "host:0", "body", i): Duration(10) for i in range(9)}
    )
    compiler = program._Compiler(None, durations, program._Classes(), {}, 0, 0, one_connection)
    compiler.calls = {}
    compiler.dependencies = dependencies.find({"body": rows}, one_connection=one_connection)
    lanes = []
    for lane in dict.fromkeys(row.lane for row in rows):
        body = compiler._instructions(lane, "body", [r for r in rows if r.lane == lane])
        lanes.append(Lane(body=body))
    world = World([Program(lanes)], [], [Rank(0, [])], Durations(ns=compiler.classes.ns))
    with Engine(world) as engine:
        engine.run(1)
        return [int(t) for t in engine.lane_ends(0)]


def test_launches_records_and_synchronisation_order_streams():
    rows = _kernels(
        (0, "host:0", "COMP", -1),
        (1, "host:0", "COMP", -1),  # launches 2
        (2, "stream:1", "COMP", 1),
        (3, "stream:1", "RECORD", -1),
        (4, "host:0", "COMP", -1),  # launches 6, which waits for the record
        (5, "stream:2", "WAIT", 3),
        (6, "stream:2", "COMP", 4),
        (7, "host:0", "SYNC", 6),
    )
    host, first, second = _stream_program(rows, one_connection=False)
    assert first == 20 + 100
    assert second == 120 + 100
    assert host == 220


def test_one_connection_lets_nothing_overtake():
    # Three kernels, launched in turn: the second waits for the first's stream-mate, the
    # third is on a stream of its own and could go ahead.
    rows = _kernels(
        (0, "host:0", "COMP", -1),
        (1, "stream:1", "COMP", 0),
        (2, "host:0", "COMP", -1),
        (3, "stream:1", "COMP", 2),
        (4, "host:0", "COMP", -1),
        (5, "stream:2", "COMP", 4),
    )
    assert _stream_program(rows, one_connection=False) == [30, 210, 130]
    # It was launched behind one that begins at 110.
    assert _stream_program(rows, one_connection=True) == [30, 210, 210]


def test_a_circle_is_named_with_ranks_calls_and_groups(tmp_path, virtual):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "other = 1 - dist.get_rank()\n"
        "p = torch.nn.Parameter(torch.ones(4))\n"
        "optimizer = torch.optim.SGD([p], lr=0.1)\n"
        "for _ in range(4):\n"
        "    dist.send(p.detach(), other)\n"
        "    dist.recv(torch.ones(4), other)\n"
        "    p.grad = torch.ones(4)\n"
        "    optimizer.step()\n"
    )
    job = {"program": str(tmp_path / "train.py"), "world_size": 2, "iterations": 4}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    # Both send first, which works where messages are buffered, and only there.
    found = capture(
        load_job(str(tmp_path / "job.yaml")), tmp_path / "capture", eager_bytes=1000, limit_s=60
    )
    assert "relies on buffering" in found["warnings"][0]
    both_send = program.Capture.read(tmp_path)
    table = both_send.captured_durations()
    table.transfers = uniform_transfers(both_send.calls, latency_ns=1000, bytes_per_s=1e9)
    out = tmp_path / "out"
    assert replay(both_send, out, table, iterations=2, eager_bytes=1000)["iteration_ns"] > 0
    with pytest.raises(
        DeadlockError,
        match=r"in a circle\. rank [01] .* in call \d+, communicator \d \(group default_pg 2:1\)",
    ):
        replay(both_send, out, table, iterations=2)
