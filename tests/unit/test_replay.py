"""The replay engine against its reference, closed forms, and a real trace."""

from __future__ import annotations

from collections import Counter

import kineto_files
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_worlds import Builder, one_forward_one_backward, worlds

from crystalllm import tables
from crystalllm.replay import reference, shared_reference
from crystalllm.replay.engine import DeadlockError, Engine, ReplayError
from crystalllm.replay.world import (
    Durations,
    End,
    Instruction,
    Op,
    Perturbation,
    PerturbationKind,
)
from crystalllm.traces import kineto


def _rows(events):
    return Counter(tuple(int(v) for v in event) for event in events)


def _reference_rows(events):
    return Counter(
        (e.rank, e.lane, e.iteration, e.call, e.arrival_ns, e.start_ns, e.end_ns) for e in events
    )


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(world=worlds(), num_iterations=st.integers(0, 3))
def test_engine_and_reference_agree_to_the_nanosecond(world, num_iterations):
    expected, marks = reference.replay(world, num_iterations)
    with Engine(world) as engine:
        engine.watch(range(len(world.ranks)))
        engine.run(num_iterations)
        assert _rows(engine.events()) == _reference_rows(expected)
        for rank, at in marks.items():
            assert list(engine.marks(rank)) == at
        # A second run of the same world is the same run.
        engine.run(num_iterations)
        assert _rows(engine.events()) == _reference_rows(expected)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(world=worlds(), data=st.data())
def test_a_world_in_which_somebody_gets_stuck_is_an_error_in_both(world, data):
    """One instruction of one lane is left out, or two change places."""
    program = data.draw(st.sampled_from(world.programs))
    lane = data.draw(st.sampled_from(program.lanes))
    section = data.draw(st.sampled_from([lane.prologue, lane.body, lane.epilogue]))
    if len(section) > 1:
        i, j = (data.draw(st.integers(0, len(section) - 1)) for _ in range(2))
        if i == j:
            del section[i]
        else:
            section[i], section[j] = section[j], section[i]
    try:
        expected, _ = reference.replay(world, 2)
    except reference.Deadlock:
        with Engine(world) as engine, pytest.raises(ReplayError):
            engine.run(2)
        return
    with Engine(world) as engine:
        engine.watch(range(len(world.ranks)))
        engine.run(2)
        assert _rows(engine.events()) == _reference_rows(expected)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(world=worlds(shares_links=True), num_iterations=st.integers(0, 3))
def test_links_are_shared_as_in_the_event_loop(world, num_iterations):
    expected, marks = shared_reference.replay(world, num_iterations)
    with Engine(world) as engine:
        engine.watch(range(len(world.ranks)))
        engine.run(num_iterations)
        assert _rows(engine.events()) == _reference_rows(expected)
        assert {r: list(engine.marks(r)) for r in marks} == marks
    if not world.durations.link_classes:  # two references that know nothing of each other
        plain, _ = reference.replay(world, num_iterations)
        assert _reference_rows(plain) == _reference_rows(expected)


# --- closed forms --------------------------------------------------------------------

FORWARD, BACKWARD = 1_000_000, 2_000_000


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (8, 8), (8, 64)])
def test_1f1b_has_a_bubble_of_p_minus_1_over_m(stages, microbatches):
    b = one_forward_one_backward(stages, microbatches)
    with Engine(b.world(Durations(ns=[FORWARD, BACKWARD, 0]))) as engine:
        engine.run(1)
        took = max(engine.marks(rank)[0] for rank in range(stages))
        busy = engine.breakdown(0)["compute_ns"][0]
    assert busy == microbatches * (FORWARD + BACKWARD)
    assert (took - busy) / busy == (stages - 1) / microbatches


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 16, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(stages, microbatches, chunks):
    b = one_forward_one_backward(stages, microbatches, chunks=chunks)
    with Engine(b.world(Durations(ns=[FORWARD, BACKWARD, 0]))) as engine:
        engine.run(1)
        took = max(engine.marks(rank)[0] for rank in range(stages))
    busy = microbatches * chunks * (FORWARD + BACKWARD)
    assert (took - busy) / busy == (stages - 1) / (chunks * microbatches)


