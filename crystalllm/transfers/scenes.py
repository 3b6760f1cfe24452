"""What some ranks of a captured world do among themselves, for processes that play it.

A scene is one body of all ranks of a group, or of both ends of messages: computation as
long as it was captured, and those calls in which nobody else takes part. Each rank does what
the captured rank does that speaks for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from crystalllm.replay.program import Capture, Members
from crystalllm.transfers.case import Case
from crystalllm.transfers.sizes import size_bytes

# A wait comes soon if no more than this is computed between call and wait.
_SOON_NS = 1_000_000


@dataclass(frozen=True)
class Post:
    """A call that a process makes in a scene; ranks are its processes, by place.

    Args:
        case: Kind, size and dtype.
        elements: By the convention of `calls`.
        group: Place of its group among the scene's.
        root: The root of a collective that has one.
        peer: The other end of a message; -1 of a collective.
        tag: Of a message.
        is_awaited: The program waits for it soon.
    """

    case: Case
    elements: int
    group: int
    root: int = 0
    peer: int = -1
    tag: int = 0
    is_awaited: bool = False

    @property
    def tells_its_time(self) -> bool:
        """When messages and reduce_scatters end only a wait tells; gloo has no future of them."""
        return self.is_awaited or (self.peer < 0 and self.case.kind != "reduce_scatter")

    def to_json(self) -> dict[str, Any]:
        named = asdict(self)
        case = named.pop("case")
        return {**named, "kind": case["kind"], "dtype": case["dtype"]}


@dataclass
class Scene:
    """One body of some ranks.

    Args:
        ranks: Who takes part, ascending; a process each.
        groups: Members of each group, by their places in `ranks`.
        posts: By process, its calls.
        steps: By process: ("compute", ns), ("post", number of a call), ("wait", [numbers]).
    """

    ranks: tuple[int, ...]
    groups: list[list[int]] = field(default_factory=list)
    posts: list[list[Post]] = field(default_factory=list)
    steps: list[list[tuple[str, Any]]] = field(default_factory=list)

    def transfers(self) -> list[list[tuple[int, int]]]:
        """Calls that are one transfer, as (process, number) of everybody who takes part."""
        found: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for process, posts in enumerate(self.posts):
            at: dict[Any, int] = defaultdict(int)
            for number, post in enumerate(posts):
                pair = (process, post.peer) if post.case.kind == "send" else (post.peer, process)
                who = (post.group, pair, post.tag) if post.peer >= 0 else (post.group,)
                found[who, at[who]].append((process, number))
                at[who] += 1
        return list(found.values())

    def samples(self, stamps: np.ndarray) -> Iterator[tuple[Case, int, np.ndarray]]:
        """What was measured of each call.

        Args:
            stamps: Of each process an array of repetitions x calls x (arrival, return,
                end, time of other threads after it, whether the end is exact; else the call
                ended no later).

        Yields:
            Case, number of processes, and repetitions x (transfer time, time of other
            threads, time in the call, whether the transfer time is exact, else it is at most
            what it says).
        """
        # By process, repetitions x calls.
        arrived, returned, ended, taken, exact = (
            [of_one[:, :, i] for of_one in stamps] for i in range(5)
        )
        calling = [end - begin for begin, end in zip(arrived, returned, strict=True)]

        def of(values: list[np.ndarray], calls: list[tuple[int, int]]) -> np.ndarray:
            return np.stack([values[process][:, number] for process, number in calls])

        for calls in self.transfers():
            begin = of(arrived, calls).max(axis=0)
            is_message = self._post(calls[0]).peer >= 0
            for side in [[c] for c in calls] if is_message else [calls]:
                ends, is_exact = of(ended, side), of(exact, side) > 0
                is_exact &= np.array([[self._post(at).tells_its_time] for at in side])
                # Members of a collective end together: whose end is exact tells for all.
                end = np.where(is_exact | ~is_exact.any(axis=0), ends, 0).max(axis=0)
                own = [of(values, side).mean(axis=0) for values in (taken, calling)]
                post = self._post(side[0])
                yield (
                    post.case,
                    len(self.groups[post.group]),
                    np.stack([np.maximum(end - begin, 0), *own, is_exact.any(axis=0)], axis=1),
                )

    def _post(self, at: tuple[int, int]) -> Post:
        return self.posts[at[0]][at[1]]


def scenes(capture: Capture, wanted: Collection[tuple[Case, int]]) -> list[Scene]:
    """Scenes in which what is wanted occurs; the same ranks play once.

    Args:
        capture: What every rank does.
        wanted: Cases, and among how many ranks.

    Returns:
        Few of them: who brings nothing new is left out. A case whose time no call tells is in
        none.
    """
    bodies = _Bodies(capture)
    found: list[Scene] = []
    missing = set(wanted)
    for rank in capture.speakers().values():
        for call in bodies.calls[rank]:
            who = bodies.members(rank, call)
            if (bodies.case(call), len(who)) not in missing:
                continue
            scene = bodies.scene(tuple(sorted(who)))
            shown = {
                (post.case, len(scene.groups[post.group]))
                for posts in scene.posts
                for post in posts
                if post.tells_its_time
            }
            if shown & missing:
                found.append(scene)
                missing -= shown
            else:
                missing.discard((bodies.case(call), len(who)))
    return found


class _Bodies:
    """The last captured body of each role."""

    def __init__(self, capture: Capture) -> None:
        self.members: Callable[[int, Any], tuple[int, ...]] = Members(capture).of
        first = capture.num_marks - capture.period
        calls = capture.calls[capture.calls["mark"].between(first, capture.num_marks - 1)]
        calls = calls.assign(size=size_bytes(calls))
        events = capture.events[capture.events["mark"].between(first, capture.num_marks - 1)]
        speakers = capture.speakers()
        self.calls = {
            rank: list(calls[calls["rank"] == rank].itertuples(index=False))
            for rank in speakers.values()
        }
        self.events = {
            rank: list(events[events["rank"] == rank].itertuples(index=False))
            for rank in speakers.values()
        }
        self.role_of = {rank: role for role, rank in speakers.items()}
        self.speaker = {int(r): speakers[int(role)] for r, role in capture.ranks["role"].items()}
        self.segments = capture.captured_durations().segments

    @staticmethod
    def case(call: Any) -> Case:
        return Case(str(call.kind), int(call.size), str(call.dtype))

    def scene(self, ranks: tuple[int, ...]) -> Scene:
        made = Scene(ranks)
        for rank in ranks:
            self._add(made, rank)
        self._place_roots(made)
        return made

    def _add(self, scene: Scene, rank: int) -> None:
        """What a rank does, with those calls in which only ranks of the scene take part."""
        speaker = self.speaker[rank]
        within = {}
        batches: dict[int, list[int]] = defaultdict(list)
        for call in self.calls[speaker]:
            who = self.members(rank, call)
            if set(who) <= set(scene.ranks):
                within[call.call] = call, who
                if call.batch >= 0:
                    batches[call.batch].append(call.call)
        posts: list[Post] = []
        steps: list[tuple[str, Any]] = []
        # Calls for which it has not waited: number, and what it had computed before them.
        pending: dict[int, tuple[int, int]] = {}
        lane, num_segments, computed = self._lane(speaker), 0, 0
        for event in self.events[speaker]:
            if event.kind == "COMP" and str(event.lane) == lane:
                ns = self.segments[self.role_of[speaker], lane, "body", num_segments].ns
                num_segments += 1
                computed += ns
                if steps and steps[-1][0] == "compute":
                    ns += steps.pop()[1]
                steps.append(("compute", ns))
            elif event.kind.startswith("COMM") and event.call in within:
                pending[event.call] = len(posts), computed
                steps.append(("post", len(posts)))
                posts.append(self._post(scene, rank, *within[event.call]))
            elif event.kind == "WAIT" and event.call in within:
                batch = within[event.call][0].batch
                waited = batches[batch] if batch >= 0 else [event.call]
                ended = [pending.pop(c) for c in waited if c in pending]
                if ended:
                    steps.append(("wait", [number for number, _ in ended]))
                for number, before in ended:
                    soon = computed - before <= _SOON_NS
                    posts[number] = replace(posts[number], is_awaited=soon)
        scene.posts.append(posts)
        scene.steps.append(steps)

    def _lane(self, speaker: int) -> str:
        """The lane that makes most of its calls: what it computes lies between them."""
        lanes = Counter(str(e.lane) for e in self.events[speaker] if e.kind.startswith("COMM"))
        return max(lanes, key=lambda lane: lanes[lane])

    def _post(self, scene: Scene, rank: int, call: Any, who: tuple[int, ...]) -> Post:
        place = {r: i for i, r in enumerate(scene.ranks)}
        case = self.case(call)
        if call.kind in ("send", "recv"):
            peer = place[who[1] if call.kind == "send" else who[0]]  # the sender comes first
            group, root, tag = sorted(place[r] for r in who), 0, int(call.tag)
        else:
            peer, tag = -1, 0
            group = [place[r] for r in who]
            root = place[rank] if call.root == "me" else -1
        if group not in scene.groups:
            scene.groups.append(group)
        elements = case.elements(len(group))
        return Post(case, elements, scene.groups.index(group), root, peer, tag)

    @staticmethod
    def _place_roots(scene: Scene) -> None:
        """Its root knows of itself; the others learn it here."""
        for calls in scene.transfers():
            root = max(scene.posts[p][n].root for p, n in calls)
            for p, n in calls:
                scene.posts[p][n] = replace(scene.posts[p][n], root=max(root, 0))
