"""What somebody who helps would ask for, as one page of Markdown: the issue template, filled.

Secrets and names of people and machines are replaced (`sharing.scrub`); what looks like neither
stays, so the page is to be read before it is sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from crystalllm import __version__, artifacts
from crystalllm.doctor import Finding
from crystalllm.errors import UserError
from crystalllm.sandbox.outcome import SUMMARY, last_lines
from crystalllm.sharing.scrub import Scrubber

_PACKAGES = (
    "torch", "numpy", "pandas", "pyarrow", "pydantic", "snakemake",
    "snakemake-executor-plugin-slurm", "nvidia-nccl-cu13", "nvidia-nccl-cu12",
)  # fmt: skip
_DEVICES = ("GPU", "NCCL", "nvcc", "Slurm")
# Logs of ranks and of stages, the newest first.
_MOST_LOGS = 6


def bundle(findings: Sequence[Finding], job: Path | None = None) -> str:
    """The page.

    Args:
        findings: Of `doctor.examine`.
        job: results/<job>, whose runs and logs are told of.

    Raises:
        UserError: There is no such folder.
    """
    if job is not None and not job.is_dir():
        raise UserError(
            "There are no results of this job",
            where=f"Folder {job}",
            do="Pass results/<job>, or leave --of out",
        )
    parts = [
        ("What happened, and what you expected", ["…"]),
        ("Steps", ["…", *_jobs(job)]),
        ("Backend, GPU and network", _table(f for f in findings if f.name in _DEVICES)),
        ("Versions", [*_versions(), "", *_table(f for f in findings if f.name not in _DEVICES)]),
        ("The run", list(_runs(job))),
        ("Logs", list(_logs(job))),
    ]
    text = "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in parts)
    return Scrubber().text(text, "bundle") + "\n"


def _table(findings: Iterator[Finding]) -> list[str]:
    rows = [f"| {f.name} | {f.found} | {f.cost} |" for f in findings]
    return ["| what | found | what the lack costs |", "|---|---|---|", *rows]


def _versions() -> list[str]:
    found = [f"- CrystalLLM {__version__}"]
    for name in _PACKAGES:
        try:
            found.append(f"- {name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _jobs(job: Path | None) -> list[str]:
    """What the job was, as its captures and runs say."""
    programs = set()
    for path in sorted(job.rglob(SUMMARY)) if job is not None else ():
        program = _read(path).get("program")
        if program:
            programs.add(" ".join(map(str, program)))
    return [f"\nThe program: `{text}`" for text in sorted(programs)]


def _runs(job: Path | None) -> Iterator[str]:
    summaries = sorted(job.rglob(SUMMARY)) if job is not None else []
    if not summaries:
        yield "None was told of (--of results/my-job)."
    for path in summaries:
        summary = _read(path)
        trust = summary.get("trust", {})
        yield f"`{path}`: {summary.get('status', 'unreadable')}. {summary.get('reason', '')}"
        yield ""
        yield from _fenced(json.dumps(trust, indent=1, sort_keys=True))


def _logs(job: Path | None) -> Iterator[str]:
    if job is None:
        yield "None was told of (--of results/my-job)."
        return
    logs = [*job.rglob("logs/*.log"), *job.rglob("rank-*/log.txt")]
    logs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in logs[:_MOST_LOGS]:
        yield f"`{path}`"
        yield ""
        yield from _fenced("\n".join(last_lines(path)))
    if len(logs) > _MOST_LOGS:
        yield f"{len(logs) - _MOST_LOGS} older ones were left out."


def _fenced(text: str) -> list[str]:
    return ["~~~text", *(line.replace("~~~", "---") for line in text.splitlines()), "~~~", ""]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = artifacts.read_json(path)
    except UserError as error:
        return {"status": "unreadable", "reason": str(error)}
    return found
