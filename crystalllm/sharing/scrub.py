"""Secrets and names of people and machines, found and replaced before a file goes to others.

In text and JSON a marker takes their place. In payloads, which are bytes of a
fixed length, every byte of them becomes an x: pickles keep their framing and
the sizes that were sent before stay right. Pickles are read, never run.

What this finds is what looks like a secret by its name or its form. It is no
proof that there is none.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeVar

from crystalllm.sharing.pickle_walk import Blob, Ends, Name, Text, Visitor, Walk

AnyText = TypeVar("AnyText", str, bytes)
Span = tuple[int, int]

_SECRET_WORDS = frozenset(
    (
        "key",
        "token",
        "pwd",
        "passphrase",
        "credentials",
        "auth",
        "authorization",
        "cookie",
        "bearer",
    )
)
_SECRET_PARTS = re.compile(r"passw|secret|credential|apikey|(?:token|jwt)$", re.IGNORECASE)
_PERSONAL_WORDS = frozenset(
    ("user", "username", "login", "logname", "host", "hostname", "nodename", "fqdn", "email")
)
# Names that our own files use for other things.
_HARMLESS = frozenset(("key", "store_key"))
_LARGEST_PLAIN_NUMBER = 99_999

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ASSIGNMENT = (
    r"""(?<![\w.])([A-Za-z][\w.\-]{0,80})["']?\s{0,4}[=:]\s{0,4}"""
    r"""(?:["']([^"']+)["']|([^\s,;&"']+))"""
)
_FLAG = re.compile(r"--?([A-Za-z][\w\-]*)")

# Kind, pattern, the group that goes in text, the group that goes in bytes.
_RULES = (
    (
        "private key",
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----[\s\S]*?"
        r"(?:-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----|\Z)",
        0,
        0,
    ),
    (
        "token",
        r"\b(?:(?:gh[pousr]|github_pat|glpat|npm|pypi|nvapi|dop_v1|shpat|sk_live|sk_test|rk_live)"
        r"[_\-][\w\-]{16,}|hf_[A-Za-z0-9]{16,}|sk-[\w\-]{16,}|xox[abeoprs]-[\w\-]{10,}"
        r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w\-]{30,}|ya29\.[\w\-]{16,}"
        r"|eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*)",
        0,
        0,
    ),
    ("credentials in a URL", r"\b[A-Za-z][A-Za-z0-9+.\-]{0,30}://([^\s/@\"']+)@", 1, 1),
    ("token", r"\b[Bb](?:earer|asic)\s+((?=\S*[\d=])[\w+/=.\-]{8,})", 1, 1),
    ("home", r"(?<![\w.\-])/(?:home|Users)/([^\s/:;,\"'<>|\\]+)", 0, 1),
    ("home", r"(?<![\w.\-/])/(root)(?![\w.\-])", 0, 1),
    ("home", r"\b[A-Za-z]:\\+Users\\+([^\s/:;,\"'<>|\\]+)", 0, 1),
)
_REMOVED = (b"<removed", "<removed")
_MARKERS = {"home": "~", "user": "<user>", "host": "<host>"}
_SHORTEST_HOST = 4  # shorter ones are words as well
_COMMON = frozenset({"", "root", "user", "admin", "nobody", "localhost", "default", "worker"})


def is_secret_name(name: str) -> bool:
    """Whether a key, variable or flag of this name holds a secret: by its words."""
    if name in _HARMLESS:
        return False
    return any(
        word.lower() in _SECRET_WORDS or _SECRET_PARTS.search(word) for word in _WORDS.findall(name)
    )


def _is_personal_name(name: str) -> bool:
    words = _WORDS.findall(name)
    return bool(words) and words[-1].lower() in _PERSONAL_WORDS


