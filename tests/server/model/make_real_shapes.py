"""Writes `real_shapes/*.json`: the config.json and the tensors of published checkpoints, without their weights.

Run as `python -m tests.server.model.make_real_shapes` when a model is added; `test_real_shapes.py` reads what it wrote.
Names and shapes come from transformers' own models on the meta device, renamed to what their publishers stored, and,
where transformers does not know the family, from the published architecture (`published.py`). Nothing is downloaded:
the values of config.json are the published ones, cut down to those that say something about the architecture, and every
model is checked against the number of parameters that its publisher states. `unused` are tensors that published files
hold besides: copies of an embedding, causal masks, inverse frequencies.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.server.published import baichuan_shapes, chatglm_shapes

FOLDER = Path(__file__).parent / "real_shapes"
PUBLISHED = {"baichuan": baichuan_shapes, "chatglm": chatglm_shapes}  # what transformers does not know
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """One published checkpoint."""

    config: dict[str, Any]
    parameters: int  # as published, tied weights counted once
    rename: tuple[tuple[str, str], ...] = ()  # regular expressions: transformers' name -> the checkpoint's
    unused: dict[str, Shape] = field(default_factory=dict)


BLOOM = {"model_type": "bloom", "torch_dtype": "float16", "apply_residual_connection_post_layernorm": False,
         "layer_norm_epsilon": 1e-05, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
         "vocab_size": 250880}  # fmt: skip
LLAMA = {"model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu", "hidden_size": 4096,
         "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None,
         "tie_word_embeddings": False}  # fmt: skip
LLAMA3 = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "rope_theta": 500000.0, "vocab_size": 128256,
                  "attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128001}  # fmt: skip
LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32000,
                   "max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CHATGLM = {
    "model_type": "chatglm", "torch_dtype": "float16", "add_bias_linear": False, "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False, "ffn_hidden_size": 13696, "hidden_size": 4096,
    "kv_channels": 128, "layernorm_epsilon": 1e-05, "multi_query_attention": True, "multi_query_group_num": 2,
    "num_attention_heads": 32, "num_layers": 28, "original_rope": True, "padded_vocab_size": 65024,
    "post_layer_norm": True, "rmsnorm": True, "seq_length": 8192, "vocab_size": 65024, "tie_word_embeddings": False,
}  # fmt: skip
BAICHUAN = {"model_type": "baichuan", "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-06,
            "model_max_length": 4096, "vocab_size": 125696, "tie_word_embeddings": False, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0, "z_loss_weight": 0}  # fmt: skip
OPT = {"model_type": "opt", "torch_dtype": "float16", "activation_function": "relu", "enable_bias": True,
       "max_position_embeddings": 2048, "num_hidden_layers": 24, "vocab_size": 50272, "_remove_final_layer_norm": False,
       "layer_norm_elementwise_affine": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}  # fmt: skip
FALCON = {"model_type": "falcon", "torch_dtype": "bfloat16", "alibi": False, "bias": False, "multi_query": True,
          "apply_residual_connection_post_layernorm": False, "layer_norm_epsilon": 1e-05, "parallel_attn": True,
          "vocab_size": 65024, "bos_token_id": 11, "eos_token_id": 11}  # fmt: skip
QWEN3 = {"torch_dtype": "bfloat16", "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
         "max_position_embeddings": 40960, "num_attention_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": None,
         "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
         "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645}  # fmt: skip
GEMMA = {"model_type": "gemma", "torch_dtype": "bfloat16", "attention_bias": False, "head_dim": 256,
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "vocab_size": 256000,
         "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip
PHI3 = {"model_type": "phi3", "torch_dtype": "bfloat16", "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 32064, "bos_token_id": 1,
        "eos_token_id": 32000, "pad_token_id": 32000}  # fmt: skip
PHI3_SHORT = [
    1.05, 1.05, 1.05, 1.1, 1.1, 1.1500000000000001, 1.2000000000000002, 1.2500000000000002, 1.3000000000000003,
    1.3500000000000003, 1.5000000000000004, *[2.000000000000001] * 21, *[2.0500000000000007] * 3,
    *[2.1000000000000005] * 3, 2.1500000000000004, 2.1500000000000004, 2.3499999999999996, 2.549999999999999,
    2.5999999999999988, 2.5999999999999988, 2.7499999999999982, 2.849999999999998, 2.849999999999998,
    2.9499999999999975,
]  # fmt: skip
PHI3_LONG = [
    1.0299999713897705, 1.0499999523162842, 1.0499999523162842, 1.0799999237060547, 1.2299998998641968,
    1.2299998998641968, 1.2999999523162842, 1.4499999284744263, 1.5999999046325684, 1.6499998569488525,
    1.8999998569488525, 2.859999895095825, 3.68999981880188, 5.419999599456787, 5.489999771118164, 5.489999771118164,
    9.09000015258789, 11.579999923706055, 15.65999984741211, 15.769999504089355, 15.789999961853027, 18.360000610351562,
    21.989999771118164, 23.079999923706055, 30.009998321533203, 32.35000228881836, 32.590003967285156,
    35.56000518798828, 39.95000457763672, 53.840003967285156, 56.20000457763672, 57.95000457763672, 59.29000473022461,
    59.77000427246094, 59.920005798339844, 61.190006256103516, 61.96000671386719, 62.50000762939453, 63.3700065612793,
    63.48000717163086, 63.48000717163086, 63.66000747680664, 63.850006103515625, 64.08000946044922, 64.760009765625,
    64.80001068115234, 64.81001281738281, 64.81001281738281,
]  # fmt: skip

T5 = {"model_type": "t5", "torch_dtype": "float32", "layer_norm_epsilon": 1e-06, "relative_attention_num_buckets": 32,
      "vocab_size": 32128, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip


def copies_of_the_embedding(vocab_size: int, width: int) -> dict[str, Shape]:
    """What both stacks of an encoder-decoder store besides the one that they share."""
    return {f"{stack}.embed_tokens.weight": (vocab_size, width) for stack in ("encoder", "decoder")}


WITHOUT_PREFIX = ((r"^(transformer|model)\.", ""),)
MIXTRAL_NAMES = (
    (r"\.mlp\.gate\.", ".block_sparse_moe.gate."),
    (r"\.mlp\.experts\.(\d+)\.gate_proj\.", r".block_sparse_moe.experts.\1.w1."),
    (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.experts.\1.w2."),
    (r"\.mlp\.experts\.(\d+)\.up_proj\.", r".block_sparse_moe.experts.\1.w3."),
)

MODELS: dict[str, Model] = {
    "bloomz-7b1-mt": Model(
        BLOOM | {"n_embed": 4096, "n_layer": 30, "num_attention_heads": 32, "seq_length": 2048},
        7_069_016_064,
    ),
    "mistral-7b-v0.1": Model(MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096}, 7_241_732_096),
    "llama-2-7b": Model(
        LLAMA | {"torch_dtype": "float16", "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000,
                 "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2},
        6_738_415_616,
        unused={"model.layers.{i}.self_attn.rotary_emb.inv_freq": (64,)},
    ),
    "llama-3-8b": Model(LLAMA3 | {"max_position_embeddings": 8192}, 8_030_261_248),
    "llama-3.1-8b": Model(
        LLAMA3 | {"max_position_embeddings": 131072, "rope_scaling": LLAMA3_SCALING, "mlp_bias": False}, 8_030_261_248
    ),
    "chatglm3-6b": Model(CHATGLM, 6_243_584_000, unused={"transformer.rotary_pos_emb.inv_freq": (32,)}),
    "baichuan2-7b": Model(
        BAICHUAN | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
                    "max_position_embeddings": 4096},
        7_505_973_248,
    ),
    "baichuan2-13b": Model(
        BAICHUAN | {"hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40,
                    "num_attention_heads": 40},
        13_896_668_160,
    ),
    "opt-1.3b": Model(
        OPT | {"do_layer_norm_before": True, "ffn_dim": 8192, "hidden_size": 2048, "num_attention_heads": 32,
               "word_embed_proj_dim": 2048},
        1_315_758_080,
        unused={"lm_head.weight": (50272, 2048)},
    ),
    "opt-350m": Model(
        OPT | {"do_layer_norm_before": False, "ffn_dim": 4096, "hidden_size": 1024, "num_attention_heads": 16,
               "word_embed_proj_dim": 512},
        331_196_416,
        WITHOUT_PREFIX,
    ),
    "falcon-7b": Model(
        FALCON | {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
                  "new_decoder_architecture": False},
        6_921_720_704,
        unused={"lm_head.weight": (65024, 4544)},
    ),
    "falcon-40b": Model(
        FALCON | {"hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "num_hidden_layers": 60,
                  "new_decoder_architecture": True},
        41_303_293_952,
        unused={"lm_head.weight": (65024, 8192)},
    ),
    "qwen2-7b": Model(
        {"model_type": "qwen2", "torch_dtype": "bfloat16", "hidden_act": "silu", "hidden_size": 3584,
         "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
         "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
         "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": False,
         "vocab_size": 152064, "bos_token_id": 151643, "eos_token_id": 151643},
        7_615_616_512,
    ),
    "qwen3-8b": Model(
        QWEN3 | {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36,
                 "num_hidden_layers": 36, "num_key_value_heads": 8},
        8_190_735_360,
    ),
    "qwen3-30b-a3b": Model(
        QWEN3 | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48,
                 "num_hidden_layers": 48, "num_key_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
                 "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8},
        30_532_122_624,
    ),
    "gemma-7b": Model(
        GEMMA | {"hidden_act": "gelu", "hidden_activation": None, "hidden_size": 3072, "intermediate_size": 24576,
                 "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 16, "rope_scaling": None},
        8_537_680_896,
    ),
    "gemma-2-9b": Model(
        GEMMA | {"model_type": "gemma2", "torch_dtype": "float32", "attn_logit_softcapping": 50.0,
                 "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
                 "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
                 "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
                 "query_pre_attn_scalar": 256, "sliding_window": 4096},
        9_241_705_984,
    ),
    "gemma-3-1b": Model(
        GEMMA | {"model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None,
                 "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
                 "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
                 "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000,
                 "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
                 "vocab_size": 262144},
        999_885_952,
    ),
    "phi-3-mini-4k": Model(
        PHI3 | {"max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047}, 3_821_079_552
    ),
    "phi-3-mini-128k": Model(
        PHI3 | {"max_position_embeddings": 131072, "sliding_window": 262144,
                "rope_scaling": {"long_factor": PHI3_LONG, "short_factor": PHI3_SHORT, "type": "su"}},
        3_821_079_552,
    ),
    "starcoder2-7b": Model(
        {"model_type": "starcoder2", "torch_dtype": "bfloat16", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 4608,
         "intermediate_size": 18432, "max_position_embeddings": 16384, "mlp_type": "default",
         "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 36, "num_hidden_layers": 32,
         "num_key_value_heads": 4, "rope_theta": 1000000, "sliding_window": 4096, "use_bias": True,
         "vocab_size": 49152, "bos_token_id": 0, "eos_token_id": 0},
        7_173_923_840,
    ),
    "starcoder": Model(
        {"model_type": "gpt_bigcode", "torch_dtype": "float32", "activation_function": "gelu",
         "layer_norm_epsilon": 1e-05, "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576,
         "n_layer": 40, "n_positions": 8192, "scale_attn_weights": True, "vocab_size": 49152, "bos_token_id": 0,
         "eos_token_id": 0},
        15_517_456_384,
        unused={"lm_head.weight": (49152, 6144)},
    ),
    "gpt2": Model(
        {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
         "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "bos_token_id": 50256,
         "eos_token_id": 50256},
        124_439_808,
        WITHOUT_PREFIX,
        {"h.{i}.attn.bias": (1, 1, 1024, 1024)},
    ),
    "pythia-6.9b": Model(
        {"model_type": "gpt_neox", "torch_dtype": "float16", "hidden_act": "gelu", "hidden_size": 4096,
         "intermediate_size": 16384, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
         "num_attention_heads": 32, "num_hidden_layers": 32, "rotary_emb_base": 10000, "rotary_pct": 0.25,
         "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50432, "bos_token_id": 0,
         "eos_token_id": 0},
        6_857_302_016,
        ((r"^lm_head\.", "embed_out."),),
        unused={
            "gpt_neox.layers.{i}.attention.bias": (1, 1, 2048, 2048),
            "gpt_neox.layers.{i}.attention.masked_bias": (),
            "gpt_neox.layers.{i}.attention.rotary_emb.inv_freq": (16,),
        },
    ),
    "mixtral-8x7b": Model(
        MISTRAL | {"model_type": "mixtral", "rope_theta": 1000000.0, "sliding_window": None, "num_local_experts": 8,
                   "num_experts_per_tok": 2},
        46_702_792_704,
        MIXTRAL_NAMES,
    ),
    "t5-large": Model(
        T5 | {"d_ff": 4096, "d_kv": 64, "d_model": 1024, "num_heads": 16, "num_layers": 24, "n_positions": 512},
        737_668_096,
        unused=copies_of_the_embedding(32128, 1024),
    ),
    "flan-t5-xl": Model(
        T5 | {"d_ff": 5120, "d_kv": 64, "d_model": 2048, "num_heads": 32, "num_layers": 24, "num_decoder_layers": 24,
              "feed_forward_proj": "gated-gelu", "relative_attention_max_distance": 128, "tie_word_embeddings": False},
        2_849_757_184,
        unused=copies_of_the_embedding(32128, 2048),
    ),
    "mt0-xxl-mt": Model(
        T5 | {"model_type": "mt5", "d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24,
              "num_decoder_layers": 24, "feed_forward_proj": "gated-gelu", "relative_attention_max_distance": 128,
              "tie_word_embeddings": False, "vocab_size": 250112},
        12_921_057_280,
        unused=copies_of_the_embedding(250112, 4096),
    ),
    "mpt-7b": Model(
        {"model_type": "mpt", "torch_dtype": "bfloat16", "d_model": 4096, "expansion_ratio": 4, "max_seq_len": 2048,
         "n_heads": 32, "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "logit_scale": None,
         "learned_pos_emb": True, "vocab_size": 50432,
         "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
                         "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None,
                         "prefix_lm": False, "qk_ln": False, "softmax_scale": None}},
        6_649_286_656,
    ),
}  # fmt: skip


def checkpoint_shapes(model: Model) -> dict[str, Shape]:
    """Name and shape of every tensor that the model needs, as its publisher stored them."""
    if shapes_of := PUBLISHED.get(model.config["model_type"]):
        return {name: shape for name, shape in shapes_of(model.config).items() if name not in model.unused}
    # Rotations have no tensors, and not every spelling of their scaling that was published is still accepted.
    config = AutoConfig.for_model(**{key: value for key, value in model.config.items() if key != "rope_scaling"})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        state = auto.from_config(config).state_dict()
    if model.config.get("tie_word_embeddings", config.tie_word_embeddings):
        state.pop("lm_head.weight", None)
    stored: dict[str, Shape] = {}
    for name, tensor in state.items():
        if name in model.unused:
            continue
        for short, shape in _apart(name, tuple(tensor.shape)):
            for pattern, replacement in model.rename:
                short = re.sub(pattern, replacement, short)
            stored[short] = shape
    return stored


def _apart(name: str, shape: Shape) -> list[tuple[str, Shape]]:
    """The tensors that files hold for one of transformers' own: it keeps all experts in one, files one for each."""
    if ".experts." not in name:
        return [(name, shape)]
    stem, _, kind = name.rpartition(".")
    count, rows, columns = shape
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return [(f"{stem}.{e}.{kind}.weight", (rows // len(kinds), columns)) for e in range(count) for kind in kinds]


def compress(shapes: dict[str, Shape]) -> tuple[dict[str, Shape], int, int]:
    """Patterns with `{i}` for the layer and `{e}` for the expert, and how many layers and experts there are.

    A pattern holds for all layers and all experts; what only some layers have keeps its name.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name in shapes:
        layer = re.sub(r"(^|\.)(\d+)\.", r"\1{i}.", name, count=1)
        found[re.sub(r"\.experts\.\d+\.", ".experts.{e}.", layer)].append(name)
    experts = len({number for name in shapes for number in re.findall(r"\.experts\.(\d+)\.", name)})
    layers = max(len(names) for pattern, names in found.items() if "{e}" not in pattern)
    patterns: dict[str, Shape] = {}
    for pattern, names in found.items():
        is_everywhere = len(names) == (layers if "{i}" in pattern else 1) * (experts if "{e}" in pattern else 1)
        for name in [pattern] if is_everywhere else names:
            patterns[name] = shapes[names[0]]
        assert {shapes[names[0]]} == {shapes[name] for name in names}, pattern
    return patterns, layers, experts


def write(name: str, model: Model) -> None:
    """One model's fixture. Raises AssertionError when its parameters are not as many as published."""
    shapes = checkpoint_shapes(model)
    total = sum(math.prod(shape) for shape in shapes.values())
    assert total == model.parameters, f"{name}: {total} parameters, published are {model.parameters}"
    tensors, layers, experts = compress(shapes)
    fixture = {"config": model.config, "parameters": model.parameters, "layers": layers, "experts": experts,
               "tensors": tensors, "unused": model.unused}  # fmt: skip
    text = json.dumps(fixture, indent=1)
    text = re.sub(
        r"\[[^\[\]{}]*\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text
    )  # lists on one line
    (FOLDER / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, model in MODELS.items():
        write(name, model)
