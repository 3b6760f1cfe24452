"""Call records: what is in them, and that equal calls have equal keys."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from crystalllm import logical, tables
from crystalllm.run import times_path

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
group = dist.new_group([0, 1, 2, 3], group_desc="four")
dist.all_reduce(torch.ones(3))
if dist.get_rank() < 4:
    dist.all_gather_into_tensor(torch.zeros(8), torch.ones(2), group=group)
dist.broadcast(torch.ones(5), src=2)
dist.barrier()
"""


def _run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "crystalllm", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        check=False,
    )


def _record(tmp_path, name, rank=1):
    (tmp_path / "train.py").write_text(PROGRAM)
    path = tmp_path / name
    done = _run(
        "run", "--world-size", 8, "--rank", rank, "--record", path, "--", "train.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return path


def test_record_is_a_table_with_its_provenance(tmp_path):
    path = _record(tmp_path, "calls.parquet")
    table, provenance = tables.CALLS.read(path)
    rows = table.to_pylist()
    assert [r["kind"] for r in rows] == ["all_reduce", "all_gather", "broadcast", "barrier"]
    assert [r["count"] for r in rows] == [3, 2, 5, 0]
    assert [r["group_size"] for r in rows] == [8, 4, 8, 8]
    assert rows[1]["group_desc"] == "four"
    assert rows[1]["out_elements"] == 8
    assert (rows[2]["root"], rows[2]["root_rank"]) == ("other", 2)
    assert provenance["rank"] == 1
    assert provenance["world_size"] == 8
    assert provenance["program"] == ["train.py"]
    assert provenance["unverified"] is False
    times, _ = tables.CALL_TIMES.read(times_path(path))
    arrivals = times["arrival_ns"].to_pylist()
    assert arrivals == sorted(arrivals)
    assert "arrival_ns" not in table.column_names


def test_the_same_run_gives_the_same_bytes(tmp_path):
    first, second = _record(tmp_path, "a.parquet"), _record(tmp_path, "b.parquet")
    assert first.read_bytes() == second.read_bytes()


def test_a_crash_leaves_the_calls_up_to_it(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM + "\nraise ValueError('here')\n")
    path = tmp_path / "calls.parquet"
    done = _run(
        "run", "--world-size", 8, "--rank", 0, "--record", path, "--", "train.py", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "ValueError: here" in done.stderr
    assert tables.CALLS.read(path)[0].num_rows == 4


def test_the_calls_are_shown_by_group_and_kind(tmp_path):
    done = _run("calls", _record(tmp_path, "calls.parquet"), cwd=tmp_path)
    assert done.returncode == 0
    for word in ("four", "all_gather", "8:1", "rank 1 of 8, 4 calls"):
        assert word in done.stdout


def _symmetric():
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(i, world, 4))) for i in range(4)]
    mine = groups[rank % 4]
    dist.all_reduce(torch.ones(3), group=mine)
    line = list(range(rank % 4, world, 4))
    at = line.index(rank)
    if at + 1 < len(line):
        dist.send(torch.ones(2), line[at + 1], group=mine)
    if at > 0:
        dist.recv(torch.ones(2), line[at - 1], group=mine)
    dist.reduce(torch.ones(2), dst=line[0], group=mine)
    return logical.world().take_records()["key"]


def test_ranks_in_the_same_place_have_the_same_keys(virtual):
    def keys(rank):
        return virtual(_symmetric, rank=rank, world=64, keep_records=True)

    interior = keys(20)
    assert interior == keys(21) == keys(24) == keys(35)
    assert interior != keys(0), "the root's call is another than its peers'"
    assert interior != keys(60), "the last of the line does not send"
    assert "peer=1 " in interior[1] + " "
    assert "peer=15w" in interior[2]


def test_split_sizes_are_data_and_no_part_of_the_key(virtual):
    def program():
        for n in (1, 2):
            splits = [n] * 8
            dist.all_to_all_single(torch.zeros(8 * n), torch.ones(8 * n), splits, splits)
        dist.all_to_all_single(torch.zeros(8), torch.ones(8))
        dist.all_to_all_single(torch.zeros(16), torch.ones(16))
        records = logical.world().take_records()
        return records["key"], records["count"], records["in_splits"]

    keys, counts, splits = virtual(program, world=8, keep_records=True)
    assert keys[0] == keys[1]
    assert keys[2] != keys[3]
    assert counts == [-1, -1, 1, 2]
    assert splits == [[1] * 8, [2] * 8, [], []]


@pytest.mark.parametrize("change", ["dtype", "count", "op", "group", "kind"])
def test_whatever_is_structure_changes_the_key(virtual, change):
    def program():
        a, b = torch.ones(4), torch.ones(4)
        group = dist.new_group([0, 1, 2, 3])
        dist.all_reduce(a)
        if change == "dtype":
            dist.all_reduce(b.double())
        elif change == "count":
            dist.all_reduce(b[:3])
        elif change == "op":
            dist.all_reduce(b, op=dist.ReduceOp.MAX)
        elif change == "group":
            dist.all_reduce(b, group=group)
        else:
            dist.broadcast(b, src=0)
        return logical.world().take_records()["key"]

    first, second = virtual(program, world=8, keep_records=True)
    assert first != second
