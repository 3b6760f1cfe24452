"""A copy of the project with two small jobs, and its workflow as people call it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import sandbox_program
import yaml

from crystalllm import native

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("Snakefile", "workflow", "profiles", "cluster", "crystalllm", "patches", "nccl", "config")
JOBS = ("first", "second")
IMPORTED = "BATCH = 4\n"


def program() -> str:
    """The sandbox tests' program, with a module beside it and a size from there."""
    text = sandbox_program.PROGRAM.replace("import argparse,", "import argparse, settings,", 1)
    text = text.replace(
        "dist.barrier()", 'print("threads", torch.get_num_threads(), flush=True)\ndist.barrier()', 1
    )
    return text.replace("args.batch *", "settings.BATCH * args.batch // 4 *", 1)


class Project:
    """A copy of the project in which jobs are small."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copy2(source, folder / name)
        (folder / "train.py").write_text(program())
        (folder / "settings.py").write_text(IMPORTED)
        for name in JOBS:
            self.job(name)
        self.study()
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "CRYSTALLLM_BUILD_DIR": str(native.build_root()),
        }

    def job(self, name: str, **changes: object) -> None:
        content = {
            "program": "train.py",
            "arguments": "--steps {iterations} --seed {seed}",
            "world_size": 8,
            "ranks_per_node": 4,
            "iterations": 4,
            "capture_iterations": 4,
            "cluster": "h200-2x8",
            **changes,
        }
        self.configure(f"jobs/{name}.yaml", content)

    def study(self, **changes: object) -> None:
        content = {
            "jobs": list(JOBS),
            "planning": {"iterations": 4, "passes": 1},
            **changes,
        }
        self.configure("config.yaml", content)

    def configure(self, path: str, content: dict[str, object]) -> None:
        """Writes a file below config/."""
        (self.folder / "config" / path).write_text(yaml.safe_dump(content))

    def run(self, *arguments: str, code: int = 0) -> str:
        """What it says; its code has to be this."""
        running = self.start(*arguments)
        try:
            text, _ = running.communicate(timeout=600)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
        assert running.returncode == code, text[-6000:]
        return text

    def would_run(self, *arguments: str) -> set[str]:
        """Rules of a dry run, with their jobs, such as "capture first"."""
        text = self.run("--dry-run", "--quiet", "host", *arguments)
        return rules_in(text)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", "--cores", "all", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> list[psutil.Process]:
        """Everything that the workflow has started and that still runs, Slurm's jobs included."""
        found = []
        for process in psutil.process_iter(["environ", "cmdline"]):
            environment = process.info["environ"] or {}
            if environment.get("PYTHONPATH") == str(self.folder):
                found.append(process)
        return found

    def wait_for_ranks(self, limit_s: float = 120) -> None:
        """Until a sandbox rank runs: planning, or an emulation, is at its beginning."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if any("crystalllm.sandbox.worker" in p.info["cmdline"] for p in self.processes()):
                return
            time.sleep(0.1)
        raise AssertionError(f"no sandbox rank ran within {limit_s} s")

    def summary(self, name: str) -> dict:
        return json.loads((self.folder / "results" / name / "emulate" / "summary.json").read_text())


SAID = {
    r"^Job \d+: Building": "build",
    r"^Job \d+: Capturing (\S+)": "capture",
    r"^Job \d+: Choosing what to measure of (\S+)": "plan",
    r"^Job \d+: Measuring (\S+): ranks": "planning",
    r"^Job \d+: Emulating (\S+)": "emulate",
    r"^Job \d+: Putting": "table",
    r"^Job \d+: Drawing (\S+) \(": "report",
    r"^Job \d+: Drawing all cases": "overview",
}


def rules_in(text: str) -> set[str]:
    """Which rules ran, or would run, for which jobs."""
    found = set()
    for pattern, name in SAID.items():
        for match in re.finditer(pattern, text, re.M):
            found.add(" ".join([name, *match.groups()]))
    return found


def stages(*names: str, of: tuple[str, ...] = JOBS) -> set[str]:
    return {f"{stage} {job}" for stage in names for job in of}
