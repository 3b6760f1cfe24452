"""Anomalies and comparisons of real runs: one op of one rank slowed, and unchanged runs."""

from __future__ import annotations

import json
import shutil

import compared_program
import numpy as np
import pytest
from compared_program import BLOCK, RANK

from crystalllm import cli, cores, fidelity, tables
from crystalllm.capture import capture
from crystalllm.compare.anomalies import find
from crystalllm.compare.compare import compare
from crystalllm.compare.effects import Computing, ReplayedWorld, Transferring
from crystalllm.compare.findings import Limits
from crystalllm.compare.runs import Run
from crystalllm.compare.show import show_anomalies, show_comparison
from crystalllm.config import load_job
from crystalllm.emulate import emulate
from crystalllm.errors import UserError
from crystalllm.planning import Options, planning
from crystalllm.replay.durations import Duration, DurationTable
from crystalllm.replay.program import Capture
from crystalllm.traces.kineto import import_traces
from crystalllm.transfers.uniform import uniform_transfers

pytestmark = pytest.mark.heavy

SLOW_MS = 150
# The slowed op takes tens of times as long, and most of the iteration. What other work on the
# machine makes of a run is far from that and must not decide a test; how often it makes a
# finding under the usual limits is bounded in test_compare_statistics.py.
LIMITS = Limits(rate=0.001, min_ratio=1.0, min_share=0.1)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return compared_program.make_job(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def folder(job, tmp_path_factory):
    """A job's folder with its capture and its planning."""
    folder = tmp_path_factory.mktemp("results")
    capture(job, folder / "capture", strategy="all", limit_s=600)
    planning(
        job,
        folder / "planning",
        capture=folder / "capture",
        transfers=transfers,
        options=Options(max_passes=1),
    )
    return folder


def transfers(captured):
    return uniform_transfers(captured.calls, latency_ns=50e3, bytes_per_s=1e9)


def run(folder, job, out, *, ranks=str(RANK), slow="", durations=None):
    if slow:
        job = job.model_copy(update={"environment": {"SLOW": slow}})
    summary = emulate(
        job,
        out,
        ranks=ranks,
        captured=folder / "capture",
        durations=durations or folder / "planning" / "profile.parquet",
        limit_s=600,
    )
    assert summary["status"] == "ok", summary
    return out


@pytest.fixture(scope="module")
def unchanged(job, folder):
    return run(folder, job, folder / "unchanged")


@pytest.fixture(scope="module")
def slowed(job, folder):
    return run(folder, job, folder / "slowed", slow=f"{RANK} {BLOCK} {SLOW_MS}")


def of_ops(found):
    """Findings but for the speed of the whole run, which other work on the machine decides."""
    return [f for f in found.summary["findings"] if f["what"] != "speed"]


def test_the_slowed_op_is_found_with_its_effect(slowed):
    found = find(slowed, limits=LIMITS)
    findings = of_ops(found)
    assert [f["ranks"] for f in findings] == [[RANK]]
    first = findings[0]
    # The block's computation lies between its all_reduce and the one before.
    assert first["place"] == (
        f"all_reduce default_pg ({BLOCK - 1}) to all_reduce default_pg ({BLOCK})"
    )
    assert first["ratio"] > 5
    speed = next(s["factor"] for s in found.summary["speeds"] if s["against"] == "baseline")
    assert first["direct_ns"] == pytest.approx(SLOW_MS * 1e6 / speed, rel=0.5)
    # Everybody waits in the next all_reduce: nothing of it is absorbed.
    assert first["effect_ns"] == pytest.approx(first["direct_ns"], rel=0.2)
    assert abs(first["absorbed_ns"]) < 0.2 * first["effect_ns"]


def test_an_unchanged_run_has_no_anomaly(unchanged, capsys):
    found = find(unchanged, limits=LIMITS)
    assert of_ops(found) == []
    assert found.summary["num_segments"] > 20
    assert found.summary["num_not_in_baseline"] == 0
    assert found.summary["detectable_half"] > 1
    show_anomalies(found)
    printed = capsys.readouterr().out
    assert "Would have been found" in printed or "too noisy" in printed


def test_what_is_found_is_a_table(slowed, tmp_path):
    found = find(slowed, limits=LIMITS)
    found.write(tmp_path)
    rows, provenance = tables.ANOMALIES.read(tmp_path / "anomalies.parquet")
    frame = rows.to_pandas()
    assert len(frame) == len(found.frame)
    row = frame[frame["what"] == "segment"].iloc[0]
    assert row["rank"] == RANK
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
    assert row["measured_ns"] - row["baseline_ns"] == pytest.approx(row["direct_ns"], abs=2)
    assert provenance["limits"]["rate"] == LIMITS.rate
    assert json.loads((tmp_path / "anomalies.json").read_text())["findings"]


@pytest.fixture(scope="module")
def imported(job, tmp_path_factory):
    """Imported traces of the program on real gloo ranks."""
    out = tmp_path_factory.mktemp("real")
    traces = compared_program.real_traces(job, out / "traces")
    import_traces(traces, out / "capture")
    return out


def test_an_imported_real_run_is_a_baseline_too(imported, slowed, unchanged):
    found = find(slowed, imported, limits=LIMITS)
    assert found.summary["num_segments"] >= 16
    first = of_ops(found)[0]
    assert f"to all_reduce default_pg ({BLOCK})" in first["place"]
    assert first["effect_ns"] > 0.5e6 * SLOW_MS
    assert abs(first["absorbed_ns"]) < 0.2 * first["effect_ns"]
    # Under the profiler and on four ranks at once everything is otherwise; the op is as usual.
    same = find(unchanged, imported, limits=LIMITS)
    assert all(f"to all_reduce default_pg ({BLOCK})" not in f["place"] for f in of_ops(same))


def test_transfers_among_real_ranks_are_timed(folder, job, imported):
    out = run(folder, job, folder / "both", ranks="0,1")
    calls = Run.read(out).communication
    assert (calls["transport"] == "real").all()
    known = calls[calls["transfer_ns"] >= 0]
    assert len(known) > 0.5 * len(calls), "somebody waits in most calls"
    per_call = known.groupby("call")["transfer_ns"]
    assert (per_call.nunique() == 1).all(), "all members see one transfer"
    assert known["transfer_ns"].median() < Run.read(out).iteration_ns(RANK)
    found = find(out, imported, limits=LIMITS)
    assert found.summary["num_transfers"] > 0
    assert found.summary["num_replayed_calls"] == 0


def test_two_runs_are_compared(unchanged, slowed, capsys):
    found = compare(unchanged, slowed)
    settings = set(found.configuration["setting"])
    assert all(name.startswith("conditions.") for name in settings), settings
    rows = found.iterations.set_index("part")
    for part in ("compute", "iteration"):
        assert rows.loc[part, "difference_ns"] > SLOW_MS * 0.4e6
        assert rows.loc[part, "low_ns"] > 0
        assert rows.loc[part, "differs"]
    first = found.ops[found.ops["differs"]].iloc[0]
    assert first["what"] == "segment"
    assert f"to all_reduce default_pg ({BLOCK})" in first["place"]
    assert first["low"] < first["ratio"] < first["high"]
    content = json.loads(found.to_json())
    assert content["iterations"][0]["n_a"] == 10
    show_comparison(found)
    printed = capsys.readouterr().out
    parts = ("Configuration", "Iteration", "Where its time goes", "Memory", "Ops that differ")
    assert [printed.index(part) for part in parts] == sorted(printed.index(part) for part in parts)


def test_the_trust_box_tells_of_the_cores_and_of_the_nearest_measured_case(unchanged, folder):
    trust = json.loads((unchanged / "summary.json").read_text())["trust"]
    planned = json.loads((folder / "planning" / "planning.json").read_text())
    speed = trust["speed"]
    assert speed["reference_ns"]["planning"] == planned["passes"][-1]["standard"]["ns"]
    if len(cores.separate()) > 1:
        assert len(speed["reference_ns"]["before"]) == len(speed["reference_ns"]["after"]) == 1
        assert -0.9 < speed["gap"] < 9
    else:
        assert speed["gap"] is None, "the rank was not pinned"
    near = trust["nearest_fidelity_case"]
    cases = {case["name"]: case for case in fidelity.measured("cpu")["cases"]}
    assert near["ratio"] == cases[near["case"]]["ratio"]
    covered = set(cases[near["case"]]["traits"]) | set(near["not_covered"])
    assert set(fidelity.traits(Capture.read(folder / "capture"))) <= covered


def test_a_run_does_not_differ_from_itself(unchanged):
    found = compare(unchanged, unchanged)
    assert found.configuration.empty
    assert not found.iterations["differs"].any()
    assert not found.ops["differs"].any()
    assert (found.ops["difference_ns"] == 0).all()


def test_other_structures_are_refused_unless_forced(unchanged, folder, two_roles, tmp_path):
    captured, durations, job = two_roles
    durations.save(tmp_path / "durations.parquet", provenance={})
    out = tmp_path / "emulate"
    other = run(captured, job, out, durations=tmp_path / "durations.parquet")
    with pytest.raises(UserError, match=r"different structures: fingerprint .* --force"):
        compare(unchanged, other)
    forced = compare(unchanged, other, force=True)
    assert any("fingerprint" in note for note in forced.notes)
    assert any("segments of one run have no counterpart" in note for note in forced.notes)
    assert set(forced.ops["what"]) == {"segment"}, "no call is equal in both"
    assert forced.memory.set_index("what").loc["parameters at most", "difference"] < 0
    assert forced.configuration["setting"].iloc[0] == "fingerprint"
    assert "program" in set(forced.configuration["setting"])
    with pytest.raises(UserError, match="another structure"):
        find(other, folder / "planning" / "profile.parquet")


def test_memory_is_compared_to_the_byte(unchanged, slowed):
    rows = compare(unchanged, slowed).memory.set_index("what")
    assert rows.loc["peak", "a"] > rows.loc["parameters at the peak", "a"] > 0
    # A busy loop holds no memory.
    assert (rows["difference"] == 0).all()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "summary.json").unlink(), "no run of sandbox ranks"),
        (lambda run: (run / "summary.json").write_text("{"), "cannot be read"),
        (lambda run: (run / f"rank-{RANK}" / "segments.parquet").unlink(), "left what it measured"),
        (
            lambda run: (run / f"rank-{RANK}" / "segments.parquet").write_bytes(b"PAR1"),
            "cannot be read",
        ),
        (lambda run: shutil.move(run / f"rank-{RANK}", run / "rank-0"), "another rank than its"),
    ],
)
def test_damaged_runs_are_refused(unchanged, folder, tmp_path, spoil, message):
    shutil.copytree(unchanged, tmp_path / "run")
    spoil(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        find(tmp_path / "run", folder / "planning")
    with pytest.raises(UserError, match=message):
        compare(unchanged, tmp_path / "run")


def test_what_is_no_baseline_is_refused(unchanged, folder, tmp_path):
    with pytest.raises(UserError, match="no baseline: several ranks computed at once"):
        find(unchanged, folder / "capture")
    shutil.copytree(unchanged, tmp_path / "alone" / "emulate")
    with pytest.raises(UserError, match=r"planning.profile\.parquet"):
        find(tmp_path / "alone")
    with pytest.raises(UserError, match="knows nothing of what this run computed"):
        find(unchanged, DurationTable())
    with pytest.raises(UserError, match="Too few iterations"):
        find(unchanged, warm_up=9)
    # Without a capture the world cannot be replayed; the rest is done, and it is said.
    shutil.copytree(unchanged, tmp_path / "run")
    found = find(tmp_path / "run", folder / "planning" / "profile.parquet")
    assert any("effects" in note for note in found.summary["notes"])


def test_what_speaks_against_a_run_is_said(unchanged, folder, tmp_path):
    shutil.copytree(unchanged, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    summary["trust"] |= {"valid": False, "why_not": ["a profiler ran"]}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    said = find(tmp_path / "run", folder / "planning").summary["notes"]
    assert any("not valid: a profiler ran" in note for note in said)
    said = compare(unchanged, tmp_path / "run").notes
    assert [note for note in said if "not valid" in note] == [
        f"{tmp_path / 'run'} is not valid: a profiler ran"
    ]


def test_the_commands_print_and_write(folder, unchanged, slowed, tmp_path, capsys):
    shutil.copytree(slowed, tmp_path / "run")

    def printed(*command):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(part) for part in command])
        assert ended.value.code == 0
        return capsys.readouterr().out

    options = ("--baseline", folder / "planning", "--capture", folder / "capture")
    text = printed("anomalies", tmp_path / "run", *options)
    assert f"to all_reduce default_pg ({BLOCK})" in text
    assert (tmp_path / "run" / "anomalies.parquet").exists()
    summary = json.loads(printed("anomalies", tmp_path / "run", *options, "--json"))
    assert summary["findings"]
    assert "Ops that differ" in printed("compare", unchanged, slowed, "--between", "8")
    assert json.loads(printed("compare", unchanged, slowed, "--json"))["ops"]


