"""From a capture and a duration table to the world that is replayed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from crystalllm import artifacts, tables
from crystalllm.errors import UserError
from crystalllm.layout import Layout
from crystalllm.placement import Placement
from crystalllm.records import element_size
from crystalllm.replay import dependencies
from crystalllm.replay.durations import SECTIONS, Duration, DurationTable, captured_segments
from crystalllm.replay.what_if import SlowLink
from crystalllm.replay.world import (
    END_OF,
    Durations,
    End,
    Instruction,
    Lane,
    Op,
    Program,
    Rank,
    World,
)
from crystalllm.rules import ends


@dataclass(frozen=True)
class Capture:
    """What replay reads of a capture.

    Args:
        structure: structure.json.
        layout: How groups move from a representative to those it speaks for.
        ranks: `ranks` by rank.
        calls: `calls` of captured ranks.
        events: `events` with their times.
        groups: `groups` by identity.
    """

    structure: dict[str, Any]
    layout: Layout
    ranks: pd.DataFrame
    calls: pd.DataFrame
    events: pd.DataFrame
    groups: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> Capture:
        """Raises UserError for what is missing, damaged or not the whole world."""
        folder = artifacts.capture_folder(folder)
        structure = artifacts.read_structure(folder)
        tables_ = {
            table.name: table.read(folder / f"{table.name}.parquet")[0].to_pandas()
            for table in (
                tables.RANKS,
                tables.CALLS,
                tables.EVENTS,
                tables.EVENT_TIMES,
                tables.GROUPS,
            )
        }
        if len(tables_["ranks"]) != structure["world_size"]:
            raise UserError(
                "This capture does not describe the whole world",
                where=f"Folder {folder}: {len(tables_['ranks'])} ranks of "
                f"{structure['world_size']}",
                do="Capture with --strategy roles or all",
            )
        events = tables_["events"].merge(tables_["event_times"], on=["rank", "event"])
        sizes = [(name, size) for name, size in reversed(structure["layout"])]
        return cls(
            structure=structure,
            layout=Layout.of_sizes(sizes),
            ranks=tables_["ranks"].set_index("rank"),
            calls=tables_["calls"],
            events=events[~events["kind"].isin(["ALLOC", "FREE"])],
            groups=tables_["groups"].set_index("identity"),
        )

    @property
    def prologue_marks(self) -> int:
        return self.structure["prologue_marks"]

    @property
    def period(self) -> int:
        return self.structure["period"]

    @property
    def num_marks(self) -> int:
        return self.structure["num_marks"]

    @property
    def num_bodies(self) -> int:
        """Whole bodies that were captured."""
        return (self.num_marks - self.prologue_marks) // max(self.period, 1)

    @property
    def first_body_mark(self) -> int:
        """Bodies are aligned to the end of the run; what is left over counts as prologue."""
        return self.num_marks - self.num_bodies * self.period

    def section(self, mark: int) -> str:
        if mark < self.first_body_mark:
            return "prologue"
        return "body" if mark < self.num_marks else "epilogue"

    def speakers(self) -> dict[int, int]:
        """By role, the rank whose events are the role's program."""
        return {
            int(role): int(ranks["representative"].iloc[0])
            for role, ranks in self.ranks.groupby("role")
        }

    def captured_durations(self) -> DurationTable:
        """Segments as they took while capturing; no transfers."""
        role_of = {int(r): int(role) for r, role in self.ranks["role"].items()}
        return DurationTable(
            segments=captured_segments(self.events, role_of, self.section, self.period)
        )


@dataclass
class _Classes:
    """Numbers of durations; equal ones share a number."""

    ns: list[int] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    durations: list[Duration] = field(default_factory=list)
    choices: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    names: dict[Any, int] = field(default_factory=dict)

    def number(self, name: Any, d: Duration) -> int:
        if name not in self.names:
            number = self.names[name] = len(self.ns)
            self.ns.append(d.ns)
            self.spread.append(d.sigma)
            self.durations.append(d)
            if d.choices or d.parts_ns:
                self.choices[number] = d.choices or tuple((ns, 1) for ns in d.parts_ns)
        return self.names[name]


