"""Names for the beginnings of sequences: one digest for each full block, over all tokens up to its end.

Two sequences share a block exactly when they share its digest, so a digest must never collide by accident or design: it
is BLAKE2b, not Python's `hash`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


class PrefixKeys:
    """The keys of a sequence that grows. Tokens beyond the last full block wait for those that complete it."""

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str = "") -> None:
        """salt: of whose sequences alone it may share."""
        self.keys: list[bytes] = []
        self._block_size = block_size
        whose = salt.encode(errors="surrogatepass")  # hashed apart: no salt may be what a digest and a block look like
        self._last = blake2b(whose, digest_size=DIGEST_BYTES, person=b"salt" if whose else b"").digest()
        self._tail: list[int] = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens; `keys` grows by one for each block that they fill."""
        tokens, size = [*self._tail, *token_ids], self._block_size
        full = len(tokens) - len(tokens) % size
        for start in range(0, full, size):
            content = array("I", tokens[start : start + size]).tobytes()
            self._last = blake2b(self._last + content, digest_size=DIGEST_BYTES).digest()
            self.keys.append(self._last)
        self._tail = tokens[full:]
