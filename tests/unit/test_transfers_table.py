"""Transfer times from nccl-tests output and CSV: reading, and looking up."""

from __future__ import annotations

import json

import pytest

from crystalllm.errors import UserError
from crystalllm.placement import Placement
from crystalllm.transfers import nccl_tests
from crystalllm.transfers.table import TransferTable
from crystalllm.transfers.transfer import Transfer

RANK = (
    "#  Rank {rank:2d} Group  0 Pid {pid:6d} on {host:>10s} device {device:2d} [0x1b] NVIDIA H200\n"
)
HEADER = (
    "#\n"
    "#                                                              out-of-place"
    "                       in-place          \n"
    "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    "     time   algbw   busbw #wrong\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       "
    "     (us)  (GB/s)  (GB/s)       \n"
)
FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 17.2\n#\n"


def _devices(num_ranks, num_nodes):
    each = num_ranks // num_nodes
    return "".join(
        RANK.format(rank=r, pid=100 + r, host=f"node{r // each}", device=r % each)
        for r in range(num_ranks)
    )


def _line(size, us, *, names="float     sum      -1"):
    body = f"{us:>7}  {1.0:6.2f}  {1.75:6.2f}       0"
    return f"{size:12d}  {size // 4:12d}     {names}  {body}  {body}\n"


def _text(program="all_reduce_perf", ranks=8, nodes=1, sizes=((1024, "20.00"), (4096, "25.50"))):
    return (
        f"# nccl-tests version 2.17.6\n# Collective test starting: {program}\n"
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 1 "
        "iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0\n#\n# Using devices\n"
        + _devices(ranks, nodes)
        + HEADER
        + "".join(_line(size, us) for size, us in sizes)
        + FOOTER
        + f"# Collective test concluded: {program}\n"
    )


def _read(tmp_path, text, name="out.txt"):
    path = tmp_path / name
    path.write_text(text)
    return nccl_tests.read(path)


def _facts(rows):
    return [(r.kind, str(r.placement), r.num_bytes, r.ns) for r in rows]


def test_text_is_read_with_ranks_and_nodes(tmp_path):
    rows = _read(tmp_path, _text(ranks=16, nodes=2))
    assert _facts(rows) == [
        ("all_reduce", "16x2", 1024, 20_000.0),
        ("all_reduce", "16x2", 4096, 25_500.0),
    ]
    assert rows[0].machine == "NVIDIA H200"
    assert rows[0].where.endswith(
        f"line {_text(ranks=16, nodes=2).splitlines().index(_line(1024, '20.00').rstrip()) + 1}"
    )


def test_several_tests_in_one_log_are_kept_apart(tmp_path):
    log = (
        "+ mpirun -np 8 ./build/all_reduce_perf -b 1K -e 4K\n"
        + _text()
        + "node0:100:100 [0] NCCL INFO 8 coll channels\n"
        + _text("reduce_scatter_perf", 4, 1, ((2048, "1112"),))
    )
    assert _facts(_read(tmp_path, log)) == [
        ("all_reduce", "8x1", 1024, 20_000.0),
        ("all_reduce", "8x1", 4096, 25_500.0),
        ("reduce_scatter", "4x1", 2048, 1_112_000.0),
    ]


