"""What a client asks of the model, by whichever API: a prompt, and how to go on from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from router.requests.schemas import GenerateParameters

# A text that is yet to be made, such as a chat's by the model's template: for an owner, whose requests take turns with
# others'. It is made once the request has its permit and its deadline.
Rendering = Callable[[str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt. Parameters have TGI's names, whatever the API calls them.

    prompt: a text, token ids as they are, or how to make a text. has_special_tokens: whether a text has all special
    tokens that it needs, as a chat template writes them.
    """

    prompt: str | Sequence[int] | Rendering
    given: GenerateParameters
    has_special_tokens: bool = False
    shows_stop: bool = True  # whether a stop sequence is part of the answer's text
    shown_marks: frozenset[int] = frozenset()  # special tokens that are part of the answer's text: marks to read it by
    # From the end of the prompt (`ModelTokenizer.end_of`) to a grammar that holds the answer, in Lark's notation.
    answer_grammar: Callable[[str], str | None] | None = None
    num_answers: int | None = None  # how many are wanted of it, each with a seed of its own; None: by `best_of`
    raw_logprobs: bool = False  # whether log-probabilities and candidates are the model's own, before any parameter
    prompt_logprobs: bool = False  # whether those of the prompt's tokens are wanted too
    priority: int = 0  # the lower, the earlier it leaves the queue, beside others of its key
    cache_salt: str = ""  # prefixes are shared among requests of the same one alone
    generates: bool = True  # else the prompt is computed and nothing follows it; `max_new_tokens` is 1 then
