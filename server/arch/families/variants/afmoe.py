"""Arcee's Trinity (arXiv 2602.17004): gated attention, norms on both sides, no positions where there is no window.

Its mixture is as DeepSeek V3's, under names of its own.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama, qwen
from server.arch.families.hf_config import Config, deepseek_mixture, mixed, windowed
from server.arch.spec import ArchSpec, Residual

NAMES = replace(
    qwen.NAMES_OF_SHARED,
    roles={
        **qwen.NAMES_OF_SHARED.roles,
        "attention_gate": "layers.{i}.self_attn.gate_proj",
        "attention_post_norm": "layers.{i}.post_attention_layernorm",
        "mlp_norm": "layers.{i}.pre_mlp_layernorm",
        "mlp_post_norm": "layers.{i}.post_mlp_layernorm",
        "router": "layers.{i}.mlp.router.gate",
        "choice_bias": "layers.{i}.mlp.expert_bias",
    },
)


def spec(config: Config) -> ArchSpec:
    period, first = config.get("global_attn_every_n_layers", 4), config.get("num_dense_layers", 1)
    if not config["sliding_window"]:
        raise ValueError(
            "config.json says sliding_window 0, and layers with positions need a window: download it again"
        )
    base = windowed(llama.spec(config), config, lambda i: (i + 1) % period != 0)
    layers = tuple(layer if layer.window else replace(layer, position=None) for layer in base.layers)
    known = {
        "norm_topk_prob": config.get("route_norm", True),
        "n_shared_experts": config["num_shared_experts"],
        "routed_scaling_factor": config.get("route_scale", 1.0),
    }
    return replace(
        mixed(replace(base, layers=layers), deepseek_mixture({**config, **known}), lambda i: i >= first),
        residual=Residual.SANDWICH,
        qk_norm=True,
        attention_gate=True,
        embed_scale=config["hidden_size"] ** 0.5 if config.get("mup_enabled") else 1.0,
    )
