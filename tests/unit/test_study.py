"""Studies: jobs and sweeps from YAML, names that stay, and what results depend on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from crystalllm import study
from crystalllm.config import Job, Parallelism, Work, load_job
from crystalllm.errors import UserError
from crystalllm.run import Program
from crystalllm.study import outlook, sources, table
from crystalllm.study.model import load_sweep

JOB = {
    "program": "train.py",
    "arguments": "--steps {iterations} --tp {tp} --recompute {recompute} {offload}",
    "parameters": {"recompute": "none", "offload": False, "layers": 4},
    "world_size": 64,
    "iterations": 4,
    "parallelism": {"tp": 2, "pp": 2, "dp": 16},
    "cluster": "small",
}
NODES = {"count": 8, "gpus_per_node": 8, "gpu": {"model": "X", "memory_bytes": 1}}
LINK = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6}
CLUSTER = {
    "nodes": [{**NODES, "gpu": {**NODES["gpu"], "peak_flops": {"bf16": 1.0}}}],
    "links": {"a": {"scope": "node", **LINK}, "b": {"scope": "cluster", **LINK}},
}


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Writes the configuration and gives the cases: `configured(sweep, **study)`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import helper\n")

    def write(path, content):
        path = tmp_path / "config" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False))

    def cases(sweep=None, *, job=JOB, **content):
        write("jobs/base.yaml", job)
        write("clusters/small.yaml", CLUSTER)
        write("clusters/other.yaml", CLUSTER)
        if sweep is not None:
            write("sweeps/layouts.yaml", {"job": "base", **sweep})
            content.setdefault("sweeps", ["layouts"])
        write("config.yaml", content)
        return study.cases(study.load_study())

    return cases


def names(found):
    return [(case.folder, case.run) for case in found[0]]


def test_a_job_is_a_case_by_its_name(configured):
    found, left_out = configured(jobs=["base"])
    assert [(c.folder, c.run, c.sweep) for c in found] == [("base", "emulate", "")]
    assert left_out == []
    assert found[0].job.command() == (
        "train.py", "--steps", "4", "--tp", "2", "--recompute", "none",
    )  # fmt: skip


def test_every_combination_is_a_point_and_dp_fills_the_world(configured):
    found, _ = configured({"axes": {"tp": [1, 2], "offload": [False, True]}})
    assert [case.folder for case in found] == [
        "layouts/tp1_no-offload",
        "layouts/tp1_offload",
        "layouts/tp2_no-offload",
        "layouts/tp2_offload",
    ]
    assert [case.job.parallelism.dp for case in found] == [32, 32, 16, 16]
    assert found[1].job.command()[-1] == "--offload"
    assert found[0].job.command()[-1] == "none"


def test_an_axis_more_with_a_default_renames_and_changes_nothing(configured):
    before, _ = configured({"axes": {"tp": [1, 2]}})
    more = {"values": ["none", "full"], "default": "none"}
    after, _ = configured({"axes": {"tp": [1, 2], "recompute": more}})
    assert [c.folder for c in after] == [
        "layouts/tp1",
        "layouts/tp1_recompute-full",
        "layouts/tp2",
        "layouts/tp2_recompute-full",
    ]
    of_after = {case.folder: case.job for case in after}
    assert all(of_after[case.folder] == case.job for case in before)
    # Nor does a parameter that the job has more, as long as its arguments do not name it.
    job = {**JOB, "parameters": {**JOB["parameters"], "another": 1}}
    again, _ = configured({"axes": {"tp": [1, 2]}}, job=job)
    assert [case.job for case in again] == [case.job for case in before]


def test_what_only_changes_times_shares_capture_and_planning(configured):
    axes = {"tp": [2], "cluster": {"values": ["small", "other"], "default": "small"}}
    found, _ = configured({"axes": {**axes, "what_if": ["slow.yaml"]}})
    assert names((found, [])) == [
        ("layouts/tp2", "emulate_what_if-slow"),
        ("layouts/tp2", "emulate_cluster-other_what_if-slow"),
    ]
    assert found[0].job == found[1].job
    assert [case.cluster for case in found] == ["small", "other"]


def test_points_that_cannot_be_are_listed_with_the_reason(configured):
    found, left_out = configured(
        {
            "axes": {"tp": [1, 2, 3, 16], "world_size": [64, 128]},
            "where": {"tp <= 8": "a group stays in a node", "layers % pp == 0": "equal stages"},
        }
    )
    assert [case.folder for case in found] == [
        "layouts/tp1_world_size64",
        "layouts/tp2_world_size64",
    ]
    reasons = {(i.values["tp"], i.values["world_size"]): i.reason for i in left_out}
    assert reasons[16, 64] == "a group stays in a node (tp <= 8)"
    assert "60 ranks, but world_size is 64" in reasons[3, 64]
    assert "cluster is too small" in reasons[1, 128]
    assert len(reasons) == 6


def test_single_points_stand_beside_axes(configured):
    points = [{"tp": 4, "recompute": "full"}, {"tp": 2}]
    default = {"values": ["none"], "default": "none"}
    found, _ = configured({"axes": {"tp": [2], "recompute": default}, "points": points})
    # The point that is there twice is one.
    assert [case.folder for case in found] == ["layouts/tp2", "layouts/tp4_recompute-full"]


@pytest.mark.parametrize(
    ("sweep", "content", "message"),
    [
        ({"axes": {"tpp": [1]}}, {}, "does not have: tpp.*Vary some of tp, pp"),
        ({"axes": {"tp": []}}, {}, "axes.tp.values"),
        ({}, {}, "needs axes or points"),
        ({"axes": {"tp": {"values": [1], "default": 2}}}, {}, "none of its values: 2"),
        ({"axes": {"tp": [1]}, "where": {"tp <": "x"}}, {}, "cannot be evaluated: tp <"),
        ({"axes": {"tp": [1]}, "where": {"unknown": "x"}}, {}, "cannot be evaluated: unknown"),
        ({"axes": {"tp": [1]}, "job": "bas"}, {}, r"no job bas \(did you mean base\?\)"),
        (None, {"jobs": ["bas"]}, r"no job bas \(did you mean base\?\)"),
        (None, {"sweeps": ["x"]}, "no sweep x"),
        (None, {"jobz": ["base"]}, r"unknown key jobz .*did you mean jobs"),
        (None, {"planning": {"pases": 3}}, r"unknown key planning.pases .*passes"),
        (None, {"capture": {"shards": 65}}, "less than or equal to 64"),
        (None, {"capture": {"shards": 2}}, "shards=2 needs strategy: all"),
        (None, {"overrides": {"base": {"emulat": {}}}}, "emulat"),
        (None, {"overrides": {"base": {"emulate": {"rank": "1"}}}}, "rank"),
        (None, {"emulate": {"memory_limit": "lots"}}, "memory_limit"),
    ],
)
def test_mistakes_are_explained(configured, sweep, content, message):
    with pytest.raises(UserError, match=message):
        configured(sweep, **content)


def test_two_cases_of_one_name_are_refused(configured, tmp_path):
    configured({"axes": {"tp": [1]}}, jobs=["base"])
    (tmp_path / "elsewhere").mkdir()
    other = {**JOB, "seed": 1}
    (tmp_path / "elsewhere" / "base.yaml").write_text(yaml.safe_dump(other))
    with pytest.raises(UserError, match="Two cases have the name base, emulate"):
        configured(jobs=["base", "elsewhere/base.yaml"])


def test_options_are_those_of_the_job(configured):
    found, _ = configured(
        jobs=["base"],
        planning={"passes": 2},
        overrides={"base": {"emulate": {"ranks": "3", "memory_limit": "1GiB"}}},
    )
    options = found[0].options
    assert (options.planning.passes, options.emulate.ranks) == (2, "3")
    assert options.emulate.memory_limit == 1 << 30


def test_the_shipped_study_and_sweeps_are_sound():
    found, _ = study.cases(study.load_study())
    assert [case.folder for case in found] == ["gpt-512"]
    shipped = study.load_study().model_copy(update={"jobs": [], "sweeps": ["gpt-512-layouts"]})
    points, left_out = study.cases(shipped)
    assert len(points) >= 8
    assert left_out
    assert {case.job.world_size for case in points} == {512}
    for name in ("gpt-512-ddp", "gpt-512-moe", "gpt-512-cuda", "gpt-16-cuda", "gpt-8192"):
        job = load_job(name)
        # The program itself accepts the layout.
        from crystalllm.examples.gpt import config

        module, arguments = job.command()[:2], job.command()[2:]
        assert module == ("-m", "crystalllm.examples.gpt")
        config.parse(arguments, world_size=job.world_size)
    assert load_sweep("gpt-512-layouts").job == "gpt-512"


def test_parameters_become_arguments():
    job = Job(
        program="train.py",
        arguments="--a {a} {flag} {off} --n '{name}' {{x}}",
        parameters={"a": 1.5, "flag": True, "off": False, "name": "two words"},
        world_size=1,
    )
    expected = ("train.py", "--a", "1.5", "--flag", "--n", "two words", "{x}")
    assert job.command() == expected
    assert job.resolved().command() == expected
    assert job.resolved().parameters == {}
    with pytest.raises(ValueError, match="seed have a meaning already"):
        Job(program="train.py", parameters={"seed": 1}, world_size=1)
    with pytest.raises(ValueError, match=r"unknown placeholder \{b\}"):
        Job(program="train.py", arguments="{b}", parameters={"a": 1}, world_size=1)


def test_the_files_of_a_program_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib" / "deep").mkdir(parents=True)
    (tmp_path / "lib" / "__init__.py").write_text("")
    (tmp_path / "lib" / "deep" / "__init__.py").write_text("from . import inner\n")
    (tmp_path / "lib" / "deep" / "inner.py").write_text("import torch, crystalllm.cli\n")
    (tmp_path / "lib" / "unused.py").write_text("")
    (tmp_path / "train.py").write_text("def f():\n    import lib.deep\n")
    found = sources.program_files(Program(command=("train.py",)))
    assert [str(p.relative_to(tmp_path)) for p in found] == [
        "lib/__init__.py",
        "lib/deep/__init__.py",
        "lib/deep/inner.py",
        "train.py",
    ]
    module = sources.program_files(Program(command=("-m", "lib.deep")))
    assert {p.name for p in module} == {"__init__.py", "inner.py"}


def test_a_stage_depends_on_the_modules_that_it_uses(tmp_path):
    """In a copy of the library, each edit changes the digests of the stages that use the file."""
    root = sources._ROOT
    for name in ("crystalllm", "patches", "nccl"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))

    def digests():
        code = (
            "import json; from crystalllm.study.sources import library_digest; "
            "print(json.dumps({s: library_digest(s) for s in ('capture', 'planning', 'emulate')}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    before = digests()

    def changed_by(path):
        file = tmp_path / path
        text = file.read_text()
        file.write_text(text + "\n")
        after = digests()
        file.write_text(text)
        return {stage for stage in before if before[stage] != after[stage]}

    assert changed_by("crystalllm/emulate.py") == {"emulate"}
    assert changed_by("crystalllm/planning/passes.py") >= {"planning"}
    assert "capture" not in changed_by("crystalllm/planning/passes.py")
    assert changed_by("crystalllm/capture/roles.py") >= {"capture"}
    assert changed_by("crystalllm/sandbox/worker.py") == {"planning", "emulate"}
    assert changed_by("nccl/core/clock.cpp") == {"capture", "planning", "emulate"}
    assert changed_by("crystalllm/examples/gpt/model.py") == set()
    assert changed_by("crystalllm/study/table.py") == set()


def test_the_outlook_is_told_and_a_full_disk_refused(configured, tmp_path, monkeypatch):
    found, left_out = configured({"axes": {"tp": [1, 3]}}, jobs=["base"])
    path = tmp_path / "results" / "base" / "benchmarks" / "capture.tsv"
    path.parent.mkdir(parents=True)
    path.write_text("s\th:m:s\n12.5\t0:00:12\n")
    prospects = outlook.outlook(found, tmp_path / "results")
    assert [p.folder for p in prospects] == ["base", "layouts/tp1"]
    assert prospects[0].seconds["capture"] == 12.5
    assert prospects[0].known == {"capture"}
    text = outlook.text(prospects, left_out)
    assert "12 s" in text
    assert "~" in text
    assert "1 points of sweeps cannot be" in text
    outlook.check(prospects, tmp_path / "results")
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    with pytest.raises(UserError, match=r"disk is too small.*are free"):
        outlook.check(prospects, tmp_path / "results")


def summary(path, *, ms=None, status="ok", reason="", peak=1 << 20):
    ranks = {"num_iterations": 4, "memory": {"peak": {"bytes": peak}}}
    if ms is not None:
        ns = round(ms * 1e6)
        ranks |= {"iteration_ns": ns, "iteration_low_ns": ns - 1, "iteration_high_ns": ns + 1}
        ranks |= {"bubble_ns": ns // 4, "exposed_ns": ns // 2, "compute_ns": ns // 4}
        ranks |= {"wait_ns": 0, "host_ns": 0}
    trust = {"valid": status == "ok", "why_not": [reason] if reason else []}
    content = {"status": status, "reason": reason, "trust": trust}
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**content, "ranks_of_interest": {"0": ranks}}))
    return path


WORKING = Job(
    program="-m json.tool",
    parameters={"batch": 4},
    world_size=2,
    parallelism=Parallelism(tp=2),
    work=Work(tokens="batch * 512 * tp", flops="8e9"),
).resolved()


def test_utilization_is_of_what_the_cores_of_planning_could_do(tmp_path):
    row = table.Row(
        "a", "run", "", {}, summary(tmp_path / "a" / "run" / "s.json", ms=100.0), WORKING
    )
    readings = [{"matmul_ns": ns} for ns in (300_000, 400_000, 500_000)]
    passes = [
        {"slices": [{"calibration": {"before": [{"matmul_ns": 1}], "after": []}}]},
        {"slices": [{"calibration": {"before": readings[:1], "after": readings[1:]}}]},
    ]
    planned = tmp_path / "a" / "planning" / "planning.json"
    planned.parent.mkdir()
    planned.write_text(json.dumps({"passes": passes}))
    # 33.6 million operations in 0.4 ms, of which 40 thousand million a second are half.
    share = 4e10 / (2 * 256**3 / 400e-6)
    assert table.table([row])["mfu"].tolist() == [pytest.approx(share)]


def test_a_study_without_cases_has_a_table(tmp_path):
    """Every point may be infeasible; the file that says why is written with it."""
    found = table.table([])
    names = {"tsv": "t.tsv", "text": "t.txt", "infeasible_tsv": "i.tsv"}
    left_out = [("s", {"tp": 3}, "3 does not divide 8")]
    table.write(found, left_out, **{k: tmp_path / name for k, name in names.items()})
    assert "3 does not divide 8" in (tmp_path / "i.tsv").read_text()
    table.check(found)


def test_names_may_have_dots_and_values_braces(tmp_path, monkeypatch):
    job = {
        "program": "-m json.tool",
        "arguments": "--extra {extra}",
        "parameters": {"extra": '\'{"a": {"b": 1}}\''},
        "world_size": 2,
    }
    names = [tmp_path / f"llama-3.1-{size}b.yaml" for size in (8, 70)]
    for path in names:
        path.write_text(yaml.safe_dump(job))
    found, _ = study.cases(study.Study(jobs=[str(path) for path in names]))
    assert [case.folder for case in found] == ["llama-3.1-8b", "llama-3.1-70b"]
    assert found[0].job.command() == ("-m", "json.tool", "--extra", '{"a": {"b": 1}}')


def test_the_table_shows_ties_and_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "error_band", lambda device="cpu": 0.05)
    made = {
        "a": {"ms": 100.0},
        "b": {"ms": 140.0},
        "c": {"ms": 105.0},
        "d": {"status": "oom", "reason": "Rank 0 ran out of memory."},
        "e": {"ms": 90.0},
    }
    rows = [
        table.Row(
            f"s/{k}",
            "emulate",
            "s",
            {"tp": i},
            summary(tmp_path / k / "run" / "s.json", **v),
            WORKING,
        )
        for i, (k, v) in enumerate(made.items())
    ]
    alone = summary(tmp_path / "x" / "run" / "s.json", ms=1.0)
    rows.append(table.Row("alone", "emulate", "", {}, alone, WORKING))
    found = table.table(rows).set_index("case")
    assert found.index.tolist() == ["e", "a", "c", "b", "d", "alone"]
    assert found["place"].tolist() == ["1", "2=", "2=", "4", "", ""]
    assert found.loc["d", "status"] == "oom"
    assert found.loc["a", "bubble"] == pytest.approx(0.25)
    assert found["limit"].tolist() == ["transfers"] * 4 + ["memory", "transfers"]
    # 4096 tokens and 8e9 operations in 0.1 s on two ranks.
    assert found.loc["a", "tokens_per_s"] == pytest.approx(20_480)
    assert found.loc["a", "flops_per_s"] == pytest.approx(4e10)
    assert found["mfu"].isna().all(), "nothing was planned"
    table.check(found.reset_index())
    text = table.as_text(found.reset_index())
    assert "not how they rank on GPUs" in text
    assert "ran out of memory" in text
    rows.append(
        table.Row(
            "bad",
            "emulate",
            "",
            {},
            summary(tmp_path / "y" / "run" / "s.json", status="crash", reason="Rank 0 died."),
            WORKING,
        )
    )
    with pytest.raises(UserError, match=r"1 of 7 runs have no result.*bad: crash, Rank 0 died"):
        table.check(table.table(rows))
