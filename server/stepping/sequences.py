"""The sequences of one rank, and whose tokens each step computes: the host's side of a step.

Keeps of every sequence its progress and how its tokens are chosen, and checks what comes over the wire before anything
changes. What a step computes is decided by the router; what the device knows of a sequence stands in `batch.Tables`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from server.arch.footprint import num_spares
from server.arch.windows import Ring
from server.backends.device import Device
from server.blocks import BLOCK_SIZE, num_blocks
from server.pb import generate_pb2 as pb
from server.stepping.logit_rules import MOST_WORD_TOKENS, Allowed, History, RecentTokens, TokenBiases
from server.stepping.sampling import TokenChoice
from server.stepping.vocabulary import Vocabulary

NOTHING = sys.maxsize  # a position that no token has


class StepError(ValueError):
    """A request that breaks the contract of the wire: names the sequence."""


@dataclass
class SequenceState:
    """One sequence on this rank."""

    id: int
    row: int  # of the device's tables, never 0
    prompt: list[int]  # and later the tokens that a grammar forced, at their positions
    prompt_length: int  # tokens of the client's prompt; what `prompt` holds beyond them was generated before
    computed: int  # tokens whose keys and values are in the cache
    blocks: list[int]
    choice: TokenChoice
    history: History | None
    recent: RecentTokens | None
    reported_from: int  # position of the first token of `prompt` whose log-probability is reported
    encoder_tokens: list[int]  # of an encoder-decoder: what its encoder reads
    encoder_blocks: Sequence[int]
    encoder_row: int  # of the device's tables, where the encoder's blocks are; without an encoder the same as `row`
    lane: int = 0  # the micro-batch in which it decodes
    adapter: int = 0  # the row of its adapter; 0: it has none
    drafted_at: int = 0  # position of its draft whose outcome the router knows alone; 0: there is none
    drafted_token: int = 0  # the first token of that
    # Tokens behind the state at `spare` that are computed again, because guesses behind them were wrong.
    again: list[int] = field(default_factory=list)
    spare: int = 0  # where recurrent layers keep its state before that, among their rows; 0: there are no such layers
    own_cache: Any = None  # what a model without paged cache keeps of it
    followed: Any = None  # how far a speculative model is with it

    @property
    def rows(self) -> set[int]:
        """All its rows of the device's tables."""
        return {self.row, self.encoder_row}

    @property
    def remaining(self) -> int:
        """Prompt tokens not yet computed."""
        return max(0, len(self.prompt) - self.computed)

    def extend(self, token_ids: list[int]) -> None:
        """Go on with these tokens, the first of which it got in the step before."""
        unknown = self.computed - len(self.prompt)  # the device knew them, and they are not read again
        self.prompt += [0] * unknown + token_ids
        self.reported_from = self.computed + 1 if self.choice.raw_logprobs else NOTHING
        self._note(token_ids[1:])

    def go_back(self, position: int, came: Sequence[int]) -> None:
        """Nothing counts as computed from `position` on, its latest token's. came: of its draft, if it had one."""
        if self.drafted_at:
            self._note(came)
            if self.spare and position < self.computed:
                self.again = [self.drafted_token, *came[:-1]]
        self.computed, self.drafted_at = position, 0

    def draft(self, token_ids: list[int]) -> TokenRun:
        """Go on with these tokens, its latest and guesses."""
        self.drafted_at, self.drafted_token = self.computed if len(token_ids) > 1 else 0, token_ids[0]
        return self._run(token_ids, 1)

    def chunk(self, count: int) -> TokenRun:
        """Go on with the next tokens of its prompt, or of what was forced."""
        if not self.again:
            return TokenRun(self, self.computed, count)
        return self._run(self.prompt[self.computed : self.computed + count], count)

    def _run(self, token_ids: list[int], num_known: int) -> TokenRun:
        again, self.again = self.again, []
        draft = DraftTokens(again + token_ids, len(again) + num_known, len(again), self.spare)
        return TokenRun(self, self.computed - len(again), len(draft.token_ids), draft)

    def _note(self, token_ids: Sequence[int]) -> None:
        """Count tokens that it has, but that were not chosen behind those that it had."""
        if self.history is not None:
            self.history.add(token_ids)
        if self.recent is not None:
            self.recent.extend(token_ids)


