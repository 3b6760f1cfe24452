"""The files that capture leaves, from what its ranks left."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from crystalllm import artifacts, graph, tables
from crystalllm.capture import matching
from crystalllm.capture.captured import Captured
from crystalllm.capture.iterations import Structure, find, segments
from crystalllm.capture.roles import Roles
from crystalllm.config import Job
from crystalllm.layout import Layout
from crystalllm.payload import Entry, PayloadBook

# One rank's groups by order of creation: identity and members.
Groups = Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class World:
    """All that is known of the ranks, captured and inferred.

    Args:
        job: Whose world.
        iterations: That its program was told to run.
        captured: What captured ranks left.
        roles: Who speaks for whom.
        groups: By rank, its groups.
        structures: By representative, where its calls repeat.
        role_of: By rank, the number of its role.
    """

    job: Job
    iterations: int
    captured: Mapping[int, Captured]
    roles: Roles
    groups: Mapping[int, Groups]
    structures: Mapping[int, Structure]
    role_of: Mapping[int, int]

    @property
    def ranks(self) -> list[int]:
        return sorted(self.groups)

    def speaker(self, rank: int) -> int:
        return rank if rank in self.captured else self.roles.representatives[rank]


def understand(
    job: Job,
    iterations: int,
    captured: Mapping[int, Captured],
    roles: Roles,
    identity_of: Callable[[tuple[int, ...], int], str],
) -> World:
    """What the captured ranks tell about all.

    Raises:
        UserError: The calls of a rank don't repeat.
    """
    is_whole = len(roles.representatives) == job.world_size
    ranks = range(job.world_size) if is_whole else sorted(captured)
    groups: dict[int, Groups] = {}
    role_of: dict[int, int] = {}
    numbers: dict[str, int] = {}
    for rank in ranks:
        speaker = rank if rank in captured else roles.representatives[rank]
        left = captured[speaker]
        role_of[rank] = numbers.setdefault(left.keys_digest, len(numbers))
        if rank == speaker:
            groups[rank] = [(g["identity"], g["members"]) for g in left.groups]
            continue
        moved = []
        for g in left.groups:
            found = roles.layout.moved(g["members"], speaker, rank)
            assert found is not None, "ranks whose groups do not move are captured"
            moved.append((identity_of(found[0], g["creation"]), found[0]))
        groups[rank] = moved
    structures: dict[int, Structure] = {}
    by_digest: dict[str, Structure] = {}
    for rank, left in sorted(captured.items()):
        if not left.num_calls:
            continue
        if left.keys_digest not in by_digest:
            by_digest[left.keys_digest] = find(
                segments(left.keys, left.marks), num_marks=left.num_marks, rank=rank
            )
        structures[rank] = by_digest[left.keys_digest]
    return World(job, iterations, captured, roles, groups, structures, role_of)


def check_matching(world: World, *, eager_bytes: int) -> list[str]:
    """Whether all calls fit together; returns warnings, raises UserError."""
    actors = matching.actors_of(
        world.captured,
        world.ranks,
        {rank: world.speaker(rank) for rank in world.ranks},
        world.groups,
    )
    everybody_ran = len(world.captured) == world.job.world_size
    return matching.check(actors, eager_bytes=eager_bytes, check_splits=everybody_ran)


def write(
    world: World,
    out: Path,
    *,
    provenance: dict[str, Any],
    warnings: Sequence[str],
    eager_bytes: int = 0,
) -> dict[str, Any]:
    """Writes every file of a capture into `out`; returns what structure.json says."""
    out.mkdir(parents=True, exist_ok=True)
    # It comes last: files of two captures are not read as one.
    (out / artifacts.STRUCTURE).unlink(missing_ok=True)
    captured = [world.captured[r] for r in sorted(world.captured)]
    for table in (tables.CALLS, tables.CALL_TIMES, tables.EVENTS, tables.EVENT_TIMES):
        joined = pa.concat_tables([left.parts[table.name] for left in captured])
        table.write(out / f"{table.name}.parquet", joined, provenance=provenance)
    _write_ranks(world, out / "ranks.parquet", provenance)
    _write_groups(world, out / "groups.parquet", provenance)
    _write_splits(world, out / "splits.parquet", provenance)
    book = book_of(world)
    book.save(out / "payloads.parquet")
    graph.write(
        out,
        graph.build(
            pa.concat_tables([left.parts["events"] for left in captured]),
            pa.concat_tables([left.parts["calls"] for left in captured]),
            members={i: m for groups in world.groups.values() for i, m in groups},
            eager_bytes=eager_bytes,
        ),
        provenance=provenance,
    )
    structure = _structure(world, book, provenance, warnings)
    text = json.dumps(structure, indent=2, sort_keys=True) + "\n"
    artifacts.write_atomically(out / "structure.json", text.encode())
    return structure


def book_of(world: World) -> PayloadBook:
    """The payload book of all captured ranks."""
    period = _period(world)
    book = PayloadBook(
        period=period,
        num_marks=max((c.num_marks for c in world.captured.values()), default=0),
        iterations=world.iterations,
        layout=None if len(world.captured) == len(world.groups) else world.roles.layout,
        representatives=[world.speaker(r) for r in world.ranks]
        if len(world.captured) < len(world.groups)
        else (),
    )
    for rank, left in sorted(world.captured.items()):
        counters = _Counters(left, period)
        for c in left.contributions:
            body_end, per_period = counters.of(c.group, c.peer)
            book.add(
                Entry(
                    group=c.group,
                    seq=c.seq,
                    rank=rank,
                    peer=c.peer,
                    dtype=c.dtype,
                    value=c.value,
                    splits=c.splits,
                    body_end=body_end,
                    per_period=per_period,
                )
            )
    return book


class _Counters:
    """How far a rank's groups, and its pairs with peers, count until the epilogue."""

    def __init__(self, left: Captured, period: int) -> None:
        self.left, self.period = left, period
        self.counts: dict[tuple[str, int], tuple[int, int]] | None = None

    def of(self, group: str, peer: int) -> tuple[int, int]:
        """Calls before the epilogue, and in the last period; for a pair, messages to `peer`."""
        if self.counts is None:
            self.counts = self._count()
        return self.counts.get((group, peer), (0, 0))

    def _count(self) -> dict[tuple[str, int], tuple[int, int]]:
        until_end: Counter[tuple[str, int]] = Counter()
        in_period: Counter[tuple[str, int]] = Counter()
        calls, last = self.left.parts["calls"], self.left.num_marks
        names = ("kind", "group_identity", "peer_rank", "mark")
        for kind, group, peer, mark in zip(*(calls[n].to_pylist() for n in names), strict=True):
            if kind == "recv" or mark >= last:
                continue
            counter = group, peer if kind == "send" else -1
            until_end[counter] += 1
            in_period[counter] += mark >= last - self.period
        return {c: (n, in_period[c] if self.period else 0) for c, n in until_end.items()}


