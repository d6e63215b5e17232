"""Makes a model of a shape for the race: random weights in bfloat16, with a tokenizer that every system can read.

    python -m benchmark.race.model SHAPE FOLDER

A process of its own, so that the memory that it takes is free while something is measured. The tokenizer is a
byte-level BPE, whose merges make one token of each word that the benchmark's prompts are made of; the tokens that are
left over have names that no text has. Experts are in MXFP4 where the config says so. Left out: weights and words that
mean anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.cost import shapes
from benchmark.result import BenchError
from benchmark.serving.workload import WORDS
from server.quantisation.sizes import MXFP4_GROUP

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}  # ids 0 to 3
SPACE = "Ġ"  # in byte-level vocabularies
LONGEST_SEQUENCE = 8192  # of a model with rotary positions, which mean nothing here
ONE_FILE = "1000GB"
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")  # ends of names; [experts, inputs, outputs]
MXFP4_SCALE = 127 - 7  # codes of about 3 become numbers of about 0.02


def main(arguments: Sequence[str]) -> None:
    """Make the model. Raises BenchError."""
    name, folder = arguments[0], Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(shapes.find(name).config)
    write_tokenizer(config["vocab_size"], folder)
    stored = config.pop("quantization_config", None)
    write_weights(config, folder)
    if stored is not None:
        write_experts_in_mxfp4(stored, folder)


def write_weights(config: dict[str, Any], folder: Path) -> None:
    """Write config.json and model.safetensors, as the transformers library saves a new model."""
    import torch
    import transformers

    library: Any = transformers
    if "max_position_embeddings" in config:
        config["max_position_embeddings"] = max(config["max_position_embeddings"], LONGEST_SEQUENCE)
    ids = {f"{name.removesuffix('_token')}_token_id": id for id, name in enumerate(SPECIAL)}
    known = library.AutoConfig.for_model(**{"model_type": config["model_type"], **config, **ids})
    torch.manual_seed(0)
    model = library.AutoModelForCausalLM.from_config(known, dtype=torch.bfloat16)
    model.generation_config = library.GenerationConfig(**ids)
    model.save_pretrained(folder, max_shard_size=ONE_FILE)


def write_experts_in_mxfp4(stored: Mapping[str, Any], folder: Path) -> None:
    """Replace the experts of a model by random ones in MXFP4. stored: the `quantization_config`. Raises BenchError."""
    import torch
    from safetensors.torch import load_file, save_file

    if stored.get("quant_method") != "mxfp4":
        raise BenchError(f"random weights are made in bfloat16 and mxfp4, not {stored.get('quant_method')}")
    path, tensors = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        if name.endswith(EXPERTS):
            experts, inputs, outputs = tensor.shape
            groups = inputs // MXFP4_GROUP
            codes = (experts, outputs, groups, MXFP4_GROUP // 2)
            tensors[f"{name}_blocks"] = torch.randint(256, codes, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(codes[:3], MXFP4_SCALE, dtype=torch.uint8)
        else:
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": stored}))


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises BenchError where there are too few tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL.values(), *sorted(ByteLevel.alphabet())]
    merges = word_merges(WORDS)
    tokens += [left + right for left, right in merges]
    if len(tokens) > vocab_size:
        raise BenchError(f"a vocabulary of {vocab_size} tokens is too small: the race's words need {len(tokens)}")
    tokens += [f"<unused{id}>" for id in range(len(tokens), vocab_size)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": text, **special} for id, text in enumerate(SPECIAL.values())],
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: id for id, token in enumerate(tokens)}, "merges": merges},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def word_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """What makes one token of each word behind a space: a letter more at a time, so that no two merges compete."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        merges |= {(SPACE + word[:length], word[length]): None for length in range(len(word))}
    return list(merges)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BenchError as error:
        sys.exit(f"error: {error}")
