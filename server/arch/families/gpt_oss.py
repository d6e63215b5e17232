"""gpt-oss (OpenAI 2025, arXiv 2508.10925): a mixture in every layer, sinks in attention, windows in every other layer.

Experts are published in MXFP4, which transformers may have expanded to 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, rotation_of, windowed
from server.arch.names import Stack
from server.arch.spec import Activation, ArchSpec, Moe

NAMES = replace(
    llama.NAMES,
    roles={
        **{role: name for role, name in llama.NAMES.roles.items() if not role.startswith("mlp_") or role == "mlp_norm"},
        "sinks": "layers.{i}.self_attn.sinks",
        "router": "layers.{i}.mlp.router",
    },
    stacks={
        "expert_gate_up": Stack("layers.{i}.mlp.experts.gate_up_proj", transposed=True, interleaved=True),
        "expert_down": Stack("layers.{i}.mlp.experts.down_proj", transposed=True),
    },
)
# What the kernels of `Activation.CLAMPED_SWIGLU` compute, under the names of config.json.
SERVED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def spec(config: Config) -> ArchSpec:
    for name, served in SERVED.items():
        if (found := config.get(name, served)) != served:
            raise ValueError(f"config.json says {name} {found}, and {served} is served: take another checkpoint")
    moe = Moe(
        num_experts=config["num_local_experts"],
        top_k=config.get("num_experts_per_tok") or config["experts_per_token"],
        width=config["intermediate_size"],
        activation=Activation.CLAMPED_SWIGLU,
        renormalise=True,  # a softmax over the chosen ones is that over all, made to sum to 1
        bias=True,
        router_bias=True,
    )
    config = {"rope_theta": 150000.0, **config, "rope_scaling": rotation_of(config) or config["rope_scaling"]}
    base = windowed(llama.spec(config), config, lambda i: i % 2 == 0)
    return replace(base, layers=tuple(replace(layer, mlp=moe, sinks=True) for layer in base.layers))
