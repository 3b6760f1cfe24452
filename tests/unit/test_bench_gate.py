"""Runs that are compared take turns; one that does not come back ends, and is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from crystalllm.bench import gate

_PROGRAM = """
import sys, time
from crystalllm.bench.gate import Gate
turn = Gate(sys.argv[1], sys.argv[2])
for iteration in range(4):
    if sys.argv[2] == "hangs" and iteration == 2:
        time.sleep(600)
    turn()
"""


def test_a_program_that_hangs_is_named_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "_TURN_LIMIT_S", 2)
    gates = gate.Gates(tmp_path)
    names = ("goes", "hangs")
    programs = [
        subprocess.Popen([sys.executable, "-c", _PROGRAM, gates.address, name]) for name in names
    ]
    try:
        gates.accept(names)
        # Its times are those of the two iterations; later turns begin with a time of their own.
        assert [len(times) for times in gates.turn(names, 2).values()] == [2, 2]
        with pytest.raises(gate.LateError, match="hangs did not end its turn within 2 s") as late:
            gates.turn(names, 1)
        assert late.value.name == "hangs"
        gates.stop()
        assert programs[0].wait(60) == 0
        gates.kill()
        assert programs[1].wait(60) == -9
    finally:
        for program in programs:
            program.kill()
            program.wait()
