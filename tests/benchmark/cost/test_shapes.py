"""Shapes against the models' published sizes, and folders that a server can start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from benchmark.cost import shapes
from benchmark.result import BenchError
from server.arch.stages import Stage
from server.model.transformer import kv_shape
from server.quantisation.kv import KV_FORMATS
from server.ranks.collectives import Shard
from server.stepping.cache import KVShape
from tests.running import ROOT
from tests.server import tiny

# (layers, head) in billions of parameters, KV bytes of a token in 16 bits.
SIZES = {
    "bloom-560m": (0.302, 0.257, 98_304),
    "bloomz-7b1-mt": (6.041, 1.028, 491_520),
    "mistral-7b": (6.979, 0.131, 131_072),
    "baichuan2-13b": (12.61, 0.6436, 819_200),
    "chatglm3-6b": (5.711, 0.2663, 28_672),
    "mt0-xxl-mt": (10.8721, 1.0245, 393_216),
    "opt-1.3b": (1.2086, 0.103, 196_608),
    "qwen3-0.6b": (0.4405, 0.1556, 114_688),
    "qwen3-4b": (3.6335, 0.389, 147_456),
    "qwen3.5-0.8b": (0.4981, 0.2543, 12_288),
    "tinyllama-1.1b": (0.969, 0.0655, 22_528),
}
# In billions, from the models' own cards and checkpoints.
TOTALS = {
    "bloom-560m": 0.5592,
    "bloomz-7b1-mt": 7.069,
    "mistral-7b": 7.2417,
    "baichuan2-13b": 13.8967,
    "chatglm3-6b": 6.2436,
    "mt0-xxl-mt": 12.92106,
    "opt-1.3b": 1.3158,
    "qwen3-0.6b": 0.59605,
    "qwen3-4b": 4.02247,
    "qwen3.5-0.8b": 0.75239,
    "tinyllama-1.1b": 1.1000,
}


def test_the_shapes_that_are_promised_are_there() -> None:
    assert sorted(SIZES) == shapes.names()


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_model(name: str) -> None:
    layers, head, kv = SIZES[name]
    shape = shapes.shape(name)
    assert layers == pytest.approx(shape.layer_parameters / 1e9, rel=2e-3)
    assert head == pytest.approx(shape.head_parameters / 1e9, rel=2e-3)
    assert kv == shape.kv_bytes_per_token("float16") == shape.kv_bytes_per_token("float32") // 2
    assert TOTALS[name] == pytest.approx(shape.total_parameters / 1e9, rel=1e-4)


BLOOM = BloomConfig(vocab_size=64, hidden_size=32, n_head=4, n_layer=2)
LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
OPT = OPTConfig(
    vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
    word_embed_proj_dim=32,
)  # fmt: skip


@pytest.mark.parametrize(
    "model", [BloomForCausalLM(BLOOM), LlamaForCausalLM(LLAMA), OPTForCausalLM(OPT)], ids=["bloom", "llama", "opt"]
)
def test_parameters_are_counted_as_transformers_counts_them(
    model: BloomForCausalLM | LlamaForCausalLM | OPTForCausalLM,
) -> None:
    shape = shapes.from_config(model.config.to_dict())
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.total_parameters


@pytest.mark.parametrize("case", ["gemma4", "gemma4-e", "gemma4-a", "llama4"])
def test_parts_that_few_families_have_are_counted(case: str, tmp_path: Path) -> None:
    model = tiny.save_tiny(case, tmp_path)
    scales = sum(name.endswith("layer_scalar") for name, _ in model.named_buffers())
    shape = shapes.from_config(json.loads((tmp_path / "config.json").read_text()))
    assert scales + sum(parameter.numel() for parameter in model.parameters()) == shape.total_parameters
    parts = shape.stages(2)
    twice = shape.head_parameters * shape.spec.tied_head  # on the first stage and on the last
    assert shape.total_parameters + twice == sum(part.total_parameters for part in parts)
    assert shape.kv_bytes_per_token("float16") == sum(part.kv_bytes_per_token("float16") for part in parts)


def test_a_mixture_of_experts_reads_the_experts_of_a_token() -> None:
    config = {
        "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 1e6,
        "max_position_embeddings": 128, "sliding_window": None,
    }  # fmt: skip
    shape = shapes.from_config(config)
    assert 2 * (8 - 2) * 3 * 32 * 48 == shape.layer_parameters - shape.step_parameters


def test_int8_halves_the_layers_and_the_head() -> None:
    """Beside the halves there are scales: four bytes for each row of a layer, and for each token of the vocabulary."""
    for name, rows in {
        "bloom-560m": 24 * (3 + 1 + 4 + 1) * 1024,
        "mistral-7b": 32 * (6144 + 4096 + 28_672 + 4096),
    }.items():
        shape = shapes.shape(name)
        linear = sum(linear.parameters for linear in shapes.linears_of_decoder(shape.spec, shape.names))
        kept = shape.step_weight_bytes("bfloat16", "int8, 8 bits, 8-bit inputs")  # with --quantize-head none
        assert linear - 4 * rows == shape.step_weight_bytes("bfloat16") - kept
        assert 2 * shape.head_parameters == shape.head_bytes("bfloat16", "fp8") == shape.head_bytes("bfloat16")
        vocabulary = shape.spec.vocab_size
        assert shape.head_parameters - 4 * vocabulary == kept - shape.step_weight_bytes("bfloat16", "int8")
        all_saved = shape.weight_bytes("bfloat16") - shape.weight_bytes("bfloat16", "int8")
        assert linear + shape.head_parameters - 4 * (rows + vocabulary) == all_saved  # a table of its own stays
        assert shape.step_weight_bytes("float16", "dense") == shape.step_weight_bytes("float16")


def test_four_bits_and_their_groups() -> None:
    """int4: half a byte, and three bytes for each 128 weights of a row. Mistral's rows have no other ends."""
    shape = shapes.shape("mistral-7b")
    linear = sum(linear.parameters for linear in shapes.linears_of_decoder(shape.spec, shape.names))
    saved = shape.step_weight_bytes("bfloat16") - shape.step_weight_bytes("bfloat16", "int4")
    assert linear * 2 - linear // 2 - linear // 128 * 3 == saved - (shape.head_parameters - 4 * 32_000)
    nf4 = shape.step_weight_bytes("bfloat16") - shape.step_weight_bytes("bfloat16", "bitsandbytes-nf4")
    assert linear * 2 - linear // 2 - linear // 64 * 4 == nf4


