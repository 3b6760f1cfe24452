"""What being emulated costs: one rank of gpt-512, with and without the replay, in one process.

Odd iterations follow the trace against the live replay of 511 ranks, which compute nothing
and whose transfers are so short that they have arrived (`waited_for_peers_ms` is 0 then), so
that every call ends a fixed transfer time after its arrival; even ones end so by themselves,
unchecked and unrecorded. What differs is the cost of checking, recording and asking, and of
being released late. With long transfers the rank would wait for its pipeline, and much of
the cost would hide in its waits. As the worker of a run this module alternates between the
two after every optimizer step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from crystalllm import logical, sandbox, tables
from crystalllm.capture import capture
from crystalllm.emulate import cores_for
from crystalllm.replay.durations import Duration, DurationTable
from crystalllm.replay.program import Capture
from crystalllm.sandbox import outcome
from crystalllm.sandbox.worker import Worker, assigned
from crystalllm.shipped import GPT_JOB

_RANK = 137
_WARM_UP = 3
_PAIRS = 200
_TRANSFER_NS = 20_000
_TIMES = "times.json"


def main() -> None:
    """Prints one JSON object."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        capture(GPT_JOB, folder / "capture", strategy="roles")
        captured = Capture.read(folder / "capture")
        instant = {at: Duration(0) for at in captured.captured_durations().segments}
        transfers = {key: Duration(_TRANSFER_NS) for key in captured.calls["key"].unique()}
        setup = sandbox.Setup(
            job=GPT_JOB,
            ranks=(_RANK,),
            capture=folder / "capture",
            durations=DurationTable(segments=instant, transfers=transfers),
            iterations=_PAIRS,
            warm_up=_WARM_UP,
            cores=cores_for(1),
            memory=False,
        )
        # Half of the program's iterations are not the replay's, so it has to run twice as many.
        job = GPT_JOB.model_copy(
            update={"arguments": GPT_JOB.arguments.replace("{iterations}", str(3 * _PAIRS))}
        )
        setup = replace(setup, job=job, changed=True)
        sandbox.run(setup, folder / "run", capture=captured, worker=__name__)
        print(json.dumps(_result(folder / "run" / f"rank-{_RANK}", setup)))


def _result(folder: Path, setup: sandbox.Setup) -> dict[str, Any]:
    times = json.loads((folder / _TIMES).read_text())
    num = min(len(times["live"]), len(times["alone"])) - _WARM_UP
    # pairs x (time, computed by the thread that calls)
    live, alone = (np.array(times[mode][_WARM_UP:][:num]) for mode in ("live", "alone"))
    pairs = live[:, 0] / alone[:, 0]
    draws = np.random.default_rng(0).choice(pairs, (2000, num))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    calls = tables.COMMUNICATION.read(folder / "communication.parquet")[0].to_pandas()
    late = outcome.lateness(calls[calls["iteration"] > _WARM_UP])
    return {
        "name": "overhead",
        "overhead_fraction": round(float(np.median(pairs)) - 1, 5),
        "overhead_interval": [round(float(low) - 1, 5), round(float(high) - 1, 5)],
        "iteration_ms": {
            "live": round(float(np.median(live[:, 0])) / 1e6, 3),
            "alone": round(float(np.median(alone[:, 0])) / 1e6, 3),
        },
        "computed_more_ms": round(float(np.median(live[:, 1] - alone[:, 1])) / 1e6, 3),
        "waited_for_peers_ms": round(_waited_for_peers(calls), 3),
        "calls": round(len(calls) / calls["iteration"].nunique()),
        "num_pairs": num,
        "lateness_us": {f"p{q}": round(float(np.percentile(late, q)) / 1e3, 2) for q in (50, 99)},
        "max_lateness_us": round(float(late.max()) / 1e3, 2),
        "cpus": len(psutil.Process().cpu_affinity()),
        "load_before": round(psutil.getloadavg()[2], 2),
        "pinned": list(setup.cores) if setup.cores is not None else None,
    }


def _waited_for_peers(calls: pd.DataFrame) -> float:
    """In ms of an iteration: what is no cost of being emulated. 0 if peers are there."""
    waited = (calls["start_ns"] - calls["arrival_ns"]).clip(lower=0)
    return float(waited.groupby(calls["iteration"]).sum().median()) / 1e6


class _Alternating(Worker):
    """Follows the trace in every other iteration, until the trace is over."""

    def follow(self) -> None:
        super().follow()
        from torch.optim.optimizer import register_optimizer_step_post_hook

        trace, world = self.to_do.followed, logical.world()
        times: dict[str, list[list[int]]] = {"live": [], "alone": []}
        last, num_live, is_live = _now(), 0, True

        def alternate(*_: Any) -> None:
            nonlocal last, num_live, is_live
            now = _now()
            if world.marks <= trace.first_mark:
                last = now
                return
            took = [after - before for before, after in zip(last, now, strict=True)]
            times["live" if is_live else "alone"].append(took)
            num_live += is_live
            if num_live == trace.num_bodies:
                (self.folder / _TIMES).write_text(json.dumps(times))
                raise SystemExit(0)
            is_live = not is_live
            world.follow(self.trace if is_live else None)
            world.keep_records(is_live)
            if is_live:
                world.set_release_rule(self.rule)
            else:
                world.set_transfer_ns(_TRANSFER_NS)
            last = _now()

        register_optimizer_step_post_hook(alternate)


def _now() -> tuple[int, int]:
    """Time, and what this thread has computed until then, in ns."""
    return time.monotonic_ns(), time.thread_time_ns()


if __name__ == "__main__":
    sys.exit(_Alternating(assigned()).run())
