"""Sandbox ranks against the live replay: what they leave, and how runs end."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import sandbox_program

from crystalllm import memory, sandbox, tables
from crystalllm.fits import fits
from crystalllm.replay.durations import DurationTable
from crystalllm.replay.program import Capture
from crystalllm.sandbox import processes

RANK = 5


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """A run of rank 5 of 8, by the captured durations and a model of the links."""
    return sandbox_program.make_setup(tmp_path_factory.mktemp("job"), RANK)


@pytest.fixture(scope="module")
def ran(setup, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return out, sandbox.run(setup, out)


def deviating(setup, how: str):
    job = setup.job.model_copy(update={"environment": {"DEVIATE": how}})
    return replace(setup, job=job)


def read(table, path):
    return table.read(path)[0].to_pandas()


def test_a_run_is_a_result(ran):
    out, summary = ran
    assert summary["status"] == "ok", summary
    assert summary == json.loads((out / "summary.json").read_text())
    found = summary["ranks_of_interest"][str(RANK)]
    assert found["num_iterations"] == 4
    assert found["num_invented"] == 0
    parts = [found[f"{part}_ns"] for part in ("compute", "exposed", "wait", "bubble", "host")]
    assert all(part >= 0 for part in parts)
    assert summary["trust"]["valid"]
    assert sum(found["shares_by_source"].values()) == pytest.approx(1.0, abs=1e-4)
    assert "transfers model" in found["shares_by_source"]
    log = (out / f"rank-{RANK}" / "log.txt").read_text()
    steps = re.findall(r"^step (\d+) loss", log, re.M)
    assert steps == [str(i) for i in range(len(steps))]
    assert len(steps) > 5
    # What peers invent leads to them, and CPUs compute them slowly.
    assert "a subnormal number is 0.0" in log
    assert summary["trust"]["policies"]["subnormal numbers"] == "zero"


def test_the_parts_of_an_iteration_are_all_of_it(ran):
    out, _ = ran
    rows = read(tables.ITERATIONS, out / f"rank-{RANK}" / "iterations.parquet")
    parts = rows[[f"{part}_ns" for part in ("compute", "host", "wait", "bubble", "exposed")]]
    assert (parts.sum(axis=1) == rows["duration_ns"]).all()
    assert (parts >= 0).all(axis=None)
    assert rows["iteration"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.heavy
def test_the_others_follow_the_speed_of_the_ranks_that_run(setup, tmp_path):
    """By durations of a host that is many times as fast as this one."""
    fast = replace(setup, durations=setup.durations.slowed(0.02), iterations=6)
    compute = {}
    for follows in (False, True):
        out = tmp_path / str(follows)
        summary = sandbox.run(replace(fast, follows_speed=follows), out)
        assert summary["status"] == "ok", summary
        slowness = summary["trust"]["slowness"]["of_ranks"][str(RANK)]
        assert slowness > 4
        rows = read(tables.ITERATIONS, out / "world" / "iterations.parquet")
        others = rows[(rows["rank"] != RANK) & rows["iteration"].between(4, 7)]
        compute[follows] = others["compute_ns"].median()
        policy = summary["trust"]["policies"]["speed of others"]
        assert policy == ("follows the ranks that run" if follows else "planned")
    # What the rank tells is the median of its last iterations, which vary.
    assert slowness / 3 < compute[True] / compute[False] < 3 * slowness
    always = replace(fast, slowness=3.0)
    sandbox.run(always, tmp_path / "always")
    rows = read(tables.ITERATIONS, tmp_path / "always" / "world" / "iterations.parquet")
    others = rows[(rows["rank"] != RANK) & rows["iteration"].between(4, 7)]
    assert others["compute_ns"].median() == pytest.approx(3 * compute[False], rel=0.01)


@pytest.mark.heavy
def test_calls_take_the_time_that_the_library_s_would(setup, tmp_path):
    transfers = {
        key: replace(d, call_ns=3_000_000, cpu_ns=1_000_000)
        for key, d in setup.durations.transfers.items()
    }
    durations = DurationTable(setup.durations.segments, transfers)
    host_ns = {}
    for takes_core in (True, False):
        out = tmp_path / str(takes_core)
        summary = sandbox.run(replace(setup, durations=durations, takes_core=takes_core), out)
        assert summary["status"] == "ok", summary
        host_ns[takes_core] = summary["ranks_of_interest"][str(RANK)]["host_ns"]
        calls = read(tables.COMMUNICATION, out / f"rank-{RANK}" / "communication.parquet")
        if takes_core:
            segments = read(tables.SEGMENTS, out / f"rank-{RANK}" / "segments.parquet")
            called = segments.loc[segments["call_ns"] > 0, "call_ns"]
            assert len(called) > 0
            assert (called >= 3_000_000).all(), "every one of them"
    on_main = calls[(calls["iteration"] == 2) & (calls["lane"] == "host:0")]
    assert host_ns[True] >= 3_000_000 * len(on_main) > 0
    # How long they take by themselves depends on the machine.
    assert host_ns[False] < host_ns[True] - 1_000_000 * len(on_main)


def test_calls_end_when_the_replay_says(ran):
    out, _ = ran
    calls = read(tables.COMMUNICATION, out / f"rank-{RANK}" / "communication.parquet")
    assert (calls["transport"] == "timed").all()
    assert (calls["release_ns"] >= calls["start_ns"]).all()
    assert (calls["start_ns"] >= calls["arrival_ns"]).all()
    assert (calls["transfer_ns"] >= 50_000).all(), "the latency of the model"
    waited = calls[calls["waited_ns"] >= 0]
    assert len(waited) > 0.9 * len(calls)
    assert (waited["end_ns"] >= waited["release_ns"]).all()


def test_the_replay_of_the_rank_agrees_with_what_it_did(ran):
    """The engine heard the rank's marks when they were set."""
    out, _ = ran
    mine = read(tables.ITERATIONS, out / f"rank-{RANK}" / "iterations.parquet")
    world = read(tables.ITERATIONS, out / "world" / "iterations.parquet")
    heard = world.loc[world["rank"] == RANK, "end_ns"]
    assert abs(heard.to_numpy() - mine["end_ns"].to_numpy()).max() < 1_000_000
    assert set(world["rank"]) == set(range(8))


