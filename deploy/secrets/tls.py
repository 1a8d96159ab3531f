"""Create a certificate for a Redis server, and the authority that signs it.

The authority signs only this certificate, and its key is not stored, so it cannot sign another one. For more hosts, or
an expired certificate, create a new pair (`foray init --secure --force`).
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.errors import UserError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DAYS = 825
"""Validity of the certificates, in days."""


@dataclass(frozen=True)
class Certificates:
    """PEM texts: the authority, the server's certificate and its key."""

    ca: str
    certificate: str
    key: str = field(repr=False)


def make_certificates(name: str, hosts: Sequence[str]) -> Certificates:
    """Create an authority and a certificate for `hosts` (names, addresses). Raises UserError without `cryptography`."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError:
        raise UserError(
            "certificates need the package `cryptography`", todo="pip install 'foray[secure]', or add --no-tls"
        ) from None
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _named(f"{name} authority")
    root = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    names: list[x509.GeneralName] = [_general(host) for host in hosts]
    server = (
        _certificate(_named(name), issuer, own.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        # a replica is a client of its primary, with the same certificate
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Certificates(root.public_bytes(pem).decode(), server.public_bytes(pem).decode(), key.decode())


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _named(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _general(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
