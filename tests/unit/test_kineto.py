"""Import of Kineto traces: real ones, ones from the installed torch, and what people report."""

from __future__ import annotations

import copy
import random
import subprocess
import sys

import kineto_files as files
import pytest

from crystalllm import tables
from crystalllm.errors import UserError
from crystalllm.traces.clocks import estimate
from crystalllm.traces.kineto import import_traces
from crystalllm.traces.vocabulary import dtype_of

NCCL = "hta/nccl_parser_config_nccl_data.json.gz"
DLRM = "param/dlrm_kineto.tar.gz"
TABLES = (
    tables.RANKS, tables.GROUPS, tables.CALLS, tables.CALL_TIMES, tables.EVENTS, tables.EVENT_TIMES
)  # fmt: skip


def _import(folder, traces, **options):
    """Structure and tables (as frames) of traces that are given as dicts or as paths."""
    paths = traces if isinstance(traces, list) else files.save(folder / "in", traces)
    structure = import_traces(paths, folder / "out", **options)
    frames = {t.name: t.read(folder / "out" / f"{t.name}.parquet")[0].to_pandas() for t in TABLES}
    return structure, frames


def _structure_of_calls(frames):
    """All that does not hang on where the trace was cut."""
    columns = ["rank", "key", "in_elements", "out_elements", "group_identity", "seq", "mark"]
    return frames["calls"][columns].values.tolist()


def test_eight_real_ranks_give_one_role_with_ends_that_agree(tmp_path):
    structure, frames = _import(tmp_path, [files.real(DLRM)])
    assert (structure["num_captured"], structure["num_distinct"]) == (8, 1)
    calls = frames["calls"]
    a2a, ar = "all_to_all", "all_reduce"
    for rank in range(8):
        mine = calls[calls["rank"] == rank]
        assert mine["kind"].tolist() == [a2a, a2a, a2a, a2a, ar, a2a, ar, ar]
        # Only the fourth shows that its splits are uneven: 3392 put in, something else got out.
        assert mine["count"].tolist() == [768, 3, 48, -1, 394241, 768, 112, 226960]
        assert mine["seq"].tolist() == list(range(8))
    assert calls["reduce_op"].tolist() == ["", "", "", "", "sum", "", "sum", "sum"] * 8
    assert structure["unknown"]["splits"] == 40
    assert structure["groups_from"] == {"assumed: the default group": 64}
    ends = frames["call_times"].groupby("call")["release_ns"]
    assert (ends.max() - ends.min()).max() <= 7_000
    assert max(abs(c["offset_ns"]) for c in structure["clock"].values()) <= 3_000


def test_recorded_durations_differ_where_ends_agree(tmp_path):
    _, frames = _import(tmp_path, [files.real(DLRM)])
    events = frames["events"].merge(frames["event_times"], on=["rank", "event"])
    last = events[(events["kind"] == "COMM_COLL") & (events["call"] == 2)]["duration_ns"]
    assert last.max() > 5 * last.min()


