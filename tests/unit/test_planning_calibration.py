"""Calibration: slices brought to one speed, noise left alone."""

from __future__ import annotations

import os

import pytest

from crystalllm.errors import UserError
from crystalllm.planning import calibration
from crystalllm.planning.calibration import Calibration, Reading, Standard


def around(before, after=None, *, core=1, **state):
    """Readings before and after a slice on one core: the reference took so long."""
    after = before if after is None else after
    return Calibration(
        (Reading(core, before, before),),
        (Reading(core, after, after, **state),),
    )


def test_a_core_that_takes_longer_has_its_durations_shortened():
    first = Standard.of([around(100)])
    assert around(100).factor(1, first) == 1
    assert around(125).factor(1, first) == pytest.approx(0.8)
    assert around(80).factor(1, first) == pytest.approx(1.25)


def test_both_parts_of_the_reference_weigh_alike():
    first = Standard.of([around(100)])
    product = Calibration((Reading(1, 121, 100),), (Reading(1, 121, 100),))
    copy = Calibration((Reading(1, 100, 121),), (Reading(1, 100, 121),))
    assert product.factor(1, first) == copy.factor(1, first) == pytest.approx(1 / 1.1)


def test_before_and_after_weigh_alike():
    assert around(100, 121).ns(1) == pytest.approx(110)
    assert around(100, 121).drift(1) == pytest.approx(0.21)


def test_a_difference_within_the_drift_is_noise():
    steady, drifting = around(100), around(100, 110)
    # 1.049 times as long on the average, but it changed by 1.1 meanwhile.
    assert drifting.factor(1, Standard.of([steady])) == 1
    assert steady.factor(1, Standard.of([drifting])) == 1
    assert around(130, 132).factor(1, Standard.of([steady])) < 0.8


def test_a_bad_moment_sets_no_standard():
    found = Standard.of([around(170, 180), around(100), around(102, 103), around(101)])
    assert found.ns == pytest.approx(101)
    # A middle one that is there, not a mean of two.
    assert Standard.of([around(100), around(200)]).ns == pytest.approx(100)


def test_each_core_has_a_factor():
    both = Calibration(*[(Reading(1, 100, 100), Reading(2, 200, 200))] * 2)
    standard = Standard.of([both])
    assert both.factor(1, standard) == 1
    assert both.factor(2, standard) == pytest.approx(0.5)


def test_conditions_beyond_the_bound_are_told():
    first = Standard.of([around(100)])
    assert calibration.warnings(around(100), first, where="slice 1") == []
    (line,) = calibration.warnings(around(125), first, where="slice 2")
    assert line.startswith("slice 2: the reference on core 1 took 1.25 times as long")
    (line,) = calibration.warnings(around(100, 108), first, where="slice 2")
    assert "changed by +8%" in line
    (line,) = calibration.warnings(around(100, num_throttled=0), first, where="slice 2")
    assert "slowed down for its temperature" in line
    (line,) = calibration.warnings(around(100, others_share=0.3), first, where="slice 2")
    assert "others had core 1 for 30% of the time" in line


def test_a_calibration_survives_its_file():
    made = Calibration((Reading(1, 5, 6, 0.1, 2000.0),), (Reading(1, 7, 8, load=1.5),))
    assert Calibration.of_json(made.to_json()) == made
    with pytest.raises(TypeError):
        Calibration.of_json({"before": [{"core": 1}], "after": []})


def test_the_reference_is_measured_on_the_cores_asked_for():
    cores = sorted(os.sched_getaffinity(0))[:2]
    found = calibration.measure(cores)
    assert [reading.core for reading in found] == cores
    for reading in found:
        # A 256 × 256 product takes at least a microsecond, and a copy of 16 MiB ten.
        assert 1_000 < reading.matmul_ns < 10**9
        assert 10_000 < reading.copy_ns < 10**9
        assert 0 <= reading.others_share < 1
    # This process is where it was.
    assert len(os.sched_getaffinity(0)) >= len(cores)


def test_a_core_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"reference measurement ended with code 1.*Core 4095"):
        calibration.measure([4095])
