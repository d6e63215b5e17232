"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), which attends nowhere, and Nemotron-H (NVIDIA 2025, arXiv 2504.03624).

A layer of either is one branch: Mamba-2, or in Nemotron-H attention without positions, an mlp, or a mixture of mlps.
"""

from __future__ import annotations

import math
from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, activation, deepseek_mixture, need_silu, of_layers, step_limits
from server.arch.names import FusedRows, NameMap
from server.arch.recurrences import Mamba2
from server.arch.spec import ArchSpec, Dense, LayerSpec, Moe, Residual, RmsNormSpec

MIXER = "layers.{i}.mixer"
NAMES = NameMap(
    roles={
        "embed": "embeddings",
        "attention_norm": "layers.{i}.norm",
        "mamba_in": f"{MIXER}.in_proj",
        "mamba": MIXER,
        "mamba_conv": f"{MIXER}.conv1d",
        "mamba_norm": f"{MIXER}.norm",
        "mamba_out": f"{MIXER}.out_proj",
        "final_norm": "norm_f",
        "head": "lm_head",
    },
    prefixes=("backbone.", "model.", ""),
    ignore=(r"^lm_head\.weight$",),  # a copy of a tied embedding
)
NAMES_OF_NEMOTRON = replace(
    NAMES,
    roles={
        **NAMES.roles,
        "q": f"{MIXER}.q_proj",
        "k": f"{MIXER}.k_proj",
        "v": f"{MIXER}.v_proj",
        "attention_out": f"{MIXER}.o_proj",
        "mlp_up": f"{MIXER}.up_proj",
        "mlp_down": f"{MIXER}.down_proj",
        "router": f"{MIXER}.gate",
        "choice_bias": f"{MIXER}.gate.e_score_correction_bias",
        "expert_up": f"{MIXER}.experts.{{e}}.up_proj",
        "expert_down": f"{MIXER}.experts.{{e}}.down_proj",
        "shared_up": f"{MIXER}.shared_experts.up_proj",
        "shared_down": f"{MIXER}.shared_experts.down_proj",
    },
    fused_experts={
        "expert_up": FusedRows(f"{MIXER}.experts.up_proj"),
        "expert_down": FusedRows(f"{MIXER}.experts.down_proj"),
    },
    ignore=(*NAMES.ignore, r"(^|\.)mtp\."),  # layers that draft tokens after the next
)


def spec(config: Config) -> ArchSpec:
    need_silu(config)
    eps = config.get("layer_norm_epsilon", 1e-5)
    least, most = step_limits(config)
    kind = Mamba2(
        num_heads=config["num_heads"],
        num_groups=config["n_groups"],
        head_dim=config["head_dim"],
        key_dim=config["state_size"],
        conv=config["conv_kernel"],
        eps=eps,
        conv_bias=config.get("use_conv_bias", True),
        bias=config.get("use_bias", False),
        least_step=least,
        most_step=most,
    )
    layer = LayerSpec(mlp=None, position=None, recurrence=kind, attends=False)
    return ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_heads=1,  # no layer attends
        num_kv_heads=1,
        head_dim=config["head_dim"],
        norm=RmsNormSpec(eps),
        residual=Residual.ONE_BRANCH,
        layers=(layer,) * config["num_hidden_layers"],
        tied_head=config.get("tie_word_embeddings", False),
    )


LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of `hybrid_override_pattern`


def spec_of_nemotron(config: Config) -> ArchSpec:
    eps, act = config.get("layer_norm_epsilon", 1e-5), config.get("mlp_hidden_act", "relu2")
    if config.get("moe_latent_size"):
        raise ValueError("config.json asks for moe_latent_size, experts of a narrower width, which is not served")
    mamba = LayerSpec(mlp=None, position=None, recurrence=_mamba_of_nemotron(config, eps), attends=False)
    attention = LayerSpec(mlp=None, position=None)
    mlp = LayerSpec(mlp=Dense(config["intermediate_size"], activation(act)), position=None, attends=False)
    kinds = {
        **dict.fromkeys(("mamba", "linear_attention"), mamba),
        **dict.fromkeys(("attention", "full_attention"), attention),
        "mlp": mlp,
        "moe": replace(mlp, mlp=_mixture(config, act)) if config.get("n_routed_experts") else mlp,
    }
    types = config.get("layers_block_type") or [LETTERS.get(c, c) for c in config["hybrid_override_pattern"]]
    if unknown := set(types) - set(kinds):
        raise ValueError(f"config.json asks for layers of the type {min(unknown)!r}; served are: {', '.join(kinds)}")
    types = of_layers(types, config.get("num_hidden_layers", len(types)), "layers_block_type")
    base = llama.spec({**config, "rms_norm_eps": eps, "hidden_act": "silu", "num_hidden_layers": len(types)})
    return replace(base, residual=Residual.ONE_BRANCH, layers=tuple(kinds[kind] for kind in types))


def _mixture(config: Config, act: str) -> Moe:
    moe = deepseek_mixture({**config, "hidden_act": act})
    return replace(moe, gated=False, shared_width=config["moe_shared_expert_intermediate_size"])


def _mamba_of_nemotron(config: Config, eps: float) -> Mamba2:
    """Where config.json has both of two names, transformers takes the one that begins with `mamba`."""
    need_silu(config, "mamba_hidden_act")
    return Mamba2(
        num_heads=config["mamba_num_heads"],
        num_groups=config["n_groups"],
        head_dim=config["mamba_head_dim"],
        key_dim=config["ssm_state_size"],
        conv=config.get("mamba_d_conv") or config.get("conv_kernel", 4),
        eps=eps,
        conv_bias=config.get("mamba_conv_bias", config.get("use_conv_bias", True)),
        bias=config.get("use_bias", False),
        least_step=config.get("mamba_dt_min", config.get("time_step_min", 0.001)),
        most_step=math.inf,
    )
