"""Reading a checkpoint: each rank reads its own slices, and no tensor may be left over.

A layer asks `Weights` for a role ("qkv", "mlp_up", …) and for the part that its rank holds; the family's name map says
what that is called in the checkpoint, and safetensors reads only those bytes. Layouts that differ from ours (BLOOM
interleaves q, k and v per head) are undone here, so `forward` never learns about them. A tensor that no layer asked for
and that the family does not ignore is an error: the model is not what its config says. A pipeline stage loads some
layers, and leaves out the others' tensors by patterns of their names.

`ReadAhead` has the system read what comes next in a file while what has been read is converted. Otherwise loading takes
the sum of both times. Where the system cannot be asked so (other than Linux), nothing is.

Some checkpoints have scales of keys and values for a KV cache in float8: llm-compressor and its kin write one number
for all keys of a layer and one for all values, under several names. Scales for each head are refused; what is done with
a scale: `server/quantisation/kv.py`.

Left out: how quantised weights are packed (`formats/`), and downloads (`hub.py`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from server.arch.names import FusedRows, NameMap, QkvLayout
from server.backends.device import HOST
from server.backends.protocol import GroupedLinear, LinearFormat, Norm
from server.checkpoint.files import weight_files
from server.checkpoint.formats.protocol import (
    FLOATS,
    NOWHERE_ELSE,
    Format,
    FormatError,
    Part,
    Ranges,
    Source,
    Tensors,
    refuse_overflow,
)
from server.checkpoint.random_weights import RandomCheckpoint
from server.quantisation import exclusions
from server.quantisation.stored import Quantise, Stored
from server.ranks.collectives import Shard

AHEAD_BYTES = 256 << 20  # what may come in advance; memory that the system gives back when it is wanted
LENGTH_BYTES = 8  # of the number in front of a safetensors file's header
# Bytes read before the files are opened anew: what was touched of a mapped file counts as memory of this process until
# it is closed. More holds more memory, less opens more often, which takes about a millisecond.
PIECE_BYTES = 32 << 20
STORED_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

WEIGHTS = ("weight", "qweight", "weight_packed", "_weight_qdata")  # what a linear layer's weight may be called
HEADS = frozenset(exclusions.HEADS)
AFTER_LAYERS = ("final_norm", "project_out", "head")  # roles of what stands there
BESIDE_FUSED = ("_scale", "_scales", "_blocks", "_packed", "_scale_inv", "_weight_scale")  # of experts in fewer bits


class CheckpointError(ValueError):
    """The checkpoint is not what its config says. The sentence names the file and the tensor."""


class Checkpoint:
    """The tensors of a folder of safetensors files, read lazily and by slices.

    Remembers what was read, so that `leftovers` can name the rest. Raises CheckpointError for files that are
    truncated or malformed and for a tensor that two files hold.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._paths: dict[str, Path] = {}  # tensor name -> its file
        self._shared: dict[str, str] = {}  # name that a file notes as another one's -> that one
        self._notes: dict[str, str] = {}  # metadata of the files
        self._files: dict[Path, Any] = {}  # open safetensors files
        self._mapped = 0  # bytes of them that were touched since they were opened
        self._read: set[str] = set()
        self._ahead = ReadAhead()
        self.bytes_read = 0
        for path in weight_files(self.folder):
            file = self._open(path)
            notes, names = file.metadata() or {}, set(file.keys())
            self._notes |= notes
            self._shared |= {name: kept for name, kept in notes.items() if kept in names}
            for name in names:
                if name in self._paths:
                    raise CheckpointError(f"tensor {name} is in {path} and in another file: {self._paths[name]}")
                self._paths[name] = path
        if not self._paths:
            raise CheckpointError(f"the safetensors files in {self.folder} hold no tensors: fetch the model again")

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is not a readable safetensors file ({error}); it is damaged or incomplete: "
                    "download it again"
                ) from error
        return self._files[path]

    def __contains__(self, name: str) -> bool:
        return name in self._paths or name in self._shared

    def names(self) -> Iterator[str]:
        """The name of every stored tensor, without those that only share another one."""
        return iter(self._paths)

    def paths(self) -> Iterator[Path]:
        """Every file with tensors."""
        return iter(dict.fromkeys(self._paths.values()))

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that `name` is stored in, without reading it."""
        if not self.shape_of(name):
            return self._number(name).dtype
        return self._sliced(name, [(0, 0)]).dtype

    def dtype_of_most(self) -> torch.dtype | None:
        """The dtype of the largest tensor of floats, which is no scale; None where there are no floats."""
        sizes = {name: math.prod(self.shape_of(name)) for name in self.names()}
        by_size = sorted(sizes, key=lambda name: -sizes[name])
        return next((dtype for dtype in map(self.dtype_of, by_size) if dtype in STORED_FLOATS), None)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of `name`, without reading it."""
        return tuple(self._slice(name).get_shape())

    def note_of(self, name: str) -> str | None:
        """What the metadata of the files says under this name; None: nothing."""
        return self._notes.get(name)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        part: tuple[int, int] | None = None,
        within: Mapping[int, tuple[int, int]] = NOWHERE_ELSE,
        dtypes: Sequence[torch.dtype] = STORED_FLOATS,
        dtype: torch.dtype | None = None,
        mapped: bool = False,
    ) -> Tensor:
        """Tensor `name` of full shape `shape`, or its half-open `part` along `dim`. Contiguous and owned.

        within: half-open parts along other dimensions, to which it is restricted.
        dtypes: those that it may be stored in. dtype: what it is converted to; None: it stays as it is. mapped: it may
        be the file itself instead, in any strides, to be read once and let go: a copy would need fresh memory, which
        costs more than what is copied.
        """
        name = name if name in self._paths else self._shared.get(name, name)
        view = self._slice(name)
        found = tuple(view.get_shape())
        if found != shape:
            raise CheckpointError(
                f"tensor {name} in {self._paths[name]} has shape {list(found)}, but config.json says {list(shape)}: "
                "they do not belong together, download both again"
            )
        if not shape:  # a number, which has no slices
            return self._checked(name, self._number(name), dtypes).to(dtype)
        region = [part if part and d == dim else within.get(d, (0, size)) for d, size in enumerate(shape)]
        nothing = self._checked(name, self._sliced(name, [(0, 0)]), dtypes)
        self._ahead.passed(self._paths[name], name)
        row_bytes = math.prod(shape[1:]) * nothing.itemsize  # a row's pages come whole
        if mapped:
            assert dtype is None, "what is mapped stays as it is"
            tensor = self._rows(name, region, row_bytes)
        else:
            (first, last), *others = region
            tensor = nothing.new_empty([stop - start for start, stop in region], dtype=dtype)
            for begin, end in _pieces(first, last, max(1, PIECE_BYTES // max(1, row_bytes))):
                tensor[begin - first : end - first] = self._rows(name, [(begin, end), *others], row_bytes)
        self.bytes_read += tensor.numel() * nothing.itemsize
        return tensor

    def differ(self, name: str, other: str) -> bool:
        """Whether two matrices of floats are stored, each by its name, that are not the same numbers."""
        if name == other or not {name, other} <= set(self._paths):
            return False
        if not {self.dtype_of(name), self.dtype_of(other)} <= set(STORED_FLOATS):
            return False
        pairs = zip(self._parts(name), self._parts(other), strict=False)
        return self.shape_of(name) != self.shape_of(other) or not all(torch.equal(*pair) for pair in pairs)

    def _parts(self, name: str) -> Iterator[Tensor]:
        """A matrix in float32, some rows at a time."""
        shape = self.shape_of(name)
        step = max(1, PIECE_BYTES // max(1, 4 * math.prod(shape[1:])))
        for part in _pieces(0, shape[0], step):
            yield self.read(name, shape, part=part, dtype=torch.float32)

    def _rows(self, name: str, region: Sequence[tuple[int, int]], row_bytes: int) -> Tensor:
        """Part of a tensor as it lies in its file, mapped; of which not much more is mapped afterwards."""
        if self._mapped > PIECE_BYTES:
            self._files.clear()
            self._mapped = 0
        rows = self._sliced(name, region)
        self._mapped += (region[0][1] - region[0][0]) * row_bytes
        return rows

    def _checked(self, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> Tensor:
        """The tensor, which counts as read if its dtype is one of `dtypes`."""
        if tensor.dtype not in dtypes:
            told = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(
                f"tensor {name} in {self._paths[name]} is {str(tensor.dtype).removeprefix('torch.')} and must be "
                f"{told}: config.json and weights do not belong together"
            )
        self._read.add(name)
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._paths:
            first, *others = dict.fromkeys(self._paths.values())
            more = f" (and {len(others)} more)" if others else ""
            raise CheckpointError(f"tensor {name} is missing from {first}{more}; is it a checkpoint of this model?")
        return self._open(self._paths[name]).get_slice(name)

    def _sliced(self, name: str, region: Sequence[tuple[int, int]]) -> Tensor:
        """Part of a tensor as it lies in its file. Raises CheckpointError for numbers that torch does not have."""
        view = self._slice(name)
        try:
            found: Tensor = view[tuple(slice(*bounds) for bounds in region) or slice(None)]
        except (SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"tensor {name} in {self._paths[name]} cannot be read as {view.get_dtype()} ({error}): take another "
                "checkpoint of this model"
            ) from error
        return found

    def _number(self, name: str) -> Tensor:
        """A tensor without dimensions, which has no slices."""
        number: Tensor = self._open(self._paths[name]).get_tensor(name)
        return number

    def leftovers(self, ignore: tuple[str, ...]) -> list[str]:
        """Tensors that were not read and that no pattern of `ignore` matches, sorted, each with its file."""
        patterns = [re.compile(pattern) for pattern in ignore]
        left = (n for n in self._paths if n not in self._read and not any(p.search(n) for p in patterns))
        return [f"{name} in {self._paths[name]}" for name in sorted(left)]

    def zeros(self, patterns: Sequence[str]) -> list[str]:
        """Tensors that were not read, that one of `patterns` matches, and that are zeros."""
        matching = (n for n in self._paths if n not in self._read and any(re.search(p, n) for p in patterns))
        return [n for n in matching if not (self._sliced(n, []) if self.shape_of(n) else self._number(n)).any()]


def _pieces(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + step, stop)) for begin in range(start, stop, step))


class ReadAhead:
    """Where the tensors of safetensors files end, and what of each file has been asked for."""

    def __init__(self) -> None:
        self._ends: dict[Path, dict[str, int]] = {}
        self._asked: dict[Path, tuple[int, int]] = {}  # the stretch that was asked for last

    def passed(self, path: Path, name: str) -> None:
        """A tensor of a file that is known to be whole is about to be read: what is behind it will be next."""
        if not hasattr(os, "posix_fadvise"):
            return
        if path not in self._ends:
            self._ends[path] = _ends_of(path)
        end = self._ends[path][name]
        first, last = self._asked.get(path, (0, 0))
        if first <= end and end + AHEAD_BYTES // 2 < last:
            return
        begin = last if first <= end < last else end
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, begin, end + AHEAD_BYTES - begin, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
        self._asked[path] = begin, end + AHEAD_BYTES


def _ends_of(path: Path) -> dict[str, int]:
    """The end of each tensor in the file, in bytes from its beginning."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(size))
    first = LENGTH_BYTES + size
    return {name: first + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}


@dataclass(frozen=True)
class Piece:
    """The part of a linear layer's weight that a rank has, alone or one below another, and what the layer is called.

    names: in the checkpoint, one of them; first: where its outputs begin among those that are stored together; read:
    reads ranges of the whole layer's rows with all inputs, [outputs, D] in float32, on the host; read_bias: what is
    added to these outputs, likewise; None: nothing. Of a table of tokens, these are the outputs.
    """

    role: str
    names: tuple[str, ...]
    size: tuple[int, int]  # outputs and inputs of the whole layer
    rows: Ranges  # half-open, of its outputs, one after the other
    columns: tuple[int, int]  # half-open, of its inputs
    first: int
    read: Callable[[Ranges], Tensor] = field(compare=False, repr=False)
    read_bias: Callable[[Ranges], Tensor | None] = field(default=lambda rows: None, compare=False, repr=False)
    expert: int | None = None  # whose matrix it is, of `num_experts`
    num_experts: int = 0
    is_transposed: bool = False  # whether the checkpoint has it as [inputs, outputs]
    takes_bias: bool = True  # whether what is added to the product is in the model's own measure
    is_turned: bool = False  # of all experts: see `Stack`

    @property
    def num_outputs(self) -> int:
        """Of this part."""
        return sum(stop - start for start, stop in self.rows)

    def base(self) -> Tensor:
        """This part's rows, with all inputs, in float32."""
        return self.read(self.rows)


def placed(pieces: Sequence[Piece]) -> list[Piece]:
    """Each behind the outputs of those before it."""
    ends = accumulate((piece.num_outputs for piece in pieces), initial=0)
    return [replace(piece, first=first) for piece, first in zip(pieces, ends, strict=False)]


class Adapting(Protocol):
    """Makes layers such as adapters can change."""

    def linear(
        self,
        layer: LinearFormat,
        pieces: Sequence[Piece],
        *,
        is_gated: bool,
        num_outputs: int | None = None,
        tied_to: Piece | None = None,
    ) -> LinearFormat:
        """A linear layer of these pieces, one below the other.

        num_outputs: of a head, whose rows are filled up with zeros; tied_to: the table whose rows it takes.
        """

    def table(self, piece: Piece) -> Callable[[Tensor, Tensor], Tensor]:
        """What changes rows [T, E] of a table. It is called with the tokens [T], counted from the piece's first."""

    def experts(self, layer: GroupedLinear, pieces: Sequence[Sequence[Piece]], *, is_gated: bool) -> GroupedLinear:
        """A linear layer of experts, each with pieces of its own."""

    def pairs(self, spread: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """While experts compute: their tokens are those that `spread` makes of the pass's [T, n]."""

    def norm(self, norm: Norm, names: Sequence[str], weight: Tensor, bias: Tensor | None, offset: float) -> Norm:
        """A norm that has one of these names and these numbers [D]. offset: added to the weight that is stored."""


@dataclass(frozen=True)
class Weights:
    """One rank's view of a checkpoint by role, of all layers or one. Tensors are converted to `dtype` on `device`."""

    checkpoint: Checkpoint | RandomCheckpoint
    names: NameMap
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    prefix: str
    layer: int | None = None
    format: Format | None = None  # in which the checkpoint has linear layers; those that it has not are dense
    quantise: Quantise | None = None  # how dense weights of linear layers are stored: as they are, or by this
    quantise_head: Quantise | None = None  # likewise the head, and a table that is tied to it
    adapting: Adapting | None = None  # what is done with layers; None: no adapters are served
    takes_biases: bool = True  # see `Piece`

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint | RandomCheckpoint,
        names: NameMap,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        format: Format | None = None,
        quantise: Quantise | None = None,
        quantise_head: Quantise | None = None,
    ) -> Weights:
        """Find the prefix that this checkpoint uses. Raises CheckpointError when none fits."""
        for prefix in names.prefixes:
            weights = cls(checkpoint, names, shard, dtype, device, prefix, None, format, quantise, quantise_head)
            name = weights._name("embed")
            if weights._has_weight(name) and name.startswith(prefix):
                return weights
        raise CheckpointError(
            f"{checkpoint.folder} holds no tensor {names.roles['embed']}.weight, with or without a prefix: "
            "its config.json and its weights are of different models"
        )

    def of_layer(self, layer: int) -> Weights:
        """The same weights, with `{i}` standing for `layer`."""
        return replace(self, layer=layer)

    def of_encoder(self) -> Weights:
        """The weights of an encoder-decoder's encoder."""
        assert self.names.encoder is not None, "a family whose spec has an encoder names its tensors"
        return replace(self, names=replace(self.names, roles=self.names.encoder))

    def of_predictor(self, num_layers: int) -> Weights:
        """The weights of the first layer that predicts further tokens, beside so many of the model."""
        predictor = self.names.predictor
        assert predictor is not None, "a family whose models have such layers names their tensors"
        names = replace(self.names, roles={**self.names.roles, **predictor.roles})
        if predictor.prefix is None:
            return replace(self, names=names, layer=num_layers)
        return replace(self, names=names, prefix=predictor.prefix, layer=0)

    def has(self, role: str) -> bool:
        """Whether the family's checkpoints have this role."""
        return role in self.names.roles

    def holds(self, role: str) -> bool:
        """Whether this checkpoint has the role's weight."""
        return self.has(role) and self._has_weight(self._name(role))

    def name_of(self, role: str, expert: int = 0) -> str:
        """What the checkpoint calls a role, without what follows the last dot. Raises CheckpointError."""
        return self._name(role, expert)

    def vector(
        self, role: str, size: int, *, suffix: str = "weight", ranges: Ranges | None = None, expert: int = 0
    ) -> Tensor:
        """A tensor [size], or the half-open `ranges` of it one after the other."""
        name = f"{self._name(role, expert)}.{suffix}"
        parts = [self._read(name, (size,), 0, part) for part in ranges or [(0, size)]]
        return self._own(parts, dim=0)

    def bare(self, role: str, size: int, part: tuple[int, int] | None = None) -> Tensor:
        """A tensor [size] or [1, size], or its half-open part, in float32, whose name has no suffix."""
        names = [prefix + name for name in self._short_names(role) for prefix in (self.prefix, "")]
        name = next((name for name in names if name in self.checkpoint), names[0])
        checkpoint = self.checkpoint
        shape: tuple[int, ...] = (size,)
        if isinstance(checkpoint, Checkpoint) and name in checkpoint and len(checkpoint.shape_of(name)) == 2:
            shape = (1, size)
        found = checkpoint.read(name, shape, dim=len(shape) - 1, part=part, dtype=torch.float32)
        return found.view(-1).to(self.device)

    def filters(self, role: str, size: tuple[int, int], ranges: Ranges) -> Tensor:
        """Half-open `ranges` of the channels of a convolution of size (channels, tokens), each channel by itself."""
        name = f"{self._name(role)}.weight"
        return self._own([self._read(name, (size[0], 1, size[1]), 0, part) for part in ranges], dim=0).squeeze(1)

    def bias(self, role: str, size: int, *, ranges: Ranges | None = None) -> Tensor:
        """The bias of `role`, or ranges of it."""
        return self.vector(role, size, suffix="bias", ranges=ranges)

    def divisors(self, role: str, size: int, part: tuple[int, int]) -> Tensor | None:
        """Part of the numbers [size] by which what `role` computes is divided; None: there are none."""
        if not self.has(role) or isinstance(self.checkpoint, RandomCheckpoint):
            return None
        (short,) = self._short_names(role)
        name = next((n for n in (f"{self.prefix}{short}.scales", f"{short}.scales") if n in self.checkpoint), None)
        if name is None:
            return None
        found = self._own([self._read(name, (size,), 0, part)], dim=0)
        if not found.is_meta and not (found.isfinite() & (found != 0)).all():
            raise CheckpointError(
                f"{name} has 0, nan or infinity among the numbers that activations are divided by: the checkpoint is "
                "damaged, download it again"
            )
        return found

    def kv_scales(self) -> tuple[float, float] | None:
        """By what the layer's keys and values are to be divided before they become float8; None: nothing is known."""
        if isinstance(self.checkpoint, RandomCheckpoint):
            return None
        roles = ("k", "v") if self.has("k") else ("qkv", "qkv")
        return kv_scales(self.checkpoint, self._name(roles[0]), self._name(roles[1]))

    def linear(
        self,
        role: str,
        size: tuple[int, int],
        *,
        rows: Ranges | None = None,
        columns: tuple[int, int] | None = None,
        expert: int = 0,
    ) -> Stored:
        """A part of the weight of a linear layer of `size` (outputs, inputs), as it is to be stored.

        rows: half-open ranges of its outputs; columns: half-open, of its inputs; all of what is not given.
        """
        part = Part(size, rows or [(0, size[0])], columns or (0, size[1]))
        if self.format is not None and (tensors := self._quantised(self.format, self._name(role, expert), size)):
            stored = self.format.read(tensors, part)
            refuse_overflow(tensors.name, stored)
            return stored.to(self.device)
        if self.quantise is not None:
            # A row's scale is that of the whole row, so that the number of ranks changes nothing.
            exact = replace(self, dtype=torch.float32)._matrix(role, size, 0, part.rows, expert)  # rounded once
            quantised = self.quantise(exact)
            return quantised if columns is None else quantised.columns(*columns)
        if columns is not None:
            assert rows is None, "a dense weight is split one way"
            return self._matrix(role, size, 1, [columns], expert)
        return self._matrix(role, size, 0, part.rows, expert)

    def piece(
        self,
        role: str,
        size: tuple[int, int],
        *,
        rows: Ranges | None = None,
        columns: tuple[int, int] | None = None,
        first: int = 0,
        expert: int | None = None,
        num_experts: int = 0,
    ) -> Piece:
        """What `linear` reads with the same arguments, by its names."""
        rows = rows or [(0, size[0])]
        return Piece(
            role,
            self.all_names(role, expert or 0),
            size,
            rows,
            columns or (0, size[1]),
            first,
            partial(self._exact, role, size, expert=expert or 0),
            partial(self._exact_bias, role, size[0], expert=expert or 0),
            expert,
            num_experts,
            self.names.transposed,
            self.takes_biases,
        )

    def all_names(self, role: str, expert: int = 0) -> tuple[str, ...]:
        """What checkpoints may call a role, without what follows the last dot."""
        return tuple(prefix + name for name in self._short_names(role, expert) for prefix in (self.prefix, ""))

    def table_piece(self, role: str, size: tuple[int, int], part: tuple[int, int]) -> Piece:
        """Some rows of a table."""
        return Piece(role, self.all_names(role), size, [part], (0, size[1]), 0, partial(self._exact_table, role, size))

    def _exact_table(self, role: str, size: tuple[int, int], rows: Ranges) -> Tensor:
        exact = self._in_full()
        found = [exact.stored_table(role, size, part) for part in rows]
        return torch.cat([one if isinstance(one, Tensor) else one.dequantised().float() for one in found])

    def _exact(self, role: str, size: tuple[int, int], rows: Ranges, expert: int) -> Tensor:
        """Whole rows of a linear layer as it computes, in float32."""
        stored = self._in_full().linear(role, size, rows=rows, expert=expert)
        return stored if isinstance(stored, Tensor) else stored.dequantised().float()

    def _exact_bias(self, role: str, size: int, rows: Ranges, expert: int) -> Tensor | None:
        if f"{self._name(role, expert)}.bias" not in self.checkpoint:
            return None
        return self._in_full().vector(role, size, suffix="bias", ranges=rows, expert=expert)

    def _in_full(self) -> Self:
        """The same in float32 and on the host, where what an adapter changes is computed from it."""
        return replace(self, dtype=torch.float32, device=HOST)

    def _quantised(self, format: Format, name: str, size: tuple[int, int]) -> Tensors | None:
        """The tensors of a linear layer of `size` that the format stores; None where the layer is dense."""
        if isinstance(self.checkpoint, RandomCheckpoint):
            return None if format.leaves_out(name) else Tensors(self.checkpoint.of_layer(size), name)
        tensors = Tensors(self.checkpoint, name)
        return tensors if format.has(tensors) else None

    def kept(self, role: str, size: tuple[int, int], ranges: Ranges | None = None) -> Stored:
        """The weight of a layer that no family stores transposed, or ranges of its rows, as the checkpoint has it."""
        return replace(self, quantise=None, names=replace(self.names, transposed=False)).linear(role, size, rows=ranges)

    def rows(self, role: str, size: tuple[int, int], ranges: Ranges | None = None) -> Tensor:
        """The weight of a linear layer of `size` (outputs, inputs), or the half-open `ranges` of its outputs, dense."""
        stored = self.kept(role, size, ranges)
        return stored if isinstance(stored, Tensor) else stored.dequantised().to(self.dtype)

    def columns(self, role: str, size: tuple[int, int], part: tuple[int, int], *, expert: int = 0) -> Tensor:
        """The weight of a linear layer of `size` (outputs, inputs), or the half-open `part` of its inputs."""
        return self._matrix(role, size, 1, [part], expert)

    def table(self, role: str, size: tuple[int, int], part: tuple[int, int] | None = None) -> Tensor:
        """Rows of a table [rows, features], which no family stores transposed, as they are in the checkpoint."""
        return self._own([self._read(f"{self._name(role)}.weight", size, 0, part)], dim=0)

    def stored_table(self, role: str, size: tuple[int, int], part: tuple[int, int]) -> Stored:
        """Rows of a table as the checkpoint stores them; those of random weights are dense."""
        if isinstance(self.checkpoint, RandomCheckpoint):
            return self.table(role, size, part)
        return self.kept(role, size, [part])

    def _matrix(self, role: str, size: tuple[int, int], dim: int, ranges: Ranges, expert: int) -> Tensor:
        name = f"{self._name(role, expert)}.weight"
        if name not in self.checkpoint and (fused := self.fused(role)) is not None:
            return self._own(self._of_expert(fused, size, dim, ranges, expert), dim)
        if not self.names.transposed:
            return self._own([self._read(name, size, dim, part) for part in ranges], dim)
        stored = (size[1], size[0])
        return self._own([self._read(name, stored, 1 - dim, part).t() for part in ranges], dim)

    def refuse_other_experts(self, count: int) -> None:
        """Raise CheckpointError where one tensor holds all experts, and not so many of them, or in fewer bits."""
        for role in self.names.fused_experts:
            if (fused := self.fused(role)) is None or isinstance(self.checkpoint, RandomCheckpoint):
                continue
            found = self.checkpoint.shape_of(fused.name)
            if len(found) != 3 or found[0] != count:
                raise CheckpointError(
                    f"tensor {fused.name} has shape {list(found)}, but config.json says {count} experts: they do not "
                    "belong together, download both again"
                )
            if beside := next((end for end in BESIDE_FUSED if f"{fused.name}{end}" in self.checkpoint), None):
                raise CheckpointError(
                    f"the experts in {fused.name} are in fewer bits, by {fused.name}{beside}, and experts in one "
                    "tensor are served dense: take a checkpoint in which each expert has tensors of its own"
                )

    def fused(self, role: str) -> FusedRows | None:
        """Where all experts' matrices of a role are, by the name that this checkpoint has; None: not in one tensor."""
        if (known := self.names.fused_experts.get(role)) is None:
            return None
        name = self.prefix + known.name.format(i=self.layer)
        return replace(known, name=name) if name in self.checkpoint else None

    def _of_expert(
        self, fused: FusedRows, size: tuple[int, int], dim: int, ranges: Ranges, expert: int
    ) -> list[Tensor]:
        """Parts of one expert's matrix, from the tensor of all experts."""
        assert isinstance(self.checkpoint, Checkpoint), "random weights have every tensor by its own name"
        shape = (self.checkpoint.shape_of(fused.name)[0], fused.of * size[0], size[1])
        first = fused.place * size[0]
        own = {0: (expert, expert + 1), 1: (first, first + size[0])}
        parts = [(first + start, first + stop) if dim == 0 else (start, stop) for start, stop in ranges]
        read = partial(self.checkpoint.read, fused.name, shape, dim=1 + dim, within=own, dtype=self.dtype)
        return [read(part=part)[0] for part in parts]

    def _read(self, name: str, shape: tuple[int, ...], dim: int, part: tuple[int, int] | None) -> Tensor:
        """In our dtype, but on the host."""
        return self.checkpoint.read(name, shape, dim=dim, part=part, dtype=self.dtype)

    def _own(self, parts: list[Tensor], dim: int) -> Tensor:
        whole = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        return whole.to(self.device).contiguous()

    def _name(self, role: str, expert: int = 0) -> str:
        short = self._short_names(role, expert)
        names = [prefix + name for name in short for prefix in (self.prefix, "")]  # a head often stands without it
        return next((name for name in names if self._has_weight(name)), names[0])

    def _has_weight(self, name: str) -> bool:
        return any(f"{name}.{suffix}" in self.checkpoint for suffix in WEIGHTS)

    def _short_names(self, role: str, expert: int = 0) -> list[str]:
        if role not in self.names.roles:
            raise CheckpointError(f"the family's name map has no role {role!r}, which its spec needs: add it to NAMES")
        entry = self.names.roles[role]
        return [name.format(i=self.layer, e=expert) for name in ((entry,) if isinstance(entry, str) else entry)]

    def names_of_layers(self, layers: Iterable[int]) -> tuple[str, ...]:
        """Patterns of all tensors of these layers of the decoder."""
        return of_layers(self.names, self.prefix, layers)

    def names_outside_layers(self) -> tuple[str, ...]:
        """Patterns of all tensors that stand before or after the decoder's layers, an encoder's among them."""
        return _outside_layers(self.names, self.prefix)

    def modules_of_layers(self, layers: Iterable[int]) -> tuple[str, ...]:
        """What may stand before the names of all tensors of these layers of the decoder."""
        starts = _starts(self.names)
        return tuple(f"{prefix}{start}{i}" for prefix in (self.prefix, "") for start in starts for i in layers)

    def modules_outside_layers(self, *, before: bool, after: bool) -> tuple[str, ...]:
        """Likewise of what stands before the decoder's layers, an encoder included, or after them."""
        wanted = {
            role: names for role, names in self.names.roles.items() if (after if role in AFTER_LAYERS else before)
        }
        named = [name for name in _all(wanted) if "{i}" not in name]
        if before:
            named += [name.partition("{i}")[0].rstrip(".") for name in _all(self.names.encoder or {})]
        return tuple(prefix + name for prefix in (self.prefix, "") for name in named)

    def names_of_predictors(self, num_layers: int, count: int) -> tuple[str, ...]:
        """Patterns of all tensors of so many layers that predict further tokens, beside those of the model."""
        if self.names.predictor is not None and (prefix := self.names.predictor.prefix) is not None:
            return (rf"(^|\.){re.escape(prefix)}",)
        return self.names_of_layers(range(num_layers, num_layers + count)) if count else ()

    def refuse_leftovers(self, of_others: tuple[str, ...] = (), among: tuple[str, ...] = ("",)) -> None:
        """Raise CheckpointError that names tensors which neither the model nor the ignore list knows.

        of_others: patterns of tensors that other pipeline stages load; among: of those that are looked at, by default
        all.
        """
        ignored = self.names.ignore + of_others
        if self.format is not None:
            ignored += self.format.ignored
            ignored += tuple(f"^{re.escape(name)}$" for name in self.checkpoint.zeros(self.format.zeros))
        left = [name for name in self.checkpoint.leftovers(ignored) if any(re.search(p, name) for p in among)]
        if head := next(filter(_is_of_quantised_head, left), None):
            own = ", or say `tie_word_embeddings` false in config.json, so that the head is the stored one"
            raise CheckpointError(
                f"the head is stored in fewer bits ({head}), but tied to the embedding table, whose rows it takes: "
                f"quantise the model anew and leave its head as it is{own if self.has('head') else ''}"
            )
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise CheckpointError(
                f"the checkpoint has tensors that this architecture does not use: {shown}; "
                "config.json and weights do not belong together, or the family is not fully supported"
            )


def _is_of_quantised_head(leftover: str) -> bool:
    """Whether a tensor, told with its file, is beside a head's weight and no bias."""
    *path, suffix = leftover.partition(" in ")[0].split(".")
    return not HEADS.isdisjoint(path) and suffix not in ("weight", "bias")


def of_layers(names: NameMap, prefix: str, layers: Iterable[int]) -> tuple[str, ...]:
    """Of all tensors of these layers of the decoder."""
    starts = _starts(names)
    return tuple(rf"^({re.escape(prefix)})?{re.escape(start)}{layer}\." for start in starts for layer in layers)


def _starts(names: NameMap) -> list[str]:
    """What stands before the number of a decoder's layer."""
    return sorted({name[: name.index("{i}")] for name in _all(names.roles) if "{i}" in name})


def _outside_layers(names: NameMap, prefix: str) -> tuple[str, ...]:
    """Of all tensors before and after the decoder's layers, an encoder's among them."""
    outside = [rf"{re.escape(name)}(\.|$)" for name in _all(names.roles) if "{i}" not in name]
    encoder = [re.escape(name.partition("{i}")[0]) for name in _all(names.encoder or {})]
    return tuple(rf"^({re.escape(prefix)})?{name}" for name in outside + encoder)


def _all(roles: Mapping[str, str | tuple[str, ...]]) -> list[str]:
    return [name for entry in roles.values() for name in ((entry,) if isinstance(entry, str) else entry)]


def kv_scales(source: Source, keys: str, values: str) -> tuple[float, float] | None:
    """By what a layer's keys and values are divided; None where the checkpoint does not say so for both.

    keys, values: names of the projections, which are the same where one computes both. Raises FormatError.
    """
    found = [_scale(source, keys, "k", is_alone=keys != values), _scale(source, values, "v", is_alone=keys != values)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _scale(source: Source, projection: str, part: str, *, is_alone: bool) -> float | None:
    names = [f"{projection.rpartition('.')[0]}.{part}_scale", f"{projection}.{part}_scale"]
    names += [f"{projection}.output_scale"] if is_alone else []
    names.append(f"{projection.rpartition('.')[0]}.kv_scale")  # of older ones, for both
    name = next((name for name in names if name in source), None)
    if name is None:
        return None
    shape = source.shape_of(name)
    if math.prod(shape) != 1:
        raise FormatError(
            f"tensor {name} has shape {list(shape)}, but only one scale for all heads of a layer is served: use "
            "--kv-cache-dtype int8, which makes its own"
        )
    scale = float(source.read(name, shape, dtypes=FLOATS).item())
    if not (scale > 0 and math.isfinite(scale)):
        raise FormatError(
            f"tensor {name} is {scale}, but a scale is above 0 and finite: use --kv-cache-dtype int8, which makes its "
            "own"
        )
    return scale


def head_ranges(layout: QkvLayout, num_heads: int, num_kv_heads: int, head_dim: int, q: range, kv: range) -> Ranges:
    """Where the rows of q heads `q`, then k and v of kv heads `kv`, lie in a fused tensor of `layout`.

    Half-open row ranges in that order, neighbours merged.
    """
    group = num_heads // num_kv_heads
    if layout is QkvLayout.CONCAT:
        starts = [*q, *(num_heads + j for j in kv), *(num_heads + num_kv_heads + j for j in kv)]
    else:
        starts = [n // group * (group + 2) + n % group for n in q]
        starts += [j * (group + 2) + group for j in kv] + [j * (group + 2) + group + 1 for j in kv]
    return merged([(start * head_dim, (start + 1) * head_dim) for start in starts])


def merged(ranges: Ranges) -> Ranges:
    """The same ranges, with those as one that follow each other."""
    found = [ranges[0]]
    for start, stop in ranges[1:]:
        if start == found[-1][1]:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
