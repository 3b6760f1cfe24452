"""The profile: what slices measured becomes each segment's duration."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from crystalllm.planning import profile
from crystalllm.replay.durations import Duration, DurationTable

WARM_UP = 2


def segments(rank, role, body, *, prologue=(1000,), epilogue=(7,)):
    """Rows of `segments`: `body` is (iteration, position)-shaped durations on one lane, of
    which a quarter is in calls."""
    body = np.asarray(body)
    sections = [("prologue", 0, prologue)]
    sections += [("body", k, row) for k, row in enumerate(body, 1)]
    sections += [("epilogue", len(body) + 1, epilogue)]
    return pd.DataFrame(
        [
            (
                rank,
                role,
                iteration,
                "host:0",
                section,
                position,
                0,
                duration - duration // 4,
                duration // 4,
            )
            for section, iteration, durations in sections
            for position, duration in enumerate(durations)
        ],
        columns=[
            "rank",
            "role",
            "iteration",
            "lane",
            "section",
            "position",
            "start_ns",
            "duration_ns",
            "call_ns",
        ],
    )


def rows(*ranks, factors=None, **numbers):
    frame = pd.concat(ranks, ignore_index=True)
    return profile.rows(
        frame,
        **{"pass_number": 1, "slice_number": 1, **numbers},
        factors=factors or dict.fromkeys(frame["rank"].unique(), 1.0),
        warm_up=WARM_UP,
    )


def at(section, position, role=0):
    return role, "host:0", section, position


def test_medians_over_measured_iterations_and_ranks():
    # Two warm-up bodies that took far longer, then three that count.
    first = segments(0, 0, [[900, 900], [900, 900], [10, 100], [30, 300], [20, 200]])
    second = segments(4, 0, [[900, 900], [900, 900], [40, 400], [60, 600], [50, 500]])
    found = profile.durations(rows(first, second))
    assert found[at("body", 0)].ns == 35
    assert found[at("body", 1)].ns == 350
    assert found[at("body", 0)].count == 6
    assert found[at("body", 0)].source == "measured"
    # Linear between the measurements, as quantiles are by default.
    assert (found[at("body", 0)].low_ns, found[at("body", 0)].high_ns) == (15, 55)


def test_slices_of_a_role_are_taken_together():
    one = rows(segments(0, 0, [[1], [1], [10], [10], [10]]))
    other = rows(segments(9, 0, [[1], [1], [30], [30], [30]]), slice_number=2)
    found = profile.durations(pd.concat([one, other]))
    assert (found[at("body", 0)].ns, found[at("body", 0)].count) == (20, 6)


def test_prologue_and_epilogue_occur_once_in_each_rank():
    body = [[1], [1], [1]]
    ranks = [segments(r, 0, body, prologue=(100 * r, 5), epilogue=(10 * r,)) for r in (1, 2, 6)]
    found = profile.durations(rows(*ranks))
    assert (found[at("prologue", 0)].ns, found[at("prologue", 0)].count) == (200, 3)
    assert found[at("prologue", 1)].ns == 5
    assert found[at("epilogue", 0)].ns == 20


def test_roles_are_apart():
    found = profile.durations(rows(segments(0, 0, [[1]] * 5), segments(8, 1, [[2]] * 5)))
    assert (found[at("body", 0, role=0)].ns, found[at("body", 0, role=1)].ns) == (1, 2)


def test_durations_are_brought_to_one_speed():
    measured = rows(
        segments(0, 0, [[100]] * 5), segments(1, 0, [[130]] * 5), factors={0: 1.0, 1: 0.8}
    )
    of_rank = measured[measured["rank"] == 1]
    assert set(of_rank["duration_ns"] + of_rank["call_ns"]) >= {130}
    body = measured[measured["section"] == "body"]
    assert set(body.loc[body["rank"] == 1, "calibrated_ns"]) == {104}
    assert profile.durations(measured)[at("body", 0)].ns == 102


def test_the_spread_is_that_of_the_lognormal_with_these_deciles():
    draw = np.random.default_rng(0)
    body = 1e6 * np.exp(0.2 * draw.standard_normal((4000, 1)))
    body[::50] *= 30  # now and then something else took the core
    found = profile.durations(rows(segments(0, 0, np.round(body).astype(int))))[at("body", 0)]
    assert found.sigma == pytest.approx(0.2, rel=0.08)
    assert found.ns == pytest.approx(1e6, rel=0.02)
    constant = profile.durations(rows(segments(0, 0, [[5]] * 30)))[at("body", 0)]
    assert constant.sigma == 0
    few = profile.durations(rows(segments(0, 0, [[1], [1], [5], [50]])))[at("body", 0)]
    assert few.sigma == 0


def test_what_an_iteration_has_in_common_is_no_spread_of_its_segments():
    """Segments are drawn one by one: a slow second would be drawn as many slow and fast moments."""
    draw = np.random.default_rng(0)
    own = np.exp(0.05 * draw.standard_normal((2000, 8)))
    common = np.exp(0.4 * draw.standard_normal((2000, 1)))
    table = profile.durations(rows(segments(0, 0, np.round(1e6 * own * common).astype(int))))
    for position in range(8):
        found = table[at("body", position)]
        # The rest of the iteration, to which each is held, has some spread of its own.
        assert found.sigma == pytest.approx(0.05 * (1 + 1 / 7) ** 0.5, rel=0.1)
        assert found.high_ns == pytest.approx(1e6 * np.exp(0.4 * 1.2816), rel=0.1)


def test_what_was_not_measured_keeps_its_first_estimate():
    first = DurationTable(
        {at("body", 0): Duration(10, source="captured"), at("body", 9): Duration(90)},
        {"all_reduce": Duration(5)},
    )
    found = profile.merged(first, {at("body", 0): Duration(11, source="measured")})
    assert found.segments == {
        at("body", 0): Duration(11, source="measured"),
        at("body", 9): Duration(90),
    }
    assert found.transfers == first.transfers
    assert profile.body_compute_ns(found) == {0: 101}


def test_whole_bodies_say_what_medians_make_of_them():
    # Whenever one segment is slow the other is fast: bodies take 110, medians add up to 20.
    swapped = [[1, 1], [1, 1], [10, 100], [100, 10], [10, 100], [100, 10], [10, 10]]
    found = profile.body_spread(rows(segments(0, 0, swapped)))[0]
    assert found["median_ns"] == 110
    assert found["of_medians"] == pytest.approx(20 / 110, abs=1e-4)
    steady = profile.body_spread(rows(segments(0, 0, [[10, 100]] * 6)))[0]
    assert steady == {"median_ns": 110, "low_ns": 110, "high_ns": 110, "of_medians": 1.0}
