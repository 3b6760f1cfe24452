"""What the import of Kineto traces refuses; whatever is in a file, only a UserError comes out."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json

import kineto_files as files
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crystalllm.errors import UserError
from crystalllm.traces.kineto import import_traces


def _refused(folder, traces, text, **options):
    paths = traces if isinstance(traces, list) else files.save(folder / "in", traces)
    with pytest.raises(UserError, match=text) as caught:
        import_traces(paths, folder / "out", **options)
    assert caught.value.where
    assert caught.value.do
    return str(caught.value)


def test_files_that_are_no_traces_are_named(tmp_path):
    good = json.dumps(files.all_reduces(1)[0]).encode()
    cases = {
        "empty.json": (b"", "it is empty"),
        "cut.json": (good[: len(good) // 2], "no JSON"),
        "cut.json.gz": (gzip.compress(good)[:200], "cannot be read"),
        "text.json": (b"%PDF-1.4", "no JSON"),
        "deep.json": (b"[" * 100_000, "no JSON"),
        "list.json": (b"[1, 2]", "no Kineto trace"),
        "other.json": (b'{"nodes": []}', "no Kineto trace"),
        "none.tar.gz": (gzip.compress(b"x" * 1000), "cannot be read"),
        "plain.json.gz": (good, "cannot be read"),
        "rank.json": (b'{"traceEvents": []}', "which rank"),
        "time.json": (b'{"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": '
                      b'[{"ph": "X", "name": "a", "ts": NaN}]}', "field that no"),
    }  # fmt: skip
    for name, (text, message) in cases.items():
        (tmp_path / name).write_bytes(text)
        assert name in _refused(tmp_path, [tmp_path / name], message)
    assert "gone.json" in _refused(tmp_path, [tmp_path / "gone.json"], "cannot be read")


def test_traces_of_different_runs_are_refused(tmp_path):
    traces = files.all_reduces(2)
    both = files.save(tmp_path / "in", traces)
    assert "rank 0" in _refused(tmp_path, [both[0], both[0]], "Two traces are of rank 0")
    _refused(tmp_path, both, "different size", world_size=16)
    other = copy.deepcopy(traces)
    other[1]["distributedInfo"]["world_size"] = 4
    _refused(tmp_path / "size", other, "different size")
    steps = copy.deepcopy(traces)
    for event in steps[1]["traceEvents"]:
        event["name"] = event["name"].replace("ProfilerStep#", "ProfilerStep#9")
    _refused(tmp_path / "steps", steps, "different iterations")


def test_calls_that_do_not_fit_together_name_both_ranks_and_calls(tmp_path):
    traces = files.all_reduces(2)
    for event in traces[1]["traceEvents"]:
        if event["name"] == "record_param_comms":
            event["args"]["In msg nelems"] += 1
            event["args"]["Out msg nelems"] += 1
    message = _refused(tmp_path, traces, "do not fit together")
    for part in ("rank 0", "rank 1", "rank-1.json", "all_reduce of 64", "all_reduce of 65"):
        assert part in message


def test_groups_that_cannot_be_are_refused(tmp_path):
    for i, ranks in enumerate(([0, 9], [0, 0], [1, 2])):
        maker = files.Maker(0, 4, groups=[("0", ranks)])
        maker.call("allreduce", 10, 90)
        _refused(tmp_path / str(i), {0: maker.trace()}, "members that cannot be")


# --- damaged files ------------------------------------------------------------------

SMALL, OTHER = (json.dumps(t).encode() for t in files.all_reduces(2, steps=2, per_step=1).values())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["[0, 1]", "[0, ..., 3]", "9" * 30, "allreduce", "\ud800"])
    | st.sampled_from([2**62, 2**58, -1, 10**400]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip
FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _survives(path, out):
    other = path.with_name("rank-1.json")
    other.write_bytes(OTHER)
    with contextlib.suppress(UserError):
        import_traces([path, other], out)


@FUZZ
@given(st.data())
def test_fuzz_damaged_bytes(tmp_path, data):
    text = bytearray(SMALL)
    for _ in range(data.draw(st.integers(0, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    packed = data.draw(st.booleans())
    text = gzip.compress(bytes(text), mtime=0) if packed else bytes(text)
    if data.draw(st.booleans()):
        text = text[: data.draw(st.integers(0, len(text)))]
    path = tmp_path / ("rank-0.json.gz" if packed else "rank-0.json")
    path.write_bytes(text)
    _survives(path, tmp_path / "out")


def _holders(value):
    """Every container in a document, with its keys."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        yield from ((value, key) for key in keys)
        for key in keys:
            yield from _holders(value[key])


@FUZZ
@given(st.data())
def test_fuzz_fields_of_the_wrong_type(tmp_path, data):
    document = json.loads(SMALL)
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(_holders(document))
        if places:
            holder, key = places[data.draw(st.integers(0, len(places) - 1))]
            holder[key] = data.draw(JSON)
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(document))
    _survives(path, tmp_path / "out")
