"""What the files of a model's folder must be before anything opens them, and what in them says of quantised weights.

Everything that was downloaded or given is untrusted: names in an index must be plain names of regular files that lie in
the folder, JSON has a largest size, and every safetensors file must fit its own header. Contents are not hashed: a
flipped bit passes. Checkpoints of some age say beside config.json, or among their tensors, how weights are quantised;
it is read once for servers and for plans, so without torch. Nothing is downloaded (`hub.py`) or converted
(`convert.py`) here, and what a config means is left to `server/quantisation/`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from server.quantisation.configs import FormatError
from server.quantisation.sizes import config_of

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]*")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # the first that is there is read
OTHER_FORMATS = {".gguf": "GGUF is not served", ".pt": "*.pt is not read"}  # of weights
MAX_JSON_BYTES = 50_000_000  # an index of a hundred thousand tensors has a tenth of it
# Of GPTQ and AWQ, of AutoAWQ 0.1 and llm-awq, and of ModelOpt.
QUANTISATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
# What `text-generation-server quantize` wrote among the weights, and the settings that they stand for.
WHOLE = ("I8", "U8", "I16", "I32", "I64")  # dtypes of safetensors
NUMBERS = {"gptq_bits": "bits", "gptq_groupsize": "group_size"}


class HubError(ValueError):
    """Why a model cannot be served, in one sentence with its remedy."""


def weight_files(folder: Path) -> list[Path]:
    """The checked paths of the files that hold the weights of a folder. Raises HubError."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    chosen = choose_weights(names)
    if not chosen:
        others = (name for name in sorted(names) if Path(name).suffix in OTHER_FORMATS)
        only = next((f", but {name}, and {OTHER_FORMATS[Path(name).suffix]}" for name in others), "")
        raise HubError(f"{folder} has no weights{only}: *.safetensors or *.bin must lie in it")
    if chosen[0].endswith(".index.json"):
        chosen = indexed_names(folder / chosen[0])
    return [checked_file(folder, name) for name in chosen]


def adapter_files(folder: Path) -> list[Path]:
    """The same of an adapter in PEFT's format. Raises HubError."""
    if not (chosen := choose_adapter_weights(path.name for path in folder.iterdir())):
        raise HubError(f"{folder} has no weights: {' or '.join(ADAPTER_WEIGHTS)} must lie in it")
    return [checked_file(folder, name) for name in chosen]


def choose_weights(names: Iterable[str]) -> list[str]:
    """The names of a model's files that are to be read for its weights; none where it has no weights.

    That is the index alone if there is one, else the one file that holds everything, else all files with weights.
    Files of the safetensors format are preferred to *.bin.
    """
    present = sorted(names)
    for suffix, whole in ((".safetensors", "model.safetensors"), (".bin", "pytorch_model.bin")):
        files = [name for name in present if name.endswith(suffix) and name != "training_args.bin"]
        indexes = [name for name in present if name.endswith(f"{suffix}.index.json")]
        if files or indexes:
            return indexes[:1] or ([whole] if whole in files else files)
    return []


def choose_adapter_weights(names: Iterable[str]) -> list[str]:
    """The same of an adapter in PEFT's format, which has one file."""
    present = set(names)
    return [name for name in ADAPTER_WEIGHTS if name in present][:1]


def indexed_names(index: Path) -> list[str]:
    """The names of the files that an index lists, sorted. Raises HubError.

    The names are untrusted, so only plain names of weight files are let through.
    """
    weight_map = read_json(index, "the list of weight files").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HubError(f"{index} has no weight_map: fetch the file again")
    names = {name if isinstance(name, str) else repr(name) for name in weight_map.values()}
    for name in sorted(names):
        if not PLAIN_NAME.fullmatch(name) or Path(name).suffix not in (".safetensors", ".bin"):
            raise HubError(f"{index} names {name!r}, which is not a plain file name: do not use this model")
    return sorted(names)


def checked_file(folder: Path, name: str) -> Path:
    """The path `folder/name`. Raises HubError if no regular file lies there, or in the hub cache around `folder`."""
    path = folder / name
    try:
        home, real = folder.resolve(), path.resolve()
    except RuntimeError:  # of Python before 3.13, for a link that leads to itself
        raise HubError(f"{path} is a link that leads to itself: fetch the model again") from None
    if home.parent.name == "snapshots":  # the hub cache links snapshots/COMMIT/name to blobs/HASH
        home = home.parent.parent
    if not real.exists():
        raise HubError(f"{path} is missing: fetch the model again")
    if not real.is_relative_to(home) or not stat.S_ISREG(real.stat().st_mode):
        raise HubError(f"{path} is not a regular file inside its folder: copy it there")
    return path


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """The JSON object in a file. Raises HubError, which says that a missing file is `purpose`."""
    if not path.exists():
        raise HubError(f"{path} is missing ({purpose}): is this the right folder?")
    refuse_placeholder(checked_file(path.parent, path.name))
    if path.stat().st_size > MAX_JSON_BYTES:
        raise HubError(f"{path} is larger than {MAX_JSON_BYTES} bytes: it cannot be what its name says")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise HubError(f"{path} is not JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise HubError(f"{path} holds no JSON object: fetch it again")
    return value


def refuse_placeholder(path: Path) -> None:
    """Raise HubError for what downloads by hand leave in place of a file: nothing, a git-LFS pointer, a web page."""
    with path.open("rb") as file:
        start = file.read(256)
    if not start:
        raise HubError(f"{path} is empty: fetch it again")
    if start.startswith(b"version https://git-lfs"):
        raise HubError(f"{path} is a git-LFS pointer, not the file itself: run `git lfs pull` in its folder")
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        raise HubError(f"{path} is a web page, not the file itself: download it again")


def check_safetensors(path: Path) -> None:
    """Raise HubError unless the file and its header agree, so that a cut download is named before anything loads.

    The safetensors library does the check when it opens a file, and reads nothing but the header. It imports numpy to
    do so, which takes a launcher 0.08 s.
    """
    refuse_placeholder(path)
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise HubError(f"{path} is damaged or incomplete ({error}): delete it and fetch it again") from None


def need_space(folder: Path, needed: int, purpose_and_remedy: str) -> None:
    """Raise HubError if the disk of `folder` has fewer than `needed` bytes free; its sentence ends as given."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise HubError(f"{folder} has {readable(free)} free but {readable(needed)} are needed {purpose_and_remedy}")


def sync(folder: Path) -> None:
    """Have a folder and its files on the disk."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def readable(num_bytes: float) -> str:
    """A number of bytes for people, in millions or billions."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def with_quantisation(folder: Path, hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with what lies beside it says of quantised weights, where it says nothing itself."""
    if config_of(hf_config) or not (found := _file(folder) or _numbers(folder)):
        return hf_config
    return {**hf_config, "quantization_config": found}


def _file(folder: Path) -> dict[str, Any]:
    path = next((folder / name for name in QUANTISATION_FILES if (folder / name).exists()), None)
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
