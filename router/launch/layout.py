"""Which ranks there are, and where: so many ranks for each pipeline stage, over so many nodes.

Ranks are counted stage by stage, and nodes have equally many in that order: of 2 nodes with 2 stages of 4 ranks, node 0
has stage 0. A stage whose ranks are on several nodes adds up its parts over the network.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The ranks of one launch. Raises ValueError where nodes cannot have equally many."""

    num_shard: int  # ranks of a stage, over which its layers are split
    num_stages: int = 1
    num_nodes: int = 1
    node: int = 0  # this one

    def __post_init__(self) -> None:
        if self.world_size % self.num_nodes:
            raise ValueError(
                f"--num-shard {self.num_shard} times --pipeline-parallel {self.num_stages} makes {self.world_size} "
                f"shards, which {self.num_nodes} nodes (--nnodes) cannot have equally many of: make them a multiple"
            )

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_shard * self.num_stages

    @property
    def num_local(self) -> int:
        """Ranks of one node."""
        return self.world_size // self.num_nodes

    @property
    def splits_stages(self) -> bool:
        """Whether the ranks of a stage are on several nodes."""
        return bool(self.num_local % self.num_shard)

    def stage_of(self, rank: int) -> int:
        """A rank's pipeline stage."""
        return rank // self.num_shard

    def node_of(self, rank: int) -> int:
        """A rank's node."""
        return rank // self.num_local

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.num_local, (node + 1) * self.num_local)

    def forwards(self, group: int) -> dict[str, int]:
        """The sockets of a group's shards on other nodes that those of this node dial, and the node of each."""
        found: dict[str, int] = {}
        for rank in range(self.world_size):
            names = ["shard", "steps"] if self.node == 0 else []  # of the router, and of rank 0, which are there
            found |= {f"group-{group}/{name}-{rank}.sock": self.node_of(rank) for name in names}
        for stage in range(self.num_stages if self.num_stages > 1 else 0):
            found[f"group-{group}/stage-{stage}.sock"] = self.node_of(stage * self.num_shard)
        for stage in range(self.num_stages if self.splits_stages else 0):
            found[f"group-{group}/store-{stage}.sock"] = self.node_of(stage * self.num_shard)
        return {name: node for name, node in found.items() if node != self.node}

    def __str__(self) -> str:
        shards = f"{self.world_size} shards" if self.world_size > 1 else "one shard"
        stages = f" in {self.num_stages} pipeline stages" if self.num_stages > 1 else ""
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return shards + stages + nodes
