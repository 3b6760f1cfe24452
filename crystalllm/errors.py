"""Errors that a user can act on: what happened, where, what to do."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user's, or a state of the machine that the user can mend.

    Args:
        what: What is wrong, one sentence without the full stop.
        where: File, key, rank, call or shape that it is about.
        do: What to do about it.
    """

    def __init__(self, what: str, *, where: str, do: str) -> None:
        self.what, self.where, self.do = what, where, do
        super().__init__(f"{what}. {where}. {do}.")
