"""`capture`: runs logical ranks one after another and keeps what they communicated.

What it leaves in `results/<job>/capture/`:

- `calls/rank-N.parquet`: every call of each captured rank, times beside it;
- `groups.parquet`, `ranks.parquet`;
- `payloads.parquet`: the payload book, by which any rank can then be run alone;
- `structure.json`: prologue, period and epilogue.

Ranks that are captured already are not run again: what they left lies in
`results/<job>/.work/capture/<digest>/` as long as program, job and library are
the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from crystalllm import __version__, native, tables, warm
from crystalllm.capture.broker import Broker, Captured, Contribution
from crystalllm.capture.iterations import Structure, find, segments
from crystalllm.config import Job
from crystalllm.errors import UserError
from crystalllm.payload import Entry, PayloadBook
from crystalllm.run import Program, write_calls

_DEFAULT_LIMIT_S = 600.0


def capture(
    job: Job,
    out: Path,
    *,
    ranks: Sequence[int] | None = None,
    iterations: int | None = None,
    parallel: int | None = None,
    limit_s: float = _DEFAULT_LIMIT_S,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Captures `ranks` of `job` into `out`.

    Args:
        job: What to run.
        out: Folder of the results; `.work` lies beside it.
        ranks: Which ranks; all by default. Ranks whose values these need are
            captured too.
        iterations: Instead of the job's.
        parallel: Ranks that compute at a time; one per core by default.
        limit_s: Seconds that one rank may take.
        progress: Called with ranks done and asked for.

    Returns:
        What `structure.json` says.

    Raises:
        UserError: A rank fails, dies, hangs, waits for ever, or the calls don't
            repeat.
    """
    wanted = list(range(job.world_size)) if ranks is None else sorted(set(ranks))
    for rank in wanted:
        job.identity(rank)  # refuses ranks outside the world before anything runs
    program = Program(command=job.command(iterations=iterations))
    work = out.parent / ".work" / "capture" / _digest(job, program)
    work.mkdir(parents=True, exist_ok=True)
    captured = _load(work)

    def keep(rank: int, left: Captured) -> None:
        captured[rank] = left
        _write_atomically(work / f"rank-{rank}.pickle", pickle.dumps(left))
        progress(sum(r in captured for r in wanted), len(wanted))

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warm.prepare()
    progress(sum(r in captured for r in wanted), len(wanted))
    Broker(
        job.identity,
        program.execute,
        output=lambda rank: str(work / f"rank-{rank}.log"),
        parallel=parallel or len(os.sched_getaffinity(0)),
        limit_s=limit_s,
        on_done=keep,
        known=[c for left in captured.values() for c in left.contributions],
        done=captured,
    ).run(wanted)
    return _write(job, program, out, captured)


def book_of(captured: dict[int, Captured], structures: dict[int, Structure]) -> PayloadBook:
    """The payload book of all captured ranks.

    Entries count from the group's creation, so that a run of as many iterations
    finds everything. Those of the last whole period are entered once more by
    iteration and mark, for runs of other lengths.
    """
    prologue = max((s.prologue_marks for s in structures.values()), default=0)
    period = math.lcm(*(s.period for s in structures.values())) if structures else 0
    book = PayloadBook(prologue_marks=prologue, period=period)
    for rank, left in sorted(captured.items()):
        last = left.num_marks - 1  # the last mark that another one follows
        for c in without_padding(left.contributions):
            book.add(c.entry())
            if period and prologue <= c.mark <= last and c.mark > last - period:
                iteration = (c.mark - prologue) % period
                book.add(
                    Entry(
                        group=c.group,
                        seq=c.seq_in_mark,
                        rank=rank,
                        peer=c.peer,
                        dtype=c.dtype,
                        value=c.value,
                        splits=c.splits,
                        iteration=iteration,
                    )
                )
    return book


