"""How a group lies on the nodes, as far as the time of its transfers depends on it.

Written as text, "16x2" is 16 ranks on 2 nodes; the empty text is any placement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from crystalllm.errors import UserError


@dataclass(frozen=True, order=True)
class Placement:
    """So many ranks on so many nodes.

    Args:
        ranks: Members of the group, at least one.
        nodes: Nodes that have at least one of them.
    """

    ranks: int
    nodes: int

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise UserError(
                "A group cannot lie so",
                where=f"{self.ranks} ranks on {self.nodes} nodes",
                do="Give at least one rank for each node, and at least one node",
            )

    def __str__(self) -> str:
        return f"{self.ranks}x{self.nodes}"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Raises UserError for what is no placement."""
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
        if match is None:
            raise UserError(
                "A placement is ranks x nodes",
                where=f"Placement {text!r}",
                do="Write it as 16x2 for 16 ranks on 2 nodes",
            )
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of(cls, members: Iterable[int], node_of: Mapping[int, int]) -> Placement:
        """Of these ranks, given the node of each."""
        nodes = [node_of[member] for member in members]
        return cls(len(nodes), len(set(nodes)))
