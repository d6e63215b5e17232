"""Adapters that PEFT writes, with random numbers, and what its models compute: `python make_peft.py FOLDER [CASE …]`.

FOLDER/CASE/model is the checkpoint, FOLDER/CASE/OPTION the adapter, with logits of PROMPT in it, or OPTION.txt says why
there is none. FOLDER/CASE/OPTION.merged is the model with the adapter merged into it.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.formats.peft_cases import CASES, GENERATED, PROMPT
from tests.server import published
from tests.server.tiny import save_tiny

WITH_MORE_NORMS = ("qwen3_next", "granitemoehybrid", "falcon_h1", "nemotron_h", "deepseek_v3")  # than are served
EXPERTS = ("experts.gate_up_proj", "experts.down_proj", "experts.up_proj")
OF_MAMBA = ["conv1d", "out_proj"]  # modules which PEFT refuses, as their weights are read past them
NOT_MERGED = ("rank-stabilised", "layers", "exclude", "expression", "lora-bias")  # as others, or not by PEFT
Options = dict[str, dict[str, Any]]


def load(folder: Path) -> PreTrainedModel:
    auto = AutoModelForSeq2SeqLM if AutoConfig.from_pretrained(folder).is_encoder_decoder else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("RMSNorm", "T5LayerNorm"))


def leaves_of(model: nn.Module) -> dict[str, str]:
    """The last parts of the names of its linear layers but its head, each with the whole name of the first one."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if (
            isinstance(module, nn.Linear | Conv1D)
            and module is not model.get_output_embeddings()
            and leaf not in OF_MAMBA
        ):
            found.setdefault(leaf, name)
    return found


def options_of(model: nn.Module) -> Options:
    """How an adapter of this model may be configured."""
    named = {id(module): name for name, module in model.named_modules()}
    table, head = (named[id(found)] for found in (model.get_input_embeddings(), model.get_output_embeddings()))
    leaves = leaves_of(model)
    first, second, *_ = leaves
    has_experts = any(name.endswith(EXPERTS) for name, _ in model.named_parameters())
    layer = next(int(part) for part in leaves[first].split(".") if part.isdigit())
    norms = [name for name, m in model.named_modules() if is_norm(m)]
    some = [first, second]
    most = some if has_experts else [*leaves]  # of mixtures, PEFT takes `gate_proj` and its kin for the experts'
    whole = [
        head,
        ".".join(leaves[second].split(".")[-2:]),
        norms[-1] if model.config.model_type in WITH_MORE_NORMS else norms[-1].rpartition(".")[2],
    ]
    options: Options = {
        "plain": {},
        "patterns": {
            # In the order of the letters, in which PEFT saves them.
            "rank_pattern": {r".*\.2\..*": 3, rf"^.*\.1\..*{second}": 2, first: 8},
            "alpha_pattern": {r".*\.0\..*": 11, second: 3},
        },
        "rank-stabilised": {"use_rslora": True, "rank_pattern": {first: 16}},
        "dora": {"target_modules": most, "use_dora": True},
        "lora-bias": {"target_modules": most, "lora_bias": True},
        "saved": {"target_modules": [first], "modules_to_save": whole},
        "saved-table": {"target_modules": [first], "modules_to_save": [table]},
        "embedding": {"target_modules": [*some, table, head]},
        "embedding-dora": {"target_modules": [*some, table, head], "use_dora": True, "use_rslora": True},
        "tokens": {"target_modules": some, "trainable_token_indices": [PROMPT[3], 99, PROMPT[0]]},
        "layers": {"target_modules": some, "layers_to_transform": [layer]},
        "exclude": {"exclude_modules": [*OF_MAMBA, first]},
        "expression": {"target_modules": rf".*\.\d\..*({first}|{second})"},
    }
    if any(name.endswith(".bias") for name, _ in model.named_parameters()):
        options |= {"bias-all": {"bias": "all"}, "bias-lora": {"bias": "lora_only", "target_modules": some}}
    return options | options_of_experts(model, some)


def options_of_experts(model: nn.Module, some: list[str]) -> Options:
    """Of mixtures whose experts' matrices are in parameters of all."""
    experts = {".".join(name.split(".")[-2:]) for name, _ in model.named_parameters() if name.endswith(EXPERTS)}
    if not experts:
        return {}
    routers = {name.rpartition(".")[2] + ".weight" for name, m in model.named_modules() if "Router" in type(m).__name__}
    return {
        "experts": {"target_modules": some, "target_parameters": sorted(experts)},
        "experts-down": {"target_modules": [], "target_parameters": [name for name in experts if "down" in name]},
        "experts-patterns": {
            "target_modules": [],
            "target_parameters": sorted(experts | routers),
            "rank_pattern": {r".*down_proj": 2},
            "alpha_pattern": {"gate_up_proj": 9},
        },
    }


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


def write(folder: Path, option: str, settings: dict[str, Any], num_tokens: int | None = None) -> None:
    """One adapter of the model in `folder`/model, whose vocabulary is made smaller or larger before."""
    model = load(folder / "model")
    if num_tokens is not None:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    kind = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    usual: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
    if settings.get("target_modules") is None and model.config.model_type in ("falcon_h1", "nemotron_h"):
        usual["exclude_modules"] = OF_MAMBA
    config = LoraConfig(task_type=kind, **(usual | settings))
    torch.manual_seed(len(option))
    adapted = get_peft_model(model, config).eval()
    randomise(adapted)
    adapted.save_pretrained(folder / option)
    save_file({"logits": logits_of(adapted).contiguous()}, folder / option / "oracle.logits")
    if option not in NOT_MERGED:
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
            for name in ("w1", "w2", "w3"):
                outputs, inputs = (hidden, width) if name == "w2" else (width, hidden)
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
        settings["ensure_weight_tying"] = True
        attempt(folder, option, partial(write, folder, option, settings))


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
        attempt(folder, option, partial(write, folder, option, settings))
    for option, tokens in {"smaller": 100, "larger": 110}.items():
        attempt(folder, option, partial(write, folder, option, {}, tokens))
    if case in ("llama", "gpt2"):
        in_16_bits(folder)
    if case == "mixtral":
        attempt(folder, "older-experts", partial(of_older_experts, folder))
    if case == "llama-biased-tied":
        tied(folder, "embed_tokens")


def modules_of(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, nn.Module]]:
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dim() == 2:
            stem = name.removesuffix(".weight")
            sizes, is_table = tensor.shape, "embed" in stem
            made = nn.Embedding(*sizes) if is_table else nn.Linear(*sizes[::-1], bias=False)
            made.weight.data = tensor.clone()
            if f"{stem}.bias" in tensors:
                made.bias = nn.Parameter(tensors[f"{stem}.bias"].clone())
            yield stem, made


def make_published(folder: Path, case: str) -> None:
    """Of models that transformers has not: their layers alone, whose weights PEFT merges."""
    (folder / "model").mkdir(parents=True)
    published.save_published(case, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    tensors = load_file(folder / "model" / "model.safetensors")
    logits = published.chatglm_logits if config["model_type"] == "chatglm" else published.baichuan_logits
    options = {"plain": {}, "patterns": {"alpha_pattern": {"mlp.*": 3}}, "dora": {"use_dora": True}}
    for option, settings in options.items():
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
