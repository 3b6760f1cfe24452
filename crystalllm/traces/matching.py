"""The same call on different ranks: which calls of a group belong together.

Profiles begin and end at slightly different times, so ranks see more or fewer
calls of a group. Only those that every captured member saw are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Set

from crystalllm.errors import UserError
from crystalllm.rules import Ends, ends
from crystalllm.traces.clocks import Mismatch, Step, common_part
from crystalllm.traces.groups import Key
from crystalllm.traces.iterations import step_of
from crystalllm.traces.reading import whole
from crystalllm.traces.recording import RankImport
from crystalllm.traces.sizes import signature_of


def match(
    ranks: dict[int, RankImport], *, assumed: Set[Key]
) -> tuple[list[str], dict[str, list[dict[int, int]]]]:
    """Matches calls across ranks, narrows `kept` to the common ones.

    Where one member of an all_to_all shows uneven sizes, all members' counts
    become those of an uneven one.

    Args:
        ranks: The captured ranks.
        assumed: Groups of which some calls are only a guess, so that they are
            kept as they are where they do not fit together.

    Returns:
        Names of groups whose calls do not fit together, and by name of group the
        ends of matched collectives that all members leave together, by rank.

    Raises:
        UserError: Calls of a known group that do not fit together.
    """
    iterations = {r: step_of(one.trace) for r, one in ranks.items()}
    unmatched: list[str] = []
    matches: dict[str, list[dict[int, int]]] = {}
    for name, key, places, captured in _conversations(ranks):
        if len(captured) < 2:
            continue
        if any(not places[r] for r in captured):
            parts = {r: range(0) for r in captured}
        else:
            found = common_part({r: _steps(ranks[r], places[r], iterations[r]) for r in captured})
            if isinstance(found, Mismatch):
                if key not in assumed:
                    raise _mismatch(ranks, name, places, found)
                unmatched.append(name)
                continue
            parts = found
        chosen = {r: [places[r][i] for i in parts[r]] for r in captured}
        for rank in captured:
            ranks[rank].kept -= set(places[rank]) - set(chosen[rank])
        matches[name] = []
        for together in zip(*chosen.values(), strict=True):
            calls = {r: ranks[r].calls[i] for r, i in zip(chosen, together, strict=True)}
            sizes = [ranks[r].sizes[i] for r, i in zip(chosen, together, strict=True)]
            kind = next(iter(calls.values())).kind
            if kind == "all_to_all" and any(s.count < 0 for s in sizes):
                for one in sizes:
                    one.count = -1
            timed = not any(c.lacks_kernel(ranks[r].trace) for r, c in calls.items())
            if timed and all(ends(kind, is_root=is_root) is Ends.ALL for is_root in (True, False)):
                matches[name].append({r: c.end_ns for r, c in calls.items()})
    return unmatched, matches


def _conversations(
    ranks: dict[int, RankImport],
) -> list[tuple[str, Key, dict[int, list[int]], list[int]]]:
    """Name, group, calls by rank and captured members, of each group and each pair in one."""
    places: dict[tuple[Hashable, ...], dict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, one in ranks.items():
        for i, call in enumerate(one.calls):
            group = one.groups[i]
            pair: tuple[int, ...] = ()
            if call.kind in ("send", "recv"):
                peer = group.members[one.peers[i]]
                pair = (rank, peer) if call.kind == "send" else (peer, rank)
            places[(*group.key, pair)][rank].append(i)
    found = []
    names: set[str] = set()
    for members, creation, pair in sorted(places):
        within = places[members, creation, pair]
        name = f"{len(members)} ranks from {min(members)}, #{creation}"
        name += f", {pair[0]} to {pair[1]}" if pair else ""
        name += f" ({len(found)})" if name in names else ""
        names.add(name)
        captured = [r for r in sorted(pair or members) if r in ranks]
        found.append((name, (members, creation), within, captured))
    return found


def _steps(one: RankImport, places: list[int], iteration: Callable[[int], int]) -> list[Step]:
    steps = []
    for i in places:
        call = one.calls[i]
        signature = signature_of(call, one.sizes[i])
        if call.kind in ("send", "recv"):
            signature = call.host.dtype, one.sizes[i].count
        seq = whole(call.host.metadata.get("Seq"))
        steps.append(
            Step(signature, call.end_ns, -1 if seq is None else seq, iteration(call.start_ns))
        )
    return steps


def _mismatch(
    ranks: dict[int, RankImport], name: str, places: dict[int, list[int]], found: Mismatch
) -> UserError:
    texts = []
    for rank, at in zip(found.ranks, found.at, strict=True):
        one, here = ranks[rank], places[rank]
        if at < len(here):
            call, sizes = one.calls[here[at]], one.sizes[here[at]]
            text = f"{call.kind} of {sizes.count} {call.host.dtype}"
        else:
            text = "no more calls"
        texts.append(f"rank {rank} (file {one.trace.source}) has {text} as call {at}")
    return UserError(
        "Calls of two ranks in one group do not fit together",
        where=f"Group of {name}: {'; '.join(texts)}",
        do="Pass traces of the same iterations of one run",
    )
