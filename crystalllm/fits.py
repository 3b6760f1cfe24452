"""`fits`: whether every role of a job has enough memory, from ranks that run for real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from crystalllm import artifacts, memory, sandbox
from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.replay.durations import Duration, DurationTable
from crystalllm.replay.program import Capture

VERDICT = "fits.json"
# Of what the host has, so that it survives a job that does not fit.
_HOST_SHARE = 0.8
_BODIES = 2


def fits(
    job: Job,
    out: Path,
    *,
    captured: Path,
    limit_bytes: int,
    changed: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs one rank of every role, untimed, and compares the most that it holds with a limit.

    Args:
        job: What runs.
        out: Folder of the runs; gets fits.json.
        captured: Folder of the job's capture.
        limit_bytes: What each rank has.
        changed: As in `sandbox.Setup`.
        say: Called with lines that tell how it goes.

    Returns:
        What fits.json says (`memory.verdict`).

    Raises:
        UserError: A rank ended in another way than by itself or for lack of memory.
    """
    folder = artifacts.capture_folder(captured)
    capture = Capture.read(folder)
    # Beyond the limit a rank goes on, so that one learns by how much it is too large,
    # as long as this host can bear it.
    bound = max(limit_bytes, round(_HOST_SHARE * psutil.virtual_memory().available))
    nothing = DurationTable(
        segments={at: Duration(0) for at in capture.captured_durations().segments},
        transfers={key: Duration(0) for key in capture.calls["key"].astype(str).unique()},
    )
    summaries = {}
    for role, rank in sorted(capture.speakers().items()):
        setup = sandbox.Setup(
            job=job,
            ranks=(rank,),
            capture=folder,
            durations=nothing,
            iterations=_BODIES,
            warm_up=0,
            timed=False,
            memory_limit_bytes=bound,
            changed=changed,
        )
        found = sandbox.run(setup, out / f"role-{role}", capture=capture)
        if found["status"] not in ("ok", "oom"):
            raise UserError(
                f"Rank {rank} ended with status {found['status']}: {found['reason'].rstrip('.')}",
                where=f"Role {role}, folder {out / f'role-{role}'}",
                do="Mend that first; what it needs is not known",
            )
        name = f"role {role}, rank {rank}"
        summaries[name] = found["ranks_of_interest"][str(rank)]["memory"]
        say(f"{name}: {summaries[name]['peak']['bytes'] / (1 << 20):,.1f} MiB at its peak")
    result = {"world_size": job.world_size, **memory.verdict(summaries, limit_bytes)}
    text = json.dumps(result, indent=2, sort_keys=True) + "\n"
    artifacts.write_atomically(out / VERDICT, text.encode())
    return result
