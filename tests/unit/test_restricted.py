"""Payloads of strangers: what could run code is refused, what torch sends passes; nothing runs."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import functools
import io
import operator
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem, metadata, planner, storage

from crystalllm import tables
from crystalllm.errors import UserError
from crystalllm.sharing import allowed, restricted

WHERE = "group g, seq 3, rank 5"


class _Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class _Changes:
    def __init__(self, function, arguments, state):
        self.parts = (function, arguments, state)

    def __reduce__(self):
        return self.parts


@pytest.fixture
def canary(tmp_path):
    """A file that every attack here would make; it must not be there afterwards."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "an attack ran"


def _refused(value, *words):
    with pytest.raises(UserError) as error:
        restricted.check_payload(value, where=WHERE)
    for word in (*words, WHERE, "--trust"):
        assert word in str(error.value)


def _short(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _stack_global(module, name, *, between=b""):
    return _short(module) + between + _short(name) + between + b"\x93"


def _attacks(path):
    touch = f"touch {path}"
    return {
        "system": _Calls(os.system, touch),
        "eval": _Calls(eval, f"open({str(path)!r}, 'w')"),
        "exec": _Calls(exec, f"open({str(path)!r}, 'w')"),
        "open": _Calls(open, str(path), "w"),
        "getattr": _Calls(getattr, _Calls, "call"),
        "partial": _Calls(functools.partial(os.system, touch)),
        "methodcaller": _Calls(operator.methodcaller("system", touch), 0),
        "attrgetter": _Calls(operator.attrgetter("system"), 0),
        "import": _Calls(__import__, "os"),
        "hub": _Calls(torch.hub.load, "a/b", "c"),
        "torch.load": _Calls(torch.load, str(path)),
        "copyreg": _Calls(copyreg.add_extension, "os", "system", 240),
        "reconstructor": _Calls(copyreg._reconstructor, _Calls, object, None),
        "loads": _Calls(pickle.loads, pickle.dumps(_Calls(os.system, touch))),
        "nested list": [1, {"deep": (None, _Calls(os.system, touch))}],
        "bytes inside": {"data": pickle.dumps(_Calls(os.system, touch))},
        "old bytes inside": {"data": pickle.dumps(_Calls(os.system, touch), 0)},
        "factory": collections.defaultdict(os.getcwd),
        "class change": _Changes(collections.OrderedDict, (), {"x": os.system}),
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", list(_attacks("x")))
def test_code_in_a_pickle_is_refused_in_every_protocol(name, protocol, canary):
    value = pickle.dumps(_attacks(canary)[name], protocol)
    _refused(value)
    _refused(value + b"\0" * 40)
    _refused(pickle.dumps([1]) + value, "--trust")
    _refused(b"\x07" * 13 + value)


def test_the_message_names_class_and_entry(canary):
    _refused(pickle.dumps(_Calls(os.system, f"touch {canary}")), "posix.system")
    _refused(pickle.dumps(_Calls(torch.hub.load, "a", "b")), "torch.hub.load")
    _refused(pickle.dumps(_Calls(eval, "1"), 0), "__builtin__.eval")


_SYSTEM = ("posix", "system")


def _tricks():
    text = _short
    end = b"(" + text("true") + b"tR."
    return {
        # Names out of the memo, by every opcode that puts or gets.
        "memoize": text("posix") + b"\x94" + text("system") + b"\x94" + b"00h\x00h\x01\x93" + end,
        "binput": text("posix") + b"q\x05" + text("system") + b"q\x04" + b"00h\x05h\x04\x93" + end,
        "long put": text("posix")
        + b"r\x05\0\0\x01"
        + text("system")
        + b"p99\n00j\x05\0\0\x01g99\n\x93"
        + end,
        "overwritten": text("math")
        + b"q\x00"
        + text("posix")
        + b"q\x000"
        + text("system")
        # the memo's second text wins
        + b"q\x0100h\x00h\x01\x93"
        + end,
        "duplicate": text("timeit") + b"2\x93" + end,
        "mark between": text("posix") + b"(N1" + text("system") + b"\x93" + end,
        "popped": text("math") + text("sqrt") + b"00" + _stack_global(*_SYSTEM) + end,
        "unicode": b"Vposix\nVsystem\n\x93" + end,
        "escaped": b"V\\u0070osix\nVsystem\n\x93" + end,
        "old string": b"S'posix'\nS'sys\\x74em'\n\x93" + end,
        "binstring": b"U\x05posixT\x06\0\0\0system\x93" + end,
        "long text": b"X\x05\0\0\0posix\x8d" + struct.pack("<Q", 6) + b"system\x93" + end,
        "inst": b"(" + text("true") + b"iposix\nsystem\n.",
        "obj": b"(cposix\nsystem\n" + text("true") + b"o.",
        "newobj": _stack_global("subprocess", "Popen") + text("true") + b"\x85\x81.",
        "newobj_ex": _stack_global("subprocess", "Popen") + text("true") + b"\x85}\x92.",
        "dotted": _stack_global("collections", "abc.sys.modules") + b".",
        "dotted torch": _stack_global("torch", "Size.__class__") + b".",
        "hex number first": b"I0x10\n0cposix\nsystem\n" + end,
        "frame": b"\x95" + struct.pack("<Q", 3) + b"cposix\nsystem\n" + end,
        "changed class": _stack_global("torch", "Size") + b"N}" + text("x") + b"K\x01s\x86b.",
        "dtype gives text": _stack_global("numpy._core.multiarray", "scalar")
        + _stack_global("numpy", "dtype")
        + text("O")
        + b"\x85R"
        + text("posix")
        + b"\x86R"
        + text("system")
        + b"\x93"
        + end,
    }


@pytest.mark.parametrize("name", list(_tricks()))
@pytest.mark.parametrize("head", [b"\x80\x04", b"\x80\x02", b"", b"\x80\x04N."])
def test_names_are_followed_through_stack_and_memo(name, head):
    _refused(head + _tricks()[name])


@pytest.mark.parametrize(
    "body",
    [
        b"K\x01Q.",
        b"Pid\n.",
        b"\x82\x01.",
        b"\x83\x01\x00.",
        b"\x84\x01\x00\x00\x00.",
        b"\x97.",
        b"N",
        b"R.",
        b"h\x07.",
        b"NN\x93.",
        b"\xff.",
        b"X\xff\xff\xff\xffab.",
        _stack_global("builtins", "str") + _short("posix") + b"\x85R.",
    ],
)
def test_what_cannot_be_resolved_is_refused(body):
    _refused(b"\x80\x04" + body)


def test_a_pickle_that_begins_inside_another_is_refused():
    # The sizes sent before could make this byte the first of the second object.
    evil = _stack_global(*_SYSTEM) + b"(" + _short("true") + b"tR."
    assert pickle.loads(pickle.dumps([evil])) == [evil]
    _refused(pickle.dumps({"harmless": evil}), "posix.system")
    _refused(b"\x01\x02" + evil, "posix.system")
    _refused(b"N0]" + b"K\x01a" * 50 + b"0N0" + evil, "posix.system")


def test_archives_are_followed_and_compressed_ones_refused(canary):
    attack = _Calls(os.system, f"touch {canary}")
    saved = io.BytesIO()
    torch.save({"a": torch.ones(3), "b": attack}, saved)
    _refused(saved.getvalue(), "system")
    legacy = io.BytesIO()
    torch.save([attack], legacy, _use_new_zipfile_serialization=False)
    _refused(legacy.getvalue(), "system")
    _refused(pickle.dumps(_Calls(torch.storage._load_from_bytes, legacy.getvalue())), "system")
    _refused(pickle.dumps(_Calls(torch.storage._load_from_bytes, b"a zip or tar")), "no tensor")

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", pickle.dumps(attack) + b"\0" * 200)
    _refused(packed.getvalue(), "compressed")


def _plan(num=3):
    properties = metadata.TensorProperties.create_from_tensor(torch.ones(2))
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    items = [
        planner.WriteItem(
            metadata.MetadataIndex(f"layers.{i}.weight", torch.Size([0])),
            planner.WriteItemType.SHARD,
            None,
            planner.TensorWriteData(chunk, properties, torch.Size([2])),
        )
        for i in range(num)
    ]
    return planner.SavePlan(items, storage_data=filesystem._StoragePrefix("__0_"))


def _metadata(num=40):
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    tensors = {
        f"model.layers.{i}.weight": metadata.TensorStorageMetadata(
            metadata.TensorProperties(), torch.Size([2]), [chunk]
        )
        for i in range(num)
    }
    index = metadata.MetadataIndex("model.layers.0.weight")
    return metadata.Metadata(
        {**tensors, "step": metadata.BytesStorageMetadata()},
        planner_data={name: tuple(name.split(".")) for name in tensors},
        storage_data={index: filesystem._StorageInfo("__0_0.distcp", 0, 8)},
        storage_meta=metadata.StorageMeta(),
    )


def _index():
    return metadata.MetadataIndex("a", torch.Size([0]))


HONEST = {
    "numbers": [1, 2.5, True, None, 1 << 80, 3 + 4j],
    "texts": {"os": "system", "posix": "system", "random": ["types", "Size"]},
    "containers": [collections.OrderedDict(a=1), collections.deque([1]), {1, 2}, frozenset({3})],
    "defaults": collections.defaultdict(list, a=[1]),
    "times": [datetime.datetime(2020, 1, 2), datetime.timedelta(1), datetime.UTC],
    "tensor": torch.arange(6.0).reshape(2, 3),
    "parameters": {
        "w": torch.nn.Parameter(torch.ones(2)),
        "b": torch.ones(2, dtype=torch.bfloat16),
    },
    "meta": torch.ones(2, 3, device="meta"),
    "torch": [torch.Size([1, 2]), torch.float32, torch.device("cpu"), torch.strided],
    "formats": [torch.contiguous_format, torch.channels_last, torch.preserve_format],
    "array": np.arange(300),
    "scalars": [np.float32(1), np.int64(2), np.dtype("f8"), np.bool_(True)],
    "random state": [np.random.RandomState(0).get_state(), torch.Generator().get_state()],
    "save plan": _plan(),
    "all plans": [_plan(2), _plan(1), _plan(0)],
    "load plan": planner.LoadPlan(
        [
            planner.ReadItem(
                planner.LoadItemType.TENSOR,
                _index(),
                torch.Size([0]),
                _index(),
                torch.Size([0]),
                torch.Size([1]),
            )
        ]
    ),
    "metadata": _metadata(),
    "results": [storage.WriteResult(_index(), 3, filesystem._StorageInfo("x", 0, 1))] * 3,
    "placements": [torch.distributed.tensor.Shard(0), torch.distributed.tensor.Replicate()],
}


@pytest.mark.parametrize("name", list(HONEST))
def test_what_torch_sends_passes(name):
    value = pickle.dumps(HONEST[name])
    for padded in (value, value + b"\0" * 100, value + value, value + b"\x17\x93padding"):
        restricted.check_payload(padded, where=WHERE)


def test_what_object_collectives_make_passes():
    from torch.distributed import distributed_c10d as c10d

    tensor, size = c10d._object_to_tensor(_plan(), torch.device("cpu"), None)
    assert size.item() == tensor.numel()
    restricted.check_payload(tensor.numpy().tobytes(), where=WHERE)
    saved = io.BytesIO()
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}, saved)
    restricted.check_payload(saved.getvalue(), where=WHERE)  # as ZeroRedundancyOptimizer sends


