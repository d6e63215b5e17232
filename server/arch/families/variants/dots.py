"""dots.llm1 (arXiv 2506.05767): a mixture as DeepSeek V3's, with norms of each head and windows in its upper layers."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama, qwen
from server.arch.families.hf_config import Config, deepseek_mixture, mixed, windowed
from server.arch.spec import ArchSpec

NAMES = qwen.NAMES_OF_SHARED


def spec(config: Config) -> ArchSpec:
    first = config.get("max_window_layers", config["num_hidden_layers"])
    base = windowed(replace(llama.spec(config), qk_norm=True), config, lambda i: i >= first)
    return mixed(
        base,
        deepseek_mixture({"norm_topk_prob": False, **config}),
        lambda i: i >= config.get("first_k_dense_replace", 0),
    )
