"""Checkpoints that GPTQModel writes: `python make_gptqmodel.py FOLDER` in its environment."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import tiny_model
import torch
from safetensors.torch import load_file


def without_torchvision() -> None:
    """GPTQModel imports it for models that see, and does not ask pip for it; not every torch has a build that fits."""
    vision, transforms = ModuleType("torchvision"), ModuleType("torchvision.transforms")
    modes = ModuleType("torchvision.transforms.functional")
    for module in (vision, transforms, modes):
        module.__spec__, module.__version__ = ModuleSpec(module.__name__, None), "0"
        module.__getattr__ = lambda name: object  # whatever is imported of it
        sys.modules[module.__name__] = module
    vision.transforms, transforms.functional = transforms, modes


os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # on two cores it starts one, and then asks itself for two
without_torchvision()

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # noqa: E402
from gptqmodel.nn_modules.qlinear import BaseQuantLinear  # noqa: E402
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm  # noqa: E402

FOUR = {"bits": 4, "group_size": 128, "desc_act": False}
SCHEMES = {
    "gptq-4": FOUR,
    "gptq-4-act": FOUR | {"group_size": 32, "desc_act": True, "sym": False},
    "gptq-8": FOUR | {"bits": 8, "group_size": -1, "act_group_aware": False},
    "gptq-3": FOUR | {"bits": 3, "group_size": 64, "format": "gptq_v2"},
    "awq-4": {"method": "awq", "format": "gemm", "bits": 4, "group_size": 128},
}


def quantise(source: Path, to: Path, settings: dict) -> dict[str, torch.Tensor]:
    backend = BACKEND.AWQ_TORCH if settings.get("method") == "awq" else BACKEND.TORCH
    model = GPTQModel.load(str(source), QuantizeConfig(**settings, device="cpu", offload_to_disk=False))
    rows = [{"input_ids": tokens, "attention_mask": [1] * len(tokens)} for tokens in tiny_model.TOKENS]
    model.quantize(rows, batch_size=4, backend=backend if backend == BACKEND.AWQ_TORCH else None)
    model.save(str(to))
    served = GPTQModel.load(str(to), backend=backend, device="cpu", dtype=torch.float16)
    modules = {name: module for name, module in served.named_modules() if isinstance(module, BaseQuantLinear)}
    stored = [name for name, _ in tiny_model.layers_of(load_file(to / "model.safetensors"), "qweight")]
    assert len(stored) == len(modules)
    return {name: dequantised(modules, name.removesuffix(".weight")).t() for name in stored}


def dequantised(modules: dict[str, BaseQuantLinear], name: str) -> torch.Tensor:
    """[inputs, outputs] of the layer, before whose name the library has some of its own."""
    (module,) = (module for its_name, module in modules.items() if f".{its_name}".endswith(f".{name}"))
    module.scales = module.scales.float()  # so that it dequantises without another rounding
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight()
    return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)


if __name__ == "__main__":
    tiny_model.make(quantise, SCHEMES, FOUR | {"group_size": 32})
