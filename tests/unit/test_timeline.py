"""The virtual timeline: right times, Perfetto's rules, Kineto's names, HolisticTraceAnalysis."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kineto_files
import pandas as pd
import pytest
from chrome_trace import faults, nanoseconds

from crystalllm import tables
from crystalllm.capture import capture
from crystalllm.config import load_job
from crystalllm.errors import UserError
from crystalllm.replay import offline, program
from crystalllm.replay.engine import Engine
from crystalllm.replay.live import Live
from crystalllm.replay.program import Capture, Replayable
from crystalllm.replay.steps import follow
from crystalllm.replay.world import Op
from crystalllm.timeline import chosen_ranks, write_timeline
from crystalllm.timeline.calls import kineto_dtype
from crystalllm.timeline.choice import MAX_RANKS
from crystalllm.timeline.chrome import exact_us, whole_us
from crystalllm.traces.kineto import import_traces
from crystalllm.traces.vocabulary import dtype_of
from crystalllm.transfers.uniform import uniform_transfers

ITERATIONS = 4

# Two stages of two ranks: activations between them, gradients within a stage in two
# all_reduces that are under way at the same time, a broadcast that rank 3 is the root of.
TRAIN = """
import argparse, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
dist.init_process_group("gloo")
rank = dist.get_rank()
stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
weight = torch.nn.Parameter(torch.ones(64, 64))
optimizer = torch.optim.SGD([weight], lr=0.1)
other = (rank + 2) % 4
for step in range(steps):
    x = torch.randn(8, 64)
    if rank >= 2:
        dist.recv(x, other)
    loss = (x @ weight).square().mean()
    if rank < 2:
        dist.send(x, other)
    loss.backward()
    scale = torch.ones(16)
    works = [
        dist.all_reduce(t, group=stages[rank // 2], async_op=True) for t in (weight.grad, scale)
    ]
    for work in works:
        work.wait()
    dist.broadcast(torch.ones(4), src=3)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: Any, virtual: Any) -> Capture:
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(TRAIN)
    job = {
        "program": str(folder / "train.py"),
        "arguments": "--steps {iterations}",
        "world_size": 4,
        "iterations": 6,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    capture(load_job(str(folder / "job.yaml")), folder / "capture", limit_s=60)
    return Capture.read(folder / "capture")


@dataclass
class Replay:
    """A world that was replayed, with everybody watched."""

    capture: Capture
    made: Replayable
    engine: Engine

    def write(self, path: Path, **more: Any) -> dict[str, Any]:
        return write_timeline(
            path,
            capture=self.capture,
            made=self.made,
            engine=self.engine,
            num_iterations=ITERATIONS,
            **more,
        )


def _built(captured: Capture, *, draw: bool = False) -> Replayable:
    table = captured.captured_durations()
    # Odd, and of one magnitude however busy the machine was that captured.
    table.segments = {
        at: replace(d, ns=20_000 + d.ns % 100_003) for at, d in table.segments.items()
    }
    table.transfers = uniform_transfers(captured.calls, latency_ns=133_333, bytes_per_s=1e9)
    return program.build(captured, table, draw=draw, seed=5)


@pytest.fixture(scope="module")
def replay(captured: Capture) -> Iterator[Replay]:
    made = _built(captured)
    with Engine(made.world) as engine:
        engine.watch(range(4))
        engine.run(ITERATIONS)
        yield Replay(captured, made, engine)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def _complete(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [
        e
        for e in trace["traceEvents"]
        if e["ph"] == "X" and all(e.get(key) == value for key, value in wanted.items())
    ]


def _totals(trace: dict[str, Any], rank: int) -> dict[str, int]:
    """Nanoseconds by name of what the rank's lane did, waits by their parts."""
    names = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    found: dict[str, int] = defaultdict(int)
    for e in _complete(trace, pid=rank):
        if names[e["tid"]] == "host:0" and e["cat"] in ("kernel", "phase"):
            found["computation" if e["cat"] == "kernel" else e["name"]] += nanoseconds(e["dur"])
    return found


def _expected(engine: Engine, rank: int, iterations: slice) -> dict[str, int]:
    rows = engine.breakdown(rank)[iterations]
    return {
        "computation": int(rows["compute_ns"].sum()),
        "waiting for peers": int(rows["wait_ns"].sum()),
        "waiting for the other side": int(rows["bubble_ns"].sum()),
        "transfer": int(rows["exposed_ns"].sum()),
    }


@pytest.mark.parametrize("draw", [False, True])
def test_a_lane_shows_where_the_time_went(captured: Capture, tmp_path: Path, draw: bool) -> None:
    made = _built(captured, draw=draw)
    with Engine(made.world) as engine:
        engine.watch(range(4))
        engine.run(ITERATIONS)
        found = Replay(captured, made, engine).write(tmp_path / "timeline.json.gz")
        assert found["ranks"] == [0, 2, 3]  # one of each role
        assert found["iterations"] == [3, 4]
        assert found["left_out"] == {"ranks": [], "num_other_ranks": 1, "num_other_iterations": 2}
        trace = _read(tmp_path / "timeline.json.gz")
        assert found["num_events"] == len(trace["traceEvents"])
        for rank in found["ranks"]:
            totals, expected = _totals(trace, rank), _expected(engine, rank, slice(-2, None))
            assert totals == {name: ns for name, ns in expected.items() if ns}
            marks = engine.marks(rank)
            steps = _complete(trace, pid=rank, cat="user_annotation")
            assert [nanoseconds(e["ts"]) for e in steps] == list(marks[-3:-1])
            assert [nanoseconds(e["dur"]) for e in steps] == list(marks[-2:] - marks[-3:-1])


def test_perfetto_shows_all_of_it(replay: Replay, tmp_path: Path) -> None:
    replay.write(tmp_path / "t.json.gz", ranks=range(4), iterations=range(6), per_rank=tmp_path)
    trace = _read(tmp_path / "t.json.gz")
    assert faults(trace) == []
    calls = [e for e in _complete(trace, cat="kernel") if "Collective name" in e["args"]]
    events = replay.engine.events()
    assert len(calls) == len(events)
    # Two all_reduces of a rank are under way together: they have threads of their own.
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"iterations", "host:0", "communication default_pg"} <= names
    assert any(name.endswith(" (2)") for name in names)
    # Every message has its arrow.
    arrows = [e for e in trace["traceEvents"] if e["ph"] == "f"]
    num_sends = sum(e["args"]["Collective name"] == "send" for e in calls)
    assert len(arrows) == num_sends > 0
    for rank in range(4):
        assert faults(_read(tmp_path / f"rank-{rank}.json.gz")) == []


def test_faults_are_found(replay: Replay, tmp_path: Path) -> None:
    """The rules can fail: each of these is dropped or misread by Perfetto."""
    replay.write(tmp_path / "t.json.gz")
    for change, says in (
        (lambda e: e.update(dur=e["dur"] + 1), "crosses the end of"),
        (lambda e: e.update(ts="0"), "ts is no time"),
        (lambda e: e.update(dur=-1), "dur is no duration"),
        (lambda e: e.update(tid=2**32), "tid is no uint32"),
        (lambda e: e.update(pid=e["pid"] + 1), "is in processes"),
        (lambda e: e.update(ph="Q"), "unknown phase"),
    ):
        trace = _read(tmp_path / "t.json.gz")
        change(_complete(trace, cat="phase")[0])
        assert says in " ".join(faults(trace))


def test_waiting_and_transfer_are_apart(replay: Replay, tmp_path: Path) -> None:
    replay.write(tmp_path / "t.json.gz", ranks=range(4), iterations=[2])
    trace = _read(tmp_path / "t.json.gz")
    events = replay.engine.events()
    events = events[(events["iteration"] == 2) & (events["rank"] == 3)]
    found = [e for e in _complete(trace, pid=3, cat="kernel") if "Key" in e["args"]]
    assert sorted(nanoseconds(e["ts"]) for e in found) == sorted(events["arrival_ns"])
    phases = _complete(trace, pid=3, cat="phase")
    for call in found:
        arrival, start, end = (
            call["args"][f"{name} (ns)"] for name in ("Arrival", "Transfer start", "End")
        )
        assert (arrival, end - arrival) == (nanoseconds(call["ts"]), nanoseconds(call["dur"]))
        parts = {
            (e["name"].split()[0], nanoseconds(e["ts"]), nanoseconds(e["dur"]))
            for e in phases
            if e["tid"] == call["tid"] and arrival <= nanoseconds(e["ts"]) < end
        }
        expected = {("waiting", arrival, start - arrival), ("transfer", start, end - start)}
        assert parts == {p for p in expected if p[2]}


def test_names_are_those_of_kineto(replay: Replay, tmp_path: Path) -> None:
    real = kineto_files.load(kineto_files.real("hta") / "nccl_parser_config_nccl_data.json.gz")
    replay.write(tmp_path / "t.json.gz")
    ours = _read(tmp_path / "t.json.gz")
    assert real["distributedInfo"].keys() - ours["distributedInfo"].keys() == {"nccl_version"}
    their_group, our_group = (t["distributedInfo"]["pg_config"][0] for t in (real, ours))
    assert their_group.keys() == our_group.keys()

    def arguments(trace: dict[str, Any]) -> dict[str, type]:
        for event in _complete(trace, cat="kernel"):
            if "Collective name" in event.get("args", {}):
                return {name: type(value) for name, value in event["args"].items()}
        raise AssertionError("no communication kernel")

    theirs, mine = arguments(real), arguments(ours)
    # What a kernel on a GPU has and ours, which is none, has not.
    of_launch = {
        "External id", "queued", "context", "registers per thread", "shared memory",
        "blocks per SM", "warps per SM", "grid", "block", "est. achieved occupancy %",
    }  # fmt: skip
    assert theirs.keys() - mine.keys() == of_launch
    assert all(mine[name] is theirs[name] for name in theirs.keys() & mine.keys())


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "int64", "uint8", "bool", "float8_e4m3fn", "", "int16"],
)
def test_element_types_are_spelled_as_kineto_does(dtype: str) -> None:
    assert dtype_of(kineto_dtype(dtype)) == dtype