@pytest.mark.filterwarnings("ignore:numpy.core:DeprecationWarning")
def test_every_allowed_name_of_this_torch_is_data():
    for module, name in allowed.ALLOWED - {allowed.LOADER, allowed.ENCODER}:
        try:
            found = functools.reduce(getattr, name.split("."), __import__(module, fromlist=["_"]))
        except (ImportError, AttributeError):
            continue  # another version's
        is_data = isinstance(found, type | torch.dtype | torch.memory_format)
        rebuilds = name.startswith(("_rebuild", "_reconstruct", "_frombuffer", "_get_layout"))
        assert is_data or rebuilds or name == "scalar", (module, name)


def test_no_allowed_name_had_another_meaning_in_python_2():
    for pair in allowed.ALLOWED:
        assert allowed.addresses(*pair) <= {pair}


def test_plain_numbers_pass_whatever_they_look_like():
    random = np.random.default_rng(0)
    for dtype in ("uint8", "int64", "float32"):
        numbers = random.integers(0, 200, 20_000).astype(dtype).tobytes()
        restricted.check_payload(numbers, where=WHERE)
    restricted.check_payload(b"", where=WHERE)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_get_an_answer(data):
    for value in (data, b"\x80\x04" + data):
        with contextlib.suppress(UserError):
            restricted.check_payload(value, where=WHERE)


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=40),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(_PLAIN, st.integers(2, 5))
def test_plain_objects_pass(content, protocol):
    value = pickle.dumps(content, protocol)
    if b"__builtin__\nbytes\n" in value:
        return  # protocol 2 writes no bytes as a call
    restricted.check_payload(value, where=WHERE)


