"""What guesses tokens behind those that a step chose: the engine's side of a speculative model (`server/drafting/`).

A proposer computes on the engine's thread, behind the step's own computation, so that all ranks speak to each other in
the same order. What it keeps of tokens lies in blocks of the same numbers as the model's own, and so is handed out,
shared among prompts, moved and given back with these. A wrong proposal costs time and changes nothing: the model
chooses each token (docs/decisions/0031).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from server.backends.device import Device
from server.backends.protocol import GraphCapture
from server.stepping.batch import Tables
from server.stepping.cache import KVShape
from server.stepping.next_tokens import TokenChooser
from server.stepping.sequences import SequenceState, StepRuns
from server.stepping.vocabulary import Vocabulary


class Came(NamedTuple):
    """What a sequence got in a step."""

    sequence: SequenceState
    token_ids: Sequence[int]


class Proposal(NamedTuple):
    """Tokens that may come behind a sequence's latest one, and how likely each is behind those before it."""

    id: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class Surroundings:
    """What an engine shares with its proposer for as long as its KV cache is there."""

    tables: Tables
    caches: Sequence[Tensor]  # of the proposer's own layers
    device: Device
    chooser: TokenChooser  # chooses as the engine's own does
    vocabulary: Vocabulary  # of the model
    capture: GraphCapture | None  # None: nothing is captured
    most: int  # sequences at once
    captures_exactly: bool = False  # whether passes over few known tokens are captured as they come


class Proposer(Protocol):
    """A speculative model on one rank."""

    @property
    def description(self) -> str:
        """What it is, for people."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""

    @property
    def most(self) -> int:
        """Tokens that it can propose for a sequence at once."""

    @property
    def kv_shape(self) -> KVShape | None:
        """What it keeps of a token, in blocks; None: nothing."""

    @property
    def reads_features(self) -> bool:
        """Whether it goes on from what the model computed of each token: final hidden states, and at `taps` behind."""

    @property
    def taps(self) -> Sequence[int]:
        """Layers before which the model's residual stream is read, ascending; as many as there are: behind the last."""

    def open(self, around: Surroundings) -> None:
        """Begin over an empty cache. What was opened before is gone."""

    def captures(self) -> Sequence[Callable[[], None]]:
        """What captures its graphs that are known beforehand, the largest first."""

    def close(self) -> None:
        """Let go of the cache."""

    def see(self, plan: StepRuns) -> None:
        """A step is being computed."""

    def follow(self, plan: StepRuns, features: Tensor | None) -> None:
        """Nothing is proposed behind that step. features: [T, F] of its tokens, decodes first, where they are read."""

    def came(self, came: Sequence[Came]) -> None:
        """Sequences got these tokens. Each step's are told once, in order, maybe on another thread."""

    def propose(
        self, plan: StepRuns, features: Tensor | None, came: Sequence[Came], wanted: Mapping[int, int]
    ) -> list[Proposal]:
        """As `follow`, and at most so many tokens for each of these sequences, by id.

        came: of this step, which `came` has been told.
        """