def test_events_of_a_real_rank_hang_together(tmp_path):
    _, frames = _import(tmp_path, [files.real(NCCL)])
    events = frames["events"].merge(frames["event_times"], on=["rank", "event"])
    trace = files.load(files.real(NCCL))["traceEvents"]
    gpu = [e for e in trace if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    assert events["lane"].astype(str).str.startswith("stream:").sum() == len(gpu)
    assert (events["kind"] == "COMM_COLL").sum() == 21
    assert (events["kind"] == "RECORD").sum() == 1077
    assert (events["kind"] == "WAIT").sum() == 84
    assert (events["kind"] == "SYNC").sum() == 25
    assert events["event"].tolist() == list(range(len(events)))
    assert events["start_ns"].is_monotonic_increasing
    launched = events[events["after"] >= 0]
    assert len(launched) == len(gpu)
    launches = events.loc[launched["after"]]
    assert set(launches["lane"]) <= {"host:0", "host:1"}
    assert (launches["start_ns"].values <= launched["start_ns"].values).all()
    # The trace's own clock: this kernel is the third of NCCL.
    third = events[events["call"] == 2].iloc[0]
    assert third["start_ns"] == 1711964646000000000 + 4458676524716094
    assert (third["duration_ns"], third["bytes"]) == (3306963, 4 * 2049000)


def test_identical_input_gives_identical_bytes(tmp_path):
    traces = files.all_reduces(4)
    for name in ("a", "b"):
        _import(tmp_path / name, traces)
    names = sorted(p.name for p in (tmp_path / "a" / "out").iterdir())
    assert names == sorted([*(f"{t.name}.parquet" for t in TABLES), "structure.json"])
    for name in names:
        first, second = (tmp_path / n / "out" / name for n in ("a", "b"))
        assert first.read_bytes() == second.read_bytes(), name


def _shift(trace, microseconds, *, drop_before=None):
    """A clock that is off, and a profiler that started late."""
    trace = copy.deepcopy(trace)
    kept = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and (drop_before is None or event["ts"] >= drop_before):
            event["ts"] += microseconds
            kept.append(event)
    return {**trace, "traceEvents": kept}


def test_hyperloom_1292_shifted_clock_and_late_start_are_found_on_real_ranks(tmp_path):
    traces = files.members(files.real(DLRM))
    _, before = _import(tmp_path / "before", traces)
    kernels = sorted(
        e["ts"]
        for e in traces[3]["traceEvents"]
        if e.get("cat") == "kernel" and "nccl" in e["name"]
    )
    # Rank 3's profile begins while its second all_to_all runs.
    traces[3] = _shift(traces[3], 300, drop_before=kernels[1] + 1)
    structure, after = _import(tmp_path / "after", traces)
    assert abs(structure["clock"]["3"]["offset_ns"] - 300_000) < 5_000
    others = [c["offset_ns"] for r, c in structure["clock"].items() if r != "3"]
    assert max(map(abs, others)) < 5_000
    assert structure["calls_left_out"] == {str(r): 0 if r == 3 else 2 for r in range(8)}
    columns = ["rank", "kind", "dtype", "count", "in_elements", "out_elements"]
    late = before["calls"][before["calls"]["call"] >= 2]
    assert after["calls"][columns].values.tolist() == late[columns].values.tolist()
    times = before["call_times"][before["call_times"]["call"] >= 2]
    for name in ("arrival_ns", "release_ns"):
        apart = after["call_times"][name].values - times[name].values
        assert abs(apart).max() < 5_000


def test_attention_gym_487_shifted_clock_and_dropped_steps(tmp_path):
    traces = files.all_reduces(8, steps=6)
    _, before = _import(tmp_path / "before", traces)
    # Rank 5's profiler starts two steps late: its first steps look just like those it missed.
    traces[5] = _shift(traces[5], 300, drop_before=1_020_000)
    structure, after = _import(tmp_path / "after", traces)
    assert abs(structure["clock"]["5"]["offset_ns"] - 300_000) <= 2_000
    assert set(structure["calls_left_out"].values()) == {0, 6}
    kept = before["calls"][before["calls"]["mark"] >= 2]
    columns = ["rank", "key", "mark", "seq_in_mark"]
    assert after["calls"][columns].values.tolist() == kept[columns].values.tolist()
    assert after["calls"]["seq"].tolist() == list(range(12)) * 8


def test_first_collective_whose_ends_lie_apart_does_not_count(tmp_path):
    traces = files.all_reduces(2, steps=2, per_step=2)
    first = next(e for e in traces[1]["traceEvents"] if e["cat"] == "kernel")
    first["dur"] += 400
    structure, _ = _import(tmp_path, traces)
    assert structure["clock_excluded_first_ns"] == {"2 ranks from 0, #0": 400_000}
    assert abs(structure["clock"]["1"]["offset_ns"]) <= 1_000


def test_clocks_of_a_grid_of_groups_are_recovered():
    rng = random.Random(7)
    truth = {r: rng.randrange(-400_000, 400_000) for r in range(32)}
    middle = sorted(truth.values())[15:17]
    rows = [list(range(i, i + 4)) for i in range(0, 32, 4)]
    columns = [list(range(i, 32, 4)) for i in range(4)]
    matches = {
        str(group): [
            {r: 10**18 + 10**6 * n + truth[r] + rng.randrange(3000) for r in group}
            for n in range(9)
        ]
        for group in rows + columns
    }
    clocks = estimate(sorted(truth), matches)
    for rank, offset in truth.items():
        assert abs(clocks.offset_ns[rank] - (offset - sum(middle) / 2)) < 4_000
    assert clocks.num_matches == dict.fromkeys(range(32), 18)


@pytest.mark.parametrize("where", ["kernels", "kernels and operators"])
def test_pytorch_131462_groups_are_found_without_process_group_arguments(tmp_path, where):
    trace = files.load(files.real(NCCL))
    _, before = _import(tmp_path / "before", {0: trace})
    told = {"Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype"}
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" or (
            where != "kernels" and event.get("name") == "record_param_comms"
        ):
            for key in list(event["args"]):
                if key in told or "Process Group" in key or "split size" in key:
                    del event["args"][key]
    structure, after = _import(tmp_path / "after", {0: trace})
    if where == "kernels":
        assert _structure_of_calls(after) == _structure_of_calls(before)
    else:  # this trace has no shapes, so sizes are gone with the records' arguments
        kinds = [f["calls"]["kind"].tolist() for f in (before, after)]
        assert kinds[0] == kinds[1]
        assert structure["unknown"]["size"] == 21
        assert structure["groups_from"] == {"assumed: the default group": 21}
    assert (after["events"]["kind"] == "COMM_COLL").sum() == 21


