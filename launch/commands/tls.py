"""The command `lockstep tls FOLDER`: the certificates with which the nodes of one server authenticate each other.

It makes an authority, and one certificate signed by it, which all nodes share: a machine with the folder can be a node.
The authority's key is discarded, so that no other certificate can be signed; a lost folder is replaced on every node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from host.folders import make_private
from launch.errors import Refusal
from launch.flags import Parser, unknown_arguments

FILES = ("ca.pem", "cert.pem", "key.pem")  # as `server/link/handshake.py` reads them
MOST_DAYS = 36_500
SKEW = timedelta(days=1)  # by which another node's clock may be behind


@dataclass(frozen=True)
class Signer:
    """The name and the key of a certificate's issuer."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey


def read_command(argv: Sequence[str]) -> tuple[Path, int]:
    """(folder, days). Raises Refusal with every problem at once."""
    about = "Make certificates for mutual TLS between the nodes of one server, in a new folder."
    parser = Parser(prog="lockstep tls", description=about, allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--days", default="3650", metavar="DAYS", help="days that they are valid. Default: 3650")
    given, unknown = parser.parse_known_args(argv)
    problems = unknown_arguments(unknown, parser)
    days = int(given.days) if given.days.isascii() and given.days.isdigit() else 0
    if not 1 <= days <= MOST_DAYS:
        problems.append(f"--days is {given.days}: give a whole number from 1 to {MOST_DAYS}")
    if problems:
        raise Refusal(problems, 2)
    return Path(given.folder), days


def write(folder: Path, days: int, now: datetime | None = None) -> None:
    """Write the three files into a folder that only its owner may enter. Raises Refusal where it is not empty."""
    try:
        make_private(folder)
        if any(folder.iterdir()):
            raise Refusal([f"{folder} is not empty, and keys are never overwritten: name a new folder"], 1)
        for name, content in certificates(days, now or datetime.now(UTC)).items():
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
    except OSError as error:
        raise Refusal([f"{folder} cannot be written: {error.strerror}"], 1) from None


def certificates(days: int, now: datetime) -> Mapping[str, bytes]:
    """What each of the files holds."""
    key = ec.generate_private_key(ec.SECP256R1())
    authority = Signer(_name("Lockstep nodes"), ec.generate_private_key(ec.SECP256R1()))
    until = now + timedelta(days=days)
    root = _certificate(authority.name, authority, authority.key.public_key(), now, until, is_authority=True)
    node = _certificate(_name("Lockstep node"), authority, key.public_key(), now, until, is_authority=False)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return dict(zip(FILES, (root.public_bytes(pem), node.public_bytes(pem), private), strict=True))


def _certificate(
    name: x509.Name,
    signer: Signer,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    until: datetime,
    *,
    is_authority: bool,
) -> x509.Certificate:
    usage = dict.fromkeys(
        "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only".split(), False
    )
    usage |= {"digital_signature": not is_authority, "key_cert_sign": is_authority, "crl_sign": is_authority}
    builder = (
        x509.CertificateBuilder(signer.name, name, key, x509.random_serial_number(), now - SKEW, until)
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key()), critical=False)
    )
    if not is_authority:
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return builder.sign(signer.key, hashes.SHA256())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
