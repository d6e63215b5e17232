"""What two launchers say to each other: lines of JSON over a socket that never blocks, and a beat every second.

Neither side believes the other's lines to be well formed: what is not ends the talk, as silence does.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

BEAT_S = 1.0
SILENCE_S = 10.0  # after which the other side counts as gone; a link that is cut for less goes on
LINE_BYTES = 1 << 16
READ_BYTES = 1 << 16


class TalkEnded(Exception):
    """The other side is gone, or says what is no message; the reason is in the message."""


class Talk:
    """One end, whose descriptor a selector watches."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._received = bytearray()
        self._heard_at = time.monotonic()

    def fileno(self) -> int:
        """The socket's."""
        return self._end.fileno()

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises TalkEnded where the other side takes none."""
        line = json.dumps(message).encode() + b"\n"
        try:
            if self._end.send(line) != len(line):
                raise TalkEnded("it takes no messages any more")
        except OSError as error:
            raise TalkEnded(error.strerror or "the connection ended") from None

    def hear(self) -> list[dict[str, Any]]:
        """The messages that have come. Raises TalkEnded once there are no more."""
        try:
            data = self._end.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise TalkEnded(error.strerror or "the connection ended") from None
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        if lines:
            self._heard_at = time.monotonic()
            return [_parse(bytes(line)) for line in lines]
        if not data:
            raise TalkEnded("the connection ended")
        if len(rest) > LINE_BYTES:
            raise TalkEnded("it said what is no message")
        return []

    def beat(self) -> None:
        """Say that this side is there. Raises TalkEnded where the other has not for too long."""
        if time.monotonic() - self._heard_at > SILENCE_S:
            raise TalkEnded(f"it was silent for {SILENCE_S:g} s")
        self.say({})

    def close(self) -> None:
        """End it; the other side notices."""
        self._end.close()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise TalkEnded("it said what is no message")
    return message
