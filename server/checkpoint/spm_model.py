"""A sentencepiece `tokenizer.model` as read from its bytes, and the reasons to refuse one.

The format is sentencepiece_model.proto of the sentencepiece library. A model is untrusted and may be of kinds that no
served model has: of words or characters, with a vocabulary restricted to a part (unused pieces), with spaces written
behind words, or with a denormalizer. Such a model is refused here, so that the conversion (`spm.py`) need not ask.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as pb

SPACE = "▁"  # how sentencepiece writes a space inside pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # piece types of sentencepiece_model.proto
UNIGRAM, BPE = 1, 2  # model types

Piece = Any  # messages of sentencepiece_model.proto, which has no annotations
Model = Any


class SpmError(ValueError):
    """Why a sentencepiece model cannot be converted, as a part of a sentence."""


def parse(data: bytes) -> Model:
    """The model that these bytes hold, checked for what the conversion relies on. Raises SpmError."""
    try:
        model = pb.ModelProto.FromString(data)  # type: ignore[attr-defined]  # protobuf makes the class at import
    except DecodeError:
        raise SpmError("tokenizer.model is not a sentencepiece model") from None
    for is_wrong, problem in _problems(model):
        if is_wrong:
            raise SpmError(f"tokenizer.model {problem}")
    return model


def _problems(model: Model) -> Iterator[tuple[bool, str]]:
    """Each reason to refuse a model, and whether this one gives it."""
    types = Counter(piece.type for piece in model.pieces)
    spec = model.trainer_spec
    yield types[UNKNOWN] != 1, "is not a sentencepiece model: it has not one unknown piece"
    yield len({piece.piece for piece in model.pieces}) < len(model.pieces), "names a piece twice"
    yield not all(math.isfinite(piece.score) for piece in model.pieces), "has a score that is no number"
    yield spec.model_type not in (UNIGRAM, BPE), "is neither BPE nor Unigram"
    yield types[UNUSED] > 0, "has unused pieces"
    yield spec.treat_whitespace_as_suffix, "writes spaces behind words"
    yield bool(model.denormalizer_spec.precompiled_charsmap), "has a denormalizer"
    is_complete = {f"<0x{byte:02X}>" for byte in range(256)} <= {piece.piece for piece in model.pieces}
    yield spec.byte_fallback and not is_complete, "lacks byte pieces"
