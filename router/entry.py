"""A request as it lives in the router: what was asked, what has been scheduled, and the events that answer it.

Plain data shared by validation, the batching loop and the HTTP layer, so that none of them imports another for a type.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from router.errors import RouterError
from router.prefix import PrefixKeys
from router.queue import RequestSize
from router.text import FinishReason, GeneratedText


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
    watermark: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """One request that keeps every rule and limit."""

    token_ids: Sequence[int]  # what the decoder starts from: the prompt, or an encoder-decoder's start token
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    encoder_ids: Sequence[int] = ()  # the prompt, where an encoder reads it

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.encoder_ids or self.token_ids)

    def read_by_encoder(self, decoder_start: int | None) -> ValidRequest:
        """The same for an encoder-decoder, whose decoder starts from `decoder_start`; None: unchanged."""
        if decoder_start is None:
            return self
        return replace(self, token_ids=[decoder_start], encoder_ids=self.token_ids)

    def size(self, cached: int = 0) -> RequestSize:
        """What it needs when so many tokens of its prompt are in the KV cache."""
        return RequestSize(self.input_length, self.max_new_tokens, bool(self.encoder_ids), cached)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a sequence. `logprob` is None for the first of a prompt."""

    id: int
    text: str
    logprob: float | None
    special: bool
    top_tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Event, before the first token: the prompt with its log-probabilities, for requests that asked."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of the batching loop's clock."""

    queued: float
    admitted: float
    first_token: float
    finished: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Event, last: the request is complete."""

    reason: FinishReason
    generated_text: str
    generated_tokens: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """Event, last: the request ended without its text."""

    error: RouterError


Event = PromptTokens | Token | Finished | Failed


@dataclass(slots=True, eq=False)
class Scheduled:
    """A request as the scheduler sees it: waiting or running, and how far it has come."""

    id: int  # of its sequence on the shards: made here, never reused, never a client's
    request: ValidRequest
    cancelled: bool = False  # set by the reader when nobody wants the answer any more
    is_over: bool = False  # its last event is out, or nobody wants it: tokens still under way are surplus
    is_lost: bool = False  # the shards dropped it with a failed step: what requests under way ask for it is not done

    # What the scheduler alone knows.
    keys: PrefixKeys | None = None  # of its full blocks; None: it shares none
    blocks: list[int] = field(default_factory=list)
    num_prompt_scheduled: int = 0  # prompt tokens that others had computed, or in requests sent so far …
    num_scheduled: int = 0  # … and generated tokens that those requests yield
    last_token: int | None = None  # that has come back

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens that no step sent so far computes."""
        return len(self.request.token_ids) - self.num_prompt_scheduled

    @property
    def is_scheduled_to_its_end(self) -> bool:
        """Whether the steps sent so far yield its last token."""
        return self.num_scheduled == self.request.max_new_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Scheduled):
    """A request with its text and its event queue.

    The reader of `events` gets exactly one last event, Finished or Failed, unless it sets `cancelled`. All other fields
    belong to the batching loop.
    """

    generated: GeneratedText
    queued_at: float
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    admitted_at: float = 0.0
    last_token_at: float = 0.0
    first_token_at: float = 0.0
    prompt_logprobs: list[float] = field(default_factory=list)