# --- effects on the iteration, without noise -------------------------------------------------

MESSAGES = """
import argparse, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
dist.init_process_group("gloo")
p = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([p], lr=0.1)
for _ in range(steps):
    p.grad = torch.ones(4)
    dist.all_reduce(p.grad)
    if dist.get_rank():
        dist.recv(torch.ones(4), 0)
    else:
        dist.send(p.detach(), 1)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def two_roles(tmp_path_factory):
    """A sender that computes 10 ms before its all_reduce, and a receiver that computes 1 ms."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "train.py").write_text(MESSAGES)
    job = {
        "program": str(folder / "train.py"),
        "arguments": "--steps {iterations}",
        "world_size": 2,
        "iterations": 10,
        "capture_iterations": 4,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    job = load_job(str(folder / "job.yaml"))
    capture(job, folder / "capture", limit_s=60)
    found = Capture.read(folder / "capture")
    table = found.captured_durations()
    for at in table.segments:
        role, _, section, position = at
        before_all_reduce = section == "body" and position == 0
        table.segments[at] = Duration((10_000_000, 1_000_000)[role] if before_all_reduce else 0)
    table.transfers = {key: Duration(500_000) for key in found.calls["key"].unique()}
    return folder, table, job


def world_of(two_roles):
    folder, table, _ = two_roles
    return ReplayedWorld(Capture.read(folder), table)


def test_slack_absorbs_a_deviation(two_roles):
    world = world_of(two_roles)
    assert world.usual_ns == 10_000_000 + 2 * 500_000

    def added(rank, factor):
        return world.iteration_ns([Computing(rank, "host:0", (0,), factor)]) - world.usual_ns

    assert added(1, 5) == 0, "it still waits for the other"
    assert world.excess_ns(Computing(1, "host:0", (0,), 5)) == 4_000_000
    assert added(1, 15) == 5_000_000
    assert added(0, 2) == 10_000_000
    assert added(0, 0.5) == -5_000_000
    both = [Computing(0, "host:", (), 0.5), Computing(1, "host:", (), 15)]
    assert world.iteration_ns(both) == 15_000_000 + 2 * 500_000


def test_a_slower_transfer_is_replayed_in_its_group(two_roles):
    world = world_of(two_roles)
    calls = Capture.read(two_roles[0]).calls
    calls = calls[calls["rank"] == 0]
    last = calls[calls["kind"] == "all_reduce"]["call"].max()
    assert world.iteration_ns([Transferring(0, int(last), 3)]) == world.usual_ns + 1_000_000
    assert world.excess_ns(Transferring(0, int(last), 3)) == 1_000_000
    assert not world.has(Transferring(0, 10_000, 3))
    assert np.isclose(world.iteration_ns([]), world.usual_ns)
