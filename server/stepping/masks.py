"""What grammars allow in a step: tokens that sequences may get, and the end of all others.

Which those are is found beside the router, from the text so far, and a shard is told for each step. A rank makes the
logits of its other tokens minus infinity, before anything else looks at them. Equal masks, as sequences inside a string
share them, cross the wire once and are unpacked once.

A grammar counts more than biases, banned words and `min_tokens`: where these leave nothing of what it allows, they do
not count in that step.

Shapes: R rows, V vocabulary, Vl this rank's part of it, U different masks in bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.backends.device import Device
from server.stepping.vocabulary import Vocabulary

NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class Allowed:
    """The tokens that some sequences may get: their ids, or uint8 [ceil(V / 8)] from the first byte's lowest bit on."""

    ids: tuple[int, ...] | None = None
    bits: NDArray[np.uint8] | None = None

    @classmethod
    def of_bits(cls, given: bytes, size: int) -> Allowed:
        """Of a vocabulary of `size` tokens. What is beyond it is not there, and where the bits end, nothing is."""
        bits = np.zeros(-(-size // 8), dtype=np.uint8)
        read = np.frombuffer(given, dtype=np.uint8)[: len(bits)]
        bits[: len(read)] = read
        bits[-1] &= (1 << (size - 1) % 8 + 1) - 1
        return cls(bits=bits)

    @classmethod
    def but(cls, ids: Sequence[int], size: int) -> Allowed:
        """All tokens but these."""
        forbidden = np.array(ids, dtype=np.int64)
        tokens = np.ones(size, dtype=bool)
        tokens[forbidden[forbidden < size]] = False
        return cls(bits=np.packbits(tokens, bitorder="little"))


class Masks:
    """What the rows of a step may get. allowed: of each of R rows, None where anything goes.

    Adding 0 or minus infinity, looked up for each byte of a mask, takes a CPU a tenth of the time of `masked_fill`.
    """

    def __init__(self, allowed: Sequence[Allowed | None], device: Device, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        rows = [(row, one) for row, one in enumerate(allowed) if one is not None]
        listed = [(row, one.ids) for row, one in rows if one.ids is not None]
        mine = [(row, id - vocabulary.start) for row, ids in listed for id in ids if vocabulary.has(id)]
        self._listed_rows = device.upload([row for row, _ in listed])
        self._listed = device.upload([row for row, _ in mine]), device.upload([column for _, column in mine])
        packed = [(row, one.bits) for row, one in rows if one.bits is not None]
        self._packed_rows = device.upload([row for row, _ in packed])
        self._packed: Tensor | None = None
        if packed:
            different = {id(bits): bits for _, bits in packed}
            self._packed = _scores(device, np.stack(list(different.values())), vocabulary)
            if len(different) < len(packed):
                places = {key: place for place, key in enumerate(different)}
                self._packed = self._packed[device.upload([places[id(bits)] for _, bits in packed])]

    def apply(self, logits: Tensor, unbiased: Tensor | None = None) -> Tensor:
        """Logits [R, Vl], float32, of which only what is allowed is left; changed in place, and so is `unbiased`.

        unbiased: the same before biases, which hold for rows where the biases leave nothing of what is allowed.
        """
        self._forbid(logits)
        if unbiased is None:
            return logits
        is_empty = self._vocabulary.best(logits) == NEVER
        self._forbid(unbiased)
        return torch.where(is_empty, unbiased, logits)

    def _forbid(self, logits: Tensor) -> None:
        if len(self._listed_rows):
            kept = logits[self._listed]
            logits.index_fill_(0, self._listed_rows, NEVER).index_put_(self._listed, kept)
        if self._packed is not None:
            logits.index_add_(0, self._packed_rows, self._packed)


def _scores(device: Device, bits: NDArray[np.uint8], vocabulary: Vocabulary) -> Tensor:
    """[U, Vl] what is added to the logits of this rank's tokens, from masks [U, ceil(V / 8)]; padding is forbidden."""
    first = vocabulary.start // 8
    bits = bits[:, first : -(-(vocabulary.start + vocabulary.width) // 8)]
    uploaded = device.upload(cast(Sequence[Any], bits), torch.int32)  # torch takes arrays for sequences
    bytes_ = torch.arange(256, device=uploaded.device).unsqueeze(1)
    of_byte = torch.zeros(256, 8, device=uploaded.device)
    of_byte.masked_fill_((bytes_ >> torch.arange(8, device=uploaded.device)) & 1 == 0, NEVER)
    scores = of_byte.index_select(0, uploaded.flatten()).view(len(bits), -1)
    skipped = vocabulary.start - 8 * first
    scores = scores[:, skipped : skipped + vocabulary.width]
    missing = vocabulary.width - scores.shape[1]
    return torch.nn.functional.pad(scores, (0, missing), value=NEVER) if missing else scores
