"""Mutual TLS between links: who has a certificate that the cluster's own authority signed is a node of it.

The files come from `lockstep tls` or from any authority that signs nothing but nodes: names in certificates are not
looked at, for nodes change theirs. TLS 1.3 alone.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


class TlsError(ValueError):
    """The files cannot be used, for the reason in the message."""


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
