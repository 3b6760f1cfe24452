"""Live replay: arrivals decide, and nobody is left waiting."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_worlds import worlds

from crystalllm.replay import reference, shared_reference
from crystalllm.replay.engine import DeadlockError, ReplayError
from crystalllm.replay.live import (
    BusyError,
    Client,
    ClosedError,
    DiedError,
    Live,
    TimeLimitError,
    attach,
)
from crystalllm.replay.world import Durations, End, Instruction, Lane, Op, Program, Rank, World

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 20
# Long enough for a machine that is busy, short enough to wait for.
SHORT_S = 0.05


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """No thread, no descriptor, no memory with or without a name."""
    gc.collect()
    before = _held()
    yield
    gc.collect()
    assert _held() == before


def _held() -> tuple[int, list[str], int, int]:
    maps = Path("/proc/self/maps").read_text()
    threads = len(os.listdir("/proc/self/task"))
    fds = sum("crystal_replay" in _link(fd) or "pidfd" in _link(fd) for fd in _fds())
    return threads, sorted(os.listdir("/dev/shm")), maps.count("memfd:crystal_replay"), fds


def _fds() -> list[str]:
    return os.listdir("/proc/self/fd")


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def meeting(call: int = 0, *, slot: int = 0, form: int = 0) -> Instruction:
    return Instruction(op=Op.COMM, slot=slot, cls=1, form=form, call=call)


def small(num_ranks: int = 3, *, iterations_meet: bool = True) -> World:
    """Each rank computes 1 ms and meets all others for 100 us, once per iteration."""
    compute = Instruction(op=Op.RUN, cls=0)
    body = [compute, *([meeting(7)] if iterations_meet else []), Instruction(op=Op.MARK)]
    program = Program([Lane(body=body)])
    return World(
        [program],
        [num_ranks],
        [Rank(0, [0]) for _ in range(num_ranks)],
        Durations(ns=[1_000_000, 100_000]),
    )


# --- times ---------------------------------------------------------------------------


def test_virtual_ranks_are_as_slow_as_the_others_tell() -> None:
    with Live(small(3), external=[0, 1], num_iterations=4, ahead=0) as live:
        clients = [live.client(0), live.client(1)]

        def meet(at_ns: int, *told: float) -> int:
            """When the meeting of an iteration starts: rank 2 decides. Then ranks tell.

            What is told after a rank's mark may come when rank 2 has begun to compute.
            """
            tickets = [client.arrive(meeting(7), at_ns) for client in clients]
            found = [c.wait(t, LIMIT_S) for c, t in zip(clients, tickets, strict=True)]
            assert found[0] == found[1]
            for client, factor in zip(clients, told, strict=False):
                client.tell_slowness(factor)
            for client in clients:
                client.mark(found[0].end_ns)
            return found[0].start_ns

        assert meet(0, 2.0) == 1_000_000
        end = 1_100_000
        assert meet(end, 2.0, 3.0) == end + 2_000_000
        end += 2_100_000
        assert meet(end, 0.5, 0.5) == end + 2_500_000  # the mean of both
        end += 2_600_000
        assert meet(end) == end + 500_000
        for factor in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ReplayError, match=r"slowness cannot be. Rank 0"):
                clients[0].tell_slowness(factor)
        for client in clients:
            client.close()


def _section(world: World, rank: int, lane: int, iteration: int, last: int) -> list[Instruction]:
    shape = world.programs[world.ranks[rank].program].lanes[lane]
    if iteration == 0:
        return list(shape.prologue)
    return list(shape.body if iteration <= last else shape.epilogue)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(worlds(), st.integers(0, 3), st.data())
def test_arrivals_of_an_offline_run_give_its_times(
    world: World, num_iterations: int, data: st.DataObject
) -> None:
    try:
        events, marks = reference.replay(world, num_iterations)
    except reference.Deadlock:
        return
    ranks = range(len(world.ranks))
    external = data.draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True), "external")
    todo = {r: [e for e in events if e.rank == r] for r in external}
    live = Live(
        world,
        external=external,
        num_iterations=num_iterations,
        ahead=data.draw(st.integers(0, 3), "ahead"),
        watch=ranks,
        has_thread=data.draw(st.booleans(), "has_thread"),
        helps=data.draw(st.booleans(), "helps"),
    )
    with live:
        clients = {r: live.client(r) for r in external}
        tickets = []
        while any(todo.values()):
            r = data.draw(st.sampled_from([r for r in external if todo[r]]), "next")
            event = todo[r].pop(0)
            section = _section(world, r, event.lane, event.iteration, num_iterations)
            tickets.append((event, clients[r].arrive(section[event.call], event.arrival_ns)))
        for r, client in clients.items():
            for at in marks[r]:
                client.mark(at)
        live.settle(LIMIT_S)
        for event, ticket in tickets:
            release = clients[event.rank].poll(ticket)
            assert release is not None
            assert (release.start_ns, release.end_ns) == (event.start_ns, event.end_ns)
        for client in clients.values():
            client.close()
        live.settle(LIMIT_S)
        stats = live.stats()
        assert stats.num_arrivals == stats.num_releases == len(tickets)
        engine = live.stop()
        got = sorted(
            (int(e["rank"]), int(e["call"]), *(int(e[f"{t}_ns"]) for t in TIMES))
            for e in engine.events()
        )
        want = sorted((e.rank, e.call, *(getattr(e, f"{t}_ns") for t in TIMES)) for e in events)
        assert got == want
        for r in ranks:
            assert list(engine.marks(r)) == marks[r]


TIMES = ("arrival", "start", "end")

# Later than any test lasts, so that the clock does not say what can happen.
LATER = 10**12


def _later(world: World) -> World:
    """The same world, beginning at LATER."""
    d = world.durations
    cls = len(d.ns)
    wait = Instruction(op=Op.RUN, cls=cls)
    programs = [
        Program([Lane([wait, *x.prologue], x.body, x.epilogue) for x in p.lanes])
        for p in world.programs
    ]
    durations = replace(
        d,
        ns=[*d.ns, LATER],
        spread=[*d.spread, 0.0] if d.spread else (),
        drain_ns=[*d.drain_ns, 0] if d.drain_ns else (),
    )
    return World(programs, world.communicators, world.ranks, durations)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(worlds(shares_links=True, blocks=True), st.integers(0, 3), st.data())
def test_links_are_shared_live_as_offline(
    world: World, num_iterations: int, data: st.DataObject
) -> None:
    world = _later(world)
    events, marks = shared_reference.replay(world, num_iterations)
    ranks = range(len(world.ranks))
    external = data.draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True), "external")
    has_thread = data.draw(st.booleans(), "has_thread")
    differ: list[object] = []

    def follow(client: Client, rank: int) -> None:
        for event in (e for e in events if e.rank == rank):
            section = _section(world, rank, 0, event.iteration, num_iterations)
            try:
                ticket = client.arrive(
                    section[event.call + (event.iteration == 0)], event.arrival_ns
                )
                release = client.wait(ticket, LIMIT_S)
            except ReplayError as error:
                differ.append(error)
                return
            if (release.start_ns, release.end_ns) != (event.start_ns, event.end_ns):
                differ.append((event, release))
        client.close()

    with Live(
        world,
        external=external,
        num_iterations=num_iterations,
        watch=ranks,
        ahead=num_iterations,
        has_thread=has_thread,
    ) as live:
        threads = [
            threading.Thread(target=follow, args=(live.client(r), r), daemon=True) for r in external
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not differ
        live.settle(LIMIT_S)
        engine = live.stop()
        for r in set(ranks) - set(external):
            assert list(engine.marks(r)) == marks[r]


@pytest.mark.parametrize("has_thread", [True, False])
def test_a_shared_link_is_told_by_the_clock_where_somebody_could_still_come(
    has_thread: bool,
) -> None:
    """Two transfers of 400 ms from one rank, the second begun while the first is under way."""
    transfer = 400_000_000
    receive = [Instruction(op=Op.COMM, slot=0, cls=0, is_message=True), Instruction(op=Op.MARK)]
    sender = Program([Lane(body=[])])
    world = World(
        [sender, Program([Lane(body=receive)])],
        [2, 2],
        [Rank(0, [0, 1]), Rank(1, [0]), Rank(1, [1])],
        Durations(ns=[transfer], link_classes=[0, 0]),
    )
    send = Instruction(op=Op.POST, slot=0, cls=0, is_message=True)
    with (
        Live(world, external=[0], num_iterations=1, has_thread=has_thread) as live,
        live.client(0) as client,
    ):
        begun = client.now_ns()
        first = client.arrive(send, begun)
        client.wait_until(begun + 10_000_000)
        assert client.poll(first) is None  # it could still be slowed down
        second_at = client.now_ns()
        second = client.arrive(replace(send, slot=1), second_at)
        release = client.wait(first, LIMIT_S)
        # What was left took twice as long; the second had the link to itself again.
        left = transfer - (second_at - begun)
        assert release.end_ns == second_at + 2 * left
        assert client.wait(second, LIMIT_S).end_ns == second_at + transfer + left
        client.mark(release.end_ns)


@pytest.mark.parametrize("has_thread", [True, False])
def test_releases_are_the_reference_s(has_thread: bool) -> None:
    world = small(4)
    events, marks = reference.replay(world, 5)
    mine = {r: [e for e in events if e.rank == r] for r in (1, 2)}
    with (
        Live(world, external=[1, 2], num_iterations=5, has_thread=has_thread) as live,
        live.client(1) as one,
        live.client(2) as two,
    ):
        for a, b in zip(mine[1], mine[2], strict=True):
            first = one.arrive(meeting(7), a.arrival_ns)
            assert one.poll(first) is None
            second = two.arrive(meeting(7), b.arrival_ns)
            for client, ticket, event in ((one, first, a), (two, second, b)):
                release = client.wait(ticket, LIMIT_S)
                assert (release.start_ns, release.end_ns) == (event.start_ns, event.end_ns)
                assert client.poll(ticket) == release
                client.mark(release.end_ns)
        live.settle(LIMIT_S)
        assert list(live.stop().marks(3)) == marks[3]


def test_others_stay_near_the_slowest_external_rank() -> None:
    world = small(2, iterations_meet=False)
    with Live(world, external=[0], num_iterations=1000, ahead=3) as live:
        client = live.client(0)
        client.mark(1)
        live.settle(LIMIT_S)
        client.mark(2)
        live.settle(LIMIT_S)
        assert len(live.stop().marks(1)) == 2 + 3 + 1
        client.close()


def test_marks_may_be_left_out() -> None:
    world = small(2)
    with Live(world, external=[0], num_iterations=9, ahead=0) as live:
        with live.client(0) as client:
            for _ in range(9):
                client.wait(client.arrive(meeting(7), 0), LIMIT_S)
        assert len(live.stop().marks(1)) == 9


def test_late_releases_are_counted() -> None:
    with Live(small(2), external=[0], num_iterations=3) as live, live.client(0) as client:
        client.wait(client.arrive(meeting(7), client.now_ns() + 10**12), LIMIT_S)
        assert live.stats().num_late == 0
        time.sleep(0.01)
        with Live(small(2), external=[0], num_iterations=3) as other:
            with other.client(0) as late:
                time.sleep(0.01)
                release = late.wait(late.arrive(meeting(7), 0), LIMIT_S)
                now = late.now_ns()
            stats = other.stats()
    assert release.end_ns == 1_100_000
    assert stats.num_arrivals == stats.num_releases == stats.num_late == stats.num_answers == 1
    assert 10**7 - release.end_ns <= stats.late_sum_ns == stats.late_max_ns <= now
    assert sum(stats.late_log2) == sum(stats.answer_log2) == 1
    assert stats.late_log2[stats.late_max_ns.bit_length() - 1] == 1


# --- what can be wrong -----------------------------------------------------------------


def test_limit_names_who_is_missing() -> None:
    world = small(3)
    with Live(world, external=[0, 1], num_iterations=1) as live, live.client(0) as client:
        ticket = client.arrive(meeting(7))
        with pytest.raises(TimeLimitError) as caught:
            client.wait(ticket, SHORT_S)
        assert "Rank 0 in call 7, communicator 0" in caught.value.where
        assert "external rank 1, which has not made this call" in caught.value.where


def test_limit_names_the_chain_of_the_waiting() -> None:
    # 0 waits for 1, which waits for 2 before it comes.
    line = [meeting(1, slot=0), meeting(2, slot=1)]
    idle = Program([Lane()])
    world = World(
        [idle, Program([Lane(line)])],
        [2, 2],
        [Rank(0, [1]), Rank(1, [0, 1]), Rank(0, [0])],
        Durations(ns=[0, 5]),
    )
    with Live(world, external=[0, 2], num_iterations=0) as live:
        with live.client(0) as client, pytest.raises(TimeLimitError) as caught:
            client.wait(client.arrive(meeting(2)), SHORT_S)
        assert "waits for rank 1 (lane 0, iteration 0) in call 1" in caught.value.where
        assert "waits for external rank 2" in caught.value.where


@pytest.mark.parametrize("spin_ns", [0, 10**12])
@pytest.mark.parametrize("has_thread", [True, False])
def test_circle_is_found(has_thread: bool, spin_ns: int) -> None:
    # 0 comes to slot 0 first, 1 to slot 1.
    program = Program([Lane()])
    world = World([program], [2, 2], [Rank(0, [0, 1]), Rank(0, [0, 1])], Durations(ns=[0, 5]))
    raised: list[BaseException] = []

    def come(client: Client, slot: int) -> None:
        try:
            client.wait(client.arrive(meeting(slot, slot=slot)), LIMIT_S)
        except ReplayError as error:
            raised.append(error)

    begun = time.monotonic()
    with (
        Live(
            world, external=[0, 1], num_iterations=0, has_thread=has_thread, client_spin_ns=spin_ns
        ) as live,
        live.client(0) as zero,
        live.client(1) as one,
    ):
        threads = [threading.Thread(target=come, args=a) for a in ((zero, 0), (one, 1))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(LIMIT_S)
    assert [type(e) for e in raised] == [DeadlockError] * 2
    assert "external rank" in str(raised[0])
    assert time.monotonic() - begun < LIMIT_S / 2


def test_rank_that_ended_is_named() -> None:
    with Live(small(3), external=[0, 1], num_iterations=1) as live:
        live.client(1).close()
        with (
            live.client(0) as client,
            pytest.raises(DeadlockError, match="rank 1, which has ended"),
        ):
            client.wait(client.arrive(meeting(7)), LIMIT_S)


def test_calls_that_do_not_fit_end_the_run() -> None:
    with Live(small(2), external=[0], num_iterations=1) as live, live.client(0) as client:
        with pytest.raises(ReplayError, match="do not fit together") as caught:
            client.wait(client.arrive(meeting(9, form=1)), LIMIT_S)
        assert "rank 0 in call 9" in caught.value.where.lower()
        with pytest.raises(ReplayError, match="do not fit together"):
            client.arrive(meeting(9))


@pytest.mark.parametrize(
    "call", [meeting(slot=5), Instruction(op=Op.COMM, cls=9), Instruction(op=Op.COMM, slot=-1)]
)
def test_call_that_cannot_be_ends_the_run(call: Instruction) -> None:
    with (
        Live(small(2), external=[0], num_iterations=1) as live,
        live.client(0) as client,
        pytest.raises(ReplayError, match="cannot be"),
    ):
        client.wait(client.arrive(call), LIMIT_S)


def test_refusals() -> None:
    world = small(2)
    for external in ([], [2], [-1], [0, 0]):
        with pytest.raises(ReplayError, match="external"):
            Live(world, external=external, num_iterations=1)
    with Live(world, external=[0], num_iterations=1) as live:
        with pytest.raises(ReplayError, match="not external"):
            live.client(1)
        with pytest.raises(ReplayError, match="in a live run"):
            live.engine.run(1)
        with live.client(0) as client:
            with pytest.raises(ReplayError, match="attached before"):
                live.client(0)
            with pytest.raises(ReplayError, match="ticket"):
                client.wait(3, LIMIT_S)
            with pytest.raises(ReplayError, match="ticket"):
                client.poll(-1)
    for address in ("", "x", f"{os.getpid()}:0:1", f"{os.getpid()}:99999:1", "1:2", "1:2:3:4"):
        with pytest.raises(ReplayError, match="No replay engine"):
            attach(address, 0)


def test_only_so_many_calls_are_open() -> None:
    with Live(small(3), external=[0, 1], num_iterations=1) as live, live.client(0) as one:
        tickets = [one.arrive(meeting(7), 0) for _ in range(1024)]
        with pytest.raises(BusyError, match="Too many calls"):
            one.arrive(meeting(7), 0)
        with live.client(1) as two:
            two.arrive(meeting(7), 0)
            assert one.wait(tickets[0], LIMIT_S).end_ns == 1_100_000
            later = one.arrive(meeting(7), 0)
        assert later == 1024
        with pytest.raises(ReplayError, match="ticket"):
            one.wait(tickets[0], LIMIT_S)


# --- ends of any kind --------------------------------------------------------------------


@pytest.mark.parametrize("has_thread", [True, False])
def test_close_wakes_who_waits(has_thread: bool) -> None:
    live = Live(small(3), external=[0, 1], num_iterations=1, has_thread=has_thread)
    client = live.client(0)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait(client.arrive(meeting(7)), LIMIT_S)
        except ReplayError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(SHORT_S)
    begun = time.monotonic()
    live.close()
    waiter.join(LIMIT_S)
    assert time.monotonic() - begun < 2
    assert [type(e) for e in raised] == [ClosedError]
    with pytest.raises(ClosedError):
        client.arrive(meeting(7))
    with pytest.raises(ClosedError):
        live.stats()
    client.close()
    live.close()


def test_a_thousand_runs_leave_nothing() -> None:
    world = small(3)
    resident = []
    for n in range(1000):
        with Live(world, external=[0], num_iterations=2) as live:
            client = live.client(0)
            ticket = client.arrive(meeting(7), 0)
            if n % 2:
                client.wait(ticket, LIMIT_S)
            if n % 3:
                client.close()
        client.close()
        if n in (200, 999):
            gc.collect()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert resident[1] - resident[0] < 8 << 20


FORK = """
live = Live(world(2), external=[0], num_iterations=1)
client = live.client(0)
if os.fork() == 0:
    sys.exit(0)  # with all that ends at exit
