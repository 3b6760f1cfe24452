"""Calls of a capture in the words of Kineto traces."""

from __future__ import annotations

from typing import Any

from crystalllm.replay.program import Capture

# How Kineto spells what we spell otherwise (torch/csrc/distributed/c10d/ParamCommsUtils.hpp
# names the arguments, the process groups the collectives).
_COLLECTIVES = {"all_reduce": "allreduce", "all_gather": "allgather"}
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "bool": "Bool",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
# Kineto writes so many ranks of a group at most, the last of them being the group's last.
_MAX_LISTED = 30


class CallWords:
    """What the calls of each rank are, by their ordinal in the capture of the rank's role."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        speakers = capture.speakers()
        self._speakers = {
            int(rank): speakers[int(role)] for rank, role in capture.ranks["role"].items()
        }
        wanted = capture.calls["rank"].isin(speakers.values())
        self._rows = {
            (int(row.rank), int(row.call)): row
            for row in capture.calls[wanted].itertuples(index=False)
        }
        first = capture.calls.drop_duplicates(["rank", "group"])
        self._identities = {
            (int(r), int(g)): str(i)
            for r, g, i in zip(first["rank"], first["group"], first["group_identity"], strict=True)
        }
        self._groups = {
            str(identity): (tuple(int(m) for m in row.members), int(row.creation), row)
            for identity, row in zip(capture.groups.index, capture.groups.itertuples(), strict=True)
        }
        self._by_members = {
            (members, creation): identity
            for identity, (members, creation, _) in self._groups.items()
        }
        self._args: dict[tuple[int, int], dict[str, Any]] = {}

    def speaker(self, rank: int) -> int:
        """The captured rank whose program this rank follows."""
        return self._speakers[rank]

    def kind(self, rank: int, call: int) -> str:
        return str(self._row(rank, call).kind)

    def key(self, rank: int, call: int) -> str:
        """The call record as text."""
        return str(self._row(rank, call).key)

    def args(self, rank: int, call: int) -> dict[str, Any]:
        """The arguments that Kineto gives a communication kernel, and the call record."""
        if (rank, call) not in self._args:
            self._args[rank, call] = self._made(rank, call)
        return self._args[rank, call]

    def groups(self, rank: int) -> list[dict[str, Any]]:
        """The groups in which the rank makes calls, in the form of `distributedInfo.pg_config`."""
        speaker = self.speaker(rank)
        ordinals = sorted({int(row.group) for (r, _), row in self._rows.items() if r == speaker})
        found = []
        for ordinal in ordinals:
            identity, members, description = self._group(rank, ordinal)
            backend = str(self._groups[identity][2].backend)
            found.append(
                {
                    "pg_name": identity,
                    "pg_desc": description,
                    "backend_config": f"{'cuda' if backend == 'nccl' else 'cpu'}:{backend}",
                    "pg_size": len(members),
                    "ranks": list(members),
                }
            )
        return found

    def _row(self, rank: int, call: int) -> Any:
        return self._rows[self.speaker(rank), call]

    def _made(self, rank: int, call: int) -> dict[str, Any]:
        row = self._row(rank, call)
        identity, members, description = self._group(rank, int(row.group))
        made = {
            "Collective name": _COLLECTIVES.get(row.kind, str(row.kind)),
            "In msg nelems": int(row.in_elements),
            "Out msg nelems": int(row.out_elements),
            "Group size": len(members),
            "dtype": kineto_dtype(str(row.dtype)),
            "In split size": _listed(row.in_splits),
            "Out split size": _listed(row.out_splits),
            "Process Group Name": identity,
            "Process Group Description": description,
            "Process Group Ranks": _ranks(members),
            "Key": str(row.key),
        }
        if row.peer_offset >= 0:
            peer = members[(members.index(rank) + int(row.peer_offset)) % len(members)]
            source, target = (rank, peer) if row.kind == "send" else (peer, rank)
            made |= {"Src Rank": source, "Dst Rank": target}
        return made

    def _group(self, rank: int, ordinal: int) -> tuple[str, tuple[int, ...], str]:
        """Identity, members and description of what is the rank's group of this ordinal."""
        identity = self._identities.get((rank, ordinal))
        if identity is None:
            speaker = self.speaker(rank)
            members, creation, _ = self._groups[self._identities[speaker, ordinal]]
            moved = self.capture.layout.moved(members, speaker, rank)
            assert moved is not None, "the world could not have been built"
            identity = self._by_members[moved[0], creation]
        members, _, row = self._groups[identity]
        return identity, members, str(row.description)


def kineto_dtype(dtype: str) -> str:
    """c10's name of an element type in torch's spelling; empty for a barrier's."""
    return _DTYPES.get(dtype, dtype.capitalize())


def _listed(splits: Any) -> str:
    return str([int(n) for n in splits])


def _ranks(members: tuple[int, ...]) -> str:
    if len(members) <= _MAX_LISTED:
        return str(list(members))
    first = ", ".join(map(str, members[: _MAX_LISTED - 1]))
    return f"[{first}, ..., {members[-1]}]"