def test_segments_are_those_of_the_capture(ran, setup):
    out, _ = ran
    segments = read(tables.SEGMENTS, out / f"rank-{RANK}" / "segments.parquet")
    captured = Capture.read(setup.capture).captured_durations().segments
    role = int(segments["role"].iloc[0])
    expected = {at[1:] for at in captured if at[0] == role}
    found = set(
        zip(
            segments["lane"].astype(str),
            segments["section"].astype(str),
            segments["position"],
            strict=True,
        )
    )
    assert found == expected
    bodies = segments[segments["section"] == "body"].groupby("iteration").size()
    assert bodies.nunique() == 1


def test_equal_plan_and_seed_give_equal_calls(ran, setup, tmp_path):
    out, _ = ran
    found_before = tmp_path / "anomalies.json"
    found_before.write_text("{}")
    again = sandbox.run(setup, tmp_path)
    assert again["status"] == "ok"
    assert not found_before.exists(), "it was of the run before"
    name = f"rank-{RANK}/communication.parquet"
    first, second = (read(tables.COMMUNICATION, folder / name) for folder in (out, tmp_path))
    same = ["iteration", "call", "captured_call", "kind", "key", "bytes"]
    assert first[same].equals(second[same])
    logs = [(folder / f"rank-{RANK}" / "log.txt").read_text() for folder in (out, tmp_path)]
    assert logs[0] == logs[1], "the losses too"
    name = f"rank-{RANK}/memory.parquet"
    first, second = (read(tables.MEMORY, folder / name) for folder in (out, tmp_path))
    same = ["iteration", "block", "category", "phase", "bytes", "total_bytes"]
    assert len(first) > 100
    assert first[same].equals(second[same])


