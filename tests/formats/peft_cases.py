"""Models that adapters of PEFT are made for, and what they are asked: for its environment and for the tests."""

from __future__ import annotations

import torch

PROMPT = [int(i) for i in torch.randint(4, 100, (24,), generator=torch.Generator().manual_seed(1))]
GENERATED = [5, 17, 40, 41]  # of what has an encoder
CASES = (
    *("bloom", "opt", "gpt2", "gpt_neox", "falcon-7b", "llama", "llama-biased-tied", "mistral", "mixtral", "qwen2"),
    *("qwen3", "qwen3_moe", "gemma", "gemma3_text", "phi3", "starcoder2", "mpt", "t5", "t5-gated", "mt5", "gpt_oss"),
    *("qwen3_next", "granitemoehybrid", "falcon_h1", "nemotron_h", "deepseek_v3"),
)
