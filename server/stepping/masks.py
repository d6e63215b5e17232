"""What grammars allow in a step: tokens that sequences may get, and the end of all others.

Which those are is found beside the router, from the text so far, and a shard is told for each step. A rank makes the
logits of its other tokens minus infinity, before anything else looks at them. Equal masks, as sequences inside a string
share them, cross the wire once and are unpacked once.

A grammar counts more than biases, banned words and `min_tokens`: where these leave nothing of what it allows, they do
not count in that step.

Shapes: R rows, M of them with a grammar, V vocabulary, Vl this rank's part of it, U different masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.backends.protocol import Device
from server.stepping.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Allowed:
    """The tokens that some sequences may get. bits: uint8 [ceil(V / 8)], from the lowest bit of the first byte on."""

    bits: NDArray[np.uint8]

    @classmethod
    def of_bits(cls, given: bytes, size: int) -> Allowed:
        """Of a vocabulary of `size` tokens. What is beyond it is not there, and where the bits end, nothing is."""
        bits = np.zeros(-(-size // 8), dtype=np.uint8)
        read = np.frombuffer(given, dtype=np.uint8)[: len(bits)]
        bits[: len(read)] = read
        bits[-1] &= (1 << (size - 1) % 8 + 1) - 1
        return cls(bits)

    @classmethod
    def of_ids(cls, ids: Sequence[int], size: int, *, is_listed: bool) -> Allowed:
        """These tokens, or all others."""
        listed = np.array(ids, dtype=np.int64)
        tokens = np.full(size, not is_listed)
        tokens[listed[listed < size]] = is_listed
        return cls(np.packbits(tokens, bitorder="little"))


class Masks:
    """What the rows of a step may get. allowed: of each of R rows, None where anything goes."""

    def __init__(self, allowed: Sequence[Allowed | None], device: Device, vocabulary: Vocabulary):
        found = {id(one): one for one in allowed if one is not None}
        places = {key: place for place, key in enumerate(found)}
        with_mask = [(row, places[id(one)]) for row, one in enumerate(allowed) if one is not None]
        packed = np.stack([one.bits for one in found.values()])
        bits = device.upload(cast(Sequence[Any], packed), torch.uint8)  # torch takes arrays for sequences
        self._vocabulary = vocabulary
        self._rows = device.upload([row for row, _ in with_mask])
        self._is_all = len(with_mask) == len(allowed)
        forbidden = _mine(bits, vocabulary)
        self._forbidden = (
            forbidden if len(found) == len(with_mask) else forbidden[device.upload([u for _, u in with_mask])]
        )

    def apply(self, logits: Tensor, *, wins: bool = False) -> Tensor:
        """Logits [R, Vl], float32, in which only what is allowed is left, perhaps changed in place.

        wins: where nothing of what is allowed is likelier than minus infinity, all of it is equally likely.
        """
        rows = logits if self._is_all else logits.index_select(0, self._rows)
        if wins:
            best = self._vocabulary.best(rows.masked_fill(self._forbidden, float("-inf")))
            rows = rows.masked_fill(best == float("-inf"), 0.0)
        rows = rows.masked_fill_(self._forbidden, float("-inf"))
        return rows if self._is_all else logits.index_copy_(0, self._rows, rows)


def _mine(bits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[U, Vl] which of this rank's tokens are forbidden, from what all may be [U, ceil(V / 8)]; padding is."""
    first = vocabulary.start // 8
    bits = bits[:, first : -(-(vocabulary.start + vocabulary.width) // 8)]
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    forbidden = ((bits.unsqueeze(2) >> places) & 1).flatten(1) == 0
    skipped = vocabulary.start - 8 * first
    forbidden = forbidden[:, skipped : skipped + vocabulary.width]
    missing = vocabulary.width - forbidden.shape[1]
    return torch.nn.functional.pad(forbidden, (0, missing), value=True) if missing else forbidden