@dataclass(frozen=True)
class Replayable:
    """A world, and what its numbers mean.

    Args:
        world: For the engine.
        classes: Name of each duration class: ("segment", role, lane, section,
            position) or ("transfer", key, placement); the placement is empty where
            durations do not depend on it.
        durations: Of each class.
        links: Description and signature of each communicator's group.
        variants: Role of each program, and the placements for which its transfers
            take the times that they take, by slot. A rank's program is
            `world.ranks[rank].program`.
    """

    world: World
    classes: list[tuple[Any, ...]]
    durations: list[Duration]
    links: list[tuple[str, str]]
    variants: list[tuple[int, tuple[str, ...]]]


def build(
    capture: Capture,
    durations: DurationTable,
    *,
    seed: int = 0,
    draw: bool = False,
    eager_bytes: int = 0,
    what_ifs: Sequence[Any] = (),
    share_links: bool = False,
    one_connection: bool = False,
) -> Replayable:
    """The world of a capture.

    Args:
        capture: What every rank does.
        durations: How long it takes.
        seed: Of draws.
        draw: Draw durations from their distributions instead of taking medians.
        eager_bytes: Messages up to this size end at their sender's side at once.
        what_ifs: From `what_if.load`.
        share_links: Transfers whose durations are modelled share the links of their
            ranks where they overlap: those within nodes one class, the others another.
        one_connection: CUDA_DEVICE_MAX_CONNECTIONS is 1: streams share one queue.
    """
    classes = _Classes()
    forms: dict[str, int] = {}
    programs, slots_of = [], []
    roles = capture.speakers()
    communicators = _Communicators(capture, by_placement=durations.by_placement)
    compilers = {}
    numbers: dict[tuple[int, tuple[str, ...]], int] = {}
    for role in sorted(roles):
        compiler = _Compiler(capture, durations, classes, forms, role, eager_bytes, one_connection)
        compiler.place = cache(partial(communicators.placement, roles[role]))
        programs.append(compiler.program(roles[role]))
        slots_of.append(list(compiler.slots))
        numbers[role, tuple(compiler.place(s) for s in compiler.slots)] = len(numbers)
        compilers[role] = compiler
    ranks = []
    for rank, role in capture.ranks["role"].items():
        compiler = compilers[int(role)]
        connections = [communicators.of(int(rank), s) for s in compiler.slots]
        placements = tuple(communicators.placements[c] for c in connections)
        number = numbers.setdefault((int(role), placements), len(numbers))
        if number == len(programs):
            programs.append(compiler.placed(placements))
            slots_of.append(list(compiler.slots))
        ranks.append(Rank(number, connections))
    links = communicators.links()
    world = World(
        programs=programs,
        communicators=communicators.sizes,
        ranks=ranks,
        durations=Durations(
            ns=classes.ns,
            spread=classes.spread if draw else (),
            choices=classes.choices if draw else {},
            seed=seed,
            link_factors=_link_factors(what_ifs, links),
            link_classes=communicators.link_classes(
                slots_of, programs, ranks, [d.source for d in classes.durations]
            )
            if share_links
            else (),
            perturbations=[w.perturbation() for w in what_ifs if not isinstance(w, SlowLink)],
        ),
    )
    return Replayable(world, list(classes.names), classes.durations, links, list(numbers))


def _link_factors(what_ifs: Sequence[Any], links: list[tuple[str, str]]) -> list[float]:
    factors = [1.0] * len(links)
    for slow in (w for w in what_ifs if isinstance(w, SlowLink)):
        matching = [i for i, names in enumerate(links) if slow.group in names]
        if not matching:
            raise UserError(
                f"No group is called {slow.group}",
                where="What-if slow-link",
                do="Use a description or signature: "
                + ", ".join(sorted({n for names in links for n in names if n})),
            )
        for i in matching:
            factors[i] *= slow.factor
    return factors if any(f != 1.0 for f in factors) else []


