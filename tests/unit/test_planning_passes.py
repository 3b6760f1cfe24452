"""The passes: when they stop, what they keep, and what they leave.

Slices are run by functions of the tests, so that how long everything takes is
known; capture, replay and files are the real ones.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pandas as pd
import planning_program
import pytest

from crystalllm import planning, tables
from crystalllm.capture import capture
from crystalllm.config import load_job
from crystalllm.errors import UserError
from crystalllm.planning import Options, show
from crystalllm.planning.calibration import Reading
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.program import Capture
from crystalllm.transfers.measured import MeasuredTransfer, MeasuredTransfers
from crystalllm.transfers.uniform import uniform_transfers

MS = 1_000_000
OPTIONS = Options(iterations=3, warm_up=1)
# One sandbox rank at a time, so that two roles take two slices.
ONE_CORE = sorted(os.sched_getaffinity(0))[:1]


@pytest.fixture(scope="module")
def captured(tmp_path_factory, virtual):
    folder = tmp_path_factory.mktemp("job")
    planning_program.make_job(folder)
    capture(load_job(str(folder / "job.yaml")), folder / "capture", limit_s=60)
    return folder


class Host:
    """A host on which every body segment of a rank takes `body_ns[pass]`, or what it says now."""

    def __init__(self, captured, body_ns):
        self.body_ns = body_ns
        self.ran = []
        self.captured = Capture.read(captured)
        self.segments = self.captured.captured_durations().segments

    def run_slice(self, slice_, durations, out):
        place = int(out.parent.name.removeprefix("pass-"))
        self.ran.append((place, slice_.number))
        self.before_end(place, slice_)
        body_ns = self.body_ns[min(place, len(self.body_ns)) - 1]
        for rank, role in zip(slice_.ranks, slice_.roles, strict=True):
            folder = out / f"rank-{rank}"
            folder.mkdir(parents=True)
            (folder / "log.txt").write_text("step 1\nstep 2\n")
            tables.SEGMENTS.write(
                folder / "segments.parquet", self.rows(rank, role, body_ns), provenance={}
            )
        return {"status": "ok", "reason": ""}

    def before_end(self, place, slice_):
        pass

    def rows(self, rank, role, body_ns):
        num_bodies = OPTIONS.num_bodies
        iterations = {
            "prologue": [0],
            "body": range(1, num_bodies + 1),
            "epilogue": [num_bodies + 1],
        }
        rows = [
            (
                rank,
                role,
                iteration,
                lane,
                section,
                position,
                iteration * 100 * MS,
                # Warm-up takes longer, and does not count.
                5 * body_ns if iteration == 1 else body_ns,
                0,
            )
            for (of, lane, section, position) in self.segments
            if of == role
            for iteration in iterations[section]
        ]
        return pd.DataFrame(rows, columns=[c.name for c in tables.SEGMENTS.columns])


def steady(cores):
    return [Reading(core, 100, 100) for core in cores]


def transfers(captured, latency_ns=1000):
    return uniform_transfers(captured.calls, latency_ns=latency_ns, bytes_per_s=1e9)


def plan_with(host, captured, out, *, options=OPTIONS, measure=steady, **more):
    return planning.planning(
        load_job(str(captured / "job.yaml")),
        out,
        capture=captured / "capture",
        transfers=transfers,
        options=options,
        cores=ONE_CORE,
        run_slice=host.run_slice,
        measure=measure,
        **more,
    )


@pytest.fixture
def out(tmp_path):
    return tmp_path / "results" / "job" / "planning"


def test_passes_end_when_the_iteration_time_has_settled(captured, out):
    host = Host(captured / "capture", [2 * MS, 2 * MS])
    said = []
    found = plan_with(host, captured, out, say=said.append)
    # The first pass moved from what capture had seen, the second found the same again.
    assert {place for place, _ in host.ran} == {1, 2}
    assert found["is_settled"]
    assert found["warnings"] == []
    assert [p["pass"] for p in found["passes"]] == [0, 1, 2]
    assert found["passes"][2]["moved"] == 0
    assert found["iteration_ns"] == found["passes"][1]["iteration_ns"]
    assert any("pass 2: an iteration takes" in line for line in said)


def test_passes_end_after_the_last_one_allowed(captured, out):
    host = Host(captured / "capture", [2 * MS, 4 * MS, 8 * MS, 16 * MS])
    found = plan_with(host, captured, out)
    assert {place for place, _ in host.ran} == {1, 2, 3}
    assert not found["is_settled"]
    assert "the last pass still moved the iteration time by +" in found["warnings"][-1]
    # Of 2, 4 and 8 ms the median is 4, of 2 and 4 it is 3; short transfers hide behind it.
    assert found["passes"][3]["moved"] == pytest.approx(1 / 3, abs=0.01)
    compute = [p["compute_ns"] for p in found["passes"]]
    assert all(compute[3][role] == pytest.approx(4 / 3 * compute[2][role]) for role in compute[2])
    tolerant = plan_with(
        Host(captured / "capture", [2 * MS, 4 * MS]),
        captured,
        out.parent / "tolerant",
        options=OPTIONS.model_copy(update={"tolerance": 1.5}),
    )
    assert tolerant["is_settled"]


def test_durations_are_medians_over_all_passes(captured, out):
    """A host that is fast once and slow once is neither."""
    host = Host(captured / "capture", [2 * MS, 4 * MS, 3 * MS])
    plan_with(host, captured, out)
    assert {place for place, _ in host.ran} == {1, 2, 3}
    profile = DurationTable.load(out / "profile.parquet")
    body = {d.ns for at, d in profile.segments.items() if at[2] == "body"}
    assert body == {3 * MS}


def test_peers_take_what_earlier_passes_measured(captured, out):
    seen = []

    class Watching(Host):
        def run_slice(self, slice_, durations, out):
            seen.append((out.parent.name, {d.source for d in durations.segments.values()}))
            if out.parent.name == "pass-2":
                body = [d.ns for at, d in durations.segments.items() if at[2] == "body"]
                assert set(body) == {2 * MS}
            return super().run_slice(slice_, durations, out)

    plan_with(Watching(captured / "capture", [2 * MS]), captured, out)
    assert ("pass-1", {"captured"}) in seen
    assert ("pass-2", {"measured"}) in seen


def test_what_it_leaves(captured, out):
    host = Host(captured / "capture", [2 * MS])
    found = plan_with(host, captured, out)
    assert sorted(p.name for p in out.iterdir()) == [
        "plan.json",
        "planning.json",
        "profile.parquet",
        "slices.parquet",
    ]
    written = json.loads((out / "planning.json").read_text())
    assert written == json.loads(json.dumps(found))
    plan = json.loads((out / "plan.json").read_text())
    assert written["fingerprint"] == plan["fingerprint"]
    roles = {role for s in plan["slices"] for role in s["roles"]}
    assert roles == set(host.captured.ranks["role"])
    profile = DurationTable.load(out / "profile.parquet")
    assert set(profile.segments) == set(host.segments)
    for at, d in profile.segments.items():
        assert (d.ns, d.source) == (2 * MS, "measured")
        assert d.count == 2 * (OPTIONS.iterations if at[2] == "body" else 1), "of two passes"
    assert {d.source for d in profile.transfers.values()} == {"model"}
    rows = tables.SLICES.read(out / "slices.parquet")[0].to_pandas()
    assert set(rows["pass"]) == {1, 2}
    warm_up = rows[~rows["is_measured"]]
    assert set(warm_up["iteration"]) == {1}
    assert set(warm_up["section"]) == {"body"}
    # What the iteration rests on adds up to it.
    shares = found["sources"]
    assert set(shares["compute"]) == {"measured"}
    total = sum(shares["compute"].values()) + sum(shares["transfers"].values())
    assert total == pytest.approx(1, abs=1e-4)
    # The profile is what a replay of the whole world needs, and gives the same time.
    again = DurationTable.load(out / "profile.parquet")
    assert again == profile


def test_finished_slices_are_not_run_again(captured, out):
    class Stopped(Host):
        def before_end(self, place, slice_):
            if (place, slice_.number) == (1, 2):
                raise KeyboardInterrupt

    stopped = Stopped(captured / "capture", [2 * MS])
    with pytest.raises(KeyboardInterrupt):
        plan_with(stopped, captured, out)
    assert stopped.ran == [(1, 1), (1, 2)]
    assert not out.exists()
    host = Host(captured / "capture", [2 * MS])
    found = plan_with(host, captured, out)
    assert host.ran[0] == (1, 2)
    assert [s["is_kept"] for s in found["passes"][1]["slices"]] == [True, False]
    # With everything there nothing runs, and the same comes out.
    idle = Host(captured / "capture", [7 * MS])
    profile, slices = ((out / f"{n}.parquet").read_bytes() for n in ("profile", "slices"))
    again = plan_with(idle, captured, out)
    assert idle.ran == []
    assert again["iteration_ns"] == found["iteration_ns"]
    assert (out / "profile.parquet").read_bytes() == profile
    assert (out / "slices.parquet").read_bytes() == slices


def test_what_a_run_that_was_stopped_says_is_an_interrupt(captured, out):
    class Interrupted(Host):
        def run_slice(self, slice_, durations, out):
            out.mkdir(parents=True)
            return {"status": "crash", "reason": "The run was stopped by SIGINT.", "exit_code": 130}

    with pytest.raises(KeyboardInterrupt):
        plan_with(Interrupted(captured / "capture", [MS]), captured, out)


def test_other_inputs_run_again(captured, out):
    plan_with(Host(captured / "capture", [2 * MS]), captured, out)
    host = Host(captured / "capture", [2 * MS])
    more = OPTIONS.model_copy(update={"seed": 1})
    plan_with(host, captured, out, options=more)
    assert (1, 1) in host.ran
    slower = Host(captured / "capture", [2 * MS])
    planning.planning(
        load_job(str(captured / "job.yaml")),
        out,
        capture=captured / "capture",
        transfers=lambda captured: transfers(captured, latency_ns=9000),
        options=OPTIONS,
        cores=ONE_CORE,
        run_slice=slower.run_slice,
        measure=steady,
    )
    assert (1, 1) in slower.ran


def test_a_damaged_slice_runs_again(captured, out):
    host = Host(captured / "capture", [2 * MS])
    plan_with(host, captured, out)
    (table,) = out.parent.glob(".work/planning/*/pass-1/slice-1/rank-*/segments.parquet")
    table.write_bytes(table.read_bytes()[:100])
    again = Host(captured / "capture", [2 * MS])
    plan_with(again, captured, out)
    assert again.ran == [(1, 1)]


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        (
            {"status": "deviation", "reason": "Call 7 was all_reduce, captured barrier."},
            r"Slice 2 of 2 ended with status deviation: Call 7 was .*captured barrier\. "
            r".*Capture again",
        ),
        ({"status": "oom", "reason": "80 MiB asked for"}, "status oom.*more memory"),
        ({"status": "crash", "reason": "Rank 1 died of SIGKILL."}, "status crash.*finished slices"),
        ({"status": "invalid", "reason": "Nobody can go on."}, "status invalid"),
    ],
)
def test_a_slice_that_fails_ends_planning_and_keeps_the_others(captured, out, summary, message):
    class Failing(Host):
        def run_slice(self, slice_, durations, out):
            found = super().run_slice(slice_, durations, out)
            return {**summary, "rank": slice_.ranks[0]} if slice_.number == 2 else found

    failing = Failing(captured / "capture", [2 * MS])
    with pytest.raises(UserError, match=f"(?s){message}") as caught:
        plan_with(failing, captured, out)
    # The last lines of the log of the rank that it is about.
    assert "step 1\n  step 2" in str(caught.value)
    assert not out.exists()
    host = Host(captured / "capture", [2 * MS])
    plan_with(host, captured, out)
    assert (1, 1) not in host.ran
    assert (1, 2) in host.ran


def test_a_slower_core_is_calibrated_away(captured, out):
    # The core takes twice as long while pass 1's second slice runs, for the reference too.
    slow = {"now": False}

    class Uneven(Host):
        def rows(self, rank, role, body_ns):
            return super().rows(rank, role, 2 * body_ns if slow["now"] else body_ns)

        def run_slice(self, slice_, durations, out):
            slow["now"] = out.parent.name == "pass-1" and slice_.number == 2
            return super().run_slice(slice_, durations, out)

    calls = []

    def measure(cores):
        calls.append(cores)
        is_slow = len(calls) in (3, 4)  # before and after the second slice
        return [Reading(core, 200 if is_slow else 100, 200 if is_slow else 100) for core in cores]

    host = Uneven(captured / "capture", [2 * MS])
    found = plan_with(host, captured, out, measure=measure)
    profile = DurationTable.load(out / "profile.parquet")
    assert {d.ns for d in profile.segments.values()} == {2 * MS}
    first = found["passes"][1]
    assert [list(s["factors"].values()) for s in first["slices"]] == [[1.0], [0.5]]
    assert set(first["compute_ns"].values()) == set(found["passes"][2]["compute_ns"].values())
    assert any("took 2.00 times as long" in line for line in found["warnings"])


def test_two_plannings_of_a_job_do_not_run_at_a_time(captured, out):
    class Twice(Host):
        def run_slice(self, slice_, durations, folder):
            with pytest.raises(UserError, match="Another planning of this job is running"):
                plan_with(Host(captured / "capture", [MS]), captured, out)
            return super().run_slice(slice_, durations, folder)

    plan_with(Twice(captured / "capture", [2 * MS]), captured, out)


def test_a_capture_of_something_else_is_refused(captured, out, tmp_path):
    host = Host(captured / "capture", [MS])
    job = load_job(str(captured / "job.yaml"))
    for change, message in (
        ({"world_size": 8}, "its world had 4 ranks, now 8"),
        ({"arguments": "--steps {iterations} --quick"}, "its command was"),
    ):
        with pytest.raises(UserError, match=message):
            planning.planning(
                job.model_copy(update=change),
                out,
                capture=captured / "capture",
                transfers=transfers,
                run_slice=host.run_slice,
            )
    assert host.ran == []


# --- explain ------------------------------------------------------------------------------


def explained(captured, out, *, transfers=transfers, **more):
    return planning.explain(
        load_job(str(captured / "job.yaml")),
        out,
        capture=captured / "capture",
        transfers=transfers,
        options=OPTIONS,
        cores=ONE_CORE,
        **more,
    )


def test_explain_says_what_will_run_and_runs_nothing(captured, out):
    found = explained(captured, out)
    assert not out.exists()
    json.dumps(found)
    assert {role for s in found["slices"] for role in s["roles"]} == {0, 1}
    wishes = {w["wish"]: w for w in found["wishes"]}
    assert wishes["node"]["num_devices"] == 2
    assert not wishes["node"]["is_possible"]
    (transfers,) = found["transfers"]
    assert transfers["source"] == "model"
    # In each iteration: a message of two sides per pair, and an all_reduce of four ranks.
    assert transfers["calls"] == 4 + 4
    total = sum(found["computation"].values()) + transfers["share"]
    assert total == pytest.approx(1, abs=1e-4)
    bodies = OPTIONS.num_bodies * found["iteration_ns"] / 1e9
    assert all(s["expected_s"] >= bodies for s in found["slices"])
    assert found["expected_s"]["at_most"] == pytest.approx(3 * found["expected_s"]["pass"], abs=0.2)
    assert "until a slice of this job has shown it" in " ".join(found["assumptions"])


def test_explain_does_not_wait_for_what_will_be_measured(captured, out):
    job = load_job(str(captured / "job.yaml"))
    assert job.cluster is None
    with pytest.raises(UserError, match="How long transfers take is not known"):
        planning.transfers_from(job)
    found = explained(captured, out, transfers=planning.transfers_from(job, later=True))
    (transfers,) = found["transfers"]
    assert (transfers["source"], transfers["share"]) == ("given", 0)
    # The model's estimates are better than none.
    found = explained(
        captured, out, transfers=planning.transfers_from(job, cluster="h200-2x8", later=True)
    )
    assert {t["source"] for t in found["transfers"]} == {"model"}


def test_transfers_are_measured_once_for_a_capture(captured, tmp_path, monkeypatch):
    measured_on = []

    def measure(capture, cores):
        measured_on.append(tuple(cores))
        row = MeasuredTransfer("send", "float32", 2, 256, 9, 50, 50, 40, 60, 10, 5)
        return MeasuredTransfers([row])

    monkeypatch.setattr(planning, "measure_transfers", measure)
    job = load_job(str(captured / "job.yaml"))
    path = tmp_path / "measured_transfers.parquet"
    known = Capture.read(captured / "capture")
    other = replace(known, structure={**known.structure, "fingerprint": "of another one"})
    for capture_, cores in ((known, (0, 1)), (known, (0, 1)), (known, (0, 1, 2)), (other, (0, 1))):
        find = planning.transfers_from(job, cluster="h200-2x8", measured=path, measure_on=cores)
        found = find(capture_)
        assert any(d.ns == 50 and d.source == "measured" for d in found.values())
    assert measured_on == [(0, 1), (0, 1, 2), (0, 1)]


def test_explain_learns_from_slices_that_ran(captured, out):
    host = Host(captured / "capture", [2 * MS])
    plan_with(host, captured, out)
    found = explained(captured, out)
    assert f"as in {len(host.ran)} slices that ran before" in " ".join(found["assumptions"])
    # Nothing was started here, and the program ended 500 ms after the replay's begin.
    for s in found["slices"]:
        assert s["expected_s"] < 5


def test_what_it_says_is_readable(captured, out, capsys):
    found = plan_with(Host(captured / "capture", [2 * MS]), captured, out)
    show.show_summary(found, out)
    text = capsys.readouterr().out
    assert "settled: pass 0:" in text
    assert "it rests on compute measured" in text
    show.show_explanation(explained(captured, out))
    text = capsys.readouterr().out
    assert "This is an estimate" in text
    for title in ("What runs", "What wishes need", "Where transfer times come from"):
        assert title in text
    show.show_explanation(explained(captured, out), as_json=True)
    assert json.loads(capsys.readouterr().out)["num_roles"] == 2


def test_options_are_checked():
    for wrong in ({"iterations": 0}, {"tolerance": 0}, {"max_passes": 0}, {"passes": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Options(**wrong)
