"""The axes of a logical world, and what moving along them does to ranks and groups.

A layout writes the world size as a product, as parallel training does: a rank
is a point, a process group a block of points. Where an axis is symmetric, what
a rank does at one of its coordinates tells what another does at another one,
with every group and peer moved along.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from crystalllm.errors import UserError


@dataclass(frozen=True)
class Axis:
    """One factor of the world size.

    Args:
        name: As in the job's `parallelism`, or "x" and the stride.
        size: Coordinates, at least 2.
        stride: Distance of neighbours on it, in global ranks.
    """

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """Axes from the outermost (largest stride) to the innermost; they fill the world."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        stride = 1
        for axis in reversed(self.axes):
            if axis.stride != stride or axis.size < 2:
                raise ValueError(f"axis {axis} does not follow one of stride {stride}")
            stride *= axis.size

    @cached_property
    def world_size(self) -> int:
        return self.axes[0].size * self.axes[0].stride if self.axes else 1

    @classmethod
    def of_sizes(cls, sizes: Iterable[tuple[str, int]]) -> Layout:
        """From (name, size) of the innermost axis to the outermost; sizes of 1 are left out."""
        axes, stride = [], 1
        for name, size in sizes:
            if size > 1:
                axes.append(Axis(name, size, stride))
            stride *= size
        return cls(tuple(reversed(axes)))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        return tuple(rank // axis.stride % axis.size for axis in self.axes)

    def rank(self, coordinates: Sequence[int]) -> int:
        return sum(c * axis.stride for c, axis in zip(coordinates, self.axes, strict=True))

    def named(self, rank: int) -> dict[str, int]:
        """Coordinates by axis name."""
        return dict(zip((a.name for a in self.axes), self.coordinates(rank), strict=True))

    def find(self, wanted: Mapping[str, int]) -> list[int]:
        """Ranks whose coordinates on the named axes are those.

        Raises:
            UserError: No such axis, or no such coordinate on it.
        """
        sizes = {axis.name: axis.size for axis in self.axes}
        for name, value in wanted.items():
            if name not in sizes:
                raise UserError(
                    f"There is no axis {name}",
                    where=f"Coordinates {_text(wanted)}",
                    do="Use " + ", ".join(f"{n} (0 to {s - 1})" for n, s in sizes.items()),
                )
            if not 0 <= value < sizes[name]:
                raise UserError(
                    f"Coordinate {value} is outside axis {name}",
                    where=f"Coordinates {_text(wanted)}",
                    do=f"Use 0 to {sizes[name] - 1}",
                )
        ranks = [0]
        for axis in self.axes:
            values = [wanted[axis.name]] if axis.name in wanted else range(axis.size)
            ranks = [rank + value * axis.stride for rank in ranks for value in values]
        return ranks

    def refined(self, signatures: Iterable[str]) -> Layout:
        """With axes divided where groups begin or end within them.

        Args:
            signatures: Axis signatures of groups ("size:stride,…"); irregular
                ones, and cuts that do not divide an axis, are left out.
        """
        cuts = {axis.stride for axis in self.axes} | {self.world_size}
        wanted = set()
        for signature in signatures:
            if ":" not in signature or signature.startswith("irregular"):
                continue
            for part in signature.split(","):
                size, _, stride = part.partition(":")
                wanted |= {int(stride), int(stride) * int(size)}
        for cut in sorted(wanted - cuts):
            below = max(c for c in cuts if c < cut)
            above = min((c for c in cuts if c > cut), default=0)
            if above and cut % below == 0 and above % cut == 0:
                cuts.add(cut)
        names = {axis.stride: axis for axis in self.axes}
        ordered = sorted(cuts)
        axes = []
        for low, high in itertools.pairwise(ordered):
            whole = names[max(stride for stride in names if stride <= low)]
            is_whole = whole.stride == low and whole.size * low == high
            axes.append(Axis(whole.name if is_whole else f"x{low}", high // low, low))
        return Layout(tuple(reversed(axes)))

    def moved(
        self, members: Sequence[int], rank: int, to: int, peer: int = -1
    ) -> tuple[tuple[int, ...], int] | None:
        """What a group of `rank`, and a peer in it, are for rank `to`, if `to` plays its part.

        Along axes on which all members have one coordinate the group moves with
        the rank; along the others it lies already, and the peer keeps its
        distance.

        Args:
            members: Global ranks in group order, `rank` being one of them.
            rank: Who is in the group.
            to: Who plays its part.
            peer: Another member, or -1.

        Returns:
            The members and the peer; None where `to` has no such group.
        """
        if len(members) == self.world_size:
            moved: tuple[int, ...] | None = tuple(members)
        else:
            moved = self._moved_group(tuple(members), rank, to)
        if moved is None:
            return None
        if peer < 0:
            return moved, -1
        place = {member: i for i, member in enumerate(members)}
        theirs = {member: i for i, member in enumerate(moved)}
        step = place[peer] - place[rank]
        return moved, moved[(theirs[to] + step) % len(moved)]

    @lru_cache(maxsize=100_000)  # noqa: B019 - layouts are few and live as long as the process
    def _moved_group(self, members: tuple[int, ...], rank: int, to: int) -> tuple[int, ...] | None:
        offset = 0
        for axis in self.axes:
            step = to // axis.stride % axis.size - rank // axis.stride % axis.size
            if step and len({m // axis.stride % axis.size for m in members}) == 1:
                offset += step * axis.stride
        moved = tuple(m + offset for m in members) if offset else members
        return moved if to in moved else None


def _text(coordinates: Mapping[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in coordinates.items())
