"""The largest step that can come, made up, so that what it takes is known before the KV cache takes the rest.

On a GPU the step's peak is measured, and so is what captured steps keep. On a CPU neither is: there the cache's tensors
take memory only when they are written, and a share of the machine's memory is kept back for everything else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from server.cache import BLOCK_SIZE, num_blocks
from server.pb import generate_pb2 as pb

# What torch's allocator cannot use of its memory, between pieces that are taken, on top of a step's peak.
FRAGMENTATION = 0.1

WORST_SAMPLING = pb.SamplingParameters(
    do_sample=True,
    temperature=0.9,
    top_k=10,
    top_p=0.9,
    typical_p=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    watermark=True,
)


@dataclass(frozen=True)
class Reserve:
    """Device memory that the KV cache must leave."""

    step_bytes: int = 0  # of the largest step, beside weights and cache
    graph_bytes: int = 0  # of all captured steps


@dataclass(frozen=True)
class Rehearsal:
    """Prompts of the largest step's size: as long as they can be, and as many as are sampled together."""

    lengths: list[int]
    has_encoder: bool

    @classmethod
    def of(cls, *, prefill_tokens: int, total_tokens: int, sampled: int, has_encoder: bool) -> Rehearsal:
        """prefill_tokens: of the largest step; total_tokens: of the longest sequence; sampled: rows at once."""
        short = min(sampled, prefill_tokens)
        whole, rest = divmod(max(prefill_tokens - short, 0), total_tokens)
        return cls([length for length in [total_tokens] * whole + [rest] + [1] * short if length], has_encoder)

    @property
    def kv_tokens(self) -> int:
        """Tokens of a KV cache that has room for it."""
        return sum(num_blocks(length) + self.has_encoder for length in self.lengths) * BLOCK_SIZE

    def request(self) -> pb.StepRequest:
        """One step that computes all prompts, with everything about them that a client can ask for."""
        request, blocks = pb.StepRequest(), itertools.count()
        for id, length in enumerate(self.lengths):
            decoded, encoded = ([0], [0] * length) if self.has_encoder else ([0] * length, [])
            request.add.add(
                id=id,
                token_ids=decoded,
                blocks=itertools.islice(blocks, num_blocks(len(decoded))),
                encoder_token_ids=encoded,
                encoder_blocks=itertools.islice(blocks, num_blocks(len(encoded))),
                sampling=WORST_SAMPLING,
                top_n_tokens=5,
                prompt_logprobs=True,
            )
            request.chunk_ids.append(id)
            request.chunk_tokens.append(len(decoded))
        return request


def step_bytes(step: Callable[[], object], device: torch.device) -> int:
    """What a GPU needs for `step` beside what is allocated now; 0 on a CPU."""
    if device.type != "cuda":
        step()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return int((torch.cuda.max_memory_allocated(device) - before) * (1 + FRAGMENTATION))


def taken_bytes(action: Callable[[], object], device: torch.device) -> int:
    """By how much `action` lessens a GPU's free memory; 0 on a CPU."""
    if device.type != "cuda":
        action()
        return 0
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(device)
    action()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return max(0, before - torch.cuda.mem_get_info(device)[0])
