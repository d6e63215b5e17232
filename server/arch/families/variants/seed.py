"""Seed-OSS (ByteDance 2025): Llama with biases on q, k and v, and one of its own for attention's output."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config
from server.arch.spec import ArchSpec

NAMES = llama.NAMES


def spec(config: Config) -> ArchSpec:
    base = llama.spec({"attention_bias": True, **config})
    return replace(base, attention_out_bias=config.get("attention_out_bias", False))
