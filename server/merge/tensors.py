"""What each tensor of a checkpoint becomes when an adapter is merged into it.

A matrix is seen as a layer that one rank has whole, so that what changes it is found as it is for serving
(`server/adapters/changes.py`); other tensors are replaced, or stay. A head that is tied to the table gets a tensor of
its own where the adapter makes it another one than the table.

Shapes: F outputs, D inputs, V tokens, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from server.adapters.changes import Changes
from server.adapters.config import AdapterError
from server.adapters.files import AdapterFiles, Module
from server.adapters.names import experts_of, plain_name
from server.arch.names import NameMap
from server.backends.protocol import EmbeddingChange, LinearChange
from server.checkpoint.formats.protocol import Ranges
from server.checkpoint.weights import STORED_FLOATS, Checkpoint, Piece

HEAD = "head"  # the role of a head that is tied
CHUNK_NUMBERS = 1 << 24  # of a matrix that are computed together, in float32
# What experts' matrices are called, by role: each expert's own, and those of all.
ROLES = {
    **dict.fromkeys(("w1", "gate_proj"), "expert_gate"),
    **dict.fromkeys(("w3", "up_proj"), "expert_up"),
    **dict.fromkeys(("w2", "down_proj", "output_linear"), "expert_down"),
    **dict.fromkeys(("gate_up_proj", "input_linear"), "expert_gate_up"),
}
OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class Layout:
    """What is known of a checkpoint beside its names. table, head: without `.weight`, which a tied head has not."""

    table: str | None
    head: str
    is_tied: bool
    has_encoder: bool = False
    names: NameMap | None = None  # None: of no family

    def is_transposed(self, stem: str) -> bool | None:
        """Whether a matrix is stored as [inputs, outputs]; None: its family is not known."""
        if self.names is None:
            return None
        return self.names.transposed and stem not in (self.table, self.head)

    def is_stack_transposed(self, role: str) -> bool:
        """The same of a tensor of all experts, as PEFT sees it."""
        stack = None if self.names is None else self.names.stacks.get(role)
        return stack is not None and stack.transposed and not stack.turned


class Merging:
    """Gives the merged tensors; then `finish` raises AdapterError for what found no place."""

    def __init__(self, checkpoint: Checkpoint, files: AdapterFiles, layout: Layout) -> None:
        self._checkpoint = checkpoint
        self._files = files
        self._layout = layout
        self._changes = Changes(files, torch.float32)
        self._num_experts = _num_experts(checkpoint.names())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one after the other. Raises AdapterError."""
        head = f"{self._layout.head}.weight"
        for name in sorted(self._checkpoint.names()):
            if not (self._layout.is_tied and name == head):  # stored twice
                yield name, self._merged(name)
        if self.unties:
            yield head, self._matrix(self._tied_head)

    def finish(self) -> None:
        """Raise AdapterError if tensors of the adapter have no place in the checkpoint."""
        for module in self._files.modules.values():
            lacking = [part for part in ("bias", "up_bias") if part in module.parts]
            if lacking and plain_name(module.name) not in self._biased:
                raise AdapterError(
                    f"{self._files.told(module.parts[lacking[0]])} is of a layer that has no bias in the model: serve "
                    "the adapter beside the model"
                )
        self._changes.refuse_leftovers()

    @cached_property
    def num_tokens(self) -> int | None:
        """Of the merged model's vocabulary, where the adapter has another; None: it has not."""
        layout, found = self._layout, set()
        for stem in (layout.table, layout.head):
            if stem is not None and (module := self._files.modules.get(plain_name(stem))) is not None:
                found |= self._sizes(module)
        if len(found) > 1:
            sizes = " and ".join(map(str, sorted(found)))
            raise AdapterError(
                f"{self._files.folder} has tables of {sizes} tokens, which must have as many: it is damaged"
            )
        return next(iter(found - {self._num_stored}), None)

    @cached_property
    def unties(self) -> bool:
        """Whether the head is no longer the table. Raises AdapterError where it must be."""
        layout = self._layout
        if not layout.is_tied or layout.table is None or self._same_for_head:
            return False
        if layout.has_encoder:
            raise AdapterError(
                f"the adapter in {self._files.folder} makes the head another one than the table, and the model scales "
                "what a head gets that is tied to its table: serve the adapter beside the model"
            )
        return True

    @property
    def _same_for_head(self) -> bool:
        layout = self._layout
        assert layout.table is not None
        if not {plain_name(layout.table), plain_name(layout.head)} & self._files.modules.keys():
            return True
        table, head = self._matrix(self._piece(layout.table)), self._matrix(self._tied_head)
        return torch.allclose(table.float(), head.float(), rtol=1e-5, atol=1e-6)

    @cached_property
    def _num_stored(self) -> int | None:
        table = self._layout.table
        return None if table is None else self._checkpoint.shape_of(f"{table}.weight")[0]

    def _sizes(self, module: Module) -> set[int]:
        """How many tokens an adapter's tensors of a table or a head are of, if they say so."""
        dims = {"weight": 0, "table_down": 1, "up": 0}
        return {self._files.shape_of(module.parts[part])[dim] for part, dim in dims.items() if part in module.parts}

    def _merged(self, name: str) -> Tensor:
        stem, _, suffix = name.rpartition(".")
        shape, dtype = self._checkpoint.shape_of(name), self._checkpoint.dtype_of(name)
        module = self._files.modules.get(plain_name(stem))
        if dtype not in STORED_FLOATS:
            return self._checkpoint.read(name, shape, dtypes=[dtype])
        if len(shape) == 3 and (role := ROLES.get(_last(name.removesuffix(".weight")))) is not None:
            return self._experts(name, role)
        if suffix == "weight" and len(shape) == 2:
            return self._matrix(self._piece(stem))
        if module is not None and suffix == "bias" and len(shape) == 1:
            return self._bias(module, name)
        if module is not None and suffix == "weight" and "weight" in module.parts:
            return self._changes.saved(module.parts["weight"], shape).to(dtype)
        return self._checkpoint.read(name, shape)

    def _bias(self, module: Module, name: str) -> Tensor:
        shape, dtype = self._checkpoint.shape_of(name), self._checkpoint.dtype_of(name)
        if _is(name.removesuffix(".bias"), self._layout.head) and self.num_tokens is not None:
            shape = (self.num_tokens,)
        if "bias" in module.parts:
            bias = self._changes.saved(module.parts["bias"], shape).float()
        else:
            bias = self._checkpoint.read(name, self._checkpoint.shape_of(name), dtype=torch.float32)
        if "up_bias" in module.parts:
            scale = self._files.config.scale_of(module.name)
            bias = bias + scale * self._changes.saved(module.parts["up_bias"], shape).float()
        self._biased.add(plain_name(module.name))
        return bias.to(dtype)

    @cached_property
    def _biased(self) -> set[str]:
        """Plain names of modules whose bias has been merged."""
        return set()

    def _piece(self, stem: str) -> Piece:
        """A matrix as a layer that is there whole."""
        name = f"{stem}.weight"
        shape = self._checkpoint.shape_of(name)
        is_transposed = self._is_transposed(stem, shape)
        size = (shape[1], shape[0]) if is_transposed else (shape[0], shape[1])
        if self.num_tokens is not None and stem in (self._layout.table, self._layout.head):
            size = (self.num_tokens, size[1])
        read = partial(self._read, name, is_transposed, size[0])
        piece = Piece("", (stem,), size, [(0, size[0])], (0, size[1]), 0, read, is_transposed=is_transposed)
        if (found := OF_EXPERT.fullmatch(stem)) and (role := ROLES.get(found[3])) is not None:
            return replace(piece, role=role, expert=int(found[2]), num_experts=self._num_experts[found[1]])
        return piece

    @property
    def _tied_head(self) -> Piece:
        """The head, whose rows are the table's."""
        assert self._layout.table is not None
        return replace(self._piece(self._layout.table), role=HEAD, names=(self._layout.head,))

    def _is_table(self, stem: str) -> bool:
        """Whether a matrix is the vocabulary's table, or another one that the adapter changes as one."""
        module = self._files.modules.get(plain_name(stem))
        return stem == self._layout.table or (module is not None and "table_down" in module.parts)

    def _is_transposed(self, stem: str, shape: Sequence[int]) -> bool:
        if self._is_table(stem):
            return False
        known, module = self._layout.is_transposed(stem), self._files.modules.get(plain_name(stem))
        if known is not None or module is None or "down" not in module.parts:
            return bool(known)
        size = self._files.shape_of(module.parts["up"])[0], self._files.shape_of(module.parts["down"])[1]
        return size != tuple(shape) and size == tuple(shape)[::-1]

    def _read(self, name: str, is_transposed: bool, outputs: int, ranges: Ranges) -> Tensor:
        """Rows of a matrix in float32; zeros behind its last one, up to so many."""
        shape = self._checkpoint.shape_of(name)
        found = []
        for start, stop in ranges:
            dim = 1 if is_transposed else 0
            last = min(stop, shape[dim])
            part = (min(start, last), last)
            rows = self._checkpoint.read(name, shape, dim=dim, part=part, dtype=torch.float32)
            rows = rows.t() if is_transposed else rows
            found.append(F.pad(rows, (0, 0, 0, stop - start - len(rows))))
        return torch.cat(found)

    def _matrix(self, piece: Piece) -> Tensor:
        """A merged matrix, as the checkpoint has it."""
        table = self._layout.table
        name = f"{table if piece.role == HEAD else piece.names[0]}.weight"
        changed = self._change(piece)
        if changed is None and piece.size[0] == self._read_size(name, piece):
            return self._checkpoint.read(name, self._checkpoint.shape_of(name))
        merged = torch.empty(piece.size, dtype=self._checkpoint.dtype_of(name))
        step = max(1, CHUNK_NUMBERS // piece.size[1])
        for start in range(0, piece.size[0], step):
            part = replace(piece, rows=[(start, min(start + step, piece.size[0]))])
            merged[start : start + step] = part.base() if changed is None else changed(part)
        return merged.t().contiguous() if piece.is_transposed else merged

    def _change(self, piece: Piece) -> Callable[[Piece], Tensor] | None:
        """What gives some rows of a merged matrix, in float32; None: the adapter does not change it."""
        table = self._layout.table
        if self._is_table(piece.names[0]):
            found = self._changes.embedding(piece, is_resized=self.num_tokens is not None)
            return None if found is None else partial(_changed_table, found)
        if piece.role == HEAD:
            return partial(self._changed, None if table is None else self._piece(table))
        names = {plain_name(piece.names[0])} | ({experts_of(piece.names[0])} if piece.expert is not None else set())
        return partial(self._changed, None) if names & self._files.modules.keys() else None

    def _read_size(self, name: str, piece: Piece) -> int:
        return self._checkpoint.shape_of(name)[1 if piece.is_transposed else 0]

    def _changed(self, tied_to: Piece | None, piece: Piece) -> Tensor:
        return _apply(self._changes.linear([piece], tied_to=tied_to), piece.base())

    def _experts(self, name: str, role: str) -> Tensor:
        """A tensor of all experts, [E, F, D] or [E, D, F]."""
        stem = name.removesuffix(".weight")
        shape, dtype = self._checkpoint.shape_of(name), self._checkpoint.dtype_of(name)
        whole = self._checkpoint.read(name, shape)
        module = self._files.modules.get(experts_of(stem))
        if module is None:
            return whole
        sizes = {
            (self._files.shape_of(parts["up"])[0], self._files.shape_of(parts["down"])[1])
            for parts in (module.parts, *module.layers.values())
            if "down" in parts
        }
        is_other = tuple(shape[:0:-1]) in sizes  # which says nothing where it is square
        is_transposed = is_other and (tuple(shape[1:]) not in sizes or self._layout.is_stack_transposed(role))
        size = (shape[2], shape[1]) if is_transposed else (shape[1], shape[2])
        for expert in range(shape[0]):
            matrix = whole[expert].t() if is_transposed else whole[expert]
            piece = Piece(
                *(role, (stem,), size, [(0, size[0])], (0, size[1]), 0, partial(_rows, matrix)),
                expert=expert,
                num_experts=shape[0],
            )
            matrix.copy_(_apply(self._changes.linear([piece]), matrix.float()).to(dtype))
        return whole


def _num_experts(names: Iterator[str]) -> dict[str, int]:
    """How many experts have matrices of their own, by the module that they are in."""
    found: dict[str, int] = {}
    for name in names:
        if one := OF_EXPERT.fullmatch(name.removesuffix(".weight")):
            found[one[1]] = max(found.get(one[1], 0), int(one[2]) + 1)
    return found


def _apply(change: LinearChange | None, weight: Tensor) -> Tensor:
    """A changed weight [F, D], in float32. What is added to its product is no part of it."""
    if change is None:
        return weight
    merged = weight if change.gain is None else weight * change.gain.unsqueeze(1)
    for part in change.parts:
        rows = slice(part.first, part.first + len(part.up))
        merged[rows] += part.scale * (part.up if part.down is None else part.up @ part.down)
    return merged


def _changed_table(change: EmbeddingChange | None, piece: Piece) -> Tensor:
    """Rows of a changed table, in float32."""
    ((start, stop),), rows = piece.rows, piece.base()
    if change is None:
        return rows
    if change.gain is not None:
        rows = rows * change.gain
    if change.ids is not None and change.rows is not None:
        own = (change.ids >= start) & (change.ids < stop)
        rows[change.ids[own] - start] = change.rows[own]
    if change.down is not None and change.up is not None:
        rows = rows + change.scale * (change.down[start:stop] @ change.up)
    return rows


def _rows(matrix: Tensor, ranges: Ranges) -> Tensor:
    return torch.cat([matrix[start:stop] for start, stop in ranges]).float()


def _is(stem: str, other: str) -> bool:
    return plain_name(stem) == plain_name(other)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
