"""What an ingress knows of a stream that it passes on, so that another replica can continue it.

Replicas write a comment after the frames of every write (`router/requests/continuing.py`). Frames without one yet are
held back and, when the replica is lost, dropped: the client has whole writes only, and the next replica continues after
the last.
"""

from __future__ import annotations

from typing import Any

import orjson

MARK = b": lockstep "
END = b"\n\n"
MOST_PENDING_BYTES = 64 << 20  # of one write; the whole text of an answer, told again


class StreamBroken(Exception):
    """What came is no stream of ours."""


class Stream:
    """One stream of server-sent events, over all replicas that had it."""

    def __init__(self) -> None:
        self.created = 0
        self.num_commits = 0
        self.num_tokens = 0
        self._samples: list[dict[str, Any]] = []
        self._adapter: dict[str, str] = {}  # its key, if the stream has one
        self._buffer = bytearray()  # a block that is not whole
        self._pending: list[bytes] = []  # blocks that no comment has confirmed
        self._num_pending = 0

    def feed(self, data: bytes) -> bytes:
        """Take what has come; returns what the client may have now. Raises StreamBroken."""
        self._buffer += data
        if self._num_pending + len(self._buffer) > MOST_PENDING_BYTES:
            raise StreamBroken(f"more than {MOST_PENDING_BYTES} bytes came without a word on what they tell of")
        *blocks, rest = self._buffer.split(END)
        self._buffer = rest
        ready: list[bytes] = []
        for block in blocks:
            if block.startswith(MARK):
                self._note(block)
                ready += self._pending
                self._pending, self._num_pending = [], 0
            else:
                self._pending.append(bytes(block) + END)
                self._num_pending += len(block)
        return b"".join(ready)

    def _note(self, block: bytearray) -> None:
        try:
            said = orjson.loads(block[len(MARK) :])
        except orjson.JSONDecodeError as error:
            raise StreamBroken(f"a comment of the replica is no JSON: {error}") from None
        if not said:
            return
        if "seeds" in said and not self._samples:
            self.created = said["created"]
            self._samples = [{"seed": seed, "tokens": [], "is_over": False} for seed in said["seeds"]]
            self._adapter = {"adapter": said["adapter"]} if "adapter" in said else {}
        for index, *token in said["tokens"]:
            self._samples[index]["tokens"].append(token)
        for index in said["over"]:
            self._samples[index]["is_over"] = True
        self.num_tokens += len(said["tokens"])
        self.num_commits += 1

    @property
    def is_over(self) -> bool:
        """Whether the client has its end."""
        return bool(self._samples) and all(one["is_over"] for one in self._samples)

    def lost(self) -> bytes:
        """The replica is gone: forget what was not confirmed, and return it; it may hold the replica's own error."""
        unconfirmed = b"".join(self._pending)
        self._pending, self._num_pending, self._buffer = [], 0, bytearray()
        return unconfirmed

    def known(self) -> bytes:
        """What the next replica has to know, for before its body; empty where the client has nothing yet."""
        if not self._samples:
            return b""
        return orjson.dumps({"created": self.created, "samples": self._samples, **self._adapter})
