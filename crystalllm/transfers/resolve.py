"""Transfer times of every call of a capture, each from the best source there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from crystalllm.config import Cluster
from crystalllm.errors import UserError
from crystalllm.placement import Placement
from crystalllm.replay.durations import Duration, of_choices
from crystalllm.replay.program import Capture, transfer_placements
from crystalllm.transfers import model
from crystalllm.transfers.case import Case
from crystalllm.transfers.measured import (
    MeasuredTransfer,
    MeasuredTransfers,
    can_show,
    measure_all,
    measure_scenes,
)
from crystalllm.transfers.scenes import scenes
from crystalllm.transfers.sizes import size_bytes
from crystalllm.transfers.transfer import Transfer

# Of what a measurement computes between calls.
_LEAST_GAP_NS = 200_000
_MOST_GAP_NS = 20_000_000


class Source(Protocol):
    """Where transfer times come from."""

    def find(self, transfer: Transfer) -> Duration | None:
        """The time of one transfer; None where the source says nothing of such ones."""


@dataclass(frozen=True)
class Model:
    """`model` for one cluster, as a source."""

    cluster: Cluster

    def find(self, transfer: Transfer) -> Duration:
        found = model.estimate(transfer.kind, transfer.num_bytes, transfer.placement, self.cluster)
        return Duration(
            round(found.seconds * 1e9),
            source="model",
            assumptions=f"{found} for {transfer.num_bytes} bytes",
        )


@dataclass(frozen=True)
class ToBeMeasured:
    """A source for plans that are made before anything is measured: transfers take no time."""

    def find(self, transfer: Transfer) -> Duration:
        return Duration(0, assumptions="measured before the first slice runs")


def transfer_durations(
    capture: Capture,
    *,
    cluster: Cluster | None = None,
    tables: Sequence[Source] = (),
    measured: Source | None = None,
) -> dict[str | tuple[str, str], Duration]:
    """The time of every call in the world: measured, else from a table, else by the model.

    Args:
        capture: What every rank does.
        cluster: For the model.
        tables: `table.TransferTable`s; the first that knows a transfer counts.
        measured: `measured.MeasuredTransfers`.

    Returns:
        By key and placement, for `DurationTable.transfers`. A call with explicit
        splits takes as long as its busiest captured member, and has a choice for
        each time that occurred.

    Raises:
        UserError: No source knows a transfer.
    """
    sources: list[Source] = [] if measured is None else [measured]
    sources += tables
    if cluster is not None:
        sources.append(Model(cluster))
    return {
        at: _of_counts([(_find(sources, t, at[0]), n) for t, n in counts.items()])
        for at, counts in transfers(capture).items()
    }


def measure(capture: Capture, cores: Sequence[int]) -> MeasuredTransfers:
    """Measures those transfers of a capture that this host can show.

    Processes do what captured ranks do (`measure_scenes`). Transfers whose ends that does not
    show are measured by themselves (`measure_all`); between calls processes then compute for as
    long as the captured program does, in the mean. What such calls take from the program still
    is what they took in scenes.
    """
    wanted = {
        (Case(t.kind, t.num_bytes, t.dtype), t.placement.ranks): t
        for of_key in transfers(capture).values()
        for t in of_key
        if can_show(t, len(cores))
    }
    rows, untimed = measure_scenes(scenes(capture, wanted), cores)
    # Rows have whole elements.
    shown, costs = ({_at(r): r for r in found} for found in (rows, untimed))
    rest = [
        t
        for (case, ranks), t in wanted.items()
        if (case.kind, case.dtype, ranks, case.row_bytes(ranks)) not in shown
    ]
    by_themselves = measure_all(rest, cores, compute_ns=_computation_per_call(capture))
    for row in by_themselves.rows:
        seen = costs.get(_at(row), row)
        rows.append(replace(row, cpu_ns=seen.cpu_ns, call_ns=seen.call_ns))
    return MeasuredTransfers(rows)


def _at(row: MeasuredTransfer) -> tuple[str, str, int, int]:
    return row.kind, row.dtype, row.ranks, row.bytes


def _computation_per_call(capture: Capture) -> int:
    """In ns, of one iteration: the mean over captured roles."""
    speakers = capture.speakers()
    in_body = capture.calls["mark"] >= capture.num_marks - capture.period
    in_body &= capture.calls["mark"] < capture.num_marks
    num_calls = capture.calls.loc[in_body, "rank"].value_counts()
    computed: dict[int, int] = defaultdict(int)
    for (role, _, section, _), d in capture.captured_durations().segments.items():
        computed[role] += d.ns if section == "body" else 0
    gaps = [computed[role] / max(1, num_calls.get(rank, 0)) for role, rank in speakers.items()]
    return round(min(max(sum(gaps) / len(gaps), _LEAST_GAP_NS), _MOST_GAP_NS))


def transfers(capture: Capture) -> dict[tuple[str, str], dict[Transfer, int]]:
    """Of every key and placement in the world, the transfers and how often each occurred.

    There are several where sizes differ (explicit splits), by size.
    """
    sizes = _sizes(capture)
    found = {}
    for key, placement in transfer_placements(capture):
        of_key = sizes[key]
        found[key, placement] = {
            Transfer(
                of_key.kind, num_bytes, of_key.dtype, Placement.parse(placement), of_key.backend
            ): count
            for num_bytes, count in of_key.counts.items()
        }
    return found


@dataclass(frozen=True)
class _Calls:
    """The calls of one key: how often each size occurred."""

    kind: str
    dtype: str
    backend: str
    counts: dict[int, int]


def _sizes(capture: Capture) -> dict[str, _Calls]:
    calls = capture.calls[["key", "kind", "dtype", "group_identity", "seq", "rank"]].astype(
        dict.fromkeys(("key", "kind", "dtype", "group_identity"), str)
    )
    calls["bytes"] = size_bytes(capture.calls)
    # Ranks have sequences of their own for messages; members of a collective share one.
    calls["who"] = calls["rank"].where(calls["kind"].isin(("send", "recv")), -1)
    # Captured members of one collective are one transfer, as long as the busiest of them.
    by_call = calls.groupby(["key", "group_identity", "seq", "who"])["bytes"].max()
    counts = by_call.groupby(level="key").value_counts().sort_index()
    backends = capture.groups["backend"].astype(str)
    return {
        row.key: _Calls(
            row.kind,
            row.dtype,
            backends[row.group_identity],
            {int(size): int(n) for size, n in counts[row.key].items()},
        )
        for row in calls.drop_duplicates("key").itertuples(index=False)
    }


def _find(sources: Sequence[Source], transfer: Transfer, key: str) -> Duration:
    for source in sources:
        found = source.find(transfer)
        if found is not None:
            return found
    raise UserError(
        "No source knows how long a call takes",
        where=f"Call {key}, {transfer.num_bytes} bytes, placement {transfer.placement}",
        do="Name a cluster for the model, or pass a table or a measurement with such transfers",
    )


def _of_counts(found: list[tuple[Duration, int]]) -> Duration:
    """One duration for a call, from (duration, how often), ascending by size."""
    if len(found) == 1:
        return found[0][0]
    middle, _ = found[len(found) // 2]
    chosen = of_choices([(d.ns, count) for d, count in found], source=middle.source)
    return replace(
        chosen,
        cpu_ns=middle.cpu_ns,
        assumptions=f"one of {len(found)} sizes that occurred; {middle.assumptions}",
    )
