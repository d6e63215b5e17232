"""Whether a batched model computes what transformers does: the logits of two made-up prompts, by both ways.

By transformers' way each prompt is computed whole and alone, by ours in two steps: a chunk of each prompt in one row,
then the next token of the one as a decode beside the rest of the other. What depends on more than a token, its
position and the cache, such as a state between steps, comes out different.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from server.backends.device import Device
from server.backends.protocol import Backend
from server.blocks import BLOCK_SIZE, num_blocks
from server.fallback.asked import use
from server.fallback.attention import PAGED
from server.fallback.batched import BatchedModel, hidden_states
from server.quantisation.kv import AS_COMPUTED
from server.stepping import cache
from server.stepping.batch import BLOCKS, Forward, Layout, Tables

LONG, SHORT = 2 * BLOCK_SIZE + 5, 7  # tokens of the prompts
FIRST = BLOCK_SIZE + 3  # tokens of the long one in the first step
# How far logits may be apart on average, as a share of how far they scatter. Another mask or position is far above.
EXACT_TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.05


@torch.inference_mode()
def problem_of(model: BatchedModel, backend: Backend, dtype: torch.dtype) -> str | None:
    """What is wrong with a batched model on this rank; None: nothing."""
    device = backend.device
    prompts = [_prompt(model.vocab_size, length, device) for length in (LONG, SHORT)]
    use(model.body, "eager")
    expected = torch.cat([_whole(model, prompt) for prompt in prompts])
    use(model.body, PAGED)
    found = torch.cat(_stepwise(model, prompts, backend, dtype))
    if not expected.isfinite().all():
        return "its logits are not finite"
    scatter = expected.std(dim=1).mean().clamp(min=torch.finfo(torch.float32).tiny)
    apart = float((found - expected).abs().mean() / scatter)
    is_exact = dtype == torch.float32 and model.cache == AS_COMPUTED
    if not apart <= (EXACT_TOLERANCE if is_exact else ROUNDED_TOLERANCE):
        return f"its logits come out differently in chunks beside others, by {apart:.1e} of what they scatter by"
    return None


def _prompt(vocab_size: int, length: int, device: Device) -> Tensor:
    """Token ids [length] from the whole vocabulary."""
    return device.upload([[(7919 * place + 13 * length) % vocab_size for place in range(length)]])[0]


def _whole(model: BatchedModel, prompt: Tensor) -> Tensor:
    """The logits [T, V] of a prompt alone, but for those of padding."""
    positions = torch.arange(len(prompt), device=prompt.device)
    return _real(model, hidden_states(model.body, prompt, positions))


def _stepwise(model: BatchedModel, prompts: list[Tensor], backend: Backend, dtype: torch.dtype) -> list[Tensor]:
    """The logits of both prompts in steps."""
    device, (long, short) = backend.device, prompts
    width = num_blocks(LONG)
    tables = Tables.empty(3, width, device.torch_device)
    blocks = device.upload([list(range(1, 1 + width)), list(range(1 + width, 1 + 2 * width))])
    tables.entries[1:, BLOCKS:] = blocks
    tables.last_tokens[2:] = short[-1:]
    kv_caches = cache.allocate(model.kv_shape(dtype), 1 + 2 * width, device)
    first = Layout.of([(1, 0, FIRST), (2, 0, SHORT - 1)], [*long[:FIRST].tolist(), *short[:-1].tolist()])
    second = Layout.of([(2, SHORT - 1, 1), (1, FIRST, LONG - FIRST)], long[FIRST:].tolist(), num_decodes=1)
    found = []
    for layout in (first, second):
        token_ids, meta = tables.step(layout, device.upload(layout.numbers))
        lengths = [a + c - b for a, b, c in zip(layout.firsts, layout.starts, layout.starts[1:], strict=False)]
        forward = Forward([], token_ids, replace(meta, context_lengths=lengths), None, None)
        found.append(_real(model, model.run(forward, kv_caches).hidden))
    begun, ended = found
    return [begun[:FIRST], ended[1:], begun[FIRST:], ended[:1]]


def _real(model: BatchedModel, hidden: Tensor) -> Tensor:
    """The logits of hidden states [T, D] that are not padding, in float32."""
    logits = model.logits(hidden).float()
    return logits[:, : min(logits.shape[1], model.vocab_size - model.vocab_range[0])]
