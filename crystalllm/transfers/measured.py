"""Transfer times measured between real processes of this host over gloo."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crystalllm import tables
from crystalllm.errors import UserError
from crystalllm.replay.durations import Duration
from crystalllm.rules import RULES
from crystalllm.transfers.case import Case
from crystalllm.transfers.curve import Curve
from crystalllm.transfers.scenes import Scene
from crystalllm.transfers.transfer import Transfer

_REDUCES = ("all_reduce", "reduce", "reduce_scatter")
_LOG_LINES = 5
# Ends of so many calls in scenes are exact, or nothing is said of their class: the others end
# no later than they say.
_MOSTLY = 0.9
# Of the measurements of one kind and size. Gloo's slow mode is one of ten or twenty.
_PARTS = 20
# As in a program that runs for long, glibc's malloc gives memory to new tensors that others
# have used: with its defaults a process that does little else returns it to the kernel each time,
# and gloo's threads take a page fault for every 4 KiB that they receive.
_KEEPS_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


@dataclass(frozen=True)
class MeasuredTransfer:
    """A row of `measured_transfers`."""

    kind: str
    dtype: str
    ranks: int
    bytes: int
    count: int
    mean_ns: int
    median_ns: int
    low_ns: int
    high_ns: int
    cpu_ns: int
    call_ns: int
    parts_ns: tuple[int, ...] = ()


def measure_gloo(
    cases: Sequence[Case],
    num_ranks: int,
    cores: Sequence[int] = (),
    *,
    compute_ns: int = 2_000_000,
    rounds: int = 3,
    repetitions: int = 70,
    case_limit_s: float = 0.5,
    limit_s: int = 300,
) -> list[MeasuredTransfer]:
    """Times transfers between so many real processes.

    In every repetition all processes compute for a while and then make the call. They
    stamp arrival and end by CLOCK_MONOTONIC; the transfer takes from the last arrival to
    the last end. A send and a recv end for their own rank. The time of the backend is
    that of all threads of a process but the one that calls, from the call's return to the
    next arrival.

    Args:
        cases: What to measure; of a kind `send` or `recv`, both are.
        num_ranks: Processes, at least two.
        cores: One for each process; none leaves them to the kernel.
        compute_ns: Computation before each call, in the mean. The longer it is, the further
            apart processes come.
        rounds: New processes each time: how often calls meet gloo's slow mode (docs/transfers.md)
            differs from one pair of processes to the next, by two and more.
        repetitions: Of each case in a round.
        case_limit_s: Fewer repetitions (ten at least) where they would take longer.
        limit_s: Of each round.

    Raises:
        UserError: A core or a kind is not there, a process died, or the limit was passed.
    """
    _check(cases, num_ranks, cores)
    # A message is measured from both sides at once.
    wanted = list(
        dict.fromkeys(Case("send", c.num_bytes, c.dtype) if c.kind == "recv" else c for c in cases)
    )
    spec = {
        **_processes(num_ranks, cores, repetitions, limit_s),
        "compute_ns": compute_ns,
        "case_limit_s": case_limit_s,
        "cases": [
            {"kind": c.kind, "elements": c.elements(num_ranks), "dtype": c.dtype} for c in wanted
        ],
    }
    stamps = [_round("peer", "cases", spec) for _ in range(rounds)]
    found = []
    for number, case in enumerate(wanted):
        # ranks x repetitions x (arrival, return of the call, end, time of other threads after it)
        of_case = np.concatenate(
            [
                np.asarray([of_rank[number] for of_rank in of_round], dtype=np.int64)
                for of_round in stamps
            ],
            axis=1,
        )
        if case.kind == "send":
            pair = of_case[:2]
            found += [
                _isolated(Case(kind, case.num_bytes, case.dtype), num_ranks, pair, pair[[side]])
                for side, kind in enumerate(("send", "recv"))
            ]
        else:
            found.append(_isolated(case, num_ranks, of_case, of_case))
    return found


def measure_scenes(
    scenes: Sequence[Scene],
    cores: Sequence[int] = (),
    *,
    rounds: int = 10,
    repetitions: int = 100,
    scene_limit_s: float = 3.5,
    limit_s: int = 300,
) -> tuple[list[MeasuredTransfer], list[MeasuredTransfer]]:
    """Times transfers between real processes that do what captured ranks do.

    Processes compute, call and wait in the order of a captured body; otherwise as
    `measure_gloo`. While a process waits, the time of the backend takes nothing from it, and
    is left out.

    Args:
        scenes: From `scenes.scenes`.
        cores: One for each process; none leaves them to the kernel.
        rounds: New processes each time: of one pair to the next a kind of call differs by a
            seventh (docs/transfers.md), so that many short rounds say more than few long ones.
        repetitions: Of each scene in a round.
        scene_limit_s: Fewer repetitions (five at least) where they would take longer.
        limit_s: Of each round.

    Returns:
        What was measured; and of kinds of calls whose ends are mostly not known exactly (messages
        and reduce_scatters that the program does not soon wait for) what holds all the same:
        `cpu_ns` and `call_ns`.

    Raises:
        UserError: A core is not there, a process died, or the limit was passed.
    """
    samples: dict[tuple[Case, int], list[np.ndarray]] = defaultdict(list)
    for scene in scenes:
        num_ranks = len(scene.ranks)
        _check((), num_ranks, cores)
        spec = {
            **_processes(num_ranks, cores, repetitions, limit_s),
            "scene_limit_s": scene_limit_s,
            "groups": scene.groups,
            "posts": [[post.to_json() for post in posts] for posts in scene.posts],
            "steps": scene.steps,
        }
        for _ in range(rounds):
            stamps = np.asarray(_round("scene", "scene", spec), dtype=np.int64)
            for case, num_members, of_call in scene.samples(stamps):
                samples[case, num_members].append(of_call)
    found = {at: np.concatenate(of_case) for at, of_case in samples.items()}
    rows: list[MeasuredTransfer] = []
    untimed: list[MeasuredTransfer] = []
    for (case, num_members), of_case in found.items():
        kept = rows if of_case[:, 3].mean() >= _MOSTLY else untimed
        kept.append(_row(case, num_members, *of_case[:, :3].T))
    return rows, untimed


def _processes(
    num_ranks: int, cores: Sequence[int], repetitions: int, limit_s: int
) -> dict[str, Any]:
    """What the processes of every measurement are told."""
    return {
        "parent": os.getpid(),
        "num_ranks": num_ranks,
        "cores": list(cores[:num_ranks]),
        "repetitions": repetitions,
        "limit_s": limit_s,
    }


def _round(module: str, name: str, spec: Mapping[str, Any]) -> list[Any]:
    """By rank, what its process stamped."""
    num_ranks = spec["num_ranks"]
    with tempfile.TemporaryDirectory(prefix="crystalllm-gloo-") as path:
        folder = Path(path)
        (folder / f"{name}.json").write_text(json.dumps(spec))
        _run(f"crystalllm.transfers.gloo_{module}", folder, num_ranks, spec["limit_s"])
        return [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(num_ranks)]


def can_show(transfer: Transfer, num_cores: int) -> bool:
    """Whether so many cores of one host can show it."""
    placement = transfer.placement
    return transfer.backend == "gloo" and placement.nodes == 1 and 2 <= placement.ranks <= num_cores


def measure_all(
    transfers: Iterable[Transfer], cores: Sequence[int], **options: Any
) -> MeasuredTransfers:
    """Measures what of these transfers this host can show: gloo groups that its cores hold.

    Args:
        transfers: Those of a capture, from `resolve.transfers`.
        cores: One for each process; groups with more ranks are left out.
        options: Of `measure_gloo`; its limit is for each group size.
    """
    of_size: dict[int, dict[Case, None]] = defaultdict(dict)
    for t in transfers:
        if can_show(t, len(cores)):
            of_size[t.placement.ranks][Case(t.kind, t.num_bytes, t.dtype)] = None
    rows = []
    for num_ranks, cases in sorted(of_size.items()):
        rows += measure_gloo(list(cases), num_ranks, cores, **options)
    return MeasuredTransfers(rows)


def _isolated(
    case: Case, num_ranks: int, members: np.ndarray, mine: np.ndarray
) -> MeasuredTransfer:
    """From the stamps of all who take part, and of those whose end counts."""
    took = mine[:, :, 2].max(axis=0) - members[:, :, 0].max(axis=0)
    return _row(case, num_ranks, took, mine[:, :, 3], mine[:, :, 1] - mine[:, :, 0])


def _row(
    case: Case, num_ranks: int, took: np.ndarray, cpu: np.ndarray, calling: np.ndarray
) -> MeasuredTransfer:
    low, median, high = np.quantile(took, (0.1, 0.5, 0.9)).round().astype(int)
    return MeasuredTransfer(
        case.kind,
        case.dtype,
        num_ranks,
        case.row_bytes(num_ranks),
        took.size,
        round(float(took.mean())),
        int(median),
        int(low),
        int(high),
        round(float(cpu.mean())),
        round(float(calling.mean())),
        tuple(_parts(took).round().astype(int).tolist()),
    )


def _parts(values: np.ndarray) -> np.ndarray:
    """Means of `_PARTS` equal parts of the values, ascending; of one at a border, its share."""
    sums = np.concatenate([[0], np.cumsum(np.sort(values))])
    borders = np.linspace(0, values.size, _PARTS + 1)
    parts: np.ndarray = np.diff(np.interp(borders, np.arange(values.size + 1), sums))
    return parts * _PARTS / values.size


def _check(cases: Sequence[Case], num_ranks: int, cores: Sequence[int]) -> None:
    unknown = sorted({c.kind for c in cases} - set(RULES))
    if unknown or num_ranks < 2 or (cores and len(set(cores)) < num_ranks):
        raise UserError(
            "Transfers cannot be measured so",
            where=f"Kinds {', '.join(unknown) or 'all known'}; {num_ranks} processes, "
            f"cores {list(cores)}",
            do=f"Use kinds of {', '.join(RULES)}, two processes or more, and a core for each",
        )
    missing = sorted(set(cores) - os.sched_getaffinity(0))
    if missing:
        raise UserError(
            "A core is not there",
            where=f"Cores {missing}",
            do=f"Use some of {sorted(os.sched_getaffinity(0))}",
        )


def _run(module: str, folder: Path, num_ranks: int, limit_s: int) -> None:
    """Runs the processes to their end; none is left, whatever happens."""
    logs = [folder / f"rank-{rank}.log" for rank in range(num_ranks)]
    peers = []
    ends = time.monotonic() + limit_s
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", module, str(folder), str(rank)]
            with log.open("wb") as file:
                peers.append(
                    subprocess.Popen(
                        command,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **_KEEPS_MEMORY},
                    )
                )
        while any(code is None for code in [peer.poll() for peer in peers]):
            failed = [rank for rank, peer in enumerate(peers) if peer.returncode]
            if failed or time.monotonic() > ends:
                break
            time.sleep(0.02)
    finally:
        for peer in peers:
            if peer.poll() is None:
                peer.kill()
        for peer in peers:
            peer.wait()
    failed = [rank for rank, peer in enumerate(peers) if peer.returncode]
    if failed:
        raise _failure(failed, peers, logs, limit_s, timed_out=time.monotonic() > ends)


def _failure(
    failed: list[int], peers: list[Any], logs: list[Path], limit_s: int, *, timed_out: bool
) -> UserError:
    """The first that died of itself; the others were ended."""
    rank = next((r for r in failed if peers[r].returncode != -9), failed[0])
    words = logs[rank].read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
    return UserError(
        f"Measuring gloo took longer than {limit_s} s" if timed_out else "Measuring gloo failed",
        where=f"Process {rank} of {len(peers)}, exit code {peers[rank].returncode}: "
        + (" / ".join(words) or "it said nothing"),
        do="Allow more time or measure fewer sizes" if timed_out else "Mend what it says",
    )


class MeasuredTransfers:
    """Rows of `measured_transfers`, as a source for `resolve.transfer_durations`."""

    def __init__(self, rows: Iterable[MeasuredTransfer]) -> None:
        self.rows = sorted(rows, key=lambda r: (r.kind, r.dtype, r.ranks, r.bytes))
        of_class: dict[tuple[str, str, int], list[MeasuredTransfer]] = defaultdict(list)
        for row in self.rows:
            of_class[row.kind, row.dtype, row.ranks].append(row)
        self.curves = {
            at: {
                name: Curve.of((r.bytes, max(1, getattr(r, name))) for r in of_one)
                for name in ("mean_ns", "low_ns", "high_ns", "cpu_ns", "call_ns")
            }
            for at, of_one in of_class.items()
        }
        self.counts = {at: min(r.count for r in of_one) for at, of_one in of_class.items()}

    def save(self, path: Path, *, provenance: Mapping[str, Any]) -> None:
        columns = {
            c.name: [getattr(row, c.name) for row in self.rows]
            for c in tables.MEASURED_TRANSFERS.columns
        }
        tables.MEASURED_TRANSFERS.write(path, columns, provenance=provenance)

    @classmethod
    def load(cls, path: Path) -> MeasuredTransfers:
        table, _ = tables.MEASURED_TRANSFERS.read(path)
        return cls(
            MeasuredTransfer(**{**row, "parts_ns": tuple(row["parts_ns"])})
            for row in table.to_pylist()
        )

    def find(self, transfer: Transfer) -> Duration | None:
        """The time of a transfer among as many gloo ranks of one node; else None.

        A kind that adds up was measured with the same dtype, or nothing is said of it; the
        others only move bytes.
        """
        if transfer.backend != "gloo" or transfer.placement.nodes != 1:
            return None
        at = self._class(transfer)
        if at is None:
            return None
        curves = self.curves[at]
        # On a core that is shared with its own threads gloo has a fast and a slow mode, a
        # time slice apart: an iteration has some of both, so that means add up, not medians.
        ns, _, how = curves["mean_ns"].at(transfer.num_bytes)
        low, high, cpu, call = (
            curves[name].at(transfer.num_bytes)[0]
            for name in ("low_ns", "high_ns", "cpu_ns", "call_ns")
        )
        shape = min(
            (row for row in self.rows if (row.kind, row.dtype, row.ranks) == at),
            key=lambda row: abs(math.log(max(1, row.bytes) / max(1, transfer.num_bytes))),
        )
        return Duration(
            round(ns),
            count=self.counts[at],
            source="measured",
            low_ns=round(low),
            high_ns=round(high),
            cpu_ns=round(cpu),
            call_ns=round(call),
            parts_ns=tuple(round(ns * part / shape.mean_ns) for part in shape.parts_ns),
            assumptions=f"gloo on this host, {transfer.kind} of {at[1] or 'nothing'} among "
            f"{at[2]} processes: {how}",
        )

    def _class(self, transfer: Transfer) -> tuple[str, str, int] | None:
        is_message = transfer.kind in ("send", "recv")
        fitting = [
            (kind, dtype, ranks)
            for kind, dtype, ranks in self.curves
            if kind == transfer.kind
            and (is_message or ranks == transfer.placement.ranks)
            and (dtype == transfer.dtype or kind not in _REDUCES)
        ]
        return min(fitting, key=lambda at: (at[1] != transfer.dtype, at), default=None)