def without_padding(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Pickled objects without the uninitialised bytes that pad them to the longest.

    Object collectives tell the sizes in a call of their own: before the bytes
    when they gather, after them when they scatter.
    """
    by_address = {c.address: c for c in contributions}

    def sizes(c: Contribution, step: int) -> list[int]:
        other = by_address.get((c.group, c.seq + step, c.rank, c.peer))
        if other is None or other.dtype != "int64":
            return []
        return [n for (n,) in struct.iter_unpack("<q", other.value)]

    tidy = []
    for c in contributions:
        value = c.value
        if c.dtype == "uint8" and value:
            before, after = sizes(c, -1), sizes(c, +1)
            if len(after) > 1 and len(value) % len(after) == 0:
                length = len(value) // len(after)
                parts = [value[i * length : (i + 1) * length] for i in range(len(after))]
                value = b"".join(
                    part[:n].ljust(length, b"\0") for part, n in zip(parts, after, strict=True)
                )
            elif len(before) == 1 and 0 < before[0] <= len(value):
                value = value[: before[0]]
        tidy.append(dataclasses.replace(c, value=value))
    return tidy


def _write(job: Job, program: Program, out: Path, captured: dict[int, Captured]) -> dict[str, Any]:
    structures = {
        rank: find(
            segments(left.columns["key"], left.columns["mark"]),
            num_marks=left.num_marks,
            rank=rank,
        )
        for rank, left in sorted(captured.items())
        if left.columns["key"]
    }
    out.mkdir(parents=True, exist_ok=True)
    provenance = {
        "crystalllm": __version__,
        "program": list(program.command),
        "world_size": job.world_size,
    }
    for rank, left in captured.items():
        write_calls(
            out / "calls" / f"rank-{rank}.parquet",
            left.columns,
            [
                {"identity": i, "signature": s, "size": len(m), "description": d}
                for i, s, m, d in left.groups
            ],
            {**provenance, "rank": rank, "unverified": left.num_invented > 0},
        )
    book_of(captured, structures).save(out / "payloads.parquet")
    _write_groups(out / "groups.parquet", captured, provenance)
    tables.RANKS.write(
        out / "ranks.parquet",
        {
            "rank": sorted(captured),
            "node": [job.identity(r).node for r in sorted(captured)],
            "num_calls": [len(captured[r].columns["key"]) for r in sorted(captured)],
            "num_marks": [captured[r].num_marks for r in sorted(captured)],
            "num_invented": [captured[r].num_invented for r in sorted(captured)],
            "keys_digest": [_keys_digest(captured[r]) for r in sorted(captured)],
        },
        provenance=provenance,
    )
    structure = {
        **provenance,
        "num_captured": len(captured),
        "num_distinct": len({_keys_digest(left) for left in captured.values()}),
        "num_invented": sum(left.num_invented for left in captured.values()),
        "num_payloads": sum(len(left.contributions) for left in captured.values()),
        "prologue_marks": max((s.prologue_marks for s in structures.values()), default=0),
        "period": math.lcm(*(s.period for s in structures.values())) if structures else 0,
        "calls_per_period": {str(r): s.body_calls for r, s in sorted(structures.items())},
    }
    text = json.dumps(structure, indent=2, sort_keys=True) + "\n"
    _write_atomically(out / "structure.json", text.encode())
    return structure


def _write_groups(path: Path, captured: dict[int, Captured], provenance: dict[str, Any]) -> None:
    groups: dict[str, tuple[str, list[int], str]] = {}
    for left in captured.values():
        for identity, signature, members, description in left.groups:
            groups.setdefault(identity, (signature, members, description))
    rows = sorted(groups.items(), key=lambda item: (item[1][1], item[0]))
    tables.GROUPS.write(
        path,
        {
            "identity": [identity for identity, _ in rows],
            "signature": [signature for _, (signature, _, _) in rows],
            "description": [description for _, (_, _, description) in rows],
            "members": [members for _, (_, members, _) in rows],
        },
        provenance=provenance,
    )


def _keys_digest(left: Captured) -> str:
    return hashlib.sha256("\n".join(left.columns["key"]).encode()).hexdigest()[:16]


def _digest(job: Job, program: Program) -> str:
    """Of everything that decides what a rank does."""
    digest = hashlib.sha256()
    for part in (
        job.model_dump_json(),
        json.dumps(program.command),
        native.source_digest(),
        native.target().parent.name,
        sys.version,
        __version__,
    ):
        digest.update(part.encode() + b"\0")
    for path in program.sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _load(work: Path) -> dict[int, Captured]:
    captured = {}
    for path in work.glob("rank-*.pickle"):
        try:
            captured[int(path.stem.removeprefix("rank-"))] = pickle.loads(path.read_bytes())
        except Exception as error:
            raise UserError(
                "What an earlier capture left cannot be read",
                where=f"File {path}: {type(error).__name__}: {error}",
                do="Delete it; the rank is then captured again",
            ) from error
    return captured


def _write_atomically(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.rename(path)
