"""What each token of a vocabulary stands for in bytes, and which tokens a text is made of.

A token may be a part of a character, or the end of one and the beginning of the next, so that bytes alone can say what
it adds to a text. A decoder may also leave something out, such as the space at the start of a text, or treat tokens by
their neighbours: what is shown is the measure then, and the bytes are those of the token's share of it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from router.text import ModelTokenizer

LONE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how sentencepiece names a token that stands for one byte
# A character has at most 4 bytes, so 8 tokens that end inside one are bytes that will never be text.
MOST_OF_A_CHARACTER = 8


class TokenBytes(dict[int, bytes]):
    """Token id -> what it adds to a text in bytes. Filled as tokens come, so that it holds at most the vocabulary."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        added = tokenizer.tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content.encode() for id, token in added.items()}
        decoder = tokenizer.tokenizer.decoder
        is_byte_level = decoder is not None and _has_byte_level(json.loads(decoder.__getstate__()))
        self._byte_of = _bytes_by_character() if is_byte_level else {}

    def __missing__(self, id: int) -> bytes:
        found = self[id] = self._found(id)
        return found

    def _found(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id]
        if piece := self._tokenizer.lone_pieces[id]:
            return piece.encode()
        name = self._tokenizer.tokenizer.id_to_token(id) or ""
        if lone := LONE_BYTE.fullmatch(name):
            return bytes([int(lone[1], 16)])
        if name and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        # At the start of a text it may lose a space: behind itself it does not.
        alone = self._tokenizer.token_text(id)
        return (self._tokenizer.decode([id, id])[len(alone) :] or alone).encode()


def _has_byte_level(decoder: Mapping[str, Any]) -> bool:
    if decoder["type"] == "Sequence":
        return any(_has_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


def _bytes_by_character() -> dict[str, int]:
    """The printable characters by which byte-level vocabularies name bytes: those that are printable, then others."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenShare(NamedTuple):
    """A token's share of a text: its place among the tokens that were pushed, its characters, and its bytes."""

    place: int
    text: str  # empty for all tokens of a character but the last
    data: bytes


class TokenShares:
    """Divides a text that comes in pieces, each with a token, among the tokens."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._num_pushed = 0
        self._open: list[tuple[int, str, bytes]] = []  # tokens whose last character has not come yet

    def push(self, id: int, piece: str) -> list[TokenShare]:
        """The shares that are certain by now, in order. piece: what the text grows by with this token."""
        place, data = self._num_pushed, self._bytes[id]
        self._num_pushed += 1
        if not self._open and data == piece.encode():
            return [TokenShare(place, piece, data)]
        self._open.append((place, piece, data))
        if len(self._open) <= MOST_OF_A_CHARACTER and _ends_inside_a_character(b"".join(d for _, _, d in self._open)):
            return []
        return self.close()

    def close(self) -> list[TokenShare]:
        """The shares of all tokens that are left: no more of their text will come."""
        found, self._open = self._open, []
        text, whole = ("".join(piece for _, piece, _ in found), b"".join(data for _, _, data in found))
        if whole.decode(errors="replace") == text:
            return [TokenShare(*one) for one in found]
        return [TokenShare(place, piece, piece.encode()) for place, piece, _ in found]


def _ends_inside_a_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])
