"""Worlds for the replay engine: random ones that nobody gets stuck in, and textbook schedules."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import strategies as st

from crystalllm.replay.world import (
    Durations,
    End,
    Instruction,
    Lane,
    Op,
    Perturbation,
    PerturbationKind,
    Program,
    Rank,
    World,
)

NUM_CLASSES = 4
SECTIONS = ("prologue", "body", "epilogue")
FORMS = ("collective", "rooted", "reduce", "message", "eager", "batch")


@dataclass
class Builder:
    """Grows a world call by call, each rank with a program of its own."""

    num_ranks: int
    num_lanes: int = 1
    communicators: list[int] = field(default_factory=list)
    connections: list[list[int]] = field(default_factory=list)
    lanes: list[list[dict[str, list[Instruction]]]] = field(default_factory=list)

    def __post_init__(self):
        self.connections = [[] for _ in range(self.num_ranks)]
        self.lanes = [
            [{name: [] for name in SECTIONS} for _ in range(self.num_lanes)]
            for _ in range(self.num_ranks)
        ]
        self.handles = defaultdict(int)
        self.slots = {}
        self.pairs = {}

    def group(self, size):
        self.communicators.append(size)
        return len(self.communicators) - 1

    def pair(self, source, target):
        """The communicator of messages from one rank to another."""
        if (source, target) not in self.pairs:
            self.pairs[source, target] = self.group(2)
        return self.pairs[source, target]

    def add(self, rank, instruction, *, lane=0, section="body"):
        self.lanes[rank][lane][section].append(instruction)

    def run(self, rank, cls, *, lane=0, section="body"):
        self.add(rank, Instruction(op=Op.RUN, cls=cls), lane=lane, section=section)

    def call(self, rank, comm, cls, *, blocks=True, lane=0, section="body", **more):
        """Returns the handle to wait for, None if the call blocks."""
        slot = self.slots.get((rank, comm))
        if slot is None:
            slot = self.slots[rank, comm] = len(self.connections[rank])
            self.connections[rank].append(comm)
        instructions = self.lanes[rank][lane][section]
        handle = None
        if not blocks:
            handle = self.handles[rank]
            self.handles[rank] += 1
        instructions.append(
            Instruction(
                op=Op.COMM if blocks else Op.POST,
                slot=slot,
                handle=handle or 0,
                cls=cls,
                call=len(instructions),
                **more,
            )
        )
        return handle

    def wait(self, rank, handle, *, lane=0, section="body"):
        self.add(rank, Instruction(op=Op.WAIT, handle=handle), lane=lane, section=section)

    def world(self, durations, *, marks=True):
        programs = []
        for lanes in self.lanes:
            made = []
            for number, lane in enumerate(lanes):
                mark = [Instruction(op=Op.MARK)] if marks and number == 0 else []
                made.append(Lane(lane["prologue"], lane["body"] + mark, lane["epilogue"]))
            programs.append(Program(made))
        ranks = [Rank(r, self.connections[r]) for r in range(self.num_ranks)]
        return World(programs, self.communicators, ranks, durations)


@st.composite
def worlds(draw, *, shares_links=False, blocks=False):
    """From one global order of communications, which every rank follows: nobody gets stuck.

    With `blocks` every rank has one lane and waits for each of its calls.
    """
    b = Builder(draw(st.integers(1, 5)), 1 if blocks else draw(st.integers(1, 2)))
    ranks = st.integers(0, b.num_ranks - 1)
    lanes = st.integers(0, b.num_lanes - 1)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.lists(ranks, min_size=1, max_size=b.num_ranks, unique=True))
        groups.append((b.group(len(members)), members, [draw(lanes) for _ in members]))
    for section in SECTIONS:
        for _ in range(draw(st.integers(0, 6))):
            kinds = ["collective", "collective", "rooted", "reduce", "message", "eager", "run"]
            kinds += [] if blocks else ["batch", "signal"]
            kind = draw(st.sampled_from(kinds))
            _communicate(draw, b, groups, section, kind, always_blocks=blocks)
    perturbation = st.builds(
        Perturbation,
        kind=st.sampled_from(list(PerturbationKind)),
        rank=ranks,
        first=st.integers(1, 3),
        every=st.integers(0, 2),
        factor=st.sampled_from([0.0, 0.5, 1.3]),
        pause_ns=st.integers(0, 10**6),
        at_ns=st.integers(0, 3 * 10**6),
    )
    n = NUM_CLASSES
    durations = Durations(
        ns=draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n)),
        spread=draw(st.sampled_from([(), (0.0, 0.3, 0.1, 1.0)])),
        choices=draw(
            st.sampled_from([{}, {1: [(5, 1), (1000, 2)], 3: [(7, 3), (0, 1), (123_456, 5)]}])
        ),
        drain_ns=draw(st.sampled_from([(), (1, 2, 3, 4)])),
        rank_factors=draw(st.sampled_from([(), tuple(1 + 0.37 * r for r in range(b.num_ranks))])),
        link_factors=draw(
            st.sampled_from([(), tuple(1 + 0.1 * c for c in range(len(b.communicators)))])
        ),
        link_classes=draw(st.sampled_from([(), [c % 3 - 1 for c in range(len(b.communicators))]]))
        if shares_links
        else (),
        seed=draw(st.integers(0, 2**63)),
        perturbations=draw(st.lists(perturbation, max_size=3)),
    )
    # Communicators may have been added after the factors were drawn: none are added later.
    return b.world(durations)


def _communicate(draw, b, groups, section, kind, *, always_blocks):
    classes = st.integers(0, NUM_CLASSES - 1)
    ranks = st.integers(0, b.num_ranks - 1)
    if kind == "run":
        lane = draw(st.integers(0, b.num_lanes - 1))
        b.run(draw(ranks), draw(classes), lane=lane, section=section)
        return
    if kind == "signal":
        if b.num_lanes == 2:
            rank, lane = draw(ranks), draw(st.integers(0, 1))
            b.add(rank, Instruction(op=Op.SIGNAL, slot=lane), lane=lane, section=section)
            b.add(rank, Instruction(op=Op.AWAIT, slot=lane), lane=1 - lane, section=section)
        return
    waits = []

    def put(rank, comm, *, lane=0, blocks=None, **more):
        blocks = always_blocks or (draw(st.booleans()) if blocks is None else blocks)
        more |= {"form": FORMS.index(kind), "lane": lane, "section": section}
        handle = b.call(rank, comm, draw(classes), blocks=blocks, **more)
        if handle is not None:
            waits.append((rank, lane, handle))

    if kind in ("collective", "rooted", "reduce"):
        comm, members, lanes = draw(st.sampled_from(groups))
        root = draw(st.integers(0, len(members) - 1))
        for i, (rank, lane) in enumerate(zip(members, lanes, strict=True)):
            rules = {
                "collective": (End.ALL, End.ALL),
                "rooted": (End.SELF, End.ROOT),
                "reduce": (End.ALL, End.SELF),
            }[kind]
            is_root = kind == "rooted" and i == root
            put(rank, comm, lane=lane, end=rules[i != root], is_root=is_root)
    elif b.num_ranks > 1:
        one, other = draw(st.permutations(range(b.num_ranks)))[:2]
        blocks = False if kind == "batch" else None
        for source, target in [(one, other), (other, one)] if kind == "batch" else [(one, other)]:
            comm = b.pair(source, target)
            eager = kind == "eager"
            send, recv = (End.SELF, End.AFTER_DATA) if eager else (End.ALL, End.ALL)
            put(source, comm, blocks=blocks, end=send, is_root=eager, is_message=True)
            put(target, comm, blocks=blocks, end=recv, is_message=True)
    for rank, lane, handle in waits:
        if kind == "batch" or draw(st.booleans()):
            b.wait(rank, handle, lane=lane, section=section)


def one_forward_one_backward(num_stages, num_microbatches, *, chunks=1):
    """1F1B, interleaved where a stage has several chunks; class 0 is forward, 1 backward.

    Messages (class 2) are eager, so that only the schedule makes stages wait. Each
    rank's order is the one of Megatron-LM's interleaved schedule (Narayanan et al.,
    SC 2021): microbatches in groups of as many as there are stages, chunk by chunk.
    """
    b = Builder(num_stages)
    virtual = num_stages * chunks
    total = num_microbatches * chunks
    group = num_stages * chunks

    def unit(i, *, forward):
        """(chunk, microbatch) of the i-th forward or backward of a rank."""
        chunk = i % group // num_stages
        microbatch = i // group * num_stages + i % num_stages
        return (chunk if forward else chunks - 1 - chunk), microbatch

    for rank in range(num_stages):
        if chunks == 1:
            warm_up = min(num_stages - 1 - rank, total)
            units = [(0, i) for i in range(total)]
            order = [("f", u) for u in units], [("b", u) for u in units]
        else:
            warm_up = min((num_stages - rank - 1) * 2 + (chunks - 1) * num_stages, total)
            order = (
                [("f", unit(i, forward=True)) for i in range(total)],
                [("b", unit(i, forward=False)) for i in range(total)],
            )
        forwards, backwards = order
        steps = forwards[:warm_up]
        for i in range(total - warm_up):
            steps += [forwards[warm_up + i], backwards[i]]
        steps += backwards[total - warm_up :]
        for kind, (chunk, microbatch) in steps:
            stage = chunk * num_stages + rank
            before, after = (stage - 1, stage + 1) if kind == "f" else (stage + 1, stage - 1)
            if 0 <= before < virtual:
                comm = _channel(b, kind, before, stage, microbatch)
                b.call(rank, comm, 2, end=End.AFTER_DATA, is_message=True)
            b.run(rank, 0 if kind == "f" else 1)
            if 0 <= after < virtual:
                comm = _channel(b, kind, stage, after, microbatch)
                b.call(rank, comm, 2, blocks=False, end=End.SELF, is_root=True, is_message=True)
    return b


def _channel(b, kind, source, target, microbatch):
    """One per message of an iteration, so that their order plays no part."""
    return b.pair((kind, source, microbatch), (kind, target, microbatch))
