"""One rank of the tensor-parallel tests: `python -m tests.server.ranks RANK WORLD_SIZE RENDEZVOUS FOLDER …`.

Generates the same prompts with the model in every folder and prints {folder: tokens} as JSON. One process serves all
models, because importing torch takes longer than any of them.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch

from server.distributed import Shard, connect, disconnect
from tests.server.driver import CPU, GREEDY, Prompt, generate, load_engine, sampled


def prompts() -> list[Prompt]:
    """Greedy and seeded prompts of mixed lengths that join at different steps."""
    rng = random.Random(11)
    return [
        Prompt(
            [rng.randrange(4, 103) for _ in range(rng.randint(3, 40))],
            max_new_tokens=6,
            sampling=GREEDY if i % 2 else sampled(i, temperature=0.8, top_p=0.95),
            joins_at=i % 3,
            chunk=16,
        )
        for i in range(4)
    ]


def tokens(folder: Path, shard: Shard) -> list[list[int]]:
    """The tokens of every prompt."""
    return [prompt.tokens for prompt in generate(load_engine(folder, shard=shard, tokens=1024), prompts())]


if __name__ == "__main__":
    rank, world_size, rendezvous, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    shard = connect(int(rank), int(world_size), rendezvous, CPU)
    print(json.dumps({folder: tokens(Path(folder), shard) for folder in folders}))
    disconnect()
