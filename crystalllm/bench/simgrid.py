"""A replayed world in SimGrid, another simulator, as far as MPI has its calls.

The world becomes an MPI program (nccl/replay/bench/simgrid.c): the same groups, and
the same order of collectives, of messages, and of gradients reduced meanwhile, which
are MPI_Iallreduce. It has less to do than the engine: nothing is computed between
calls, every call carries one float, and gradient reductions do not wait for each
other. It does more per call: a collective is its messages, each a flow in a network,
by the algorithm that SMPI chooses unasked (of those tried, none was faster).

Debian's libsimgrid-dev has smpicc and smpirun.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crystalllm import native
from crystalllm.replay.world import Instruction, Op, Program, World

NOT_INSTALLED = "not installed"
_SOURCE = native.REPLAY / "bench" / "simgrid.c"
_RANKS_PER_HOST = 8
_COMPILE_LIMIT_S = 60
_LIMIT_S = 120
# The order of `enum what` in simgrid.c.
_ALLREDUCE, _REDUCTION, _REDUCED, _RECEIVE, _SEND, _SENT = range(6)
_PARTICIPATE = {_ALLREDUCE, _REDUCTION, _RECEIVE, _SEND}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What SimGrid did.

    Args:
        state: Its version, or why there is no number.
        participations: Calls that ranks took part in.
        seconds: Of this machine, from the first call to the last.
        simulated_s: What it says that took.
    """

    state: str
    participations: int = 0
    seconds: float = 0.0
    simulated_s: float = 0.0

    @property
    def participations_per_s(self) -> float | None:
        return self.participations / self.seconds if self.seconds else None


