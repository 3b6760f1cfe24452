"""`doctor`: what this machine has, and what each lack costs."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from crystalllm import native

_TOOL_LIMIT_S = 20
_WANTED_MEMORY_BYTES = 4 * 2**30
_WANTED_DISK_BYTES = 5 * 2**30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked for.

    Args:
        name: What.
        found: What is there.
        ok: Whether that is enough.
        required: Whether nothing works without it.
        cost: What does not work, or what to do; "" if ok.
    """

    name: str
    found: str
    ok: bool
    required: bool = False
    cost: str = ""


def examine() -> list[Finding]:
    """Looks at everything; no finding takes longer than its tool's limit."""
    return [
        _python(),
        _torch(),
        *_packages(),
        _cores(),
        _memory(),
        _disk(),
        _tool("g++", "--version", "the native extension cannot be built", required=True),
        _tool("make", "--version", "the native extension cannot be built", required=True),
        _extension(),
        _tool("nvcc", "--version", "no NCCL library with virtual peers: CPU jobs only"),
        _gpus(),
        _nccl(),
        _tool("snakemake", "--version", "single stages only, no workflow"),
        _slurm(),
    ]


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding(
        name="Python",
        found=f"{platform.python_version()} ({sys.executable})",
        ok=ok,
        required=True,
        cost="" if ok else "needs 3.11 or newer",
    )


def _torch() -> Finding:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding(
            name="torch", found="missing", ok=False, required=True, cost="nothing runs: make venv"
        )
    # Imported with the patches only when it is there.
    from crystalllm_patches.torch.versions import SUPPORTED

    ok = Version(Version(version).base_version) in SpecifierSet(SUPPORTED, prereleases=True)
    return Finding(
        name="torch",
        found=version,
        ok=ok,
        required=True,
        cost="" if ok else f"patches are made for {SUPPORTED}",
    )


def _packages() -> list[Finding]:
    wanted = ("pyarrow", "pydantic", "yaml", "rich", "wrapt", "psutil")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    return [
        Finding(
            name="packages",
            found=f"missing {', '.join(missing)}" if missing else "all there",
            ok=not missing,
            required=True,
            cost="install requirements/cpu.txt" if missing else "",
        )
    ]


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    ok = cores >= 2
    return Finding(
        name="cores",
        found=str(cores),
        ok=ok,
        cost="" if ok else "replay and program share a core: times spread more",
    )


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    ok = memory.available >= _WANTED_MEMORY_BYTES
    return Finding(
        name="memory",
        found=f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free",
        ok=ok,
        cost="" if ok else "the bundled 512-rank job wants 4 GiB",
    )


def _disk() -> Finding:
    usage = shutil.disk_usage(Path.cwd())
    ok = usage.free >= _WANTED_DISK_BYTES
    return Finding(
        name="disk",
        found=f"{usage.free / 2**30:.1f} GiB free in {Path.cwd()}",
        ok=ok,
        cost="" if ok else "environment and results want 5 GiB",
    )


def _extension() -> Finding:
    try:
        path = native.target()
    except metadata.PackageNotFoundError:
        return Finding(name="native extension", found="no torch", ok=False, cost="needs torch")
    built = path.exists()
    return Finding(
        name="native extension",
        found=str(path) if built else "not built for these sources, torch and Python",
        ok=built,
        cost="" if built else "built at first use, about a minute (python -m crystalllm build)",
    )


def _gpus() -> Finding:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            names = [
                pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))
                for i in range(pynvml.nvmlDeviceGetCount())
            ]
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # the library's own error types need the library
        return Finding(
            name="GPU",
            found=f"none ({type(error).__name__})",
            ok=False,
            cost="times and memory are those of a CPU run",
        )
    return Finding(
        name="GPU",
        found=", ".join(f"{names.count(n)} × {n}" for n in sorted(set(names))) or "none",
        ok=bool(names),
        cost="" if names else "times and memory are those of a CPU run",
    )


def _nccl() -> Finding:
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return Finding(name="NCCL", found=f"{package} {metadata.version(package)}", ok=True)
        except metadata.PackageNotFoundError:
            continue
    return Finding(
        name="NCCL",
        found="no nvidia-nccl wheel",
        ok=False,
        cost="no communication between real GPUs; CPU jobs don't need it",
    )


def _slurm() -> Finding:
    found = [name for name in ("sbatch", "srun", "squeue") if shutil.which(name)]
    ok = len(found) == 3
    return Finding(
        name="Slurm",
        found=_output("sbatch", "--version") if ok else (", ".join(found) or "none"),
        ok=ok,
        cost="" if ok else "no snakemake --profile cluster from here; this machine alone",
    )


def _tool(name: str, argument: str, cost: str, *, required: bool = False) -> Finding:
    path = shutil.which(name)
    return Finding(
        name=name,
        found=f"{_output(name, argument)} ({path})" if path else "missing",
        ok=path is not None,
        required=required,
        cost="" if path else cost,
    )


def _output(*command: str) -> str:
    """First telling line of what a tool prints of its version."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer ({type(error).__name__})"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    telling = [line for line in lines if "release" in line or "Build" in line]
    return (telling or lines or ["no output"])[0].strip()


def show(findings: list[Finding], *, as_json: bool) -> None:
    """Prints the findings as a table, or as one JSON list."""
    if as_json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
        return
    table = Table(title="What this machine has")
    for column in ("", "what", "found", "what the lack costs"):
        table.add_column(column, overflow="fold")
    for f in findings:
        mark = "[green]ok[/]" if f.ok else "[red]missing[/]" if f.required else "[yellow]lacks[/]"
        table.add_row(mark, f.name, f.found, f.cost)
    Console().print(table)
