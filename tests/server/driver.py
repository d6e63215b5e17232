"""Drives an engine the way the router does, without a router: requests in, tokens out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from server import attention
from server.cache import BLOCK_SIZE, num_blocks
from server.distributed import Shard
from server.engine import Engine
from server.layers.linear import DenseFormat, MakeFormat
from server.model import families, transformer
from server.model.transformer import Parts
from server.pb import generate_pb2 as pb
from server.quant.int8 import Int8Format
from server.sampling import Watermark
from server.weights import Checkpoint, Weights

CPU = torch.device("cpu")
GREEDY = pb.SamplingParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)


def sampled(seed: int, **changes: float) -> pb.SamplingParameters:
    """Neutral sampling with `seed`, changed by `changes`."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
    return pb.SamplingParameters(do_sample=True, seed=seed, **(neutral | changes))


def load_engine(
    folder: Path,
    *,
    shard: Shard | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    make_format: MakeFormat = DenseFormat,
    reference: bool = False,
    tokens: int = 4096,
) -> Engine:
    """The checkpoint in `folder` as one rank's engine, with a KV cache of `tokens`."""
    shard = shard or Shard()
    family, spec = families.find(json.loads((folder / "config.json").read_text()))
    weights = Weights.open(Checkpoint(folder), family.names, shard, dtype, device)
    backend = attention.choose(disable_custom_kernels=reference)
    make_head = DenseFormat if make_format is Int8Format else make_format
    model = transformer.load(weights, spec, Parts(backend, make_format, make_head))
    engine = Engine(model, shard, device, dtype, Watermark(gamma=0.5, delta=2.0))
    engine.warm_up(prefill_tokens=64, total_tokens=64, wanted_tokens=tokens, useful_tokens=tokens, fraction=1.0)
    return engine


@dataclass
class Prompt:
    """One sequence to generate, and what became of it."""

    token_ids: list[int]
    max_new_tokens: int = 8
    sampling: pb.SamplingParameters = field(default_factory=lambda: GREEDY)
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    joins_at: int = 0  # step at which it is added
    chunk: int = 10**9  # prompt tokens per step
    generated: int = 0  # of token_ids, how many at the end were generated before
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    prompt_values: list[float] = field(default_factory=list)


def generate(engine: Engine, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Run every prompt to its end, each joining when it says so; blocks are handed out and never reused."""
    left = {id: len(p.token_ids) for id, p in enumerate(prompts)}
    next_block, step, retire = 0, 0, []
    done: set[int] = set()
    while len(done) < len(prompts):
        request = pb.StepRequest(step=step + 1, retire=retire, decode=True)
        for id, prompt in enumerate(prompts):
            if prompt.joins_at == step:
                blocks = num_blocks(len(prompt.token_ids) + prompt.max_new_tokens)
                _add(request, id, prompt, range(next_block, next_block + blocks))
                next_block += blocks
            if prompt.joins_at <= step and left[id]:
                request.chunk_ids.append(id)
                request.chunk_tokens.append(min(prompt.chunk, left[id]))
                left[id] -= request.chunk_tokens[-1]
        retire = _collect(engine, request, prompts)
        done |= set(retire)
        step += 1
    engine.launch(pb.StepRequest(step=step + 1, retire=retire))
    return prompts


def _add(request: pb.StepRequest, id: int, prompt: Prompt, blocks: range) -> None:
    request.add.add(
        id=id,
        token_ids=prompt.token_ids,
        blocks=blocks,
        sampling=prompt.sampling,
        top_n_tokens=prompt.top_n_tokens,
        prompt_logprobs=prompt.prompt_logprobs,
        generated=prompt.generated,
    )


def _collect(engine: Engine, request: pb.StepRequest, prompts: Sequence[Prompt]) -> list[int]:
    """Launch the step, hand its tokens out, return the ids that are done."""
    launched = engine.launch(request)
    if launched is None:
        return []
    result = launched.finish()
    for id, values in result.prompt_logprobs.items():
        prompts[id].prompt_values += values
    for i, id in enumerate(result.ids):
        prompts[id].tokens.append(result.token_ids[i])
        prompts[id].logprobs.append(result.logprobs[i])
        prompts[id].top_ids.append(result.top_ids[i])
    return [id for id in result.ids if len(prompts[id].tokens) == prompts[id].max_new_tokens]


@torch.inference_mode()
def all_logits(engine: Engine, token_ids: list[int]) -> Tensor:
    """Logits [T, V] of every position of one sequence, by one forward pass."""
    table = engine._table
    assert table is not None
    request = pb.StepRequest(chunk_ids=[0], chunk_tokens=[len(token_ids)])
    request.add.add(id=0, token_ids=token_ids, blocks=range(-(-len(token_ids) // BLOCK_SIZE)), sampling=GREEDY)
    step = table.apply(request)
    assert step is not None
    logits = engine.model.logits(engine.model(step.token_ids, engine._kv_caches, step.meta))
    table.apply(pb.StepRequest(retire=[0]))
    return logits
