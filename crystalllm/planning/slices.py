"""Which ranks run together: slices that cover every role in as few runs as the devices allow."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from crystalllm import chosen
from crystalllm.chosen import numbers, ranks_at
from crystalllm.errors import UserError

NODE = "node"

# Ranks that are in one slice together, in ascending order.
Block = tuple[int, ...]


@dataclass(frozen=True)
class Wish:
    """Ranks that somebody wants as sandbox ranks at the same time.

    Args:
        text: As it was said.
        blocks: Each of them fulfils it for its ranks.
        is_any: Blocks that cover every role do; else all of them are wanted.
    """

    text: str
    blocks: tuple[Block, ...]
    is_any: bool

    @property
    def num_devices(self) -> int:
        """How many it needs at once."""
        return max(map(len, self.blocks))


def read_wish(text: str, ranks: pd.DataFrame) -> Wish:
    """A wish from text.

    Args:
        text: "node" (all ranks of a node), axes ("tp", "tp+cp": a whole group
            along them), ranks ("0,5,8-11"), or coordinates ("pp=5,tp=0": all ranks there).
        ranks: `ranks` by rank.

    Raises:
        UserError: No such axis, coordinate or rank.
    """
    if "=" in text:
        return Wish(text, (tuple(ranks_at(chosen.axes_of(ranks), text)),), is_any=False)
    if text[:1].isdigit():
        return Wish(text, (_listed(text, ranks),), is_any=False)
    axes = axes_of(ranks)
    names = text.split("+")
    if text != NODE and (unknown := [name for name in names if name not in axes]):
        raise UserError(
            f"There is no axis {unknown[0] or '(empty)'}",
            where=f"Sandbox ranks {text}",
            do=f"Use {', '.join([NODE, *axes])}, axes joined by +, ranks such as 0,5,8-11, or "
            "coordinates such as pp=0",
        )
    if text == NODE:
        places = ranks["node"].tolist()
    else:
        others = [name for name in axes if name not in names]
        at = [dict(coordinates) for coordinates in ranks["coordinates"]]
        places = [tuple(here[name] for name in others) for here in at]
    members: dict[object, list[int]] = defaultdict(list)
    for rank, place in zip(ranks.index, places, strict=True):
        members[place].append(int(rank))
    return Wish(text, tuple(tuple(block) for block in members.values()), is_any=True)


def usual_wishes(ranks: pd.DataFrame) -> list[Wish]:
    """A whole group along each axis, and all ranks of a node."""
    texts = [*reversed(axes_of(ranks)), NODE]
    return [read_wish(text, ranks) for text in texts]


def axes_of(ranks: pd.DataFrame) -> list[str]:
    """Names of the axes by which ranks have coordinates, the outermost first."""
    return [name for name, _ in ranks["coordinates"].iloc[0]]


def fulfilled(wish: Wish, ranks: pd.DataFrame) -> list[Block]:
    """The blocks that run for a wish: where any will do, the fewest that cover every role.

    Of blocks with the same roles, the one with the most representatives runs, and
    of these the first.
    """
    if not wish.is_any:
        return list(wish.blocks)
    role_of = ranks["role"].to_dict()
    speakers = set(_representatives(ranks).values())
    best: dict[frozenset[int], Block] = {}
    for block in wish.blocks:
        roles = frozenset(role_of[rank] for rank in block)
        known = best.setdefault(roles, block)
        if len(speakers.intersection(block)) > len(speakers.intersection(known)):
            best[roles] = block
    return [best[roles] for roles in fewest(list(best))]


def choose(
    ranks: pd.DataFrame,
    num_devices: int,
    *,
    wishes: Sequence[Wish] = (),
    ranks_per_role: int = 1,
) -> list[Block]:
    """The sandbox ranks of each slice.

    Wishes come first; roles that they leave out get single ranks: the role's
    representative, then ranks of the nodes that have the fewest sandbox ranks so
    far. Blocks are put together largest first, each into the first slice with
    room for it, so that single ranks, and those beside one wish, take as few
    slices as there can be.

    Args:
        ranks: `ranks` by rank: node, coordinates, role, representative.
        num_devices: Sandbox ranks that can run at a time.
        wishes: Ranks that are wanted together.
        ranks_per_role: Ranks of each role that run, as far as it has so many.

    Raises:
        UserError: A wish needs more devices than there are.
    """
    blocks: list[Block] = []
    for wish in wishes:
        if wish.num_devices > num_devices:
            raise UserError(
                f"The sandbox ranks {wish.text} need {wish.num_devices} devices at once",
                where=f"This host has {num_devices} for sandbox ranks",
                do="Use a host with more, or wish for fewer ranks (planning --explain lists some)",
            )
        blocks += fulfilled(wish, ranks)
    blocks = [b for b in dict.fromkeys(blocks) if not any(set(b) < set(other) for other in blocks)]
    picked = {rank for block in blocks for rank in block}
    blocks += [(rank,) for rank in _singles(ranks, picked, ranks_per_role)]
    return _packed(blocks, num_devices)


def fewest(sets: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The fewest of `sets` that hold together what all of them hold."""
    largest = [s for s in sets if not any(s < other for other in sets)]

    def search(missing: frozenset[int], limit: int) -> list[frozenset[int]] | None:
        if not missing:
            return []
        if limit == 0 or max(len(s & missing) for s in largest) * limit < len(missing):
            return None
        # The element with the fewest choices: one of its sets must be taken.
        holders = {x: [s for s in largest if x in s] for x in sorted(missing)}
        for choice in min(holders.values(), key=len):
            rest = search(missing - choice, limit - 1)
            if rest is not None:
                return [choice, *rest]
        return None

    wanted = frozenset().union(*sets)
    return next(found for n in itertools.count() if (found := search(wanted, n)) is not None)


