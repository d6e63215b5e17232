"""The tensors of an adapter: what each is for, and reading parts of them.

PEFT writes adapter_model.safetensors, whose names begin with `base_model.model.`, then name a module and end with what
of it the tensor is (`PARTS`). Where parameters without a module of their own are changed, such as the matrices of all
experts, there is a `base_layer.` for each but the last one. A file is opened once and read by position: one that is
replaced goes on being read as it was, one that is cut short is a sentence, and `refuse_changed` tells of one that was
written to meanwhile.

`*.bin` are pickles and are not opened here (`server/checkpoint/convert.py`).

Shapes: r rank, D inputs, F outputs, V tokens of a vocabulary, W features of an embedding.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from server.adapters.config import MERGE_BY_PEFT, AdapterConfig, AdapterError, AdapterUnreadable
from server.adapters.identity import CONFIG, ContentCheck, opened
from server.adapters.names import plain_name
from server.checkpoint.files import HubError, checked_file
from server.quantisation.configs import shown

WHOLE, SEVERAL = "adapter_model.safetensors", "adapter_model*.safetensors"
PREFIX = "base_model.model."
LENGTH_BYTES = 8  # of the number in front of a header
# Parsing a header holds everything else up. A mixture with adapters of each expert's layers has some 50,000 tensors.
MOST_HEADER = 16_000_000  # bytes
MOST_TENSORS = 100_000
MARKS = 12  # of a tensor in a header: brackets, colons and commas
MOST_DIMENSIONS = 8
SERIAL = 1 << 15  # numbers: torch's grain size
DTYPES = MappingProxyType({"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
# What a module's tensor is, by how its name ends; `weight` and `bias` are in place of the base's.
PARTS = MappingProxyType(
    {
        "lora_A.weight": "down",  # [r, D]; of E experts [r * E, D], expert by expert
        "lora_B.weight": "up",  # [F, r]; of E experts [F, r * E], rank by rank
        "lora_B.bias": "up_bias",  # [F]
        "lora_embedding_A": "table_down",  # [r, V]
        "lora_embedding_B": "table_up",  # [W, r]
        "lora_magnitude_vector": "magnitude",  # [F], of a table [W]
        "lora_magnitude_vector.weight": "magnitude",
        "token_adapter.trainable_tokens_delta": "tokens",  # [n, W], in place of some rows
        "weight": "weight",
        "bias": "bias",
    }
)
# What a table that was resized is saved as besides: the base's, and once more the one that was trained, or by another
# adapter's name that one's.
ORIGINAL, TRAINED = ".original_module.", re.compile(r"\.modules_to_save(\.[^.]+)?\.(?=[^.]+$)")
OF_TRAINING = re.compile(r"\.lora_velora_\w+$")  # what VeLoRA computes gradients by
MOST_HELD = 4  # tensors: A and B of what all experts have twice
BAD_FILE = "fetch it again, or give another adapter"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: int  # of the adapter's
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # of its bytes in the file


@dataclass
class Module:
    """The tensors of a module, by what each is (`PARTS`), each by its name."""

    name: str  # without `base_model.model.`
    parts: dict[str, str] = field(default_factory=dict)
    # Of parameters that have no module of their own: those of the one that was wrapped last, then the one before …
    layers: dict[int, dict[str, str]] = field(default_factory=dict)


class AdapterFiles:
    """An adapter's config and tensors. Raises AdapterError for all that is not as it must be.

    key: of the content, for `refuse_changed`. largest: that what is read may have. Files stay open until `close`.
    """

    def __init__(self, folder: Path, key: bytes | None = None, largest: float = sys.float_info.max) -> None:
        self.folder = folder
        self._largest = largest
        self._config_marks = _marks_of(folder / CONFIG)
        self.config = AdapterConfig.read(folder)
        self._check = None if key is None else ContentCheck(folder, key)
        self._files: list[tuple[Path, BinaryIO, os.stat_result]] = []
        self._stored: dict[str, Stored] = {}
        self._held: dict[str, Tensor] = {}  # what was read whole last, for the next expert
        try:
            for path in _weights_of(folder):
                self._add(path)
            self.modules = self._modules()
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path) -> None:
        try:
            file = opened(checked_file(path.parent, path.name))
        except HubError as error:
            raise AdapterError(str(error)) from None
        except OSError as error:
            raise AdapterUnreadable(f"{path} cannot be read ({error.strerror}): give another adapter") from None
        state = os.fstat(file.fileno())
        self._files.append((path, file, state))
        for name, entry in _entries(path, file, state.st_size, len(self._files) - 1):
            if name in self._stored:
                raise AdapterError(f"tensor {name} is in {path} and in another file of the adapter: remove one of them")
            self._stored[name] = entry

    def close(self) -> None:
        """Nothing can be read afterwards."""
        if self._check is not None:
            self._check.stop()
        for _, file, _ in self._files:
            file.close()

    @property
    def nbytes(self) -> int:
        """Of all files with tensors."""
        return sum(state.st_size for _, _, state in self._files)

    def names(self) -> Iterator[str]:
        """Of all tensors."""
        return iter(self._stored)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._stored[name].shape

    def told(self, name: str) -> str:
        """A tensor as sentences name it."""
        return f"tensor {name} in {self._files[self._stored[name].file][0]}"

    def refuse_changed(self) -> None:
        """Raise AdapterUnreadable unless the files are what the key is of, and unchanged since they were opened."""
        assert self._check is not None, "only of an adapter whose key is known"
        try:
            is_same = (
                self._check.result()
                and all(
                    _marks(os.fstat(file.fileno())) == _marks(path.stat()) == _marks(then)
                    for path, file, then in self._files
                )
                and self._config_marks == _marks_of(self.folder / CONFIG)
            )
        except OSError:
            is_same = False
        if not is_same:
            raise AdapterUnreadable(f"the files of {self.folder} have changed meanwhile: ask for the adapter once more")

    def read(self, name: str, shape: Sequence[int | None], rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor, or half-open rows of it, as it is stored. None in a shape: any number."""
        stored = self._stored[name]
        if len(stored.shape) != len(shape) or any(b not in (None, a) for a, b in zip(stored.shape, shape, strict=True)):
            wanted = " x ".join("any" if size is None else str(size) for size in shape)
            base = f"it was trained on {shown(self.config.base)}" if self.config.base else "it is of another model"
            raise AdapterError(
                f"{self.told(name)} has shape {list(stored.shape)}, and the model and {self.config.path.name} ask for "
                f"{wanted}: {base}, or damaged"
            )
        first, last = rows or (0, stored.shape[0])
        if name in self._held:
            return self._held[name][first:last]
        tensor = self._bytes(name, stored, first, last)
        ends = (float(end) for run in runs(tensor) for end in torch.aminmax(run))  # NaN is both
        if not all(abs(end) <= self._largest for end in ends):
            raise AdapterError(
                f"{self.told(name)} has NaN or infinity, or a number above {self._largest:.3g}: {BAD_FILE}"
            )
        if rows is None:
            self._held[name] = tensor
            if len(self._held) > MOST_HELD:
                del self._held[next(iter(self._held))]
        return tensor

    def _bytes(self, name: str, stored: Stored, first: int, last: int) -> Tensor:
        path, file, _ = self._files[stored.file]
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        data = bytearray((last - first) * row_bytes)
        view, place = memoryview(data), stored.start + first * row_bytes
        try:
            while view and (count := os.preadv(file.fileno(), [view], place)):
                view, place = view[count:], place + count
        except OSError as error:
            raise AdapterUnreadable(f"{path} cannot be read ({error.strerror}): {BAD_FILE}") from None
        if view:
            raise AdapterUnreadable(f"{path} ends within {name}: {BAD_FILE}")  # as its header says it did not
        shape = (last - first, *stored.shape[1:])
        return torch.frombuffer(data, dtype=stored.dtype).view(shape) if data else torch.empty(shape)

    def _modules(self) -> dict[str, Module]:
        """By their plain names."""
        found: dict[str, Module] = {}
        for name in self._stored:
            if OF_TRAINING.search(name) or self._is_copy(name):
                continue
            module_name, depth, part = _taken_apart(name)
            module = found.setdefault(plain_name(module_name), Module(module_name))
            if module.name != module_name:
                raise AdapterError(
                    f"{self.told(name)} is of the same layer as one of {module.name}: one of them is of another model"
                )
            if depth and part in ("weight", "bias"):
                depth = 0
            into = module.layers.setdefault(depth, {}) if depth else module.parts
            if part in into:
                raise AdapterError(f"{self.told(name)} is there twice, also as {into[part]}: remove one of them")
            into[part] = name
        for module in found.values():
            self._refuse_halves(module)
        self._refuse_missing(found)
        return found

    def _is_copy(self, name: str) -> bool:
        """Whether a tensor is beside the one that is computed with, as PEFT saves a table that was resized."""
        trained = TRAINED.sub(".", name)
        return ORIGINAL in name or (trained != name and trained in self._stored)

    def _refuse_halves(self, module: Module) -> None:
        config = self.config
        for parts in (module.parts, *module.layers.values()):
            pairs = [("down", "up"), ("table_down", "table_up")]
            pairs += [("down", "magnitude")] if config.has_magnitudes and "table_down" not in parts else []
            pairs += [("table_down", "magnitude")] if config.has_magnitudes and "table_down" in parts else []
            pairs += [("down", "up_bias")] if config.has_bias else []
            for one, other in pairs:
                if (one in parts) != (other in parts):
                    given, missing = (one, other) if one in parts else (other, one)
                    raise AdapterError(f"{self.told(parts[given])} has no counterpart {_ending(missing)}: {BAD_FILE}")
            for part, key, is_said in (
                ("magnitude", "use_dora", config.has_magnitudes),
                ("up_bias", "lora_bias", config.has_bias),
            ):
                if part in parts and not is_said:
                    raise AdapterError(f"{self.told(parts[part])} is there, and `{key}` in {config.path} is not true")

    def _refuse_missing(self, found: Mapping[str, Module]) -> None:
        config = self.config
        tables = [module for module in found.values() if "tokens" in module.parts]
        if bool(tables) != bool(config.tokens):
            raise AdapterError(
                f"`trainable_token_indices` of {config.path} and the tensors {_ending('tokens')} in {self.folder} do "
                f"not belong together: {BAD_FILE}"
            )


