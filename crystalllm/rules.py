"""When the calls of a communicator start and end: the one declared table.

Replay, its reference and the matcher of capture all read it, so that they
cannot disagree. Sources: NCCL's user guide (collective operations and
point-to-point communication) and what gloo does.
"""

from __future__ import annotations

from enum import Enum


class Ends(Enum):
    """Whose arrivals a participant's end needs, besides its own."""

    ALL = "all members"
    ROOT = "the root"
    SELF = "nobody"
    PAIR = "the other side"


# kind: (the root's end, another member's end); where there is no root both are equal.
RULES: dict[str, tuple[Ends, Ends]] = {
    "all_reduce": (Ends.ALL, Ends.ALL),
    "all_gather": (Ends.ALL, Ends.ALL),
    "reduce_scatter": (Ends.ALL, Ends.ALL),
    "all_to_all": (Ends.ALL, Ends.ALL),
    "barrier": (Ends.ALL, Ends.ALL),
    "broadcast": (Ends.SELF, Ends.ROOT),
    "scatter": (Ends.SELF, Ends.ROOT),
    "reduce": (Ends.ALL, Ends.SELF),
    "gather": (Ends.ALL, Ends.SELF),
    # Up to the eager size of its link a send ends by itself.
    "send": (Ends.PAIR, Ends.PAIR),
    "recv": (Ends.PAIR, Ends.PAIR),
}


def ends(kind: str, *, is_root: bool) -> Ends:
    """Whose arrivals the end of such a call needs."""
    of_root, of_others = RULES[kind]
    return of_root if is_root else of_others
