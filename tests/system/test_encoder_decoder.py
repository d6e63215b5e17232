"""A whole server with an encoder-decoder: a mixed stream under tight limits, judged by transformers' own generation."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from benchmark.cost.shapes import write_word_tokenizer
from tests.running import Server, body, generate_all, tokens_of
from tests.server.tiny import COMMON, save_tiny

LIMITS = {
    "--max-input-length": 48,
    "--max-total-tokens": 90,
    "--max-batch-prefill-tokens": 60,
    "--max-batch-total-tokens": 300,
    "--max-batch-size": 6,
}


def prompts(count: int) -> list[list[int]]:
    """Token ids of mixed lengths."""
    rng = random.Random(5)
    return [[rng.randrange(4, COMMON["vocab_size"]) for _ in range(rng.randint(1, 48))] for _ in range(count)]


def text_of(token_ids: list[int]) -> str:
    return " ".join(f"t{id}" for id in token_ids)


@pytest.mark.parametrize(("case", "shards"), [pytest.param("t5", 2, marks=pytest.mark.rest), ("mt5", 1)])
def test_a_mixed_stream_under_tight_limits_is_what_transformers_generates(
    tmp_path: Path, case: str, shards: int
) -> None:
    model = save_tiny(case, tmp_path)
    write_word_tokenizer(COMMON["vocab_size"], tmp_path)
    asked = prompts(40)
    requests = [body(text_of(ids), max_new_tokens=1 + i % 20, details=True) for i, ids in enumerate(asked)]
    flags = [part for flag, value in LIMITS.items() for part in (flag, str(value))]
    with Server("--model-id", str(tmp_path), "--dtype", "float32", "--num-shard", str(shards), *flags) as server:
        answers = asyncio.run(generate_all(server, requests))
        metrics = server.metrics()
        with_prompt = body(text_of(asked[0]), max_new_tokens=2, decoder_input_details=True)
        details = httpx2.post(f"{server.url}/generate", json=with_prompt, timeout=60).json()["details"]
        too_long = httpx2.post(f"{server.url}/generate", json=body(text_of([5] * 49), max_new_tokens=1), timeout=60)
    assert [generated(model, ids, 1 + i % 20) for i, ids in enumerate(asked)] == [tokens_of(a.json()) for a in answers]
    assert 0 < metrics["tgi_batch_peak_reserved_tokens"] <= 300
    assert max(map(len, asked)) <= metrics["tgi_batch_peak_prefill_tokens"] <= 60
    assert 1 < metrics["tgi_batch_peak_batch_size"] <= 6
    assert sum(map(len, asked)) == metrics["tgi_request_input_length_sum"]
    assert [(3, None)] == [(token["id"], token["logprob"]) for token in details["prefill"]]
    assert 422 == too_long.status_code
    assert "`inputs` must have less than 49 tokens. Given: 49" in too_long.json()["error"]


@torch.inference_mode()
def generated(model: Any, token_ids: list[int], max_new_tokens: int) -> list[int]:
    """What transformers generates, without the start token."""
    ids = torch.tensor([token_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    result: list[int] = out[0, 1:].tolist()
    return result
