"""Where the last tokens of a text occurred before: the longest match, in a few microseconds.

Each pair of tokens is chained to the pair before it with the same hash, as LZ77 compressors do it; the latest places of
a chain are compared with the text's end. A suffix automaton would find every match, but a token costs it several times
as much in Python, and a hundred times the memory: here a token takes at most 16 bytes. What stands further back in a
chain than MOST_LOOKED_AT is not found.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

LEAST_MATCH = 2  # tokens: one token says too little of the next
MOST_MATCH = 32  # tokens that are compared: longer matches count as this long
MOST_LOOKED_AT = 16  # places, of about 0.1 µs each
FACTORS = 0x9E3779, 0x85EBCB  # odd ones below 2²⁴: the hash of two ids fits into 64 bits
HASH_SHIFT = 12
MOST_HASHES = 1 << 16  # numpy sorts numbers of 16 bits several times as fast


class TokenIndex:
    """Tokens, and for each pair of them where it occurred. A place is how many tokens stand before it."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self.token_ids = array("i", token_ids)
        self._build()

    def _build(self) -> None:
        """Chain all pairs. Between two builds the tokens double, so that it costs each token about 0.05 µs."""
        ids = np.frombuffer(self.token_ids, dtype=np.int32).astype(np.int64)
        self._most_tokens = max(64, 2 * len(ids))
        num_hashes = min(MOST_HASHES, 1 << (self._most_tokens - 1).bit_length())
        self._mask = num_hashes - 1
        hashes = (ids[:-1] * FACTORS[0] + ids[1:] * FACTORS[1] >> HASH_SHIFT & self._mask).astype(np.uint16)
        order = np.argsort(hashes, kind="stable")
        hashes, places = hashes[order], (order + 2).astype(np.int32)
        is_same = hashes[1:] == hashes[:-1]
        latest, earlier = np.zeros(num_hashes, np.int32), np.zeros(len(ids) + 1, np.int32)
        earlier[places[1:][is_same]] = places[:-1][is_same]
        latest[hashes] = places  # of the places with one hash, the last one stays
        self._latest, self._earlier = array("i", latest.tobytes()), array("i", earlier.tobytes())

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens."""
        tokens, latest, earlier = self.token_ids, self._latest, self._earlier
        if len(tokens) + len(token_ids) > self._most_tokens:
            tokens.extend(token_ids)
            self._build()
            return
        last = tokens[-1] if tokens else -1
        for id in token_ids:
            hash = last * FACTORS[0] + id * FACTORS[1] >> HASH_SHIFT & self._mask
            tokens.append(id)
            earlier.append(latest[hash])
            latest[hash] = len(tokens)
            last = id

    def own_matches(self) -> tuple[int, list[int]]:
        """As `matches`, of its own last tokens: where these occurred before."""
        return self._compare(self.token_ids[-MOST_MATCH:], self._earlier[-1])

    def matches(self, text: array[int]) -> tuple[int, list[int]]:
        """How many of the text's last tokens occurred here, MOST_MATCH at most, and the places behind them.

        Latest first. (0, []) if not even the last LEAST_MATCH did.
        """
        if len(text) < LEAST_MATCH:
            return 0, []
        hash = text[-2] * FACTORS[0] + text[-1] * FACTORS[1] >> HASH_SHIFT & self._mask
        return self._compare(text[-MOST_MATCH:], self._latest[hash])

    def _compare(self, text: array[int], place: int) -> tuple[int, list[int]]:
        tokens, earlier, size = self.token_ids, self._earlier, len(text)
        longest = LEAST_MATCH
        found: list[int] = []
        end = text[-longest:]
        for _ in range(MOST_LOOKED_AT):
            if not place:
                break
            if place >= longest and tokens[place - longest : place] == end:
                length, most = longest, min(size, place)
                while length < most and tokens[place - length - 1] == text[size - length - 1]:
                    length += 1
                if length > longest:
                    longest, found, end = length, [], text[-length:]
                found.append(place)
            place = earlier[place]
        return (longest, found) if found else (0, [])