def test_chakra_152_links_survive_without_record_function_id(tmp_path):
    trace = files.load(files.real(NCCL))
    _, before = _import(tmp_path / "all", {0: trace})

    def without(*keys, of=()):
        changed = copy.deepcopy(trace)
        for event in changed["traceEvents"]:
            if not of or event.get("cat") in of:
                for key in keys:
                    event.get("args", {}).pop(key, None)
        return changed

    for i, left in enumerate(
        (without("Record function id"), without("Record function id", "External id"))
    ):
        _, after = _import(tmp_path / str(i), {0: left})
        assert _structure_of_calls(after) == _structure_of_calls(before)
    neither = without("External id", "correlation")
    for event in neither["traceEvents"]:
        if event.get("cat") == "kernel":
            event["args"].pop("Collective name", None)
    with pytest.raises(UserError, match=r"cannot be linked .*External id .*correlation id"):
        _import(tmp_path / "none", {0: neither})


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n.replace("ncclKernel_", "ncclDevKernel_"),
        lambda n: n.lower(),
        lambda n: n.replace("ncclKernel_", "nccl::"),
        lambda n: "void " + n.replace("ncclKernel_", "nccl::ncclDevKernel_"),
    ],
    ids=["ncclDevKernel_", "lower case", "nccl::", "void nccl::"],
)
def test_hta_360_kernels_are_found_by_each_of_their_names(tmp_path, rename):
    trace = files.load(files.real(NCCL))
    _, before = _import(tmp_path / "before", {0: trace})
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" and event["name"].startswith("ncclKernel_"):
            event["name"] = rename(event["name"])
    _, after = _import(tmp_path / "after", {0: trace})
    assert _structure_of_calls(after) == _structure_of_calls(before)
    assert (after["events"]["kind"] == "COMM_COLL").sum() == 21


@pytest.mark.parametrize("library", ["rcclKernel_", "oneccl::", "hccl_", "acmeComm"])
def test_hta_208_kernels_of_another_library_are_an_error(tmp_path, library):
    trace = files.load(files.real(NCCL))
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            event["name"] = event["name"].replace("ncclKernel_", library)
    with pytest.raises(UserError, match=r"other than NCCL|no communication kernel") as caught:
        _import(tmp_path, {0: trace})
    assert "rank-0.json" in caught.value.where


