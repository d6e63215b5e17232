"""Compares `lockstep quantize` with llm-compressor and gptqmodel: the same model, the same samples, in one run.

    python -m tests.server.quantising.peers --llmcompressor PYTHON --gptqmodel PYTHON --bits 2

PYTHON is the interpreter of an environment that has the library (docs/results/quantised.md says how to make
one). All results are then measured by one piece of code: the perplexity of held-out text of the embedded model, in its
own sequences of documents, and the square error of each matrix's outputs on the inputs that it has in the dense model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from server.arch import families
from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.checkpoint import quantisation
from server.checkpoint.weights import Checkpoint, Weights
from server.layers.embedding import load_embedding, load_head
from server.model.load import StackLoader
from server.quant.stored import QuantisedWeight
from server.quantising.calibration import Inputs, Streams, Texts, watched
from server.quantising.command import run
from server.quantising.plan import matrix_sets_of
from server.quantising.recipe import Job, Recipe
from server.ranks.distributed import Shard
from tests.running import ROOT

DEMO = ROOT / "server" / "demo"
CALIBRATION_SEED, HELD_OUT_SEED = 4242, 1000010  # the second is that of EVALUATION.json

LLM_COMPRESSOR = """
import json, os, sys, torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
task = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
samples = json.load(open(task["samples"]))
data = Dataset.from_dict({"input_ids": samples, "attention_mask": [[1] * len(ids) for ids in samples]})
weights = {"num_bits": task["bits"], "type": "int", "symmetric": task["symmetric"], "strategy": "group",
           "group_size": task["group_size"]}
groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
if task["rounding"]:
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
else:
    recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"], dampening_frac=0.01)
oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=len(samples[0]), num_calibration_samples=len(samples))
if task["rounding"]:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and hasattr(module, "weight_scale"):
            zero = getattr(module, "weight_zero_point", None)
            module.weight.data = fake_quantize(module.weight.data, module.weight_scale, zero, scheme.weights)
kept = {n: t.detach().float().contiguous() for n, t in model.state_dict().items()
        if n != "lm_head.weight" and not n.endswith(("_scale", "_zero_point", "_g_idx"))}
os.makedirs(task["output"])
save_file(kept, task["output"] + "/model.safetensors")
"""

# A module of models of images is imported by all; it wants torchvision, which nothing here does.
GPTQ_MODEL = """
import json, sys, types
from transformers import AutoModelForCausalLM, BloomForCausalLM, PreTrainedModel
from transformers.utils import is_torchvision_available
is_torchvision_available()
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]
sys.modules["torchvision.transforms.functional"].InterpolationMode = type("I", (), {"BICUBIC": "bicubic"})
from gptqmodel import GPTQModel, QuantizeConfig
task = json.loads(sys.argv[1])
config = QuantizeConfig(bits=task["bits"], group_size=task["group_size"], sym=task["symmetric"], desc_act=False,
                        damp_percent=0.01)
model = GPTQModel.load(task["model"], config, device="cpu")
samples = json.load(open(task["samples"]))
model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples], batch_size=1)
model.save(task["output"])
"""


@dataclass(frozen=True)
class Result:
    """Of one checkpoint. errors: of each matrix, as a share of its outputs."""

    perplexity: float
    errors: list[float]


def samples(seed: int, documents: int, count: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Of the embedded model's documents, one behind the other."""
    from tests.embedded_model import corpus, train

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = [id for text in corpus.take(seed, documents) for id in (*tokenizer.encode(text.text).ids, train.EOS_ID)]
    return tuple(tuple(ids[at : at + length]) for at in range(0, len(ids) - length + 1, length))[:count]


def opened(folder: Path) -> tuple[Weights, StackLoader]:
    """A checkpoint of the embedded model's shape."""
    own = folder / "config.json"
    hf_config = json.loads((own if own.exists() else DEMO / "config.json").read_text())
    family, spec = families.find(hf_config)
    format = quantisation.choose(None, folder, hf_config).format
    weights = Weights.open(Checkpoint(folder), family.names, Shard(), torch.float32, torch.device("cpu"), format)
    return weights, StackLoader(weights, spec, ReferenceBackend(CpuDevice()))


