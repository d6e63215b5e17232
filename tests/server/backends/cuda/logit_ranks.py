"""Ranks, each a process, that sample with the interpreted kernels of a GPU: what `interpreted_logits.py` starts."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import torch

from server.backends.cpu.device import CpuDevice
from server.backends.cuda.kernels import logits as kernels
from server.backends.cuda.logits import KernelLogits
from server.backends.protocol import Logits
from server.blocks import ceil_divide
from server.ranks.collectives import Shard, connect, disconnect
from server.stepping.logit_rules import History
from server.stepping.sampling import Sampler, TokenChoice, Watermark
from server.stepping.vocabulary import Vocabulary
from tests.server.backends.cuda.interpreted_cases import quick_interpreter

SIZE = 9001  # several parts on each of two ranks, and a column of padding
CHOICES = [
    TokenChoice(top_n_tokens=3),
    TokenChoice(do_sample=True, top_k=60, top_p=0.8, temperature=1.3, seed=6),
    TokenChoice(do_sample=True, top_p=0.99, seed=5),
    TokenChoice(do_sample=True, typical_p=0.7, repetition_penalty=1.4, frequency_penalty=0.5, seed=8),
]


@dataclass(frozen=True)
class Sampled:
    """What a rank has chosen, and by which thresholds."""

    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    thresholds: list[list[float]]


def sample(kind: Logits, shard: Shard) -> Sampled:
    """One token for each of the choices, and the thresholds of many nuclei."""
    width = ceil_divide(SIZE, shard.world_size)
    logits = torch.randn(len(CHOICES), SIZE, generator=torch.Generator().manual_seed(1)) * 3
    padded = torch.nn.functional.pad(logits, (0, width * shard.world_size - SIZE), value=float("-inf"))
    part = padded[:, shard.rank * width : (shard.rank + 1) * width].contiguous()
    vocabulary = Vocabulary(kind, shard, SIZE, shard.rank * width, width)
    p = torch.linspace(0.3, 1.0, len(CHOICES)).unsqueeze(1)
    thresholds = vocabulary.top_p_threshold(part, p)
    device = CpuDevice()
    histories = [History([1, 5, 8000], 1, vocabulary, device) if c.needs_history else None for c in CHOICES]
    sampler = Sampler(CHOICES, Watermark(0.5, 2.0), device, vocabulary)
    chosen = sampler(part, torch.arange(len(CHOICES)), torch.arange(len(CHOICES)), histories)
    return Sampled(chosen.token_ids.tolist(), chosen.logprobs.tolist(), chosen.top_ids.tolist(), thresholds.tolist())


def run_rank(arguments: tuple[int, int, str]) -> Sampled:
    """What one rank chooses. It leaves the group even when it fails, so that the others do not wait for it."""
    rank, world_size, rendezvous = arguments
    torch.set_num_threads(1)
    kernels.SEARCH_TILE = kernels.SEARCH_PART  # the interpreter takes as long for each
    shard = connect(rank, world_size, rendezvous, torch.device("cpu"))
    try:
        with quick_interpreter():
            return sample(KernelLogits(), shard)
    finally:
        disconnect()


def on_ranks(world_size: int, rendezvous: Path) -> list[Sampled]:
    """What each rank has chosen. One process imports what they work with, and forks them."""
    given = [(rank, world_size, f"file://{rendezvous}") for rank in range(world_size)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(world_size) as pool:
        return pool.map(run_rank, given, chunksize=1)
