"""The embedded model on the compiled CPU kernels: tokens of stock torch, and that nothing around a sequence changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from server.backends.cpu import Kernels
from tests.server.conftest import DEMO
from tests.server.driver import GREEDY, Prompt, generate, load_engine, sampled
from tests.server.model.test_families import PROMPT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_and_chunks_change_nothing_even_in_bfloat16(kernels: Kernels, dtype: torch.dtype) -> None:
    engine = load_engine(DEMO, kernels=kernels, dtype=dtype)
    prompts = [
        Prompt(PROMPT[: 3 + 4 * i], max_new_tokens=12, joins_at=i % 5, chunk=(1000, 1, 7, 16)[i % 4],
               sampling=sampled(i, temperature=0.9) if i % 2 else GREEDY, top_n_tokens=i % 3)
        for i in range(16)
    ]  # fmt: skip
    together = generate(engine, prompts)
    for crowded in together:
        fresh = replace(crowded, joins_at=0, chunk=1000, tokens=[], logprobs=[], top_ids=[], prompt_values=[])
        alone = generate(engine, [fresh])[0]
        assert (alone.tokens, alone.logprobs, alone.top_ids) == (crowded.tokens, crowded.logprobs, crowded.top_ids)


def test_tokens_are_those_of_stock_torch(kernels: Kernels) -> None:
    prompts = [
        Prompt(PROMPT[: 9 + i], max_new_tokens=20, sampling=sampled(i, top_p=0.9) if i else GREEDY) for i in range(4)
    ]
    stock, compiled = (
        [
            p.tokens
            for p in generate(load_engine(DEMO, kernels=k), [replace(p, tokens=[], logprobs=[]) for p in prompts])
        ]
        for k in (None, kernels)
    )
    assert stock == compiled
