"""Kineto traces for tests: small ones that are made here, and the real ones beside the checkout."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import crystalllm

TRACES = Path(crystalllm.__file__).parents[1].parent / "shared" / "data" / "traces"


def real(name: str) -> Path:
    """A trace of a real run, or a visible skip where the folder is not there."""
    if not TRACES.is_dir():
        pytest.skip("shared/data/traces is not beside this checkout")
    return TRACES / name


def load(path: Path) -> dict[str, Any]:
    text = path.read_bytes()
    return json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)


def members(path: Path) -> dict[int, dict[str, Any]]:
    """The traces in an archive, by rank."""
    with tarfile.open(path) as archive:
        files = [archive.extractfile(m) for m in archive if m.isfile()]
        found = [json.load(f) for f in files if f is not None]
    return {t["distributedInfo"]["rank"]: t for t in found}


def save(folder: Path, traces: dict[int, dict[str, Any]]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank, trace in sorted(traces.items()):
        paths.append(folder / f"rank-{rank}.json")
        paths[-1].write_text(json.dumps(trace))
    return paths


class Maker:
    """Writes the events that PyTorch and NCCL would: operator, record, annotation, launch, kernel.

    Times are microseconds on the rank's own clock.
    """

    def __init__(
        self, rank: int, world: int, *, groups: Sequence[tuple[str, Sequence[int]]] = ()
    ) -> None:
        self.rank, self.world = rank, world
        self.groups = dict(groups) or {"0": list(range(world))}
        self.events: list[dict[str, Any]] = []
        self._next = 1

    def trace(self, **changes: Any) -> dict[str, Any]:
        config = [
            {"pg_name": name, "pg_desc": "default_pg" if i == 0 else "undefined",
             "backend_config": "cuda:nccl", "pg_size": len(ranks), "ranks": list(ranks)}
            for i, (name, ranks) in enumerate(self.groups.items())
        ]  # fmt: skip
        info = {"backend": "nccl", "rank": self.rank, "world_size": self.world}
        return {
            "schemaVersion": 1,
            "distributedInfo": {**info, "pg_config": config, "nccl_version": "2.20.5"},
            "traceEvents": self.events,
            **changes,
        }

    def add(self, category: str, name: str, start: float, duration: float, **args: Any) -> None:
        thread = {"pid": 0, "tid": 7} if category == "kernel" else {"pid": 100, "tid": 100}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, **thread,
             "args": args}
        )  # fmt: skip

    def step(self, number: int, start: float, duration: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start, duration)

    def call(
        self,
        collective: str,
        start: float,
        end: float,
        *,
        elements: tuple[int, int] = (64, 64),
        group: str = "0",
        operator: str = "",
        kernel: str | None = "",
        operator_args: dict[str, Any] | None = None,
        run_args: dict[str, Any] | None = None,
        **args: Any,
    ) -> None:
        """One call: the host is in it for 20 µs from `start`, its kernel ends at `end`."""
        external, correlation = self._next, 1000 + self._next
        self._next += 3
        ranks = self.groups[group]
        data = {
            "Collective name": collective, "dtype": "Float", "Group size": len(ranks),
            "In msg nelems": elements[0], "Out msg nelems": elements[1],
            "In split size": "[]", "Out split size": "[]", "Process Group Name": group,
            "Process Group Ranks": str(list(ranks)), **args,
        }  # fmt: skip
        if operator:
            self.add("cpu_op", f"c10d::{operator}", start, 20, **(operator_args or {}))
        self.add("cpu_op", "record_param_comms", start + 1, 18, **{"External id": external}, **data)
        if run_args is not None:
            self.add("user_annotation", f"nccl:{collective}", start + 2, 15, **run_args)
        if kernel is not None:
            ids = {"External id": external, "correlation": correlation}
            self.add("cuda_runtime", "cudaLaunchKernelExC", start + 5, 3, **ids)
            name = kernel or f"ncclDevKernel_{collective}_Sum_f32_RING_LL(ncclDevKernelArgs)"
            self.add("kernel", name, start + 10, end - start - 10, stream=7, **ids)


def all_reduces(world: int, *, steps: int = 4, per_step: int = 3) -> dict[int, dict[str, Any]]:
    """Ranks that arrive apart and leave together: sizes differ within a step, steps repeat."""
    traces = {}
    for rank in range(world):
        maker = Maker(rank, world)
        for step in range(steps):
            begin = 10_000.0 * step + 1_000_000
            maker.step(step + 5, begin, 9_900)
            for i in range(per_step):
                at = begin + 1000 + 2600 * i
                size = 64 * (i + 1)
                late = 37 * (rank % 8) * (i + 1)
                maker.call("allreduce", at + late, at + 2500 + rank % 3, elements=(size, size))
        traces[rank] = maker.trace()
    return traces
