"""What PyTorch, Kineto and NCCL call things, in the words of the `calls` table."""

from __future__ import annotations

import re
from functools import lru_cache

# By the beginning of the name without punctuation; longer words first where one begins another.
_KINDS = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("reducescatter", "reduce_scatter"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("monitoredbarrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("sendrecv", None),
    ("send", "send"),
    ("recv", "recv"),
    ("reduce", "reduce"),
)
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "unsigned char": "uint8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "long long": "int64",
    **{name: name for name in ("uint16", "uint32", "uint64")},
    "unsigned short": "uint16",
    "unsigned int": "uint32",
    "unsigned long": "uint64",
    "bool": "bool",
    "complexhalf": "complex32",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
}

_NCCL_KERNEL = re.compile(r"(?:^|[\s:\d])nccl(?:dev)?(?:kernel|::|_)", re.IGNORECASE)
_NCCL_KERNEL_KIND = re.compile(r"nccl(?:dev)?(?:kernel)?(?:::|_)(?=(\w+))", re.IGNORECASE)
# Libraries whose kernels communicate in ways that the records of NCCL's calls don't tell.
_FOREIGN_KERNEL = re.compile(
    r"(?:^|[\s:_])(?:rccl|oneccl|hccl|hcom|xccl|cncl|eccl|uccl|mscclpp|msccl|nvshmem|deep_ep)",
    re.IGNORECASE,
)
_KERNEL_OP = re.compile(r"_(sum|prod|min|max|premulsum|sumpostdiv)(?:_|\(|$)", re.IGNORECASE)
_OPS = {
    "sum": "sum",
    "prod": "product",
    "min": "min",
    "max": "max",
    # NCCL divides floats before the sum and integers after it.
    "premulsum": "avg",
    "sumpostdiv": "avg",
}

# Names repeat thousands of times in a trace.
_remember = lru_cache(maxsize=4096)


@_remember
def kind_of(name: str) -> str | None:
    """The kind of call that an operator, annotation or collective of this name is."""
    plain = re.sub(r"[^a-z]", "", name.lower().rpartition(":")[2].partition(" ")[0])
    return next((kind for word, kind in _KINDS if plain.startswith(word)), None)


@_remember
def dtype_of(name: str) -> str:
    """torch's spelling of an element type; empty for what is none."""
    word = name.lower().removeprefix("c10::").replace("<", "").replace(">", "")
    return word if re.fullmatch(r"float8_[a-z0-9]+", word) else _DTYPES.get(word, "")


@_remember
def is_nccl_kernel(name: str) -> bool:
    """NCCL's kernels by their names of all versions, demangled or not."""
    return _NCCL_KERNEL.search(name) is not None


@_remember
def is_foreign_kernel(name: str) -> bool:
    """A kernel of another communication library."""
    return _FOREIGN_KERNEL.search(name) is not None


@_remember
def kernel_kind(name: str) -> str | None:
    """The kind of call that NCCL's kernel is named after; None for grouped sends and receives."""
    words = _NCCL_KERNEL_KIND.findall(name)
    return next((kind for word in words if (kind := kind_of(word)) is not None), None)


@_remember
def kernel_reduce_op(name: str) -> str:
    """The reduce op in a kernel's name, else "?"."""
    match = _KERNEL_OP.search(name)
    return _OPS[match[1].lower()] if match else "?"
