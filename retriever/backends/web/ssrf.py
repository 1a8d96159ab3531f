"""Which addresses may be fetched: the guard against server-side request forgery.

An address in a search result was chosen by strangers. It must not reach what only this machine can reach: itself, its
private network, the metadata service of its cloud. So an address is refused for what it is (scheme, port, host), then
for where its name leads; the name is resolved once, and the connection goes to that very address.

Ranges: IANA's special-purpose registries for IPv4 and IPv6 (RFC 6890 and successors). Of IPv6, only global unicast
2000::/3 is public; all forms that carry an IPv4 address inside are refused, whatever it is, because a gateway would
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
"""Host and port to the addresses of the host, as texts."""

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
    """Return whether this address is public: no range of a special purpose, no IPv4 inside an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in net for net in _PRIVATE_4)
    return address in _PUBLIC_6 and not any(address in net for net in _PRIVATE_6)


class SsrfGuard:
    """Applies the settings' rules. Every refusal is WebSearchError("refused")."""

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        self._allowed = [ipaddress.ip_network(str(net)) for net in settings.allow_private]

    def url(self, text: str) -> URL:
        """Return the address, parsed once; what is checked here is what is connected to."""
        if len(text) > MAX_URL_CHARS or not text.isprintable() or any(c in text for c in "\\ \t"):
            raise WebSearchError(
                "refused", "an address that is too long, or with blanks, backslashes or control characters"
            )
        try:
            url = URL(text)
            host, port = (url.host or "").rstrip(".").lower(), url.port
        except ValueError:
            raise WebSearchError("refused", "no address") from None
        if url.scheme not in ("http", "https"):
            raise WebSearchError("refused", "neither http nor https")
        authority = text.split("://", 1)[-1].split("/", 1)[0].split("?", 1)[0].split("#", 1)[0]
        if url.user is not None or url.password is not None or "@" in authority:
            raise WebSearchError("refused", "an address with credentials")
        if port not in self._settings.ports:
            raise WebSearchError("refused", f"port {port}")
        self._check_host(host, (url.raw_host or "").rstrip(".").lower())
        return url.with_fragment(None)

    def _check_host(self, host: str, raw: str) -> None:
        """`host` as people read it, `raw` as it is looked up."""
        literal = _literal(host)
        if literal is not None:
            self.address(literal)
        # `127.1`, `0x7f.0.0.1`, `2130706433`: forms of an IPv4 address that only some parsers take for one
        elif not _NAME.match(raw) or re.match(r"^(0x[0-9a-f]*|[0-9]+)$", raw.rpartition(".")[2]):
            raise WebSearchError("refused", "no host name")
        suffixes = self._settings.allow_hosts
        if suffixes and not any(raw == suffix or raw.endswith(f".{suffix}") for suffix in suffixes):
            raise WebSearchError("refused", f"host {raw} is not allowed")

    def address(self, text: str) -> str:
        """Return an address that may be connected to, in its normal form."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise WebSearchError("refused", "no IP address") from None
        inside = any(address.version == net.version and address in net for net in self._allowed)
        scoped = isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None
        if scoped or not (inside or is_public(address)):
            raise WebSearchError("refused", "not a public address")
        return str(address)

    def addresses(self, texts: Sequence[str]) -> str:
        """Return the first of a name's addresses. A name with one bad address is refused: a trick or a mistake."""
        checked = [self.address(text) for text in texts]
        if not checked:
            raise WebSearchError("unreachable", "the name has no address")
        return checked[0]

    def connector(self, host: str, address: str) -> aiohttp.TCPConnector:
        """Connects to `address` and nowhere else, whatever the name of `host` resolves to by now.

        TLS still verifies the certificate against the host's name. The check where the socket is made is the last one:
        it holds even if a literal address or another resolver's answer came past the others.
        """

        def make_socket(info: Any) -> socket.socket:
            family, kind, proto, _, target = info
            if self.address(str(target[0])) != address:
                raise WebSearchError("refused", "another address than the one that was checked")
            return socket.socket(family, kind, proto)

        resolver = _PinnedResolver(host, address)
        return aiohttp.TCPConnector(
            resolver=resolver, use_dns_cache=False, force_close=True, socket_factory=make_socket
        )


class _PinnedResolver(AbstractResolver):
    """A resolver that knows one name."""

    def __init__(self, host: str, address: str) -> None:
        self._host, self._address = host, address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the one address of the one name."""
        if host.rstrip(".").lower() != self._host.rstrip(".").lower():
            raise OSError(f"no other name than the checked one: {host}")
        kind = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [ResolveResult(hostname=host, host=self._address, port=port, family=kind, proto=0, flags=flags)]

    async def close(self) -> None:
        """Nothing is open."""


def _literal(host: str) -> str | None:
    """Return the host if it is an IP address in its usual form, None if it is a name (or pretends to be one)."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None
