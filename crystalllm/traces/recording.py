"""One rank on its way from its trace into the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crystalllm import native
from crystalllm.errors import UserError
from crystalllm.records import call_columns, element_size
from crystalllm.traces.communication import Found
from crystalllm.traces.groups import GroupTable, Key, Known, peer_of, root_of
from crystalllm.traces.lanes import events_of
from crystalllm.traces.reading import Trace
from crystalllm.traces.sizes import sizes_of

_MAX_ELEMENTS = 2**50


class RankImport:
    """What is known of one captured rank; `record` fills columns and events.

    Args:
        trace: Of the rank.
        found: Its communication.
        table: The groups of the run.
    """

    def __init__(self, trace: Trace, found: Found, table: GroupTable) -> None:
        self.trace, self.found = trace, found
        self.rank = trace.rank
        self.calls = found.calls
        self.groups: list[Known] = [table.of_call(trace, call) for call in self.calls]
        self.sizes = [
            sizes_of(call, len(group.members), group.members.index(self.rank))
            for call, group in zip(self.calls, self.groups, strict=True)
        ]
        for call, sizes in zip(self.calls, self.sizes, strict=True):
            parts = (sizes.in_elements, sizes.out_elements, *sizes.in_splits, *sizes.out_splits)
            if not all(0 <= n < _MAX_ELEMENTS for n in parts):
                raise UserError(
                    "A call has a size that no message has",
                    where=f"File {trace.source}: {call.kind} of {max(parts)} elements",
                    do="Export the trace again; it was damaged",
                )
        self.roots = [root_of(c, g) for c, g in zip(self.calls, self.groups, strict=True)]
        self.peers = [peer_of(c, g, trace) for c, g in zip(self.calls, self.groups, strict=True)]
        self.kept = set(range(len(self.calls)))
        self.num_marks = 0
        self.columns: dict[str, Sequence[Any]] = {}
        self.events: dict[str, list[Any]] = {}
        self.identities: dict[Key, tuple[str, str]] = {}

    def record(self, table: GroupTable, marks: tuple[int, list[int]]) -> None:
        """Makes the call records, by the one function that makes them, and the events.

        Args:
            table: The groups of the run, complete by now.
            marks: Iteration marks before the trace begins, and those in it.
        """
        ahead, borders = marks
        world = native.load().World(rank=self.rank, size=table.world_size)
        made = {}
        for known in table.groups_of(self.rank):
            group = world.create_group(
                list(known.members),
                known.description,
                table.backend_of(known, self.trace.backend),
            )
            made[known.key] = group
            self.identities[known.key] = group.identity, group.signature
        world.keep_records(True)
        for _ in range(ahead):
            world.mark()
        streams: dict[Any, int] = {}
        batches: dict[int, int] = {}
        numbers: list[int] = []
        passed = 0
        for i, call in enumerate(self.calls):
            while passed < len(borders) and borders[passed] <= call.start_ns:
                world.mark()
                passed += 1
            if i not in self.kept:
                numbers.append(-1)
                continue
            sizes = self.sizes[i]
            lane = (
                ("stream", call.kernels[0].thread) if call.kernels else ("host", call.host.thread)
            )
            if call.batch >= 0 and call.batch not in batches:
                batches[call.batch] = world.new_batch()
            number = world.record_call(
                made[self.groups[i].key],
                call.kind,
                reduce_op=call.reduce_op,
                dtype="" if call.kind == "barrier" else call.host.dtype,
                count=sizes.count,
                in_elements=sizes.in_elements,
                out_elements=sizes.out_elements,
                in_splits=sizes.in_splits,
                out_splits=sizes.out_splits,
                root=self.roots[i],
                peer=self.peers[i],
                tag=call.host.tag,
                batch=batches.get(call.batch, -1),
                stream=streams.setdefault(lane, len(streams)),
                is_async=call.host.is_async or call.kind in ("send", "recv"),
                arrival_ns=call.start_ns,
                release_ns=call.end_ns,
            )
            numbers.append(number)
        for _ in borders[passed:]:
            world.mark()
        self.num_marks = world.marks
        self.columns = call_columns(world.take_records(), world.groups, self.rank)
        parts = [
            (call, number, self._bytes(i))
            for i, (call, number) in enumerate(zip(self.calls, numbers, strict=True))
        ]
        unlinked = {id(k) for k in self.found.unlinked}
        self.events = events_of(self.trace, parts, unlinked, borders)
        self.events["rank"] = [self.rank] * len(self.events["event"])
        self.events["mark"] = [m + ahead for m in self.events["mark"]]

    def _bytes(self, i: int) -> int:
        sizes = self.sizes[i]
        return (sizes.in_elements or sizes.out_elements) * element_size(self.calls[i].host.dtype)
