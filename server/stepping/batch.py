"""From the runs of a step to the tensors of one forward pass.

Tables on the device keep what a pass needs to know of every sequence, among it the one thing that the host does not
know in time: the last token, which the step before may only just have sampled. So a decode step is laid out by the
device alone, from rows of the tables and positions; a step with prompts or drafts is laid out from one short list of
numbers, which is uploaded at once. Nothing here waits for the device.

Shapes: T tokens in the step, S sequences in the step, D of them that decode, R tokens that are chosen, W blocks of
the longest sequence that the tables have room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from server.arch.windows import Ring
from server.backends.device import Device
from server.backends.protocol import Rewind, StepMeta, TokenAdapters
from server.blocks import num_blocks
from server.stepping.sequences import Growth, SequenceState, StepRuns, TokenRun

# The columns of `Tables.entries`: the prompt's length, of an encoder-decoder the row of the encoder's blocks and the
# tokens that they hold, the row of its adapter, and then the blocks.
PROMPT_LENGTH, ENCODER_ROW, ENCODER_LENGTH, ADAPTER, BLOCKS = range(5)


@dataclass(frozen=True)
class Encoding:
    """The prompts that an encoder reads in a step, E tokens in all."""

    token_ids: Tensor  # [E]
    meta: StepMeta
    sequences: Sequence[SequenceState] = ()  # whose prompts they are


@dataclass(frozen=True)
class Carried:
    """What a pipeline stage hands on to the next one, D being the model's width."""

    hidden: Tensor  # [T, D]
    encoded: Tensor | None = None  # [E, D] what an encoder made of the step's prompts, where it read any


@dataclass(frozen=True)
class Forward:
    """Everything that the model reads in one pass."""

    runs: Sequence[TokenRun]  # decodes, drafts, prompts; empty in a graph, whose sequences the host does not know
    token_ids: Tensor  # [T]
    meta: StepMeta
    encoding: Encoding | None  # None: no prompt is encoded in this step
    cross: StepMeta | None  # of an encoder-decoder: the step's tokens, attending to their encoded prompts
    carried: Carried | None = None  # what the stage before made of all that; None: this is the first


@dataclass(frozen=True)
class StepInput:
    """A pass and what is chosen from its logits."""

    forward: Forward
    sampled: list[TokenRun]  # those that yield tokens, R in all, in the order of `sample_at`
    sample_at: Tensor  # [R] index in [T] of the token whose logits choose the next
    sample_rows: Tensor  # [R] the sequences' rows


@dataclass(frozen=True)
class Layout:
    """Whose tokens stand where in a step: numbers that are uploaded together, and the sizes that the host knows."""

    rows: list[int]  # [S] of the tables
    firsts: list[int]  # [S] position of each sequence's first token in the step
    starts: list[int]  # [S + 1] sequence s owns tokens starts[s] … starts[s + 1] - 1 of the step
    sampled: list[
        tuple[int, int]
    ]  # [R] of each token that is chosen: its sequence, and the token of the step before it
    token_ids: list[int]  # of the sequences that do not decode
    num_decodes: int  # the first D sequences, whose tokens the tables know
    blocks: int  # of the longest sequence

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int, int]], token_ids: list[int], num_decodes: int = 0) -> Layout:
        """Of runs (row, first position, tokens), decodes first."""
        rows, firsts, counts = (list(column) for column in zip(*runs, strict=True))
        reach = max(first + count for _, first, count in runs)
        return cls(rows, firsts, [0, *accumulate(counts)], [], token_ids, num_decodes, num_blocks(reach))

    @property
    def longest(self) -> int:
        """Most tokens of a sequence that does not decode, 0 where all do."""
        return max((b - a for a, b in pairwise(self.starts[self.num_decodes :])), default=0)

    @property
    def numbers(self) -> list[int]:
        """All that the device has to be told."""
        sampled_rows = [self.rows[s] for s, _ in self.sampled]
        sampled_at = [at for _, at in self.sampled]
        return [*self.rows, *self.firsts, *self.starts, *sampled_rows, *sampled_at, *self.token_ids]

    def sampling(self, counts: Sequence[int]) -> Layout:
        """The same layout, whose sequences get a token behind each of so many of their last ones."""
        ends = zip(self.starts[1:], counts, strict=True)
        return replace(self, sampled=[(s, at) for s, (end, n) in enumerate(ends) for at in range(end - n, end)])

    def split(self, numbers: Tensor) -> Sequence[Tensor]:
        """The same numbers on the device, part by part."""
        sequences, sampled = len(self.rows), len(self.sampled)
        return numbers.split([sequences, sequences, sequences + 1, sampled, sampled, len(self.token_ids)])