def test_our_own_reader_of_kineto_finds_the_calls(replay: Replay, tmp_path: Path) -> None:
    """Traces of all ranks, imported as those of a real run, give the calls of the capture."""
    replay.write(
        tmp_path / "t.json.gz", ranks=range(4), iterations=range(1, 5), per_rank=tmp_path / "ranks"
    )
    import_traces(sorted((tmp_path / "ranks").iterdir()), tmp_path / "again")
    again = tables.CALLS.read(tmp_path / "again" / "calls.parquet")[0].to_pandas()
    names = ["kind", "dtype", "group_identity", "peer_rank", "in_elements", "out_elements"]
    calls, speakers = replay.capture.calls, replay.capture.speakers()
    for rank in range(4):
        speaker = speakers[int(replay.capture.ranks.at[rank, "role"])]
        if speaker != rank:
            continue  # its calls were not kept
        of_rank = calls[(calls["rank"] == rank)].set_index("call")
        events = replay.engine.events()
        of_bodies = events[(events["rank"] == rank) & (events["iteration"] >= 1)]
        of_bodies = of_bodies[of_bodies["iteration"] <= ITERATIONS]
        expected = of_rank.loc[of_bodies["call"]][names].astype(str)
        found = again[again["rank"] == rank][names].astype(str)
        assert found.to_numpy().tolist() == expected.to_numpy().tolist()


