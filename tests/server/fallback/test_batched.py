"""What transformers runs batched: tokens are its own, whatever stands beside them, and however they are computed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.fallback.asked import window_of
from server.fallback.attention import install
from server.fallback.batched import BatchedModel
from server.fallback.probe import problem_of
from server.quantisation.kv import AS_COMPUTED
from server.stepping.engine import Engine
from tests.server.driver import Prompt, all_logits, generate
from tests.server.fallback.cases import BATCHED, engine_of, expected, save

NEW = 6  # tokens that each prompt gets
Load = Callable[[str], tuple[PreTrainedModel, Engine]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A model of transformers and ours of the same weights, each made once."""

    @cache
    def made(model_type: str) -> tuple[PreTrainedModel, Engine]:
        folder = tmp_path_factory.mktemp(model_type)
        model = save(model_type, folder)
        engine = engine_of(folder)
        assert isinstance(engine.model, BatchedModel), engine.model.warning  # type: ignore[attr-defined]
        return model, engine

    return made


def prompts(every: int = 1, **changes: Any) -> list[Prompt]:
    """Eight of mixed lengths. every: how many steps apart they join, in threes."""
    rng = random.Random(1)
    lengths = [3 + 5 * i for i in range(8)]
    return [
        Prompt([rng.randrange(4, 103) for _ in range(n)], NEW, joins_at=i % 3 * every, **changes)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("model_type", BATCHED)
def test_tokens_of_eight_at_once_are_those_of_transformers(load: Load, model_type: str) -> None:
    model, engine = load(model_type)
    for prompt in generate(engine, prompts()):
        assert expected(model, prompt.token_ids, NEW) == prompt.tokens


@pytest.mark.parametrize("model_type", BATCHED)
def test_logits_are_those_of_transformers(load: Load, model_type: str) -> None:
    model, engine = load(model_type)
    ids = prompts()[-1].token_ids
    with torch.inference_mode():
        whole = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(all_logits(engine, ids), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", BATCHED)
def test_neighbours_chunks_and_prefixes_change_no_token(load: Load, model_type: str) -> None:
    _, engine = load(model_type)
    together = [prompt.tokens for prompt in generate(engine, prompts())]
    assert together == [generate(engine, [prompt])[0].tokens for prompt in prompts(every=0)]
    assert together == [prompt.tokens for prompt in generate(engine, prompts(chunk=7, grows=True))]
    first, second = prompts()[-1], prompts()[-1]
    second.joins_at, second.cached = 8, (0, 32)
    assert [together[-1]] * 2 == [prompt.tokens for prompt in generate(engine, [first, second])]


@pytest.mark.parametrize("model_type", ["flex_olmo", "gemma3n_text"])
@pytest.mark.parametrize("settings", [{"quantize": "int8"}, {"quantize": "int4"}, {"kv_cache_dtype": "int8"}])
def test_fewer_bits_change_little(tmp_path: Path, model_type: str, settings: dict[str, str]) -> None:
    model = save(model_type, tmp_path)
    engine = engine_of(tmp_path, **settings)
    ids = prompts()[-1].token_ids
    with torch.inference_mode():
        exact = model(torch.tensor([ids])).logits[0]
    apart = (all_logits(engine, ids) - exact).norm() / exact.norm()
    assert 0 < apart < (0.8 if settings == {"quantize": "int4"} else 0.15)  # of weights that have no outliers to spare


def test_what_holds_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save("solar_open", tmp_path)
    with caplog.at_level(logging.WARNING):
        engine_of(tmp_path, quantize="int8")
    assert "batched, with a paged cache and shared prefixes; linear layers in int8, experts as transf" in caplog.text


def test_windows_are_read_from_masks() -> None:
    assert 0 == window_of(causal_mask_function)
    assert 9 == window_of(sliding_window_causal_mask_function(9))
    assert window_of(bidirectional_mask_function) is None
    assert window_of(chunked_causal_mask_function(64, torch.tensor([0]))) is None


def test_the_probe_finds_another_window(tmp_path: Path) -> None:
    save("internlm3", tmp_path)
    model = engine_of(tmp_path).model
    assert isinstance(model, BatchedModel)
    backend = ReferenceBackend(CpuDevice())
    assert problem_of(model, backend, torch.float32) is None
    step = install([replace(layer, window=9) for layer in model.layers], backend, AS_COMPUTED)
    assert "come out differently" in str(problem_of(replace(model, step=step), backend, torch.float32))
