"""Compares `lockstep quantize` with llm-compressor and gptqmodel: the same model, the same samples, in one run.

    python -m tests.server.quantize.peers --llmcompressor PYTHON --gptqmodel PYTHON --bits 2

PYTHON is the interpreter of an environment that has the library (docs/results/quantised.md says how to make
one). All results are then measured by one piece of code: the perplexity of held-out text of the embedded model, in its
own sequences of documents.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from server.backends.cpu.device import CpuDevice
from server.quantize.command import run
from server.quantize.recipe import Job, Recipe
from tests.running import ROOT
from tests.server.quantize.making import Served

DEMO = ROOT / "server" / "demo"
CALIBRATION_SEED, HELD_OUT_SEED = 4242, 1000010  # the second is that of EVALUATION.json

LLM_COMPRESSOR = """
import json, os, sys, torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
task = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
samples = json.load(open(task["samples"]))
data = Dataset.from_dict({"input_ids": samples, "attention_mask": [[1] * len(ids) for ids in samples]})
weights = {"num_bits": task["bits"], "type": "int", "symmetric": task["symmetric"], "strategy": "group",
           "group_size": task["group_size"]}
groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"], dampening_frac=0.01)
oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=len(samples[0]), num_calibration_samples=len(samples))
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


def samples(seed: int, documents: int, count: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Of the embedded model's documents, one behind the other."""
    from tests.embedded_model import corpus, train

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = [id for text in corpus.take(seed, documents) for id in (*tokenizer.encode(text.text).ids, train.EOS_ID)]
    return tuple(tuple(ids[at : at + length]) for at in range(0, len(ids) - length + 1, length))[:count]


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
            ("llm-compressor", given.llmcompressor, LLM_COMPRESSOR),
            ("gptqmodel", given.gptqmodel, GPTQ_MODEL),
        ]
        for number, (name, python, script) in enumerate(peers):
            if python is not None:
                output = folder / f"peer-{number}"
                began = time.monotonic()
                argument = json.dumps({**task, "output": str(output)})
                subprocess.run(
                    [python, "-c", script, argument], cwd=folder, env=environment, check=True, capture_output=True
                )
                print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
                if not (output / "config.json").exists():  # the weights that its codes stand for
                    shutil.copy(DEMO / "config.json", output)
                folders[name] = output
        report({name: Served(path).perplexity(held_out) for name, path in {"dense": DEMO, **folders}.items()})


def report(found: Mapping[str, float]) -> None:
    """A table."""
    print("| | Perplexity | Against dense |\n|---|--:|--:|")
    for name, perplexity in found.items():
        print(f"| {name} | {perplexity:.4f} | {perplexity / found['dense'] - 1:+.2%} |")


if __name__ == "__main__":
    main()