def test_hta_109_a_rank_of_several_without_communication_is_an_error(tmp_path):
    traces = files.all_reduces(2)
    silent = [e for e in traces[1]["traceEvents"] if "ProfilerStep" in e["name"]]
    traces[1]["traceEvents"] = silent
    with pytest.raises(UserError, match="No communication is in the trace") as caught:
        _import(tmp_path, traces)
    assert "rank-1.json" in caught.value.where
    assert "record_param_comms" in caught.value.where


@pytest.mark.parametrize("told_by", ["operator", "annotation"])
def test_pytorch_151438_uneven_list_all_to_all_keeps_each_peers_size(tmp_path, told_by):
    traces = {}
    for rank in range(4):
        # Rank r sends 11, 12, 13, 14 elements; gets 11 + r from each.
        sent, got = [[11 + i] for i in range(4)], [[11 + rank]] * 4
        maker = files.Maker(rank, 4)
        shapes = {"Input Dims": [got, sent, [], []], "Input type": ["TensorList"] * 2 + [""] * 2}
        told = {"operator_args": shapes} if told_by == "operator" else {}
        run = {"Input Dims": sent, "Input type": ["float"] * 4}
        maker.call(
            "all_to_all", 10, 90, operator="alltoall_", run_args=run,
            elements=(50, 4 * (11 + rank)), kernel="ncclDevKernel_SendRecv(ncclDevKernelArgs)",
            **told,
        )  # fmt: skip
        traces[rank] = maker.trace()
    _, frames = _import(tmp_path, traces)
    for rank, call in enumerate(frames["calls"].to_dict("records")):
        assert list(call["in_splits"]) == [11, 12, 13, 14]
        assert (call["in_elements"], call["out_elements"]) == (50, 4 * (11 + rank))
        assert call["count"] == -1
        assert list(call["out_splits"]) == []
    assert frames["events"].query("kind == 'COMM_COLL'")["bytes"].tolist() == [200] * 4


def test_pytorch_149485_splits_of_the_record_are_kept(tmp_path):
    traces = {}
    for rank in range(2):
        maker = files.Maker(rank, 2)
        splits = {"In split size": "[3, 5]", "Out split size": str([3 + 2 * rank] * 2)}
        maker.call("all_to_allv", 10, 90, elements=(8, 6 + 4 * rank), **splits)
        traces[rank] = maker.trace()
    _, frames = _import(tmp_path, traces)
    calls = frames["calls"].to_dict("records")
    assert [list(c["in_splits"]) for c in calls] == [[3, 5], [3, 5]]
    assert [list(c["out_splits"]) for c in calls] == [[3, 3], [5, 5]]


def test_two_of_128_ranks_get_the_default_group_and_say_so(tmp_path):
    paths = [files.real(f"hta/trace_filter_sampled_rank-{r}.json.gz") for r in (0, 1)]
    structure, frames = _import(tmp_path, paths)
    assert structure["world_size"] == 128
    assert structure["groups_from"] == {"assumed: the default group": 20}
    # The traces are samples: what is left of the two ranks' calls is not the same.
    assert structure["groups_unmatched"] == ["128 ranks from 0, #0"]
    assert frames["groups"]["members"].map(len).tolist() == [128]
    calls = frames["calls"]
    assert len(calls) == 20
    assert calls["kind"].value_counts().to_dict() == {
        "all_to_all": 8, "all_reduce": 8, "all_gather": 4
    }  # fmt: skip
    assert calls[calls["kind"] == "all_gather"]["out_elements"].unique().tolist() == [2**30]


