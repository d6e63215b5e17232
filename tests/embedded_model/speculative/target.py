"""What the embedded model computes of texts, from which speculative models learn (Hinton et al., arXiv 1503.02531).

Shapes: R texts, T tokens of the longest, D the model's width, V its vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import BloomForCausalLM

from tests.embedded_model import train
from tests.running import ROOT

FOLDER = ROOT / "server" / "demo"
MIXED = 0.7  # of what is learned, the share of the model's own distribution; the rest is the text's next token


class Seen(NamedTuple):
    """Texts and what the model computed of them."""

    ids: Tensor  # [R, T], padded behind
    targets: Tensor  # [R, T]: the next token, `train.IGNORED` where there is none
    streams: list[Tensor]  # [R, T, D] each: before each layer, and behind the last and its norm
    shares: Tensor | None  # [R, T, V]: how likely each next token is; None: nobody asked the model


class Target:
    """The embedded model, which nothing changes any more."""

    def __init__(self) -> None:
        self.model = BloomForCausalLM.from_pretrained(FOLDER, local_files_only=True).eval().requires_grad_(False)
        self.tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))

    @property
    def table(self) -> Tensor:
        """Embeddings [V, D], which are the rows of the head too."""
        return self.model.transformer.word_embeddings.weight

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] → [..., V]."""
        return functional.linear(hidden, self.table)

    @torch.no_grad()
    def sees(self, ids: Tensor, targets: Tensor) -> Seen:
        """Compute these texts."""
        bias = train.attention_bias(ids.shape[1], self.model.config.n_head)
        *streams, last = train.streams(self.model, ids, bias)
        hidden = self.model.transformer.ln_f(last)
        return Seen(ids, targets, [*streams, hidden], self.head(hidden).softmax(-1))

    def texts(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of whole documents, without end."""
        stream = train.token_stream(self.tokenizer, seed)
        return map(train.with_targets, train.document_groups(stream, random.Random(seed + 2)))


class Student(Protocol):
    """What learns to guess what the model says."""

    name: str  # of its folder
    alone: float  # share of its steps, from the first on, in which it learns from texts without the model
    haste: float  # its rate of learning, against the model's own

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What is learned, by name."""

    def loss(self, seen: Seen) -> Tensor:
        """How far its guesses are from what the model says of these texts."""

    def guesses(self, seen: Seen, place: int, most: int) -> list[int]:
        """Of the one text, what comes behind the token at `place` + 1, as the model has read up to `place`."""

    def config(self) -> dict[str, object]:
        """The content of config.json."""

    def tensors(self) -> dict[str, Tensor]:
        """The content of its weights' file, by published names."""


def distance(logits: Tensor, seen: Seen, ahead: int, known: Tensor | None = None) -> Tensor:
    """Mean cross entropy of logits [R, T - ahead, Vk] behind tokens `ahead` places later, to what the model says there.

    known: the tokens [Vk] that the logits are of, ascending; rows whose next token is another one count for nothing.
    """
    targets = seen.targets[:, ahead:]
    counts = targets != train.IGNORED
    if known is not None:
        places = torch.searchsorted(known, targets.clamp(min=0)).clamp(max=len(known) - 1)
        counts, targets = counts & (known[places] == targets), places
    found = functional.log_softmax(logits[counts], dim=-1)
    hard = functional.nll_loss(found, targets[counts])
    if seen.shares is None:
        return hard
    wanted = seen.shares[:, ahead:][counts]
    if known is not None:
        wanted = functional.normalize(wanted[:, known], p=1, dim=-1)
    soft = -(wanted * found).sum(-1).mean()
    return MIXED * soft + (1 - MIXED) * hard


def accepted(text: Sequence[int], start: int, student: Student, seen: Seen, most: int) -> list[int]:
    """Tokens of each verification where a text is what the model generates behind its first `start` tokens."""
    found, end = [], start + 1  # tokens that are there: the prompt, and one that the prompt's step gave
    while end < len(text):
        guesses = student.guesses(seen, end - 2, most)[: len(text) - end - 1]
        right = 0
        while right < len(guesses) and guesses[right] == text[end + right]:
            right += 1
        found.append(right + 1)
        end += right + 1
    return found