assert os.wait()[1] == 0
print(client.wait(client.arrive(call, 0), 20).end_ns)
"""


def test_fork_that_exits_ends_nothing() -> None:
    with python(FORK) as process:
        assert process.communicate(timeout=LIMIT_S)[0] == "1100000\n"


def test_forgotten_objects_end_by_themselves() -> None:
    live = Live(small(2), external=[0], num_iterations=1)
    client = live.client(0)
    client.arrive(meeting(7))
    del live, client


HEAD = """
import os, sys, time
from crystalllm.replay.live import Live, attach
from crystalllm.replay.world import *
call = Instruction(op=Op.COMM, cls=1, call=7)
def world(n):
    run, mark = Instruction(op=Op.RUN), Instruction(op=Op.MARK)
    return World([Program([Lane(body=[run, call, mark])])], [n], [Rank(0, [0])] * n,
                 Durations(ns=[1_000_000, 100_000]))
"""


@contextmanager
def python(body: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        # Python 3.12 warns of a fork beside threads, which is what one test is about.
        [sys.executable, "-Wignore::DeprecationWarning", "-c", HEAD + body, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


CLIENT = """
rank, n = int(sys.argv[2]), int(sys.argv[3])
with attach(sys.argv[1], rank) as client:
    print("attached", flush=True)
    for k in range(n):
        release = client.wait(client.arrive(call, 1000 * rank + 2_000_000 * k), 20)
        client.mark(release.end_ns)
        print(release.end_ns, flush=True)
    time.sleep(60 if n == 1 else 0)  # for one who is killed
