"""doctor, bench and the native build."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from crystalllm import doctor, native, patching, tables
from crystalllm.errors import UserError


def test_doctor_finds_what_runs_these_tests(capsys):
    findings = {f.name: f for f in doctor.examine()}
    for name in ("Python", "torch", "packages", "cores", "memory", "disk", "g++", "make"):
        assert findings[name].ok, findings[name]
    assert all(f.cost for f in findings.values() if not f.ok)
    doctor.show(list(findings.values()), as_json=True)
    assert {f["name"] for f in json.loads(capsys.readouterr().out)} == set(findings)


def test_doctor_says_what_a_lack_costs(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    findings = {f.name: f for f in doctor.examine()}
    assert not findings["g++"].ok
    assert findings["g++"].required
    assert "extension cannot be built" in findings["g++"].cost
    assert "no workflow" in findings["snakemake"].cost
    assert "Slurm" in findings
    assert "this machine alone" in findings["Slurm"].cost


def test_doctor_is_a_command(root):
    done = subprocess.run(
        [sys.executable, "-m", "crystalllm", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "What this machine has" in done.stdout


def test_a_build_that_fails_names_its_log(monkeypatch, tmp_path):
    monkeypatch.setenv("CRYSTALLLM_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_make_command", lambda *_: ["sh", "-c", "echo broken; exit 3"])
    with pytest.raises(UserError, match=r"did not compile\. Exit code 3, log .*build\.log"):
        native.build()
    (log,) = tmp_path.rglob("build.log")
    assert "broken" in log.read_text()
    assert not list(tmp_path.rglob("*.so"))


def test_a_build_without_a_compiler_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CRYSTALLLM_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="without make"):
        native.build()


def test_every_patch_is_documented():
    import crystalllm_patches

    ids = [patch.id for patch in crystalllm_patches.KNOWN]
    assert len(ids) == len(set(ids))
    for patch in crystalllm_patches.KNOWN:
        for part in ("Problem", "Change", "Effect on numbers", "Turn off"):
            assert part in patch.documentation, patch.id
        assert patch.id in patch.documentation, "says how to turn it off"


def test_a_patch_for_other_versions_stops(monkeypatch):
    patch = patching.Patch(
        id="x.y", target="json", package="torch", versions="<1", apply=lambda module: None
    )
    with pytest.raises(patching.PatchError, match=r"x\.y is not made for this version\. torch"):
        patching.install([patch])


def test_a_patch_that_cannot_be_applied_stops():
    def apply(module):
        module.no_such_thing.attribute = 1

    patch = patching.Patch(id="x.z", target="json", package="torch", versions=">1", apply=apply)
    with pytest.raises(patching.PatchError, match=r"x\.z could not be applied.*no_such_thing"):
        patching.install([patch])


def test_tables_refuse_a_missing_column(tmp_path):
    with pytest.raises(KeyError):
        tables.CALL_TIMES.write(tmp_path / "x.parquet", {"call": [1]}, provenance={})
    assert not list(tmp_path.iterdir()), "nothing half written is left"


def test_every_package_is_installed(root):
    import tomllib

    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        ".".join(init.parent.relative_to(root).parts)
        for init in (root / "crystalllm").rglob("__init__.py")
    }
    assert there == {name for name in listed if not name.startswith("crystalllm_patches")}
