"""DeepSeek V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): compressed keys and values, many small experts.

V2 chooses experts by a softmax, the large one among those of the groups with the best ones; V3 as `deepseek_mixture`
says. R1, V3.1 and Kimi K2 (arXiv 2507.20534) are V3 of other sizes.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama, qwen
from server.arch.families.hf_config import Config, deepseek_mixture, mixed, mixture, of_layers, rope, yarn_magnitude
from server.arch.spec import ArchSpec, Latent, Moe, with_layers

UNCOMPRESSED = ("k", "v", "q_norm", "k_norm")
NAMES = replace(
    qwen.NAMES_OF_SHARED,
    roles={
        **{role: name for role, name in qwen.NAMES_OF_SHARED.roles.items() if role not in UNCOMPRESSED},
        "q_a": "layers.{i}.self_attn.q_a_proj",
        "q_a_norm": "layers.{i}.self_attn.q_a_layernorm",
        "q_b": "layers.{i}.self_attn.q_b_proj",
        "kv_a": "layers.{i}.self_attn.kv_a_proj_with_mqa",
        "kv_a_norm": "layers.{i}.self_attn.kv_a_layernorm",
        "kv_b": "layers.{i}.self_attn.kv_b_proj",
    },
)

# What transformers takes where config.json says nothing.
USUAL_OF_3 = {
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "first_k_dense_replace": 3,
}  # fmt: skip


def compressed(config: Config) -> ArchSpec:
    """The dense model that config.json describes, with compressed keys and values."""
    if config.get("attention_bias"):
        raise ValueError(
            "config.json asks for attention_bias, which is not served where keys and values are compressed"
        )
    latent = Latent(
        rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        key_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        query_rank=config.get("q_lora_rank", 0),
    )
    base = llama.spec({**config, "head_dim": latent.width, "num_key_value_heads": 1})
    position = replace(rope(config, latent.rope_dim), interleaved=config.get("rope_interleave", True))
    base = with_layers(base, latent=latent, position=position)
    return replace(base, scale=latent.query_dim**-0.5 * _growth(config))


def _growth(config: Config) -> float:
    """What scaled positions multiply attention's scores by, beside what they multiply queries and keys by."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_scaled = given.get("rope_type", given.get("type", "default")) != "default"
    if not is_scaled or not given.get("mscale_all_dim") or not given.get("factor"):
        return 1.0
    return yarn_magnitude(given["factor"], given["mscale_all_dim"]) ** 2


def with_experts(base: ArchSpec, config: Config, moe: Moe) -> ArchSpec:
    """The same with a mixture in all layers but the first, or in those that are called sparse."""
    first, step = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    usual = ["sparse" if i >= first and i % step == 0 else "dense" for i in range(base.num_layers)]
    kinds = of_layers(config.get("mlp_layer_types") or usual, base.num_layers, "mlp_layer_types")
    predictors = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    return replace(mixed(base, moe, lambda i: kinds[i] == "sparse"), num_predictors=predictors)


def spec_of_2(config: Config) -> ArchSpec:
    width = config["moe_intermediate_size"]
    moe = replace(
        mixture({**config, "norm_topk_prob": False}, width=width),
        scale=config.get("routed_scaling_factor", 1.0),
        shared_width=width * config.get("n_shared_experts", 0),
        group_best=1,
    )
    if config.get("topk_method", "greedy") != "greedy":
        moe = replace(moe, num_groups=config["n_group"], top_groups=config["topk_group"])
    return with_experts(compressed(config), config, moe)


def spec_of_3(config: Config) -> ArchSpec:
    config = {**USUAL_OF_3, **config}
    return with_experts(compressed(config), config, deepseek_mixture(config))