def test_gloo_only_rank_34_of_300_is_read_from_its_operators(tmp_path):
    name = "hta/cpu_only_rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz"
    structure, frames = _import(tmp_path, [files.real(name)])
    assert frames["calls"]["kind"].tolist() == ["all_reduce"] * 10
    assert sorted(frames["calls"]["count"].unique()) == [321271, 2082411]
    assert structure["unknown"]["reduce_op"] == 10
    assert frames["ranks"]["rank"].tolist() == [34]
    # Eleven groups with the same members, one of them with a hashed name.
    assert frames["groups"]["creation"].tolist() == list(range(11))
    assert set(frames["groups"]["backend"]) == {"gloo"}
    assert set(frames["events"]["lane"]) == {"host:0", "host:1"}


def test_waits_name_their_records_where_the_trace_tells(tmp_path):
    name = "hta/critical_path_cuda_event_sync_multi_stream_event_sync_trace.json.gz"
    with pytest.raises(UserError, match="how many ranks"):
        _import(tmp_path, [files.real(name)])
    _, frames = _import(tmp_path, [files.real(name)], world_size=1)
    events = frames["events"].merge(frames["event_times"], on=["rank", "event"])
    (wait,) = events[events["kind"] == "WAIT"].to_dict("records")
    record = events.loc[wait["after"]]
    assert (wait["lane"], record["lane"], record["kind"]) == ("stream:24", "stream:20", "RECORD")
    before = events[(events["lane"] == "stream:20") & (events["kind"] == "COMP")]
    ended = (before["start_ns"] + before["duration_ns"])[before["event"] < record["event"]]
    assert record["start_ns"] >= ended.max()
    assert wait["start_ns"] + wait["duration_ns"] >= record["start_ns"]


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.profiler import profile
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
split = [3, 5] if rank == 0 else [5, 3]
with profile(record_shapes=True) as profiler:
    for _ in range(2):
        x = torch.ones(8, 3)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist._all_gather_base(torch.zeros(16, 3), x)
        dist.all_to_all_single(torch.zeros(8), torch.ones(8), split, split)
        dist.broadcast(torch.ones(5, dtype=torch.int64), 1)
        dist.send(x, 1, tag=4) if rank == 0 else dist.recv(x, 0, tag=4)
        both = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, x.clone(), 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        dist.barrier()
