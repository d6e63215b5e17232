"""The step that is made up to find out what a step takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from server.blocks import BLOCK_SIZE, num_blocks
from server.stepping.warmup import ProfileRun, graph_bytes


@pytest.mark.parametrize("has_encoder", [False, True])
@pytest.mark.parametrize(
    ("prefill", "total", "sampled"), [(4096, 2048, 128), (4096, 5000, 128), (64, 64, 1), (1, 9, 4)]
)
def test_it_has_all_prompt_tokens_and_rows_that_a_step_may_have(
    prefill: int, total: int, sampled: int, has_encoder: bool
) -> None:
    run = ProfileRun.of(prefill_tokens=prefill, total_tokens=total, sampled=sampled, has_encoder=has_encoder)
    request = run.request(top_n_tokens=5)
    tokens = [len(new.encoder_token_ids) if has_encoder else len(new.token_ids) for new in request.add]
    assert sum(tokens) == prefill
    assert len(tokens) >= min(sampled, prefill)
    assert max(tokens) <= total
    blocks = [block for new in request.add for block in [*new.blocks, *new.encoder_blocks]]
    assert len(set(blocks)) == len(blocks) <= num_blocks(run.kv_tokens)
    assert max(blocks) < run.kv_tokens // BLOCK_SIZE
    assert all(new.prompt_logprobs and new.sampling.do_sample and new.top_n_tokens for new in request.add)
    assert all(new.sampling.is_constrained for new in request.add)
    assert [[new.id] for new in request.add] == [list(mask.ids) for mask in request.masks]


@pytest.mark.parametrize(
    ("kinds", "expected"), [([[]], 0), ([[500]], 500), ([[9, 5], [7, 3]], 24), ([[9, 5, 4, 4], []], 24)]
)
def test_memory_for_graphs_is_that_of_the_two_largest_of_each_kind(kinds: list[list[int]], expected: int) -> None:
    device = SimpleNamespace(measures_memory=True, taken_bytes=lambda taken: taken)
    engine = SimpleNamespace(graphs=SimpleNamespace(kinds=kinds), device=device)
    assert expected == graph_bytes(engine)  # type: ignore[arg-type]
