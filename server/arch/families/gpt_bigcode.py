"""GPT-BigCode, StarCoder (Li et al. 2023, arXiv 2305.06161): GPT-2 with one key-value head for all heads."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import gpt2
from server.arch.families.reading import Config
from server.arch.names import QkvLayout
from server.arch.spec import ArchSpec

# With one kv head, or one for each head, the grouped layout is what both kinds of checkpoint have.
NAMES = replace(
    gpt2.NAMES,
    roles={**gpt2.NAMES.roles, "activation": "h.{i}.mlp.act"},
    transposed=False,
    qkv_layout=QkvLayout.GROUPED,
)


def spec(config: Config) -> ArchSpec:
    base = gpt2.spec(config)
    return replace(base, num_kv_heads=1 if config["multi_query"] else base.num_heads)
