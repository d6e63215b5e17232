"""Every family's tiny checkpoints with the oracle that judges them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.server import published, tiny

CASES = [*tiny.CASES, *published.CASES]
# Between them: ALiBi, learned and rotated positions, windows in some layers, one kv head, experts, an encoder, biases.
VARIED = ("bloom", "opt", "falcon-7b", "gemma3_text", "mixtral", "t5")
Oracle = Callable[[list[int], list[int]], Tensor]  # prompt, generated → logits [T, V] of all that is decoded
Checkpoints = Callable[[str], tuple[Path, Oracle]]


def save(case: str, folder: Path) -> Oracle:
    """Write the checkpoint of a case; returns its oracle."""
    if case in published.CASES:
        logits = published.save_published(case, folder)
        return lambda prompt, generated: logits(torch.tensor(prompt + generated))
    return oracle_of(tiny.save_tiny(case, folder))


def oracle_of(model: PreTrainedModel) -> Oracle:
    """transformers' own model, an encoder-decoder reading the prompt with its encoder."""
    if not model.config.is_encoder_decoder:
        return lambda prompt, generated: model(torch.tensor([prompt + generated])).logits[0]
    start = model.config.decoder_start_token_id
    return lambda prompt, generated: model(
        torch.tensor([prompt]), decoder_input_ids=torch.tensor([[start, *generated]])
    ).logits[0]
