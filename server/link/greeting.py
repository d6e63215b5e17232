"""What links say before they pass bytes on: one line of JSON by the one who dials, one by the one who answers.

The first names its Lockstep, its launch, its node, and the socket that it wants; the second says that it is connected,
or why not. Neither believes the other more than that: lines are short, names are checked against a list.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from server.link.config import SOCKET_NAME

LINE_BYTES = 1024
TLS_RECORD = b"\x16\x03"  # how a handshake of TLS begins
MOST_REASON = 400  # characters of what the other side says


class Refused(Exception):
    """The other side is not let in, or does not let us in, for the reason in the message."""


class Absent(Refused):
    """The socket is not there, or not yet."""


@dataclass(frozen=True)
class Greeting:
    """Who dials, and for what."""

    version: str
    launch: str
    node: int
    socket: str

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps({"lockstep": asdict(self)}).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Greeting:
        """What `line` made. Raises Refused for anything else."""
        if line.startswith(TLS_RECORD):
            raise Refused("it speaks TLS, and this node has no --tls-dir: give it the cluster's")
        try:
            values = json.loads(line)["lockstep"]
            greeting = cls(**values)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise Refused("it is not a Lockstep link") from None
        texts = (greeting.version, greeting.launch, greeting.socket)
        if not all(isinstance(text, str) for text in texts) or type(greeting.node) is not int:
            raise Refused("it is not a Lockstep link")
        return greeting

    def check(self, version: str, launch: str) -> None:
        """Raise Refused unless it comes from this launch, with our version, for a socket of a launch."""
        if self.version != version:
            raise Refused(
                f"it runs Lockstep {self.version[:40]!r} and this node {version!r}: install the same on all nodes"
            )
        if not SOCKET_NAME.fullmatch(self.socket):
            raise Refused("it asks for a path that is not a socket of a launch")
        if "/" in self.socket and (not launch or self.launch != launch):
            raise Refused("it is of another launch")


def answer(problem: Refused | None = None) -> bytes:
    """The line that says that the connection is there, or why not."""
    values = {"connected": problem is None, "reason": str(problem or ""), "is_absent": isinstance(problem, Absent)}
    return json.dumps(values).encode() + b"\n"


def read_answer(line: bytes) -> None:
    """Raise Refused where `line` says so, or is no answer."""
    try:
        values = json.loads(line)
        is_connected, why, is_absent = values["connected"] is True, str(values["reason"]), values["is_absent"] is True
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Refused("the answer is not from a Lockstep link, or uses TLS: is --tls-dir given here?") from None
    if not is_connected:
        raise (Absent if is_absent else Refused)(why[:MOST_REASON])
