"""Runs logical ranks in forks, each waiting for the values that it needs of others.

A rank that needs a control value asks its parent, which answers when the
producer has made it, and starts the producer first if it has not run yet. A
waiting rank takes no processor, so another may run in its place. Every rank
that waits is told when nobody can answer any more: there is no hang.

Between parent and child goes one stream socket with pickled messages; both
ends are this program.
"""

from __future__ import annotations

import logging
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from crystalllm import logical, native, warm
from crystalllm.capture.captured import Address, Captured, Contribution
from crystalllm.errors import UserError
from crystalllm.identity import Identity

log = logging.getLogger("crystalllm.capture")

# Tells whose contribution stands for that of a rank which is not to run:
# (members, creation index of the group, address) to an address, or None if that
# rank has to run itself.
StandIn = Callable[[tuple[int, ...], int, Address], Address | None]


def nobody(members: tuple[int, ...], creation: int, address: Address) -> Address | None:
    """Every rank speaks for itself."""
    return None


@dataclass
class _Want:
    """One value that a rank waits for."""

    asked: Address
    served: Address  # another's where that one stands in


@dataclass
class _Child:
    rank: int
    pid: int
    channel: socket.socket
    started: float
    buffer: bytearray = field(default_factory=bytearray)
    wants: list[_Want] | None = None  # while it waits
    call: str = ""  # what it waits in
    spoken_for: set[int] = field(default_factory=set)  # whose values came from others


