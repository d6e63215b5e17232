"""Random weights of quantised configs: finite logits, and as many bytes as a plan of the same config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.cost import shapes
from server.backends.cpu import CpuBackend, Kernels
from server.backends.reference.quantised import QuantisedFormat
from server.config import ShardConfig
from server.loading import ChooseBackend, load
from server.model.transformer import Transformer
from tests.server.driver import Prompt, all_logits, generate
from tests.server.quantisation import quantised
from tests.server.quantisation.test_quantisation import AWQ, FP8, GPTQ, LLM_INT8, NF4, W4A16, W8A8

STATIC_FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    }},
}  # fmt: skip


def torchao(name: str, **data: object) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_version": 2, "_data": data}}}


STORED: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq-3": GPTQ | {"bits": 3, "group_size": -1, "desc_act": True},
    "gptq-8": GPTQ | {"bits": 8, "group_size": 32},
    "awq": AWQ | {"modules_to_not_convert": ["v_proj", "v"]},
    "nf4": NF4,
    "llm-int8": LLM_INT8,
    "fp8": FP8,
    "fp8-rows": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "w8a8": W8A8,
    "w4a16": W4A16,
    "static-fp8": STATIC_FP8,
    "quark-uint4": {**quantised.quark("uint4", 128).config},
    "quark-int8": {**quantised.quark("int8", 32).config},
    "quark-fp8": {**quantised.quark_float8("per_tensor", is_rounded=True).config},
    "mxfp4": {"quant_method": "mxfp4"},
    "quark-mxfp4": {**quantised.quark_mxfp4().config},
    "torchao-int4": torchao("Int4WeightOnlyConfig"),
    "torchao-int8": torchao("Int8WeightOnlyConfig"),
    "torchao-float8": torchao("Float8WeightOnlyConfig"),
    "torchao-int3": torchao("IntxWeightOnlyConfig", weight_dtype={"_type": "torch.dtype", "_data": "int3"}),
}
COMMON = {"vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"}
LLAMA = COMMON | {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "bloom": COMMON | {"model_type": "bloom", "hidden_size": 1024, "n_head": 16, "n_layer": 1},  # wide: biases count
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                        "sliding_window": None},
    "gpt_oss": LLAMA | YARN | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
                               "sliding_window": 64, "head_dim": 64, "attention_bias": True},
    "t5": COMMON | {"model_type": "t5", "d_model": 512, "d_ff": 1024, "d_kv": 64, "num_heads": 8, "num_layers": 2,
                    "num_decoder_layers": 2, "relative_attention_num_buckets": 32, "decoder_start_token_id": 0,
                    "feed_forward_proj": "relu", "tie_word_embeddings": True, "layer_norm_epsilon": 1e-6},
}  # fmt: skip
IN_FLIGHT = ["int8", "int4", "fp8", "eetq", "bitsandbytes-nf4"]


def packed_bytes(format: QuantisedFormat) -> int:
    """Memory of a weight that the reference computes with, if its codes were packed."""
    weight = format.weight
    return weight.codes.numel() * weight.bits // 8 + weight.scale.nbytes


@pytest.fixture
def choose(kernels: Kernels) -> ChooseBackend:
    """The compiled kernels, whose weights are packed."""
    return lambda device, dtype, *, disable_custom_kernels=False, cpu_kernels="auto", cpu_inputs="rounded": CpuBackend(
        kernels, dtype
    )


def check(
    model: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, choose: ChooseBackend, **settings: Any
) -> str:
    """Load it, hold its bytes against the plan's, look for numbers that are none; how it says that it is stored."""
    (folder / "config.json").write_text(json.dumps(model))
    threads = torch.get_num_threads()
    config = ShardConfig(
        str(folder), str(folder), 0, 1, str(folder / "s"), "", random_weights=True, device="cpu", dtype="bfloat16",
        **settings,
    )  # fmt: skip
    engine, info = load(config, choose)
    torch.set_num_threads(threads)
    monkeypatch.setattr(QuantisedFormat, "nbytes", property(packed_bytes))
    shape = shapes.from_config(model)
    assert shape.weight_bytes("bfloat16", info.quantize) == pytest.approx(engine.model.nbytes, rel=0.01)
    assert isinstance(engine.model, Transformer)
    encoder, decoder, head = engine.model.encoder, engine.model.decoder, engine.model.head.weight
    read = decoder.nbytes + head.nbytes + (encoder.nbytes if encoder else 0)  # by tokens that go to all experts
    planned = shape.step_weight_bytes("bfloat16", info.quantize, tokens=1000)
    assert planned + shape.encode_bytes("bfloat16", info.quantize) == pytest.approx(read, rel=0.01)
    engine.allocate(256, total_tokens=256)
    logits = all_logits(engine, list(range(5, 25)))
    assert logits.isfinite().all() and 0 < logits.std() < 100
    (done,) = generate(engine, [Prompt([5, 6, 7], max_new_tokens=3)])
    assert 3 == len(done.tokens)
    return info.quantize


@pytest.mark.parametrize(
    ("model", "stored"),
    [
        *(("llama", stored) for stored in STORED if stored != "mxfp4"),  # which is of stacked experts
        *(("mixtral", "gptq"), ("mixtral", "w8a8"), ("gpt_oss", "mxfp4")),
    ],
)
def test_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: ChooseBackend, model: str, stored: str
) -> None:
    told = check(MODELS[model] | {"quantization_config": STORED[stored]}, tmp_path, monkeypatch, choose)
    assert told.startswith(str(STORED[stored]["quant_method"]).removeprefix("fbgemm_"))


@pytest.mark.parametrize("name", IN_FLIGHT)
@pytest.mark.parametrize("model", MODELS)
def test_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: ChooseBackend, model: str, name: str
) -> None:
    assert check(MODELS[model], tmp_path, monkeypatch, choose, quantize=name).startswith(f"{name}, ")


@pytest.mark.parametrize("model", ["llama", "bloom"])
def test_a_head_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: ChooseBackend, model: str
) -> None:
    assert "head" not in check(MODELS[model], tmp_path, monkeypatch, choose, quantize="int8", quantize_head="none")


@pytest.mark.parametrize("stored", ["gptq", "nf4", "w8a8"])
def test_encoder_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: ChooseBackend, stored: str) -> None:
    check(MODELS["t5"] | {"quantization_config": STORED[stored]}, tmp_path, monkeypatch, choose)