def test_equal_replays_give_equal_bytes(captured: Capture, replay: Replay, tmp_path: Path) -> None:
    made = _built(captured)
    with Engine(made.world) as engine:
        engine.watch([3, 2, 1, 0])
        engine.run(ITERATIONS)
        other = Replay(captured, made, engine)
        other.write(tmp_path / "other.json.gz", per_rank=tmp_path / "other")
    replay.write(tmp_path / "one.json.gz", per_rank=tmp_path / "one")
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "other.json.gz").read_bytes()
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()


def test_a_replay_offline_leaves_one(captured: Capture, tmp_path: Path) -> None:
    table = captured.captured_durations()
    table.transfers = uniform_transfers(captured.calls, latency_ns=5000, bytes_per_s=1e9)
    offline.replay(captured, tmp_path, table, iterations=3, ranks=[2, 0])
    trace = _read(tmp_path / "timeline.json.gz")
    assert faults(trace) == []
    assert trace["crystalllm"]["ranks"] == [2, 0]
    names = {path.name for path in (tmp_path / "timeline").iterdir()}
    assert names == {"rank-0.json.gz", "rank-2.json.gz"}
    offline.replay(captured, tmp_path, table, iterations=3)
    assert not list(tmp_path.glob("timeline*"))


def test_what_is_left_out_is_said(replay: Replay, tmp_path: Path) -> None:
    found = replay.write(tmp_path / "t.json.gz", ranks=[3, 1, 0], iterations=[4], max_events=60)
    assert found["ranks"] == [3]
    assert found["left_out"] == {
        "ranks": [1, 0],
        "num_other_ranks": 1,
        "num_other_iterations": 3,
    }
    trace = _read(tmp_path / "t.json.gz")
    assert faults(trace) == []
    (text,) = [e["name"] for e in _complete(trace, cat="Trace")]
    assert text == "1 of 4 ranks, iterations 4 of a replay; 2 ranks left out to stay small"
    assert trace["crystalllm"]["left_out"]["ranks"] == [1, 0]
    assert trace["distributedInfo"]["rank"] == 3


