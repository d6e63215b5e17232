"""One rank of a tensor-parallel test: `python -m tests.server.ranks FOLDER RANK WORLD_SIZE RENDEZVOUS`.

Generates a fixed set of prompts, alone and together, and prints the tokens of rank 0 as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch

from server.distributed import connect, disconnect
from tests.server.driver import CPU, GREEDY, Prompt, generate, load_engine, sampled


def prompts(vocab_size: int, count: int) -> list[Prompt]:
    """Greedy and seeded prompts of mixed lengths."""
    rng = random.Random(11)
    return [
        Prompt(
            [rng.randrange(4, vocab_size) for _ in range(rng.randint(3, 40))],
            max_new_tokens=12,
            sampling=GREEDY if i % 2 else sampled(i, temperature=0.8, top_p=0.95),
            joins_at=i % 3,
            chunk=16,
        )
        for i in range(count)
    ]


def tokens(folder: Path, rank: int, world_size: int, rendezvous: str, count: int = 8) -> list[list[int]]:
    """Every prompt's tokens: of all together, then of the first two alone."""
    torch.set_num_threads(1)
    engine = load_engine(folder, shard=connect(rank, world_size, rendezvous, CPU))
    wanted = prompts(engine.model.spec.vocab_size, count)
    alone = [replace(p, joins_at=0, tokens=[], logprobs=[], top_ids=[], prompt_values=[]) for p in wanted[:2]]
    together = generate(engine, wanted)
    result = [p.tokens for p in together] + [generate(engine, [p])[0].tokens for p in alone]
    disconnect()
    return result


if __name__ == "__main__":
    folder, rank, world_size, rendezvous = sys.argv[1:]
    print(json.dumps(tokens(Path(folder), int(rank), int(world_size), rendezvous)))