@torch.inference_mode()
def measure(folders: Mapping[str, Path], texts: Texts) -> dict[str, Result]:
    """All of them on the same texts."""
    dense_weights, dense = opened(DEMO)
    others = {name: opened(folder) for name, folder in folders.items()}
    loaders = {"dense": dense, **{name: loader for name, (_, loader) in others.items()}}
    shape = (dense.spec.num_kv_heads, dense.spec.head_dim)
    streams = {
        name: Streams(texts, loader.frame(load_embedding(loader.weights, loader.spec)), shape, CpuDevice())
        for name, loader in loaders.items()
    }
    errors: dict[str, list[float]] = {name: [] for name in loaders}
    for index in range(dense.spec.num_layers):
        layer = dense.layer(index, dense.attention())
        for matrices in matrix_sets_of(dense_weights, dense.spec, index):
            inputs = Inputs.of(
                dense_weights.checkpoint.shape_of(f"{next(iter(matrices.names.values()))}.weight")[1],
                torch.device("cpu"),
            )
            streams["dense"].show(watched(layer, matrices.place, lambda _, x, inputs=inputs: inputs.add(x)))
            for role, name in matrices.names.items():
                size = dense_weights.checkpoint.shape_of(f"{name}.weight")
                exact = _dense(dense_weights, index, role, size)
                for peer, (weights, _) in others.items():
                    error = _dense(weights, index, role, size) - exact
                    errors[peer].append(_square(error, inputs) / _square(exact, inputs))
        for name, loader in loaders.items():
            streams[name].through(loader.layer(index, loader.attention()))
    found = {}
    for name, loader in loaders.items():
        embedding = load_embedding(loader.weights, loader.spec)
        head = load_head(loader.weights, loader.spec, embedding, loader.backend.linear)
        found[name] = Result(streams[name].perplexity(loader.frame(embedding), head), errors[name])
    return found


def _dense(weights: Weights, index: int, role: str, size: tuple[int, ...]) -> Tensor:
    stored = weights.of_layer(index).linear(role, (size[0], size[1]))
    return stored.dequantised() if isinstance(stored, QuantisedWeight) else stored


def _square(error: Tensor, inputs: Inputs) -> float:
    return float(((error @ inputs.products) * error).sum())


def main() -> None:
    """Quantise with each, measure all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llmcompressor", metavar="PYTHON")
    parser.add_argument("--gptqmodel", metavar="PYTHON")
    parser.add_argument("--methods", default="gptq,awq", help="of ours")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sample-tokens", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=48, help="samples")
    given = parser.parse_args()
    torch.set_num_threads(1)  # of two cores; what is compared is not time
    calibration = samples(CALIBRATION_SEED, 1000, given.num_samples, given.sample_tokens)
    held_out = samples(HELD_OUT_SEED, 400, given.held_out, given.sample_tokens)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "samples.json").write_text(json.dumps(calibration))
        folders = {}
        for method in given.methods.split(","):
            recipe = Recipe(method, given.bits, given.group_size, given.symmetric)
            job = Job(recipe, str(DEMO), str(DEMO), str(folder / method), (), calibration, held_out[:1], "cpu")
            began = time.monotonic()
            run(job, CpuDevice(), lambda _: None)
            print(f"lockstep {method}: {time.monotonic() - began:.0f} s", flush=True)
            folders[f"lockstep {method}"] = folder / method
        task: dict[str, Any] = {
            "model": str(DEMO), "samples": str(folder / "samples.json"), "bits": given.bits,
            "group_size": given.group_size, "symmetric": given.symmetric,
        }  # fmt: skip
        # gptqmodel asks for two workers on two cores, and gets one if that is not said.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GPTQMODEL_CPU_WORKERS": "2"}
        peers = [
            ("llm-compressor rounding", given.llmcompressor, LLM_COMPRESSOR, True),
            ("llm-compressor gptq", given.llmcompressor, LLM_COMPRESSOR, False),
            ("gptqmodel gptq", given.gptqmodel, GPTQ_MODEL, False),
        ]
        for number, (name, python, script, rounding) in enumerate(peers):
            if python is not None:
                output = folder / f"peer-{number}"
                began = time.monotonic()
                argument = json.dumps({**task, "rounding": rounding, "output": str(output)})
                subprocess.run(
                    [python, "-c", script, argument], cwd=folder, env=environment, check=True, capture_output=True
                )
                print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
                folders[name] = output
        report(measure(folders, Texts.of(held_out)))


def report(found: Mapping[str, Result]) -> None:
    """A table."""
    dense = found["dense"].perplexity
    print(f"| {'':24} | perplexity | against dense | mean square output error | largest |\n|---|--:|--:|--:|--:|")
    for name, result in found.items():
        errors = result.errors or [0.0]
        print(
            f"| {name:24} | {result.perplexity:.4f} | {result.perplexity / dense - 1:+.2%} | {mean(errors):.2%} "
            f"| {max(errors):.2%} |"
        )


if __name__ == "__main__":
    main()