def test_what_cannot_be_shown_is_refused(captured: Capture, tmp_path: Path) -> None:
    made = _built(captured)
    with Engine(made.world) as engine:
        engine.watch([1])
        engine.run(ITERATIONS)
        some = Replay(captured, made, engine)
        path = tmp_path / "t.json.gz"
        with pytest.raises(UserError, match="Calls of rank 2 were not kept"):
            some.write(path, ranks=[1, 2])
        with pytest.raises(UserError, match="There is no rank 4"):
            some.write(path, ranks=[4])
        with pytest.raises(UserError, match=r"0 \(the prologue\) to 5 \(the epilogue\)"):
            some.write(path, ranks=[1], iterations=[3, 6])
        with pytest.raises(UserError, match="needs a rank"):
            some.write(path, ranks=[])
        assert not path.exists()
        # Nobody of its choice was watched but who is asked for.
        assert some.write(path, ranks=[1])["ranks"] == [1]


def test_chosen_are_sandbox_roles_and_those_who_share_a_group(captured: Capture) -> None:
    assert chosen_ranks(captured) == [0, 2, 3]
    assert chosen_ranks(captured, sandbox=[1]) == [1, 0, 2, 3]
    # Never fewer than sandbox ranks and roles.
    assert chosen_ranks(captured, sandbox=[1], max_ranks=1) == [1, 0, 2, 3]
    big = replace(
        captured,
        groups=pd.DataFrame({"members": [list(range(1000)), [500, 7], [7, 9, 11]]}),
    )
    found = chosen_ranks(big, sandbox=[7])
    assert found[:8] == [7, 0, 2, 3, 500, 9, 11, 8]
    assert len(found) == MAX_RANKS


@pytest.mark.parametrize("ns", [0, 1, 57, 999, 1001, 8_390_381_090, 123_456_789_012_345])
def test_times_are_exact_for_who_cuts_and_who_rounds(ns: int) -> None:
    for step in range(200):
        us = json.loads(json.dumps(exact_us(ns + step)))
        assert nanoseconds(us) == round(us * 1000) == ns + step
        assert abs(whole_us(ns + step) * 1000 - ns - step) <= 500


# --- sandbox ranks ---------------------------------------------------------------------


@dataclass
class Ran:
    """A live run in which one rank did what it does offline."""

    engine: Engine
    segments: pd.DataFrame
    communication: pd.DataFrame