def _period(world: World) -> int:
    return math.lcm(*(s.period for s in world.structures.values())) if world.structures else 0


def layout_of(job: Job, learnt: Layout) -> Layout:
    """The axes by which people name ranks: the job's, or else those that the groups showed."""
    p = job.parallelism
    if p is None:
        return learnt
    return Layout.of_sizes((name, getattr(p, name)) for name in p.order.split("-"))


def _write_ranks(world: World, path: Path, provenance: dict[str, Any]) -> None:
    ranks, roles = world.ranks, world.roles
    layout = layout_of(world.job, roles.layout)
    lefts = [world.captured[world.speaker(r)] for r in ranks]
    tables.RANKS.write(
        path,
        {
            "rank": ranks,
            "node": [r // world.job.ranks_per_node for r in ranks],
            "coordinates": [list(layout.named(r).items()) for r in ranks],
            "role": [world.role_of[r] for r in ranks],
            "is_captured": [r in world.captured for r in ranks],
            "is_checked": [r in roles.checked for r in ranks],
            "representative": [left.rank for left in lefts],
            "num_calls": [left.num_calls for left in lefts],
            "num_marks": [left.num_marks for left in lefts],
            "num_invented": [left.num_invented for left in lefts],
            "keys_digest": [left.keys_digest for left in lefts],
        },
        provenance=provenance,
    )


def _write_groups(world: World, path: Path, provenance: dict[str, Any]) -> None:
    seen: dict[str, tuple[Any, ...]] = {}
    for inferred in (False, True):
        for rank in world.ranks:
            if (rank not in world.captured) != inferred:
                continue
            rows = world.captured[world.speaker(rank)].groups
            for (identity, members), row in zip(world.groups[rank], rows, strict=True):
                if identity not in seen:
                    facts = (row["creation"], row["backend"], row["signature"])
                    seen[identity] = (members, *facts, row["description"], inferred)
    rows = sorted(seen.items(), key=lambda item: (item[1][0], item[0]))
    columns = ("members", "creation", "backend", "signature", "description", "is_inferred")
    tables.GROUPS.write(
        path,
        {
            "identity": [identity for identity, _ in rows],
            **{name: [facts[i] for _, facts in rows] for i, name in enumerate(columns)},
        },
        provenance=provenance,
    )


def _write_splits(world: World, path: Path, provenance: dict[str, Any]) -> None:
    """Distributions of split sizes over ranks of a role and iterations."""
    counts: Counter[tuple[int, int, str, int, str, int]] = Counter()
    for rank, left in sorted(world.captured.items()):
        structure = world.structures.get(rank)
        if structure is None or not any(" count=split " in key for key in left.keys):
            continue
        period, prologue = structure.period, structure.prologue_marks
        at: dict[int, int] = defaultdict(int)  # calls so far, by period
        names = ("key", "mark", "in_splits", "out_splits")
        rows = zip(*(left.parts["calls"][n].to_pylist() for n in names), strict=True)
        for key, mark, in_splits, out_splits in rows:
            if not prologue <= mark < left.num_marks:
                continue
            number = at[(mark - prologue) // period]
            at[(mark - prologue) // period] += 1
            for direction, sizes in (("in", in_splits), ("out", out_splits)):
                for slot, elements in enumerate(sizes):
                    counts[(world.role_of[rank], number, key, slot, direction, elements)] += 1
    rows_ = sorted(counts.items())
    columns = ("role", "call_in_period", "key", "slot", "direction", "elements")
    tables.SPLITS.write(
        path,
        {
            **{name: [address[i] for address, _ in rows_] for i, name in enumerate(columns)},
            "count": [count for _, count in rows_],
        },
        provenance=provenance,
    )


def _structure(
    world: World, book: PayloadBook, provenance: dict[str, Any], warnings: Sequence[str]
) -> dict[str, Any]:
    roles = world.roles
    role_ranks: dict[int, list[int]] = defaultdict(list)
    for rank in world.ranks:
        role_ranks[world.role_of[rank]].append(rank)
    firsts = {role: world.captured[world.speaker(ranks[0])] for role, ranks in role_ranks.items()}
    return {
        **provenance,
        "fingerprint": fingerprint(world, provenance),
        "num_ranks": len(world.ranks),
        "num_captured": len(world.captured),
        "num_roles": len(role_ranks),
        "num_inferred": roles.num_inferred,
        "num_sampled": roles.num_sampled,
        "num_checked": len(roles.checked),
        "inferred_wrongly": list(roles.corrections),
        # That k odd ranks among the inferred ones were all missed by the sample.
        "chance_unseen": {str(k): round(roles.chance_unseen(k), 6) for k in (1, 10, 100)},
        "num_invented": sum(left.num_invented for left in world.captured.values()),
        "num_payloads": len(book.entries),
        "iterations": world.iterations,
        "num_marks": book.num_marks,
        "prologue_marks": max((s.prologue_marks for s in world.structures.values()), default=0),
        "period": book.period,
        "layout": [[a.name, a.size] for a in roles.layout.axes],
        "roles": {
            str(role): {
                "num_ranks": len(role_ranks[role]),
                "representative": left.rank,
                **_sections(left, world.structures.get(left.rank), book.period),
            }
            for role, left in sorted(firsts.items())
        },
        "warnings": list(warnings),
    }


def _sections(left: Captured, structure: Structure | None, period: int) -> dict[str, int]:
    """Calls of prologue, one period of the whole world, and epilogue."""
    if structure is None:
        return {"prologue_calls": 0, "body_calls": 0, "epilogue_calls": 0}
    marks = left.marks
    return {
        "prologue_calls": sum(m < structure.prologue_marks for m in marks),
        "body_calls": structure.body_calls * period // structure.period,
        "epilogue_calls": sum(m >= left.num_marks for m in marks),
    }


def fingerprint(world: World, provenance: Mapping[str, Any]) -> str:
    """Of call records, program text and versions: what emulation must find unchanged."""
    digest = hashlib.sha256()
    for part in ("program_digest", "crystalllm", "torch", "python"):
        digest.update(f"{part}={provenance[part]}\n".encode())
    for rank in world.ranks:
        digest.update(world.captured[world.speaker(rank)].keys_digest.encode())
    return digest.hexdigest()[:32]