def test_ranks_side_by_side_talk_for_real(setup, tmp_path):
    """4 and 5 are a tensor-parallel pair; each has three virtual data-parallel peers."""
    summary = sandbox.run(replace(setup, ranks=(4, 5), timeline=True), tmp_path)
    assert summary["status"] == "ok", summary
    assert set(summary["ranks_of_interest"]) == {"4", "5"}
    calls = read(tables.COMMUNICATION, tmp_path / "rank-5" / "communication.parquet")
    transports = calls.groupby(["kind", "group_size"], observed=True)["transport"].unique()
    assert transports["all_reduce", 2].tolist() == ["real"]
    assert transports["all_reduce", 4].tolist() == ["timed"]
    assert transports["barrier", 8].tolist() == ["mixed"]
    assert transports["recv", 8].tolist() == ["real"], "from rank 4"
    assert transports["send", 8].tolist() == ["timed"], "to rank 6"
    losses = [(tmp_path / f"rank-{rank}" / "log.txt").read_text() for rank in (4, 5)]
    assert losses[0] == losses[1], "they hold the same after their all_reduce"
    assert (tmp_path / "timeline.json.gz").exists()
    assert {p.name for p in (tmp_path / "timeline").iterdir()} >= {"rank-4.json.gz"}


def test_memory_beyond_the_limit_is_an_outcome(setup, ran, tmp_path):
    _, whole = ran
    peak = whole["ranks_of_interest"][str(RANK)]["memory"]["peak"]["bytes"]
    summary = sandbox.run(replace(setup, memory_limit_bytes=peak - 1), tmp_path)
    assert summary["status"] == "oom", summary
    assert f"Rank {RANK} ran out of memory" in summary["reason"]
    found = summary["out_of_memory"]
    assert found["held_bytes"] + found["bytes"] >= peak
    assert sum(found["by_category"].values()) == found["held_bytes"]
    assert "parameters" in summary["reason"]
    enough = sandbox.run(replace(setup, memory_limit_bytes=peak), tmp_path)
    assert enough["status"] == "ok", enough


def test_whether_every_role_fits(setup, ran, tmp_path):
    _, whole = ran
    peak = whole["ranks_of_interest"][str(RANK)]["memory"]["peak"]["bytes"]
    found = fits(setup.job, tmp_path, captured=setup.capture, limit_bytes=2 * peak)
    assert found["fits"]
    roles = Capture.read(setup.capture).speakers()
    assert len(found["ranks"]) == len(roles)
    assert found["margin_bytes"] == 2 * peak - found["peak_bytes"]
    assert found == json.loads((tmp_path / "fits.json").read_text())
    small = memory.verdict(
        {"it": whole["ranks_of_interest"][str(RANK)]["memory"]}, limit_bytes=peak - 1
    )
    assert not small["fits"]


def test_a_kineto_trace_on_request_is_no_measurement(setup, tmp_path):
    summary = sandbox.run(replace(setup, profile=True), tmp_path)
    assert summary["status"] == "ok", summary
    with gzip.open(tmp_path / f"rank-{RANK}" / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"ProfilerStep#4", "ProfilerStep#5", "gloo:all_reduce"} <= names
    assert summary["trust"]["why_not"] == ["a profiler ran, which takes time itself"]


@pytest.mark.parametrize(
    ("how", "captured", "came"),
    [
        ("micro batch", "all_reduce float32 128", "all_reduce float32 256"),
        ("layout", "", ""),
        ("extra", "", "all_reduce float32 3"),
        ("dtype", "all_reduce float32 128", "all_reduce bfloat16 128"),
    ],
)
def test_the_first_deviation_ends_the_run(setup, tmp_path, how, captured, came):
    summary = sandbox.run(deviating(setup, how), tmp_path)
    assert summary["status"] == "deviation", summary
    deviation = summary["deviation"]
    assert deviation["rank"] == RANK
    for words, key in ((captured, deviation["captured"]), (came, deviation["came"])):
        assert all(word in key for word in words.split()), deviation
    assert deviation["captured"] != deviation["came"]
    in_step_3 = 3 - Capture.read(setup.capture).first_body_mark + 1
    iteration = in_step_3 if how == "extra" else 0
    assert deviation["iteration"] == iteration
    for part in (f"Rank {RANK}", f"iteration {iteration}", "Capture the job again"):
        assert part in summary["reason"]
    assert not summary["trust"]["valid"]


