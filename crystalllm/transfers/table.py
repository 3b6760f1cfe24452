"""Transfer times from the output of nccl-tests, text or JSON, and from CSV.

A file says of each collective, rank count and node count how long which sizes took;
sizes are as nccl-tests counts them (`sizes`). Out-of-place times are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from crystalllm.errors import UserError
from crystalllm.placement import Placement
from crystalllm.replay.durations import Duration
from crystalllm.transfers import nccl_tests
from crystalllm.transfers.curve import Curve, between
from crystalllm.transfers.nccl_tests import MESSAGE, Row
from crystalllm.transfers.transfer import Transfer


class TransferTable:
    """Curves by kind and placement; a source for `resolve.transfer_durations`."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """Raises UserError where rows of one kind and placement are of different machines."""
        grouped: dict[tuple[str, Placement], list[Row]] = defaultdict(list)
        for row in rows:
            grouped[row.kind, row.placement].append(row)
        for (kind, placement), of_one in grouped.items():
            machines = {row.machine: row for row in of_one}
            if len(machines) > 1:
                first, second, *_ = machines.values()
                raise UserError(
                    f"Tables of {len(machines)} machines cannot be one source of transfer times",
                    where=f"{kind} on {placement}: {first.where} is {first.machine}, "
                    f"{second.where} is {second.machine}",
                    do="Keep the rows of the machine that you mean",
                )
        self.curves = {
            at: Curve.of((row.num_bytes, row.ns) for row in of_one)
            for at, of_one in sorted(grouped.items())
        }

    @classmethod
    def load(cls, *paths: Path) -> TransferTable:
        """From files of nccl-tests output and CSV, in any mixture.

        Raises:
            UserError: A file is missing, damaged, or says too little; file and line are named.
        """
        return cls([row for path in paths for row in nccl_tests.read(path)])

    def find(self, transfer: Transfer) -> Duration | None:
        """The time of a transfer; None where no measured placement fits.

        A placement that was not measured lies between two that were: with as many ranks
        on each node, or on one node alone, its time is between theirs in logarithms of
        time and ranks. Nothing is said beyond the measured placements.
        """
        kind = {"barrier": "all_reduce", "send": MESSAGE, "recv": MESSAGE}.get(
            transfer.kind, transfer.kind
        )
        if kind == MESSAGE:
            return self._message(transfer)
        known = {at: curve for (k, at), curve in self.curves.items() if k == kind}
        wanted = transfer.placement
        if wanted in known:
            ns, count, how = known[wanted].at(transfer.num_bytes)
            return _duration(ns, count, f"nccl-tests {kind} {wanted}: {how}")
        alike = sorted(at for at in known if _are_alike(at, wanted))
        below = [at for at in alike if at.ranks < wanted.ranks]
        above = [at for at in alike if at.ranks > wanted.ranks]
        if not below or not above:
            return None
        low, high = below[-1], above[0]
        (t0, n0, how), (t1, n1, _) = (known[at].at(transfer.num_bytes) for at in (low, high))
        ns = between(wanted.ranks, (low.ranks, t0), (high.ranks, t1))
        return _duration(
            ns, min(n0, n1), f"nccl-tests {kind}: {wanted} between {low} and {high}; {how}"
        )

    def _message(self, transfer: Transfer) -> Duration | None:
        """From a sendrecv, in which every rank sends to the next, over its slowest link."""
        within = transfer.placement.nodes == 1
        fitting = [at for k, at in self.curves if k == MESSAGE and (at.nodes == 1) == within]
        if not fitting:
            return None
        at = min(fitting)
        ns, count, how = self.curves[MESSAGE, at].at(transfer.num_bytes)
        return _duration(ns, count, f"nccl-tests sendrecv {at}, every rank sending: {how}")


def _are_alike(a: Placement, b: Placement) -> bool:
    """Both on one node, or both on several with as many ranks on each."""
    if a.nodes == 1 or b.nodes == 1:
        return a.nodes == b.nodes
    return a.ranks * b.nodes == b.ranks * a.nodes


def _duration(ns: float, count: int, assumptions: str) -> Duration:
    return Duration(round(ns), count=count, source="table", assumptions=assumptions)