def test_older_and_wider_formats_are_read(tmp_path):
    start = "# nThread 1 nGpus 2 minBytes 8\n" + _devices(2, 1)
    body = "   12.50    1.00    0.50  0e+00    13.00    1.00    0.50  0e+00\n"
    columns = "time   algbw   busbw  error     time   algbw   busbw  error\n"
    # No column of the operation; the name of the test is in that of the file.
    old = (
        start
        + f"#       size         count    type    {columns}"
        + f"     1024   256   float {body}"
    )
    assert _facts(_read(tmp_path, old, "all_gather_perf.log")) == [
        ("all_gather", "2x1", 1024, 12_500.0)
    ]
    # The operation's column is there and empty.
    empty = start + f"#  size  count  type  redop  {columns}" + f" 1024  256  float         {body}"
    assert _facts(_read(tmp_path, empty, "alltoall_perf.log")) == [
        ("all_to_all", "2x1", 1024, 12_500.0)
    ]
    # Per-iteration columns, a timestamp, and mpirun's labels.
    wide = (
        "# Collective test starting: sendrecv_perf\n"
        + start
        + "#  size  count  type  redop  root  time algbw busbw #wrong i_min i_max i_p99 i_cv% "
        "time algbw busbw #wrong i_min i_max i_p99 i_cv% timestamp\n"
        + "1024 256 float none -1 12.5 1 1 0 1 2 3 4 13.0 1 1 N/A 1 2 3 4 2026-01-02 03:04:05\n"
    )
    labelled = "".join(f"[1,0]<stdout>:{line}\n" for line in wide.splitlines())
    for text in (wide, labelled):
        assert _facts(_read(tmp_path, text)) == [("sendrecv", "2x1", 1024, 12_500.0)]
    # Of size 0 nothing was sent.
    none = _text(sizes=((0, "0.12"), (8, "20.00")))
    assert [r.num_bytes for r in _read(tmp_path, none)] == [8]


def _json(**changes):
    """Two processes on two nodes with four GPUs each, as nccl-tests writes it."""
    found = {
        "version": 2,
        "args": ["./build/all_gather_perf", "-g", "4"],
        "config": {
            "nthreads": 1,
            "ngpus": 4,
            "devices": [
                {"rank": 0, "hostname": "a", "device_info": "NVIDIA H200"},
                {"rank": 4, "hostname": "b", "device_info": "NVIDIA H200"},
            ],
        },
        "results": [
            {
                "size": 4096,
                "count": 128,
                "type": "float",
                "out_of_place": {"time": 33.25, "alg_bw": 0.1, "bus_bw": 0.1, "nwrong": 0.0},
                "in_place": {"time": 30.0, "alg_bw": 0.1, "bus_bw": 0.1, "nwrong": 0.0},
            }
        ],
    }
    return json.dumps({**found, **changes})


def test_json_counts_the_gpus_of_each_process(tmp_path):
    assert _facts(_read(tmp_path, _json(), "out.json")) == [("all_gather", "8x2", 4096, 33_250.0)]


CSV = "source,op,gpu,ranks,nodes,network,size_bytes,time_us_oop\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_text()[: _text().index("25.50") + 3], r"line 19: 6 values under 13 columns"),
        (_text().replace("25.50", "25.5O"), r"line 19: time is '25.5O'"),
        (_text().replace("25.50", "-1.00"), r"line 19: time is '-1.00'"),
        (
            _text().replace("     time   algbw", "  cputime   algbw"),
            r"line 16: cputime.*without -C",
        ),
        (_text().replace("#  Rank", "#  Wank"), r"line 18.*Keep the lines '# Rank"),
        (_text("hypercube_perf"), r"line 18: hypercube_perf.*all_reduce_perf"),
        ("hello\n", "has no transfer times"),
        (_json()[:-20], r"line 1: .*column"),
        (_json(results=[{"size": 8}, {"size": 8, "out_of_place": {"time": "nan"}}]), "result 1"),
        (_json(results=[{"size": 8, "out_of_place": {"cpu_time": 3.0}}]), "without -C"),
        (_json(config={"nthreads": 1, "ngpus": 1, "devices": []}), "no devices"),
        (_json(args=["./my_test"]), "test of nccl-tests that ran is not known"),
        (
            CSV + "s,all_reduce,H200,8,1,n,1024,20\ns,all_reduce,H200,8,1,n,2048\n",
            r"line 3: not as",
        ),
        (CSV + "s,all_reduce,H200,8,1,n,1024,abc\n", r"line 2: time_us_oop is 'abc'"),
        (CSV + "s,all_reduce,H200,2,4,n,1024,20\n", r"line 2: 2 ranks on 4 nodes"),
        (CSV + "s,allreduce,H200,8,1,n,1024,20\n", r"line 2: op is 'allreduce'"),
    ],
)
def test_damaged_files_are_refused_with_file_and_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        _read(tmp_path, text)
    assert str(tmp_path / "out.txt") in caught.value.where


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot be read.*none"):
        TransferTable.load(tmp_path / "none")


