"""Checkpoints that GPTQModel writes: `python make_gptqmodel.py FOLDER` in its environment.

Of each kind FOLDER/KIND is the checkpoint, and FOLDER/KIND.dense.safetensors what the library itself makes of it.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import tiny_model
import torch
from safetensors.torch import save_file


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

KINDS = {
    "gptq-4": {"bits": 4, "group_size": 128, "desc_act": False},
    "gptq-4-act": {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "gptq-8": {"bits": 8, "group_size": -1, "desc_act": False, "act_group_aware": False},
    "gptq-3": {"bits": 3, "group_size": 64, "desc_act": False, "format": "gptq_v2"},
    "mixtral-4": {"bits": 4, "group_size": 128, "desc_act": False},
    "awq-4": {"method": "awq", "format": "gemm", "bits": 4, "group_size": 128},
    "starcoder2-4": {"method": "awq", "format": "gemm", "bits": 4, "group_size": 128},
    "phi3-4": {"bits": 4, "group_size": 64, "desc_act": False},
}  # of a Llama, or of the family before the hyphen


def main(folder: Path) -> None:
    for kind, settings in KINDS.items():
        family = kind.split("-")[0]
        family = family if family in tiny_model.FAMILIES else "llama"
        backend = BACKEND.AWQ_TORCH if settings.get("method") == "awq" else BACKEND.TORCH
        if not (source := folder / "source" / family).exists():
            tiny_model.save(source, family)
        model = GPTQModel.load(str(source), QuantizeConfig(**settings, device="cpu"))
        model.quantize(tiny_model.TEXTS, batch_size=4, backend=backend if backend == BACKEND.AWQ_TORCH else None)
        model.save(str(folder / kind))
        served = GPTQModel.load(str(folder / kind), backend=backend, device="cpu", dtype=torch.float16)
        dense = {}
        for name, module in served.named_modules():
            if isinstance(module, BaseQuantLinear):
                module.scales = module.scales.float()  # so that it dequantises without another rounding
                stem = name[name.rindex("model.layers.") :]
                dense[f"{stem}.weight"] = dequantised(module).t().float().contiguous()
        save_file(dense, folder / f"{kind}.dense.safetensors")


def dequantised(module: BaseQuantLinear) -> torch.Tensor:
    """[inputs, outputs]."""
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight()
    return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
