"""Which ranks a timeline shows: nobody looks at thousands of lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crystalllm.replay.program import Capture

MAX_RANKS = 64


def chosen_ranks(
    capture: Capture, *, sandbox: Iterable[int] = (), max_ranks: int = MAX_RANKS
) -> list[int]:
    """Sandbox ranks, one of each role, and those that share a group with a sandbox rank.

    Small groups come before large ones, and of a group that is too large for what
    is left those come first that lie behind the sandbox rank in the group's order.

    Args:
        capture: Of the world.
        sandbox: Ranks that run for real; always chosen.
        max_ranks: So many at most, where sandbox ranks and roles are not more.

    Returns:
        The most wanted first.
    """
    wanted = list(dict.fromkeys(sandbox))
    real = list(wanted)
    wanted += [speaker for _, speaker in sorted(capture.speakers().items())]
    groups = sorted(
        (tuple(int(m) for m in members) for members in capture.groups["members"]),
        key=lambda members: (len(members), members),
    )
    of_rank = {rank: [g for g in dict.fromkeys(groups) if rank in g] for rank in real}
    enough = max(max_ranks, len(set(wanted)))
    for members, rank in sorted(
        ((g, rank) for rank, found in of_rank.items() for g in found), key=lambda g: len(g[0])
    ):
        wanted += _behind(members, rank)
    return list(dict.fromkeys(wanted))[:enough]


def _behind(members: Sequence[int], rank: int) -> list[int]:
    at = members.index(rank)
    return [*members[at:], *members[:at]]
