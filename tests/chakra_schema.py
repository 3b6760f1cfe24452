"""The Chakra execution trace schema as protobuf descriptors, for reading what the exporter writes.

Built from field numbers and types alone, by the protobuf package, so that it
shares nothing with the exporter's own encoder; the tests read real files with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32",
    "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
_PACKAGE = "ChakraProtoMsg"


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="et_def.proto", package=_PACKAGE, syntax="proto3"
    )

    def message(name: str, *fields: tuple[str, int, str, bool]) -> Any:
        made = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            added = made.field.add(name=field, number=number, label=label)
            if kind in _SCALARS:
                added.type = getattr(_FIELD, f"TYPE_{kind.upper()}")
            else:
                added.type = _FIELD.TYPE_ENUM if kind == "NodeType" else _FIELD.TYPE_MESSAGE
                added.type_name = f".{_PACKAGE}.{kind}"
        return made

    for kind in _SCALARS:
        message(f"{kind.capitalize()}List", ("values", 1, kind, True))
    attribute = message("AttributeProto", ("name", 1, "string", False))
    attribute.field.add(name="doc_string", number=2, label=1, type=_FIELD.TYPE_STRING)
    attribute.oneof_decl.add(name="value")
    for i, kind in enumerate(_SCALARS):
        scalar = getattr(_FIELD, f"TYPE_{kind.upper()}")
        attribute.field.add(
            name=f"{kind}_val", number=3 + 2 * i, label=1, type=scalar, oneof_index=0
        )
        attribute.field.add(
            name=f"{kind}_list", number=4 + 2 * i, label=1, type=_FIELD.TYPE_MESSAGE,
            type_name=f".{_PACKAGE}.{kind.capitalize()}List", oneof_index=0,
        )  # fmt: skip
    message("GlobalMetadata", ("version", 1, "string", False), ("attr", 2, "AttributeProto", True))
    names = ("INVALID", "METADATA", "MEM_LOAD", "MEM_STORE", "COMP", "COMM_SEND", "COMM_RECV",
             "COMM_COLL")  # fmt: skip
    enum = file.enum_type.add(name="NodeType")
    for number, name in enumerate(names):
        enum.value.add(name=f"{name}_NODE", number=number)
    message(
        "IOInfo", *((n, i, "string", False) for i, n in enumerate(("values", "shapes", "types"), 1))
    )
    message(
        "Node",
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "NodeType", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("inputs", 8, "IOInfo", False),
        ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in ("GlobalMetadata", "Node")
    }


_CLASSES = _messages()


def read(source: Path | bytes) -> tuple[Any, list[Any]]:
    """Metadata and nodes of an execution trace."""
    text = source if isinstance(source, bytes) else source.read_bytes()
    found = []
    at = 0
    while at < len(text):
        size = shift = 0
        while True:
            size |= (text[at] & 0x7F) << shift
            shift += 7
            at += 1
            if not text[at - 1] & 0x80:
                break
        assert at + size <= len(text), "a message is cut short"
        message = _CLASSES["Node" if found else "GlobalMetadata"]()
        assert message.ParseFromString(text[at : at + size]) == size
        found.append(message)
        at += size
    return found[0], found[1:]


def attributes(message: Any) -> dict[str, Any]:
    """Values of a message's attributes; lists as lists."""
    found = {}
    for attribute in message.attr:
        which = attribute.WhichOneof("value")
        value = getattr(attribute, which)
        found[attribute.name] = list(value.values) if which.endswith("_list") else value
    return found


def has_unknown_fields(message: Any) -> bool:
    """Whether a message holds anything that the schema does not have."""
    again = type(message)()
    again.CopyFrom(message)
    again.DiscardUnknownFields()
    return again.SerializeToString() != message.SerializeToString()
