"""Globals that a pickle of a stranger may name: plain data, and what rebuilds it.

Nothing here runs code that its arguments choose. Left out on purpose: getattr
and all that looks up names, copyreg, functools, operator, codecs other than
latin1, torch.load and whatever takes a path or a URL.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

_DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu quint8 qint8 qint32"
)
_STORAGES = (
    "ByteStorage CharStorage ShortStorage IntStorage LongStorage HalfStorage BFloat16Storage "
    "FloatStorage DoubleStorage BoolStorage ComplexFloatStorage ComplexDoubleStorage"
)

# Named as values, never called: a number would ask for memory, a string would name a global.
_VALUES = {
    "builtins": "int float bool str bytes list dict tuple object",
    "torch": f"{_DTYPES} {_STORAGES}",
    "torch.storage": "UntypedStorage TypedStorage",
    "torch._utils": "torch.contiguous_format torch.preserve_format torch.channels_last "
    "torch.channels_last_3d",
    "numpy": "ndarray",
}

_CALLED = {
    "builtins": "set frozenset complex bytearray slice range",
    "collections": "OrderedDict defaultdict deque Counter",
    "datetime": "date time datetime timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "pathlib": "PurePosixPath PosixPath",
    "types": "SimpleNamespace",
    "uuid": "UUID",
    "numpy": "dtype",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "torch": "Size device",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_parameter "
    "_rebuild_meta_tensor_no_storage _rebuild_sparse_tensor",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata "
    "MetadataIndex StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "BytesIOWriteData LoadItemType LoadPlan ReadItem "
    "SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.distributed.checkpoint.storage": "WriteResult",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING "
    "ShardedTensorMetadata TensorProperties",
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed.fsdp._optim_utils": "StateInfo _OptimStateKey _PosDimTensorInfo",
    "torch.distributed.fsdp._flat_param": "FlatParamShardMetadata",
    "torch.distributed.pipelining._utils": "PipeInfo _DTensorMeta _StageBackwardMeta "
    "_StageForwardMeta _StageMeta _TensorMeta",
    "torch.distributed.tensor._dtensor_spec": "TensorMeta",
    "torch.distributed.tensor.placement_types": "Partial Replicate Shard _StridedShard",
}

# These are called with arguments that are checked one by one.
LOADER = ("torch.storage", "_load_from_bytes")
ENCODER = ("_codecs", "encode")

# Returns an object that it is given, if told to: perhaps text.
MIRRORS = frozenset((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core"))

# Python 2's name of it, which protocols 0 to 2 write; no such module exists now.
_OLD_MODULES = {"__builtin__": "builtins"}


def _pairs(table: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((module, name) for module, names in table.items() for name in names.split())


CALLABLE = _pairs(_CALLED) | {LOADER, ENCODER}
ALLOWED = CALLABLE | _pairs(_VALUES)

_MODULES = frozenset(module for module, _ in ALLOWED)
_NAMES = frozenset(name for _, name in ALLOWED) - {LOADER[1], ENCODER[1]}


def addresses(module: str, name: str) -> set[tuple[str, str]]:
    """All globals that an unpickler may take this one for, by protocol."""
    renamed = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return {(module, name), renamed}


def is_akin(module: str, name: str) -> bool:
    """Whether an allowed module is asked for a name that another allowed one has.

    If it is there at all, it is the same data under a second address.
    """
    return module in _MODULES and name in _NAMES


def today(module: str, name: str) -> tuple[str, str]:
    """A global under the name that it has in Python 3."""
    return _OLD_MODULES.get(module, module), name