@contextmanager
def _live(
    replay: Replay, rank: int, *, num_calls: int | None = None, watch: Sequence[int] = range(4)
) -> Iterator[Ran]:
    """Up to a call, at which the program of `rank` ends; or all of it."""
    world, speaker = replay.made.world, 0
    events = replay.engine.events()
    offline = follow(world, rank, events[events["rank"] == rank], ITERATIONS)
    calls = offline.calls[:num_calls]
    until = calls[-1].arrival_ns if num_calls else max(offline.ends)
    waits = {s.call: s for s in offline.steps if s.op == Op.WAIT and s.end_ns <= until}
    words = replay.capture.calls
    words = words[words["rank"] == speaker].set_index("call")
    names = ["kind", "key", "group_identity", "group_desc", "group_size"]
    rows = []
    with (
        Live(
            world, external=[rank], num_iterations=ITERATIONS, watch=watch, has_thread=False
        ) as live,
        live.client(rank) as client,
    ):
        tickets = [client.arrive(call.instruction, call.arrival_ns) for call in calls]
        for mark in offline.marks:
            if mark <= until:
                client.mark(mark)
        live.settle(10)
        for number, (call, ticket) in enumerate(zip(calls, tickets, strict=True)):
            release, wait = client.poll(ticket), waits.get(call)
            start, end = (release.start_ns, release.end_ns) if release else (-1, -1)
            rows.append(
                {
                    "rank": rank,
                    "iteration": call.iteration,
                    "call": number,
                    "captured_call": call.instruction.call,
                    "lane": "host:0",
                    **words.loc[call.instruction.call, names].to_dict(),
                    "bytes": 4 * words.at[call.instruction.call, "in_elements"],
                    "transport": "timed",
                    "arrival_ns": call.arrival_ns,
                    "start_ns": start,
                    "release_ns": end,
                    "transfer_ns": end - start if release else -1,
                    "waited_ns": wait.end_ns - wait.start_ns if wait else -1,
                    "end_ns": wait.end_ns if wait else -1,
                    "lateness_ns": 0,
                }
            )
        runs = [s for s in offline.steps if s.op == Op.RUN and s.end_ns <= until]
        classes = [replay.made.classes[s.cls] for s in runs]
        segments = pd.DataFrame(
            {
                "rank": rank,
                "role": [c[1] for c in classes],
                "iteration": [s.iteration for s in runs],
                "lane": [c[2] for c in classes],
                "section": [c[3] for c in classes],
                "position": [c[4] for c in classes],
                "start_ns": [s.start_ns for s in runs],
                "duration_ns": [s.end_ns - s.start_ns for s in runs],
            }
        )
        yield Ran(live.stop(), segments, pd.DataFrame(rows))


def _essence(trace: dict[str, Any]) -> list[str]:
    """What ranks did and when; not how that is known."""
    found = []
    for e in trace["traceEvents"]:
        if e["ph"] == "X" and e["cat"] in ("kernel", "cpu_op", "phase"):
            of_us = {"Transport", "Lateness (ns)"}
            args = {k: v for k, v in e.get("args", {}).items() if k not in of_us}
            found.append(json.dumps(e | {"args": args}, sort_keys=True))
        elif e["ph"] in "sf" or e["name"] == "thread_name":
            found.append(json.dumps(e, sort_keys=True))
    return sorted(found)


def test_a_sandbox_rank_that_does_the_same_looks_the_same(replay: Replay, tmp_path: Path) -> None:
    shown = {"ranks": [1, 0, 2, 3], "iterations": [1, 4]}
    replay.write(tmp_path / "offline.json.gz", **shown)
    with _live(replay, 1) as ran:
        live = replace(replay, engine=ran.engine)
        sandbox = {1: (ran.segments, ran.communication)}
        live.write(tmp_path / "live.json.gz", sandbox=sandbox, **shown)
        assert live.write(tmp_path / "t.json.gz", sandbox=sandbox)["ranks"] == [1, 0, 2, 3]
    offline, live = (_read(tmp_path / f"{name}.json.gz") for name in ("offline", "live"))
    assert faults(live) == []
    assert _essence(live) == _essence(offline)
    (name,) = [
        e["args"]["name"]
        for e in live["traceEvents"]
        if e["name"] == "process_name" and e["pid"] == 1
    ]
    assert name == "rank 1, x2=0 x1=1, role 0, sandbox"


def test_with_nobody_watched_the_sandbox_is_shown(replay: Replay, tmp_path: Path) -> None:
    with _live(replay, 1, watch=()) as ran:
        live = replace(replay, engine=ran.engine)
        sandbox = {1: (ran.segments, ran.communication)}
        assert live.write(tmp_path / "t.json.gz", sandbox=sandbox)["ranks"] == [1]
    assert faults(_read(tmp_path / "t.json.gz")) == []


