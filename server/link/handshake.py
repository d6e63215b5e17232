"""What links prove and say to each other before they pass bytes on.

With --tls-dir, TLS 1.3 is mutual: the other side is a node of the cluster if the cluster's own authority signed its
certificate. The files come from `lockstep tls` or from any authority that signs nothing but nodes: names in
certificates are not looked at, for nodes change theirs.

Then the dialling side sends one line of JSON with its version of Lockstep, its launch, its node, and the socket that it
wants; the answering side says that it is connected, or why not. Neither trusts the other further than that: lines are
short, names are checked against a list.
"""

from __future__ import annotations

import json
import ssl
from dataclasses import asdict, dataclass
from pathlib import Path

from server.link.config import SOCKET_NAME

LINE_BYTES = 1024
TLS_RECORD = b"\x16\x03"  # how a handshake of TLS begins
MOST_REASON = 400  # characters of what the other side says
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


class Refused(Exception):
    """The other side is not let in, or does not let us in, for the reason in the message."""


class Absent(Refused):
    """The socket is not there, or not yet."""


class TlsError(ValueError):
    """The files cannot be used, for the reason in the message."""


@dataclass(frozen=True)
class Greeting:
    """What the dialling side says."""

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


@dataclass(frozen=True)
class Contexts:
    """How a link answers and how it dials."""

    answering: ssl.SSLContext
    dialling: ssl.SSLContext


def read_contexts(folder: str | Path) -> Contexts:
    """From the three files in `folder`. Raises TlsError with the file and the remedy."""
    paths = [Path(folder, name) for name in (AUTHORITY, CERTIFICATE, KEY)]
    for path in paths:
        try:
            path.read_bytes()
        except OSError as error:
            raise TlsError(
                f"--tls-dir {folder}: {path.name} cannot be read ({error.strerror}): make the folder once with "
                f"`lockstep tls {folder}` and copy it to every node"
            ) from None
    return Contexts(_context(ssl.PROTOCOL_TLS_SERVER, paths), _context(ssl.PROTOCOL_TLS_CLIENT, paths))


def _context(protocol: int, paths: list[Path]) -> ssl.SSLContext:
    authority, certificate, key = paths
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise TlsError(
            f"--tls-dir {authority.parent}: the certificates cannot be used ({error}): make the folder anew with "
            "`lockstep tls`, and give every node a copy of the same one"
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("key.pem needs a passphrase, which a server cannot ask for")


def reason(error: BaseException) -> str:
    """Why a handshake, or what follows it, failed, for people."""
    text = str(error).lower()
    for signs, sentence in REASONS:
        if any(sign in text for sign in signs):
            return sentence
    return str(error) or type(error).__name__


REASONS = (
    (("not yet valid",), "its certificate is not valid yet: compare the clocks of both nodes"),
    (("expired",), "a certificate has expired: make new ones with `lockstep tls`, or compare the clocks of both nodes"),
    (
        ("certificate required", "did not return a certificate", "certificate_required"),
        "it has no certificate: give it the cluster's --tls-dir",
    ),
    (
        ("unknown ca", "self-signed", "self signed", "unable to get", "verify failed", "bad certificate",
         "certificate unknown", "decrypt error", "signature failure"),
        "its certificate and ours are not of one authority: give every node a copy of the same --tls-dir",
    ),
    (("wrong version number", "http request", "record layer failure", "unknown protocol", "packet length too long"),
     "it does not use TLS: give it --tls-dir"),
    (("unsupported protocol", "protocol version", "inappropriate_fallback"), "it speaks an older TLS than 1.3"),
)  # fmt: skip
