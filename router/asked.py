"""What a client asks of the model, by whichever API: a prompt, and how to go on from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.schemas import GenerateParameters


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt. Parameters have TGI's names, whatever the API calls them."""

    prompt: str | Sequence[int]  # a text, or token ids as they are
    given: GenerateParameters
    has_special_tokens: bool = (
        False  # whether a text has all special tokens that it needs, as a chat template writes them
    )
    shows_stop: bool = True  # whether a stop sequence is part of the answer's text
    num_answers: int | None = None  # how many are wanted of it, each with a seed of its own; None: by `best_of`
