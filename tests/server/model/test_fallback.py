"""Architectures that transformers serves for us: the same tokens as its own generation, and what is refused."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmark.cost.shapes import write_word_tokenizer
from server.arch.families import FAMILIES
from server.config import ShardConfig
from server.loading import load
from server.stepping.engine import Engine
from server.stepping.warmup import warm_up
from tests.running import Server, body, generate_all, tokens_of
from tests.server.driver import Prompt, generate, greedy
from tests.server.tiny import COMMON, LLAMA_SIZES

CASES: dict[str, dict[str, Any]] = {
    "nemotron": LLAMA_SIZES,
    "gptj": {"n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 256, "rotary_dim": 4},
    "bart": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8,
             "decoder_attention_heads": 8, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
             "max_position_embeddings": 256, "decoder_start_token_id": 2, "forced_eos_token_id": None},
}  # fmt: skip


def save(model_type: str, folder: Path) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **(COMMON | CASES.get(model_type, {})))
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name and "ln_" not in name:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def shard_config(folder: Path, **changes: Any) -> ShardConfig:
    places = {"model_path": str(folder), "weights_path": str(folder), "socket_path": "", "rendezvous": ""}
    given = {**places, "rank": 0, "world_size": 1, "dtype": "float32", "device": "cpu", **changes}
    return ShardConfig(**given)


def engine_of(folder: Path) -> Engine:
    engine, _ = load(shard_config(folder))
    sizes = {"prefill_tokens": 64, "total_tokens": 64, "wanted_tokens": 2048, "useful_tokens": 2048, "sequences": 0}
    warm_up(engine, top_n_tokens=5, fraction=1.0, **sizes)
    return engine


def prompts() -> list[Prompt]:
    rng = random.Random(1)
    return [
        Prompt([rng.randrange(4, 103) for _ in range(3 + 5 * i)], max_new_tokens=9, joins_at=i, chunk=(1000, 7)[i % 2])
        for i in range(5)
    ]


@torch.inference_mode()
def expected(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy generation without the end token's say, as the engine does."""
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=-1,
    )  # fmt: skip
    return [int(id) for id in out[0, -count:]]


@pytest.mark.parametrize("model_type", CASES)
def test_tokens_are_those_of_transformers(tmp_path: Path, model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    model = save(model_type, tmp_path)
    with caplog.at_level(logging.WARNING):
        engine = engine_of(tmp_path)
    assert "without paged cache, batching or sharding" in caplog.text
    for prompt in generate(engine, prompts()):
        assert expected(model, prompt.token_ids, 9) == prompt.tokens


@pytest.mark.parametrize("model_type", ["nemotron", "bart"])
def test_forced_tokens_join_its_sequences_too(tmp_path: Path, model_type: str) -> None:
    save(model_type, tmp_path)
    engine = engine_of(tmp_path)
    sampling = greedy(is_constrained=True, raw_logprobs=True)

    def rule(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        return ([8, 50, 9] if len(tokens) == 2 else []), list(range(1, 100, 2))

    (held,) = generate(engine, [Prompt([5, 6, 7], 10, sampling, rule=rule, holds=True)])
    (free,) = generate(engine, [Prompt([5, 6, 7], 2, greedy(is_constrained=True), rule=rule)])
    assert [*free.tokens, 8, 50, 9] == held.tokens[:5]
    assert all(token % 2 for token in held.tokens[5:]) and 3 == len(held.prompt_values)


def test_what_transformers_has_of_another_kind_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mamba", vocab_size=103, hidden_size=32, num_hidden_layers=2, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"MambaForCausalLM keeps its state in another way .* served are: .*bloom.*t5"):
        load(shard_config(tmp_path))


def test_what_nobody_knows_is_refused_with_the_list(tmp_path: Path) -> None:
    save("gptj", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"gptj"', '"quantum"'))
    with pytest.raises(ValueError, match=r"transformers cannot load it either .*quantum.* served are: .*bloom.*t5"):
        load(shard_config(tmp_path))


@pytest.mark.parametrize(("field", "value", "flag"), [("world_size", 2, "num-shard"), ("quantize", "int8", "quantize")])
def test_limits_of_a_fallback_are_said_with_the_list(tmp_path: Path, field: str, value: Any, flag: str) -> None:
    save("gptj", tmp_path)
    with pytest.raises(ValueError, match=f"type 'gptj', which runs on one shard .* out --{flag}; .*{max(FAMILIES)}"):
        load(shard_config(tmp_path, **{field: value}))


def test_a_server_of_such_a_model_starts_warns_and_answers(tmp_path: Path) -> None:
    model = save("nemotron", tmp_path)
    write_word_tokenizer(COMMON["vocab_size"], tmp_path)
    with Server("--model-id", str(tmp_path), "--dtype", "float32") as server:
        (answer,) = asyncio.run(generate_all(server, [body("t5 t6 t7", max_new_tokens=6, details=True)]))
    assert expected(model, [5, 6, 7], 6) == tokens_of(answer.json())
    assert any("NemotronForCausalLM is not one of Lockstep's architectures" in line for line in server.lines)
