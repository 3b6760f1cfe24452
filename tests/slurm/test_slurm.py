"""The workflow on a real Slurm of one node, which `slurm.sh` starts for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from workflow_project import JOBS, Project, rules_in, stages

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).with_name("slurm.sh")


def call(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def slurm():
    """A Slurm. Without its tools tests are skipped, but not where CI runs them."""
    lacking = call(str(SCRIPT), "missing").split()
    if lacking or os.geteuid():
        why = f"Slurm cannot be started: missing {', '.join(lacking) or 'root'}"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    call(str(SCRIPT), "start")
    yield
    call(str(SCRIPT), "stop")


@pytest.fixture(scope="module")
def project(slurm, tmp_path_factory):
    made = Project(tmp_path_factory.mktemp("project"))
    # What sbatch is given, for a test to read.
    wrapper = made.folder / "bin" / "sbatch"
    wrapper.parent.mkdir()
    real = shutil.which("sbatch")
    wrapper.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {made.folder}/submitted\nexec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    made.environment["PATH"] = f"{wrapper.parent}:{os.environ['PATH']}"
    profile = made.folder / "cluster" / "config.yaml"
    content = yaml.safe_load(profile.read_text())
    # A small node: the looks at the queue are what takes time.
    content |= {"slurm-init-seconds-before-status-checks": 3, "latency-wait": 10}
    profile.write_text(yaml.safe_dump(content))
    return made


def on_slurm(project, *arguments, code=0):
    return project.run("--profile", "cluster", *arguments, code=code)


def queue() -> list[str]:
    return call("squeue", "--noheader", "--format", "%i %T %j").split("\n")[:-1]


def running() -> list[str]:
    return [line.split()[0] for line in queue() if line.split()[1] in ("RUNNING", "PENDING")]


def test_stages_run_as_jobs(project):
    text = on_slurm(project, "emulate_all")
    assert rules_in(text) >= stages("capture", "plan", "planning", "emulate")
    for name in JOBS:
        assert project.summary(name)["status"] == "ok"
    submitted = (project.folder / "submitted").read_text().splitlines()
    assert len(submitted) >= 1 + 4 * len(JOBS)
    assert all(re.search(r"--mem[= ]\d+|--mem-per-cpu", line) for line in submitted)
    assert any("planning" in line for line in submitted)
    assert not running()
    assert on_slurm(project, "--dry-run", "--quiet", "host").count("Nothing to be done") == 1


def stop_in_planning(project, how) -> str:
    """Replans the first job, and does `how` to its Slurm job once it runs."""
    for stage in ("planning", "emulate"):
        shutil.rmtree(project.folder / "results" / "first" / stage, ignore_errors=True)
    snakemake = project.start("--profile", "cluster", "emulate_all")
    project.wait_for_ranks()
    active = [line for line in queue() if " RUNNING " in line]
    assert len(active) == 1, queue()
    how(active[0].split()[0])
    text, _ = snakemake.communicate(timeout=180)
    assert snakemake.returncode != 0
    return text


def cancel(job):
    call("scancel", job)


def kill(job):
    call("scancel", "--signal", "KILL", job)


@pytest.mark.parametrize("how", [cancel, kill])
def test_a_job_that_is_cancelled_is_reported_and_goes_on(project, how):
    text = stop_in_planning(project, how)
    assert re.search(r"Error in rule planning|failed|CANCELLED", text), text[-3000:]
    assert not (project.folder / "results" / "first" / "planning" / "profile.parquet").exists()
    assert not running()
    text = on_slurm(project, "emulate_all")
    assert "planning first" in rules_in(text)
    assert not rules_in(text) & stages("capture")


def test_a_job_that_takes_too_long_is_reported(project):
    # A minute is the least; the program sleeps for longer.
    project.job("first", environment={"DEVIATE": "sleep"})
    said = on_slurm(
        project,
        "--set-resources",
        "capture:runtime=1",
        "--",
        "capture_all",
        code=1,
    )
    assert re.search(r"TIMEOUT|Error in rule capture", said), said[-3000:]
    assert not (project.folder / "results" / "first" / "capture" / "structure.json").exists()
    project.job("first")
    assert "capture first" in rules_in(on_slurm(project, "capture_all"))


def test_a_program_that_fails_is_reported_with_its_words(project):
    project.job("second", environment={"DEVIATE": "raise"})
    said = on_slurm(project, "capture_all", code=1)
    log = (project.folder / "results" / "second" / "logs" / "capture.log").read_text()
    assert "the data has run out" in log
    assert "capture" in said
    assert not running()
