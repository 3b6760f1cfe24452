"""Scenes: what ranks of a captured world do among themselves, and processes that play it."""

from __future__ import annotations

import os

import numpy as np
import pytest
from sandbox_program import make_job

from crystalllm.capture import capture
from crystalllm.errors import UserError
from crystalllm.replay.program import Capture
from crystalllm.transfers.case import Case
from crystalllm.transfers.measured import measure_scenes
from crystalllm.transfers.resolve import measure
from crystalllm.transfers.scenes import Post, Scene, scenes

REDUCED = Case("all_reduce", 4 * 32 * 4, "float32")  # of a tensor parallel pair
SENT = Case("send", 8 * 4, "float32")  # around the ring of all ranks
RECEIVED = Case("recv", 8 * 4, "float32")


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captured")
    capture(make_job(folder), folder / "capture")
    return Capture.read(folder / "capture")


def test_ranks_of_a_group_do_what_they_do_in_the_program(captured):
    scene = next(s for s in scenes(captured, [(REDUCED, 2)]) if s.ranks == (0, 1))
    # Rank 0 also sends to 1; what it gets from the last rank, and 1 sends on, is left out.
    assert [p.case for p in scene.posts[0]] == [REDUCED, SENT]
    assert [p.case for p in scene.posts[1]] == [REDUCED, RECEIVED]
    assert [p.peer for posts in scene.posts for p in posts] == [-1, 1, -1, 0]
    assert scene.groups == [[0, 1]]
    assert all(p.is_awaited for posts in scene.posts for p in posts)
    segments = captured.captured_durations().segments
    roles = captured.ranks["role"]
    for rank, steps in zip(scene.ranks, scene.steps, strict=True):
        done = [step for step in steps if step[0] != "compute"]
        assert done == [("post", 0), ("wait", [0]), ("post", 1), ("wait", [1])]
        body = [d.ns for at, d in segments.items() if at[0] == roles[rank] and at[2] == "body"]
        assert sum(ns for what, ns in steps if what == "compute") == sum(body)


def test_all_that_is_wanted_is_shown_by_few(captured):
    found = scenes(captured, [(REDUCED, 2), (SENT, 2), (RECEIVED, 2)])
    assert [s.ranks for s in found] == [(0, 1)]
    # Nobody waits at once for what DDP reduces, and nobody sends so much.
    for case, ranks in ((Case("all_reduce", 64 * 32 * 4), 4), (Case("send", 1 << 20), 2)):
        assert all(
            case not in {p.case for p in posts if p.is_awaited}
            for scene in scenes(captured, [(case, ranks)])
            for posts in scene.posts
        )


def test_calls_that_are_one_transfer_find_each_other():
    def post(kind, peer, tag=0):
        return Post(Case(kind, 4), 1, 0, peer=peer, tag=tag, is_awaited=True)

    scene = Scene(
        ranks=(3, 5),
        groups=[[0, 1]],
        posts=[
            [post("send", 1), post("send", 1, tag=7), post("recv", 1), post("all_reduce", -1)],
            [post("recv", 0, tag=7), post("send", 0), post("all_reduce", -1), post("recv", 0)],
        ],
    )
    found = {frozenset(calls) for calls in scene.transfers()}
    assert found == {
        frozenset({(0, 0), (1, 3)}),
        frozenset({(0, 1), (1, 0)}),
        frozenset({(0, 2), (1, 1)}),
        frozenset({(0, 3), (1, 2)}),
    }


def test_a_transfer_takes_from_the_last_arrival_to_the_last_end():
    reduced, sent, received = Case("all_reduce", 4), Case("send", 4), Case("recv", 4)
    scene = Scene(
        ranks=(0, 1),
        groups=[[0, 1]],
        posts=[
            [Post(reduced, 1, 0, is_awaited=True), Post(sent, 1, 0, peer=1)],
            [Post(reduced, 1, 0, is_awaited=True), Post(received, 1, 0, peer=0, is_awaited=True)],
        ],
    )
    # (arrival, return, end, time of other threads after it, is exact); two repetitions
    stamps = np.array(
        [
            [
                [[100, 110, 170, 30, 1], [300, 330, 0, 20, 0]],
                [[1100, 1110, 1180, 40, 1], [1300, 1330, 0, 0, 0]],
            ],
            [
                [[150, 154, 190, 4, 1], [200, 210, 320, 0, 0]],
                [[1120, 1124, 1990, 10, 0], [1400, 1410, 1430, 0, 1]],
            ],
        ]
    )
    found = {case: (ranks, of_call.tolist()) for case, ranks, of_call in scene.samples(stamps)}
    # For the send nobody waited: when it ended is not known, only what it cost.
    assert found == {
        reduced: (2, [[40, (30 + 4) / 2, (10 + 4) / 2, 1], [60, (40 + 10) / 2, (10 + 4) / 2, 1]]),
        sent: (2, [[0, 20, 30, 0], [0, 0, 30, 0]]),
        received: (2, [[20, 0, 10, 0], [30, 0, 10, 1]]),
    }


