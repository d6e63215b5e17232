"""Where the last tokens of a text occurred before: the longest match, in a few microseconds.

Each pair of tokens is chained to the pair before it with the same hash, as LZ77 compressors do it, and the latest of
a chain are compared with the text's end. 15,000 tokens of code are indexed in 1 ms at 18 bytes each; a suffix
automaton, which finds every match, takes 16 ms and 444 bytes. Left out: places further back in a chain than
MOST_LOOKED_AT.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

LEAST_MATCH = 2  # tokens: one token says too little of the next
MOST_MATCH = 32  # tokens that are compared: longer matches count as this long
MOST_LOOKED_AT = 8  # places, of about 0.2 µs each
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

    def copy(self) -> TokenIndex:
        """Another one of the same tokens, in a twentieth of the time that it took to build."""
        other = object.__new__(TokenIndex)
        other.token_ids, other._latest, other._earlier = self.token_ids[:], self._latest[:], self._earlier[:]
        other._mask, other._most_tokens = self._mask, self._most_tokens
        return other

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

    def own_matches(self, first: Sequence[int] = ()) -> tuple[int, list[int]]:
        """As `matches`, of its own last tokens: where these occurred before. first: places to look at before others."""
        return self._compare(self.token_ids[-MOST_MATCH:], self._earlier[-1], LEAST_MATCH, first)

    def places_near(self, place: int, before: int, behind: int) -> list[int]:
        """Places so near to this one where its own last LEAST_MATCH tokens occurred before, in their order."""
        tokens, start = self.token_ids, max(0, place - before)
        size = tokens.itemsize
        window, wanted = tokens[start : min(place + behind, len(tokens) - 1)].tobytes(), tokens[-LEAST_MATCH:].tobytes()
        found, offset = [], window.find(wanted)
        while offset >= 0:
            if offset % size == 0:
                found.append(start + offset // size + LEAST_MATCH)
            offset = window.find(wanted, offset + 1)
        return found

    def matches(self, text: array[int], least: int = LEAST_MATCH) -> tuple[int, list[int]]:
        """How many of the text's last tokens occurred here, MOST_MATCH at most, and the places behind them.

        Latest first. (0, []) if not even the last `least` did, LEAST_MATCH or more.
        """
        if len(text) < least:
            return 0, []
        hash = text[-2] * FACTORS[0] + text[-1] * FACTORS[1] >> HASH_SHIFT & self._mask
        return self._compare(text[-MOST_MATCH:], self._latest[hash], least)

    def _compare(self, text: array[int], latest: int, longest: int, first: Sequence[int] = ()) -> tuple[int, list[int]]:
        """Compare the places of a chain, which begins with the latest one and ends with 0. longest: the least match."""
        tokens, earlier, size = self.token_ids, self._earlier, len(text)
        places = [*first]
        for _ in range(MOST_LOOKED_AT):
            if not latest:
                break
            places.append(latest)
            latest = earlier[latest]
        end = text[-longest:]
        found: list[int] = []
        for place in places:
            if place >= longest and tokens[place - longest : place] == end:
                length, most = longest, min(size, place)
                while length < most and tokens[place - length - 1] == text[size - length - 1]:
                    length += 1
                if length > longest:
                    longest, end = length, text[-length:]
                    found.clear()
                found.append(place)
        return (longest, found) if found else (0, [])
