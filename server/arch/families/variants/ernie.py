"""ERNIE 4.5, dense and mixture (Baidu 2025): Llama rotated in pairs; experts are chosen by a bias beside a softmax."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama, qwen
from server.arch.families.hf_config import Config, head_dim, mixed, mixture, rope
from server.arch.spec import ArchSpec, with_layers

NAMES = llama.NAMES
NAMES_OF_MOE = replace(
    qwen.NAMES_OF_SHARED,
    roles={**qwen.NAMES_OF_SHARED.roles, "choice_bias": "layers.{i}.mlp.moe_statics.e_score_correction_bias"},
    ignore=(*llama.NAMES.ignore, r"^model\.mtp_"),  # what predicts further tokens
)


def spec(config: Config) -> ArchSpec:
    bias = config.get("use_bias", False)
    base = llama.spec({"tie_word_embeddings": True, **config, "attention_bias": bias, "mlp_bias": bias})
    position = replace(rope(config, head_dim(config), theta=500000.0), interleaved=True)
    return with_layers(base, position=position)


def spec_of_moe(config: Config) -> ArchSpec:
    width, base = config["moe_intermediate_size"], spec(config)
    if base.mlp_bias:
        raise ValueError("config.json asks for use_bias, biases of experts: ERNIE's mixtures are served without them")
    known = {"num_experts": config["moe_num_experts"], "num_experts_per_tok": config["moe_k"], "norm_topk_prob": True}
    moe = replace(
        mixture({**config, **known}, width=width),
        choice_bias=True,
        shared_width=width * config.get("moe_num_shared_experts", 0),
    )
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    layers = range(first, base.num_layers if last == -1 else last + 1)
    return mixed(base, moe, lambda i: i in layers and (i + 1) % config.get("moe_layer_interval", 1) == 0)
