"""What every library is given to quantise: random models, whose 384 inputs are three groups of 128.

Run by the interpreters of the libraries' environments, so it imports nothing of this project.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

TEXTS = [" ".join(f"w{(3 * i + 7 * j) % 100}" for j in range(64)) for i in range(16)]  # to calibrate with


# By `model_type`, what it has besides. All but StarCoder2 have gates.
FAMILIES = {
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "starcoder2": {},
}


def save(folder: Path, family: str = "llama") -> PreTrainedModel:
    """The model in float32 with a tokenizer of words w0 … w99."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=104, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, bos_token_id=101, eos_token_id=102, pad_token_id=103,
        sliding_window=None, **FAMILIES[family],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0.5 if "norm" in name else 0.0, 0.1)
    words = {f"w{i}": i for i in range(100)} | {"<unk>": 100, "<s>": 101, "</s>": 102, "<pad>": 103}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    model.save_pretrained(folder)
    return model