"""


def test_two_processes() -> None:
    n = 200
    with Live(small(3), external=[1, 2], num_iterations=n) as live:
        one, two = (python(CLIENT, live.address, rank, n) for rank in (1, 2))
        with one as first, two as second:
            outs = [p.communicate(timeout=LIMIT_S)[0].split() for p in (first, second)]
        ends = [0]
        for k in range(n):
            ends.append(max(ends[-1] + 1_000_000, 2000 + 2_000_000 * k) + 100_000)
        assert outs == [["attached", *map(str, ends[1:])]] * 2
        assert live.stats().num_releases == 2 * n
        assert len(live.stop().marks(0)) == n


@pytest.mark.parametrize("helps", [True, False])
def test_killed_client_ends_the_run(helps: bool) -> None:
    with (
        Live(small(3), external=[0, 1], num_iterations=9, helps=helps) as live,
        live.client(0) as client,
        python(CLIENT, live.address, 1, 1) as other,
    ):
        assert other.stdout is not None
        assert other.stdout.readline() == "attached\n"
        ticket = client.arrive(meeting(7), 0)
        assert client.wait(ticket, LIMIT_S).end_ns == 1_100_000
        other.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(DiedError) as caught:
            client.wait(client.arrive(meeting(7), 0), LIMIT_S)
        assert time.monotonic() - begun < 2
        assert caught.value.where == f"Rank 1, process {other.pid}"


ENGINE = """
spin = int(sys.argv[2])
with Live(world(3), external=[0, 1], num_iterations=9, client_spin_ns=spin) as live:
    print(live.address, flush=True)
    time.sleep(0.3 if sys.argv[1] == "stop" else 60)
