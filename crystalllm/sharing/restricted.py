"""Payloads of strangers: looked at, never unpickled, refused if they could do more than hold data.

An object collective unpickles what another rank sent, and a captured payload is
served as that. So who sends a payload book could have a program run anything.
`check_payload` refuses pickles that name anything but plain data (`allowed`).

Where a pickle begins is the sender's choice as well (sizes travel in messages
of their own, and bytes inside an object may be unpickled later), so every
offset is taken as a possible beginning. From offset 0, and from the end of each
whole pickle there, what cannot be resolved is refused; from the others only
what would really import something.

What this does not guard against: values that are wrong, or that take much
memory.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import struct
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from crystalllm import tables
from crystalllm.errors import UserError
from crystalllm.sharing.allowed import (
    ALLOWED,
    CALLABLE,
    ENCODER,
    LOADER,
    MIRRORS,
    addresses,
    is_akin,
    today,
)
from crystalllm.sharing.pickle_walk import ANY, BEGINNINGS, MADE, Ends, Name, Text, Visitor, Walk

MARKER = "untrusted.json"

_PICKLE = re.compile(rb"\x80[\x00-\x05]")
_BEGINNING = re.compile(b"[" + re.escape(BEGINNINGS) + b"]")
# Without one of these bytes nothing is imported: STACK_GLOBAL, GLOBAL and INST with their lines.
_IMPORT = re.compile(rb"\x93|[ci][\w.]+\n[\w.]+\n")
# torch.save's format before zip; a zip could hide its pickle by compression.
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_ARCHIVE_END = b"PK\x05\x06"
_ARCHIVE = ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10))
_STEPS_PER_BYTE = 256
_STEPS = 100_000


class _Refused(Exception):
    """Why a pickle is refused."""


def check_payload(value: bytes, *, where: str) -> None:
    """Refuses bytes that could do more than hold data when they are unpickled.

    Args:
        value: What a rank sent; nothing of it runs. May be padded at the end.
        where: Which entry of which file, for the message.

    Raises:
        UserError: Names what the pickle would import or call.
    """
    try:
        _check(value)
    except _Refused as reason:
        raise UserError(
            f"A payload from outside could run code: {reason}",
            where=where,
            do="Ask who sent it what that is; after a review, --trust takes it as it is",
        ) from None


def check_table(path: Path) -> int:
    """Checks every entry of a payload table.

    Returns:
        How many entries it has.

    Raises:
        UserError: It cannot be read, or names the first entry that is refused.
    """
    names = ("group", "seq", "rank", "peer", "store_key", "value")
    table, _ = tables.PAYLOADS.read(path, columns=names)
    columns = [table[name].to_pylist() for name in names]
    seen: set[bytes] = set()
    for group, seq, rank, peer, key, value in zip(*columns, strict=True):
        if value in seen:
            continue
        place = f"store key {key}" if key else f"group {group}, seq {seq}"
        to = f" to {peer}" if peer >= 0 else ""
        check_payload(value, where=f"File {path}, {place}, rank {rank}{to}")
        seen.add(value)
    return table.num_rows


def mark_untrusted(folder: Path, *, source: str, trusted: bool) -> None:
    """Leaves word beside tables that they came from outside.

    Args:
        folder: Where the tables are.
        source: sha256 of the file that they came in.
        trusted: The user vouched for them, so that payloads are not checked.
    """
    text = json.dumps({"source_sha256": source, "trusted": trusted}, indent=2, sort_keys=True)
    (folder / MARKER).write_text(text + "\n")


def is_untrusted(folder: Path) -> bool:
    """Whether the tables in `folder` came from outside and nobody vouched for them."""
    try:
        return json.loads((folder / MARKER).read_text())["trusted"] is not True
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True  # damaged: the safe side


def _check(value: bytes) -> None:
    budget = _Budget(_STEPS + _STEPS_PER_BYTE * len(value))
    at = 0
    while _PICKLE.match(value, at):
        try:
            at = Walk(value, at, _Strict(budget), budget.spend).run()
        except Ends as reason:
            raise _Refused(f"its pickle cannot be followed, {reason}") from None
    _check_every_offset(value, budget)


def _check_every_offset(value: bytes, budget: _Budget) -> None:
    _refuse_compressed(value)
    if not _IMPORT.search(value):
        return
    visitor = _Lenient(budget)
    for match in _BEGINNING.finditer(value):
        try:
            Walk(value, match.start(), visitor, budget.spend).run()
        except Ends:
            continue
        except RecursionError:
            raise _Refused("bytes lie within bytes too deeply") from None


def _refuse_compressed(value: bytes) -> None:
    """torch.load reads any zip; what torch.save writes is not compressed."""
    if _ARCHIVE_END not in value:
        return
    for signature, at in _ARCHIVE:
        for match in re.finditer(re.escape(signature), value):
            method = value[match.start() + at : match.start() + at + 2]
            if len(method) == 2 and struct.unpack("<H", method)[0] != 0:
                raise _Refused("it holds a compressed archive, whose content is not seen here")


class _Budget:
    """Steps that one value may take, so that a stranger's bytes cannot take hours."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.decoded: set[bytes] = set()  # bytes that were written as text, and checked

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise _Refused("it takes too many steps to follow")


