"""How fast the replay engine is, how much memory it takes, how it grows.

The worlds are TP8, PP8 (PP16 for the largest) and data parallel for the rest:
1F1B with rendezvous messages, some 900 tensor-parallel collectives per rank and
iteration, and gradients reduced on a second lane while the first one computes.
Each size runs in a process of its own, so that its peak memory is its own. Where
SimGrid is installed, it runs an iteration of the smallest world too (`simgrid.py`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from crystalllm.bench import live, simgrid
from crystalllm.replay.engine import Engine
from crystalllm.replay.world import Durations, Instruction, Lane, Op, Program, Rank, World

_TP = 8
_MICROBATCHES = 8
_LAYERS = 14
_ITERATIONS = 3
_SIZES = (512, 4096, 8192, 65_536)
# Medians of these repetitions.
_REPEATS = {512: 9, 4096: 5, 8192: 5, 65_536: 1}
_SIMGRID_REPEATS = 3
_LIMIT_S = 900
# Classes of durations: a piece of a layer, the optimizer, then transfers.
_PIECE, _OPTIMIZER, _TP_CALL, _MESSAGE, _DP_CALL = range(5)
# An iteration of five seconds: 1F1B of 8 microbatches over 8 stages takes 15 times
# the 56 pieces and calls of each direction.
_NS = [2_600_000, 5_000_000, 300_000, 100_000, 3_000_000]


def main() -> None:
    """Prints a line per size; the last line is one JSON object."""
    found = {size: _in_a_process(size) for size in _SIZES}
    middle = found[8192]
    result = {
        "name": "replay",
        "participations_per_s": round(found[8192]["participations_per_s"]),
        "participations_per_s_by_size": {
            str(s): round(f["participations_per_s"]) for s, f in found.items()
        },
        "peak_rss_bytes_8192": middle["peak_rss_bytes"],
        "realtime_factor_8192": round(middle["simulated_s"] / middle["seconds"], 1),
        "iteration_s_8192": round(middle["simulated_s"] / _ITERATIONS, 3),
        "growth": round(
            found[512]["participations_per_s"] / found[65_536]["participations_per_s"], 2
        ),
        "query_us": live.query_us(),
        **_beside_simgrid(512, pp=8, engine_per_s=found[512]["participations_per_s"]),
    }
    print(json.dumps(result))


def _beside_simgrid(size: int, *, pp: int, engine_per_s: float) -> dict[str, Any]:
    """Its part of the result; numbers are None where SimGrid gives none, and a line says why."""
    rates = []
    for _ in range(_SIMGRID_REPEATS):
        measured = simgrid.measure(world(size, pp=pp))
        if measured.participations_per_s is None:
            print(f"{size} ranks in SimGrid: skipped, {measured.state}", flush=True)
            rates = []
            break
        rates.append(measured.participations_per_s)
    rate = statistics.median(rates) if rates else None
    ratio = round(engine_per_s / rate, 1) if rate else None
    if rate:
        print(
            f"{size} ranks in {measured.state}: {rate:.3g} participations/s; "
            f"the engine does {ratio:g} times as many",
            flush=True,
        )
    return {
        "simgrid": measured.state,
        "simgrid_participations_per_s": round(rate) if rate else None,
        "ratio_to_simgrid": ratio,
    }


def _in_a_process(size: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", f"from crystalllm.bench import replay; replay.one({size})"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LIMIT_S,
        check=True,
    )
    found = json.loads(done.stdout)
    print(
        f"{size} ranks: {found['participations_per_s']:.3g} participations/s, "
        f"{found['peak_rss_bytes'] / 1e6:.0f} MB, {found['seconds']:.3f} s for "
        f"{found['simulated_s']:.2f} s",
        flush=True,
    )
    return found


def one(size: int) -> None:
    """Runs one size in this process and prints what it took, as JSON."""
    pp = 16 if size > 8192 else 8
    with Engine(world(size, pp=pp)) as engine:
        times = []
        for _ in range(_REPEATS[size]):
            start = time.perf_counter()
            engine.run(_ITERATIONS)
            times.append(time.perf_counter() - start)
        seconds = sorted(times)[len(times) // 2]
        found = {
            "seconds": seconds,
            "simulated_s": float(engine.marks(0)[-1]) / 1e9,
            "participations_per_s": engine.num_participations / seconds,
            "calls_per_rank": engine.num_participations / size / _ITERATIONS,
            "peak_rss_bytes": _peak_rss_bytes(),
        }
    print(json.dumps(found))


def _peak_rss_bytes() -> int:
    """Of this process since it was started; getrusage would begin with its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def world(size: int, *, pp: int) -> World:
    """The world of so many ranks: rank = (stage, replica, tensor rank), the last fastest."""
    dp = size // (_TP * pp)
    sizes: list[int] = []

    def new(n: int, count: int) -> range:
        sizes.extend([n] * count)
        return range(len(sizes) - count, len(sizes))

    tp_groups, dp_groups = new(_TP, pp * dp), new(dp, pp * _TP)
    forward, backward = new(2, size), new(2, size)  # by sender
    unused = new(1, size)
    ranks = []
    for rank in range(size):
        stage, replica, tensor = rank // (dp * _TP), rank // _TP % dp, rank % _TP
        before, after = rank - dp * _TP, rank + dp * _TP
        ranks.append(
            Rank(
                stage,
                [
                    tp_groups[stage * dp + replica],
                    dp_groups[stage * _TP + tensor],
                    forward[before] if stage > 0 else unused[rank],
                    forward[rank] if stage < pp - 1 else unused[rank],
                    backward[after] if stage < pp - 1 else unused[rank],
                    backward[rank] if stage > 0 else unused[rank],
                ],
            )
        )
    programs = [_stage(stage, pp) for stage in range(pp)]
    return World(programs, sizes, ranks, Durations(ns=_NS))