class Broker:
    """Captures a set of ranks.

    Args:
        identity: Gives the identity of a rank.
        program: Runs the training program; called in the child.
        output: Gives a file to which a rank's output goes.
        parallel: Ranks that compute at a time.
        limit_s: Seconds that one rank may take in all.
        known: What earlier ranks of this capture left.
        recall: Gives what a rank left in an earlier, interrupted capture, or None.
        on_done: Called with each rank and what it left, as soon as it is there.
        stand_in: Who speaks for ranks that have not run.
        keep_memory: Keep every allocation as an event.
    """

    def __init__(
        self,
        identity: Callable[[int], Identity],
        program: Callable[[], None],
        *,
        output: Callable[[int], str],
        parallel: int,
        limit_s: float,
        on_done: Callable[[int, bytes], None],
        known: Iterable[Captured] = (),
        recall: Callable[[int], Captured | None] = lambda rank: None,
        stand_in: StandIn = nobody,
        keep_memory: bool = False,
    ) -> None:
        self.identity, self.program, self.output = identity, program, output
        self.parallel, self.limit_s, self.on_done = parallel, limit_s, on_done
        self.stand_in, self.keep_memory = stand_in, keep_memory
        self.recall = recall
        self.values: dict[Address, Contribution] = {}
        self.done: set[int] = set()
        for left in known:
            self._learn(left)
        # They speak for themselves, whatever has run already when they are asked.
        self.themselves = set(self.done)
        self.pending: deque[int] = deque()
        self.children: dict[int, _Child] = {}
        self.selector = selectors.DefaultSelector()

    def run(self, ranks: Iterable[int]) -> None:
        """Captures `ranks`, and whoever they need values of.

        Raises:
            UserError: A rank failed, died, ran too long, or needs a value that
                nobody makes; says which and why. No child is left.
        """
        self.pending.extend(ranks)
        self.themselves.update(self.pending)
        try:
            while self.pending or self.children:
                while self.pending and self._num_computing() < self.parallel:
                    self._start(self.pending.popleft())
                if self.children:
                    self._check_stuck()
                    self._wait_for_messages()
        finally:
            for child in list(self.children.values()):
                os.kill(child.pid, signal.SIGKILL)
                self._reap(child)

    def _num_computing(self) -> int:
        return sum(1 for c in self.children.values() if c.wants is None)

    # --- parent ---------------------------------------------------------------

    def _start(self, rank: int) -> None:
        if rank in self.done or rank in self.children:
            return
        if (left := self.recall(rank)) is not None:
            self._learn(left)
            for other in left.heard:
                self._start_next(other)
            self._answer_waiting()
            return
        ours, theirs = socket.socketpair()
        pid = warm.fork()
        if pid == 0:
            ours.close()
            for child in self.children.values():
                child.channel.close()
            _be_child(
                self.identity(rank),
                self.program,
                self.output(rank),
                theirs,
                keep_memory=self.keep_memory,
            )
        theirs.close()
        child = _Child(rank, pid, ours, time.monotonic())
        self.children[rank] = child
        self.selector.register(ours, selectors.EVENT_READ, child)

    def _wait_for_messages(self) -> None:
        now = time.monotonic()
        first = min((c.started for c in self.children.values()), default=now)
        events = self.selector.select(max(0.0, min(1.0, first + self.limit_s - now)))
        for key, _ in events:
            self._read(key.data)
        for child in list(self.children.values()):
            if time.monotonic() - child.started > self.limit_s:
                state = f"waiting in {child.call}" if child.wants else "computing"
                raise UserError(
                    f"A logical rank did not end within {self.limit_s:g} s",
                    where=f"Rank {child.rank}, {state}; output in {self.output(child.rank)}",
                    do="Look for a wait that never ends, or raise --limit",
                )

    def _read(self, child: _Child) -> None:
        data = child.channel.recv(1 << 20)
        if not data:
            status = self._reap(child)
            code = os.waitstatus_to_exitcode(status)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise UserError(
                f"A logical rank died with {how} before it gave its calls",
                where=f"Rank {child.rank}, output in {self.output(child.rank)}",
                do="Read its output; a kill without a message is often memory. "
                "Start again: what is captured is kept",
            )
        child.buffer += data
        while (message := _take(child.buffer)) is not None:
            self._handle(child, message)

    def _handle(self, child: _Child, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "have":
            self.values.update((c.address, c) for c in rest[0])
        elif kind == "want":
            members, creation, addresses, child.call = rest
            child.wants = [_Want(a, self._served_by(members, creation, a)) for a in addresses]
            for want in reversed(child.wants):
                self._start_next(want.served[2])
        elif kind == "done":
            self._reap(child)
            self.done.add(child.rank)
            self.on_done(child.rank, rest[0])
        elif kind == "failed":
            self._reap(child)
            do = "Mend the program, or run this rank alone with python -m crystalllm run"
            if child.spoken_for:
                do += (
                    f". If it compares what ranks sent: {len(child.spoken_for)} that did not run "
                    f"(such as rank {min(child.spoken_for)}) spoke through others; --strategy all "
                    "runs them"
                )
            raise UserError(
                f"A logical rank failed: {rest[0]}",
                where=f"Rank {child.rank}, output in {self.output(child.rank)}",
                do=do,
            )
        self._answer_waiting()

    def _served_by(self, members: tuple[int, ...], creation: int, asked: Address) -> Address:
        if asked[2] in self.themselves:
            return asked
        other = self.stand_in(members, creation, asked)
        if other is None or (other not in self.values and other[2] in self.done):
            return asked
        return other

    def _start_next(self, rank: int) -> None:
        if rank not in self.done and rank not in self.children:
            if rank in self.pending:
                self.pending.remove(rank)
            self.pending.appendleft(rank)

    def _learn(self, left: Captured) -> None:
        self.done.add(left.rank)
        self.values.update((c.address, c) for c in left.contributions)

    def _answer_waiting(self) -> None:
        for child in self.children.values():
            if child.wants is not None and all(w.served in self.values for w in child.wants):
                found = []
                for want in child.wants:
                    group, seq, rank, peer = want.asked
                    value = self.values[want.served]
                    if want.served[2] != rank:
                        child.spoken_for.add(rank)
                    given = replace(value, group=group, seq=seq, rank=rank, peer=peer)
                    found.append((want.served[2], given))
                child.wants = None
                _send(child.channel, found)

    def _ask_the_ranks_themselves(self) -> None:
        """Where every rank waits, those that a waiting or ended rank stands for have to run."""
        for child in self.children.values():
            for want in child.wants or ():
                if want.served not in self.values and want.served != want.asked:
                    want.served = want.asked
                    self._start_next(want.asked[2])

    def _check_stuck(self) -> None:
        """An error when every rank waits and nobody is left who could answer."""
        waiting = [c for c in self.children.values() if c.wants is not None]
        if not waiting or len(waiting) < len(self.children) or self.pending:
            return
        self._ask_the_ranks_themselves()
        if self.pending:
            return
        child = waiting[0]
        assert child.wants is not None
        group, seq, rank, peer = next(w.asked for w in child.wants if w.served not in self.values)
        if rank in self.children:
            other = f"rank {rank} itself waits in {self.children[rank].call}"
        else:
            other = f"rank {rank} has ended without making that call"
        to = f" to rank {peer}" if peer >= 0 else ""
        raise UserError(
            "A logical rank waits for a value that nobody will send",
            where=f"Rank {child.rank} in {child.call}, group {group}, sequence number {seq}: it "
            f"needs what rank {rank} contributes{to}, and {other}",
            do="Look at the order of the calls on these two ranks",
        )

    def _reap(self, child: _Child) -> int:
        self.selector.unregister(child.channel)
        child.channel.close()
        del self.children[child.rank]
        return os.waitpid(child.pid, 0)[1]


# --- child -------------------------------------------------------------------


def _be_child(
    identity: Identity,
    program: Callable[[], None],
    output: str,
    channel: socket.socket,
    *,
    keep_memory: bool,
) -> None:
    code = 1
    try:
        with open(output, "wb", buffering=0) as log_file:
            os.dup2(log_file.fileno(), 1)
            os.dup2(log_file.fileno(), 2)
        os.environ.update(identity.variables())
        try:
            left = _capture(identity, program, channel, keep_memory=keep_memory)
            _send(channel, ("done", left.to_bytes()))
        except BaseException as error:
            traceback.print_exc()
            _send(channel, ("failed", f"{type(error).__name__}: {error}"))
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    finally:
        os._exit(code)  # the parent's atexit handlers and buffers are not ours to run


def _capture(
    identity: Identity, program: Callable[[], None], channel: socket.socket, *, keep_memory: bool
) -> Captured:
    logical.enter(identity, keep_records=True)
    world = logical.world()
    world.keep_contributions(True)
    if keep_memory:
        world.keep_memory()
    made: list[Contribution] = []
    heard: set[int] = set()
    payload = native.load().Payload

    def publish() -> None:
        fresh = [Contribution(*c[:-1], tuple(c[-1])) for c in world.take_contributions()]
        made.extend(fresh)
        if fresh:
            _send(channel, ("have", fresh))

    def ask(group: Any, seq: int, ranks: list[int], peer: int, key: str) -> None:
        publish()
        addresses = [(group.identity, seq, rank, peer) for rank in ranks]
        _send(channel, ("want", tuple(group.members), group.creation, addresses, key))
        for speaker, c in _receive(channel):
            heard.add(speaker)
            value = payload(c.dtype, c.value, list(c.splits))
            world.add_payload(c.group, c.seq, c.rank, c.peer, value)

    world.set_payload_source(ask, is_live=True)
    try:
        program()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    publish()
    return Captured.of_world(world, made, heard)


# --- messages ------------------------------------------------------------------


def _send(channel: socket.socket, message: object) -> None:
    data = pickle.dumps(message)
    channel.sendall(struct.pack("<Q", len(data)) + data)


def _receive(channel: socket.socket) -> Any:
    buffer = bytearray()
    while (message := _take(buffer)) is None:
        data = channel.recv(1 << 20)
        if not data:
            raise ConnectionError("the capturing process has ended")
        buffer += data
    return message


def _take(buffer: bytearray) -> Any:
    """The next whole message of the buffer, or None."""
    if len(buffer) < 8:
        return None
    (size,) = struct.unpack("<Q", buffer[:8])
    if len(buffer) < 8 + size:
        return None
    message = pickle.loads(bytes(buffer[8 : 8 + size]))
    del buffer[: 8 + size]
    return message
