"""The matrices of a mixture's experts, as a rank holds them: from tensors of each expert's own, or from stacks of all.

Of a stack, a rank reads what it holds, expert by expert. Left out: tensors of all experts that lie beside each other
as those of one (`FusedRows`), of which `weights.py` reads an expert.

Shapes: E experts, D model width, W width of an expert, F this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from server.arch.names import Stack
from server.arch.spec import Moe
from server.checkpoint.formats.protocol import Part, Ranges, Tensors, refuse_overflow
from server.checkpoint.random_weights import RandomCheckpoint
from server.checkpoint.weights import Checkpoint, CheckpointError, Piece, Weights
from server.quantisation.stored import Stored, joined, rows_taken_apart


@dataclass(frozen=True)
class SeparateExperts:
    """Experts whose matrices and biases have tensors of their own. hidden: D."""

    weights: Weights
    kind: Moe
    hidden: int

    def gate_up(self, expert: int) -> Stored:
        """[gate | up] of one expert, [2 F, D], or up [F, D] where experts are not gated. Raises CheckpointError."""
        size, part = (self.kind.width, self.hidden), [self.weights.shard.range(self.kind.width)]
        if not self.kind.gated:
            return self.weights.linear("expert_up", size, rows=part, expert=expert)
        roles = ("expert_gate", "expert_up")
        both = joined([self.weights.linear(role, size, rows=part, expert=expert) for role in roles])
        if both is None:
            raise CheckpointError(
                f"gate and up of expert {expert} are not quantised alike (codes, groups, or scales of inputs), which "
                "is not served: quantise both in one way"
            )
        return both

    def down(self, expert: int) -> Stored:
        """[D, F] of one expert."""
        size, part = (self.hidden, self.kind.width), self.weights.shard.range(self.kind.width)
        return self.weights.linear("expert_down", size, columns=part, expert=expert)

    def gate_up_pieces(self, expert: int) -> list[Piece]:
        """What `gate_up` is made of."""
        size, part = (self.kind.width, self.hidden), [self.weights.shard.range(self.kind.width)]
        roles = ("expert_gate", "expert_up") if self.kind.gated else ("expert_up",)
        return [self._piece(role, size, expert, rows=part) for role in roles]

    def down_pieces(self, expert: int) -> list[Piece]:
        """What `down` is made of."""
        size, part = (self.hidden, self.kind.width), self.weights.shard.range(self.kind.width)
        return [self._piece("expert_down", size, expert, columns=part)]

    def _piece(self, role: str, size: tuple[int, int], expert: int, **part: Any) -> Piece:
        return self.weights.piece(role, size, expert=expert, num_experts=self.kind.num_experts, **part)

    def gate_up_bias(self) -> Tensor:
        """[E, 2 F], as the matrices are."""
        part, roles = [self.weights.shard.range(self.kind.width)], ("expert_gate", "expert_up")
        return torch.stack([torch.cat([self._bias(role, part, e) for role in roles]) for e in self._numbers])

    def down_bias(self) -> Tensor:
        """[E, D]."""
        return torch.stack([self._bias("expert_down", [(0, self.hidden)], e) for e in self._numbers])

    @property
    def _numbers(self) -> range:
        return range(self.kind.num_experts)

    def _bias(self, role: str, part: Ranges, expert: int) -> Tensor:
        size = self.hidden if role == "expert_down" else self.kind.width
        return self.weights.vector(role, size, suffix="bias", ranges=part, expert=expert)


@dataclass(frozen=True)
class StackedExperts:
    """Experts whose matrices, and biases, lie in one tensor for all. hidden: D."""

    weights: Weights
    kind: Moe
    hidden: int

    def gate_up(self, expert: int) -> Stored:
        """[gate | up] of one expert, [2 F, D]."""
        stack, size = self._stack("expert_gate_up"), (2 * self.kind.width, self.hidden)
        rows = self._matrix(stack, expert, Part(size, self._rows(stack), (0, self.hidden)))
        return rows_taken_apart(rows) if stack.interleaved else rows

    def down(self, expert: int) -> Stored:
        """[D, F] of one expert."""
        size, columns = (self.hidden, self.kind.width), self.weights.shard.range(self.kind.width)
        return self._matrix(self._stack("expert_down"), expert, Part(size, [(0, self.hidden)], columns))

    def gate_up_pieces(self, expert: int) -> list[Piece]:
        """What `gate_up` is made of."""
        stack, size = self._stack("expert_gate_up"), (2 * self.kind.width, self.hidden)
        rows = self._rows(stack)
        if stack.interleaved:
            (first, last), *_ = rows
            rows = [(row, row + 1) for half in range(2) for row in range(first + half, last, 2)]
        return [self._piece("expert_gate_up", stack, size, expert, rows, (0, size[1]))]

    def down_pieces(self, expert: int) -> list[Piece]:
        """What `down` is made of."""
        stack, size = self._stack("expert_down"), (self.hidden, self.kind.width)
        columns = self.weights.shard.range(self.kind.width)
        return [self._piece("expert_down", stack, size, expert, [(0, size[0])], columns)]

    def _piece(
        self,
        role: str,
        stack: Stack,
        size: tuple[int, int],
        expert: int,
        rows: Ranges,
        columns: tuple[int, int],
    ) -> Piece:
        read, num_experts = partial(self._exact, stack, expert, size), self.kind.num_experts
        piece = Piece(role, (stack.name,), size, rows, columns, 0, read, expert=expert, num_experts=num_experts)
        return replace(piece, is_turned=stack.turned)

    def _exact(self, stack: Stack, expert: int, size: tuple[int, int], rows: Ranges) -> Tensor:
        """Whole rows of an expert's matrix as it computes, in float32."""
        exact = replace(self, weights=replace(self.weights, dtype=torch.float32))
        stored = exact._matrix(stack, expert, Part(size, rows, (0, size[1])))
        return stored if isinstance(stored, Tensor) else stored.dequantised().float()

    def gate_up_bias(self) -> Tensor:
        """[E, 2 F], as the matrices are."""
        stack = self._stack("expert_gate_up")
        biases = self._biases(stack, 2 * self.kind.width, self._rows(stack))
        return torch.cat([biases[:, ::2], biases[:, 1::2]], dim=1) if stack.interleaved else biases

    def down_bias(self) -> Tensor:
        """[E, D]."""
        return self._biases(self._stack("expert_down"), self.hidden, [(0, self.hidden)])

    def _stack(self, role: str) -> Stack:
        stack = self.weights.names.stacks[role]
        return replace(stack, name=self.weights.prefix + stack.name.format(i=self.weights.layer))

    def _rows(self, stack: Stack) -> Ranges:
        """This rank's rows of gate and up, as they lie in the checkpoint."""
        (start, stop), width = self.weights.shard.range(self.kind.width), self.kind.width
        return [(2 * start, 2 * stop)] if stack.interleaved else [(start, stop), (width + start, width + stop)]

    def _biases(self, stack: Stack, size: int, ranges: Ranges) -> Tensor:
        weights, shape = self.weights, (self.kind.num_experts, size)
        read = [
            weights.checkpoint.read(f"{stack.name}_bias", shape, dim=1, part=part, dtype=weights.dtype)
            for part in ranges
        ]
        return torch.cat(read, dim=1).to(weights.device)

    def _matrix(self, stack: Stack, expert: int, part: Part) -> Stored:
        weights = self.weights
        if (tensors := self._quantised(stack, expert, part.size)) is not None and weights.format is not None:
            stored = weights.format.read(tensors, part)
            refuse_overflow(tensors.name, stored)
            return stored.to(weights.device)
        if weights.quantise is None:
            return self._dense(stack, expert, part, weights.dtype)
        # A row's scale is that of the whole row, so that the number of ranks changes nothing.
        whole = replace(part, columns=(0, part.size[1]))
        quantised = weights.quantise(self._dense(stack, expert, whole, torch.float32))
        return quantised if part.columns == whole.columns else quantised.columns(*part.columns)

    def _quantised(self, stack: Stack, expert: int, size: tuple[int, int]) -> Tensors | None:
        """The tensors of an expert's matrix that the checkpoint's format stores; None where it is dense."""
        weights, checkpoint = self.weights, self.weights.checkpoint
        if weights.format is None:
            return None
        if isinstance(checkpoint, RandomCheckpoint):
            return None if weights.format.leaves_out(stack.name) else Tensors(checkpoint.of_layer(size), stack.name)
        tensors = Tensors(OneExpert(checkpoint, expert, self.kind.num_experts), stack.name)
        return tensors if weights.format.has(tensors) else None

    def _dense(self, stack: Stack, expert: int, part: Part, dtype: torch.dtype) -> Tensor:
        """A part, cut along one dimension at most, of a matrix that is not quantised."""
        (outputs, inputs), count = part.size, self.kind.num_experts
        shape, of_rows = ((count, inputs, outputs), 2) if stack.transposed else ((count, outputs, inputs), 1)
        dim, ranges = (3 - of_rows, [part.columns]) if part.columns != (0, inputs) else (of_rows, part.rows)
        one = {0: (expert, expert + 1)}
        read = [
            self.weights.checkpoint.read(stack.name, shape, dim=dim, part=piece, within=one, dtype=dtype)[0]
            for piece in ranges
        ]
        whole = torch.cat([matrix.t() if stack.transposed else matrix for matrix in read], 0 if dim == of_rows else 1)
        return whole.to(self.weights.device).contiguous()


@dataclass(frozen=True)
class OneExpert:
    """A `Source` of one expert's tensors: its `X.blocks` is its part of the checkpoint's `X_blocks`."""

    checkpoint: Checkpoint
    expert: int
    count: int

    def __contains__(self, name: str) -> bool:
        return _stacked(name) in self.checkpoint

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Without the dimension of the experts."""
        return self.checkpoint.shape_of(_stacked(name))[1:]

    def note_of(self, name: str) -> str | None:
        """What the metadata of the files says of all experts."""
        return self.checkpoint.note_of(_stacked(name))

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        part: tuple[int, int] | None = None,
        dtypes: Sequence[torch.dtype] = (),
        mapped: bool = False,
    ) -> Tensor:
        """As of a checkpoint: neither shape nor dim count the dimension of the experts."""
        whole, one = (self.count, *shape), {0: (self.expert, self.expert + 1)}
        return self.checkpoint.read(
            _stacked(name), whole, dim=dim + 1, part=part, within=one, dtypes=dtypes, mapped=mapped
        )[0]


def _stacked(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{stem}_{suffix}"
