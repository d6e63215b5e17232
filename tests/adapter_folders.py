"""Folders that are adapters by their files, for tests in which nothing computes with one."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def weights(content: str = "a", num_bytes: int = 64) -> bytes:
    """A safetensors file of one tensor, whose bytes begin with `content`."""
    data = content.encode().ljust(num_bytes, b"\0")
    header = json.dumps({"lora_A": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def adapter_folder(path: Path, content: str = "a", **config: object) -> Path:
    """Make the folder, or write other content into it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **config}))
    (path / "adapter_model.safetensors").write_bytes(weights(content))
    return path
