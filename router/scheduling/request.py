"""A request as it lives in the router: what was asked, what has been scheduled, and the events that answer it.

Plain data shared by validation, the batching loop and the HTTP layer, so that none of them imports another for a type.
`PrefixKeys` names the beginnings of a sequence: each full block by one digest over all tokens up to its end. Two
sequences share a block exactly when they share its digest, so a digest must never collide by accident or design: it is
BLAKE2b, not Python's `hash`. An adapter's key goes into all of them: what it computes serves no other, on the device or
behind it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

from router.drafting.speculation import Drafting
from router.errors import RouterError
from router.scheduling.adapters import Adapter
from router.scheduling.fairness import MIN_ADVANCE
from router.scheduling.grammar import CompiledGrammar, Continuation, Match
from router.scheduling.prefix_moves import KEY_BYTES, DiskWait
from router.scheduling.queue import RequestSize, blocks_for
from router.text.generated import ENDS_OF_THE_MODEL, Ends, FinishReason, GeneratedText


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The defaults are neutral: the most likely token of the plain distribution."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    watermark: bool = False
    seed: int = 0
    biases: Mapping[int, float] = field(default_factory=dict)  # of tokens; -inf: never generated
    banned_words: tuple[tuple[int, ...], ...] = ()  # of several tokens each
    min_tokens: int = 0  # before so many are generated …
    end_ids: tuple[int, ...] = ()  # … none of these is, in order
    raw_logprobs: bool = False  # log-probabilities and candidates of the model's own logits


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """One request that keeps every rule and limit."""

    token_ids: Sequence[int]  # what the decoder starts from: the prompt, or an encoder-decoder's start token
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ends: Ends = ENDS_OF_THE_MODEL
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    encoder_ids: Sequence[int] = ()  # the prompt, where an encoder reads it
    generates: bool = True  # else the token behind the prompt is dropped: the prompt's log-probabilities are wanted
    grammar: CompiledGrammar | None = None  # what the text is held to
    priority: int = 0  # the lower, the earlier it leaves the queue, beside others of its key
    prediction: Sequence[int] = ()  # what much of the answer may be: guesses come from it too
    speculate: int | None = None  # tokens that may be guessed for a step; None: as many as the server allows
    cache_salt: str = ""  # prefixes are shared among requests of the same one alone
    adapter: Adapter | None = None  # what changes the model for it; None: the model as it is

    @property
    def wanted_tokens(self) -> int:
        """How many tokens the client asked for at most."""
        return self.max_new_tokens if self.generates else 0

    def most_guesses(self, most: int) -> int:
        """How many tokens may be guessed for a step, of `most` that the server allows."""
        return most if self.speculate is None else min(most, self.speculate)

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt, of the encoder or of the decoder: several samples of one share the object."""
        return self.encoder_ids or self.token_ids

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    def read_by_encoder(self, decoder_start: int | None) -> ValidRequest:
        """The same request for an encoder-decoder, whose encoder reads the prompt.

        Its decoder starts from `decoder_start`. None stands for a model without an encoder and changes nothing.
        """
        if decoder_start is None:
            return self
        return replace(self, token_ids=[decoder_start], encoder_ids=self.token_ids)

    def size(self, cached: int = 0, rebuilt: int = 0, new_tokens: int | None = None) -> RequestSize:
        """What admission counts, if the KV cache holds the first `cached` tokens of its prompt already.

        rebuilt: tokens behind the prompt that are computed with it: generated before, or forced by a grammar.
        new_tokens: that there is to be room for; None: for all that it may get.
        """
        new_tokens = self.max_new_tokens if new_tokens is None else new_tokens
        return RequestSize(self.input_length, new_tokens, bool(self.encoder_ids), cached, rebuilt)

    def filled_up(self, new_tokens: int, block_size: int) -> int:
        """How many generated tokens the blocks have room for that are needed for so many; no more than it may get."""
        before = 0 if self.encoder_ids else self.input_length
        return min(self.max_new_tokens, blocks_for(before + new_tokens, block_size) * block_size - before)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a sequence, and as an event of a stream the next generated one.

    `logprob` is None for the first token of a prompt, which nothing predicted.
    """

    id: int
    text: str
    logprob: float | None
    special: bool
    top_tokens: tuple[Token, ...] = ()
    guessed: bool = False  # it was known before its step, which has confirmed it


@dataclass(frozen=True, slots=True)
class ScoredToken(Token):
    """A token whose log-probability is the model's own, with what it takes to say which tokens a text is made of.

    piece: what it adds to the text, of which `text` may show less by now and the rest later.
    """

    piece: str = ""
    candidates: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens from the second on, and candidates of each, as compact as they came.

    Where they are the model's own, the event before the first generated token, where they are asked for.
    """

    logprobs: array[float] = field(default_factory=lambda: array("f"))
    top_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))

    def extend(self, logprobs: Iterable[float], top_ids: Iterable[int], top_logprobs: Iterable[float]) -> None:
        """Those of the next chunk."""
        self.logprobs.extend(logprobs)
        self.top_ids.extend(top_ids)
        self.top_logprobs.extend(top_logprobs)

    def clear(self) -> None:
        """The prompt will be computed again."""
        for column in (self.logprobs, self.top_ids, self.top_logprobs):
            del column[:]

    def candidates(self, place: int) -> Iterable[tuple[int, float]]:
        """Of the token whose log-probability is `logprobs[place]`, most likely first."""
        count = len(self.top_ids) // len(self.logprobs)
        some = slice(place * count, (place + 1) * count)
        return zip(self.top_ids[some], self.top_logprobs[some], strict=True)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The event before the first generated token, for requests that asked for their prompt's log-probabilities."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """When each stage of a request began, in seconds of the batching loop's clock."""

    queued: float
    admitted: float
    first_token: float
    finished: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that is complete."""

    reason: FinishReason
    generated_text: str
    generated_tokens: int
    timings: Timings
    stopped_by: str | int | None = None  # a stop sequence that is not part of the text, or one of `stop_token_ids`


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not be completed."""

    error: RouterError


Event = PromptTokens | PromptScores | Token | Finished | Failed


class MergedEvents(asyncio.Queue[Event]):
    """Puts the events of one sequence into a queue for several, with its number."""

    def __init__(self, merged: asyncio.Queue[tuple[int, Event]], number: int) -> None:
        super().__init__()
        self._merged = merged
        self._number = number

    def put_nowait(self, item: Event) -> None:
        """Hand it over."""
        self._merged.put_nowait((self._number, item))


class Keeping(NamedTuple):
    """States on their way to blocks, which are held until it is known which tokens they stand behind."""

    depth: int  # of the block that ends there, among the sequence's blocks
    blocks: list[int]


@dataclass(slots=True, eq=False)
class Scheduled:
    """A request as the scheduler sees it: waiting or running, and how far it has come."""

    id: int  # Of its sequence on the shards: never a client's, never used again, a new one where it is rebuilt.
    request: ValidRequest
    cancelled: bool = False  # The reader of its events sets it when the client has gone.
    is_over: bool = False  # Its last event is out or it was cancelled, so that tokens that still come are dropped.
    owner: str = ""  # The name of the API key that it came with, where keys share the server.
    key_name: str = ""  # The same where it is the only key too: another one may take its place.
    weight: float = 1.0  # Of that key: how much of the batch it is entitled to, beside others.
    route: str = ""  # By which it came: answers of one are more alike than those of all.

    # What follows belongs to the scheduler. Of the request, whichever sequence computes it:
    generated_ids: list[int] = field(default_factory=list)  # The tokens that came back.
    # What its grammar allows behind them; None: not known yet, or it has none.
    continuation: Continuation | None = None
    drafting: Drafting | None = None  # What guesses how it goes on; None: nothing does.
    num_told: int = 0  # Generated tokens that this knows.
    num_guessed: int = 0  # Tokens that were guessed for steps …
    num_right: int = 0  # … and those of them that came.
    has_run: bool = False  # Whether it has, here or on another server: no other request of its key passes it any more.
    num_losses: int = 0  # Losses of the shards in a step that computed it, since its last token.
    num_preempted: int = 0  # How often it made room for another request.
    num_lost: int = 0  # Tokens that were computed when it last left for want of blocks, until it joins again.
    arrival: int = 0  # Its place among all requests that came.
    expected: int = 0  # Generated tokens that it is expected to get: all that it asks for, or what was learnt.
    first_expected: int = 0  # The same when it was first admitted.
    num_counted: int | None = None  # Generated tokens that expectations have learnt from; None: nothing yet.

    # Of its sequence on the shards, which `begin_sequence` starts over:
    lane: int = 0  # The micro-batch that it was admitted to.
    row: int = 0  # Where its adapter is; 0: it has none.
    blocks: list[int] = field(default_factory=list)
    granted: int = 0  # Generated tokens that these have room for.
    keys: PrefixKeys | None = None  # The keys of its full blocks; None if it shares no blocks.
    disk_wait: DiskWait | None = None  # While it waits in the queue: for what it begins with to come from the disk.
    border: int = 0  # Tokens between two places at which its states are kept for others to go on from; 0: they are not.
    most_at_once: int = 0  # Tokens of it in a step at most; 0: any number.
    keeping: Keeping | None = None  # States that a step keeps, of which it is not known yet what they are of.
    num_rebuilt: int = 0  # Generated tokens that it began with, behind the prompt.
    num_known: int = 0  # Tokens behind the prompt that the shards are told: `num_rebuilt`, or forced by its grammar.
    num_prompt_scheduled: int = 0  # Known tokens found in the prefix cache, or computed by the steps sent so far.
    num_scheduled: int = 0  # Generated tokens: those that it began with, and those that the steps sent so far yield.
    has_unsent: bool = False  # Whether its grammar forces tokens that the shards do not know yet.
    came: int | None = None  # Tokens that came of its last guesses, until it goes on; None: it decodes plainly.

    def begin_sequence(self, block_size: int | None, border: int = 0, most_at_once: int = 0) -> None:
        """Start over with what is known: its prompt, what it has got, and what its grammar forces behind that.

        block_size: None where it shares no blocks. border, most_at_once: see the fields.
        """
        self.border = border if block_size is not None else 0
        self.most_at_once = most_at_once or self.border
        self.num_rebuilt = self.num_scheduled = self.num_written
        self.num_known = self.num_rebuilt + len(self.forced)
        self.num_prompt_scheduled = 0
        self.has_unsent = False
        self.came = None
        self.disk_wait = None
        self.keys = None if block_size is None else self.prefix_keys(block_size)

    def prefix_keys(self, block_size: int) -> PrefixKeys:
        """The names of its full blocks, of its prompt and of what it has got."""
        adapter, token_ids = self.request.adapter, [*self.request.token_ids, *self.generated_ids]
        return PrefixKeys(token_ids, block_size, self.request.cache_salt, b"" if adapter is None else adapter.key)

    @property
    def adapter(self) -> Adapter | None:
        """What changes the model for it."""
        return self.request.adapter

    @property
    def num_prompt_left(self) -> int:
        """Tokens of the prompt, and of what is known behind it, that no step sent so far computes."""
        return len(self.request.token_ids) + self.num_known - self.num_prompt_scheduled

    def prompt_chunk(self, most: int) -> int:
        """Tokens of its prompt for the next step, at most so many: none go over a place at which states are kept."""
        most = min(most, self.num_prompt_left, self.most_at_once or most)
        return min(most, self.steps_to_border) if self.border else most

    @property
    def steps_to_border(self) -> int:
        """Tokens to the next place at which states are kept, from those that are computed. There is a border."""
        return self.border - self.num_computed % self.border

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that its grammar has come next in any case."""
        return () if self.continuation is None else self.continuation.forced

    @property
    def is_held(self) -> bool:
        """Whether it takes part in no step: what it may get is not known, or its latest token is, and is under way."""
        is_under_way = self.num_scheduled > len(self.generated_ids)
        if self.request.grammar is None:
            return is_under_way and self.came is not None
        return self.continuation is None or is_under_way

    @property
    def may_be_held(self) -> bool:
        """Whether it may have to wait while others of its lane decode: for its grammar, its guesses, or a block."""
        return self.request.grammar is not None or self.drafting is not None or self.num_scheduled >= self.granted

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what kills the shards: twice they were lost with it, and it got no token between."""
        return self.num_losses >= 2

    @property
    def is_guilty(self) -> bool:
        """Whether it was lost alone before, too: once may be the kill of a process that met it."""
        return self.num_losses >= 3

    @property
    def max_tokens(self) -> int:
        """The longest sequence that it can reach."""
        return self.request.input_length + self.request.max_new_tokens

    @property
    def claim(self) -> int:
        """What it counts as, beside others: the sequence that it is expected to reach."""
        return self.request.input_length + self.expected

    @property
    def num_written(self) -> int:
        """Generated tokens that have come back."""
        return len(self.generated_ids)

    @property
    def num_reached(self) -> int:
        """Tokens behind the prompt that it has, or that the shards are told next; the next one needs room."""
        return max(self.num_scheduled, self.num_known)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in its blocks, once the steps sent so far are computed."""
        behind = self.num_scheduled - self.num_known - 1  # of tokens that it got and that were then computed
        return self.num_prompt_scheduled + max(0, behind)

    @property
    def may_be_preempted(self) -> bool:
        """Whether it has got on since it last made room for another, or never did."""
        return not self.num_preempted or self.num_written - self.num_rebuilt >= MIN_ADVANCE

    @property
    def is_scheduled_to_its_end(self) -> bool:
        """Whether the steps sent so far yield its last token."""
        return self.num_scheduled == self.request.max_new_tokens

    @property
    def is_leaving(self) -> bool:
        """Whether its lane's next step takes it out of the batch: nothing more is to be computed of it."""
        return self.is_over or self.cancelled or self.is_scheduled_to_its_end


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Scheduled):
    """A request with its text and its event queue.

    The reader of `events` gets exactly one last event, Finished or Failed, unless it sets `cancelled`. All other fields
    belong to the batching loop.
    """

    generated: GeneratedText
    queued_at: float
    request_id: str = ""  # As logs and the client have it; of no meaning to anything here.
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    num_cached: int = 0  # Prompt tokens found in the prefix cache when it was first admitted.
    admitted_at: float = 0.0
    last_token_at: float = 0.0
    first_token_at: float = 0.0
    prompt_scores: PromptScores = field(default_factory=PromptScores)
    forced_scores: PromptScores = field(default_factory=PromptScores)  # the model's own, where they are asked for
    match: Match | None = None  # what finds out what its grammar allows

    @property
    def stopped_by(self) -> str | int | None:
        """What of the request's own ended it, where that is no part of its text."""
        if self.generated.stop_sequence is not None:
            return self.generated.stop_sequence
        last = self.generated_ids[-1] if self.generated_ids else None
        return last if last in self.request.ends.stop_ids else None

    def note_logprobs(self, logprobs: Sequence[float], top_ids: Sequence[int], top_logprobs: Sequence[float]) -> None:
        """Keep what a step found of tokens that are known: first those of the prompt, then those that are forced."""
        wants_prompt = self.request.prompt_logprobs and not self.generated_ids
        missing = len(self.request.token_ids) - 1 - len(self.prompt_scores.logprobs) if wants_prompt else 0
        cut = missing * (len(top_ids) // max(len(logprobs), 1))
        self.prompt_scores.extend(logprobs[:missing], top_ids[:cut], top_logprobs[:cut])
        self.forced_scores.extend(logprobs[missing:], top_ids[cut:], top_logprobs[cut:])

    def forget_logprobs(self) -> None:
        """Its sequence is computed again, and what was found of tokens that are known is found again."""
        if not self.generated_ids:
            self.prompt_scores.clear()
        self.forced_scores.clear()


class PrefixKeys:
    """The keys of a sequence that grows. Tokens beyond the last full block wait for those that complete it."""

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str = "", adapter: bytes = b"") -> None:
        """salt, adapter (its key): blocks are shared with sequences of the same ones alone."""
        self.keys: list[bytes] = []
        self._block_size = block_size
        salted = salt.encode(errors="surrogatepass")  # hashed apart: no salt may be what a digest and a block look like
        person = b"salt" if salted else b""
        self._last = blake2b(salted, digest_size=KEY_BYTES, key=adapter, person=person).digest()
        self._tail: list[int] = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens; `keys` grows by one for each block that they fill."""
        tokens, size = [*self._tail, *token_ids], self._block_size
        full = len(tokens) - len(tokens) % size
        for start in range(0, full, size):
            content = array("I", tokens[start : start + size]).tobytes()
            self._last = blake2b(self._last + content, digest_size=KEY_BYTES).digest()
            self.keys.append(self._last)
        self._tail = tokens[full:]
