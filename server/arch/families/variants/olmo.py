"""OLMo 2 (arXiv 2501.00656) and 3 (arXiv 2512.13961), OLMoE (arXiv 2409.02060), of the Allen Institute for AI.

All normalise whole rows of queries and keys. OLMo 2 and 3 normalise what attention and the mlp give, not what they are
given; three in four layers of OLMo 3 have a window. OLMoE is a mixture.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama, qwen
from server.arch.families.hf_config import Config, head_dim, mixture, rope, windowed
from server.arch.names import NameMap
from server.arch.spec import ArchSpec, Residual, with_layers

NAMES = NameMap(
    roles={
        **{role: name for role, name in llama.NAMES.roles.items() if role not in ("attention_norm", "mlp_norm")},
        "attention_post_norm": "layers.{i}.post_attention_layernorm",
        "mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
        "q_norm": "layers.{i}.self_attn.q_norm",
        "k_norm": "layers.{i}.self_attn.k_norm",
    },
    prefixes=llama.NAMES.prefixes,
    ignore=llama.NAMES.ignore,
)
NAMES_OF_MOE = qwen.NAMES_OF_3


def spec_of_2(config: Config) -> ArchSpec:
    return replace(llama.spec(config), residual=Residual.OUTPUT_NORMED, qk_row_norm=True)


def spec_of_3(config: Config) -> ArchSpec:
    config = {**config, "sliding_window": config["sliding_window"]}
    base = windowed(spec_of_2(config), config, lambda i: (i + 1) % 4 != 0)
    dim = head_dim(config)
    full = rope(config, dim, kind="full_attention", theta=500000.0)
    local = rope({**config, "rope_scaling": None}, dim, kind="sliding_attention", theta=500000.0)
    return replace(
        base, layers=tuple(replace(layer, position=local if layer.window else full) for layer in base.layers)
    )


def spec_of_moe(config: Config) -> ArchSpec:
    base = replace(llama.spec(config), qk_row_norm=True, qkv_clip=config.get("clip_qkv") or 0.0)
    return with_layers(base, mlp=mixture(config, width=config["intermediate_size"]))