def test_a_ring_of_sends_takes_one_transfer_per_round():
    n, rounds = 6, 5
    b = Builder(n)
    for _ in range(rounds):
        for rank in range(n):
            send = b.call(rank, b.pair(rank, (rank + 1) % n), 1, blocks=False, is_message=True)
            b.call(rank, b.pair((rank - 1) % n, rank), 1, is_message=True)
            b.wait(rank, send)
    with Engine(b.world(Durations(ns=[0, 700]))) as engine:
        engine.run(3)
        for rank in range(n):
            assert list(engine.marks(rank)) == [rounds * 700 * k for k in (1, 2, 3)]


def test_one_straggler_delays_everybody_by_exactly_its_lateness():
    n = 5

    def ends(late_ns):
        b = Builder(n)
        comm = b.group(n)
        for rank in range(n):
            b.run(rank, 0)
            b.call(rank, comm, 1)
        pause = Perturbation(kind=PerturbationKind.PAUSE_IN, rank=3, first=2, pause_ns=late_ns)
        world = b.world(Durations(ns=[1000, 50], perturbations=[pause]))
        with Engine(world) as engine:
            engine.run(2)
            return [list(engine.marks(r)) for r in range(n)], engine.breakdown(0)

    on_time, _ = ends(0)
    late, parts = ends(777)
    assert on_time == [[1050, 2100]] * n
    assert late == [[1050, 2877]] * n
    assert parts["wait_ns"].tolist() == [0, 777]
    assert parts["exposed_ns"].tolist() == [50, 50]


def test_two_transfers_at_one_rank_take_turns_or_share():
    """1000 ns each: the second starts at 400, both go on at half speed."""

    def ends(link_classes):
        b = Builder(3)
        first, second = b.pair(0, 1), b.pair(0, 2)
        b.call(0, first, 0, blocks=False, is_message=True)
        b.run(0, 1)
        handle = b.call(0, second, 0, blocks=False, is_message=True)
        b.call(1, first, 0, is_message=True)
        b.call(2, second, 0, is_message=True)
        b.wait(0, handle)
        world = b.world(Durations(ns=[1000, 400], link_classes=link_classes))
        with Engine(world) as engine:
            engine.run(1)
            return [int(engine.marks(r)[0]) for r in range(3)]

    assert ends(()) == [1400, 1000, 1400]
    assert ends([0, 1]) == [1400, 1000, 1400]
    # The first has 600 left, which take 1200; the second has then 400 left.
    assert ends([0, 0]) == [2000, 1600, 2000]


# --- what comes with a run ---------------------------------------------------------------


def test_time_is_divided_without_remainder():
    """Between two marks, the parts of the lane that marks are all there is."""
    b = one_forward_one_backward(4, 8)
    with Engine(b.world(Durations(ns=[FORWARD, BACKWARD, 1000]))) as engine:
        engine.run(3)
        for rank in range(4):
            parts = engine.breakdown(rank)
            total = sum(parts[name] for name in parts.dtype.names)
            assert total.tolist() == np.diff(engine.marks(rank), prepend=0).tolist()


def test_the_critical_path_leads_to_the_straggler():
    b = Builder(3)
    comm = b.group(3)
    for rank in range(3):
        b.run(rank, 0)
        b.call(rank, comm, 1)
        b.run(rank, 2)
    world = b.world(Durations(ns=[1000, 50, 10], rank_factors=[1.0, 1.5, 1.2]))
    with Engine(world) as engine:
        engine.trace(2)
        engine.run(3)
        steps = engine.critical_path()
    # From the last mark back: rank 1 computes longest, before and after the collective.
    found = [(int(s["rank"]), Op(s["op"]).name) for s in steps]
    assert found == [(1, "MARK"), (1, "RUN"), (1, "COMM"), (1, "RUN")]
    assert steps["end_ns"][0] - steps["start_ns"][-1] == 1500 + 50 + 15
    # Rank 2 is the next to arrive, 300 ns of computing and 3 ns of the last step earlier.
    assert steps["slack_ns"][2] == 50
    assert (np.diff(steps["end_ns"]) <= 0).all()


def test_draws_depend_on_the_seed_alone():
    b = one_forward_one_backward(4, 8)

    def marks(seed):
        durations = Durations(ns=[FORWARD, BACKWARD, 1000], spread=[0.1, 0.1, 0.5], seed=seed)
        with Engine(b.world(durations)) as engine:
            engine.run(5)
            return [engine.marks(r).tobytes() for r in range(4)]

    assert marks(1) == marks(1)
    assert marks(1) != marks(2)