def _weights_of(folder: Path) -> list[Path]:
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if found := sorted(folder.glob(SEVERAL)):
        return found
    old = next(iter(sorted(folder.glob("adapter_model*.bin"))), None)
    if old is not None:
        raise AdapterError(
            f"{folder} has {old.name}, a pickle, and no {WHOLE}: name it in --lora-adapters, which converts it at the "
            "start, or save it with `safe_serialization=True`"
        )
    raise AdapterError(f"{folder} has no {WHOLE}: is it an adapter?")


def _marks(state: os.stat_result) -> tuple[int, ...]:
    """What a file has as long as nobody writes to it or puts another in its place, were it for a moment."""
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _marks_of(path: Path) -> tuple[int, ...] | None:
    """None: there is no such file."""
    return _marks(path.stat()) if path.exists() else None


def runs(tensor: Tensor) -> Sequence[Tensor]:
    """The numbers of a contiguous tensor, as many at a time as torch does not divide among threads.

    These would have to wait for those that compute, and for the one that the content is compared by.
    """
    if tensor.numel() <= SERIAL:
        return (tensor,) if tensor.numel() else ()
    return tensor.view(-1).split(SERIAL)


def _ending(part: str) -> str:
    return next(ending for ending, of in PARTS.items() if of == part)


def _taken_apart(name: str) -> tuple[str, int, str]:
    """The module that a tensor is of, how many other changes of it are around this one, and what it is."""
    plain = name.removeprefix(PREFIX)
    dotted = f".{plain}"
    ending = next((e for e in PARTS if dotted.endswith(f".{e}")), None)
    if ending is None:
        raise AdapterError(
            f"the adapter has a tensor {name}, which is none that is known here (experts that were trained whole are "
            f"not): {MERGE_BY_PEFT}"
        )
    module, depth = dotted.removesuffix(f".{ending}").removeprefix("."), 0
    while module.endswith(".base_layer"):
        module, depth = module.removesuffix(".base_layer").removesuffix(".token_adapter"), depth + 1
    return module, depth, PARTS[ending]