# Slots of a rank's connections.
_TP_SLOT, _DP_SLOT, _FROM_BEFORE, _TO_AFTER, _FROM_AFTER, _TO_BEFORE = range(6)


def _stage(stage: int, pp: int) -> Program:
    body: list[Instruction] = []
    reduce: list[Instruction] = []

    def layers(*, reduces: bool) -> None:
        for layer in range(_LAYERS):
            for _ in range(4):
                body.append(Instruction(op=Op.RUN, cls=_PIECE))
                body.append(Instruction(op=Op.COMM, slot=_TP_SLOT, cls=_TP_CALL))
            if reduces and layer % 2:
                body.append(Instruction(op=Op.SIGNAL, slot=0))
                reduce.append(Instruction(op=Op.AWAIT, slot=0))
                reduce.append(Instruction(op=Op.COMM, slot=_DP_SLOT, cls=_DP_CALL))

    def receive(slot: int) -> None:
        body.append(Instruction(op=Op.COMM, slot=slot, cls=_MESSAGE, is_message=True))

    def send(slot: int, handle: int) -> None:
        # The last send has to be done before its buffer is used again.
        body.append(Instruction(op=Op.WAIT, handle=handle))
        body.append(
            Instruction(op=Op.POST, slot=slot, handle=handle, cls=_MESSAGE, is_message=True)
        )

    def step(kind: str, microbatch: int) -> None:
        if kind == "f":
            if stage > 0:
                receive(_FROM_BEFORE)
            layers(reduces=False)
            if stage < pp - 1:
                send(_TO_AFTER, 0)
        else:
            if stage < pp - 1:
                receive(_FROM_AFTER)
            layers(reduces=microbatch == _MICROBATCHES - 1)
            if stage > 0:
                send(_TO_BEFORE, 1)

    warm_up = min(pp - 1 - stage, _MICROBATCHES)
    for i in range(warm_up):
        step("f", i)
    for i in range(_MICROBATCHES - warm_up):
        step("f", warm_up + i)
        step("b", i)
    for i in range(_MICROBATCHES - warm_up, _MICROBATCHES):
        step("b", i)
    reduce.append(Instruction(op=Op.SIGNAL, slot=1))
    body.append(Instruction(op=Op.AWAIT, slot=1))
    body.append(Instruction(op=Op.RUN, cls=_OPTIMIZER))
    body.append(Instruction(op=Op.MARK))
    ending = [Instruction(op=Op.WAIT, handle=0), Instruction(op=Op.WAIT, handle=1)]
    return Program([Lane(body=body, epilogue=ending), Lane(body=reduce)])