class _Restricted(Visitor):
    """What both ways of looking refuse."""

    def __init__(self, budget: _Budget) -> None:
        self.budget = budget

    def calls(self, function: Any, arguments: Any) -> Any:
        pair = today(function.module, function.name) if isinstance(function, Name) else None
        if pair == LOADER and not _is_legacy(arguments):
            raise _Refused(f"it calls {function} on what is no tensor of torch's")
        if pair == ENCODER:
            return self._decoded(arguments)
        return ANY if pair in MIRRORS else MADE

    def _decoded(self, arguments: Any) -> bytes:
        """Bytes as protocols 0 to 2 write them: as text that is encoded."""
        if not _is_latin1(arguments):
            raise _Refused("it encodes by another encoding than latin1")
        try:
            value = arguments[0].value.encode("latin1")
        except UnicodeEncodeError:
            raise Ends("its bytes are no latin1") from None
        if value not in self.budget.decoded:
            self.budget.decoded.add(value)
            self.budget.spend(len(value))
            _check_every_offset(value, self.budget)
        return value

    def unresolved(self) -> None:
        raise _Refused("it names what an earlier call returned")

    def builds(self, instance: Any) -> None:
        if isinstance(instance, Name):
            raise _Refused(f"it changes {instance} itself")


class _Strict(_Restricted):
    """Where a pickle is known to begin: only what is allowed passes."""

    def found(self, name: Name) -> None:
        if today(name.module, name.name) not in ALLOWED:
            raise _Refused(f"it names {name}")

    def calls(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Name):
            raise _Refused(f"it calls {function!r}")
        if today(function.module, function.name) not in CALLABLE:
            raise _Refused(f"it calls {function}")
        return super().calls(function, arguments)

    def outside(self, what: str) -> None:
        raise _Refused(f"it refers to {what}")


class _Lenient(_Restricted):
    """Where perhaps nobody ever begins: only what would work is refused.

    Read from the wrong offset, a harmless pickle takes other things from its
    memo than it put there, and seems to name what does not exist.
    """

    def found(self, name: Name) -> None:
        pair = today(name.module, name.name)
        if pair in ALLOWED or is_akin(*pair):
            return
        if any(_is_there(*address) for address in addresses(name.module, name.name)):
            raise _Refused(f"from some offset it names {name}")
        raise Ends("it names what is not there")

    def calls(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Name) and function not in (MADE, ANY):
            raise Ends("it calls a value")
        if isinstance(function, Name) and function.name == "str":
            raise _Refused(f"from some offset it calls {function}")  # would make names
        return super().calls(function, arguments)

    def outside(self, what: str) -> None:
        if not what.startswith("a persistent"):  # torch.load resolves those
            raise Ends(f"it refers to {what}")


def _is_legacy(arguments: Any) -> bool:
    return (
        isinstance(arguments, tuple)
        and len(arguments) == 1
        and isinstance(arguments[0], bytes)
        and arguments[0].startswith(_LEGACY)
    )


def _is_latin1(arguments: Any) -> bool:
    return (
        isinstance(arguments, tuple)
        and len(arguments) == 2
        and all(isinstance(a, Text) for a in arguments)
        and arguments[1].value == "latin1"
    )


@functools.lru_cache(maxsize=4096)
def _is_there(module: str, name: str) -> bool:
    """Whether `name` could be imported from `module` here; if in doubt, yes. Imports nothing."""
    first = name.split(".")[0]
    if not first.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return False
    loaded = sys.modules.get(module)
    if loaded is not None:
        space = vars(loaded)
        return first in space or "__getattr__" in space or hasattr(type(loaded), first)
    spec = _find(module)
    if spec is None or spec.origin is None:
        return False  # not there, or a folder without code
    if not spec.origin.endswith(".py"):
        return True
    try:
        source = Path(spec.origin).read_bytes()
    except OSError:
        return True
    dynamic = rb"import \*|\b__getattr__\b|\bglobals\(|\bsys\.modules\b"
    return bool(re.search(rb"\b%s\b|%s" % (first.encode(), dynamic), source))


def _find(module: str) -> ModuleSpec | None:
    top, *rest = module.split(".")
    find: Callable[[str], ModuleSpec | None] = importlib.util.find_spec
    try:
        spec = find(top)
        name = top
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            name = f"{name}.{part}"
            spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    except (ImportError, ValueError, AttributeError):
        return ModuleSpec(module, None, origin="unknown")
    return spec
