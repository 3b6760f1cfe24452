"""What lanes did between the engine's events: everything comes out to the nanosecond."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from replay_worlds import Builder, one_forward_one_backward, worlds

from crystalllm.errors import UserError
from crystalllm.replay.engine import DeadlockError, Engine
from crystalllm.replay.live import Live
from crystalllm.replay.steps import Steps, follow
from crystalllm.replay.world import Durations, End, Op, World

ITERATIONS = 3


def _followed(world: World, engine: Engine, rank: int, iterations: int = ITERATIONS) -> Steps:
    events = engine.events()
    return follow(world, rank, events[events["rank"] == rank], iterations)


def _parts(found: Steps) -> list[dict[str, int]]:
    """Where the time before each mark of lane 0 went, as the engine's breakdown has it."""
    parts: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for step in found.steps:
        if step.lane != 0:
            continue
        at = sum(mark < step.end_ns for mark in found.marks)
        part = parts[at]
        if step.op == Op.RUN:
            part["compute"] += step.end_ns - step.start_ns
        elif step.op == Op.AWAIT:
            part["host"] += step.end_ns - step.start_ns
        else:
            transfer = min(max(step.call.start_ns, step.start_ns), step.end_ns)
            is_message = step.call.instruction.is_message
            part["bubble" if is_message else "wait"] += transfer - step.start_ns
            part["exposed"] += step.end_ns - transfer
    return [parts[at] for at in range(len(found.marks))]


@given(worlds())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_steps_fill_the_time_of_every_lane(world: World) -> None:
    with Engine(world) as engine:
        engine.watch(range(len(world.ranks)))
        try:
            engine.run(ITERATIONS)
        except DeadlockError:
            return  # lanes of one rank that wait for each other
        for rank in range(len(world.ranks)):
            found = _followed(world, engine, rank)
            assert found.marks == list(engine.marks(rank))
            assert found.ends == list(engine.lane_ends(rank))
            for lane, end in enumerate(found.ends):
                steps = [s for s in found.steps if s.lane == lane]
                # From 0 to the end without a gap.
                assert [s.start_ns for s in steps] == [0, *(s.end_ns for s in steps)][: len(steps)]
                assert (steps[-1].end_ns if steps else 0) == end
            expected = engine.breakdown(rank)
            for found_parts, row in zip(_parts(found), expected, strict=True):
                for name in ("compute", "host", "wait", "bubble", "exposed"):
                    assert found_parts.get(name, 0) == row[f"{name}_ns"]


def test_calls_meet_in_one_communication() -> None:
    world = one_forward_one_backward(4, 8).world(Durations(ns=[1000, 2000, 30]))
    with Engine(world) as engine:
        engine.watch(range(4))
        engine.run(2)
        calls = [c for rank in range(4) for c in _followed(world, engine, rank, 2).calls]
    meetings = defaultdict(list)
    for call in calls:
        meetings[call.comm, call.seq].append(call)
    assert {len(m) for m in meetings.values()} == {2}
    for one, other in meetings.values():
        send, recv = (one, other) if one.instruction.end == End.SELF else (other, one)
        assert recv.start_ns == send.arrival_ns  # an eager message is there from then on


def _pair() -> World:
    b = Builder(2)
    comm = b.group(2)
    for rank in range(2):
        b.run(rank, rank)
        b.wait(rank, b.call(rank, comm, 2, blocks=False))
        b.run(rank, 0)
    return b.world(Durations(ns=[100, 300, 50]))


def test_another_world_is_refused() -> None:
    world = _pair()
    with Engine(world) as engine:
        engine.watch([0])
        engine.run(2)
        other = World(
            world.programs, world.communicators, world.ranks, Durations(ns=[101, 300, 50])
        )
        with pytest.raises(UserError, match="not those of its world"):
            _followed(other, engine, 0, 2)
        with pytest.raises(UserError, match="1 calls more than the program has"):
            _followed(world, engine, 0, 1)


def test_a_replay_that_ended_early_is_followed_as_far_as_it_came() -> None:
    world = _pair()
    instruction = world.programs[1].lanes[0].body[1]
    with (
        Live(world, external=[1], num_iterations=3, watch=[0], has_thread=False) as live,
        live.client(1) as client,
    ):
        release = client.wait(client.arrive(instruction, at_ns=500), limit_s=10)
        client.mark(release.end_ns + 100)
        live.settle(10)
        found = _followed(world, live.stop(), 0, 3)
    assert found.ends == []
    assert [c.arrival_ns for c in found.calls] == [100, 750]
    assert found.calls[1].end_ns == -1  # rank 1 never came again
    # The wait for it has no end, and is none.
    ends = [(s.op, s.iteration, s.start_ns, s.end_ns) for s in found.steps]
    assert ends == [
        (Op.RUN, 1, 0, 100),
        (Op.WAIT, 1, 100, 550),
        (Op.RUN, 1, 550, 650),
        (Op.RUN, 2, 650, 750),
    ]
    assert found.marks == [650]