class SampledRow(NamedTuple):
    """Where a step chooses a token of a sequence. guesses: those of its draft before it; None: there are none at all.

    What a draft yields counts only once the router says so: its rows have histories of their own.
    """

    sequence: SequenceState
    place: int = 0
    guesses: Sequence[int] | None = None

    @property
    def history(self) -> History | None:
        """See `SequenceState`."""
        own = self.sequence.history
        return own if own is None or self.guesses is None else own.fork(self.guesses)

    @property
    def recent(self) -> RecentTokens | None:
        """See `SequenceState`."""
        own = self.sequence.recent
        return own if own is None or self.guesses is None else own.fork(self.guesses)


class DraftTokens(NamedTuple):
    """What a run computes of a draft."""

    token_ids: Sequence[int]  # of the whole run: some that are computed again, the latest one, and guesses
    num_known: int  # of these, how many are no guesses
    num_again: int = 0  # and how many are computed again, from the state before the draft that had them
    spare: int = 0  # where that state is kept, and then the one before this draft's guesses; 0: there is none


class TokenRun(NamedTuple):
    """The tokens [start, start + length) of one sequence, which a step computes."""

    sequence: SequenceState
    start: int
    length: int
    draft: DraftTokens | None = None  # the tokens, where they are a draft

    @property
    def token_ids(self) -> Sequence[int]:
        """Of a run that does not decode."""
        own = self.sequence.prompt
        return own[self.start : self.start + self.length] if self.draft is None else self.draft.token_ids

    @property
    def guesses(self) -> Sequence[int]:
        """Its last tokens, of which nobody knows yet whether the sequence gets them."""
        return () if self.draft is None else self.draft.token_ids[self.draft.num_known :]

    @property
    def num_sampled(self) -> int:
        """How many tokens are chosen, each behind one of its last tokens; none before the whole prompt is computed."""
        return 0 if self.start + self.length < len(self.sequence.prompt) else 1 + len(self.guesses)

    @property
    def rows(self) -> Iterable[SampledRow]:
        """Those of a run that yields tokens."""
        if not self.guesses:
            return (SampledRow(self.sequence),)
        return (SampledRow(self.sequence, place, self.guesses[:place]) for place in range(1 + len(self.guesses)))

    @property
    def reported(self) -> range:
        """Positions of the tokens that are known, whose log-probabilities it finds and that were asked for."""
        first = max(self.sequence.reported_from, self.start + 1)
        return range(first, min(self.start + self.length + 1, len(self.sequence.prompt)))


class Growth(NamedTuple):
    """What a sequence gets behind the end of its block table, which had `first` blocks."""

    sequence: SequenceState
    first: int
    blocks: list[int]


class StepRuns(NamedTuple):
    """Whose tokens a step computes, and which sequences are new or grow. One that has no runs computes nothing."""

    decodes: list[TokenRun]
    chunks: list[TokenRun]
    added: list[SequenceState]
    # Sequence and place in its draft, 0 without one -> what it may get there, where that is not everything.
    allowed: Mapping[tuple[int, int], Allowed] = {}
    grown: Sequence[Growth] = ()
    drafts: Sequence[TokenRun] = ()

    @property
    def computes(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.decodes or self.chunks or self.drafts)

    @property
    def uploaded(self) -> list[TokenRun]:
        """Those whose tokens the host knows, in the order in which they stand behind the decodes."""
        return [*self.drafts, *self.chunks]

    @property
    def sampled(self) -> list[TokenRun]:
        """Those that yield tokens."""
        return self.decodes + [run for run in self.uploaded if run.num_sampled]