class Spans(NamedTuple):
    """Which tokens a step computes: of each sequence its row, its first position and how many."""

    decodes: Sequence[tuple[int, int, int]]
    others: Sequence[tuple[int, int, int]]
    token_ids: list[int]  # of the others
    sampled: Sequence[int]  # of each of the others, behind how many of its last tokens one is chosen

    @classmethod
    def of(cls, plan: StepRuns) -> Spans:
        """Those of a step."""
        decodes, others = (
            [(run.sequence.row, run.start, run.length) for run in runs] for runs in (plan.decodes, plan.uploaded)
        )
        token_ids = [id for run in plan.uploaded for id in run.token_ids]
        return cls(decodes, others, token_ids, [run.num_sampled for run in plan.uploaded])

    @property
    def layout(self) -> Layout:
        """How they stand in the step."""
        layout = Layout.of([*self.decodes, *self.others], self.token_ids, len(self.decodes))
        return layout.sampling([*[1] * len(self.decodes), *self.sampled])


@dataclass(frozen=True)
class Tables:
    """What the device keeps of every sequence, by row. Row 0 is no sequence's: it fills up the batches of graphs."""

    last_tokens: Tensor  # [rows]
    entries: Tensor  # [rows, BLOCKS + W]
    rings: Tensor | None  # [rows, W] blocks of windowed layers' rings, which repeat; None: there are none

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device, ring: Ring | None = None) -> Tables:
        """For sequences of at most `width` blocks."""
        last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        entries = torch.zeros(rows, BLOCKS + width, dtype=torch.int64, device=device)
        if ring is None:
            return cls(last_tokens, entries, None)
        firsts = (torch.arange(rows, device=device) - 1).clamp(min=0) * ring.num_blocks
        return cls(last_tokens, entries, firsts.unsqueeze(1) + torch.arange(width, device=device) % ring.num_blocks)

    @property
    def width(self) -> int:
        """Blocks of the longest sequence that there is room for."""
        return self.entries.shape[1] - BLOCKS

    def add(self, added: Sequence[SequenceState], device: Device) -> None:
        """Fill the rows of new sequences, from one upload."""
        new = [[s.row, s.prompt_length, s.encoder_row, len(s.encoder_tokens), s.adapter, *s.blocks] for s in added] + [
            [s.encoder_row, len(s.encoder_tokens), s.encoder_row, 0, s.adapter, *s.encoder_blocks]
            for s in added
            if s.encoder_blocks
        ]
        width = max(map(len, new))
        uploaded = device.upload([[*row, *[0] * (width - len(row))] for row in new])
        self.entries[:, : width - 1].index_copy_(0, uploaded[:, 0], uploaded[:, 1:])

    def grow(self, grown: Sequence[Growth], device: Device) -> None:
        """Write the blocks that sequences get behind those that they have, from one upload."""
        places = [
            [sequence.row, BLOCKS + first + place, block]
            for sequence, first, blocks in grown
            for place, block in enumerate(blocks)
        ]
        rows, columns, blocks = device.upload([list(column) for column in zip(*places, strict=True)])
        self.entries.index_put_((rows, columns), blocks)

    def keep(self, rows: Tensor, token_ids: Tensor) -> None:
        """Remember the tokens [n] that the sequences in `rows` [n] got.

        Where one had guesses it is there more than once; which token is remembered does not matter, for it goes on with
        another draft.
        """
        self.last_tokens.index_copy_(0, rows, token_ids)

    def decodes(
        self, rows: Tensor, positions: Tensor, are_real: Tensor, *, has_encoder: bool, has_adapters: bool = False
    ) -> Forward:
        """The next token of the sequences in `rows` [S], which stands at `positions` [S].

        are_real: [S] 1 for a sequence, 0 for what fills up the batch. has_adapters: whether any has one. In tensors
        alone, so that a captured step lays itself out: what only the host knows is left empty.
        """
        entries = self.entries.index_select(0, rows)
        meta = StepMeta(
            num_decodes=len(rows),
            query_starts=list(range(len(rows) + 1)),
            context_lengths=[],
            longest=0,
            starts=torch.empty(0, dtype=torch.int32, device=rows.device),  # of use to prompts alone
            positions=positions,
            visible=positions + are_real,
            prompt_lengths=entries[:, PROMPT_LENGTH],
            owners=None,
            block_tables=entries[:, BLOCKS:],
            rows=rows,
            ring_tables=self._rings_of(rows, self.width),
            adapters=TokenAdapters(entries[:, ADAPTER].contiguous()) if has_adapters else None,
        )
        cross = None
        if has_encoder:
            cross = replace(meta, visible=entries[:, ENCODER_LENGTH].contiguous(), block_tables=self._encoded(entries))
        return Forward([], self.last_tokens.index_select(0, rows), meta, None, cross)

    def lay_out(self, plan: StepRuns, device: Device, *, has_encoder: bool) -> StepInput:
        """Any step, from what the host knows."""
        runs, layout = plan.decodes + plan.uploaded, Spans.of(plan).layout
        numbers = device.upload(layout.numbers)
        starting = [run.sequence for run in plan.chunks if run.start == 0] if has_encoder else []
        rows, _, _, sample_rows, sample_at, _ = layout.split(numbers)
        present = sorted({run.sequence.adapter for run in runs} - {0})
        token_ids, meta = self.step(layout, numbers, present)
        forward = Forward(
            runs=runs,
            token_ids=token_ids,
            meta=replace(
                meta,
                context_lengths=[run.start + run.length for run in runs],
                rewind=self._rewind(plan, layout.starts, device),
            ),
            encoding=self._encoding(starting, device, present) if starting else None,
            cross=self._cross(runs, rows, meta) if has_encoder else None,
        )
        return StepInput(forward, plan.sampled, sample_at, sample_rows)

    def step(self, layout: Layout, numbers: Tensor, present: Sequence[int] = ()) -> tuple[Tensor, StepMeta]:
        """The token ids [T] of a step and where they stand; each sees its sequence up to itself.

        numbers: `layout.numbers`, on the device; present: the rows of adapters that sequences have. In tensors alone
        but for sizes, as in `decodes`; a sequence in row 0 fills up.
        """
        rows, firsts, starts, _, _, token_ids = layout.split(numbers)
        places = torch.arange(layout.starts[-1], device=numbers.device)
        owners = torch.searchsorted(starts[1:], places, right=True)
        are_real = (rows > 0).long().index_select(0, owners)
        entries = self.entries.index_select(0, rows)
        positions = (places + (firsts - starts[:-1]).index_select(0, owners)) * are_real
        meta = StepMeta(
            num_decodes=layout.num_decodes,
            query_starts=layout.starts,
            context_lengths=[],
            longest=layout.longest,
            starts=starts.int(),
            positions=positions,
            visible=positions + are_real,
            prompt_lengths=entries[:, PROMPT_LENGTH].index_select(0, owners),
            owners=owners,
            block_tables=entries[:, BLOCKS : BLOCKS + layout.blocks],
            rows=rows,
            ring_tables=self._rings_of(rows, layout.blocks),
            adapters=TokenAdapters(entries[:, ADAPTER].index_select(0, owners), present) if present else None,
        )
        return torch.cat([self.last_tokens.index_select(0, rows[: layout.num_decodes]), token_ids]), meta

    def _rewind(self, plan: StepRuns, starts: list[int], device: Device) -> Rewind | None:
        """What becomes of states in this step, sequence s of which has the tokens starts[s] … starts[s + 1] - 1."""
        drafts = [(run, run.draft) for run in plan.uploaded if run.draft is not None and run.draft.spare]
        restored = [(run.sequence.row, draft.spare) for run, draft in drafts if draft.num_again]
        kept = [(draft.spare, run.sequence.row) for run, draft in drafts if run.guesses]
        if not restored and not kept:
            return None
        parts = self._parts(plan, starts, device) if restored else ()
        return Rewind(_pairs(restored, device), _pairs(kept, device), parts)

    def _parts(self, plan: StepRuns, starts: list[int], device: Device) -> Sequence[tuple[Tensor, StepMeta]]:
        """The tokens that are computed again, and the others, with where they stand."""
        runs = plan.decodes + plan.uploaded
        cuts = [0 if run.draft is None else run.draft.num_again for run in runs]
        again = [(s, 0, cut) for s, cut in enumerate(cuts) if cut]
        rest = [(s, cut, runs[s].length) for s, cut in enumerate(cuts)]
        parts = []
        for spans, num_decodes in ((again, 0), (rest, len(plan.decodes))):
            places = [starts[s] + token for s, first, end in spans for token in range(first, end)]
            own = [(runs[s].sequence.row, runs[s].start + first, end - first) for s, first, end in spans]
            layout = Layout.of(own, [], num_decodes)
            parts.append((device.upload(places), self.step(layout, device.upload(layout.numbers))[1]))
        return parts

    def adapters_of(self, rows: Tensor, runs: Sequence[TokenRun]) -> TokenAdapters | None:
        """Those of the sequences in `rows` [R], which these runs are of; None: none has one."""
        present = sorted({run.sequence.adapter for run in runs} - {0})
        return TokenAdapters(self.entries[:, ADAPTER].index_select(0, rows), present) if present else None

    def _rings_of(self, rows: Tensor, blocks: int) -> Tensor | None:
        """The tables [S, blocks] of windowed layers for the sequences in `rows` [S]."""
        return None if self.rings is None else self.rings[:, :blocks].index_select(0, rows)

    def _encoding(self, sequences: list[SequenceState], device: Device, present: Sequence[int]) -> Encoding:
        """The prompts of `sequences`, each token seeing all of its prompt."""
        lengths = [len(s.encoder_tokens) for s in sequences]
        token_ids = [id for s in sequences for id in s.encoder_tokens]
        spans = [(s.encoder_row, 0, length) for s, length in zip(sequences, lengths, strict=True)]
        layout = Layout.of(spans, token_ids)
        ids, meta = self.step(layout, device.upload(layout.numbers), present)
        return Encoding(ids, replace(meta, context_lengths=lengths, visible=meta.prompt_lengths), sequences)

    def _cross(self, runs: list[TokenRun], rows: Tensor, meta: StepMeta) -> StepMeta:
        """The tokens of `meta` with the encoded prompts as their context. Nothing is written there."""
        lengths = [len(run.sequence.encoder_tokens) for run in runs]
        entries = self.entries.index_select(0, rows)
        assert meta.owners is not None
        return replace(
            meta,
            context_lengths=lengths,
            visible=entries[:, ENCODER_LENGTH].index_select(0, meta.owners),
            block_tables=self._encoded(entries)[:, : num_blocks(max(lengths))],
        )

    def _encoded(self, entries: Tensor) -> Tensor:
        """The blocks [S, W] of the encoded prompts of sequences, from their own entries [S, BLOCKS + W]."""
        return self.entries.index_select(0, entries[:, ENCODER_ROW])[:, BLOCKS:]


def _pairs(rows: Sequence[tuple[int, int]], device: Device) -> tuple[Tensor, Tensor] | None:
    """The first and the second of each pair, on the device."""
    return (device.upload([to for to, _ in rows]), device.upload([source for _, source in rows])) if rows else None
