"""From a StepRequest to the tensors of one forward pass.

Keeps the host's side of every sequence (progress, how its tokens are chosen) and, in tables on the device, what a
decode needs to know of it, with the one thing that the host does not know in time: the last token, which the step
before may only just have sampled. So a decode step is laid out by the device alone, from rows of the tables and
positions. What a step computes is decided by the router; this module only lays it out.

Shapes: T tokens in the step, S sequences in the step, R of them that get a token, B blocks of the longest block table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from server.backends.protocol import Device, StepMeta
from server.blocks import BLOCK_SIZE, num_blocks
from server.pb import generate_pb2 as pb
from server.stepping.sampling import History, Sampler, TokenChoice, Watermark
from server.stepping.vocabulary import Vocabulary

# Sequences that the device's tables have room for before they grow, which drops all graphs; more if a graph takes more.
FIRST_SEQUENCES = 256


class StepError(ValueError):
    """A request that breaks the contract of the wire: names the sequence."""


@dataclass
class SequenceState:
    """One sequence on this rank."""

    id: int
    row: int  # of the device's tables, never 0
    prompt: list[int]
    prompt_length: int  # tokens of the client's prompt; what `prompt` holds beyond them was generated before
    computed: int  # tokens whose keys and values are in the cache
    choice: TokenChoice
    history: History | None
    prompt_logprobs: bool
    encoder_tokens: list[int]  # of an encoder-decoder: what its encoder reads
    encoder_row: int  # of the device's tables, where the encoder's blocks are; without an encoder the same as `row`
    own_cache: Any = None  # what a model without paged cache keeps of it

    @property
    def rows(self) -> set[int]:
        """All its rows of the device's tables."""
        return {self.row, self.encoder_row}

    @property
    def remaining(self) -> int:
        """Prompt tokens not yet computed."""
        return max(0, len(self.prompt) - self.computed)


@dataclass(frozen=True)
class TokenRun:
    """The tokens [start, start + count) of one sequence, which a step computes."""

    sequence: SequenceState
    start: int
    count: int

    @property
    def yields_token(self) -> bool:
        """Whether the whole prompt is computed after this run, so that the next token is sampled."""
        return self.start + self.count >= len(self.sequence.prompt)


@dataclass(frozen=True)
class RowRun:
    """Tokens [start, start + count) of a sequence whose blocks are in `row` of the tables."""

    row: int
    start: int
    count: int
    prompt_length: int


@dataclass(frozen=True)
class Encoding:
    """The prompts that an encoder reads in a step, E tokens in all."""

    token_ids: Tensor  # [E]
    meta: StepMeta


@dataclass(frozen=True)
class Forward:
    """Everything that the model reads in one pass."""

    runs: Sequence[TokenRun]  # decodes first; empty in a graph, whose sequences the host does not know
    token_ids: Tensor  # [T]
    meta: StepMeta
    encoding: Encoding | None  # None: no prompt is encoded in this step
    cross: StepMeta | None  # of an encoder-decoder: the step's tokens, attending to their encoded prompts


@dataclass(frozen=True)
class StepInput:
    """A pass and what is chosen from its logits."""

    forward: Forward
    sampled: list[SequenceState]  # the R sequences that get a token, in the order of `sample_at`
    sample_at: Tensor  # [R] index in [T] of the token whose logits choose the next
    sample_rows: Tensor  # [R] rows of `sampled`


@dataclass(frozen=True)
class StepRuns:
    """Whose tokens a step computes."""

    decodes: list[TokenRun]
    chunks: list[TokenRun]