@dataclass
class SequenceTable:
    """All sequences of this rank, each with a row of the device's tables (two where there is an encoder)."""

    num_blocks: int
    device: Device
    vocabulary: Vocabulary
    has_encoder: bool
    longest: int  # blocks of the longest sequence
    most: int  # sequences at once
    most_at_once: int = NOTHING  # tokens of one in a step, so that they fit a ring
    has_states: bool = False  # whether any layer of the model is recurrent
    num_adapters: int = 0  # rows of adapters
    sequences: dict[int, SequenceState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free_rows = list(range(self.num_rows - 1, 0, -1))
        self.free_spares = list(range(self.num_rows, self.num_rows + self.num_spares))

    @property
    def num_rows(self) -> int:
        """Rows that the device's tables have; row 0 is no sequence's."""
        return self.most * (1 + self.has_encoder) + 1

    @property
    def num_spares(self) -> int:
        """Rows behind these where recurrent layers keep states before guesses."""
        return num_spares(self.most) if self.has_states else 0

    def apply(self, request: pb.StepRequest) -> StepRuns:
        """Forget all if asked to, retire and add, and plan the step, whose tokens count as computed from now on.

        Raises StepError for a request that breaks the contract; then only retired sequences have left.
        """
        self._forget([*self.sequences] if request.reset else request.retire)
        needs_check = request.add or request.extend or request.chunk_ids or request.grown_ids
        if needs_check or request.drafts or request.kept_ids:
            self._check(request)
        added = [self._add(new) for new in request.add]
        for extension in (*request.extend, *request.drafts):
            if extension.id in self.sequences:
                self.sequences[extension.id].go_back(extension.position, extension.came)
        for extension in request.extend:
            if extension.id in self.sequences:
                self.sequences[extension.id].extend(list(extension.token_ids))
        grown = [self._grow(*growth) for growth in _growths(request) if growth[0] in self.sequences]
        drafts = [self._draft(draft) for draft in request.drafts if draft.id in self.sequences]
        decodes = self._decodes(request) if request.decode else []
        chunks = [
            self._chunk(self.sequences[id], count)
            for id, count in zip(request.chunk_ids, request.chunk_tokens, strict=True)
            if id in self.sequences
        ]
        for sequence, start, count, _ in decodes + drafts + chunks:
            sequence.computed = start + count
        return StepRuns(decodes, chunks, added, self._allowed(request.masks) if request.masks else {}, grown, drafts)

    def rows_and_blocks(self, ids: Sequence[int], blocks: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """The row of each of these sequences that is there, with its part of `blocks`. Raises StepError."""
        if not ids:
            return
        if max(blocks, default=0) >= self.num_blocks or len(blocks) % len(ids):
            raise StepError(f"sequences {list(ids)} need as many blocks each, below {self.num_blocks}")
        each = len(blocks) // len(ids)
        for place, id in enumerate(ids):
            if id in self.sequences:  # else a failed step dropped it
                yield self.sequences[id].row, list(blocks[place * each : (place + 1) * each])

    def ring_blocks(
        self, ids: Sequence[int], places: Sequence[int], blocks: Sequence[int], ring: Ring
    ) -> list[tuple[int, ...]]:
        """Where each block of tokens, `places` of these sequences, is among all rings, and its part of `blocks`.

        Raises StepError.
        """
        each = len(blocks) // max(1, len(ids))
        if max(blocks, default=0) >= self.num_blocks or len(blocks) != each * len(ids) or len(places) != len(ids):
            raise StepError(f"sequences {sorted(set(ids))} need as many blocks for each place, below {self.num_blocks}")
        return [
            ((self.sequences[id].row - 1) * ring.num_blocks + ring.place(place), *blocks[n * each : (n + 1) * each])
            for n, (id, place) in enumerate(zip(ids, places, strict=True))
            if id in self.sequences  # else a failed step dropped it
        ]

    def drop(self, request: pb.StepRequest) -> None:
        """Forget every sequence that a failed step touched, or that leaves with it."""
        if request.decode:
            self._forget([run.sequence.id for run in self._decodes(request)])
        self._forget([*self.sequences] if request.reset else request.retire)
        drafted = [draft.id for draft in request.drafts]
        self._forget([*request.chunk_ids, *request.grown_ids, *drafted, *(new.id for new in request.add)])

    def _decodes(self, request: pb.StepRequest) -> list[TokenRun]:
        """The next token of every sequence of the lane whose prompt is computed, but for those held or on a draft."""
        lane = request.lane
        sequences = [
            s for s in self.sequences.values() if s.lane == lane and s.computed >= len(s.prompt) and not s.drafted_at
        ]
        if request.held or request.drafts:
            waiting = frozenset([*request.held, *(draft.id for draft in request.drafts)])
            sequences = [s for s in sequences if s.id not in waiting]
        return [TokenRun(s, s.computed, 1) for s in sequences]

    def _draft(self, draft: pb.Extension) -> TokenRun:
        """Without its guesses, where there is no room for a state before them: the reply has one token then."""
        sequence, token_ids = self.sequences[draft.id], list(draft.token_ids)
        if self.has_states and len(token_ids) > 1 and not sequence.spare:
            if self.free_spares:
                sequence.spare = self.free_spares.pop()
            else:
                del token_ids[1:]
        run = sequence.draft(token_ids)
        if not run.guesses:
            self._free_spare(sequence)
        return run

    def _chunk(self, sequence: SequenceState, count: int) -> TokenRun:
        run = sequence.chunk(count)
        self._free_spare(sequence)
        return run

    def _free_spare(self, sequence: SequenceState) -> None:
        if sequence.spare:
            self.free_spares.append(sequence.spare)
            sequence.spare = 0

    def _allowed(self, masks: Iterable[pb.TokenMask]) -> dict[tuple[int, int], Allowed]:
        found: dict[tuple[int, int], Allowed] = {}
        for mask in masks:
            places = zip(mask.ids, mask.rows or [0] * len(mask.ids), strict=True)
            found |= dict.fromkeys(places, allowed_tokens(mask, self.vocabulary.size))
        return found

    def _forget(self, ids: Iterable[int]) -> None:
        # Ids that a failed step dropped may still be named by the request that was in flight behind it.
        for id in ids:
            if sequence := self.sequences.pop(id, None):
                self.free_rows.extend(sequence.rows)
                self._free_spare(sequence)

    def _check(self, request: pb.StepRequest) -> None:
        if len(self.sequences) + len(request.add) > self.most:
            first = request.add[0].id
            raise StepError(
                f"sequence {first} is one too many: there is room for {self.most}, so raise --max-concurrent-requests"
            )
        for new in request.add:
            self._check_new(new)
        grown = {id: len(blocks) for id, blocks in _growths(request)}
        for id, count in grown.items():
            self._check_growth(id, count, request.grown_blocks)
        for extension in request.extend:
            self._check_extension(extension, grown.get(extension.id, 0))
        for mask in request.masks:
            if len(mask.rows) not in (0, len(mask.ids)):
                raise StepError(f"a mask of sequences {list(mask.ids)} is for {len(mask.rows)} rows: name one for each")
        remaining = {id: s.remaining for id, s in self.sequences.items()}
        remaining |= {new.id: len(new.token_ids) - new.computed for new in request.add}
        remaining |= {
            extension.id: len(extension.token_ids) for extension in request.extend if extension.id in remaining
        }
        for id, count in zip(request.chunk_ids, request.chunk_tokens, strict=True):
            if id in remaining and not 0 < count <= remaining[id]:
                raise StepError(f"sequence {id} has {remaining[id]} prompt tokens left, not {count}")
            if count > self.most_at_once:
                raise StepError(f"sequence {id} takes {count} tokens in a step, but its ring {self.most_at_once}")
        self._check_drafts(request.drafts, remaining, grown)
        unsure = {id for id in request.kept_ids if id in self.sequences and self.sequences[id].drafted_at}
        unsure -= {extension.id for extension in (*request.extend, *request.drafts)}
        unsure |= {draft.id for draft in request.drafts if len(draft.token_ids) > 1}.intersection(request.kept_ids)
        if unsure:
            raise StepError(f"sequences {sorted(unsure)} have guesses: a state behind them cannot be kept")

    def _check_drafts(
        self, drafts: Iterable[pb.Extension], remaining: Mapping[int, int], grown: Mapping[int, int]
    ) -> None:
        """remaining: prompt tokens that sequences have left; grown: blocks that they get."""
        seen: set[int] = set()
        for draft in drafts:
            if draft.id in seen or remaining.get(draft.id):
                left = "a draft already" if draft.id in seen else f"{remaining[draft.id]} prompt tokens left"
                raise StepError(f"sequence {draft.id} has {left}: it cannot have a draft")
            if (count := len(draft.token_ids)) > self.most_at_once:
                raise StepError(f"sequence {draft.id} takes {count} tokens in a step, but its ring {self.most_at_once}")
            self._check_extension(draft, grown.get(draft.id, 0))
            seen.add(draft.id)

    def _check_new(self, new: pb.NewSequence) -> None:
        if new.id in self.sequences:
            raise StepError(f"sequence {new.id} is on this shard already")
        if new.adapter > self.num_adapters:
            raise StepError(
                f"sequence {new.id} has its adapter in row {new.adapter}, but there are {self.num_adapters}"
            )
        if bool(new.encoder_token_ids) != self.has_encoder:
            raise StepError(f"sequence {new.id} {'lacks' if self.has_encoder else 'has'} tokens for an encoder")
        if not new.token_ids or max([*new.token_ids, *new.encoder_token_ids]) >= self.vocabulary.size:
            raise StepError(f"sequence {new.id} needs token ids below the vocabulary size, {self.vocabulary.size}")
        self._check_sampling(new.id, new.sampling)
        if not new.blocks or max([*new.blocks, *new.encoder_blocks]) >= self.num_blocks:
            raise StepError(f"sequence {new.id} needs blocks below {self.num_blocks}")
        if (most := max(len(new.blocks), len(new.encoder_blocks))) > self.longest:
            raise StepError(
                f"sequence {new.id} has {most} blocks, but there is room for {self.longest} of {BLOCK_SIZE} tokens: "
                "raise --max-total-tokens"
            )
        if num_blocks(len(new.encoder_token_ids)) > len(new.encoder_blocks):
            raise StepError(f"sequence {new.id} needs {num_blocks(len(new.encoder_token_ids))} encoder blocks")

    def _check_growth(self, id: int, count: int, blocks: Sequence[int]) -> None:
        if max(blocks) >= self.num_blocks:
            raise StepError(f"sequence {id} needs more blocks below {self.num_blocks}")
        if id in self.sequences and len(self.sequences[id].blocks) + count > self.longest:
            raise StepError(f"sequence {id} would have more than {self.longest} blocks: raise --max-total-tokens")

    def _check_extension(self, extension: pb.Extension, num_more: int) -> None:
        id, position, count = extension.id, extension.position, len(extension.token_ids)
        if (sequence := self.sequences.get(id)) is None:
            return  # a failed step dropped it
        if sequence.remaining:
            raise StepError(f"sequence {id} has {sequence.remaining} prompt tokens left: it cannot be extended")
        if not count or max([*extension.token_ids, *extension.came]) >= self.vocabulary.size:
            raise StepError(f"sequence {id} needs token ids below the vocabulary size, {self.vocabulary.size}")
        if num_blocks(position + count) > len(sequence.blocks) + num_more:
            raise StepError(f"sequence {id} has no room for {count} tokens from {position} on")
        first, last = sequence.drafted_at + 1 if sequence.drafted_at else sequence.computed, sequence.computed
        if not first <= position <= last:
            raise StepError(f"sequence {id} goes on from position {position}, but it can from {first} … {last}")
        if sequence.drafted_at and len(extension.came) != position - sequence.drafted_at:
            raise StepError(
                f"sequence {id} got {len(extension.came)} tokens of its draft at {sequence.drafted_at}, but goes on "
                f"from position {position}"
            )

    def _check_sampling(self, id: int, sampling: pb.SamplingParameters) -> None:
        if max([*sampling.bias_ids, *sampling.banned_word_ids, *sampling.end_ids], default=0) >= self.vocabulary.size:
            raise StepError(f"sequence {id} needs biased, banned and end ids below {self.vocabulary.size}")
        if len(sampling.bias_ids) != len(sampling.biases):
            raise StepError(f"sequence {id} has {len(sampling.bias_ids)} biased ids and {len(sampling.biases)} biases")
        lengths = sampling.banned_word_lengths
        if sum(lengths) != len(sampling.banned_word_ids) or not all(2 <= n <= MOST_WORD_TOKENS for n in lengths):
            raise StepError(f"sequence {id} needs banned words of 2 to {MOST_WORD_TOKENS} tokens, all of them there")

    def _grow(self, id: int, blocks: list[int]) -> Growth:
        sequence = self.sequences[id]
        growth = Growth(sequence, len(sequence.blocks), blocks)
        sequence.blocks += blocks
        return growth

    def _add(self, new: pb.NewSequence) -> SequenceState:
        row = self.free_rows.pop()
        choice = _choice(new)
        prompt = list(new.token_ids)
        self.sequences[new.id] = SequenceState(
            id=new.id,
            row=row,
            prompt=prompt,
            prompt_length=len(prompt) - new.generated,
            computed=new.computed,
            blocks=list(new.blocks),
            choice=choice,
            history=History(prompt, new.generated, self.vocabulary, self.device) if choice.needs_history else None,
            recent=RecentTokens(prompt[len(prompt) - new.generated :], self.device)
            if choice.biases.banned_words
            else None,
            reported_from=_reported_from(new),
            encoder_tokens=list(new.encoder_token_ids),
            encoder_blocks=list(new.encoder_blocks),
            encoder_row=self.free_rows.pop() if self.has_encoder else row,
            lane=new.lane,
            adapter=new.adapter,
        )
        return self.sequences[new.id]


def _growths(request: pb.StepRequest) -> list[tuple[int, list[int]]]:
    ends = accumulate(request.grown_counts, initial=0)
    return [
        (id, list(request.grown_blocks[start:end]))
        for id, (start, end) in zip(request.grown_ids, pairwise(ends), strict=True)
    ]


def allowed_tokens(mask: pb.TokenMask, size: int) -> Allowed:
    """What a mask of the wire means in a vocabulary of `size` tokens."""
    form = mask.WhichOneof("tokens")
    if form == "bits":
        return Allowed.of_bits(mask.bits, size)
    if form == "allowed":
        return Allowed(ids=tuple(id for id in mask.allowed.ids if id < size))
    return Allowed.but(mask.forbidden.ids, size)


def _reported_from(new: pb.NewSequence) -> int:
    if new.prompt_logprobs:
        return 1
    return len(new.token_ids) - new.forced if new.forced and new.sampling.raw_logprobs else NOTHING


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
        presence_penalty=sampling.presence_penalty,
        min_p=sampling.min_p,
        watermark=sampling.watermark,
        seed=sampling.seed,
        top_n_tokens=new.top_n_tokens,
        raw_logprobs=sampling.raw_logprobs,
        is_constrained=sampling.is_constrained,
        biases=_biases(sampling, len(new.token_ids) - new.generated),
    )


def _biases(sampling: pb.SamplingParameters, prompt_length: int) -> TokenBiases:
    words = pairwise(accumulate(sampling.banned_word_lengths, initial=0))
    return TokenBiases(
        added=tuple(zip(sampling.bias_ids, sampling.biases, strict=True)),
        banned_words=tuple(tuple(sampling.banned_word_ids[start:end]) for start, end in words),
        end_ids=tuple(sampling.end_ids) if sampling.min_tokens else (),
        first_end=prompt_length + sampling.min_tokens,
    )