def _listed(text: str, ranks: pd.DataFrame) -> Block:
    found = sorted(set(numbers(text, option=f"Sandbox ranks {text}")))
    if found[-1] >= len(ranks):
        raise UserError(
            f"Rank {found[-1]} is not in the world",
            where=f"Sandbox ranks {text}",
            do=f"Use ranks from 0 to {len(ranks) - 1}",
        )
    return tuple(found)


def _representatives(ranks: pd.DataFrame) -> dict[int, int]:
    """By role, the rank that speaks for its first rank."""
    return {
        int(role): int(of_role["representative"].iloc[0]) for role, of_role in ranks.groupby("role")
    }


def _singles(ranks: pd.DataFrame, picked: set[int], ranks_per_role: int) -> list[int]:
    """Ranks that roles still need."""
    node = ranks["node"].to_dict()
    in_use = Counter(node[rank] for rank in picked)
    found: list[int] = []

    def take(rank: int) -> None:
        found.append(rank)
        in_use[node[rank]] += 1

    missing = {}
    for role, speaker in _representatives(ranks).items():
        members = [int(rank) for rank in ranks.index[ranks["role"] == role]]
        there = picked.intersection(members)
        missing[role] = max(0, min(ranks_per_role, len(members)) - len(there))
        if missing[role] and speaker not in there:
            take(speaker)
            missing[role] -= 1
    # Representatives are known by now: the others go where these are not.
    for role, number in missing.items():
        left = [int(r) for r in ranks.index[ranks["role"] == role] if r not in {*picked, *found}]
        for _ in range(number):
            rank = min(left, key=lambda r: (in_use[node[r]], r))
            left.remove(rank)
            take(rank)
    return found


def _packed(blocks: Sequence[Block], num_devices: int) -> list[Block]:
    slices: list[set[int]] = []
    for block in sorted(blocks, key=lambda b: (-len(b), b)):
        home = next((s for s in slices if len(s.union(block)) <= num_devices), None)
        if home is None:
            slices.append(set(block))
        else:
            home.update(block)
    return sorted(tuple(sorted(s)) for s in slices)