def _entries(path: Path, file: BinaryIO, size: int, number: int) -> Iterator[tuple[str, Stored]]:
    """The tensors that a file's header lists. Raises AdapterError."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or length > min(MOST_HEADER, size - LENGTH_BYTES):
        raise AdapterError(f"{path} is no safetensors file, or was cut short: {BAD_FILE}")
    text = file.read(length)
    if sum(map(text.count, (b"[", b"{", b":", b","))) > MARKS * MOST_TENSORS:
        raise AdapterError(f"{path} has a header for more than {MOST_TENSORS} tensors: give another adapter")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise AdapterError(f"{path} has a damaged header: {BAD_FILE}") from None
    if not isinstance(header, dict):
        raise AdapterError(f"{path} has a damaged header: {BAD_FILE}")
    header.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
        if not re.fullmatch(r"[\w.-]{1,500}", name, re.ASCII):
            raise AdapterError(f"{path} has a tensor whose name is no module's: {BAD_FILE}")
        stored, stop = _entry(path, name, entry, LENGTH_BYTES + length, number)
        if stored.start != LENGTH_BYTES + length + end:
            raise AdapterError(f"{path} has a damaged header, at tensor {name}: {BAD_FILE}")
        end = stop
        yield name, stored
    if LENGTH_BYTES + length + end != size:
        raise AdapterError(f"{path} has {size} bytes, and its header says {LENGTH_BYTES + length + end}: {BAD_FILE}")


def _offsets(entry: Any) -> tuple[int, int]:
    """Half-open, among the bytes of all tensors; (-1, -1) where they are none."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(one) is int for one in offsets):
        return (-1, -1)
    return offsets[0], offsets[1]


def _entry(path: Path, name: str, entry: Any, data: int, number: int) -> tuple[Stored, int]:
    """Where a tensor lies, and its end. data: where the bytes of all tensors begin."""
    start, stop = _offsets(entry)
    shape = entry.get("shape") if isinstance(entry, dict) else None
    is_shape = isinstance(shape, list) and 0 < len(shape) <= MOST_DIMENSIONS
    if not is_shape or not all(type(one) is int and 0 < one < 1 << 40 for one in shape or ()):
        raise AdapterError(f"tensor {name} in {path} is empty, a single number or damaged: {BAD_FILE}")
    dtype, sizes = DTYPES.get(str(entry.get("dtype"))), tuple(shape or ())
    if dtype is None:
        raise AdapterError(
            f"tensor {name} in {path} is {str(entry.get('dtype'))[:20]}, and those of adapters are one of "
            f"{', '.join(DTYPES)}: save the adapter in one of these"
        )
    if start < 0 or stop - start != math.prod(sizes) * dtype.itemsize:
        raise AdapterError(f"{path} has a damaged header, at tensor {name}: {BAD_FILE}")
    return Stored(number, dtype, sizes, data + start), stop
