"""What lies beside a model's config and says how its weights are quantised, in checkpoints of some age.

Read once for servers and for plans, so without torch. Left out: what it means (`server/quant/sizes.py`, `formats/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.checkpoint.files import HubError, read_json
from server.quant.configs import FormatError
from server.quant.sizes import config_of


def with_file(folder: Path, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with what a file beside it says of quantised weights, where it says nothing itself."""
    if config_of(hf_config) or not (found := _file(folder)):
        return hf_config
    return {**hf_config, "quantization_config": found}


def _file(folder: Path) -> dict[str, Any]:
    """quantize_config.json, which older checkpoints of GPTQ and AWQ have."""
    path = folder / "quantize_config.json"
    try:
        return read_json(path, "how weights are quantised") if path.exists() else {}
    except (OSError, HubError) as error:
        raise FormatError(f"{path} cannot be read: {error}; download it again") from None
