"""Adapters that PEFT writes, with random numbers, and what its models compute: `python make_peft.py FOLDER [CASE …]`.

FOLDER/CASE/model is the checkpoint, FOLDER/CASE/OPTION the adapter, with logits of PROMPT beside it or, in OPTION.txt, why
there is none. FOLDER/CASE/OPTION.merged is the model with the adapter merged into it.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.server import published
from tests.server.tiny import save_tiny

PROMPT = [int(i) for i in torch.randint(4, 100, (24,), generator=torch.Generator().manual_seed(1))]
GENERATED = [5, 17, 40, 41]  # of what has an encoder
CASES = (
    *(
        "bloom",
        "opt",
        "gpt2",
        "gpt_neox",
        "falcon-7b",
        "llama",
        "llama-biased-tied",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
    ),
    *(
        "qwen3_moe",
        "gemma",
        "gemma3_text",
        "phi3",
        "starcoder2",
        "mpt",
        "t5",
        "t5-gated",
        "mt5",
        "gpt_oss",
        "qwen3_next",
    ),
    *("granitemoehybrid", "falcon_h1", "nemotron_h", "deepseek_v3"),
)
MERGED = ("plain", "patterns", "dora", "embedding", "saved", "tokens", "bias-all", "experts", "smaller", "larger")
Options = dict[str, dict[str, Any]]


def load(folder: Path) -> PreTrainedModel:
    auto = AutoModelForSeq2SeqLM if AutoConfig.from_pretrained(folder).is_encoder_decoder else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def leaves_of(model: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """The last parts of the names of its modules of these kinds, without its head."""
    heads = [model.get_output_embeddings()] if hasattr(model, "get_output_embeddings") else []
    found = (name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, kinds) and m not in heads)
    return [*dict.fromkeys(name for name in found if not name.isdigit())]


def options_of(model: nn.Module) -> Options:
    """How an adapter of this model may be configured."""
    named = {id(module): name for name, module in model.named_modules()}
    table, head = (named[id(found)] for found in (model.get_input_embeddings(), model.get_output_embeddings()))
    first, second, *others = leaves_of(model, nn.Linear, Conv1D)
    norms = [name.rpartition(".")[2] for name, m in model.named_modules() if "Norm" in type(m).__name__]
    some = [first, second, *others[:1]]
    has_biases = any(name.endswith(".bias") for name, _ in model.named_parameters())
    options: Options = {
        "plain": {},
        "patterns": {
            "rank_pattern": {first: 8, rf"^.*\.1\..*{second}": 2, r".*\.2\..*": 3},
            "alpha_pattern": {rf"{second}": 3, r"^.*\.0\..*": 11},
        },
        "rank-stabilised": {"use_rslora": True, "rank_pattern": {first: 16}},
        "dora": {"use_dora": True},
        "lora-bias": {"lora_bias": True},
        "saved": {"target_modules": [first], "modules_to_save": [table, head, second, *norms[-1:]]},
        "embedding": {"target_modules": [*some, table, head]},
        "embedding-dora": {"target_modules": [*some, table, head], "use_dora": True, "use_rslora": True},
        "tokens": {"target_modules": some, "trainable_token_indices": [PROMPT[3], 99, PROMPT[0]]},
        "layers": {"target_modules": some, "layers_to_transform": [1]},
        "exclude": {"exclude_modules": [first]},
        "expression": {"target_modules": rf".*\.[12]\..*({first}|{second})"},
    }
    if has_biases:
        options |= {"bias-all": {"bias": "all"}, "bias-lora": {"bias": "lora_only", "target_modules": some}}
    experts = [
        name for name, _ in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj", "experts.up_proj"))
    ]
    if experts:
        ends = {".".join(name.split(".")[-2:]) for name in experts}
        routers = {name for name, m in model.named_modules() if "Router" in type(m).__name__}
        routers = {f"{name.rpartition('.')[2]}.weight" for name in routers}
        options["experts"] = {"target_modules": some, "target_parameters": sorted(ends)}
        options["experts-down"] = {"target_modules": [], "target_parameters": [e for e in sorted(ends) if "down" in e]}
        options["experts-patterns"] = {
            "target_modules": [],
            "target_parameters": sorted(ends | routers),
            "rank_pattern": {r".*down_proj": 2},
            "alpha_pattern": {"gate_up_proj": 9},
        }
    return options


def randomise(model: nn.Module) -> None:
    """Numbers such that each part matters, of all that an adapter has."""
    for name, parameter in sorted(model.named_parameters()):
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.3 * torch.rand_like(parameter))
        elif "lora_" in name:
            parameter.data.normal_(0, 0.1)
        elif parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            start = torch.tensor([[model.config.decoder_start_token_id, *GENERATED]])
            return model(input_ids=torch.tensor([PROMPT]), decoder_input_ids=start).logits[0]
        return model(input_ids=torch.tensor([PROMPT])).logits[0]


def write(folder: Path, option: str, settings: dict[str, Any], change: Callable[[PreTrainedModel], None]) -> None:
    """One adapter of the model in `folder`/model, changed before it gets the adapter."""
    model = load(folder / "model")
    change(model)
    kind = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    config = LoraConfig(task_type=kind, **({"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | settings))
    torch.manual_seed(len(option))
    adapted = get_peft_model(model, config).eval()
    randomise(adapted)
    adapted.save_pretrained(folder / option)
    save_file({"logits": logits_of(adapted).contiguous()}, folder / option / "oracle.logits")
    if option in MERGED:
        adapted.merge_and_unload().save_pretrained(folder / f"{option}.merged")


def in_16_bits(folder: Path) -> None:
    """The plain adapter once more, in bfloat16, as a pickle too."""
    tensors = {n: t.bfloat16() for n, t in load_file(folder / "plain" / "adapter_model.safetensors").items()}
    for name in ("bfloat16", "pickle"):
        (folder / name).mkdir()
        shutil.copy(folder / "plain" / "adapter_config.json", folder / name)
    save_file(tensors, folder / "bfloat16" / "adapter_model.safetensors")
    torch.save(tensors, folder / "pickle" / "adapter_model.bin")
    adapted = PeftModel.from_pretrained(load(folder / "model"), folder / "bfloat16").eval()
    for name in ("bfloat16", "pickle"):
        save_file({"logits": logits_of(adapted).contiguous()}, folder / name / "oracle.logits")


def of_older_experts(folder: Path) -> None:
    """As PEFT wrote adapters of experts when each had modules of its own, which it reads still."""
    model = load(folder / "model")
    noise = torch.Generator().manual_seed(9)
    config = json.loads((folder / "plain" / "adapter_config.json").read_text())
    config |= {"target_modules": ["w1", "w2", "w3"], "rank_pattern": {}, "alpha_pattern": {}, "target_parameters": None}
    hidden, width, tensors = model.config.hidden_size, model.config.intermediate_size, {}
    for layer in range(model.config.num_hidden_layers):
        for expert in range(model.config.num_local_experts):
            for name, (outputs, inputs) in {
                "w1": (width, hidden),
                "w2": (hidden, width),
                "w3": (width, hidden),
            }.items():
                stem = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                tensors[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(4, inputs, generator=noise)
                tensors[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(outputs, 4, generator=noise)
    to = folder / "older-experts"
    to.mkdir()
    (to / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, to / "adapter_model.safetensors")
    adapted = PeftModel.from_pretrained(model, to).eval()
    save_file({"logits": logits_of(adapted).contiguous()}, to / "oracle.logits")


def tied(folder: Path, table: str) -> None:
    """What changes a table changes the head that is tied to it."""
    for option, settings in {
        "tied-embedding": {"target_modules": ["q_proj", table]},
        "tied-saved": {"target_modules": ["q_proj"], "modules_to_save": [table]},
        "tied-tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [PROMPT[3], 99]},
    }.items():
        attempt(
            folder,
            option,
            lambda o=option, s=settings: write(folder, o, s | {"ensure_weight_tying": True}, lambda m: None),
        )


def attempt(folder: Path, option: str, make: Callable[[], None]) -> None:
    try:
        make()
    except Exception as error:  # whatever PEFT raises: the tests know which options it has not
        shutil.rmtree(folder / option, ignore_errors=True)
        (folder / f"{option}.txt").write_text(f"{type(error).__name__}: {error}")


def make(folder: Path, case: str) -> None:
    save_tiny(case, folder / "model")
    model = load(folder / "model")
    for option, settings in options_of(model).items():
        attempt(folder, option, lambda o=option, s=settings: write(folder, o, s, lambda m: None))
    for option, tokens in {"smaller": 100, "larger": 110}.items():
        attempt(
            folder,
            option,
            lambda o=option, t=tokens: write(
                folder, o, {}, lambda m: m.resize_token_embeddings(t, mean_resizing=False)
            ),
        )
    if case in ("llama", "gpt2"):
        in_16_bits(folder)
    if case == "mixtral":
        attempt(folder, "older-experts", lambda: of_older_experts(folder))
    if case == "llama-biased-tied":
        tied(folder, "embed_tokens")


def modules_of(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, nn.Module]]:
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dim() == 2:
            stem = name.removesuffix(".weight")
            layer = nn.Embedding if "embed" in stem else nn.Linear
            made = layer(*(tensor.shape if layer is nn.Embedding else tensor.shape[::-1]))
            made.weight.data = tensor.clone()
            yield stem, made


def make_published(folder: Path, case: str) -> None:
    """Of models that transformers has not: their layers alone, whose weights PEFT merges."""
    published.save_published(case, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    tensors = load_file(folder / "model" / "model.safetensors")
    logits = published.chatglm_logits if config["model_type"] == "chatglm" else published.baichuan_logits
    for option, settings in {
        "plain": {},
        "patterns": {"alpha_pattern": {"mlp.*": 3}},
        "dora": {"use_dora": True},
    }.items():
        root = nn.Module()
        leaves = {}
        for name, module in modules_of(tensors):
            parent = root
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(leaf, module)
            if isinstance(module, nn.Linear) and "layers" in name:
                leaves[leaf] = None
        torch.manual_seed(len(option))
        adapted = get_peft_model(root, LoraConfig(r=4, lora_alpha=6, target_modules=[*leaves], **settings))
        randomise(adapted)
        adapted.save_pretrained(folder / option)
        merged = tensors | adapted.merge_and_unload().state_dict()
        oracle = logits(config, merged, torch.tensor(PROMPT))
        save_file({"logits": oracle.contiguous()}, folder / option / "oracle.logits")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    to, only = Path(sys.argv[1]), sys.argv[2:]
    for one in only or (*CASES, *published.CASES):
        (make_published if one in published.CASES else make)(to / one, one)
