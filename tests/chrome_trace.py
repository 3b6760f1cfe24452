"""The rules by which Perfetto reads a Chrome trace, checked strictly.

They are those of Perfetto's importer of JSON (src/trace_processor/importers/json and
slice_tracker.cc): what breaks one of them is dropped there without a word, so a test
has to say it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_UINT32 = 2**32
_KNOWN = {"X", "M", "s", "f"}
_METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def nanoseconds(us: float) -> int:
    """Perfetto's: a double of microseconds times 1000, cut."""
    return int(us * 1000)


def faults(trace: dict[str, Any]) -> list[str]:
    """What is wrong with a trace; empty if Perfetto shows all of it."""
    found: list[str] = []
    if list(trace)[-1] != "traceEvents":
        found.append("what stands after the events is read last")
    if trace.get("displayTimeUnit") != "ms":
        found.append("displayTimeUnit is not ms")
    events = trace["traceEvents"]
    threads: dict[int, set[int]] = defaultdict(set)
    named: set[tuple[str, int, int]] = set()
    for event in events:
        found += _shape(event)
        if not found:
            threads[event["tid"]].add(event["pid"])
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
    if found:
        return found
    found += [
        f"thread {tid} is in processes {pids}" for tid, pids in threads.items() if len(pids) > 1
    ]
    for tid, pids in threads.items():
        if ("thread_name", *pids, tid) not in named:
            found.append(f"thread {tid} has no name")
    for pid in {event["pid"] for event in events}:
        if not any(name == "process_name" and p == pid for name, p, _ in named):
            found.append(f"process {pid} has no name")
    return found + _nesting(events)


def _shape(event: dict[str, Any]) -> list[str]:
    text = str(event)[:200]
    if event.get("ph") not in _KNOWN:
        return [f"unknown phase: {text}"]
    found = []
    for key in ("pid", "tid"):
        if type(event.get(key)) is not int or not 0 <= event[key] < _UINT32:
            found.append(f"{key} is no uint32: {text}")
    if type(event.get("ts")) not in (int, float) or not event["ts"] >= 0:
        found.append(f"ts is no time: {text}")
    if not isinstance(event.get("name"), str) or not event["name"].isascii():
        found.append(f"name is no plain text: {text}")
    if not isinstance(event.get("args", {}), dict):
        found.append(f"args are no object: {text}")
    if event["ph"] == "X" and (type(event.get("dur")) not in (int, float) or event["dur"] < 0):
        found.append(f"dur is no duration: {text}")
    if event["ph"] in "Xsf" and not isinstance(event.get("cat"), str):
        found.append(f"no category: {text}")
    if event["ph"] in "sf" and type(event.get("id")) is not int:
        found.append(f"an arrow without number: {text}")
    if event["ph"] == "f" and event.get("bp") != "e":
        found.append(f"an arrow that ends at the next slice: {text}")
    if event["ph"] == "M":
        key, kind = _METADATA.get(event["name"], ("", object))
        if type(event.get("args", {}).get(key)) is not kind:
            found.append(f"metadata that says nothing: {text}")
    return found


def _nesting(events: list[dict[str, Any]]) -> list[str]:
    """Goes through each thread in the order of time, events of one time in that of the file."""
    found: list[str] = []
    stacks: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    arrows: dict[int, str] = {}
    ordered = sorted(
        (e for e in events if e["ph"] != "M"), key=lambda event: nanoseconds(event["ts"])
    )
    for event in ordered:
        start = nanoseconds(event["ts"])
        stack = stacks[event["pid"], event["tid"]]
        duration = nanoseconds(event["dur"]) if event["ph"] == "X" else 0
        while stack and (
            stack[-1][1] < start
            or (stack[-1][1] == start and not (stack[-1][0] == start and duration == 0))
        ):
            stack.pop()
        if event["ph"] == "X":
            if stack and start + duration > stack[-1][1]:
                found.append(f"{event['name']} at {start} ns crosses the end of {stack[-1][2]}")
            else:
                stack.append((start, start + duration, event["name"]))
        elif not stack:
            found.append(f"arrow {event['id']} begins or ends at no slice")
        elif event["ph"] == "s":
            arrows[event["id"]] = event["cat"] + event["name"]
        elif arrows.pop(event["id"], None) != event["cat"] + event["name"]:
            found.append(f"arrow {event['id']} ends without a begin")
    return found + [f"arrow {number} has no end" for number in arrows]
