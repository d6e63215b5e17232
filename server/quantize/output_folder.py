"""The folder of a quantised model: its tensors and config as other readers expect them; complete, or not there.

Everything goes into a hidden folder beside it, `.DIR.lockstep-partial`, and config.json goes there last; when all of it
is on the disk, the folder is renamed. A run that was killed leaves the hidden one, and the next run empties it. A file
in it says that a run made it, and is what a run locks; a folder of that name without this file is not touched.

compressed-tensors (pack-quantized, int-quantized) is what vLLM and transformers read; its readers unpack 4 and 8 bits,
so 2 and 3 bits are written as GPTQ's own format, in its second version: the first stores the code of 0 less one, which
overflows where that code is 0. The readers of both are in `server/checkpoint/formats/`, and say what each tensor is.

Shapes: F output features, D input features, G groups of inputs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from server.checkpoint.files import need_space, sync
from server.quantisation.packing import pack
from server.quantisation.stored import QuantisedWeight
from server.quantize.recipe import Recipe, output_problem

MARKER = ".lockstep-quantize"  # in the folder that is not whole yet
SHARD_BYTES = 1 << 30  # of a file of weights: what is held until it is written
GPTQ_SCALES = torch.float16  # of every checkpoint of this format


class OutputFolder:
    """Takes tensors one after the other, and files that are copied."""

    def __init__(self, partial: Path) -> None:
        self._partial = partial
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files: list[dict[str, int]] = []  # of each file that is written: its tensors, and their bytes

    def refuse_full(self, needed: int) -> None:
        """Raise ValueError if the disk has fewer bytes free."""
        need_space(self._partial.parent, needed, "for what is made: make room, or give another --output")

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors on the host, which are not changed afterwards."""
        for name, tensor in tensors.items():
            if self._held and self._held_bytes + tensor.nbytes > SHARD_BYTES:
                self._write()
            self._held[name] = tensor
            self._held_bytes += tensor.nbytes

    def _write(self) -> None:
        self._files.append({name: tensor.nbytes for name, tensor in self._held.items()})
        save_file(self._held, self._partial / f"{len(self._files)}.safetensors", metadata={"format": "pt"})
        self._held, self._held_bytes = {}, 0

    def complete(self, config: Mapping[str, Any], files: Mapping[str, Path | str]) -> int:
        """Write what is held, the index, `files` (paths to copy, or texts) and config.json. Returns their bytes."""
        if self._held:
            self._write()
        count = len(self._files)
        names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        for number, name in enumerate([*names] if count > 1 else ["model.safetensors"], 1):
            (self._partial / f"{number}.safetensors").rename(self._partial / name)
        total = sum(sum(file.values()) for file in self._files)
        if count > 1:
            weight_map = {tensor: name for name, file in zip(names, self._files, strict=True) for tensor in file}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            self._write_json("model.safetensors.index.json", index)
        for name, source in files.items():
            if isinstance(source, Path):
                shutil.copyfile(source, self._partial / name)
            else:
                (self._partial / name).write_text(source, encoding="utf-8")
        self._write_json("config.json", config)
        return total

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        (self._partial / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def output_folder(target: Path) -> Iterator[OutputFolder]:
    """What becomes `target` unless an exception is raised. Raises ValueError for a folder that cannot be made."""
    if problem := output_problem(target):
        raise ValueError(problem)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(target)
    with _claimed(partial, target):
        if problem := output_problem(target):  # a run that held the lock before may have made it
            raise ValueError(problem)
        yield OutputFolder(partial)
        sync(partial)
        partial.rename(target)
        (target / MARKER).unlink()


def partial_of(target: Path) -> Path:
    """Where `target` is while it is made."""
    return target.with_name(f".{target.name}.lockstep-partial")


@contextmanager
def _claimed(partial: Path, target: Path) -> Iterator[None]:
    """`partial` with nothing but the marker in it, which stays locked; then it is removed. Raises ValueError if it is
    not ours."""
    marker = partial / MARKER
    foreign = ValueError(f"{partial}, where --output {target} would be made, is not of this command: remove it")
    is_ours = not partial.exists()  # from here on: a signal may come between any two lines
    descriptor = -1
    try:
        try:
            partial.mkdir()
        except FileExistsError:
            is_ours = False
            if partial.is_symlink() or not partial.is_dir():
                raise foreign from None
            if marker.is_symlink() or (any(partial.iterdir()) and not marker.is_file()):
                raise foreign from None
        descriptor = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(descriptor), marker.lstat())
        except (BlockingIOError, FileNotFoundError):  # the run that held it has just renamed or removed it
            is_ours = False
        if not is_ours:
            raise ValueError(f"--output {target} is being made by another run: give another folder")
        for path in partial.iterdir():
            if path != marker:
                path.unlink()  # a run makes nothing but files
        yield
    finally:
        if is_ours:
            shutil.rmtree(partial, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def tensors_of(name: str, weight: QuantisedWeight, recipe: Recipe, scales: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer called `name`, on the host. scales: their dtype."""
    found = LAYOUTS[recipe.layout](weight, recipe, scales)
    host = torch.get_default_device()
    return {f"{name}.{suffix}": tensor.to(host).contiguous() for suffix, tensor in found.items()}


def config_of(recipe: Recipe, ignore: Sequence[str]) -> dict[str, Any]:
    """`quantization_config`."""
    if recipe.layout == "gptq":
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq_v2",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "sym": recipe.symmetric,
            "desc_act": False,
            "lm_head": False,
            "pack_dtype": "int32",
        }
    weights: dict[str, Any] = {"num_bits": recipe.bits, "type": "int", "dynamic": False}
    if is_int8 := recipe.layout == "int-quantized":
        weights |= {"symmetric": True, "strategy": "channel"}
    else:
        has_groups = recipe.group_size > 0
        shared = {"strategy": "group", "group_size": recipe.group_size} if has_groups else {"strategy": "channel"}
        weights |= {"symmetric": recipe.symmetric, "group_size": None, **shared}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": recipe.layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs if is_int8 else None,
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def scale_dtype(recipe: Recipe, stored: torch.dtype) -> torch.dtype:
    """What scales are stored in, for a model whose dense tensors are `stored`."""
    if recipe.layout == "gptq":
        return GPTQ_SCALES
    return torch.float32 if recipe.layout == "int-quantized" else stored


def _packed(weight: QuantisedWeight, recipe: Recipe, scales: torch.dtype) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": pack(weight.codes, recipe.bits, dim=1),
        "weight_scale": weight.scale.to(scales),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not recipe.symmetric:
        assert weight.zero is not None
        tensors["weight_zero_point"] = pack(weight.zero, recipe.bits, dim=0)
    return tensors


def _int8(weight: QuantisedWeight, recipe: Recipe, scales: torch.dtype) -> dict[str, Tensor]:
    return {"weight": weight.codes, "weight_scale": weight.scale.to(scales)}


def _gptq(weight: QuantisedWeight, recipe: Recipe, scales: torch.dtype) -> dict[str, Tensor]:
    assert weight.zero is not None
    return {
        "qweight": pack(weight.codes.t(), recipe.bits, dim=0),
        "qzeros": pack(weight.zero.t(), recipe.bits, dim=1),
        "scales": weight.scale.t().to(scales),
        "g_idx": weight.groups.to(torch.int32),
    }


LAYOUTS: Mapping[str, Callable[[QuantisedWeight, Recipe, torch.dtype], dict[str, Tensor]]] = {
    "pack-quantized": _packed,
    "int-quantized": _int8,
    "gptq": _gptq,
}
