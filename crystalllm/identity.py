"""Who a process is in the logical world, and how a program is told.

A program reads its place from the variables that torchrun sets; nothing else
says which rank it is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from crystalllm.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One rank of a logical world.

    Args:
        rank: Global rank, 0 to world_size - 1.
        world_size: Ranks of the logical world.
        ranks_per_node: Ranks of one logical node; the last node may have fewer.
        seed: Of everything that is invented.
        environment: Variables of the job, set before those of the rank.
    """

    rank: int
    world_size: int
    ranks_per_node: int = 8
    seed: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UserError(
                "A world needs at least one rank",
                where=f"World size {self.world_size}",
                do="Pass a positive --world-size",
            )
        if not 0 <= self.rank < self.world_size:
            raise UserError(
                f"Rank {self.rank} is outside the world",
                where=f"World size {self.world_size}",
                do=f"Pass a --rank from 0 to {self.world_size - 1}",
            )
        if self.ranks_per_node < 1:
            raise UserError(
                "A node needs at least one rank",
                where=f"Ranks per node {self.ranks_per_node}",
                do="Pass a positive --ranks-per-node",
            )

        if self.seed < 0:
            raise UserError(
                "A seed is a whole number from 0",
                where=f"Seed {self.seed}",
                do="Pass a --seed of 0 or more",
            )

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_node

    @property
    def local_world_size(self) -> int:
        return min(self.ranks_per_node, self.world_size - self.node * self.ranks_per_node)

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    def variables(self) -> dict[str, str]:
        """The environment as torchrun gives it to this rank.

        Names and meaning as in torch.distributed.elastic.agent.server
        (local_elastic_agent), torch 2.11 and 2.13.
        """
        variables = {
            **self.environment,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            # The store is ours and listens nowhere; these only have to parse.
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "crystalllm",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if self.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            # torchrun's default for more than one process a node.
            variables.setdefault("OMP_NUM_THREADS", "1")
        return variables
