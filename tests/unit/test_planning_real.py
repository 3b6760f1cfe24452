"""Planning with real sandbox ranks, from the command line: stopped, gone on with, failing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import planning_program
import psutil
import pytest

from crystalllm import tables
from crystalllm.capture import capture
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.offline import replay
from crystalllm.replay.program import Capture

pytestmark = pytest.mark.heavy

LIMIT_S = 240
ITERATIONS, WARM_UP = 2, 1


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Folder of a job of four ranks and its capture."""
    folder = tmp_path_factory.mktemp("job")
    made = planning_program.make_job(folder, cluster="h200-64x8")
    capture(made, folder / "capture", strategy="all", limit_s=LIMIT_S)
    return folder


def command(job, out, *more):
    # One core, so that each role is a slice; one pass, for time.
    core = min(os.sched_getaffinity(0))
    options = {
        "--job": job / "job.yaml",
        "--capture": job / "capture",
        "--out": out,
        "--iterations": ITERATIONS,
        "--warm-up": WARM_UP,
        "--passes": 1,
        "--cores": core,
    }
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "crystalllm", "planning", *words, *more]


def run(root, job, out, *more, **environment):
    return subprocess.run(
        command(job, out, *more),
        cwd=root,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def wait_for(condition, process):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_planning_that_was_stopped_goes_on(root, job, tmp_path):
    out = tmp_path / "planning"
    first = subprocess.Popen(
        command(job, out), cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    kept = ".work/planning/*/pass-1/slice-1/finished.json"
    running = ".work/planning/*/pass-1/slice-2/rank-*/log.txt"
    wait_for(lambda: [*tmp_path.glob(kept)] and [*tmp_path.glob(running)], first)
    (finished,) = tmp_path.glob(kept)
    before = finished.read_bytes()
    children = psutil.Process(first.pid).children(recursive=True)
    assert children
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=LIMIT_S)[1]
    assert first.returncode == 130, said
    assert "finished slices are kept" in said
    _gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert not out.exists()

    second = run(root, job, out)
    assert second.returncode == 0, second.stderr
    assert "slice 1 of 2, rank 0: kept from before" in second.stderr
    assert finished.read_bytes() == before
    assert f"results in {out}" in second.stdout
    check_results(job, out, tmp_path)

    explained = run(root, job, out, "--explain", "--json")
    found = json.loads(explained.stdout)
    assert "as in 2 slices that ran before" in " ".join(found["assumptions"])
    (transfers,) = found["transfers"]
    assert transfers["source"] == "model"


def check_results(job, out, tmp_path):
    captured = Capture.read(job / "capture")
    profile = DurationTable.load(out / "profile.parquet")
    first = captured.captured_durations()
    assert set(profile.segments) == set(first.segments)
    assert {d.source for d in profile.segments.values()} == {"measured"}
    counts = {d.count for at, d in profile.segments.items() if at[2] == "body"}
    assert counts == {ITERATIONS}
    assert {d.source for d in profile.transfers.values()} == {"model"}
    rows = tables.SLICES.read(out / "slices.parquet")[0].to_pandas()
    plan = json.loads((out / "plan.json").read_text())
    assert set(rows["rank"]) == {rank for s in plan["slices"] for rank in s["ranks"]}
    bodies = rows[rows["section"] == "body"]
    assert set(bodies["iteration"]) == set(range(1, WARM_UP + ITERATIONS + 1))
    summary = json.loads((out / "planning.json").read_text())
    again = replay(captured, tmp_path / "replayed", profile, iterations=5)
    assert again["iteration_ns"] == summary["iteration_ns"]
    core = min(os.sched_getaffinity(0))
    for s in summary["passes"][1]["slices"]:
        assert [r["core"] for r in s["calibration"]["before"]] == [core]


def test_a_program_that_fails_is_shown_with_its_last_lines(root, job, tmp_path):
    content = json.loads((job / "job.yaml").read_text())
    content["environment"] = {"FAIL": "1"}
    failing = job / "failing.yaml"
    failing.write_text(json.dumps(content))
    out = tmp_path / "planning"
    found = run(root, job, out, "--job", str(failing))
    assert found.returncode == 2
    assert "Slice 1 of 2 ended with status crash" in found.stderr
    assert "ValueError: the data has run out" in found.stderr
    assert "step 2" in found.stderr
    assert not out.exists()
