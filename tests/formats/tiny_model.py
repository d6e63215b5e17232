"""What every library is given to quantise: the suite's tiny models of every family, and how what it makes is kept.

Run by the interpreters of the libraries' environments, whose transformers save the models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.server.tiny import CASES, save_tiny

TOKENS = [[(3 * i + 7 * j) % 100 for j in range(64)] for i in range(16)]  # to calibrate with
TEXTS = [" ".join(f"w{token}" for token in tokens) for tokens in TOKENS]
WORDS = {f"w{i}": i for i in range(100)} | {"<unk>": 100, "<s>": 101, "</s>": 102, "<pad>": 103}
SPECIAL = {"vocab_size": len(WORDS), "bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 103}
# Schemes are tried with a Llama whose 384 inputs are three groups of 128, families in groups of 32; GPTQModel finds
# experts in all layers or in none.
LARGER = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
CHANGES = {"mpt-clipped": {"d_model": 96}, "qwen3_moe": {"mlp_only_layers": []}}

# Quantises the model of one folder into another as settings say: what the library makes of each layer, by name.
Quantise = Callable[[Path, Path, Any], dict[str, torch.Tensor]]


def make(quantise: Quantise, schemes: Mapping[str, Any], of_families: Any) -> None:
    """Quantise a Llama in every scheme, and every family in one, for `python SCRIPT FOLDER [KIND …]`.

    FOLDER/KIND is the checkpoint, FOLDER/KIND.dense.safetensors what the library makes of its layers or FOLDER/KIND.txt
    why it makes none, and FOLDER/source/KIND what it was given. A kind is a scheme or a family's tiny model.
    """
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    for kind, settings in (schemes | dict.fromkeys(CASES, of_families)).items():
        if only and kind not in only:
            continue
        source = folder / "source" / kind
        save(source, kind)
        try:
            dense = quantise(source, folder / kind, settings)
            assert dense, "no layer is in fewer bits"
        except Exception as error:  # whatever it raises: the tests know which of them are the library's own
            (folder / f"{kind}.txt").write_text(f"{type(error).__name__}: {error}")
        else:
            save_file(
                {name: weight.float().contiguous() for name, weight in dense.items()},
                f"{folder / kind}.dense.safetensors",
            )


def save(folder: Path, kind: str) -> None:
    """The model in float32, with a tokenizer of words w0 … w99."""
    case, changes = (kind, CHANGES.get(kind, {})) if kind in CASES else ("llama", LARGER)
    save_tiny(case, folder, **SPECIAL, **changes)
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


def load(source: Path, **given: Any) -> PreTrainedModel:
    """The model in float32, from its own checkpoint as anyone would load it."""
    auto = AutoModelForSeq2SeqLM if AutoConfig.from_pretrained(source).is_encoder_decoder else AutoModelForCausalLM
    return auto.from_pretrained(source, dtype=torch.float32, **given)


def layers_of(tensors: Mapping[str, torch.Tensor], part: str) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each layer that has such a part: its name, and its tensors by part."""
    for stem in [name.removesuffix(part) for name in tensors if name.endswith(f".{part}")]:
        yield stem + "weight", {name.removeprefix(stem): tensors[name] for name in tensors if name.startswith(stem)}