@settings(max_examples=100, deadline=None)
@given(_PLAIN, st.integers(0, 5), st.binary(max_size=20))
def test_an_attack_is_found_wherever_it_lies(content, protocol, padding):
    attack = _Calls(os.system, "exit 1")
    _refused(pickle.dumps([content, attack, content], protocol) + padding)


def test_a_table_is_checked_entry_by_entry(tmp_path):
    path = tmp_path / "payloads.parquet"
    good = pickle.dumps(_plan())

    def write(last):
        tables.PAYLOADS.write(
            path,
            {
                "group": ["abc#0", "abc#0", ""],
                "seq": [4, 5, 0],
                "rank": [7, 8, 9],
                "peer": [-1, 3, -1],
                "dtype": ["uint8", "uint8", "uint8"],
                "splits": [[], [], []],
                "store_key": ["", "", "key"],
                "body_end": [0, 0, 0],
                "per_period": [0, 0, 0],
                "value": [good, good, last],
            },
            provenance={},
        )

    write(good)
    assert restricted.check_table(path) == 3
    write(pickle.dumps(_Calls(os.system, "true")))
    with pytest.raises(UserError, match=r"posix\.system.*payloads\.parquet, store key key, rank 9"):
        restricted.check_table(path)


def test_the_marker_says_whether_to_check(tmp_path):
    assert not restricted.is_untrusted(tmp_path)
    restricted.mark_untrusted(tmp_path, source="ab", trusted=False)
    assert restricted.is_untrusted(tmp_path)
    restricted.mark_untrusted(tmp_path, source="ab", trusted=True)
    assert not restricted.is_untrusted(tmp_path)
    (tmp_path / restricted.MARKER).write_text("{")
    assert restricted.is_untrusted(tmp_path), "damaged: the safe side"
