"""GLM-4 (arXiv 2406.12793): Llama with half of each head rotated, in pairs, and one matrix for gate and up.

GLM-4-0414 has norms on both sides of attention and mlp. GLM-4.5 (arXiv 2508.06471) is a mixture as DeepSeek V3's;
GLM-4.7-Flash is DeepSeek V3 of another size.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import deepseek, llama, qwen
from server.arch.families.hf_config import Config, deepseek_mixture, mixed, partial_rope
from server.arch.names import NameMap
from server.arch.spec import ArchSpec, Residual, with_layers

NAMES = NameMap(
    roles={
        **{role: name for role, name in llama.NAMES.roles.items() if role not in ("mlp_gate", "mlp_up")},
        "mlp_gate_up": "layers.{i}.mlp.gate_up_proj",
    },
    prefixes=llama.NAMES.prefixes,
    ignore=llama.NAMES.ignore,
)
NAMES_OF_0414 = replace(
    NAMES,
    roles={
        **NAMES.roles,
        "attention_post_norm": "layers.{i}.post_self_attn_layernorm",
        "mlp_norm": "layers.{i}.post_attention_layernorm",
        "mlp_post_norm": "layers.{i}.post_mlp_layernorm",
    },
)
NAMES_OF_MOE = qwen.NAMES_OF_SHARED
NAMES_OF_LITE = deepseek.NAMES
USUAL_OF_LITE = {"first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1}


def spec(config: Config) -> ArchSpec:
    base = llama.spec({"attention_bias": True, **config})
    position = replace(partial_rope(config, default=0.5), interleaved=True)
    return replace(with_layers(base, position=position), attention_out_bias=False)


def spec_of_0414(config: Config) -> ArchSpec:
    return replace(spec(config), residual=Residual.SANDWICH)


def spec_of_moe(config: Config) -> ArchSpec:
    base = with_layers(llama.spec(config), position=partial_rope(config, default=0.5))
    base = mixed(
        base,
        deepseek_mixture(config),
        lambda i: i >= config.get("first_k_dense_replace", 1),
    )
    predictors = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    return replace(base, attention_out_bias=False, qk_norm=config.get("use_qk_norm", False), num_predictors=predictors)


def spec_of_lite(config: Config) -> ArchSpec:
    return deepseek.spec_of_3({**USUAL_OF_LITE, **config})
