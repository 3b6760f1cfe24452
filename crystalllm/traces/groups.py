"""Process groups of traces: who is in them, and which of those with equal members they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crystalllm.errors import UserError
from crystalllm.traces.communication import Communication
from crystalllm.traces.reading import MAX_WORLD_SIZE, Trace, clean, whole, whole_list
from crystalllm.traces.vocabulary import ROOTED

# Members and creation index.
Key = tuple[tuple[int, ...], int]
ASSUMED = "assumed: the default group"


@dataclass(frozen=True)
class Known:
    """A group; `creation` counts the groups with the same members that came before it."""

    members: tuple[int, ...]
    creation: int
    description: str

    @property
    def key(self) -> Key:
        return self.members, self.creation


class GroupTable:
    """All groups of a run, the same on every rank.

    A group is known by the members that `distributedInfo` or the call itself
    lists; calls without any are taken for calls of the default group, which
    `sources` counts and `assumed` names.
    """

    def __init__(self, traces: Sequence[Trace], world_size: int) -> None:
        self.world_size = world_size
        self.sources: Counter[str] = Counter()
        self._groups: dict[tuple[str, tuple[int, ...]], Known] = {}
        self.assumed: set[Key] = set()
        self._found: dict[tuple[int, str], tuple[Known, str]] = {}
        self._backends: dict[Key, str] = {}
        everyone = tuple(range(world_size))
        for trace in traces:
            for group in trace.groups:
                members = group.members
                if members is None and group.description == "default_pg":
                    members = everyone
                if members is not None:
                    self._check(members, trace, f"group {group.name!r} of distributedInfo")
                    known = self._add(group.name, members, group.description)
                    self._backends.setdefault(known.key, group.backend)
        self._default = next(
            (g for g in self._groups.values() if g.members == everyone),
            None,
        ) or self._add("", everyone, "default_pg")

    def groups_of(self, rank: int) -> list[Known]:
        """The groups that a rank is in, in an order that keeps creation indices right."""
        return [g for g in self._groups.values() if rank in g.members]

    def backend_of(self, group: Known, otherwise: str) -> str:
        """gloo or nccl."""
        text = self._backends.get(group.key, "") or otherwise
        return "nccl" if "nccl" in text else "gloo"

    def of_call(self, trace: Trace, call: Communication) -> Known:
        """The group of a call.

        Raises:
            UserError: Members that cannot be, or that are not told although
                the group is not the whole world.
        """
        data = call.host.metadata
        name = str(data.get("Process Group Name", ""))
        if (trace.rank, name) in self._found:
            known, source = self._found[trace.rank, name]
            self.sources[source] += 1
            return known
        members, source = self._members(trace, name, data)
        if members is None:
            size = whole(data.get("Group size"))
            if size not in (None, self.world_size):
                raise UserError(
                    "A trace does not say who is in a process group",
                    where=f"File {trace.source}: {call.kind} in group {name!r} of {size}",
                    do="Record with torch 2.4 or newer, which lists the ranks of groups",
                )
            self.sources[ASSUMED] += 1
            self.assumed.add(self._default.key)
            return self._default
        self._check(members, trace, f"group {name!r} of {call.kind}")
        self.sources[source] += 1
        known = self._add(name, members, clean(str(data.get("Process Group Description", ""))))
        if name:
            self._found[trace.rank, name] = known, source
        return known

    def _members(
        self, trace: Trace, name: str, data: dict[str, Any]
    ) -> tuple[tuple[int, ...] | None, str]:
        if name:
            for group in trace.groups:
                if group.name == name and group.members is not None:
                    return group.members, "distributedInfo"
        ranks = whole_list(data.get("Process Group Ranks"))
        size = whole(data.get("Group size"))
        if ranks is not None and ranks[1] and ranks[0] and size in (None, len(ranks[0])):
            return tuple(ranks[0]), "the calls' process group ranks"
        start, stride = (whole(data.get(f"Global rank {w}")) for w in ("start", "stride"))
        if start is not None and stride and stride > 0 and size and size <= MAX_WORLD_SIZE:
            return tuple(range(start, start + stride * size, stride)), "the calls' rank stride"
        return None, ASSUMED

    def _check(self, members: tuple[int, ...], trace: Trace, what: str) -> None:
        fits = all(0 <= m < self.world_size for m in members)
        if not fits or len(set(members)) != len(members) or trace.rank not in members:
            raise UserError(
                "A process group has members that cannot be",
                where=f"File {trace.source}: {what} has {list(members)[:8]}, {len(members)} in "
                f"all, in a world of {self.world_size}, as rank {trace.rank} tells it",
                do="Pass traces of one run; if they are, the trace was damaged",
            )

    def _add(self, name: str, members: tuple[int, ...], description: str) -> Known:
        known = self._groups.get((name, members))
        if known is None:
            creation = sum(g.members == members for g in self._groups.values())
            known = self._groups[name, members] = Known(members, creation, description)
        return known


def root_of(call: Communication, group: Known) -> int:
    """Group rank of the root; -1 where there is none, or the trace does not tell it."""
    return call.host.root if call.kind in ROOTED and call.host.root < len(group.members) else -1


def peer_of(call: Communication, group: Known, trace: Trace) -> int:
    """Group rank of the peer of a message; -1 for collectives.

    Raises:
        UserError: The trace does not tell it, or it is no other member.
    """
    if call.kind not in ("send", "recv"):
        return -1
    peer = call.host.peer
    if call.host.peer_is_global:
        peer = group.members.index(peer) if peer in group.members else -1
    if peer < 0 and len(group.members) == 2:
        peer = 1 - group.members.index(trace.rank)
    if not 0 <= peer < len(group.members):
        raise UserError(
            "A trace does not say with whom a message was exchanged",
            where=f"File {trace.source}: {call.kind} in a group of {len(group.members)}, peer "
            f"{call.host.peer}",
            do="Record with record_shapes=True, or with torch 2.5 or newer",
        )
    return peer
