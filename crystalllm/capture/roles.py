"""Roles: from a few ranks that run to what every rank of the world does.

Ranks are points of a layout. Some run: an interior point, the steps along each
axis from it and from both ends, the corners. Coordinates of an axis that make
no difference there form a class; a cell is a choice of one class per axis, and
one rank of every cell runs. All others are inferred: they do what the rank of
their cell does, with groups and peers moved along. A random sample of them then
runs to check it. A rank that runs, for whatever reason, and does something else
than its cell is a further point from which axes are looked at, so that it
divides their classes.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod

from crystalllm.capture.broker import StandIn
from crystalllm.capture.captured import Address, Captured
from crystalllm.layout import Axis, Layout

log = logging.getLogger("crystalllm.capture")

# Runs ranks; what they and those that they needed left is in `captured` then.
Run = Callable[[Sequence[int], StandIn], None]
IdentityOf = Callable[[tuple[int, ...], int], str]

# While nothing is known, values of at most so many ranks are awaited together.
_MOST_AT_FIRST = 128
# Corners are run where there are at most so many.
_MOST_CORNERS = 16
# Every coordinate of an axis without symmetry is run at all three origins up to
# this size, beyond it from the interior only.
_SHORT_AXIS = 16
_MOST_ROUNDS = 8


@dataclass(frozen=True)
class Roles:
    """Who does what.

    Args:
        layout: Axes by which groups and peers move.
        representatives: By rank, the captured rank that speaks for it; itself
            where it was captured.
        checked: Inferred ranks that then ran, and did what had been inferred.
        num_sampled: Of those that ran to check, how many were drawn at random from
            all; some more make sure that every role was checked.
        num_inferred: Inferred ranks before those ran.
        corrections: Ranks that had been inferred wrongly.
    """

    layout: Layout
    representatives: list[int]
    checked: frozenset[int]
    num_sampled: int = 0
    num_inferred: int = 0
    corrections: tuple[int, ...] = ()

    def chance_unseen(self, num_odd: int) -> float:
        """That so many odd ones among the inferred ranks were all missed by the sample."""
        left = self.num_inferred - self.num_sampled
        chance = 1.0
        for i in range(num_odd):
            chance *= max(0, left - i) / max(1, self.num_inferred - i)
        return chance


def every_rank(layout: Layout, captured: Mapping[int, Captured]) -> Roles:
    """Every captured rank speaks for itself."""
    layout = _refined(layout, captured)
    return Roles(layout, sorted(captured), frozenset())


def explore(
    run: Run,
    captured: Mapping[int, Captured],
    layout: Layout,
    identity_of: IdentityOf,
    *,
    num_checks: int,
    seed: int,
) -> Roles:
    """Runs as many ranks as it takes to know them all.

    Args:
        run: Captures ranks.
        captured: What ranks left; `run` adds to it.
        layout: Axes as far as they are known beforehand.
        identity_of: Identity of the group with these members and creation index.
        num_checks: Inferred ranks to run for comparison.
        seed: Of their choice.
    """
    return _Explorer(run, captured, layout, identity_of).explore(num_checks, seed)


@dataclass
class _Explorer:
    run: Run
    captured: Mapping[int, Captured]
    layout: Layout
    identity_of: IdentityOf
    # Ranks from which axes are looked at: interior, first, last, and odd ones.
    origins: list[int] = field(default_factory=list)
    # Per axis, the class of each coordinate.
    classes: list[list[int]] = field(default_factory=list)
    messages: dict[int, Counter[tuple[str, tuple[int, ...], int, int]]] = field(
        default_factory=dict
    )

    def explore(self, num_checks: int, seed: int) -> Roles:
        first = _interior(self.layout)
        self.run([first], self._at_first())
        self.layout = _refined(self.layout, self.captured)
        base = _interior(self.layout)
        if base not in self.captured:
            self.run([base], self._nearest())
        self.origins = list(dict.fromkeys([base, 0, self.layout.world_size - 1]))
        self._find_classes()
        self._fill_cells()
        self._explain()

        inferred = [r for r in range(self.layout.world_size) if r not in self.captured]
        chance = random.Random(seed)
        sample = chance.sample(inferred, min(num_checks, len(inferred)))
        also = self._one_of_each_role(sample, inferred, chance) if num_checks else []
        corrections = self._check(sorted([*sample, *also]))
        return Roles(
            layout=self.layout,
            representatives=self._representatives(),
            checked=frozenset([*sample, *also]) - frozenset(corrections),
            num_sampled=len(sample),
            num_inferred=len(inferred),
            corrections=tuple(corrections),
        )

    # --- who speaks for whom ------------------------------------------------------

    def _at_first(self) -> StandIn:
        """Before anything is known: ends speak for themselves, the interior through one point.

        Axes are reduced in this way, the longest first, until few ranks are left.
        """
        layout = self.layout
        sizes = {axis: axis.size for axis in layout.axes}
        for axis in sorted(layout.axes, key=lambda a: (-a.size, a.name == "pp")):
            if prod(sizes.values()) > _MOST_AT_FIRST:
                sizes[axis] = min(3, axis.size)

        def speaker(rank: int) -> int:
            place = list(layout.coordinates(rank))
            for i, axis in enumerate(layout.axes):
                if sizes[axis] < axis.size and 0 < place[i] < axis.size - 1:
                    place[i] = 1
            return layout.rank(place)

        return self._through(speaker)

    def _nearest(self) -> StandIn:
        """The captured rank that shares most coordinates, then most ends of axes."""
        layout = self.layout
        pool = [(rank, layout.coordinates(rank)) for rank in sorted(self.captured)]

        @cache
        def speaker(rank: int) -> int:
            place = layout.coordinates(rank)

            def distance(item: tuple[int, tuple[int, ...]]) -> tuple[int, int, int]:
                steps = ends = 0
                for axis, mine, theirs in zip(layout.axes, place, item[1], strict=True):
                    steps += mine != theirs
                    ends += _end(axis, mine) != _end(axis, theirs)
                return steps, ends, item[0]

            return min(pool, key=distance)[0]

        return self._through(speaker)

    def _through(self, speaker: Callable[[int], int]) -> StandIn:
        def stand_in(members: tuple[int, ...], creation: int, asked: Address) -> Address | None:
            _, seq, rank, peer = asked
            other = speaker(rank)
            if other == rank:
                return None
            moved = self.layout.moved(members, rank, other, peer)
            if moved is None:
                return None
            return self.identity_of(moved[0], creation), seq, other, moved[1]

        return stand_in

    # --- classes --------------------------------------------------------------------

    def _find_classes(self) -> None:
        layout = self.layout
        wanted = set(self.origins)
        for origin in self.origins:
            for i, axis in enumerate(layout.axes):
                wanted |= {self._at(origin, i, x) for x in _steps(axis)}
        if 2 ** len(layout.axes) <= _MOST_CORNERS:
            ends = [(0, axis.size - 1) for axis in layout.axes]
            wanted |= {layout.rank(place) for place in itertools.product(*ends)}
        self.run(sorted(wanted), self._nearest())

        wanted = set()
        for i, axis in enumerate(layout.axes):
            asymmetric = [o for o in self.origins if not self._is_symmetric(o, i)]
            if axis.size <= _SHORT_AXIS:
                lines = self.origins if set(asymmetric) & set(self.origins[:3]) else asymmetric
            else:  # too long to be run for the sake of one odd rank
                lines = self.origins[:1] if set(asymmetric) & set(self.origins[:3]) else []
            wanted |= {self._at(origin, i, x) for origin in lines for x in range(axis.size)}
        self.run(sorted(wanted), self._nearest())
        self.classes = [self._classes_of(i) for i in range(len(layout.axes))]

    def _at(self, origin: int, axis: int, coordinate: int) -> int:
        place = list(self.layout.coordinates(origin))
        place[axis] = coordinate
        return self.layout.rank(place)

    def _is_symmetric(self, origin: int, axis: int) -> bool:
        """Whether neighbours in the interior do the same."""
        size = self.layout.axes[axis].size
        if size <= 3:
            return True
        own = self.layout.coordinates(origin)[axis]
        interior = {2, size // 2, own} - {0, size - 1}
        return all(
            self._same(self._at(origin, axis, 1), self._at(origin, axis, x)) for x in interior
        )

    def _classes_of(self, axis: int) -> list[int]:
        """The class of each coordinate: its number among those that differ."""
        size = self.layout.axes[axis].size
        lines = [[self._at(origin, axis, x) for x in range(size)] for origin in self.origins]
        firsts: list[int] = []  # a coordinate of each class

        def same(x: int, y: int) -> bool:
            return all(
                self._same(line[x], line[y])
                for line in lines
                if line[x] in self.captured and line[y] in self.captured
            )

        found: list[int] = []
        for x in range(size):
            order = list(range(len(firsts)))
            if lines[0][x] not in self.captured:
                if not any(line[x] in self.captured for line in lines):
                    found.append(found[1])  # the interior of a symmetric axis
                    continue
                order.sort(key=lambda i: i != found[1])
            match = next((i for i in order if same(x, firsts[i])), len(firsts))
            if match == len(firsts):
                firsts.append(x)
            found.append(match)
        return found

    def _same(self, rank: int, other: int) -> bool:
        """Whether what one captured rank does explains what another one does."""
        a, b = self.captured[rank], self.captured[other]
        if a.keys_digest != b.keys_digest or len(a.groups) != len(b.groups):
            return False
        for mine, theirs in zip(a.groups, b.groups, strict=True):
            moved = self.layout.moved(mine["members"], rank, other)
            if moved is None or moved[0] != theirs["members"]:
                return False
            if mine["creation"] != theirs["creation"]:
                return False
        return True

    # --- cells ------------------------------------------------------------------------

    def _cell(self, rank: int) -> tuple[int, ...]:
        place = self.layout.coordinates(rank)
        return tuple(classes[x] for classes, x in zip(self.classes, place, strict=True))

    def _fill_cells(self) -> None:
        """Runs one rank of every cell in which none has run."""
        filled = {self._cell(rank) for rank in self.captured}
        missing = []
        for cell in itertools.product(*(range(max(c) + 1) for c in self.classes)):
            if cell not in filled:
                # The second coordinate of a class, where there is one, is in its interior.
                place = []
                for wanted, classes in zip(cell, self.classes, strict=True):
                    of_class = [x for x, c in enumerate(classes) if c == wanted]
                    place.append(of_class[min(1, len(of_class) - 1)])
                missing.append(self.layout.rank(place))
        if missing:
            self.run(sorted(missing), self._nearest())
        self._run_what_cannot_be_inferred()

    def _run_what_cannot_be_inferred(self) -> None:
        """Ranks that cannot do what their cell does speak for themselves."""
        while alone := self._alone():
            log.warning("%d ranks have groups or peers of their own and are all run", len(alone))
            self.run(sorted(alone), self._nearest())

    def _alone(self) -> set[int]:
        """Inferred ranks whose groups do not move with them, or that others know better.

        A captured rank knows who else is in its groups, and who sends to it and
        receives from it.
        """
        speakers = self._representatives()
        moved = self.layout.moved
        alone = {
            rank
            for rank, speaker in enumerate(speakers)
            if rank != speaker
            and any(
                moved(g["members"], speaker, rank) is None for g in self.captured[speaker].groups
            )
        }
        groups = {(g["members"], g["creation"]) for c in self.captured.values() for g in c.groups}
        for members, creation in groups:
            for rank in set(members) - alone if len(members) < len(speakers) else ():
                speaker = speakers[rank]
                if speaker != rank and not any(
                    g["creation"] == creation
                    and moved(g["members"], speaker, rank) == (members, -1)
                    for g in self.captured[speaker].groups
                ):
                    alone.add(rank)
        for rank in self.captured:
            for (kind, members, creation, peer), number in self._messages(rank).items():
                speaker = speakers[peer]
                if speaker != peer and peer not in alone:
                    theirs = sum(
                        n
                        for (k, m, c, p), n in self._messages(speaker).items()
                        if k != kind
                        and c == creation
                        and moved(m, speaker, peer, p) == (members, rank)
                    )
                    if theirs != number:
                        alone.add(peer)
        return alone

    def _messages(self, rank: int) -> Counter[tuple[str, tuple[int, ...], int, int]]:
        """How many messages a captured rank sends and receives: by kind, group and peer."""
        if rank not in self.messages:
            left = self.captured[rank]
            calls = left.parts["calls"]
            columns = (calls[name].to_pylist() for name in ("kind", "group", "peer_rank"))
            self.messages[rank] = Counter(
                (kind, left.groups[group]["members"], left.groups[group]["creation"], peer)
                for kind, group, peer in zip(*columns, strict=True)
                if kind in ("send", "recv")
            )
        return self.messages[rank]

    def _representatives(self) -> list[int]:
        chosen = self._spokesmen()
        return [
            rank if rank in self.captured else chosen[self._cell(rank)]
            for rank in range(self.layout.world_size)
        ]

    def _spokesmen(self) -> dict[tuple[int, ...], int]:
        speakers: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(self.captured):
            speakers.setdefault(self._cell(rank), []).append(rank)
        return {cell: self._spokesman(ranks) for cell, ranks in speakers.items()}

    def _spokesman(self, ranks: Sequence[int]) -> int:
        """The first rank of a cell that does what most of its captured ranks do."""
        return max(ranks, key=lambda r: (sum(self._same(r, other) for other in ranks), -r))

    def _one_of_each_role(
        self, sample: Sequence[int], inferred: Sequence[int], chance: random.Random
    ) -> list[int]:
        """An inferred rank of every role that the sample left out."""
        speakers = self._representatives()
        by_role: dict[str, list[int]] = {}
        for rank in inferred:
            by_role.setdefault(self.captured[speakers[rank]].keys_digest, []).append(rank)
        seen = {self.captured[speakers[rank]].keys_digest for rank in sample}
        return [chance.choice(ranks) for role, ranks in by_role.items() if role not in seen]

    # --- checking ---------------------------------------------------------------------

    def _check(self, sample: Sequence[int]) -> list[int]:
        """Runs the sample and learns from it.

        Returns:
            The sampled ranks that had been inferred wrongly.
        """
        if not sample:
            return []
        before = self._representatives()
        self.run(sample, self._nearest())
        wrong = [rank for rank in sample if not self._same(before[rank], rank)]
        for rank in wrong:
            log.warning(
                "Rank %d does something else than rank %d, from which it was inferred",
                rank,
                before[rank],
            )
        self._explain()
        return wrong

    def _explain(self) -> None:
        """Divides classes until every captured rank does what its cell does."""
        for _ in range(_MOST_ROUNDS):
            chosen = self._spokesmen()
            odd = (r for r in sorted(self.captured) if not self._same(chosen[self._cell(r)], r))
            rank = next((r for r in odd if r not in self.origins), None)
            if rank is None:
                return
            self.origins.append(rank)
            self._find_classes()
            self._fill_cells()


def _refined(layout: Layout, captured: Mapping[int, Captured]) -> Layout:
    return layout.refined(
        sorted({group["signature"] for left in captured.values() for group in left.groups})
    )


def _interior(layout: Layout) -> int:
    """Coordinate 1 on every axis longer than 2, else 0."""
    return layout.rank([1 if axis.size > 2 else 0 for axis in layout.axes])


def _steps(axis: Axis) -> set[int]:
    """Both ends, a step in the interior, and its middle."""
    return {0, min(1, axis.size - 1), min(2, axis.size - 1), axis.size // 2, axis.size - 1}


def _end(axis: Axis, coordinate: int) -> int:
    """-1 and 1 at the ends, 0 between."""
    return (coordinate == axis.size - 1) - (coordinate == 0)
