"""The events that tell of a sequence's tokens, generated ones and those of its prompt.

Pure functions of the tokenizer. Where log-probabilities are the model's own, candidates and prompts stay as compact as
they came: an API that tells of them knows what their texts are.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.entry import Entry, PromptScores, PromptTokens, ScoredToken, Token
from router.text import ModelTokenizer


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
