"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and the text of Gemma 3 (arXiv 2503.19786), of the Gemma Team.

Gemma is Llama with a scaled embedding and norms stored as distances from 1. Gemma 2 has norms on both sides, capped
scores and logits, alternating windows; Gemma 3 five windowed layers to each full one, rotated differently.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, activation, head_dim, period, rope, windowed
from server.arch.spec import ArchSpec, Gated, Residual, RmsNormSpec

NAMES = llama.NAMES
NAMES_OF_2 = replace(
    NAMES,
    roles={
        **NAMES.roles,
        "attention_post_norm": "layers.{i}.post_attention_layernorm",
        "mlp_norm": "layers.{i}.pre_feedforward_layernorm",
        "mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
    },
)
NAMES_OF_3 = replace(
    NAMES_OF_2,
    roles={
        **NAMES_OF_2.roles,
        "q_norm": "layers.{i}.self_attn.q_norm",
        "k_norm": "layers.{i}.self_attn.k_norm",
    },
)


def spec(config: Config) -> ArchSpec:
    # Early configs say "gelu" in hidden_act and mean its tanh form, which hidden_activation then says.
    name, early = config.get("hidden_activation"), config.get("hidden_act", "gelu")
    if not name and not early.startswith("gelu"):
        raise ValueError(f"config.json says hidden_act {early!r}: Gemma is served with 'gelu_pytorch_tanh'")
    name = name or "gelu_pytorch_tanh"
    base = llama.spec({**config, "hidden_act": name})
    mlp = Gated(config["intermediate_size"], activation(name))
    return replace(
        base,
        norm=RmsNormSpec(config["rms_norm_eps"], unit_offset=True),
        layers=tuple(replace(layer, mlp=mlp) for layer in base.layers),
        embed_scale=config["hidden_size"] ** 0.5,
        rounds_embed_scale=True,
        tied_head=config.get("tie_word_embeddings", True),
    )


def spec_of_2(config: Config) -> ArchSpec:
    return replace(
        windowed(spec(config), config, lambda i: i % 2 == 0),
        residual=Residual.SANDWICH,
        scale=config["query_pre_attn_scalar"] ** -0.5,
        score_cap=config.get("attn_logit_softcapping", 50.0) or 0.0,
        logit_cap=config.get("final_logit_softcapping", 30.0) or 0.0,
    )


def spec_of_3(config: Config) -> ArchSpec:
    if config.get("use_bidirectional_attention"):
        raise ValueError("config.json asks for use_bidirectional_attention: Gemma 3 is served as it generates text")
    dim, each = head_dim(config), period(config, 6)
    uncapped = {"final_logit_softcapping": None, **config, "attn_logit_softcapping": None}
    base = windowed(spec_of_2(uncapped), config, lambda i: (i + 1) % each != 0)
    full = rope(config, dim, kind="full_attention", theta=1e6)
    local_theta = {"rope_theta": config.get("rope_local_base_freq")}
    local = rope({"rope_parameters": config.get("rope_parameters") or local_theta}, dim, kind="sliding_attention")
    layers = tuple(replace(layer, position=local if layer.window else full) for layer in base.layers)
    return replace(base, layers=layers, qk_norm=True)
