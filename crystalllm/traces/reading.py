"""Kineto traces as files: JSON, gzipped, or members of a tar archive.

What comes out is checked: names are text, times are integer nanoseconds that
fit 64 bits, and every mistake in a file is a UserError that names it. What the
events mean is no matter of this module.
"""

from __future__ import annotations

import gzip
import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crystalllm.errors import UserError

# Numbers beyond this are no times and counts; differences of aligned times still fit 64 bits.
LIMIT = 2**61
_MAX_DURATION_NS = 2**53  # a hundred days
MAX_WORLD_SIZE = 2**20

_LIST = re.compile(r"\[\s*((-?\d{1,18}|\.\.\.)(\s*,\s*(-?\d{1,18}|\.\.\.))*)?\s*\]")
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d{1,7})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Event:
    """One complete event ("ph": "X") of a trace, on the clock of its host."""

    category: str  # lower case
    name: str
    thread: tuple[str, str]  # process and thread as the trace writes them
    start_ns: int
    duration_ns: int
    args: dict[str, Any]

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class ProcessGroup:
    """A process group as `distributedInfo` lists it; members is None where cut short."""

    name: str
    description: str
    backend: str
    members: tuple[int, ...] | None


@dataclass(frozen=True)
class Trace:
    """The trace of one rank.

    Args:
        source: File, and member of the archive.
        rank: Global rank.
        world_size: None where the trace does not say.
        backend: As the default group was made with; empty where unknown.
        groups: In the order of the trace, which is that of creation.
        versions: Tool versions that the trace names.
        host: Name of the host; empty where unknown.
        num_devices: GPUs of the host; 0 where unknown.
        events: Complete events in the order of the file.
    """

    source: str
    rank: int
    world_size: int | None
    backend: str
    groups: tuple[ProcessGroup, ...]
    versions: dict[str, str]
    host: str
    num_devices: int
    events: tuple[Event, ...]


def read_traces(paths: Sequence[Path]) -> list[Trace]:
    """Reads traces, sorted by rank.

    Raises:
        UserError: A file that cannot be read as a Kineto trace, none at all, or
            two of one rank.
    """
    traces: dict[int, Trace] = {}
    for path in paths:
        for source, text in _documents(Path(path)):
            trace = _trace(source, text)
            if (other := traces.get(trace.rank)) is not None:
                raise UserError(
                    f"Two traces are of rank {trace.rank}",
                    where=f"Files {other.source} and {source}",
                    do="Pass one trace per rank, all of one run",
                )
            traces[trace.rank] = trace
    if not traces:
        raise UserError(
            "There is no trace to read",
            where=f"Files {', '.join(str(p) for p in paths) or 'none given'}",
            do="Pass Kineto traces (.json, .json.gz, or a .tar.gz of them)",
        )
    return [traces[rank] for rank in sorted(traces)]


def whole(value: Any) -> int | None:
    """An integer that is written as a number or as text; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < LIMIT:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < LIMIT:
        return value
    return None


def whole_list(value: Any) -> tuple[list[int], bool] | None:
    """A list of integers, also one written as text such as "[0, 1, ..., 7]".

    Returns:
        The integers that are there and whether all are; None for anything else.
    """
    if isinstance(value, list):
        numbers = [whole(v) for v in value]
        return ([n for n in numbers if n is not None], True) if None not in numbers else None
    if isinstance(value, str) and (match := _LIST.fullmatch(value.strip())):
        words = [w.strip() for w in match[1].split(",")] if match[1] else []
        return [int(w) for w in words if w != "..."], "..." not in words
    return None


def clean(text: str) -> str:
    """Text that can be written as UTF-8: JSON's escapes may hold halves of characters."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _documents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and text of every trace in a file."""
    try:
        if path.name.endswith((".tar.gz", ".tgz", ".tar")):
            with tarfile.open(path) as archive:
                members = [
                    m for m in archive if m.isfile() and m.name.endswith((".json", ".json.gz"))
                ]
                for member in sorted(members, key=lambda m: m.name):
                    file = archive.extractfile(member)
                    assert file is not None  # it is a regular file
                    text = file.read()
                    packed = member.name.endswith(".gz")
                    yield f"{path}:{member.name}", gzip.decompress(text) if packed else text
        else:
            text = path.read_bytes()
            yield str(path), gzip.decompress(text) if path.name.endswith(".gz") else text
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        # tarfile passes ValueError on for headers with broken numbers.
        raise UserError(
            "A trace cannot be read",
            where=f"File {path}: {str(error) or type(error).__name__}",
            do="Copy it again; it is missing, truncated or not packed as its name says",
        ) from error