# A group's collectives are ("", group, 0); messages (direction, group, peer offset).
Slot = tuple[str, int, int]


def _slot(call: Any) -> Slot:
    """Of a row of `calls`."""
    if call.kind in ("send", "recv"):
        return call.kind, int(call.group), int(call.peer_offset)
    return "", int(call.group), 0


def transfer_placements(capture: Capture) -> list[tuple[str, str]]:
    """Every key of a call with every placement on the nodes that its transfers have, in order."""
    communicators = _Communicators(capture, by_placement=True)
    speakers = capture.speakers()
    calls = capture.calls[capture.calls["rank"].isin(speakers.values())]
    keys_of: dict[int, dict[Slot, set[str]]] = {
        rank: defaultdict(set) for rank in speakers.values()
    }
    for row in calls.drop_duplicates(["rank", "key", "group"]).itertuples(index=False):
        keys_of[row.rank][_slot(row)].add(str(row.key))
    found = set()
    for rank, role in capture.ranks["role"].items():
        for slot, keys in keys_of[speakers[int(role)]].items():
            placement = communicators.placements[communicators.of(int(rank), slot)]
            found |= {(key, placement) for key in keys}
    return sorted(found)


class Members:
    """Who takes part in the calls of any rank, whether it was captured or not."""

    def __init__(self, capture: Capture) -> None:
        self._communicators = _Communicators(capture, by_placement=False)

    def of(self, rank: int, call: Any) -> tuple[int, ...]:
        """Ranks of a collective in their group's order; of a message, who sends and who gets it.

        Args:
            rank: Who makes the call.
            call: Row of `calls` of the rank that speaks for it.
        """
        return _members(self._communicators.name(rank, _slot(call)))