def test_what_a_sandbox_rank_measured_is_shown(replay: Replay, tmp_path: Path) -> None:
    """Late releases, calls of which only the arrival and the end are known, overlaps."""
    with _live(replay, 1) as ran:
        calls = ran.communication
        (late, real) = calls[(calls["iteration"] == 4) & (calls["waited_ns"] > 0)].index[:2]
        for column in ("waited_ns", "end_ns", "lateness_ns"):
            calls.loc[late, column] += 1000
        calls.loc[real, ["start_ns", "release_ns", "transfer_ns"]] = -1
        calls.loc[real, "transport"] = "real"
        live = replace(replay, engine=ran.engine)
        live.write(tmp_path / "t.json.gz", sandbox={1: (ran.segments, calls)}, ranks=[1])
    trace = _read(tmp_path / "t.json.gz")
    assert faults(trace) == []
    (phase,) = _complete(trace, name="late")
    assert nanoseconds(phase["dur"]) == 1000
    assert nanoseconds(phase["ts"]) == calls.at[late, "release_ns"]
    # The computation after it began earlier than the wait is said to have ended.
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert "host:0 (2)" in names
    (call,) = [e for e in _complete(trace) if e.get("args", {}).get("Transport") == "real"]
    assert nanoseconds(call["ts"]) == calls.at[real, "arrival_ns"]
    assert nanoseconds(call["ts"]) + nanoseconds(call["dur"]) == calls.at[real, "end_ns"]
    within = [
        e
        for e in _complete(trace, cat="phase", tid=call["tid"])
        if call["ts"] <= e["ts"] < call["ts"] + call["dur"]
    ]
    assert within == []


def test_a_run_that_ended_early_is_shown_as_far_as_it_came(replay: Replay, tmp_path: Path) -> None:
    events = replay.engine.events()
    of_rank = events[(events["rank"] == 1) & (events["iteration"] <= 3)]
    with _live(replay, 1, num_calls=len(of_rank) - 1) as ran:
        sandbox = {1: (ran.segments, ran.communication)}
        live = replace(replay, engine=ran.engine)
        found = live.write(tmp_path / "t.json.gz", sandbox=sandbox)
        assert found["iterations"] == [2, 3]
        assert len(ran.engine.marks(1)) < len(replay.engine.marks(1))
    trace = _read(tmp_path / "t.json.gz")
    assert faults(trace) == []
    last = _complete(trace, name="ProfilerStep#3")
    ends = [e["ts"] + e["dur"] for e in _complete(trace, pid=1)]
    assert last[0]["ts"] + last[0]["dur"] == pytest.approx(max(ends), abs=1e-6)
    # The broadcast at which it ended has arrived, and nothing came after it.
    assert max(ends) * 1000 >= of_rank["arrival_ns"][-2]


# --- streams ---------------------------------------------------------------------------


def test_on_streams_the_host_launches_and_calls_are_the_stream_s_own(
    captured: Capture, tmp_path: Path
) -> None:
    """The same job as if its calls and computation were kernels on streams."""
    events = captured.events.copy()
    lane = events["lane"].astype(str)
    is_call = events["kind"].isin(["COMM_COLL", "COMM_SEND", "COMM_RECV"])
    lane[is_call] = "stream:20"
    heavy = (events["kind"] == "COMP") & (events["event"] % 3 == 0)
    lane[heavy] = "stream:7"
    events["name"] = events["name"].astype(str).where(~heavy, "sgemm")
    events["lane"] = lane
    gpu = replace(captured, events=events)
    table = gpu.captured_durations()
    table.transfers = uniform_transfers(gpu.calls, latency_ns=33_333, bytes_per_s=1e9)
    made = program.build(gpu, table)
    with Engine(made.world) as engine:
        engine.watch(range(4))
        engine.run(ITERATIONS)
        Replay(gpu, made, engine).write(tmp_path / "t.json.gz", ranks=range(4))
    trace = _read(tmp_path / "t.json.gz")
    assert faults(trace) == []
    names = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert not any(name.startswith("communication") for name in names.values())
    kinds = defaultdict(set)
    for e in _complete(trace, pid=0):
        if e["cat"] in ("kernel", "cpu_op"):
            kinds[names[e["tid"]]].add((e["cat"], re.sub(r"\d+", "N", e["name"])))
    assert ("cpu_op", "computation N") in kinds["host:0"]
    assert all(category == "cpu_op" for category, _ in kinds["host:0"])
    assert kinds["stream:7"] == {("kernel", "sgemm")}
    assert ("kernel", "nccl_all_reduce_VirtualKernel") in kinds["stream:20"]


# --- HolisticTraceAnalysis -------------------------------------------------------------


