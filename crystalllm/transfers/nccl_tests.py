"""Reading what nccl-tests writes: its text, its JSON (`-J FILE`), and tables as CSV.

Sources of the formats: nccl-tests, src/util.cu (writeDeviceReport, writeResultHeader,
writeBenchmarkLine…, jsonOutputInit) and, for older text, src/common.cu and src/*.cu.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crystalllm.errors import UserError
from crystalllm.placement import Placement

# sendrecv: each rank sends to the next and receives from the one before.
MESSAGE = "sendrecv"
# By the name of the test program.
_KINDS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
    "gather_perf": "gather",
    "scatter_perf": "scatter",
    "sendrecv_perf": MESSAGE,
}
_PROGRAM = re.compile(r"\b(\w+_perf)\b")
_CSV_COLUMNS = ("op", "ranks", "nodes", "size_bytes", "time_us_oop")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        kind: As in `calls`, or MESSAGE.
        placement: Of all ranks of the test.
        num_bytes: By nccl-tests' convention, positive.
        ns: Out of place, positive.
        machine: GPU and network, as far as the file says.
        where: File and line.
    """

    kind: str
    placement: Placement
    num_bytes: int
    ns: float
    machine: str
    where: str


def read(path: Path) -> list[Row]:
    """The measurements in one file, at least one.

    Raises:
        UserError: Missing, damaged, or without ranks, nodes or the name of the test.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "A table of transfer times cannot be read",
            where=f"File {path}: {error}",
            do="Pass the output of nccl-tests, text or JSON, or a CSV file",
        ) from None
    if text.lstrip().startswith("{"):
        rows = list(_json(path, text))
    elif _is_csv(text):
        rows = list(_csv(path, text))
    else:
        rows = list(_text(path, text))
    if not rows:
        raise UserError(
            "A file has no transfer times",
            where=f"File {path}",
            do="Pass the output of nccl-tests, text or JSON, or a CSV file with the columns "
            + ", ".join(_CSV_COLUMNS),
        )
    return rows


def _damaged(path: Path, line: int, why: str) -> UserError:
    return UserError(
        "A table of transfer times is damaged",
        where=f"File {path}, line {line}: {why}",
        do="Write it again, or remove what is not whole",
    )


def _kind(program: str, path: Path, line: int) -> str:
    if program not in _KINDS:
        raise UserError(
            "The test of nccl-tests that ran is not known",
            where=f"File {path}, line {line}: {program or 'no name of a test'}",
            do="Keep the line that starts the test, or put its name into the file's: one of "
            + ", ".join(_KINDS),
        )
    return _KINDS[program]


def _number(text: str, path: Path, line: int, what: str) -> float:
    """Finite and not negative."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or found < 0:
        raise _damaged(path, line, f"{what} is {text!r}")
    return found


def _positive(text: str, path: Path, line: int, what: str) -> float:
    found = _number(text, path, line, what)
    if found == 0:
        raise _damaged(path, line, f"{what} is {text!r}")
    return found


# --- CSV ---------------------------------------------------------------------------------


def _is_csv(text: str) -> bool:
    header = next(csv.reader(text.splitlines()[:1]), [])
    return set(_CSV_COLUMNS) <= {name.strip() for name in header}


def _csv(path: Path, text: str) -> Iterator[Row]:
    reader = csv.DictReader(text.splitlines())
    for values in reader:
        line = reader.line_num
        if None in values or None in values.values():
            raise _damaged(path, line, "not as many values as columns")
        numbers = {
            name: _positive(values[name], path, line, name) for name in _CSV_COLUMNS if name != "op"
        }
        for name in ("ranks", "nodes", "size_bytes"):
            if numbers[name] != int(numbers[name]):
                raise _damaged(path, line, f"{name} is {values[name]!r}")
        if values["op"] not in _KINDS.values():
            raise _damaged(
                path, line, f"op is {values['op']!r}, known are {', '.join(_KINDS.values())}"
            )
        if numbers["nodes"] > numbers["ranks"]:
            raise _damaged(path, line, f"{values['ranks']} ranks on {values['nodes']} nodes")
        yield Row(
            values["op"],
            Placement(int(numbers["ranks"]), int(numbers["nodes"])),
            int(numbers["size_bytes"]),
            numbers["time_us_oop"] * 1e3,
            " ".join(filter(None, (values.get("gpu"), values.get("network")))),
            f"File {path}, line {line}",
        )


# --- JSON --------------------------------------------------------------------------------


