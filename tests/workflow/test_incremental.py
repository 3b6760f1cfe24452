"""The workflow as people use it: what runs, what runs again, and what happens when it is stopped.

A copy of the project with two small jobs goes through all stages once; most questions are then
answered by a dry run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import zipfile

import pandas as pd
import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from workflow_project import JOBS, Project, program, rules_in, stages

from crystalllm.report import PICTURES

# What browsers show at once, and mail takes.
MOST_REPORTED = 4 << 20

STAGES = ("capture", "plan", "planning", "emulate", "report")

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """After one whole run."""
    made = Project(tmp_path_factory.mktemp("project"))
    text = made.run()
    assert rules_in(text) == {
        "build",
        "table",
        "overview",
        *stages(*STAGES),
    }
    return made


@pytest.fixture
def unchanged(project):
    """The project; afterwards its files are put back as they were."""
    kept = {
        path: (path.read_bytes(), path.stat())
        for folder in ("crystalllm", "config", "workflow")
        for path in (project.folder / folder).rglob("*")
        if path.is_file()
    }
    kept |= {p: (p.read_bytes(), p.stat()) for p in project.folder.glob("*.py")}
    yield project
    for path, (content, stat) in kept.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for path in (project.folder / "config").rglob("*.yaml"):
        if path not in kept:
            path.unlink()


def test_a_whole_run_leaves_results_and_a_table(project):
    for name in JOBS:
        summary = project.summary(name)
        assert summary["status"] == "ok"
        assert summary["trust"]["valid"]
        folder = project.folder / "results" / name
        assert (folder / "logs" / "planning.log").read_text()
        # Snakemake tells programs to use all cores, of which a rank has one.
        assert "threads 1\n" in (folder / "emulate" / "rank-0" / "log.txt").read_text()
        assert not (folder / ".work" / "planning").exists(), "raw measurements are not kept"
    text = (project.folder / "results" / "table.txt").read_text()
    assert "first" in text
    assert "iteration ms" in text
    header = (project.folder / "results" / "infeasible.tsv").read_text()
    assert header == "sweep\tpoint\treason\n"


def test_pictures_of_all_cases_join_in_snakemake_s_report(project):
    assert project.would_run("--", "report_all") == set()
    project.run("--report", "report.zip", "report_all")
    with zipfile.ZipFile(project.folder / "report.zip") as report:
        names = report.namelist()
        pages = [report.read(n).decode() for n in names if n.endswith(".html")]
        assert all(info.file_size < MOST_REPORTED for info in report.infolist())
    for name in PICTURES:
        assert sum(n.endswith(f"{name}.svg") for n in names) == len(JOBS)
    # Captions say the numbers of each.
    for name in JOBS:
        (rank,) = project.summary(name)["ranks_of_interest"].values()
        assert any(f"took {rank['iteration_ns'] / 1e6:.1f} ms" in page for page in pages)


def test_touching_nothing_runs_nothing(project):
    assert project.would_run() == set()


def test_a_job_s_parameter_reruns_what_depends_on_it(unchanged):
    unchanged.job("second", seed=1)
    expected = {*stages(*STAGES, of=("second",)), "table", "overview"}
    assert unchanged.would_run() == expected
    assert rules_in(unchanged.run()) == expected
    unchanged.job("second")
    assert rules_in(unchanged.run()) == expected


def test_another_cluster_leaves_the_capture(unchanged):
    unchanged.job("second", cluster="h200-64x8")
    expected = stages(*STAGES[1:], of=("second",))
    assert unchanged.would_run() == {*expected, "table", "overview"}


def test_how_to_emulate_reruns_emulations_only(unchanged):
    unchanged.study(emulate={"ranks": "3"})
    assert unchanged.would_run() == {*stages("emulate", "report"), "table", "overview"}


def test_a_module_that_the_program_imports_recaptures(unchanged):
    (unchanged.folder / "settings.py").write_text("BATCH = 8\n")
    assert unchanged.would_run() >= stages("capture")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("capture/roles.py", {"capture"}),
        ("emulate.py", {"emulate"}),
        ("planning/passes.py", {"plan"}),
        ("study/table.py", set()),
    ],
)
def test_a_library_module_reruns_the_stages_that_use_it(unchanged, module, expected):
    with (unchanged.folder / "crystalllm" / module).open("a") as file:
        file.write("\n# changed\n")
    found = unchanged.would_run()
    assert {name.split()[0] for name in found} - {"table"} >= expected
    if "capture" not in expected:
        assert not found & stages("capture")
    assert ("table" in found) == (module == "study/table.py") or expected


def test_a_sweep_shares_what_its_points_have_in_common(unchanged):
    sweep = {
        "job": "first",
        "axes": {
            "seed": [0, 1],
            "cluster": {"values": ["h200-2x8", "h200-64x8"], "default": "h200-2x8"},
            "world_size": {"values": [8, 1024], "default": 8},
        },
    }
    (unchanged.folder / "config" / "sweeps" / "links.yaml").write_text(yaml.safe_dump(sweep))
    unchanged.study(jobs=[], sweeps=["links"])
    text = unchanged.run("--dry-run", "--quiet", "host")
    found = rules_in(text)
    folders = ("links/seed0", "links/seed1")
    assert found == {*stages(*STAGES, of=folders), "table", "overview"}
    assert "4 points of sweeps cannot be" in text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.study(jobs=["frist"]), r"no job frist \(did you mean first\?\)"),
        (lambda p: p.study(plannning={}), r"unknown key plannning"),
        (lambda p: (p.folder / "train.py").unlink(), r"program train.py does not exist"),
        (lambda p: p.job("first", world_size=4096), r"cluster is too small for the world"),
        (lambda p: p.job("first", arguments="{stpes}"), r"unknown placeholder \{stpes\}"),
    ],
)
def test_mistakes_are_told_before_anything_runs(unchanged, spoil, message):
    spoil(unchanged)
    text = unchanged.run(code=1)
    assert re.search(message, text), text
    assert "Job stats" not in text


def test_a_repeated_capture_reruns_the_rest_only_if_it_is_another(unchanged):
    before = {name: unchanged.summary(name) for name in JOBS}
    text = unchanged.run("--forcerun", "capture", "--", "emulate_all")
    assert rules_in(text) >= stages("capture", "plan")
    assert not rules_in(text) & stages("planning", "emulate"), text
    assert {name: unchanged.summary(name) for name in JOBS} == before
    assert unchanged.would_run() == set()
    # Now it is: messages are longer.
    (unchanged.folder / "train.py").write_text(program().replace("empty(8)", "empty(9)").replace(
        "full((8,)", "full((9,)"
    ))  # fmt: skip
    text = unchanged.run()
    assert rules_in(text) >= stages("capture", "plan", "planning", "emulate")
    assert unchanged.would_run() == set()
    (unchanged.folder / "train.py").write_text(program())
    unchanged.run()


def stop_in_planning(project: Project, how) -> None:
    """Plans the first job anew, and does `how` to Snakemake once a rank runs."""
    running = project.start()
    try:
        project.wait_for_ranks()
        how(running)
        running.communicate(timeout=120)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)


def interrupt(running):
    os.killpg(running.pid, signal.SIGINT)


def kill_snakemake(running):
    """Its job goes on, and nobody notes its end."""
    running.kill()


def kill_all(running):
    """As when the machine goes down."""
    os.killpg(running.pid, signal.SIGKILL)


def kill_the_job(running):
    scripts = [
        p
        for p in psutil.Process(running.pid).children(recursive=True)
        if any("scripts" in part for part in p.cmdline())
    ]
    assert scripts
    scripts[0].kill()


@pytest.mark.parametrize("how", [interrupt, kill_snakemake, kill_all, kill_the_job])
def test_what_was_stopped_goes_on(project, how):
    """Stopped in planning; nothing stays behind, and the same command ends well."""
    for stage in ("planning", "emulate"):
        shutil.rmtree(project.folder / "results" / "first" / stage, ignore_errors=True)
    stop_in_planning(project, how)
    deadline = time.monotonic() + 60
    while (left := project.processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, [p.cmdline() for p in left]
    if how in (kill_snakemake, kill_all):
        project.run("--unlock")
    # A result appears whole or not at all. Snakemake did not see it come, and has it made again.
    is_finished = (project.folder / "results" / "first" / "planning" / "planning.json").exists()
    assert is_finished == (how is kill_snakemake)
    text = project.run()
    assert rules_in(text) >= stages("planning", "emulate", "report", of=("first",))
    assert not rules_in(text) & stages("capture")
    assert project.would_run() == set()


def test_a_profile_that_cannot_be_read_is_named_and_nothing_is_lost(project):
    """The emulation that would read it is invalid, says why, and the workflow fails."""
    profile = project.folder / "results" / "first" / "planning" / "profile.parquet"
    whole = profile.read_bytes()
    table = pq.read_table(profile)
    name, version = table.schema.metadata[b"crystalllm.table"].decode().split("/")
    of_another_version = {b"crystalllm.table": f"{name}/{int(version) + 1}".encode()}
    for spoil, reason in (
        (lambda: profile.write_bytes(whole[: len(whole) // 2]), "profile.parquet"),
        (lambda: pd.DataFrame({"a": [1]}).to_parquet(profile), f"none instead of {name}/{version}"),
        (
            lambda: pq.write_table(table.replace_schema_metadata(of_another_version), profile),
            f"{name}/{int(version) + 1} instead of {name}/{version}",
        ),
    ):
        spoil()
        text = project.run(code=1)
        summary = project.summary("first")
        assert summary["status"] == "invalid"
        assert reason in summary["reason"]
        assert "1 of 2 runs have no result" in text
    profile.write_bytes(whole)
    project.run()
    assert project.summary("first")["status"] == "ok"
    assert project.would_run() == set()


def test_passes_are_spread_over_shares_and_joined(unchanged):
    """What shares measured is what planning goes on from: it runs no slice again."""
    unchanged.study(
        jobs=["first"],
        planning={"iterations": 4, "passes": 2, "tolerance": 1e-9, "shards": 2},
    )
    text = unchanged.run()
    assert {f"planning_share {n}-{s} first" for n in (1, 2) for s in (0, 1)} <= shares_in(text)
    log = (unchanged.folder / "results" / "first" / "logs" / "planning.log").read_text()
    kept = re.findall(r"pass-\d, slice \d+ of \d+, rank .*: (.*)", log)
    assert kept
    assert set(kept) == {"kept from before"}, log
    assert not (unchanged.folder / "results" / "first" / "shares").exists()
    assert unchanged.would_run() == set()
    unchanged.study()
    unchanged.run()


def shares_in(text: str) -> set[str]:
    found = re.findall(r"^Job \d+: Measuring share (\d+) of pass (\d+) of (\S+)", text, re.M)
    return {f"planning_share {number}-{share} {job}" for share, number, job in found}


def test_other_schedulers_have_a_profile(unchanged):
    (unchanged.folder / "settings.py").write_text("BATCH = 8\n")
    text = unchanged.run("--profile", "cluster/generic", "--dry-run")
    assert rules_in(text) >= stages("capture", "plan")


def test_an_emulation_over_nodes_has_their_resources(unchanged):
    unchanged.study(jobs=["first"], emulate={"nodes": 2, "gres": "gpu:8"})
    text = unchanged.run("--dry-run")
    assert "Emulating first (emulate) on 2 nodes with gpu:8" in text
    text = unchanged.run(code=1)
    assert "An emulation over several nodes cannot run yet" in text
    assert not rules_in(text)