def test_calls_that_do_not_fit_are_named():
    b = Builder(2)
    comm = b.group(2)
    for rank in range(2):
        b.call(rank, comm, 0, form=rank)
    with (
        Engine(b.world(Durations(ns=[0]))) as engine,
        pytest.raises(
            ReplayError, match=r"do not fit together\. Rank [01] in call 0 and rank [01] in call 0"
        ),
    ):
        engine.run(1)


def test_a_circle_is_named_with_its_ranks_and_calls():
    b = Builder(2)
    for rank in range(2):
        b.call(rank, b.pair(1 - rank, rank), 0, is_message=True)
        b.call(rank, b.pair(rank, 1 - rank), 0, is_message=True)
    with (
        Engine(b.world(Durations(ns=[0]))) as engine,
        pytest.raises(
            DeadlockError,
            match=r"in a circle\. rank [01] \(lane 0, iteration 1\) in call 0, .* "
            r"waits for rank [01] \(lane 0, iteration 1\) in call 0",
        ),
    ):
        engine.run(1)


def test_eager_sends_do_not_block():
    b = Builder(2)
    for rank in range(2):
        to, back = b.pair(rank, 1 - rank), b.pair(1 - rank, rank)
        b.call(rank, to, 0, end=End.SELF, is_root=True, is_message=True)
        b.call(rank, back, 1, end=End.AFTER_DATA, is_message=True)
    with Engine(b.world(Durations(ns=[10, 100], drain_ns=[0, 5]))) as engine:
        engine.run(1)
        assert [engine.marks(r)[0] for r in range(2)] == [105, 105]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cls": 5}, "no duration. Class 5"),
        ({"slot": 3}, "fewer connections than its program uses. Rank 0"),
        ({"op": Op.WAIT, "handle": -1}, "handle, channel or class that is not there"),
    ],
)
def test_nonsense_is_refused(change, message):
    b = Builder(1)
    b.call(0, b.group(1), 0)
    world = b.world(Durations(ns=[0]))
    world.programs[0].lanes[0].body[0] = Instruction(**{"op": Op.COMM, **change})
    with pytest.raises(ReplayError, match=message), Engine(world) as engine:
        engine.run(1)


# --- a real run ------------------------------------------------------------------------


def _dlrm(tmp_path):
    """Per rank, (arrival, end) in ns of the eight collectives of the real step."""
    kineto.import_traces([kineto_files.real("param/dlrm_kineto.tar.gz")], tmp_path)
    events, _ = tables.EVENTS.read(tmp_path / "events.parquet")
    times, _ = tables.EVENT_TIMES.read(tmp_path / "event_times.parquet")
    rows = events.to_pandas().merge(times.to_pandas(), on=["rank", "event"])
    rows = rows[(rows["kind"] == "COMM_COLL") & (rows["call"] >= 0)]
    rows["end_ns"] = rows["start_ns"] + rows["duration_ns"]
    by_rank = [g.sort_values("start_ns") for _, g in rows.groupby("rank")]
    assert len(by_rank) == 8
    return np.array([g[["start_ns", "end_ns"]].to_numpy() for g in by_rank])


def _replayed_ends(moments, transfers):
    """Ends by the engine: each rank's own gaps as computation, the given transfer times."""
    num_ranks, num_calls, _ = moments.shape
    begin = moments[:, 0, 0].min()
    b = Builder(num_ranks)
    comm = b.group(num_ranks)
    durations = []
    for rank in range(num_ranks):
        free = begin
        for call in range(num_calls):
            b.run(rank, len(durations))
            durations.append(int(moments[rank, call, 0] - free))
            free = moments[rank, call, 1]
            b.call(rank, comm, num_ranks * num_calls + call)
    world = b.world(Durations(ns=[*durations, *map(int, transfers)]))
    with Engine(world) as engine:
        engine.watch(range(num_ranks))
        engine.run(1)
        events = engine.events()
    return np.array([events[events["rank"] == r]["end_ns"] for r in range(num_ranks)]) + begin


def test_a_real_step_of_eight_ranks_is_reproduced_from_its_gaps(tmp_path):
    moments = _dlrm(tmp_path)
    starts, ends = moments[:, :, 0], moments[:, :, 1]
    # A transfer begins when the last rank has come.
    transfers = np.median(ends, axis=0) - starts.max(axis=0)
    error = np.abs(_replayed_ends(moments, transfers) - ends)
    assert error.max() < 10_000

    # A recorded duration includes waiting for the others and is no transfer time.
    durations = np.median(ends - starts, axis=0)
    assert np.abs(_replayed_ends(moments, durations) - ends).max() > 100_000
