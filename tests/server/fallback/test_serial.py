"""What transformers runs one sequence at a time: the same tokens as its own generation, and what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmark.cost.shapes import write_word_tokenizer
from server.arch.families import FAMILIES
from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.checkpoint.formats import Quantisation
from server.checkpoint.formats.float8 import Float8Format
from server.fallback.load import Loader
from server.loading import load
from server.quantisation.configs import Budget
from server.ranks.collectives import Shard
from tests.running import Server, body, generate_all, tokens_of
from tests.server.driver import Prompt, generate, greedy
from tests.server.fallback.cases import SERIAL, engine_of, expected, save, shard_config
from tests.server.tiny import COMMON, LLAMA_SIZES


def prompts() -> list[Prompt]:
    rng = random.Random(1)
    return [
        Prompt([rng.randrange(4, 103) for _ in range(3 + 5 * i)], max_new_tokens=9, joins_at=i, chunk=(1000, 7)[i % 2])
        for i in range(5)
    ]


@pytest.mark.parametrize("model_type", SERIAL)
def test_tokens_are_those_of_transformers(tmp_path: Path, model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    model = save(model_type, tmp_path)
    with caplog.at_level(logging.WARNING):
        engine = engine_of(tmp_path)
    assert "without paged cache, batching or sharding" in caplog.text
    for prompt in generate(engine, prompts()):
        assert expected(model, prompt.token_ids, 9) == prompt.tokens


@pytest.mark.parametrize("model_type", ["gptj", "bart"])
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


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gptj", {}, "its attention does not go through transformers' interface"),
        ("bart", {}, "it has an encoder"),
        ("doge", {}, "its masks are of its own making"),
        ("diffllama", {}, "a layer of it attends more than once in a pass"),
        ("olmo_hybrid", {}, "it keeps a state of its own"),
        ("glm", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         "the longest sequence of a batch decides how its positions are turned"),
        ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"]},
         "its cache keeps more than keys and values"),
    ],
)  # fmt: skip
def test_what_is_not_batched_is_told_why(tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str) -> None:
    sizes = SERIAL[model_type] if model_type in SERIAL else LLAMA_SIZES
    AutoConfig.for_model(model_type, **(COMMON | sizes | changes)).save_pretrained(tmp_path)
    settings = shard_config(tmp_path, random_weights=True)
    loader = Loader(settings, ReferenceBackend(CpuDevice()), Shard(), torch.float32, Quantisation())
    assert f"one sequence at a time, because {reason}" in loader.load().warning


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


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_hidden_layers": 0}, "says num_hidden_layers 0, which must be a whole number from 1 to 10000"),
        ({"num_hidden_layers": 10**9}, "says num_hidden_layers 1000000000, which must be a whole number from 1 to 1"),
        ({"num_labels": 10**9}, "says num_labels 1000000000, which must be at most 65536"),
        ({"max_position_embeddings": -1}, "says max_position_embeddings -1, which must be a whole number from 2 to"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings 1000000000000, which must be a whole number"),
        ({"hidden_size": 32}, "its tensors have other shapes than config.json says: download it again"),
        ({"hidden_act": "loud"}, "it knows no 'loud'"),
        ({"num_attention_heads": "8"}, "'num_attention_heads': TypeError: "),
    ],
)
def test_a_config_that_transformers_fails_at_is_refused_in_a_sentence(
    tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    save("nemotron", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=f"transformers cannot load it either .*{sentence}"):
        load(shard_config(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "fields", "said"),
    [
        ("nemotron", {"return_dict": False}, "'tuple' object has no attribute"),
        ("vaultgemma", {"sliding_window": -1}, ""),
        ("vaultgemma", {"sliding_window": None}, "'NoneType' object cannot be interpreted as an integer"),
    ],
)
def test_a_config_that_its_model_fails_at_is_refused_before_warming_up(
    tmp_path: Path, model_type: str, fields: dict[str, Any], said: str
) -> None:
    save(model_type, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=rf"continues a prompt \({said}.*\): config.json is damaged, or"):
        load(shard_config(tmp_path))


@pytest.mark.parametrize("model_type", ["nemotron", "gptj"])
def test_tensors_that_are_missing_are_not_made_up(tmp_path: Path, model_type: str) -> None:
    save(model_type, tmp_path)
    path = tmp_path / "model.safetensors"
    name, *others = sorted(tensors := load_file(path))
    save_file({other: tensors[other] for other in others}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"the checkpoint lacks 1 tensors, such as {re.escape(name)}: download it"):
        load(shard_config(tmp_path))


def test_a_checkpoint_does_not_say_whose_code_attends(tmp_path: Path) -> None:
    save("nemotron", tmp_path)
    before = generate(engine_of(tmp_path), prompts())[0].tokens
    path = tmp_path / "config.json"
    asked = {"_attn_implementation": "someone/kernels", "attn_implementation": "someone/kernels"}
    path.write_text(json.dumps(json.loads(path.read_text()) | asked))
    assert before == generate(engine_of(tmp_path), prompts())[0].tokens


def test_a_quantised_checkpoint_is_left_to_transformers(tmp_path: Path) -> None:
    save("glm", tmp_path, head_dim=8)
    stored = Quantisation("fp8", Float8Format({"quant_method": "fp8"}, Budget()))
    loader = Loader(shard_config(tmp_path), ReferenceBackend(CpuDevice()), Shard(), torch.float32, stored)
    assert "because its checkpoint is quantised" in loader.load().warning


@pytest.mark.parametrize(("field", "value", "flag"), [("world_size", 2, "num-shard"), ("quantize", "int8", "quantize")])
def test_limits_of_a_serial_model_are_said_with_the_list(tmp_path: Path, field: str, value: Any, flag: str) -> None:
    save("gptj", tmp_path)
    changes = {field: value}
    config = shard_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"GPTJ.* on one shard, .* because .*: leave out --{flag}; .*{max(FAMILIES)}"):
        Loader(config, ReferenceBackend(CpuDevice()), Shard(), torch.float32, Quantisation()).load()


def test_a_server_of_such_a_model_starts_warns_and_answers(tmp_path: Path) -> None:
    model = save("nemotron", tmp_path)
    write_word_tokenizer(COMMON["vocab_size"], tmp_path)
    with Server("--model-id", str(tmp_path), "--dtype", "float32") as server:
        (answer,) = asyncio.run(generate_all(server, [body("t5 t6 t7", max_new_tokens=6, details=True)]))
    assert expected(model, [5, 6, 7], 6) == tokens_of(answer.json())
    assert any("NemotronForCausalLM is not one of Lockstep's architectures" in line for line in server.lines)
