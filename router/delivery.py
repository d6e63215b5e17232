"""From a token to what its request's reader gets: text, events, and the times that are measured.

Where log-probabilities are the model's own, candidates and prompts stay as compact as they came: an API that tells of
them knows what their texts are.

Left out: whose token it is, and how a request ends (`batcher.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.entry import Entry, PromptScores, PromptTokens, ScoredToken, Token
from router.metrics import Metrics
from router.scheduler import Scheduler
from router.text import FinishReason, ModelTokenizer


class TokenEvents:
    """Makes events with one tokenizer."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    def of_token(
        self, entry: Entry, token_id: int, text: str, logprob: float | None, candidates: Sequence[tuple[int, float]]
    ) -> Token:
        """A token that was generated, and whose text has just been found. Raises TokenizerError."""
        is_special = token_id in self._tokenizer.special_ids and token_id not in entry.request.ends.shown_ids
        if entry.request.sampling.raw_logprobs:
            return ScoredToken(token_id, text, logprob, is_special, (), entry.generated.piece, candidates)
        return Token(token_id, text, logprob, is_special, tuple(self._lone(id, value) for id, value in candidates))

    def of_prompt(self, entry: Entry) -> PromptTokens | PromptScores:
        """The log-probabilities of its prompt, all of which have come. Raises TokenizerError."""
        if entry.request.sampling.raw_logprobs:
            return entry.prompt_scores
        prompt = zip(entry.request.token_ids, [None, *entry.prompt_scores.logprobs], strict=True)
        return PromptTokens(tuple(self._lone(id, logprob) for id, logprob in prompt))

    def _lone(self, id: int, logprob: float | None) -> Token:
        return Token(id, self._tokenizer.token_text(id), logprob, id in self._tokenizer.special_ids)


Candidates = list[tuple[int, float]]
KnownToken = tuple[int, float | None, Candidates]  # id, log-probability, candidates


class Delivery:
    """Delivers the tokens of all requests."""

    def __init__(self, scheduler: Scheduler[Entry], tokenizer: ModelTokenizer, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._events = TokenEvents(tokenizer)
        self._metrics = metrics

    def deliver(
        self, entry: Entry, token_id: int, logprob: float, top_tokens: Candidates, now: float
    ) -> FinishReason | None:
        """Give a token to its reader; why it is the last, if it is."""
        if not entry.request.generates:  # nothing is wanted of the token but that the prompt is computed
            self._note_time(entry, now)
            return FinishReason.LENGTH
        text, reason = entry.generated.push(token_id)
        self._scheduler.delivered(entry, token_id)
        self._note_time(entry, now)
        entry.events.put_nowait(self._events.of_token(entry, token_id, text, logprob, top_tokens))
        return reason

    def take_known(self, entry: Entry, tokens: Sequence[KnownToken]) -> FinishReason | None:
        """Give the reader tokens that another server has generated; why the last of them ends it, if it does."""
        for token_id, logprob, top_tokens in tokens:
            text, reason = entry.generated.push(token_id)
            entry.generated_ids.append(token_id)
            entry.events.put_nowait(self._events.of_token(entry, token_id, text, logprob, top_tokens))
            if reason is not None:
                return reason
        return None

    def take_forced(self, entry: Entry) -> Iterator[tuple[int, float, Candidates]]:
        """What its grammar had come before the token that has come, with log-probabilities: none for most requests."""
        return iter(()) if entry.match is None else _forced(entry, self._scheduler.taken(entry))

    def _note_time(self, entry: Entry, now: float) -> None:
        if entry.first_token_at:
            self._metrics.inter_token.observe(now - entry.last_token_at)
        else:
            entry.first_token_at = now
            if entry.request.generates:
                self._metrics.time_to_first_token.observe(now - entry.queued_at)
            if entry.request.prompt_logprobs:
                entry.events.put_nowait(self._events.of_prompt(entry))
        entry.last_token_at = now


def _forced(entry: Entry, token_ids: Sequence[int]) -> Iterator[tuple[int, float, Candidates]]:
    """The model's own log-probabilities where these are asked for; else no other token was possible."""
    scores, entry.forced_scores = entry.forced_scores, PromptScores()
    for place, token_id in enumerate(token_ids):
        if entry.request.sampling.raw_logprobs:
            yield token_id, scores.logprobs[place], list(scores.candidates(place))
        else:
            yield token_id, 0.0, [(token_id, 0.0)] if entry.request.top_n_tokens else []