class _Communicators:
    """Numbers of communicators: of groups, and of each ordered pair that exchanges messages.

    Args:
        capture: What they are in.
        by_placement: Durations depend on how a communicator lies on the nodes; else its
            placement is the empty one.
    """

    def __init__(self, capture: Capture, *, by_placement: bool) -> None:
        self.capture, self.by_placement = capture, by_placement
        self.node: dict[int, int] = capture.ranks["node"].to_dict()
        self.speaker: dict[int, int] = capture.ranks["representative"].to_dict()
        self.sizes: list[int] = []
        self.placements: list[str] = []
        self.numbers: dict[Any, int] = {}
        seen = capture.calls.drop_duplicates(["rank", "group"])
        self.identities = {
            (int(r), int(g)): str(i)
            for r, g, i in zip(seen["rank"], seen["group"], seen["group_identity"], strict=True)
        }
        self.groups = {
            str(identity): (tuple(int(m) for m in row.members), int(row.creation))
            for identity, row in zip(capture.groups.index, capture.groups.itertuples(), strict=True)
        }
        self.places: dict[tuple[int, ...], dict[int, int]] = {}

    def of(self, rank: int, slot: Slot) -> int:
        name = self.name(rank, slot)
        number = self.numbers.setdefault(name, len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(len(_members(name)))
            self.placements.append(self._placement(name))
        return number

    def placement(self, rank: int, slot: Slot) -> str:
        """How the group or pair of a slot lies on the nodes."""
        return self._placement(self.name(rank, slot))

    def _placement(self, name: Any) -> str:
        return str(Placement.of(_members(name), self.node)) if self.by_placement else ""

    def name(self, rank: int, slot: Slot) -> Any:
        direction, ordinal, offset = slot
        members, creation = self._group(rank, ordinal)
        if not direction:
            return members, creation
        if members not in self.places:
            self.places[members] = {m: i for i, m in enumerate(members)}
        peer = members[(self.places[members][rank] + offset) % len(members)]
        pair = (rank, peer) if direction == "send" else (peer, rank)
        return members, creation, pair

    def link_classes(
        self,
        slots_of: Sequence[Sequence[Slot]],
        programs: Sequence[Program],
        ranks: Sequence[Rank],
        sources: Sequence[str],
    ) -> list[int]:
        """0 within a node, 1 between nodes; -1 where a duration is not modelled."""
        modelled: list[set[int]] = []  # slots of each program
        for slots, made in zip(slots_of, programs, strict=True):
            calls = [
                i
                for lane in made.lanes
                for section in (lane.prologue, lane.body, lane.epilogue)
                for i in section
                if i.op in (Op.POST, Op.COMM)
            ]
            measured = {i.slot for i in calls if sources[i.cls] != "model"}
            modelled.append(set(range(len(slots))) - measured)
        found = [-1] * len(self.sizes)
        names = list(self.numbers)
        for rank in ranks:
            for slot in modelled[rank.program]:
                number = rank.connections[slot]
                found[number] = int(len({self.node[m] for m in _members(names[number])}) > 1)
        return found

    def links(self) -> list[tuple[str, str]]:
        """By number, description and signature of the group."""
        named = {
            (tuple(int(m) for m in row.members), int(row.creation)): (
                str(row.description),
                str(row.signature),
            )
            for row in self.capture.groups.itertuples()
        }
        return [named[name[0], name[1]] for name in self.numbers]

    def _group(self, rank: int, ordinal: int) -> tuple[tuple[int, ...], int]:
        if (rank, ordinal) in self.identities:
            return self.groups[self.identities[rank, ordinal]]
        speaker = self.speaker[rank]
        members, creation = self.groups[self.identities[speaker, ordinal]]
        moved = self.capture.layout.moved(members, speaker, rank)
        if moved is None:
            raise UserError(
                "An inferred rank has no such group",
                where=f"Rank {rank}, group {ordinal} of rank {speaker}, which speaks for it",
                do="Capture again with this version",
            )
        return moved[0], creation


def _members(name: Any) -> tuple[int, ...]:
    """Those of a group, or of a pair within one."""
    return name[2] if len(name) == 3 else name[0]


class _Compiler:
    """One role's events as instructions."""

    def __init__(
        self,
        capture: Capture,
        durations: DurationTable,
        classes: _Classes,
        forms: dict[str, int],
        role: int,
        eager_bytes: int,
        one_connection: bool,
    ) -> None:
        self.one_connection = one_connection
        self.capture, self.durations, self.classes = capture, durations, classes
        self.forms, self.role, self.eager_bytes = forms, role, eager_bytes
        self.slots: dict[Slot, int] = {}
        self.handles: dict[Any, int] = {}
        # How the group or pair of a slot lies on the nodes.
        self.place: Callable[[Slot], str] = lambda _: ""
        self.compiled = Program(())

    def program(self, rank: int) -> Program:
        capture = self.capture
        calls = capture.calls[capture.calls["rank"] == rank]
        self.calls = {row.call: row for row in calls.itertuples(index=False)}
        self.batches: dict[int, list[int]] = defaultdict(list)
        for row in calls.itertuples(index=False):
            if row.batch >= 0:
                self.batches[row.batch].append(row.call)
        self._place_calls()
        events = capture.events[capture.events["rank"] == rank]
        first_body = capture.num_marks - capture.period
        rows: dict[str, list[Any]] = {name: [] for name in SECTIONS}
        for row in events.itertuples(index=False):
            name = capture.section(row.mark)
            if name != "body" or row.mark >= first_body:
                rows[name].append(row)
        self.dependencies = dependencies.find(rows, one_connection=self.one_connection)
        lanes = []
        for lane in dict.fromkeys(str(row.lane) for row in events.itertuples(index=False)):
            sections = {
                name: self._instructions(lane, name, [r for r in rows[name] if r.lane == lane])
                for name in SECTIONS
            }
            if lane == "host:0":
                self._add_marks(sections)
            lanes.append(Lane(*(sections[name] for name in SECTIONS)))
        self.compiled = Program(lanes)
        return self.compiled

    def placed(self, placements: Sequence[str]) -> Program:
        """The program compiled last, for ranks whose slots lie so on the nodes."""

        def moved(instruction: Instruction) -> Instruction:
            if instruction.op not in (Op.POST, Op.COMM):
                return instruction
            key = self.calls[instruction.call].key
            return replace(instruction, cls=self._transfer(key, placements[instruction.slot]))

        return Program(
            [
                Lane(*(list(map(moved, s)) for s in (lane.prologue, lane.body, lane.epilogue)))
                for lane in self.compiled.lanes
            ]
        )

    def _place_calls(self) -> None:
        """Names of calls under which waits find them: those of the body by their place in it."""
        self.names: dict[int, Any] = {}
        at: dict[int, int] = defaultdict(int)
        period, end = self.capture.period, self.capture.num_marks
        for number, call in self.calls.items():
            if self.capture.section(call.mark) != "body":
                self.names[number] = ("once", number)
                continue
            repeat = (end - 1 - call.mark) // period
            self.names[number] = ("body", at[repeat])
            at[repeat] += 1

    def _add_marks(self, sections: dict[str, list[Instruction]]) -> None:
        """An iteration of the replay is a whole body, and it ends on the first host thread."""
        mark = Instruction(op=Op.MARK)
        if self.capture.first_body_mark:
            sections["prologue"].append(mark)
        sections["body"].append(mark)

    def _instructions(self, lane: str, section: str, rows: Sequence[Any]) -> list[Instruction]:
        made: list[Instruction] = []
        num_segments = 0
        needs = self.dependencies
        for row in rows:
            made += [Instruction(op=Op.AWAIT, slot=c) for c in needs.awaits.get(row.event, ())]
            made += [Instruction(op=Op.SIGNAL, slot=c) for c in needs.at_begin.get(row.event, ())]
            if row.kind == "COMP":
                d = self.durations.segment((self.role, lane, section, num_segments))
                name = ("segment", self.role, lane, section, num_segments)
                num_segments += 1
                made.append(Instruction(op=Op.RUN, cls=self.classes.number(name, d)))
            elif row.kind.startswith("COMM") and row.call in self.calls:
                # On a host thread a call goes on by itself, on a stream it is a kernel.
                op = Op.POST if lane.startswith("host:") else Op.COMM
                made.append(self._call(self.calls[row.call], op))
            elif row.kind == "WAIT" and row.call in self.calls:
                batch = self.calls[row.call].batch
                for number in self.batches[batch] if batch >= 0 else [row.call]:
                    made.append(Instruction(op=Op.WAIT, handle=self._handle(number), call=number))
            made += [Instruction(op=Op.SIGNAL, slot=c) for c in needs.at_end.get(row.event, ())]
        return made

    def _handle(self, call: int) -> int:
        return self.handles.setdefault(self.names[call], len(self.handles))

    def _transfer(self, key: str, placement: str) -> int:
        """Class of a call's transfer time."""
        d = self.durations.transfer(key, placement)
        return self.classes.number(("transfer", key, placement), d)

    def _call(self, call: Any, op: Op) -> Instruction:
        is_message = call.kind in ("send", "recv")
        slot = _slot(call)
        end, is_root, form = END_OF[ends(call.kind, is_root=call.root == "me")], False, call.kind
        if is_message:
            form = "message"
            num_bytes = max(0, call.count) * element_size(call.dtype)
            if num_bytes <= self.eager_bytes:
                end = End.SELF if call.kind == "send" else End.AFTER_DATA
                is_root = call.kind == "send"
        else:
            is_root = call.root == "me"
        form = f"{form} {call.dtype} {call.count} {call.reduce_op}"
        return Instruction(
            op=op,
            slot=self.slots.setdefault(slot, len(self.slots)),
            handle=self._handle(call.call),
            cls=self._transfer(call.key, self.place(slot)),
            end=end,
            is_root=is_root,
            is_message=is_message,
            form=self.forms.setdefault(form, len(self.forms)),
            call=int(call.call),
        )