# --- looking up --------------------------------------------------------------------------


def _transfer(kind="all_reduce", num_bytes=1024, placement="8x1"):
    return Transfer(kind, num_bytes, "float32", Placement.parse(placement), "nccl")


def _table(tmp_path, *rows):
    """From (op, ranks, nodes, bytes, µs)."""
    text = CSV + "".join(f"s,{op},H200,{r},{n},net,{size},{us}\n" for op, r, n, size, us in rows)
    (tmp_path / "t.csv").write_text(text)
    return TransferTable.load(tmp_path / "t.csv")


def test_times_between_two_sizes_follow_a_power(tmp_path):
    table = _table(tmp_path, *(("all_reduce", 8, 1, s, s**0.5) for s in (1024, 4096, 1 << 20)))
    for size in (1024, 2048, 4096, 65536):
        found = table.find(_transfer(num_bytes=size))
        assert found.ns == pytest.approx(1000 * size**0.5, rel=1e-3)
        assert found.source == "table"
    assert "between 1024 and 4096" in table.find(_transfer(num_bytes=2048)).assumptions
    assert "as measured" in table.find(_transfer(num_bytes=4096)).assumptions


def test_outside_the_measured_sizes_there_is_latency_and_bandwidth(tmp_path):
    table = _table(tmp_path, ("all_reduce", 8, 1, 1000, 20), ("all_reduce", 8, 1, 2000, 30))
    small = table.find(_transfer(num_bytes=1))
    assert small.ns == 20_000
    assert "smallest measured, 1000 bytes" in small.assumptions
    large = table.find(_transfer(num_bytes=12_000))
    assert large.ns == 130_000  # 10 µs for every 1000 bytes
    assert "beyond the largest measured, 2000 bytes, at 0.1 GB/s" in large.assumptions
    # Where a larger size took less, its own bandwidth counts.
    table = _table(tmp_path, ("broadcast", 8, 1, 1000, 20), ("broadcast", 8, 1, 2000, 10))
    assert table.find(_transfer("broadcast", 4000)).ns == 20_000


def test_placements_between_measured_ones(tmp_path):
    rows = [("all_gather", 8 * n, n, 1 << 20, 100.0 * n) for n in (1, 2, 8)]
    table = _table(tmp_path, *rows, ("all_gather", 2, 1, 1 << 20, 25))
    found = table.find(_transfer("all_gather", 1 << 20, "32x4"))
    assert found.ns == pytest.approx(400_000)
    assert "32x4 between 16x2 and 64x8" in found.assumptions
    assert table.find(_transfer("all_gather", 1 << 20, "4x1")).ns == pytest.approx(50_000, abs=1)
    # Neither beyond what was measured, nor with other numbers of ranks per node.
    for placement in ("128x16", "8x2", "8x8"):
        assert table.find(_transfer("all_gather", 1 << 20, placement)) is None
    assert table.find(_transfer("all_reduce", 1 << 20, "8x1")) is None


def test_messages_and_barriers_have_their_tests(tmp_path):
    table = _table(
        tmp_path,
        ("sendrecv", 8, 1, 1024, 10),
        ("sendrecv", 16, 2, 1024, 40),
        ("all_reduce", 8, 1, 1024, 20),
    )
    assert table.find(_transfer("send", 1024, "2x1")).ns == 10_000
    assert table.find(_transfer("recv", 1024, "2x2")).ns == 40_000
    assert table.find(_transfer("barrier", 4, "8x1")).ns == 20_000


def test_repeated_measurements_give_their_median(tmp_path):
    table = _table(tmp_path, *(("all_reduce", 8, 1, 1024, us) for us in (10, 90, 20)))
    found = table.find(_transfer())
    assert (found.ns, found.count) == (20_000, 3)


def test_two_machines_in_one_table_are_refused(tmp_path):
    (tmp_path / "t.csv").write_text(
        CSV + "s,all_reduce,H200,8,1,n,8,20\ns,all_reduce,A100,8,1,n,8,20\n"
    )
    with pytest.raises(UserError, match=r"2 machines.*line 2 is H200 n.*line 3 is A100 n"):
        TransferTable.load(tmp_path / "t.csv")
