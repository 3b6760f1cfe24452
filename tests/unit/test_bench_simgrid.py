"""The replay benchmark's world as an MPI program in SimGrid."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from crystalllm.bench import replay, simgrid
from crystalllm.replay.engine import Engine

# Ranks and stages: tensor parallel with data parallel, with messages, with both.
WORLDS = [(16, 1), (16, 2), (32, 2)]
needs_simgrid = pytest.mark.skipif(
    not (shutil.which("smpirun") and shutil.which("smpicc")),
    reason="no SimGrid (Debian: libsimgrid-dev)",
)


@pytest.mark.parametrize(("size", "pp"), WORLDS)
def test_the_program_has_the_participations_of_the_world(size, pp):
    world = replay.world(size, pp=pp)
    with Engine(world) as engine:
        engine.run(2)
        assert simgrid.num_participations(world, num_iterations=2) == engine.num_participations


@needs_simgrid
@pytest.mark.parametrize(("size", "pp"), WORLDS)
def test_simgrid_counts_the_same(size, pp, folder):
    world = replay.world(size, pp=pp)
    found = simgrid.measure(world, num_iterations=2, limit_s=60)
    assert found.state.startswith("SimGrid 3"), found
    assert found.participations == simgrid.num_participations(world, num_iterations=2)
    assert found.participations_per_s > 0
    assert found.simulated_s > 0
    assert not list(folder.iterdir())


@needs_simgrid
def test_a_limit_ends_it(folder):
    found = simgrid.measure(replay.world(64, pp=8), num_iterations=1000, limit_s=0.5)
    assert found.state == "smpirun took longer than 0.5 s"
    assert found.participations_per_s is None
    assert not list(folder.iterdir())
    deadline = time.monotonic() + 10
    while processes_in(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_in(folder)


@needs_simgrid
def test_the_bench_gives_the_ratio(capsys, monkeypatch):
    monkeypatch.setattr(replay, "_SIMGRID_REPEATS", 1)
    found = replay._beside_simgrid(16, pp=2, engine_per_s=1e7)
    assert found["simgrid"].startswith("SimGrid 3")
    rate = found["simgrid_participations_per_s"]
    assert found["ratio_to_simgrid"] == pytest.approx(1e7 / rate, rel=0.01)
    assert "16 ranks in SimGrid 3" in capsys.readouterr().out


def test_without_simgrid_the_bench_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert replay._beside_simgrid(512, pp=8, engine_per_s=1e7) == {
        "simgrid": "not installed",
        "simgrid_participations_per_s": None,
        "ratio_to_simgrid": None,
    }
    assert capsys.readouterr().out == "512 ranks in SimGrid: skipped, not installed\n"


def test_a_failure_is_named(capsys, monkeypatch, tmp_path):
    for name in ("smpicc", "smpirun"):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = replay._beside_simgrid(16, pp=2, engine_per_s=1e7)
    assert found["simgrid"] == "smpirun ended with code 3: broken"
    assert found["ratio_to_simgrid"] is None
    assert "skipped, smpirun ended with code 3: broken" in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary folders are made; also the working directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def processes_in(folder: Path) -> list[str]:
    """The numbers of the processes below it, but for this one."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            where = os.readlink(f"/proc/{number}/cwd")
        except OSError:
            continue  # ended meanwhile, or somebody else's
        if where.startswith(str(folder)) and int(number) != os.getpid():
            found.append(number)
    return found