profiler.export_chrome_trace(f"{folder}/{rank}.json.gz")
"""


def test_profile_of_the_installed_torch_gives_the_calls_that_were_made(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ranks = [
        subprocess.Popen([sys.executable, tmp_path / "program.py", str(rank), tmp_path])
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    structure, frames = _import(tmp_path, [tmp_path / f"{rank}.json.gz" for rank in range(2)])
    assert structure["num_captured"] == 2
    calls = frames["calls"]
    columns = ["kind", "dtype", "count", "in_elements", "out_elements", "root", "is_async"]
    collectives = [
        ["all_reduce", "float32", 24, 24, 24, "none", False],
        ["all_reduce", "float32", 24, 24, 24, "none", True],
        ["all_gather", "float32", 24, 24, 48, "none", False],
        ["all_to_all", "float32", -1, 8, 8, "none", False],
        ["broadcast", "int64", 5, 5, 5, "?", False],
        ["barrier", "", 0, 0, 0, "none", False],
    ]
    for rank in range(2):
        mine = calls[calls["rank"] == rank]
        is_message = mine["kind"].isin(["send", "recv"])
        collectives[4][5] = "me" if rank == 1 else "other"
        assert mine[~is_message][columns].values.tolist() == collectives * 2
        assert mine[is_message]["kind"].tolist() == [["send", "recv"][rank], "send", "recv"] * 2
        assert mine[is_message]["peer_rank"].unique().tolist() == [1 - rank]
        assert mine[is_message]["tag"].tolist() == [4, 0, 0] * 2
        splits = [list(s) for s in mine["in_splits"] if len(s)]
        assert splits == [[3, 5] if rank == 0 else [5, 3]] * 2
    assert structure["groups_unmatched"] == []
    ends = frames["call_times"].merge(calls, on=["rank", "call"])
    assert (ends["release_ns"] >= ends["arrival_ns"]).all()


def test_grouped_messages_share_a_kernel_and_a_batch(tmp_path):
    traces = {}
    for rank in range(2):
        maker = files.Maker(rank, 2)
        maker.call("send", 10, 0, kernel=None, **{"Dst Rank": 1 - rank})
        maker.call("recv", 40, 0, kernel=None, **{"Src Rank": 1 - rank})
        ids = {"correlation": 5}
        maker.add("cuda_runtime", "cudaLaunchKernelExC", 70, 3, **ids)
        maker.add("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgs)", 75, 50, stream=7, **ids)
        maker.call("allreduce", 200, 300)
        traces[rank] = maker.trace()
    _, frames = _import(tmp_path, traces)
    calls = frames["calls"]
    assert calls["kind"].tolist() == ["send", "recv", "all_reduce"] * 2
    assert calls["batch"].tolist() == [0, 0, -1] * 2
    assert calls["peer_rank"].tolist() == [1, 1, -1, 0, 0, -1]
    events = frames["events"]
    assert (
        events[events["call"] >= 0]["kind"].tolist() == ["COMM_RECV", "COMM_SEND", "COMM_COLL"] * 2
    )


def test_groups_with_the_same_members_are_told_apart_on_every_rank(tmp_path):
    names = [("0", range(4)), ("c180dae7_0", range(4)), ("7", (0, 1))]
    traces = {}
    for rank in range(4):
        maker = files.Maker(rank, 4, groups=[g for g in names if rank in g[1]])
        maker.call("allreduce", 10, 90, group="c180dae7_0")
        if rank < 2:
            maker.call("allreduce", 110, 190, group="7", elements=(9, 9))
        maker.call("allreduce", 210, 290)
        traces[rank] = maker.trace()
    structure, frames = _import(tmp_path, traces)
    assert structure["groups_from"] == {"distributedInfo": 10}
    calls = frames["calls"]
    creation = calls["group_identity"].astype(str).str.rpartition("#")[2]
    assert creation[calls["group_size"] == 4].tolist() == ["1", "0"] * 4
    assert sorted(frames["ranks"]["role"]) == [0, 0, 1, 1]
    assert frames["groups"]["members"].map(list).tolist() == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_rank_lists_that_were_cut_short_follow_from_start_and_stride(tmp_path):
    maker = files.Maker(2, 80)
    stride = {"Global rank start": 0, "Global rank stride": 2, "Group size": 40}
    cut = {"Process Group Ranks": "[0, 2, 4, ..., 78]", "Process Group Name": "9"}
    maker.call("allreduce", 10, 90, **stride, **cut)
    structure, frames = _import(tmp_path, {2: maker.trace()})
    assert structure["groups_from"] == {"the calls' rank stride": 1}
    assert frames["calls"]["group_signature"].tolist() == ["40:2"]
    del maker.events[0]["args"]["Global rank start"]
    with pytest.raises(UserError, match="who is in a process group"):
        _import(tmp_path / "unknown", {2: maker.trace()})


def test_the_command_imports_and_says_what(tmp_path):
    paths = files.save(tmp_path / "in", files.all_reduces(2))
    command = [sys.executable, "-m", "crystalllm", "import", *paths, "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 of 2 ranks imported, 1 of them different; 0 calls left out")
    done = subprocess.run(
        [*command[:4], tmp_path / "no.json", "--out", tmp_path / "out"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no.json" in done.stderr


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Float", "float32"),
        ("c10::BFloat16", "bfloat16"),
        ("Float8_e4m3fn", "float8_e4m3fn"),
        ("c10::complex<float>", "complex64"),
        ("UInt16", "uint16"),
        ("UInt64", "uint64"),
        ("unsigned short", "uint16"),
        ("long int", "int64"),
        ("TensorList", ""),
    ],
)
def test_element_types_have_torch_s_names(name, dtype):
    assert dtype_of(name) == dtype