def test_a_program_that_ends_early_deviates(setup, tmp_path):
    summary = sandbox.run(deviating(setup, "exit"), tmp_path)
    assert summary["status"] == "deviation", summary
    assert "came the program's end" in summary["reason"]


def test_an_exception_is_the_reason(setup, tmp_path):
    summary = sandbox.run(deviating(setup, "raise"), tmp_path)
    assert summary["status"] == "crash", summary
    assert "ValueError: the data has run out" in summary["reason"]
    assert "ValueError: the data has run out" in summary["last_lines"][-1]
    assert summary["rank"] == RANK


def test_a_killed_rank_ends_the_run_with_its_last_words(setup, tmp_path):
    summary = sandbox.run(deviating(setup, "kill"), tmp_path)
    assert summary["status"] == "crash", summary
    assert f"Rank {RANK} died of SIGKILL" in summary["reason"]
    assert summary["last_lines"][-1] == "about to die"
    assert not psutil.Process().children()


def test_a_rank_that_hangs_is_ended_at_its_limit_and_says_where(setup, tmp_path):
    summary = sandbox.run(replace(deviating(setup, "sleep"), limit_s=6), tmp_path)
    assert summary["status"] == "crash", summary
    assert any("program.py" in line for line in summary["last_lines"])


def test_another_program_is_refused_and_can_be_insisted_on(setup, tmp_path):
    job = setup.job.model_copy(update={"arguments": "--steps {iterations} --batch 4"})
    other = replace(setup, job=job)
    summary = sandbox.run(other, tmp_path)
    assert summary["status"] == "invalid"
    assert "its command was" in summary["reason"]
    summary = sandbox.run(replace(other, changed=True), tmp_path)
    assert summary["status"] == "ok", summary
    assert not summary["trust"]["valid"]
    assert "its command was" in summary["trust"]["why_not"][0]


def emulate_command(setup, folder, *options: str) -> list[str]:
    setup.durations.save(folder / "durations.parquet", provenance={})
    (folder / "job.yaml").write_text(setup.job.model_dump_json(exclude_none=True))
    return [
        *(sys.executable, "-m", "crystalllm", "emulate", "--job", str(folder / "job.yaml")),
        *("--ranks", str(RANK), "--capture", str(setup.capture), "--iterations", "4"),
        *("--durations", str(folder / "durations.parquet"), "--warm-up", "1"),
        *("--out", str(folder / "out"), *options),
    ]


def test_a_debugger_sits_in_the_rank(setup, tmp_path):
    """And takes no timed result's place."""
    command = emulate_command(deviating(setup, "pdb"), tmp_path, "--untimed")
    at = command.index("--out")
    del command[at : at + 2]
    done = subprocess.run(
        command,
        input="p 'rank', rank, 'of', world\np out.shape\nc\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "('rank', 5, 'of', 8)" in done.stdout
    assert "torch.Size([4, 32])" in done.stdout
    assert [path.name for path in (tmp_path / "results" / "job").iterdir()] == ["untimed"]
    summary = json.loads((tmp_path / "results" / "job" / "untimed" / "summary.json").read_text())
    assert summary["status"] == "ok"
    assert summary["trust"]["why_not"] == ["nothing was timed (--untimed)"]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_stopping_leaves_nothing_running(setup, tmp_path, stop):
    command = emulate_command(deviating(setup, "sleep"), tmp_path)
    with subprocess.Popen(command, start_new_session=True) as process:
        log = tmp_path / "out" / f"rank-{RANK}" / "log.txt"
        until = time.monotonic() + 60
        while not (log.exists() and "step 2" in log.read_text()):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.1)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        process.send_signal(stop)
        process.wait(30)
    _, alive = psutil.wait_procs(workers, timeout=15)
    assert not alive
    if stop == signal.SIGINT:
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["status"] == "crash"
        assert "SIGINT" in summary["reason"]


def test_signals_are_ours_again_after_a_run(tmp_path):
    """Torch elastic's handlers would turn a later Ctrl-C into an error of its own."""
    taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in taken]
    failure = processes.run_workers("crystalllm.sandbox.worker", tmp_path, 1)
    assert failure is not None, "there was no assignment"
    assert failure.exit_code == 1
    assert [signal.getsignal(number) for number in taken] == before
