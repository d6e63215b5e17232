"""What lies beside a model's config and says how its weights are quantised, in checkpoints of some age.

Read once for servers and for plans, so without torch. Left out: what it means (`server/quant/sizes.py`, `formats/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from server.checkpoint.files import HubError, read_json, weight_files
from server.quant.configs import FormatError
from server.quant.sizes import config_of

# Of GPTQ and AWQ, of AutoAWQ 0.1 and llm-awq, and of ModelOpt.
FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
# What `text-generation-server quantize` wrote among the weights, and the settings that they stand for.
WHOLE = ("I8", "U8", "I16", "I32", "I64")  # dtypes of safetensors
NUMBERS = {"gptq_bits": "bits", "gptq_groupsize": "group_size"}


def with_file(folder: Path, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with what lies beside it says of quantised weights, where it says nothing itself."""
    if config_of(hf_config) or not (found := _file(folder) or _numbers(folder)):
        return hf_config
    return {**hf_config, "quantization_config": found}


def _file(folder: Path) -> dict[str, Any]:
    path = next((folder / name for name in FILES if (folder / name).exists()), None)
    try:
        return {} if path is None else read_json(path, "how weights are quantised")
    except (OSError, HubError) as error:
        raise FormatError(f"{path} cannot be read: {error}; download it again") from None


def _numbers(folder: Path) -> dict[str, Any]:
    """The settings of a checkpoint that TGI quantised, which lie among its tensors."""
    found: dict[str, Any] = {}
    try:
        for path in weight_files(folder):
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np") as file:
                    for name in NUMBERS.keys() & set(file.keys()):
                        found[NUMBERS[name]] = _number(file, name, path)
    except (HubError, SafetensorError, OSError):
        return {}  # the reader of the weights says what is wrong with them
    return {"quant_method": "gptq", **found} if "bits" in found else {}


def _number(file: Any, name: str, path: Path) -> int:
    """The one whole number of a tensor, of which nothing is read that is anything else. Raises FormatError."""
    view = file.get_slice(name)
    shape, dtype = view.get_shape(), view.get_dtype()
    if shape not in ([], [1]) or dtype not in WHOLE:
        raise FormatError(
            f"tensor {name} in {path} must be one whole number. Given: shape {shape}, {dtype}; download it again"
        )
    return int(file.get_tensor(name).reshape(-1)[0])
