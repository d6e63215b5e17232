"""How much of a sequence windowed layers keep: a ring of blocks, or all of its tokens as the other layers do.

A query of a windowed layer sees the latest tokens alone, so such a layer needs no more than those and the tokens of the
step at hand. A sequence's ring has room for both in its largest step, and the next block of tokens goes where the
oldest one was; therefore a prompt advances by at most `Ring.most_at_once` tokens in a step. Where that would save
little, nothing is different from a model without windows.

Arithmetic alone, for shards before they take memory and for plans without any. Left out: encoders, and models that have
recurrent layers beside windowed ones, of which there are none: their windowed layers keep all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.arch.spec import ArchSpec
from server.blocks import num_blocks

# Tokens of a prompt in one step: with as many, a step is no longer the reading of weights.
MOST_AT_ONCE = 512
LEAST_SAVING = 2  # times that the longest sequence is as long as a ring


@dataclass(frozen=True)
class Ring:
    """What a windowed layer keeps of a sequence."""

    window_blocks: int  # that hold what the next token sees behind a block's border, at least one
    most_at_once: int  # tokens of the sequence in one step

    @property
    def num_blocks(self) -> int:
        """A step may begin within a block, and its window within another."""
        return self.window_blocks + num_blocks(self.most_at_once) + 1

    def place(self, block: int) -> int:
        """Where in the ring a sequence's block of tokens is, as long as no later one is there."""
        return block % self.num_blocks


def largest_window(spec: ArchSpec) -> int:
    """Tokens that a query sees in the layers that may have rings; 0: none may."""
    if spec.encoder is not None or spec.recurrences:
        return 0
    return max(layer.window for layer in spec.layers)


def ring_for(window: int, prefill_tokens: int, total_tokens: int) -> Ring | None:
    """The ring of layers that see so many tokens; None: they keep all.

    prefill_tokens: of the largest step; total_tokens: of the longest sequence.
    """
    if not window:
        return None
    ring = Ring(max(1, num_blocks(window - 1)), min(prefill_tokens, MOST_AT_ONCE))
    return ring if LEAST_SAVING * ring.num_blocks <= num_blocks(total_tokens) else None