@dataclass
class Scrubber:
    """Replaces what should not leave this machine, and counts it.

    Args:
        user: Name of the user whose machine this is.
        host: Name of the machine.
        home: The user's home folder.
    """

    user: str = field(default_factory=lambda: _or_empty(getpass.getuser))
    host: str = field(default_factory=socket.gethostname)
    home: str = field(default_factory=lambda: os.path.expanduser("~"))
    found: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (place, kind)

    def __post_init__(self) -> None:
        rules = list(_RULES)
        home = self.home.rstrip("/")
        parent, _, last = home.rpartition("/")
        if parent:
            path = rf"(?<![\w.\-]){re.escape(parent)}/({re.escape(last)})(?![\w.\-])"
            rules.append(("home", path, 0, 1))
        if self.user not in _COMMON:
            user = re.escape(self.user)
            rules.append(("user", rf"(?<![\w.\-])({user})@|/({user})(?=/|\Z)|\A({user})\Z", 0, 0))
        hosts = {self.host, self.host.split(".")[0]} - _COMMON
        for host in sorted((h for h in hosts if len(h) >= _SHORTEST_HOST), key=len, reverse=True):
            rules.append(("host", rf"(?<![\w.\-])({re.escape(host)})(?![\w\-])", 0, 0))
        self._text_rules = [(kind, re.compile(p), group) for kind, p, group, _ in rules]
        self._byte_rules = [(kind, re.compile(p.encode()), group) for kind, p, _, group in rules]
        self._assignment = re.compile(_ASSIGNMENT), re.compile(_ASSIGNMENT.encode())

    # --- text and JSON -------------------------------------------------------

    def text(self, value: str, place: str) -> str:
        """`value` with markers; what was found is counted under `place`."""
        pieces, at = [], 0
        for start, end, kind in self._spans(value):
            pieces += [value[at:start], _MARKERS.get(kind, f"<removed: {kind}>")]
            self.found[place, kind] += 1
            at = end
        return "".join([*pieces, value[at:]])

    def json(self, value: Any, place: str, name: str = "") -> Any:
        """A JSON value with markers; places are named `place`.key.key."""
        if name and isinstance(value, str | int | float) and not isinstance(value, bool):
            kind = self._kind_by_name(name, value)
            if kind:
                self.found[place, kind] += 1
                return f"<removed: {kind}>"
        if isinstance(value, str):
            return self.text(value, place)
        if isinstance(value, dict):
            return {
                self.text(k, place): self.json(v, f"{place}.{self._plain(k)}", k)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return self._list(value, place, name)
        return value

    def _kind_by_name(self, name: str, value: Any) -> str:
        if isinstance(value, str):
            if not value:
                return ""
            if is_secret_name(name):
                return "secret"
            return "name" if _is_personal_name(name) else ""
        return "secret" if is_secret_name(name) and abs(value) > _LARGEST_PLAIN_NUMBER else ""

    def _list(self, values: list[Any], place: str, name: str) -> list[Any]:
        """Items in order; one that follows a flag such as --token is its value."""
        scrubbed, flag = [], name
        for value in values:
            scrubbed.append(self.json(value, place, flag))
            match = _FLAG.fullmatch(value) if isinstance(value, str) else None
            flag = match[1] if match else name
        return scrubbed

    def _plain(self, key: str) -> str:
        """A key as part of a place's name: a place must not tell what was removed."""
        return "…" if self._spans(key) else key

    # --- payloads ------------------------------------------------------------

    def payload(self, value: bytes, place: str) -> bytes:
        """`value` with an x for every byte that must not leave; as long as before."""
        hidden = bytearray(value)
        for start, end, kind in self._in_payload(value):
            hidden[start:end] = b"x" * (end - start)
            self.found[place, kind] += 1
        return bytes(hidden)

    def _in_payload(self, value: bytes) -> list[tuple[int, int, str]]:
        spans: list[tuple[int, int, str]] = []
        at = 0
        while value[at : at + 1] == b"\x80":
            look = _Look()
            try:
                end = Walk(value, at, look, lambda steps: None).run()
            except Ends:
                break
            spans += self._in_pickle(value, look)
            at = end
        return spans + [(at + a, at + b, kind) for a, b, kind in self._spans(value[at:])]

    def _in_pickle(self, value: bytes, look: _Look) -> list[tuple[int, int, str]]:
        spans = [(*span, "secret") for span in sorted(look.secrets - look.names)]
        for start, end in sorted(look.texts - look.names - look.secrets):
            spans += [(start + a, start + b, k) for a, b, k in self._spans(value[start:end])]
        for start, end in sorted(look.blobs - look.secrets):
            spans += [(start + a, start + b, k) for a, b, k in self._in_payload(value[start:end])]
        return spans

    # --- finding -------------------------------------------------------------

    def _spans(self, value: AnyText) -> list[tuple[int, int, str]]:
        """Start, end and kind of what goes, in order and without overlap."""
        found = []
        is_text = isinstance(value, str)
        for kind, pattern, group in self._text_rules if is_text else self._byte_rules:
            for match in pattern.finditer(value):  # type: ignore[arg-type]
                # A rule of alternatives says by its groups which part goes.
                part = match.lastindex if kind in ("user", "host") else group
                found.append((*match.span(part or 0), kind))
        for match in self._assignment[0 if is_text else 1].finditer(value):  # type: ignore[arg-type]
            name = match[1] if is_text else match[1].decode("ascii")
            start, end = match.span(2 if match[2] else 3)
            if is_secret_name(name) and not value.startswith(_REMOVED[is_text], start):
                found.append((start, end, "secret"))
        chosen: list[tuple[int, int, str]] = []
        for start, end, kind in sorted(found, key=lambda span: (span[0], -span[1], span[2])):
            if not chosen or start >= chosen[-1][1]:
                chosen.append((start, end, kind))
            else:
                chosen[-1] = (chosen[-1][0], max(end, chosen[-1][1]), chosen[-1][2])
        return chosen


class _Look(Visitor):
    """Where a pickle's strings and bytes lie, and which of them are what."""

    def __init__(self) -> None:
        self.texts: set[Span] = set()
        self.blobs: set[Span] = set()
        self.names: set[Span] = set()
        self.secrets: set[Span] = set()

    def text(self, text: Text) -> None:
        self.texts.add((text.start, text.end))

    def blob(self, blob: Blob) -> None:
        self.blobs.add((blob.start, blob.start + len(blob)))

    def found(self, name: Name) -> None:
        self.names.update(name.spans)

    def item(self, key: Any, value: Any) -> None:
        if not isinstance(key, Text) or not is_secret_name(key.value):
            return
        if isinstance(value, Text):
            self.secrets.add((value.start, value.end))
        elif isinstance(value, Blob):
            self.secrets.add((value.start, value.start + len(value)))


def _or_empty(function: Any) -> str:
    try:
        return str(function())
    except (OSError, KeyError, ImportError):
        return ""  # no entry for this user, as in some containers