def test_a_quantised_config_counts_as_it_is_stored() -> None:
    """Also where it leaves layers out; and its head stays."""
    config = dict(shapes.find("mistral-7b").config)
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    dense, stored = shapes.from_config(config), shapes.from_config(config | {"quantization_config": awq})
    linear = sum(linear.parameters for linear in shapes.linears_of_decoder(dense.spec, dense.names))
    saved = dense.weight_bytes("float16") - stored.weight_bytes("float16")
    assert linear * 2 - linear // 2 - linear // 128 * 3 == saved
    left_out = shapes.from_config(config | {"quantization_config": awq | {"modules_to_not_convert": ["self_attn"]}})
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    kept = left_out.weight_bytes("float16") - stored.weight_bytes("float16")
    assert attention * 2 - attention // 2 - attention // 128 * 3 == kept
    assert stored.step_weight_bytes("float16") == stored.step_weight_bytes("float16", "awq, 4 bits, groups of 128")


def test_the_file_beside_a_config_says_how_weights_are_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shapes.find("mistral-7b").config))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": 32, "desc_act": False}))
    stored = shapes.shape(str(tmp_path)).stored
    assert stored is not None and "gptq, 8 bits, groups of 32" == stored.description
    (tmp_path / "quantize_config.json").write_text("[")
    with pytest.raises(BenchError, match=r"quantize_config\.json cannot be read: .*download it again"):
        shapes.shape(str(tmp_path))


