"""How sure deviations are: closed forms, false alarms, what is found, on simulated noise."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from crystalllm.compare import statistics
from crystalllm.compare.baseline import Peers, Profile
from crystalllm.compare.compare import median_difference
from crystalllm.compare.findings import Limits, Trials
from crystalllm.compare.runs import Run
from crystalllm.replay.durations import Duration, DurationTable

SEGMENTS = 40
ITERATIONS = 10


class Machine:
    """Durations of equal runs on a noisy machine.

    Whole runs differ by 8 %, segments from run to run by 3 %, iterations by a drift of 3 %,
    single durations by 5 %, and one in 20 is up to three times as long.
    """

    def __init__(self, seed: int) -> None:
        self.draws = np.random.default_rng(seed)
        self.usual = np.exp(self.draws.uniform(np.log(2e4), np.log(5e6), SEGMENTS))

    def run(self, num_ranks: int = 1) -> np.ndarray:
        """[ranks, segments, iterations] in ns."""
        shape = (num_ranks, SEGMENTS, ITERATIONS)
        normal = self.draws.normal
        noise = normal(0, 0.08) + normal(0, 0.03, (num_ranks, SEGMENTS, 1)) + normal(0, 0.05, shape)
        drift = np.zeros((num_ranks, ITERATIONS))
        for i in range(1, ITERATIONS):
            drift[:, i] = 0.8 * drift[:, i - 1] + normal(0, 0.03 * 0.6, num_ranks)
        outliers = np.where(self.draws.random(shape) < 0.05, self.draws.uniform(1, 3, shape), 1)
        ns = self.usual[None, :, None] * np.exp(noise + drift[:, None]) * outliers
        return ns.round()


def profile(passes: list[np.ndarray]) -> Profile:
    """As planning makes it: passes are calibrated against the first one as a whole."""
    calibrated = [p * np.median(passes[0]) / np.median(p) for p in passes]
    together = np.concatenate(calibrated, axis=2)[0]
    table = DurationTable()
    for position, ns in enumerate(together):
        low, median, high = (round(q) for q in np.quantile(ns, [0.1, 0.5, 0.9]))
        table.segments[0, "host:0", "body", position] = Duration(
            median, count=len(ns), source="measured", low_ns=low, high_ns=high
        )
    return Profile(table, "simulated")


def as_run(ns: np.ndarray) -> Run:
    """[ranks, segments, iterations] as a run of ranks of role 0 that communicates nothing."""
    rank, position, iteration = (axis.ravel() for axis in np.indices(ns.shape))
    segments = pd.DataFrame(
        {
            "rank": rank,
            "role": 0,
            "iteration": iteration + 1,
            "lane": "host:0",
            "section": "body",
            "position": position,
            "start_ns": 0,
            "duration_ns": ns.ravel(),
            "call_ns": 0,
            "taken_ns": ns.ravel(),
        }
    )
    durations = ns.sum(axis=1)
    ranks, iterations = (axis.ravel() for axis in np.indices(durations.shape))
    rows = {"rank": ranks, "iteration": iterations + 1, "duration_ns": durations.ravel()}
    names = ["rank", "iteration", "lane", "call", "arrival_ns", "kind", "group_desc", "transport"]
    nothing = pd.DataFrame({name: [] for name in names})
    return Run(
        folder=Path("simulated"),
        summary={},
        ranks=tuple(range(len(ns))),
        first=1,
        last=ns.shape[2],
        segments=segments,
        communication=nothing,
        iterations=pd.DataFrame(rows),
        provenance={},
    )


def deviating(ns: np.ndarray, baseline: Profile, *, with_peers: bool = False) -> pd.DataFrame:
    """Findings of a run under the usual limits."""
    run = as_run(ns)
    found = Trials(run, Limits())
    for rank in run.ranks:
        found.add(rank, "baseline", baseline.segments(run, rank))
    if with_peers:
        peers = Peers(run)
        for rank in run.ranks:
            found.add(rank, "peers", peers.segments(run, rank))
    return found.findings()


def is_found(findings: pd.DataFrame, position: int) -> bool:
    return not findings.empty and position in set(findings["position"])


# --- distributions and tests ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "dof", "p"),
    [  # of printed tables
        (12.706, 1, 0.05),
        (4.303, 2, 0.05),
        (9.925, 2, 0.01),
        (2.776, 4, 0.05),
        (4.032, 5, 0.01),
        (3.250, 9, 0.01),
        (2.228, 10, 0.05),
        (2.042, 30, 0.05),
        (0.0, 7, 1.0),
    ],
)
def test_chances_are_those_of_student(t, dof, p):
    found = statistics.two_sided(np.array([t, -t]), np.array([dof, dof]))
    assert found == pytest.approx([p, p], rel=0.01)
    if t:
        assert statistics.critical(p, np.array([dof]))[0] == pytest.approx(t, rel=0.01)


def test_discoveries_are_those_of_benjamini_and_hochberg():
    # The example of their paper: of 15 tests four are rejected at 5 %.
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344]
    p += [0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0]
    shuffled = np.random.default_rng(0).permutation(len(p))
    found = statistics.discoveries(np.array(p)[shuffled], 0.05)
    assert sorted(shuffled[found]) == [0, 1, 2, 3]
    assert not statistics.discoveries(np.zeros(0), 0.05).any()


def test_a_weighted_median_is_where_half_the_weight_is():
    values = np.array([[3.0, 1.0], [1.0, 2.0], [2.0, 3.0]])
    assert statistics.weighted_median(values, np.array([1, 1, 1])).tolist() == [2, 2]
    assert statistics.weighted_median(values, np.array([5, 1, 1])).tolist() == [3, 1]


def test_a_common_speed_is_one_thing():
    usual = np.full((20, 1), 1e6)
    ns = usual * np.linspace(1, 2, 10)
    reference = statistics.Reference.of_samples(list(np.full((20, 10), 1e6)))
    d = statistics.deviations(ns, reference)
    assert d.speed() == pytest.approx(1.5, rel=0.01)
    assert d.speed(0.0) == pytest.approx(1)
    assert np.allclose(d.log_ratio, 0)
    # What does not run at a speed, as waits do not, keeps it.
    waits = statistics.deviations(ns, reference, has_speed=False)
    assert np.allclose(np.exp(waits.log_ratio), 1.5, rtol=0.01)


def test_with_few_items_nothing_is_taken_for_their_speed():
    reference = statistics.Reference.of_samples(list(np.full((3, 10), 1e6)))
    d = statistics.deviations(np.full((3, 10), 2e6), reference)
    assert not d.has_speed
    assert np.allclose(np.exp(d.log_ratio), 2, rtol=0.02)
    assert d.between >= 0.1


def test_the_same_things_in_other_shares_are_no_deviation():
    """A segment that is now and then interrupted for 8 ms, there in 3 of 10, here in 8 of 10."""
    draws = np.random.default_rng(0)
    base = draws.normal(2e6, 2e4, (20, 30))
    now = draws.normal(2e6, 2e4, (20, 10))
    base[0, :9] += 8e6
    now[0, :8] += 8e6
    d = statistics.deviations(now, statistics.Reference.of_samples(list(base)))
    assert d.log_ratio[0] > 1.5
    assert not d.is_unusual[0]


# --- false alarms, and what is found ----------------------------------------------------------


def test_unchanged_runs_have_findings_no_more_often_than_promised():
    """200 runs, three passes of planning each: findings in at most 2 %, and not many at a time."""
    alarms = []
    for seed in range(200):
        machine = Machine(seed)
        baseline = profile([machine.run() for _ in range(3)])
        alarms.append(len(deviating(machine.run(), baseline)))
    assert np.count_nonzero(alarms) <= 4
    assert max(alarms) <= 2


@pytest.mark.parametrize(("factor", "least"), [(1.25, 0.5), (1.4, 0.75), (2.0, 0.95)])
def test_a_slowed_op_is_found_and_first(factor, least):
    """One of the ten longest of forty segments, at ten iterations."""
    runs, num_first = 25, 0
    for seed in range(1000, 1000 + runs):
        machine = Machine(seed)
        slow = int(np.argsort(-machine.usual)[seed % 10])
        baseline, run = profile([machine.run() for _ in range(3)]), machine.run()
        run[0, slow] *= factor
        found = deviating(run, baseline)
        found = found[found["what"] == "segment"] if len(found) else found
        num_first += is_found(found, slow) and found["position"].iloc[0] == slow
    assert num_first >= least * runs


def test_a_quiet_machine_shows_small_deviations():
    """Where durations repeat within 1 %, as on GPUs, 7 % are found."""
    draws = np.random.default_rng(7)
    usual = draws.uniform(1e6, 5e6, (SEGMENTS, 1))

    def quiet():
        return (usual * draws.lognormal(0, 0.005, (SEGMENTS, ITERATIONS)))[None]

    baseline, run = profile([quiet(), quiet()]), quiet()
    assert deviating(run, baseline).empty
    run[0, 5] *= 1.07
    found = deviating(run, baseline)
    assert found["position"].tolist() == [5]
    assert found["ratio"].iloc[0] == pytest.approx(1.07, abs=0.01)
    assert found["ratio_low"].iloc[0] < 1.07 < found["ratio_high"].iloc[0]


def test_what_is_faster_is_found_too():
    machine = Machine(3)
    baseline, run = profile([machine.run() for _ in range(3)]), machine.run()
    fast = int(np.argmax(machine.usual))
    run[0, fast] *= 0.4
    found = deviating(run, baseline)
    assert found["position"].iloc[0] == fast
    assert found["direct_ns"].iloc[0] < 0


def test_a_slow_run_is_one_finding():
    machine = Machine(4)
    baseline, run = profile([machine.run() for _ in range(3)]), machine.run(num_ranks=4) * 2
    found = deviating(run, baseline, with_peers=True)
    assert set(found["what"]) == {"speed"}
    assert found["finding"].nunique() == 1
    assert found["rank"].tolist() == [0, 1, 2, 3]
    assert (found["ratio"] > 1.6).all()


def test_peers_tell_a_rank_from_its_role():
    machine = Machine(5)
    baseline, run = profile([machine.run() for _ in range(3)]), machine.run(num_ranks=4)
    slow, everywhere = np.argsort(-machine.usual)[[2, 4]]
    run[1, slow] *= 3
    run[:, everywhere] *= 3
    found = deviating(run, baseline, with_peers=True).set_index("position")
    of_one, of_all = found.loc[[slow]], found.loc[[everywhere]]
    assert of_one["rank"].tolist() == [1]
    assert of_one["against"].tolist() == ["both"]
    assert of_one["peers_ratio"].iloc[0] > 2
    assert sorted(of_all["rank"]) == [0, 1, 2, 3]
    assert of_all["finding"].nunique() == 1
    assert set(of_all["against"]) == {"baseline"}
    assert (of_all["peers_ratio"] < 1.5).all()


def test_peers_find_what_the_baseline_does_not_have():
    machine = Machine(6)
    run = machine.run(num_ranks=4)
    slow = int(np.argmax(machine.usual))
    run[2, slow] *= 3
    baseline = profile([machine.run() for _ in range(3)])
    del baseline.durations.segments[0, "host:0", "body", slow]
    found = deviating(run, baseline, with_peers=True)
    assert found[["rank", "position", "against"]].values.tolist() == [[2, slow, "peers"]]


def test_intervals_of_differences_hold_the_true_one():
    draws = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        a, b = draws.lognormal(0, 0.08, (2, 10))
        low, high = median_difference(a, b + 0.5, draws)
        inside += low <= 0.5 <= high
    assert 0.9 * 200 <= inside <= 200
    wide = median_difference(a, b, draws, level=0.99)
    narrow = median_difference(a, b, draws, level=0.5)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    assert all(math.isfinite(limit) for limit in wide)


# --- transfers among real ranks ---------------------------------------------------------------


def with_transfers(slow_group: str, factor: float) -> Run:
    """A run of two ranks with eight calls of one key in each of two groups."""
    draws = np.random.default_rng(1)
    run = as_run(Machine(8).run(num_ranks=2))
    rows = []
    for rank in run.ranks:
        call = 0
        for iteration in range(1, ITERATIONS + 1):
            for number in range(16):
                group = ("near", "far")[number % 2]
                ns = 1e6 * draws.lognormal(0, 0.05) * (factor if group == slow_group else 1)
                rows.append((rank, iteration, call, group, round(ns)))
                call += 1
    names = ["rank", "iteration", "call", "group_identity", "transfer_ns"]
    calls = pd.DataFrame(rows, columns=names).assign(
        captured_call=0, key="all_reduce", kind="all_reduce", group_desc="", transport="real",
        lane="host:0", arrival_ns=0,
    )  # fmt: skip
    return replace(run, communication=calls)


def test_a_slow_link_is_one_finding_of_its_group():
    run = with_transfers("far", 3)
    table = DurationTable(
        transfers={
            "all_reduce": Duration(
                1_000_000, count=30, source="measured", low_ns=950_000, high_ns=1_050_000
            )
        }
    )
    found = Trials(run, Limits())
    for rank in run.ranks:
        found.add(rank, "baseline", Profile(table, "table").transfers(run, rank))
    rows = found.findings()
    assert set(rows["what"]) == {"transfer"}
    assert rows["finding"].nunique() == 1
    assert rows["group_identity"].tolist() == ["far", "far"]
    assert rows["direct_ns"].tolist() == pytest.approx([8 * 2e6] * 2, rel=0.1)


def test_a_modelled_transfer_is_no_baseline():
    run = with_transfers("far", 3)
    table = DurationTable(transfers={"all_reduce": Duration(1_000_000, source="model")})
    items = Profile(table, "table").transfers(run, 0)
    assert items.rows.empty
    assert items.num_unknown == 2
