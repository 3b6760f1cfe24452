"""Transfers between real processes over gloo: what is measured, kept and looked up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from crystalllm.errors import UserError
from crystalllm.placement import Placement
from crystalllm.rules import RULES
from crystalllm.transfers.measured import (
    Case,
    MeasuredTransfer,
    MeasuredTransfers,
    measure_all,
    measure_gloo,
)
from crystalllm.transfers.transfer import Transfer

SMALL, LARGE = 4096, 1 << 23


def _cores(number):
    found = sorted(os.sched_getaffinity(0))
    return found[:number] if len(found) >= number else ()


@pytest.fixture(scope="module")
def rows():
    cases = [Case(kind, SMALL) for kind in RULES if kind not in ("recv", "barrier")]
    cases += [Case("all_reduce", LARGE), Case("barrier", 4, ""), Case("recv", LARGE, "bfloat16")]
    return measure_gloo(cases, 2, _cores(2), repetitions=15, limit_s=120)


def test_every_kind_is_measured_between_two_processes(rows):
    found = {(r.kind, r.dtype, r.bytes): r for r in rows}
    # A message has two sides, and each is measured.
    for kind in RULES:
        assert (kind, "", 4) in found if kind == "barrier" else (kind, "float32", SMALL) in found
    assert ("send", "bfloat16", LARGE) in found
    assert ("recv", "bfloat16", LARGE) in found
    for row in rows:
        assert row.ranks == 2
        assert row.count >= 10
        assert 0 < row.low_ns <= row.median_ns <= row.high_ns < 60 * 10**9
        assert row.call_ns > 0
        assert list(row.parts_ns) == sorted(row.parts_ns)
        assert np.mean(row.parts_ns) == pytest.approx(row.mean_ns, rel=1e-3)
    # Two thousand times the bytes take longer, and gloo's threads work for it.
    small, large = (found["all_reduce", "float32", size] for size in (SMALL, LARGE))
    assert large.low_ns > 2 * small.low_ns
    assert large.cpu_ns > 2 * small.cpu_ns > 0


def test_measurements_survive_their_file(rows, tmp_path):
    found = MeasuredTransfers(rows)
    found.save(tmp_path / "m.parquet", provenance={"torch": "2"})
    again = MeasuredTransfers.load(tmp_path / "m.parquet")
    assert again.rows == found.rows
    assert len(again.rows) == len(rows)


def _row(kind="all_reduce", dtype="float32", ranks=2, size=1000, ns=50_000, cpu=10_000):
    parts = (ns // 2, 3 * ns // 2)
    return MeasuredTransfer(
        kind, dtype, ranks, size, 100, ns, ns, ns // 2, 2 * ns, cpu, 5_000, parts
    )


def _transfer(kind="all_reduce", size=1000, dtype="float32", placement="2x1", backend="gloo"):
    return Transfer(kind, size, dtype, Placement.parse(placement), backend)


def test_only_what_was_measured_is_said():
    found = MeasuredTransfers(
        [_row(), _row(size=4000, ns=200_000, cpu=40_000), _row("all_gather"), _row("send", ranks=4)]
    )
    exact = found.find(_transfer())
    assert (exact.ns, exact.low_ns, exact.high_ns) == (50_000, 25_000, 100_000)
    assert (exact.source, exact.cpu_ns, exact.count) == ("measured", 10_000, 100)
    assert (exact.call_ns, exact.sigma) == (5_000, 0.0), "no lognormal: parts are drawn"
    assert exact.parts_ns == (25_000, 75_000)
    between = found.find(_transfer(size=2000))
    assert (between.ns, between.cpu_ns) == (100_000, 20_000)
    assert between.parts_ns == (50_000, 150_000), "the shape of the nearest, around its own mean"
    assert "between 1000 and 4000 bytes" in between.assumptions
    # Bytes are moved alike whatever they mean, but not added up alike.
    assert found.find(_transfer("all_gather", dtype="int64")).ns == 50_000
    assert found.find(_transfer(dtype="bfloat16")) is None
    # A pair is a pair, however many processes there were besides.
    assert found.find(_transfer("send")).ns == 50_000
    for other in (
        _transfer(placement="4x1"),
        _transfer(placement="2x2"),
        _transfer(backend="nccl"),
        _transfer("broadcast"),
    ):
        assert found.find(other) is None


def test_what_a_capture_needs_is_measured_where_cores_allow():
    wanted = [
        _transfer("barrier", 4, ""),
        _transfer("recv", 100, "uint8"),
        _transfer("all_reduce", 1000, "float32", "64x1"),  # more than the cores hold
        _transfer("all_reduce", 1000, "float32", "2x2"),  # not on one host
    ]
    cores = _cores(2) or pytest.skip("needs two cores")
    found = measure_all(wanted, cores, repetitions=10, limit_s=60)
    assert [(r.kind, r.bytes, r.ranks) for r in found.rows] == [
        ("barrier", 4, 2),
        ("recv", 100, 2),
        ("send", 100, 2),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([Case("all_reduce", 4)], 1), "two processes or more"),
        (([Case("allreduce", 4)], 2), "Kinds allreduce"),
        (([Case("all_reduce", 4)], 2, [0]), "a core for each"),
        (([Case("all_reduce", 4)], 2, [0, 100_000]), "core is not there.*100000"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        measure_gloo(*arguments)


def test_a_process_that_fails_ends_all_and_its_words_are_told():
    with pytest.raises(UserError, match=r"Process \d of 2, exit code 1.*no attribute 'float31'"):
        measure_gloo([Case("all_reduce", 4, "float31")], 2, limit_s=60)


def test_a_limit_ends_everything():
    began = time.monotonic()
    cases = [Case("all_reduce", 1 << 26)]
    with pytest.raises(UserError, match=r"took longer than 4 s"):
        measure_gloo(cases, 2, repetitions=10_000, case_limit_s=1000, limit_s=4)
    assert time.monotonic() - began < 30


def test_nothing_is_left_when_the_one_who_measures_is_killed(tmp_path):
    script = (
        "from crystalllm.transfers.measured import Case, measure_gloo\n"
        "measure_gloo([Case('all_reduce', 1 << 24)], 2, repetitions=10**6, case_limit_s=1e6,"
        " limit_s=600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    deadline = time.monotonic() + 60
    while len(peers := _peers(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in peers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _peers(folder):
    """Processes whose command line names this folder."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                words = Path(entry.path, "cmdline").read_text()
            except OSError:
                continue
            if "gloo_peer" in words and str(folder) in words:
                found.append(int(entry.name))
    return found
