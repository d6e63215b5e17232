"""The ranks of the tensor-parallel tests: `python -m tests.server.ranks WORLD_SIZE RENDEZVOUS FOLDER …`.

Generates the same prompts with the model in every folder on every rank, and prints {folder: tokens} of each rank as a
JSON list in the order of the ranks. One process imports torch and forks the ranks, each of which serves all models:
importing torch takes longer than any of them. No model warms up: whole servers of 2 and 8 shards do, elsewhere.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from server.distributed import Shard, connect, disconnect
from tests.server.driver import CPU, GREEDY, Prompt, generate, greedy, load_engine, sampled

SAMPLINGS = [
    sampled(0, temperature=0.8, top_p=0.95),
    GREEDY,
    sampled(2, min_p=0.05, presence_penalty=1.0, bias_ids=[5, 70], biases=[3.0, 3.0]),
    greedy(bias_ids=[5], biases=[5.0], banned_word_ids=[5, 5], banned_word_lengths=[2], min_tokens=3, end_ids=[5]),
    sampled(4, temperature=1.2, repetition_penalty=1.2, is_constrained=True),
]


def prompts() -> list[Prompt]:
    """Greedy and seeded prompts of mixed lengths that join at different steps."""
    rng = random.Random(11)
    return [
        Prompt(
            [rng.randrange(4, 103) for _ in range(rng.randint(3, 40))],
            max_new_tokens=6,
            sampling=SAMPLINGS[i],
            joins_at=i % 3,
            chunk=16,
            rule=rule if SAMPLINGS[i].is_constrained else None,
            holds=True,
        )
        for i in range(len(SAMPLINGS))
    ]


def rule(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Odd tokens alone, two certain ones behind the second."""
    return [8, 50] if len(tokens) == 2 else [], list(range(1, 103, 2))


def tokens(folder: Path, shard: Shard) -> list[list[int]]:
    """The tokens of every prompt."""
    return [
        prompt.tokens for prompt in generate(load_engine(folder, shard=shard, tokens=1024, warms_up=False), prompts())
    ]


def run_rank(arguments: tuple[int, int, str, Sequence[str]]) -> dict[str, list[list[int]]]:
    """{folder: tokens} of one rank. It leaves the group even when it fails, so that the others do not wait for it."""
    rank, world_size, rendezvous, folders = arguments
    shard = connect(rank, world_size, rendezvous, CPU)
    try:
        return {folder: tokens(Path(folder), shard) for folder in folders}
    finally:
        disconnect()


if __name__ == "__main__":
    size, rendezvous, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(int(size)) as pool:
        given = [(rank, int(size), rendezvous, folders) for rank in range(int(size))]
        print(json.dumps(pool.map(run_rank, given, chunksize=1)))
