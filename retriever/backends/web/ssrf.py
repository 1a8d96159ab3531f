"""Guard against server-side request forgery: which addresses may be fetched.

Addresses in search results are untrusted. They must not reach what only this machine can reach: itself, its private
network, the metadata service of its cloud. An address is checked by its form (scheme, port, host), then by the
addresses of its name; the name is resolved once, and the connection goes to exactly that address.

Ranges: IANA's special-purpose registries for IPv4 and IPv6 (RFC 6890 and successors). Of IPv6, only global unicast
2000::/3 is public; all forms with an embedded IPv4 address are refused, because a gateway would
deliver them: mapped ::ffff:0:0/96, NAT64 64:ff9b::/96 (so behind a NAT64 nothing can be fetched), 6to4, Teredo.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from retriever.backends.web.config import PageSettings
from retriever.backends.web.provider import WebSearchError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> the host's addresses as text."""

MAX_URL_CHARS = 2048

_PRIVATE_4 = [
    ipaddress.IPv4Network(net)
    for net in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        "168.63.129.16/32",  # Azure's metadata and health service, in a public range
    )
]
_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
_PRIVATE_6 = [ipaddress.IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9])?)*$")


def is_public(address: Address) -> bool:
    """Return whether this address is public: no special-purpose range, no IPv4 embedded in IPv6."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in net for net in _PRIVATE_4)
    return address in _PUBLIC_6 and not any(address in net for net in _PRIVATE_6)


class SsrfGuard:
    """Applies the settings. Every refusal is WebSearchError("refused")."""

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        self._allowed = [ipaddress.ip_network(str(net)) for net in settings.allow_private]

    def url(self, text: str) -> URL:
        """Return the address, parsed once: the checked address is the one connected to."""
        if len(text) > MAX_URL_CHARS or not text.isprintable() or any(c in text for c in "\\ \t"):
            raise WebSearchError("refused", "the address is too long, or has blanks, backslashes or control characters")
        try:
            url = URL(text)
            host, port = (url.host or "").rstrip(".").lower(), url.port
        except ValueError:
            raise WebSearchError("refused", "no address") from None
        if url.scheme not in ("http", "https"):
            raise WebSearchError("refused", "the scheme is not http or https")
        authority = text.split("://", 1)[-1].split("/", 1)[0].split("?", 1)[0].split("#", 1)[0]
        if url.user is not None or url.password is not None or "@" in authority:
            raise WebSearchError("refused", "the address contains credentials")
        if port not in self._settings.ports:
            raise WebSearchError("refused", f"port {port} is not allowed")
        self._check_host(host, (url.raw_host or "").rstrip(".").lower())
        return url.with_fragment(None)

    def _check_host(self, host: str, raw: str) -> None:
        """Check the host: `host` as displayed, `raw` as looked up."""
        literal = _literal(host)
        if literal is not None:
            self.address(literal)
        # `127.1`, `0x7f.0.0.1`, `2130706433`: IPv4 forms that only some parsers accept
        elif not _NAME.match(raw) or re.match(r"^(0x[0-9a-f]*|[0-9]+)$", raw.rpartition(".")[2]):
            raise WebSearchError("refused", "not a host name")
        suffixes = self._settings.allow_hosts
        if suffixes and not any(raw == suffix or raw.endswith(f".{suffix}") for suffix in suffixes):
            raise WebSearchError("refused", f"host {raw} is not allowed")

    def address(self, text: str) -> str:
        """Return a permitted address in normal form."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise WebSearchError("refused", "not an IP address") from None
        inside = any(address.version == net.version and address in net for net in self._allowed)
        scoped = isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None
        if scoped or not (inside or is_public(address)):
            raise WebSearchError("refused", "not a public address")
        return str(address)

    def addresses(self, texts: Sequence[str]) -> str:
        """Return the first of a name's addresses. A name with any refused address is refused."""
        checked = [self.address(text) for text in texts]
        if not checked:
            raise WebSearchError("unreachable", "the name has no address")
        return checked[0]

    def connector(self, host: str, address: str) -> aiohttp.TCPConnector:
        """Return a connector to `address` only, whatever `host` resolves to now.

        TLS still verifies the certificate against the host's name. The check at socket creation is the last one: it
        also applies to literal addresses and other resolvers' answers.
        """

        def make_socket(info: Any) -> socket.socket:
            family, kind, proto, _, target = info
            if self.address(str(target[0])) != address:
                raise WebSearchError("refused", "the address differs from the checked one")
            return socket.socket(family, kind, proto)

        resolver = _PinnedResolver(host, address)
        return aiohttp.TCPConnector(
            resolver=resolver, use_dns_cache=False, force_close=True, socket_factory=make_socket
        )


class _PinnedResolver(AbstractResolver):
    """A resolver for a single name."""

    def __init__(self, host: str, address: str) -> None:
        self._host, self._address = host, address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the address of the name."""
        if host.rstrip(".").lower() != self._host.rstrip(".").lower():
            raise OSError(f"only the checked name can be resolved, not {host}")
        kind = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [ResolveResult(hostname=host, host=self._address, port=port, family=kind, proto=0, flags=flags)]

    async def close(self) -> None:
        """Do nothing: there are no open resources."""


def _literal(host: str) -> str | None:
    """Return the host if it is an IP address in its usual form, else None."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None
