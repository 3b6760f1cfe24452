"""Ranks that run for real side by side, and where they find each other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

from crystalllm.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Mates:
    """Ranks of one logical world, each a process of this host; all get the same.

    Args:
        ranks: Their global ranks.
        store: Where they meet: "file:///path" of a file that none of them has used
            before, or "tcp://host:port" of a TCPStore that somebody serves for
            this run only.
        limit_s: Seconds in which they have to meet in a new group, and after
            which a call that one of them does not make fails in the others. None
            leaves both to the group's own timeout.
    """

    ranks: tuple[int, ...]
    store: str
    limit_s: float | None = None

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks) or any(r < 0 for r in self.ranks):
            raise UserError(
                "Ranks that run side by side are different ranks of the world",
                where=f"Ranks {', '.join(map(str, self.ranks))}",
                do="Name each rank once",
            )
        address = urlsplit(self.store)
        is_file = address.scheme == "file" and bool(address.path)
        if not is_file and not (address.scheme == "tcp" and address.hostname and _port(self.store)):
            raise UserError(
                "This is no place where ranks can meet",
                where=f"Store {self.store!r}",
                do="Give file:///path or tcp://host:port",
            )
        if self.limit_s is not None and self.limit_s <= 0:
            raise UserError(
                "Ranks that run side by side need time to meet",
                where=f"Limit {self.limit_s:g} s",
                do="Give a limit above zero, or None",
            )

    @property
    def is_file(self) -> bool:
        return urlsplit(self.store).scheme == "file"

    @property
    def path(self) -> str:
        return urlsplit(self.store).path

    @property
    def host_and_port(self) -> tuple[str, int]:
        return urlsplit(self.store).hostname or "", _port(self.store) or 0

    def limit(self, otherwise: timedelta) -> timedelta:
        return otherwise if self.limit_s is None else timedelta(seconds=self.limit_s)


def _port(store: str) -> int | None:
    try:
        return urlsplit(store).port
    except ValueError:  # no number, or too large
        return None
