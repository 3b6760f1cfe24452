"""What a pickle would import and call, found without running it.

An abstract interpretation of the opcodes: stack, marks and memo are followed,
strings and bytes keep their text, everything else is a placeholder. What it
follows is what CPython's unpicklers do; where the two (C and Python) differ,
it goes on where either would, since stopping early would hide what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Text:
    """A string and where its bytes lie in the pickle."""

    value: str
    start: int
    end: int


class Blob(bytes):
    """Bytes in a pickle, and where they begin in it."""

    start: int

    @classmethod
    def at(cls, data: bytes, start: int, end: int) -> Blob:
        blob = cls(data[start:end])
        blob.start = start
        return blob


@dataclass(frozen=True)
class Name:
    """A global by module and (maybe dotted) name; `spans` are where its text lies."""

    module: str
    name: str
    spans: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Placeholder:
    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return self.what


PLAIN = _Placeholder("a plain value")  # certainly neither text nor bytes
MADE = _Placeholder("what a call returned")
ANY = _Placeholder("what a call returned, perhaps text")
_MARK = _Placeholder("a mark")


class Ends(Exception):
    """The unpickler would fail here, or nothing can be said of what it would do."""


class Visitor:
    """What a walk meets; every method may raise to end it."""

    def found(self, name: Name) -> None:
        """The pickle imports `name`."""

    def calls(self, function: Any, arguments: Any) -> Any:
        """The pickle calls `function`: a Name, or what stands for a value; returns the result."""
        return MADE

    def unresolved(self) -> None:
        """The pickle imports by a text that only a call would tell."""

    def builds(self, instance: Any) -> None:
        """The pickle sets the state of `instance`."""

    def outside(self, what: str) -> None:
        """The pickle refers to something that is not in it."""

    def text(self, text: Text) -> None:
        """The pickle holds a string."""

    def blob(self, blob: Blob) -> None:
        """The pickle holds bytes."""

    def item(self, key: Any, value: Any) -> None:
        """A dictionary gets this item."""


# The length of an argument: fixed, or given by an integer before it.
_FIXED = {
    **dict.fromkeys(b"KhqCU\x80\x82\x8a\x8c", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"JjrTBX\x84\x8b", 4),
    **dict.fromkeys(b"G\x8d\x8e\x95\x96", 8),
}
_COUNTED = frozenset(b"CU\x8a\x8cTBX\x8b\x8d\x8e\x96")
_LINES = {**dict.fromkeys(b"FILSVPgp", 1), **dict.fromkeys(b"ci", 2)}
_BYTES = frozenset(b"CB\x8e\x96")
_STRINGS = frozenset(b"UTX\x8c\x8dSV")
_SIMPLE = frozenset(b"NKMJGFIL\x88\x89\x8a\x8b")
_EMPTY = frozenset(b"]}\x8f")

# Opcodes that do something on an empty stack: where a pickle can begin.
BEGINNINGS = bytes(
    sorted({*_BYTES, *_STRINGS, *_SIMPLE, *_EMPTY, *b"()Pci\x80\x82\x83\x84\x95\x97"})
)


class Walk:
    """One pickle from `start`.

    Args:
        data: The bytes that hold it.
        start: Where it begins.
        visitor: Told what is met.
        spend: Called before each opcode with its cost; may raise to end the walk.
    """

    def __init__(
        self, data: bytes, start: int, visitor: Visitor, spend: Callable[[int], None]
    ) -> None:
        self.data, self.at, self.visitor, self.spend = data, start, visitor, spend
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> int:
        """Follows the pickle to its end.

        Returns:
            The offset after it.

        Raises:
            Ends: It has no end.
        """
        while True:
            if self.at >= len(self.data):
                raise Ends("its bytes end before it does")
            code = self.data[self.at]
            self.at += 1
            begin, end = self._argument(code)
            self.spend(1 + (end - begin) // 64)  # copying is cheap beside a step
            if code == ord("."):
                self._pop()
                return self.at
            self._step(code, begin, end)

    # --- arguments -----------------------------------------------------------

    def _argument(self, code: int) -> tuple[int, int]:
        """Where the argument of `code` begins and ends, length field left out."""
        begin = self.at
        if code in _LINES:
            end = begin
            for _ in range(_LINES[code]):
                end = self.data.find(b"\n", end) + 1
                if end == 0:
                    raise Ends("a line does not end")
            self.at = end
            return begin, end - 1
        size = _FIXED.get(code, 0)
        end = begin + size
        if code in _COUNTED:
            begin, end = end, end + self._number(begin, end, signed=code in b"T\x8b")
            if end < begin:
                raise Ends("a length is negative")
        if end > len(self.data):
            raise Ends("its bytes end before it does")
        self.at = end
        return begin, end

    def _number(self, begin: int, end: int, *, signed: bool = False) -> int:
        if end > len(self.data):
            raise Ends("its bytes end before it does")
        return int.from_bytes(self.data[begin:end], "little", signed=signed)

    # --- the stack -----------------------------------------------------------

    def _pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise Ends("it takes a value that is not there")
        return self.stack.pop()

    def _top(self) -> Any:
        value = self._pop()
        self.stack.append(value)
        return value

    def _pop_to_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise Ends("it goes back to a mark that is not there")

    def _take(self, count: int) -> tuple[Any, ...]:
        return tuple(self._pop() for _ in range(count))[::-1]

    # --- opcodes -------------------------------------------------------------

    def _step(self, code: int, begin: int, end: int) -> None:
        push = self.stack.append
        if code in _STRINGS:
            push(self._text(code, begin, end))
        elif code in _BYTES:
            blob = Blob.at(self.data, begin, end)
            self.visitor.blob(blob)
            push(blob)
        elif code in _SIMPLE or code in _EMPTY:
            push(PLAIN)
        elif code == ord("("):
            push(_MARK)
        elif code == ord(")"):
            push(())
        elif code in b"\x85\x86\x87":
            push(self._take(code - 0x84))
        elif code in b"tld\x91":
            items = self._pop_to_mark()
            if code == ord("d"):
                self._items(items)
            push(tuple(items) if code == ord("t") else PLAIN)
        elif code in b"aes\x90u":
            self._fill(code)
        elif code in b"012":
            self._shuffle(code)
        elif code in b"pqrghj\x94":
            self._remember(code, begin, end)
        elif code in b"ci\x93":
            self._global(code, begin, end)
        elif code in b"Ro\x81\x92b":
            self._call(code)
        elif code in b"PQ":
            if code == ord("Q"):
                self._pop()
            self.visitor.outside("a persistent id")
            push(MADE)
        elif code in b"\x82\x83\x84":
            self.visitor.outside(f"extension {self._number(begin, end)}")
            push(MADE)
        elif code in b"\x97\x98":
            self.visitor.outside("a buffer")
            raise Ends("it takes a buffer that is not there")
        elif code not in b"\x80\x95":
            raise Ends(f"byte {code:#04x} is no opcode")

    def _text(self, code: int, begin: int, end: int) -> Any:
        raw = self.data[begin:end]
        if code == ord("S"):
            raw = raw.strip()
            if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
                return PLAIN
            offset = self.data.find(raw, begin)
            begin, end, raw = offset + 1, offset + len(raw) - 1, raw[1:-1]
            # Escapes as in a bytes literal; the decoder below is the same for ASCII.
            value = _decode(raw, "unicode_escape")
        elif code == ord("V"):
            value = _decode(raw, "raw_unicode_escape")
        else:
            value = _decode(raw, "utf-8", errors="surrogatepass")
        if value is None:
            return PLAIN
        text = Text(value, begin, end)
        self.visitor.text(text)
        return text

    def _items(self, flat: list[Any]) -> None:
        for key, value in zip(flat[::2], flat[1::2], strict=False):
            self.visitor.item(key, value)

    def _fill(self, code: int) -> None:
        if code == ord("a"):
            self._pop()
        elif code == ord("s"):
            self._items(list(self._take(2)))
        else:
            items = self._pop_to_mark()
            if code == ord("u"):
                self._items(items)
        self._top()

    def _shuffle(self, code: int) -> None:
        if code == ord("2"):
            self.stack.append(self._top())
        elif code == ord("1"):
            self._pop_to_mark()
        elif self.stack:
            self.stack.pop()  # a mark too
        else:
            raise Ends("it takes a value that is not there")

    def _remember(self, code: int, begin: int, end: int) -> None:
        if code == 0x94:
            self.memo[len(self.memo)] = self._top()
            return
        if code in b"pg":
            try:
                index = int(self.data[begin:end])
            except ValueError:
                raise Ends("a place in the memo is no number") from None
        else:
            index = self._number(begin, end)
        if code in b"pqr":
            self.memo[index] = self._top()
        elif index in self.memo:
            self.stack.append(self.memo[index])
        else:
            raise Ends("it takes from the memo what is not there")

    def _global(self, code: int, begin: int, end: int) -> None:
        if code == 0x93:
            module, name = self._take(2)
            if not (isinstance(module, Text) and isinstance(name, Text)):
                if ANY in (module, name):
                    self.visitor.unresolved()
                raise Ends("the name of a global is no text")
            spans = ((module.start, module.end), (name.start, name.end))
            found = Name(module.value, name.value, spans)
        else:
            lines = self.data[begin:end].split(b"\n")
            module, name = (_decode(line, "utf-8") for line in lines)
            if module is None or name is None:
                raise Ends("the name of a global is no text")
            found = Name(module, name, ((begin, end),))
        arguments = self._pop_to_mark() if code == ord("i") else []
        self.visitor.found(found)
        made = self.visitor.calls(found, tuple(arguments)) if code == ord("i") else found
        self.stack.append(made)

    def _call(self, code: int) -> None:
        if code == ord("b"):
            self._pop()
            self.visitor.builds(self._top())
            return
        if code == ord("o"):
            items = self._pop_to_mark()
            if not items:
                raise Ends("it calls nothing")
            function, arguments = items[0], tuple(items[1:])
        elif code == 0x92:
            function, arguments, _ = self._take(3)
        else:
            function, arguments = self._take(2)
        self.stack.append(self.visitor.calls(function, arguments))


def _decode(raw: bytes, encoding: str, errors: str = "strict") -> str | None:
    try:
        return raw.decode(encoding, errors)
    except UnicodeDecodeError:
        return None
