"""Ranks of tensor-parallel tests: `python -m tests.server.ranks.tensor_parallel SIZE RENDEZVOUS [FORMAT=]FOLDER …`.

Generates the same prompts with the model in every folder on every rank, quantised to FORMAT while it is loaded where
one is given, and prints {[FORMAT=]FOLDER: tokens} of each rank as a JSON list in the order of the ranks. One process
imports torch and forks the ranks, each of which serves all models: importing torch takes longer than any of them. No
model warms up: whole servers of 2 and 8 shards do, elsewhere.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from server.backends import cpu
from server.backends.cpu import Kernels
from server.backends.cpu.build import BuildError
from server.ranks import shared_memory
from server.ranks.collectives import Shard, connect, disconnect
from server.stepping.engine import Engine
from tests.server.driver import (
    CPU,
    GREEDY,
    Drafter,
    Noting,
    PartlyRight,
    Prompt,
    generate,
    greedy,
    load_engine,
    place_adapters,
    sampled,
)
from tests.server.offload.streaming import offloaded, streaming

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


def tokens(model: str | Path, shard: Shard) -> list[list[int]]:
    """The tokens of every prompt.

    model: a folder; before it, a format and =; behind it, + and a --kv-cache-dtype; behind that, @ and how much of the
    weights, of the KV cache and of an area of it is on the device, as in `@0%,50%,1`. The rest is in files. A ! behind
    all that: sequences have drafts; a ? and a folder, or ?mtp: those of the speculative model there, or of the served
    one's own layer, whose proposals stand behind the tokens. A ~ and folders with commas, last of all: two of three
    prompts have these adapters.
    """
    model, _, adapters = str(model).partition("~")
    model, proposes, speculative = model.partition("?")
    model, has_drafts, _ = model.partition("!")
    format, _, stored = model.rpartition("=")
    stored, _, shares = stored.partition("@")
    folder, _, cache = stored.partition("+")
    with ExitStack() as stack:
        settings: dict[str, Any] = {}
        if shares:
            weights, kv, stage_bytes = shares.split(",")
            files = Path(stack.enter_context(TemporaryDirectory()))
            settings["placement"] = stack.enter_context(streaming(Path(folder), weights, files))
            kv_placement = offloaded(Path(folder), kv, files, stage_bytes=int(stage_bytes))
            settings["kv_placement"] = stack.enter_context(kv_placement)
        if proposes:
            is_own = speculative == "mtp"
            settings["speculative"] = {"speculative_method": "mtp"} if is_own else {"speculative_model": speculative}
        engine = load_engine(
            Path(folder),
            shard=shard,
            quantise=format or None,
            kv_cache=cache or "auto",
            tokens=1024,
            total_tokens=64,
            warms_up=False,
            adapters=len(adapters.split(",")) if adapters else 0,
            **settings,
        )
        if adapters:
            return [prompt.tokens for prompt in generate(engine, adapted(engine, adapters.split(",")))]
        found = [prompt.tokens for prompt in generate(engine, prompts())]
        if proposes and speculative == "mtp":
            noting = Noting(found)
            found = [prompt.tokens for prompt in generate(engine, prompts(), noting)]
            return found + [[id, *proposal.token_ids] for id, _, proposal in noting.noted]
        if proposes:
            drafter = PartlyRight(found)
            found = [prompt.tokens for prompt in generate(engine, prompts(), drafter)]
            return found + [[proposal.id, got, *proposal.token_ids] for got, proposal in drafter.noted]
        return [prompt.tokens for prompt in generate(engine, prompts(), Drafter(found))] if has_drafts else found


def adapted(engine: Engine, folders: Sequence[str]) -> list[Prompt]:
    """The prompts, of which some have these adapters."""
    place_adapters(engine, list(map(Path, folders)))
    return [replace(prompt, adapter=i % (len(folders) + 1)) for i, prompt in enumerate(prompts())]


def kernels_here() -> Kernels | None:
    """Through which ranks speak; None where nothing can be compiled."""
    try:
        return cpu.load()
    except BuildError:
        return None


def run_rank(arguments: tuple[int, int, str, Sequence[str]]) -> dict[str, list[list[int]]]:
    """{model: tokens} of one rank. It leaves the group even when it fails, so that the others do not wait for it."""
    rank, world_size, rendezvous, models = arguments
    shard = shared_memory.join(connect(rank, world_size, rendezvous, CPU), kernels_here(), CPU)
    try:
        return {model: tokens(model, shard) for model in models}
    finally:
        disconnect()


if __name__ == "__main__":
    size, rendezvous, *models = sys.argv[1:]
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(int(size)) as pool:
        given = [(rank, int(size), rendezvous, models) for rank in range(int(size))]
        print(json.dumps(pool.map(run_rank, given, chunksize=1)))
