"""How long capture takes, what it leaves, and how much memory it needs.

Each capture is a fresh process with an empty folder, as a user starts it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from crystalllm.config import Job
from crystalllm.shipped import GPT_JOB, LARGE_GPT_JOB

_LIMIT_S = 1800.0
_SAMPLE_EVERY_S = 2.0  # each sample reads the page tables of all ranks that run


@dataclass(frozen=True)
class _Measured:
    seconds: float
    peak_rss_bytes: int
    structure: dict[str, Any]
    num_events: int
    event_bytes: int


def main() -> None:
    """Prints a line per capture; the last line is one JSON object."""
    roles = _capture(GPT_JOB, "roles")
    whole = _capture(GPT_JOB, "all")
    large = _capture(LARGE_GPT_JOB, "roles")
    result = {
        "name": "capture",
        "roles_512_s": round(roles.seconds, 1),
        "all_512_s": round(whole.seconds, 1),
        "roles_8192_s": round(large.seconds, 1),
        "events_per_s": round(whole.num_events / whole.seconds),
        "bytes_per_event": round(whole.event_bytes / whole.num_events, 2),
        "peak_rss_bytes": max(m.peak_rss_bytes for m in (roles, whole, large)),
        "num_roles": roles.structure["num_roles"],
        "num_captured": roles.structure["num_captured"],
        "num_checked": roles.structure["num_checked"],
        "cpus": len(psutil.Process().cpu_affinity()),
        "load_before": round(psutil.getloadavg()[2], 2),
    }
    print(json.dumps(result))


def _capture(job: Job, strategy: str) -> _Measured:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        # JSON is YAML; the cluster's file is not needed here.
        path.write_text(job.model_copy(update={"cluster": None}).model_dump_json())
        out = Path(folder) / "results" / "capture"
        command = [sys.executable, "-m", "crystalllm", "capture", "--job", str(path)]
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, "--strategy", strategy, "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        memory = _Memory(process.pid)
        try:
            _, errors = process.communicate(timeout=_LIMIT_S)
        finally:
            process.kill()
            memory.stop()
        seconds = time.monotonic() - start
        if process.returncode != 0:
            raise RuntimeError(f"capture ended with {process.returncode}: {errors[-2000:]}")
        events = [out / f"{name}.parquet" for name in ("events", "event_times")]
        measured = _Measured(
            seconds=seconds,
            peak_rss_bytes=memory.peak,
            structure=json.loads((out / "structure.json").read_text()),
            num_events=pq.read_metadata(events[0]).num_rows,
            event_bytes=sum(e.stat().st_size for e in events),
        )
    print(
        f"{job.world_size} ranks, {strategy}: {measured.seconds:.1f} s, "
        f"{measured.peak_rss_bytes / 1e9:.2f} GB, {measured.structure['num_captured']} captured, "
        f"{measured.num_events:,} events",
        flush=True,
    )
    return measured


class _Memory:
    """The largest memory of a process and its children, sampled.

    Pages that forks share count once (PSS, proportional set size), as they lie
    in memory once.
    """

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)
        self.peak = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()

    def _sample(self) -> None:
        while not self.stopped.wait(_SAMPLE_EVERY_S):
            total = 0
            try:
                family = [self.process, *self.process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for member in family:
                try:
                    total += member.memory_full_info().pss
                except psutil.Error:
                    continue  # it has just ended
            self.peak = max(self.peak, total)

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