"""


@pytest.mark.parametrize("spin_ns", [0, 10**12])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_end_of_the_engine_s_process_wakes_who_waits(how: str, spin_ns: int) -> None:
    with python(ENGINE, how, spin_ns) as engine:
        assert engine.stdout is not None
        with attach(engine.stdout.readline().strip(), 0) as client:
            ticket = client.arrive(meeting(7), 0)
            if how == "kill":
                threading.Timer(SHORT_S, engine.kill).start()
            with pytest.raises(DiedError if how == "kill" else ClosedError):
                client.wait(ticket, LIMIT_S)
        if how == "kill":
            with pytest.raises(ReplayError, match="No replay engine"):
                attach(f"{engine.pid}:3:1", 1)


def test_process_that_leaves_in_order_has_ended() -> None:
    with (
        Live(small(3), external=[0, 1], num_iterations=9) as live,
        live.client(0) as client,
        python(CLIENT, live.address, 1, 0) as other,
    ):
        other.wait(LIMIT_S)
        with pytest.raises(DeadlockError, match="rank 1, which has ended"):
            client.wait(client.arrive(meeting(7), 0), LIMIT_S)


def test_other_processes_need_the_thread() -> None:
    with (
        Live(small(2), external=[0], num_iterations=1, has_thread=False) as live,
        pytest.raises(ReplayError, match="no thread"),
    ):
        attach(live.address, 0)


def test_eager_sender_is_not_held() -> None:
    send = Instruction(op=Op.COMM, cls=1, end=End.SELF, is_root=True, is_message=True)
    receive = Instruction(op=Op.COMM, cls=1, end=End.AFTER_DATA, is_message=True)
    mark = Instruction(op=Op.MARK)
    world = World(
        [Program([Lane()]), Program([Lane([receive, mark])])],
        [2],
        [Rank(0, [0]), Rank(1, [0])],
        Durations(ns=[0, 50], drain_ns=[0, 3]),
    )
    with Live(world, external=[0], num_iterations=0) as live, live.client(0) as client:
        assert client.wait(client.arrive(send, 100), LIMIT_S).end_ns == 150
        live.settle(LIMIT_S)
        assert list(live.stop().marks(1)) == [153]


# --- without Python --------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("sanitizer", ["", "address,undefined", "thread"])
def test_in_cpp(tmp_path: Path, sanitizer: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    program = tmp_path / "live_test"
    sources = [*ROOT.glob("nccl/replay/*.cpp"), ROOT / "nccl/replay/tests/live_test.cpp"]
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"] if sanitizer else []
    command = [compiler, "-O1", "-g", "-std=c++20", "-pthread", *flags, f"-I{ROOT / 'nccl'}"]
    subprocess.run([*command, *sources, "-o", program], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