def _json(path: Path, text: str) -> Iterator[Row]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise _damaged(path, error.lineno, f"{error.msg}, column {error.colno}") from None
    config = _get(found, "config", dict, path, "the file")
    devices = _get(config, "devices", list, path, "config")
    # A process is one entry, whatever number of GPUs it has.
    per_process = [_get(config, name, int, path, "config") for name in ("nthreads", "ngpus")]
    hosts = {_get(d, "hostname", str, path, f"device {i}") for i, d in enumerate(devices)}
    num_ranks = len(devices) * math.prod(per_process)
    if num_ranks < 1:
        raise _damaged(path, 1, "config has no devices")
    placement = Placement(num_ranks, len(hosts))
    models = sorted({str(d.get("device_info", "")) for d in devices})
    args = _get(found, "args", list, path, "the file")
    program = Path(str(args[0])).name if args else ""
    kind = _kind(program if program in _KINDS else _program(str(path.name)), path, 1)
    for number, result in enumerate(_get(found, "results", list, path, "the file")):
        at = f"result {number}"
        size = _get(result, "size", int, path, at)
        body = result.get("out_of_place")
        if size == 0 or body is None:
            continue
        if isinstance(body, dict) and "cpu_time" in body:
            raise _cpu_time(path, 1)
        us = _get(body, "time", (int, float), path, f"{at}, out_of_place")
        if not us > 0 or size < 0:
            raise _damaged(path, 1, f"{at} took {us} µs for {size} bytes")
        where = f"File {path}, {at}"
        yield Row(kind, placement, size, us * 1e3, ", ".join(models), where)


def _get(found: Any, name: str, kind: Any, path: Path, where: str) -> Any:
    value = found.get(name) if isinstance(found, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _damaged(path, 1, f"{where} has no {name}")
    return value


def _cpu_time(path: Path, line: int) -> UserError:
    return UserError(
        "The table has the time that the host takes, not that of the transfer",
        where=f"File {path}, line {line}: cputime",
        do="Run nccl-tests without -C",
    )


# --- text --------------------------------------------------------------------------------

# What mpirun --tag-output and srun --label put in front of lines.
_LABEL = re.compile(r"^(\[\d+,\d+\]<std\w+>:\s?|\s*\d+:\s)")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)$")
_TIMESTAMP = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$")


@dataclass
class _Test:
    """What the lines before its results say of a test."""

    program: str = ""
    hosts: dict[int, str] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    has_results: bool = False


def _program(text: str) -> str:
    """The name of a test of nccl-tests in a text; empty if there is none."""
    return next((m for m in _PROGRAM.findall(text) if m in _KINDS), "")


def _announced(line: str) -> str:
    """What a header says that it is of, known or not."""
    match = re.match(r"#\s*Collective test starting:\s*(\S+)", line)
    return Path(match[1]).name if match else _program(line)


def _text(path: Path, text: str) -> Iterator[Row]:
    test, header = _Test(_program(path.name)), []
    for number, raw in enumerate(text.splitlines(), 1):
        line = _LABEL.sub("", raw).rstrip()
        if not line.startswith("#"):
            if header and re.match(r"\s*\d", line):
                row = _result(line, header, test, path, number)
                if row is not None:
                    yield row
            elif not header and _program(line):  # the command, where a log has it
                test = _Test(_program(line))
            continue
        words = line.lstrip("# ").split()
        starts = words[:1] == ["nThread"] or (_announced(line) and "concluded" not in words)
        if test.has_results and starts:
            test, header = _Test(_program(path.name)), []
        test.program = _announced(line) or test.program
        if match := _RANK.match(line):
            test.hosts[int(match[1])] = match[2]
            test.models.add(match[3].strip())
        elif words[:2] == ["size", "count"]:
            if "cputime" in words:
                raise _cpu_time(path, number)
            header, test.has_results = words, True
        elif words[:4] == ["Out", "of", "bounds", "values"]:
            header = []


def _result(line: str, header: list[str], test: _Test, path: Path, number: int) -> Row | None:
    """One line of results; None for the size 0, of which nothing is sent."""
    if not test.hosts:
        raise UserError(
            "How many ranks and nodes a table is of is not known",
            where=f"File {path}, line {number}",
            do="Keep the lines '# Rank … on HOST device …' that nccl-tests writes before results",
        )
    kind = _kind(test.program, path, number)
    values = _TIMESTAMP.sub("", line).split()
    names = header[: header.index("time")]
    num_body = len([name for name in header[len(names) :] if name != "timestamp"])
    # Some tests have a column for the operation and leave it empty.
    if "redop" in names and len(values) == len(header) - ("timestamp" in header) - 1:
        names = [name for name in names if name != "redop"]
    if len(values) != len(names) + num_body:
        raise _damaged(path, number, f"{len(values)} values under {len(header)} columns")
    size = _number(values[0], path, number, "size")
    us = _number(values[len(names)], path, number, "time")
    if size == 0:
        return None
    if us == 0:
        raise _damaged(path, number, f"time is {values[len(names)]!r}")
    return Row(
        kind,
        Placement(max(test.hosts) + 1, len(set(test.hosts.values()))),
        int(size),
        us * 1e3,
        ", ".join(sorted(test.models)),
        f"File {path}, line {number}",
    )