@dataclass(frozen=True)
class Tables:
    """What the device keeps of every sequence, by row. Row 0 is no sequence's: it fills up the batches of graphs."""

    last_tokens: Tensor  # [rows]
    blocks: Tensor  # [rows, B]
    prompt_lengths: Tensor  # [rows]
    encoder_rows: Tensor  # [rows] of an encoder-decoder: the row of its encoder's blocks
    encoder_lengths: Tensor  # [rows] of an encoder-decoder: tokens that those blocks hold

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> Tables:
        """For sequences of at most `width` blocks."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(zeros(rows), zeros(rows, width), zeros(rows), zeros(rows), zeros(rows))

    def grown(self, rows: int, width: int) -> Tables:
        """A copy with room for more."""
        copy = Tables.empty(rows, width, self.blocks.device)
        for field_ in fields(self):
            old, new = getattr(self, field_.name), getattr(copy, field_.name)
            new[tuple(slice(size) for size in old.shape)] = old
        return copy

    def decodes(self, rows: Tensor, positions: Tensor, *, has_encoder: bool) -> Forward:
        """The next token of the sequences in `rows` [S], which stands at `positions` [S].

        In tensors alone, so that a captured step lays itself out: what only the host knows is left empty.
        """
        is_real = rows > 0
        blocks = self.blocks[rows]
        slots = (
            blocks.gather(1, (positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1) * BLOCK_SIZE + positions % BLOCK_SIZE
        )
        meta = StepMeta(
            num_decodes=len(rows),
            query_starts=list(range(len(rows) + 1)),
            context_lengths=[],
            longest=0,
            starts=torch.empty(0, dtype=torch.int32, device=rows.device),  # of use to prompts alone
            positions=positions,
            visible=(positions + 1) * is_real,
            prompt_lengths=self.prompt_lengths[rows],
            slots=torch.where(is_real, slots, -1),
            block_tables=blocks,
        )
        return Forward([], self.last_tokens[rows], meta, None, self._cross(rows, meta) if has_encoder else None)

    def _cross(self, rows: Tensor, meta: StepMeta) -> StepMeta:
        return replace(meta, visible=self.encoder_lengths[rows], block_tables=self.blocks[self.encoder_rows[rows]])


@dataclass
class SequenceTable:
    """All sequences of this rank, with their rows of the device's tables, which grow as needed."""

    num_blocks: int
    watermark: Watermark
    device: Device
    vocabulary: Vocabulary
    has_encoder: bool = False
    longest: int = 1  # blocks of the longest sequence that is expected
    most: int = FIRST_SEQUENCES  # sequences that the tables have room for at first
    sequences: dict[int, SequenceState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = self.most * (1 + self.has_encoder) + 1
        self.tables = Tables.empty(rows, self.longest, self.device.torch_device)
        self.free_rows = list(range(rows - 1, 0, -1))
        self._samplers: dict[int, tuple[list[TokenChoice], Sampler]] = {}

    def apply(self, request: pb.StepRequest) -> StepRuns | None:
        """Retire and add, and plan the step, whose tokens count as computed from now on; None when it computes nothing.

        Raises StepError, before anything changes, for a request that breaks the contract.
        """
        self._check(request)
        self._forget(request.retire)
        for new in request.add:
            self._add(new)
        decodes = [TokenRun(s, s.computed, 1) for s in self._complete()] if request.decode else []
        chunks = [
            TokenRun(self.sequences[id], self.sequences[id].computed, count)
            for id, count in zip(request.chunk_ids, request.chunk_tokens, strict=True)
            if id in self.sequences
        ]
        if not decodes and not chunks:
            return None
        for run in decodes + chunks:
            run.sequence.computed += run.count
        return StepRuns(decodes, chunks)

    def drop(self, request: pb.StepRequest) -> None:
        """Forget every sequence that a failed step touched."""
        if request.decode:
            self._forget([s.id for s in self._complete()])
        self._forget([*request.chunk_ids, *(new.id for new in request.add)])

    def _complete(self) -> list[SequenceState]:
        """Sequences whose prompt is computed: those that decode."""
        return [s for s in self.sequences.values() if not s.remaining]

    def _forget(self, ids: Iterable[int]) -> None:
        # Ids that a failed step dropped may still be named by the request that was in flight behind it.
        for id in ids:
            if sequence := self.sequences.pop(id, None):
                self.free_rows.extend(sequence.rows)

    def _check(self, request: pb.StepRequest) -> None:
        for new in request.add:
            if new.id in self.sequences:
                raise StepError(f"sequence {new.id} is on this shard already")
            if bool(new.encoder_token_ids) != self.has_encoder:
                raise StepError(f"sequence {new.id} {'lacks' if self.has_encoder else 'has'} tokens for an encoder")
            if not new.token_ids or max([*new.token_ids, *new.encoder_token_ids]) >= self.vocabulary.size:
                raise StepError(f"sequence {new.id} needs token ids below the vocabulary size, {self.vocabulary.size}")
            if not new.blocks or max([*new.blocks, *new.encoder_blocks]) >= self.num_blocks:
                raise StepError(f"sequence {new.id} needs blocks below {self.num_blocks}")
            if num_blocks(len(new.encoder_token_ids)) > len(new.encoder_blocks):
                raise StepError(f"sequence {new.id} needs {num_blocks(len(new.encoder_token_ids))} encoder blocks")
        if not request.chunk_ids:
            return
        remaining = {id: s.remaining for id, s in self.sequences.items()}
        remaining |= {new.id: len(new.token_ids) - new.computed for new in request.add}
        for id, count in zip(request.chunk_ids, request.chunk_tokens, strict=True):
            if id in remaining and not 0 < count <= remaining[id]:
                raise StepError(f"sequence {id} has {remaining[id]} prompt tokens left, not {count}")

    def _add(self, new: pb.NewSequence) -> None:
        row = self._take_row(new.blocks)
        encoder_row = self._take_row(new.encoder_blocks) if self.has_encoder else row
        self.tables.prompt_lengths[row] = len(new.token_ids) - new.generated
        self.tables.encoder_rows[row] = encoder_row
        self.tables.encoder_lengths[row] = len(new.encoder_token_ids)
        choice = _choice(new)
        prompt = list(new.token_ids)
        self.sequences[new.id] = SequenceState(
            id=new.id,
            row=row,
            prompt=prompt,
            prompt_length=len(prompt) - new.generated,
            computed=new.computed,
            choice=choice,
            history=History(prompt, new.generated, self.vocabulary, self.device) if choice.needs_history else None,
            prompt_logprobs=new.prompt_logprobs,
            encoder_tokens=list(new.encoder_token_ids),
            encoder_row=encoder_row,
        )

    def _take_row(self, blocks: Sequence[int]) -> int:
        """A free row that holds `blocks`, after growing the tables if there is none or if they do not fit."""
        rows, width = self.tables.blocks.shape
        if not self.free_rows:
            self.free_rows = list(range(2 * rows - 1, rows - 1, -1))
            self.tables = self.tables.grown(2 * rows, width)
        if len(blocks) > width:
            self.tables = self.tables.grown(len(self.tables.blocks), max(len(blocks), 2 * width))
        row = self.free_rows.pop()
        self.tables.blocks[row, : len(blocks)] = self._tensor(list(blocks))
        return row

    def lay_out(self, plan: StepRuns) -> StepInput:
        """Any step, from what the host knows."""
        decodes, chunks = plan.decodes, plan.chunks
        runs = decodes + chunks
        rows = self._tensor([r.sequence.row for r in runs])
        meta = self._meta(
            [RowRun(r.sequence.row, r.start, r.count, r.sequence.prompt_length) for r in runs], len(decodes)
        )
        sampled = [i for i, r in enumerate(runs) if r.yields_token]
        forward = Forward(
            runs=runs,
            token_ids=self._token_ids(chunks, rows[: len(decodes)]),
            meta=meta,
            encoding=self._encoding([r.sequence for r in chunks if r.start == 0]) if self.has_encoder else None,
            cross=self._cross(runs, meta) if self.has_encoder else None,
        )
        return StepInput(
            forward=forward,
            sampled=[runs[i].sequence for i in sampled],
            sample_at=self._tensor([meta.query_starts[i + 1] - 1 for i in sampled]),
            sample_rows=rows[sampled],
        )

    def _encoding(self, sequences: list[SequenceState]) -> Encoding | None:
        """The prompts of `sequences`, each token seeing all of its prompt."""
        if not sequences:
            return None
        lengths = [len(s.encoder_tokens) for s in sequences]
        meta = self._meta([RowRun(s.encoder_row, 0, n, n) for s, n in zip(sequences, lengths, strict=True)], 0)
        token_ids = self._tensor([id for s in sequences for id in s.encoder_tokens])
        return Encoding(token_ids, replace(meta, visible=meta.prompt_lengths))

    def _cross(self, runs: list[TokenRun], meta: StepMeta) -> StepMeta:
        """The tokens of `meta` with the encoded prompts as their context. Nothing is written there."""
        lengths = [len(r.sequence.encoder_tokens) for r in runs]
        rows = self._tensor([r.sequence.encoder_row for r in runs])
        return replace(
            meta,
            context_lengths=lengths,
            visible=self._per_token(lengths, [r.count for r in runs]),
            block_tables=self.tables.blocks[rows, : num_blocks(max(lengths))],
        )

    def _token_ids(self, chunks: list[TokenRun], decode_rows: Tensor) -> Tensor:
        """[T]: the last tokens of what decodes, taken on the device, then the chunks'."""
        prompts = [id for r in chunks for id in r.sequence.prompt[r.start : r.start + r.count]]
        return torch.cat([self.tables.last_tokens[decode_rows], self._tensor(prompts)])

    def _meta(self, runs: list[RowRun], num_decodes: int) -> StepMeta:
        """Where the tokens of `runs` stand, each seeing its sequence up to itself."""
        counts = [run.count for run in runs]
        starts = list(accumulate(counts, initial=0))
        lengths = [run.start + run.count for run in runs]
        tables = self.tables.blocks[self._tensor([run.row for run in runs]), : num_blocks(max(lengths))]
        positions = self._tensor([p for run in runs for p in range(run.start, run.start + run.count)])
        owner = self._per_token(list(range(len(runs))), counts)
        return StepMeta(
            num_decodes=num_decodes,
            query_starts=starts,
            context_lengths=lengths,
            longest=max(counts[num_decodes:], default=0),
            starts=self.device.upload(starts, torch.int32),
            positions=positions,
            visible=positions + 1,
            prompt_lengths=self._per_token([run.prompt_length for run in runs], counts),
            slots=tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=tables,
        )

    def _per_token(self, values: list[int], counts: list[int]) -> Tensor:
        """Each of `values` as often as its sequence has tokens in the step: [T]."""
        return self._tensor([value for value, count in zip(values, counts, strict=True) for _ in range(count)])

    def sampler_for(self, sequences: list[SequenceState], part: int) -> Sampler:
        """The sampler of these sequences, which are those from `part` on of a step's.

        The last one of each part is kept, because most steps sample for the same ones.
        """
        choices = [s.choice for s in sequences]
        if part not in self._samplers or self._samplers[part][0] != choices:
            self._samplers[part] = choices, Sampler(choices, self.watermark, self.device, self.vocabulary)
        return self._samplers[part][1]

    def _tensor(self, values: list[int]) -> Tensor:
        return self.device.upload(values)


def _choice(new: pb.NewSequence) -> TokenChoice:
    sampling = new.sampling
    return TokenChoice(
        do_sample=sampling.do_sample,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        watermark=sampling.watermark,
        seed=sampling.seed,
        top_n_tokens=new.top_n_tokens,
    )