def _trace(source: str, text: bytes) -> Trace:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            "A trace is no JSON",
            where=f"File {source}: {str(error).splitlines()[0] if text else 'it is empty'}",
            do="Copy it again, or export it again; it is truncated or something else",
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise UserError(
            "A JSON file is no Kineto trace",
            where=f"File {source}: there is no list traceEvents",
            do="Pass what torch.profiler's export_chrome_trace wrote",
        )
    info = _field(document, "distributedInfo", dict, source, {})
    rank = whole(info.get("rank"))
    if rank is None and (match := _RANK_IN_NAME.search(source.rsplit("/", 1)[-1])):
        rank = int(match[1])
    world_size = whole(info.get("world_size"))
    if "world_size" in info and (world_size is None or not 1 <= world_size <= MAX_WORLD_SIZE):
        raise _bad(source, f"distributedInfo.world_size is {info['world_size']!r}")
    if rank is None and world_size == 1:
        rank = 0
    if rank is None or not 0 <= rank < (world_size or MAX_WORLD_SIZE):
        raise UserError(
            "A trace does not say which rank it is of",
            where=f"File {source}: distributedInfo.rank is {info.get('rank')!r}, and the file's "
            "name has no rank-N or workerN",
            do="Name the file rank-N.json, or record with torch.distributed initialised",
        )
    base = whole(document.get("baseTimeNanoseconds", 0))
    if base is None:
        raise _bad(source, f"baseTimeNanoseconds is {document['baseTimeNanoseconds']!r}")
    devices = document.get("deviceProperties")
    host = document.get("host_name")
    backend = info.get("backend")
    return Trace(
        source=source,
        rank=rank,
        world_size=world_size,
        backend=backend if isinstance(backend, str) else "",
        groups=tuple(_groups(info.get("pg_config"), source)),
        versions=_versions(document, info),
        host=host if isinstance(host, str) else "",
        num_devices=len(devices) if isinstance(devices, list) else 0,
        events=tuple(_events(document["traceEvents"], base, source)),
    )


def _groups(config: Any, source: str) -> Iterator[ProcessGroup]:
    if config is None:
        return
    if not isinstance(config, list) or not all(isinstance(g, dict) for g in config):
        raise _bad(source, "distributedInfo.pg_config is no list of groups")
    for group in config:
        ranks = whole_list(group.get("ranks"))
        size = whole(group.get("pg_size"))
        known = ranks is not None and ranks[1] and size in (None, len(ranks[0]))
        yield ProcessGroup(
            name=str(group.get("pg_name", "")),
            description=clean(str(group.get("pg_desc", ""))),
            backend=str(group.get("backend_config", "")),
            members=tuple(ranks[0]) if known and ranks and ranks[0] else None,
        )


def _versions(document: dict[str, Any], info: dict[str, Any]) -> dict[str, str]:
    found = {**document, **info}
    return {
        k: str(v)
        for k, v in sorted(found.items())
        if "version" in k.lower() and isinstance(v, str | int) and len(str(v)) < 100
    }


def _events(found: list[Any], base_ns: int, source: str) -> Iterator[Event]:
    for index, event in enumerate(found):
        if not isinstance(event, dict):
            raise _bad(source, f"event {index} is {type(event).__name__}, no object")
        if event.get("ph") != "X":
            continue
        name, args = event.get("name"), event.get("args", {})
        if not isinstance(name, str) or not isinstance(args, dict):
            raise _bad(source, f"event {index} has a name or args of the wrong type")
        start_ns, duration_ns = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur", 0))
        if (
            start_ns is None
            or duration_ns is None
            or abs(base_ns + start_ns) >= LIMIT
            or not 0 <= duration_ns < _MAX_DURATION_NS
        ):
            times = f"ts {event.get('ts')!r}, dur {event.get('dur')!r}"
            raise _bad(source, f"event {index} ({name[:60]}) has {times[:100]}")
        yield Event(
            category=str(event.get("cat", "")).lower(),
            name=clean(name),
            thread=(str(event.get("pid", "")), str(event.get("tid", ""))),
            start_ns=base_ns + start_ns,
            duration_ns=duration_ns,
            args=args,
        )


def _nanoseconds(microseconds: Any) -> int | None:
    """A time as the trace writes it; None for what is none."""
    number = isinstance(microseconds, int | float) and not isinstance(microseconds, bool)
    return round(microseconds * 1000) if number and abs(microseconds) < LIMIT else None


def _field(holder: dict[str, Any], key: str, kind: type, source: str, default: Any) -> Any:
    value = holder.get(key, default)
    if not isinstance(value, kind):
        raise _bad(source, f"{key} is {type(value).__name__}")
    return value


def _bad(source: str, why: str) -> UserError:
    return UserError(
        "A trace has a field that no Kineto trace has",
        where=f"File {source}: {why}",
        do="Export it again; it was changed or damaged",
    )
