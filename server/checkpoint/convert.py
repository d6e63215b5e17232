"""Converts old files once: `*.bin` of models and adapters to safetensors, and a slow tokenizer to tokenizer.json.

    python -P -m server.checkpoint.convert weights|tokenizer|adapter SOURCE TARGET

A process of its own, because it imports torch and transformers and reads files that may be hostile; the launcher runs
it. A `.bin` is a pickle: it is read with `weights_only=True` or not at all, there is no second attempt. The result is
made in a temporary folder beside TARGET and renamed, under a lock, so that TARGET is complete or absent and two
launches convert once. Models are never built and code from a repository is never run.
"""

from __future__ import annotations

import fcntl
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from host.folders import make_private
from server.checkpoint import spm
from server.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    HubError,
    checked_file,
    read_json,
    sync,
    weight_files,
)
from server.quantisation import sizes

# What torch.load raises for a file that is damaged, hostile, or no checkpoint at all.
LOAD_ERRORS = (RuntimeError, ValueError, EOFError, KeyError, IndexError, AttributeError, TypeError, OSError)


def convert_weights(source: Path, target: Path) -> None:
    """Write the tensors of every *.bin of `source` to one safetensors file each."""
    _refuse_torchao(source)
    files = weight_files(source)
    for number, path in enumerate(files, 1):
        print(f"Converting {path.name} ({number} of {len(files)})", flush=True)
        tensors, names = _distinct_tensors(_read_checkpoint(path))
        save_file(tensors, target / f"{path.stem}.safetensors", metadata={"format": "pt", **names})


def _convert_adapter(source: Path, target: Path) -> None:
    """Write an adapter's tensors as one safetensors file, beside its description."""
    binary, description = (checked_file(source, name) for name in (ADAPTER_WEIGHTS[1], ADAPTER_CONFIG))
    stored, shared = _distinct_tensors(_read_checkpoint(binary))
    stored |= {name: stored[first].clone() for name, first in shared.items()}
    save_file(stored, target / ADAPTER_WEIGHTS[0], metadata={"format": "pt"})
    shutil.copyfile(description, target / ADAPTER_CONFIG)


def _refuse_torchao(source: Path) -> None:
    config = sizes.config_of(_settings(source, "config.json"))
    if isinstance(config, Mapping) and sizes.method_of(config) == "torchao":
        raise HubError(
            f"{source} has weights of torchao in *.bin, which are pickles of its classes and are not opened: served "
            "are those in safetensors, load the model with transformers 5 and save it anew, which writes them so"
        )


def _read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one *.bin, mapped from disk rather than read."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise HubError(
            f"{path} is unsafe: it holds more than tensors and is not opened; use a safetensors version of the model"
        ) from None
    except LOAD_ERRORS:
        raise HubError(
            f"{path} cannot be read: it is damaged, or older than torch 1.6; fetch it again or use a safetensors file"
        ) from None
    if not isinstance(checkpoint, dict) or not checkpoint:
        raise HubError(f"{path} holds no table of tensors: use a safetensors version of the model")
    for name, tensor in checkpoint.items():
        _check_tensor(path, name, tensor)
    return checkpoint


def _check_tensor(path: Path, name: object, tensor: object) -> None:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise HubError(f"{path}: {name!r} is not a tensor; use a safetensors version of the model")
    # Sparse and quantised tensors carry indices that torch does not check when it loads them.
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise HubError(f"{path}: {name} is not a plain dense tensor; use a safetensors version of the model")


def _distinct_tensors(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors to store, and for each name left out the name of the tensor that it shares.

    The first name in the file stays, which is the embedding where a head is tied to it. Views that share memory only
    in part are stored each on its own, as safetensors demands.
    """
    kept: dict[tuple[object, ...], str] = {}
    stored: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first = kept.setdefault(place, name) if tensor.numel() else name
        if first != name:
            shared[name] = first
            continue
        is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        stored[name] = tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)
    return stored, shared


def _convert_tokenizer(source: Path, target: Path) -> None:
    """Write tokenizer.json, made from the older files that `source` has."""
    is_repository_code = (source / "tokenizer.model").exists() and not _is_known_to_transformers(source)
    try:
        files = _from_sentencepiece(source) if is_repository_code else _from_transformers(source)
    except HubError:
        raise
    except (*LOAD_ERRORS, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HubError(f"the tokenizer of {source} cannot be converted ({reason}): add a tokenizer.json") from None
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8")


def _is_known_to_transformers(source: Path) -> bool:
    """Whether transformers has the tokenizer class that the folder names, or else one for its type of model."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    named = _settings(source, "tokenizer_config.json").get("tokenizer_class")
    if isinstance(named, str):
        return tokenizer_class_from_name(named) is not None
    return str(_settings(source, "config.json").get("model_type")) in TOKENIZER_MAPPING_NAMES


def _from_transformers(source: Path) -> dict[str, str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    return {"tokenizer.json": tokenizer.backend_tokenizer.to_str(pretty=True)}


def _from_sentencepiece(source: Path) -> dict[str, str]:
    data = checked_file(source, "tokenizer.model").read_bytes()
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    companions = spm.Companions(*(_settings(source, name) for name in names))
    return spm.convert(data, str(_settings(source, "config.json").get("model_type")), companions)


def _settings(source: Path, name: str) -> dict[str, Any]:
    return read_json(source / name, "settings of the model") if (source / name).exists() else {}


CONVERSIONS: dict[str, Callable[[Path, Path], None]] = {
    "weights": convert_weights,
    "tokenizer": _convert_tokenizer,
    "adapter": _convert_adapter,
}


def convert_once(kind: str, source: Path, target: Path) -> None:
    """Run one conversion unless its result is there, so that `target` is complete or absent."""
    partial = target.with_name(target.name + ".partial")
    with target.with_name(target.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return
        shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed
        make_private(partial)
        try:
            CONVERSIONS[kind](source, partial)
            sync(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def main(argv: list[str]) -> int:
    """Run the conversion that the arguments name. Returns the exit code; what is wrong goes to standard error."""
    if len(argv) != 3 or argv[0] not in CONVERSIONS:
        print(f"usage: python -m server.checkpoint.convert {'|'.join(CONVERSIONS)} SOURCE TARGET", file=sys.stderr)
        return 2
    kind, source, target = argv[0], Path(argv[1]), Path(argv[2])
    try:
        convert_once(kind, source, target)
    except HubError as error:
        problem = str(error)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        problem = f"cannot write {target} ({getattr(error, 'strerror', None) or error}): make room on its disk"
    else:
        return 0
    print(f"error: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