def _cores(number):
    found = sorted(os.sched_getaffinity(0))
    return found[:number] if len(found) >= number else ()


def test_processes_play_it(captured):
    played = scenes(captured, [(REDUCED, 2)])[:1]
    rows, untimed = measure_scenes(played, _cores(2), rounds=2, repetitions=6, limit_s=60)
    cases = [Case(r.kind, r.bytes, r.dtype) for r in (*rows, *untimed)]
    # When messages end only a wait tells that comes at once, which others on a core delay.
    assert (len(cases), set(cases)) == (3, {REDUCED, SENT, RECEIVED})
    assert REDUCED in cases[: len(rows)]
    for row in rows:
        assert row.ranks == 2
        assert row.count == 12
        assert 0 < row.low_ns <= row.median_ns <= row.high_ns < 10**9
        assert row.call_ns > 0


def test_what_gloo_works_while_the_program_waits_costs_it_nothing():
    """Computation that ends before the transfer loses nothing; a longer one, gloo's whole time."""
    ms = 1_000_000
    case = Case("all_reduce", 1 << 23, "float32")

    def cost_ns(compute_ns):
        steps = [("compute", ms), ("post", 0), ("compute", compute_ns), ("wait", [0])]
        scene = Scene(
            ranks=(0, 1),
            groups=[[0, 1]],
            posts=[[Post(case, 1 << 21, 0, is_awaited=True)]] * 2,
            steps=[steps] * 2,
        )
        (row,), _ = measure_scenes([scene], _cores(2), rounds=1, repetitions=10, limit_s=60)
        return row.cpu_ns

    assert cost_ns(ms) < ms / 2
    assert cost_ns(60 * ms) > ms


def test_a_call_has_ended_before_a_late_wait():
    """Gloo's thread tells of an all_reduce; of a reduce_scatter only the wait does, too late."""
    ms = 1_000_000
    reduced, scattered = (
        Case("all_reduce", 4096, "float32"),
        Case("reduce_scatter", 8192, "float32"),
    )
    steps = [("compute", ms), ("post", 0), ("post", 1), ("compute", 60 * ms), ("wait", [0, 1])]
    scene = Scene(
        ranks=(0, 1),
        groups=[[0, 1]],
        posts=[[Post(reduced, 1024, 0), Post(scattered, 1024, 0, is_awaited=True)]] * 2,
        steps=[steps] * 2,
    )
    (row,), (untimed,) = measure_scenes([scene], _cores(2), rounds=1, repetitions=10, limit_s=60)
    assert (row.kind, row.count) == ("all_reduce", 10)
    assert 0 < row.median_ns < 30 * ms
    # What the other call takes from the program is known all the same.
    assert untimed.kind == "reduce_scatter"
    assert untimed.call_ns > 0


def test_what_a_capture_needs_comes_from_scenes_where_it_can(captured):
    found = measure(captured, _cores(2) or pytest.skip("needs two cores"))
    assert {(r.kind, r.bytes, r.ranks) for r in found.rows} >= {
        (c.kind, c.num_bytes, 2) for c in (REDUCED, SENT, RECEIVED)
    }
    # Several calls of one repetition are several samples: it was played, not taken alone.
    assert all(r.count > 210 for r in found.rows if r.kind == "all_reduce" and r.bytes == 512)


def test_processes_that_do_not_fit_end_within_the_limit(captured):
    """One waits for a call that the other never makes."""
    scene = scenes(captured, [(REDUCED, 2)])[0]
    scene.steps[1] = [step for step in scene.steps[1] if step != ("post", 0)]
    scene.steps[1].remove(("wait", [0]))
    with pytest.raises(UserError, match=r"Measuring gloo (failed|took longer than 8 s)"):
        measure_scenes([scene], _cores(2), rounds=1, repetitions=5, limit_s=8)
