"""What inspect answers of a small capture, and how it is printed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import small_capture

from crystalllm import inspect, records, tables
from crystalllm.chosen import ranks_at
from crystalllm.errors import UserError
from crystalllm.show import show, show_calls


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    small_capture.write(folder / "capture")
    return folder


@pytest.fixture(scope="module")
def capture(job):
    return inspect.Capture(job)


def _rows(frame):
    return [tuple(row) for row in frame.itertuples(index=False)]


def test_roles(capture):
    assert _rows(inspect.roles(capture)) == [
        (0, 4, 1, 0, 3, 0, "pp=0 dp=* tp=*", 14, 4),
        (1, 4, 1, 1, 3, 4, "pp=1 dp=* tp=*", 14, 4),
    ]


def test_groups(capture):
    assert _rows(inspect.groups(capture)) == [
        ("tp", "2:1", 2, "gloo", 2, 2),
        ("world", "8:1", 8, "gloo", 1, 0),
    ]


def test_communication_by_iteration_and_in_all(capture):
    first, second = _rows(inspect.communication(capture))[:2]
    assert first == (0, "tp", "2:1", 2, "all_reduce", 2, 800, 8, 3200)
    assert second == (0, "world", "8:1", 8, "all_gather", 1, 16, 4, 64)
    assert _rows(inspect.communication(capture))[2][4:] == ("barrier", 0, 0, 1, 0)


def test_parts(capture):
    assert _rows(inspect.parts(capture)) == [(0, 0, 2, 3, 3, 3), (1, 4, 2, 3, 3, 3)]


def test_what_is_unchecked(capture):
    text = "\n".join(inspect.unchecked(capture))
    assert "6 of 8 ranks are inferred, 1 were run to check" in text
    assert "1 odd rank among them would have stayed unseen with a chance of 85.7%" in text
    assert "in roles 0" in text
    assert "2 communicators are known by symmetry only" in text


def test_the_calls_of_a_captured_and_of_an_inferred_rank(capture):
    calls, speaker = inspect.rank_calls(capture, 4)
    assert speaker == 4
    assert len(calls) == 14
    assert calls["part"].tolist() == ["prologue"] * 2 + ["body"] * 9 + ["epilogue"] * 3
    assert calls["with"][0] == "root 0"
    calls, speaker = inspect.rank_calls(capture, 7)
    assert speaker == 4
    assert calls["with"][0] == "root other", "the number would be another rank's"


@pytest.mark.parametrize(
    ("text", "expected"), [("pp=1,tp=1", (5, 2)), ("pp=1, dp=1, tp=0", (6, 1)), ("tp=0", (0, 4))]
)
def test_ranks_by_coordinates(capture, text, expected):
    found = ranks_at(capture.axes, text)
    assert (found[0], len(found)) == expected


@pytest.mark.parametrize("text", ["xp=1", "pp=2", "pp=-1", "pp", "pp=1,,", "", "pp=one"])
def test_wrong_coordinates_name_the_legal_ones(capture, text):
    with pytest.raises(UserError, match=r"pp from 0 to 1; dp from 0 to 1; tp from 0 to 1"):
        ranks_at(capture.axes, text)


def test_wrong_ranks_name_the_legal_ones(capture):
    with pytest.raises(UserError, match=r"no rank 8.*Legal are 0-7"):
        inspect.rank_calls(capture, 8)


def test_short_coordinates_say_when_not_all_combinations_belong(tmp_path):
    folder = small_capture.write(tmp_path, scale=2)
    table, provenance = tables.RANKS.read(folder / "ranks.parquet")
    role = [0 if r in (0, 1, 3, 8) else 1 for r in range(16)]
    columns = {name: table[name] for name in table.column_names}
    tables.RANKS.write(
        folder / "ranks.parquet",
        {**columns, "role": role, "representative": role},
        provenance=provenance,
    )
    assert inspect.roles(inspect.Capture(folder))["coordinates"].tolist() == [
        "pp=* dp=0-1 tp=* (4 of these 8)",
        "pp=* dp=* tp=* (12 of these 16)",
    ]


def test_pages_are_complete_in_a_file(job, capsys):
    show(job)
    text = capsys.readouterr().out
    assert "…" not in text
    for word in (
        "f00d",
        "train.py --steps 4",
        "pp=0 dp=* tp=*",
        "all_gather",
        "Unchecked",
        "3,200",
    ):
        assert word in text
    show(job / "capture", coordinates="pp=1,tp=1")
    text = capsys.readouterr().out
    assert "2 ranks are at pp=1,tp=1; this is the lowest" in text
    assert "rank 5 of 8, pp=1 dp=0 tp=1, role 1" in text
    assert "the calls of rank 4" in text
    show(job, rank=0, limit=3)
    assert "11 more rows" in capsys.readouterr().out


def test_calls_files(job, capsys):
    path = job / "capture" / "calls.parquet"
    show_calls(path)
    assert "2 ranks in" in capsys.readouterr().out
    show(path, rank=4)
    text = capsys.readouterr().out
    assert "14 calls" in text
    assert "all_reduce sum" in text
    with pytest.raises(UserError, match=r"no calls of rank 3.*Those of 0, 4 are"):
        show(path, rank=3)
    with pytest.raises(UserError, match="has no coordinates"):
        show(path, coordinates="pp=1")
    with pytest.raises(UserError, match="cannot be negative"):
        show(path, limit=-1)


def test_the_command_line(job, tmp_path):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "crystalllm", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )

    assert run("pack", job, "--out", tmp_path / "a.pack").returncode == 0
    done = run("unpack", tmp_path / "a.pack", "--out", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    done = run("inspect", tmp_path / "b", "--rank", 9)
    assert done.returncode == 2
    assert "Legal are 0-7" in done.stderr


def test_8192_ranks_take_a_few_seconds(tmp_path, capsys):
    small_capture.write(tmp_path, scale=1024)
    begin = time.monotonic()
    show(tmp_path)
    assert time.monotonic() - begin < 5
    assert "8192 ranks" in capsys.readouterr().out


def test_ranks_that_do_not_fit_together_are_refused(tmp_path):
    folder = small_capture.write(tmp_path)
    table, provenance = tables.RANKS.read(folder / "ranks.parquet")
    columns = {name: table[name] for name in table.column_names}
    for change in ({"rank": [0] * 8}, {"representative": [77] * 8}):
        tables.RANKS.write(folder / "ranks.parquet", {**columns, **change}, provenance=provenance)
        with pytest.raises(UserError, match=r"do not fit together.*ranks\.parquet"):
            show(folder)


def test_element_sizes():
    names = ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64", ""]
    assert [records.element_size(n) for n in names] == [4, 2, 8, 1, 1, 8, 0]