def measure(world: World, *, num_iterations: int = 1, limit_s: float = _LIMIT_S) -> Measured:
    """Runs the world in SimGrid on this machine; `state` says so where that cannot be.

    Args:
        world: As of `crystalllm.bench.replay.world`: lane 1 reduces what lane 0 signals.
        num_iterations: Of its bodies.
        limit_s: Of smpirun, which is killed then.
    """
    if shutil.which("smpirun") is None or shutil.which("smpicc") is None:
        return Measured(state=NOT_INSTALLED)
    with tempfile.TemporaryDirectory(prefix="crystal-simgrid-") as name:
        folder = Path(name)
        num_hosts = -(-len(world.ranks) // _RANKS_PER_HOST)
        (folder / "world.h").write_text(header(world, num_iterations=num_iterations))
        (folder / "platform.xml").write_text(_platform(num_hosts))
        hosts = "".join(f"h{i}:{_RANKS_PER_HOST}\n" for i in range(num_hosts))
        (folder / "hosts").write_text(hosts)
        compile_ = ["smpicc", "-O2", "-I.", "-o", "world", str(_SOURCE)]
        run = ["smpirun", "-np", str(len(world.ranks)), "-no-privatize"]
        run += ["-platform", "platform.xml", "-hostfile", "hosts"]
        run += ["--cfg=smpi/simulate-computation:no", "--log=root.thres:critical", "./world"]
        try:
            version = _run(["smpirun", "-version"], folder, _COMPILE_LIMIT_S)
            _run(compile_, folder, _COMPILE_LIMIT_S)
            found = json.loads(_run(run, folder, limit_s).strip().splitlines()[-1])
        except _Failed as failure:
            return Measured(state=str(failure))
    match = re.search(r"version (\S+)", version)
    return Measured(state=f"SimGrid {match[1] if match else 'of unknown version'}", **found)


def num_participations(world: World, *, num_iterations: int = 1) -> int:
    """What the generated program counts: its collectives, sends and receives."""
    counts = [sum(what in _PARTICIPATE for what, *_ in _steps(p)) for p in world.programs]
    return sum(counts[rank.program] for rank in world.ranks) * num_iterations


def header(world: World, *, num_iterations: int) -> str:
    """world.h, which simgrid.c includes."""
    programs = [_steps(program) for program in world.programs]
    messages = {i.slot for p in world.programs for i in p.lanes[0].body if i.is_message}
    groups = {slot for p in programs for what, slot, _ in p if what in (_ALLREDUCE, _REDUCTION)}
    connections = [rank.connections for rank in world.ranks]
    slots = range(len(connections[0]))
    members: dict[int, list[int]] = {}
    for rank, mine in enumerate(connections):
        for slot in messages:
            members.setdefault(mine[slot], []).append(rank)

    def peer(rank: int, slot: int) -> int:
        others = [r for r in members.get(connections[rank][slot], ()) if r != rank]
        return others[0] if slot in messages and others else -1

    num_reductions = max(sum(what == _REDUCTION for what, *_ in p) for p in programs)
    num_handles = 1 + max(handle for p in programs for *_, handle in p)
    lines = [
        f"#define NUM_RANKS {len(connections)}",
        f"#define NUM_SLOTS {len(slots)}",
        f"#define NUM_HANDLES {num_handles}",
        f"#define NUM_REDUCTIONS {max(1, num_reductions)}",
        f"#define NUM_ITERATIONS {num_iterations}",
        *(
            f"static const struct step program_{n}[] = {_rows(steps)};"
            for n, steps in enumerate(programs)
        ),
        "static const struct step* const programs[] = "
        f"{_row([f'program_{n}' for n in range(len(programs))])};",
        f"static const int lengths[] = {_row([len(p) for p in programs])};",
        f"static const int is_group[NUM_SLOTS] = {_row([int(s in groups) for s in slots])};",
        f"static const int program_of[NUM_RANKS] = {_row([r.program for r in world.ranks])};",
        f"static const int connections[NUM_RANKS][NUM_SLOTS] = {_rows(connections)};",
        "static const int peers[NUM_RANKS][NUM_SLOTS] = "
        f"{_rows([[peer(rank, slot) for slot in slots] for rank in range(len(connections))])};",
    ]
    return "\n".join(lines) + "\n"


def _steps(program: Program) -> list[tuple[int, int, int]]:
    """(what, slot, handle) of lane 0; what lane 1 does at its signals starts there."""
    body, other = program.lanes[0].body, list(program.lanes[1].body)
    steps = []
    for i in body:
        if i.op is Op.SIGNAL:
            awaited = other.pop(0)
            assert awaited.op is Op.AWAIT, awaited
            assert awaited.slot == i.slot, awaited
            while other and other[0].op is Op.COMM:
                steps.append((_REDUCTION, other.pop(0).slot, 0))
        elif (what := _what(i)) is not None:
            steps.append((what, i.slot, i.handle))
    assert [i.op for i in other] in ([], [Op.SIGNAL]), other
    return steps


def _what(i: Instruction) -> int | None:
    match i.op:
        case Op.COMM:
            return _RECEIVE if i.is_message else _ALLREDUCE
        case Op.POST:
            assert i.is_message, i
            return _SEND
        case Op.WAIT:
            return _SENT
        case Op.AWAIT:
            return _REDUCED
    return None  # what is computed, and marks


def _row(values: Sequence[object]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"


def _rows(rows: Sequence[Sequence[object]]) -> str:
    return _row([_row(row) for row in rows])


def _platform(num_hosts: int) -> str:
    """Hosts of eight cores, each with a link to one switch and one inside."""
    return f"""<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="cluster" prefix="h" suffix="" radical="0-{num_hosts - 1}" core="{_RANKS_PER_HOST}"
           speed="1Tf" bw="50GBps" lat="2us" loopback_bw="400GBps" loopback_lat="1us"/>
</platform>
"""


class _Failed(Exception):
    pass


def _run(command: list[str], folder: Path, limit_s: float) -> str:
    """Its output. It, and what it started, has ended when this returns."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise _Failed(f"{command[0]} took longer than {limit_s:g} s") from None
            raise
    if process.returncode != 0:
        said = " | ".join((errors.strip() or out.strip() or "no output").splitlines()[-3:])
        raise _Failed(f"{command[0]} ended with code {process.returncode}: {said}")
    return out