def _analysis(files: dict[int, Path]) -> Any:
    hta = pytest.importorskip(
        "hta.trace_analysis", reason="HolisticTraceAnalysis is not installed (requirements/hta.txt)"
    )
    return hta.TraceAnalysis(
        trace_files={rank: str(path) for rank, path in files.items()},
        trace_dir=str(next(iter(files.values())).parent),
        include_last_profiler_step=True,
    )


def _agrees(analysis: Any, engine: Engine, rank: int, *, within_us: float) -> None:
    rows = engine.breakdown(rank)[-2:]
    compute = rows["compute_ns"].sum() / 1000
    communication = sum(rows[f"{part}_ns"].sum() for part in ("wait", "bubble", "exposed")) / 1000
    found = analysis.get_temporal_breakdown(visualize=False).set_index("rank").loc[rank]
    assert found["compute_time(us)"] == pytest.approx(compute, abs=within_us)
    assert found["non_compute_time(us)"] == pytest.approx(communication, abs=within_us)
    assert found["idle_time(us)"] == pytest.approx(rows["host_ns"].sum() / 1000, abs=within_us)
    assert found["kernel_time(us)"] == pytest.approx(compute + communication, abs=within_us)


def _overlap(replay: Replay, rank: int) -> tuple[float, float]:
    """Share of the time of communication, in percent, in which the rank's lane computes.

    And by how much it may be off where every moment is rounded to a microsecond.
    """
    events = replay.engine.events()
    events = events[events["rank"] == rank]
    steps = follow(replay.made.world, rank, events, ITERATIONS).steps
    calls = events[(events["iteration"] >= 3) & (events["iteration"] <= ITERATIONS)]
    busy: list[list[int]] = []
    for start, end in sorted(zip(calls["arrival_ns"], calls["end_ns"], strict=True)):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], int(end))
        else:
            busy.append([int(start), int(end)])
    both = [
        min(end, s.end_ns) - max(start, s.start_ns)
        for start, end in busy
        for s in steps
        if s.op == Op.RUN and s.end_ns > start and s.start_ns < end
    ]
    total = sum(end - start for start, end in busy)
    return 100 * sum(both) / total, 100 * 1000 * (len(both) + len(busy)) / total


@pytest.mark.filterwarnings("ignore:The inplace keyword")
def test_hta_finds_the_breakdown(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay.write(tmp_path / "timeline.json.gz", ranks=[3, 0, 1, 2], per_rank=tmp_path / "ranks")
    # One trace of each rank, in whole microseconds: sums are off by 1 us for each stretch.
    for rank in (0, 3):
        path = tmp_path / "ranks" / f"rank-{rank}.json.gz"
        one = _analysis({rank: path})
        num_stretches = len(_complete(_read(path), cat="kernel"))
        _agrees(one, replay.engine, rank, within_us=num_stretches)
        found = one.get_comm_comp_overlap(visualize=False).set_index("rank").loc[rank]
        share, within = _overlap(replay, rank)
        assert found["comp_comm_overlap_pctg"] == pytest.approx(share, abs=within)
        kernels = one.get_gpu_kernel_breakdown(visualize=False)[1]
        names = set(kernels[kernels["kernel_type"] == "COMMUNICATION"]["name"])
        assert "nccl_all_reduce_VirtualKernel" in names
    # The timeline is the trace of its first rank; to the nanosecond, where nothing is rounded.
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    exact = _analysis({3: tmp_path / "timeline.json.gz"})
    _agrees(exact, replay.engine, 3, within_us=0.01)
    found = exact.get_comm_comp_overlap(visualize=False).set_index("rank").loc[3]
    assert found["comp_comm_overlap_pctg"] == pytest.approx(_overlap(replay, 3)[0], abs=0.0051)


def test_hta_reads_a_folder_of_ranks(replay: Replay, tmp_path: Path) -> None:
    pytest.importorskip("hta.common.trace_file")
    from hta.common.trace_file import get_trace_files

    replay.write(tmp_path / "t.json.gz", ranks=range(4), per_rank=tmp_path / "ranks")
    found = get_trace_files(str(tmp_path / "ranks"))
    assert {rank: Path(path).name for rank, path in found.items()} == {
        rank: f"rank-{rank}.json.gz" for rank in range(4)
    }
