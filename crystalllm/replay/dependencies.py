"""What events of one lane have to wait for on another lane of their rank, as channels.

A launch makes a kernel wait for the host, an event record makes another stream
wait, a synchronisation the host. Each becomes a signal after (or at the begin
of) the one event and an await before the other, in a channel of their own.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Dependencies:
    """Channels by event.

    Args:
        awaits: To be taken before the event.
        at_begin: To be signalled when the event begins.
        at_end: To be signalled when it has ended.
        num_channels: In all.
        num_left_out: Dependencies on events of another section of the program;
            what lies between sections is ordered by the lanes alone.
    """

    awaits: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    at_begin: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    at_end: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_channels: int = 0
    num_left_out: int = 0

    def _channel(self, target: int) -> int:
        self.num_channels += 1
        self.awaits[target].append(self.num_channels - 1)
        return self.num_channels - 1


def find(sections: Mapping[str, Sequence[Any]], *, one_connection: bool) -> Dependencies:
    """The dependencies within each section.

    Args:
        sections: By name, one rank's rows of `events`, in order; lanes mixed.
        one_connection: CUDA_DEVICE_MAX_CONNECTIONS is 1: work of all streams goes
            through one queue in the order of its launches, so that nothing begins
            before what was launched before it has begun.
    """
    found = Dependencies()
    for rows in sections.values():
        here = {row.event: row for row in rows}
        launched = []
        for row in rows:
            waits_for_call = row.kind == "WAIT" and row.call >= 0
            if row.after < 0 or waits_for_call:
                continue
            source = here.get(row.after)
            if source is None:
                found.num_left_out += 1
                continue
            found.at_end[source.event].append(found._channel(row.event))
            if str(source.lane).startswith("host:") and str(row.lane).startswith("stream:"):
                launched.append((source.event, row))
        if one_connection:
            _queue(found, [row for _, row in sorted(launched, key=lambda item: item[0])])
    return found


def _queue(found: Dependencies, launched: Sequence[Any]) -> None:
    for before, after in itertools.pairwise(launched):
        if before.lane != after.lane:  # a stream is in order by itself
            found.at_begin[before.event].append(found._channel(after.event))
