"""Ranks whose memory is kept account of: real ones on gloo, and virtual ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import real_capture

from crystalllm import logical, memory, tables, warm
from crystalllm.capture import capture
from crystalllm.config import Job
from crystalllm.run import Program


@dataclass(frozen=True)
class Kept:
    """What the account of one rank says.

    Args:
        rows: The table `memory`.
        summary: What `finish` says besides.
    """

    rows: pd.DataFrame
    summary: dict[str, Any]

    def taken(self, *, by_library: bool) -> list[tuple[int, str, str, int]]:
        """Bytes, category, phase and iteration of each block, in order."""
        rows = self.rows[(self.rows["bytes"] > 0) & (self.rows["by_library"] == by_library)]
        columns = (rows[c] for c in ("bytes", "category", "phase", "iteration"))
        return list(zip(*(c.tolist() for c in columns), strict=True))


def begin(limit_bytes: int | None = None) -> None:
    import torch  # noqa: F401  the world is there once it is imported

    memory.start(logical.world(), limit_bytes=limit_bytes)


def leave() -> Kept:
    columns, summary = memory.finish(logical.world(), epoch_ns=0)
    arrays = {c.name: pa.array(columns[c.name], type=c.type) for c in tables.MEMORY.columns}
    return Kept(pa.table(arrays).to_pandas(), summary)


def real(job: Job, folder: Path) -> list[Kept]:
    """All ranks of the job, on gloo."""
    left = real_capture.run_ranks(job, folder, begin=begin, leave=lambda: pickle.dumps(leave()))
    return [pickle.loads(one) for one in left]


def book_of(job: Job, folder: Path, ranks: Sequence[int]) -> Path:
    """A payload book for these ranks of the job, captured in `folder`."""
    capture(job, folder / "capture", ranks=ranks)
    return folder / "capture" / "payloads.parquet"


def virtual(
    job: Job,
    rank: int,
    *,
    book: Path | None = None,
    limit_bytes: int | None = None,
    program: Callable[[], Any] | None = None,
    **enter: Any,
) -> Kept:
    """One rank of the job, with virtual peers; runs `program` instead of the job's if given."""

    def run() -> Kept:
        begin(limit_bytes)
        if program is not None:
            program()
        else:
            Program(command=job.command(iterations=job.capture_iterations)).execute()
        return leave()

    return warm.call(run, job.identity(rank), book=book, strict=book is not None, **enter)