def test_a_shape_is_found_by_name_repository_file_and_folder(tmp_path: Path) -> None:
    known = shapes.shape("bloom-560m")
    config = json.dumps(shapes.find("bloom-560m").config)
    (tmp_path / "config.json").write_text(config)
    assert known == shapes.shape("bigscience/bloom-560m") == shapes.shape(str(tmp_path))
    found = shapes.find(str(tmp_path / "config.json"))
    assert (tmp_path.name, known) == (found.name, found.shape)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"model_type": "unheard"}', "model_type 'unheard'; served are: "),
        ('{"model_type": "llama", "hidden_size": 8}', "lacks the key 'num_attention_heads'"),
    ],
)
def test_a_wrong_config_is_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BenchError, match=words):
        shapes.shape(str(tmp_path))


def test_an_unknown_shape_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(BenchError, match=r"no shape is called gpt-17 .* bloom-560m, bloomz-7b1-mt"):
        shapes.shape("gpt-17")


def test_impossible_splits_are_named() -> None:
    assert shapes.shape("bloomz-7b1-mt").split_problem(8) is None
    assert shapes.shape("chatglm3-6b").split_problem(8) is None  # two key-value heads, each on four shards
    assert "32 attention heads, which --num-shard 3" in str(shapes.shape("opt-1.3b").split_problem(3))


@pytest.mark.parametrize("is_nested", [False, True], ids=["a decoder", "a decoder within"])
def test_a_made_up_folder_has_one_token_per_word(is_nested: bool, tmp_path: Path) -> None:
    config = shapes.find("tinyllama-1.1b").config | {"vocab_size": 50, "eos_token_id": 2}
    if is_nested:
        config = {"model_type": "mistral3", "text_config": {**config, "model_type": "mistral"}, "eos_token_id": 2}
    named = shapes.NamedShape("small", config, shapes.from_config(config))
    shapes.make_model_folder(named, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("t7 t0 t49").ids
    assert ([7, 0, 49], "t7 t0 t49") == (ids, tokenizer.decode(ids))
    assert 50 == tokenizer.get_vocab_size()
    assert "eos_token_id" not in json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "tokenizer_config.json").is_file()


@pytest.mark.parametrize("kind", shapes.KV_CACHE_DTYPES)
@pytest.mark.parametrize("dtype", shapes.DTYPE_BYTES)
def test_a_cache_takes_the_bytes_that_the_server_allocates(dtype: str, kind: str) -> None:
    shape = shapes.shape("mistral-7b")
    spec = shape.spec
    allocated = KVShape(
        spec.num_layers, spec.num_kv_heads, spec.head_dim, getattr(torch, dtype), format=KV_FORMATS[kind]
    )
    assert allocated.bytes_per_token == shape.kv_bytes_per_token(dtype, kind)
    assert list(KV_FORMATS) == list(shapes.KV_CACHE_DTYPES)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2.5", "glm-4.7-flash", "mistral-small-4"])
def test_compressed_keys_and_values_are_one_row_of_a_token_on_every_rank(name: str) -> None:
    fixture = json.loads((ROOT / f"tests/server/model/real_shapes/{name}.json").read_text())
    shape = shapes.from_config(fixture["config"])
    assert fixture["parameters"] == shape.total_parameters
    layers, width = shape.spec.num_layers, (256 if name == "mistral-small-4" else 512) + 64
    assert 2 * layers * width == shape.kv_bytes_per_token("bfloat16")
    assert layers * (width + 2) == shape.kv_bytes_per_token("bfloat16", "int8")
    for world_size in (1, 8):
        stage, shard = Stage.whole(layers), Shard(world_size - 1, world_size)
        served = kv_shape(shape.spec, stage, shard, torch.bfloat16, KV_FORMATS["int8"])
        assert layers * (width + 2) == served.bytes_per_token
        assert (1, 3, 1, 16, width + 2) == served.size_of(3)


def test_the_matrix_that_would_expand_keys_and_values_is_dense_in_any_format() -> None:
    fixture = json.loads((ROOT / "tests/server/model/real_shapes/deepseek-v2-lite.json").read_text())
    shape = shapes.from_config(fixture["config"])
    quantised = sum(linear.copies * linear.parameters for linear in shapes.linears_of_decoder(shape.spec, shape.names))
    routers = 26 * 64 * 2048
    assert 27 * 16 * 256 * 512 == shape.layer_parameters - quantised - routers - 27 * (2 * 2048 + 512)
