"""Access control of the HTTP services: roles, tokens from the environment, and `decide`, which checks each request.

    viewer    reads: /status, /metrics, /info
    node      machine to machine: searches, generation; reads too
    operator  requests that use compute (POST /v1/episodes), and everything that the other roles may do

Without tokens a service is open, and then it listens on loopback only. With a token set, every route except those in
`OPEN` needs one. Imports no HTTP library.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, get_args
from urllib.parse import urlsplit

from protocol.errors import UserError
from protocol.redaction import remember

Role = Literal["viewer", "node", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
OPEN = frozenset({"/health", "/ready"})
"""Paths that need no token: orchestrators probe without one, and the answers contain no data."""

MAY: Mapping[Role, frozenset[Role]] = {
    "viewer": frozenset({"viewer", "node", "operator"}),
    "node": frozenset({"node", "operator"}),
    "operator": frozenset({"operator"}),
}
"""Required role of a route -> roles that it accepts."""

MIN_CHARS, MIN_DISTINCT = 32, 10
"""Minimum length of a token, and of its set of characters: `token_urlsafe(32)` has 43, about 31 of them different."""
MAKE_ONE = "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
_TOKEN = re.compile(r"[!-~]+")
JSON = "application/json"
LOOPBACK = "127.0.0.1"
OWN_SITES = frozenset({"", "none", "same-origin"})
"""Accepted values of `Sec-Fetch-Site`: no browser, an address typed into one, a page of the service itself."""


def variable(role: Role) -> str:
    """Return the environment variable for the token of `role`; with `_FILE` appended it names a file instead."""
    return f"FORAY_{role.upper()}_TOKEN"


@dataclass(frozen=True)
class Access:
    """The tokens of this process by role, hidden in `repr`. Without tokens the service is open."""

    tokens: Mapping[Role, str] = field(default_factory=dict, repr=False)

    @property
    def open(self) -> bool:
        """Return whether no token is needed."""
        return not self.tokens

    def role_of(self, authorization: str) -> Role | None:
        """Return the role whose token is in an `Authorization` header. Compares every token, in constant time."""
        scheme, _, given = authorization.partition(" ")
        found: Role | None = None
        for role, token in self.tokens.items():
            raw = given.strip().encode("utf-8", "replace")  # bytes that are not UTF-8 arrive as surrogates
            if hmac.compare_digest(raw, token.encode()) and scheme.lower() == "bearer":
                found = role
        return found

    def headers(self, *roles: Role) -> dict[str, str]:
        """Return the `Authorization` header of a client for the first of `roles` with a token, {} if none has one."""
        token = next((self.tokens[role] for role in roles if role in self.tokens), None)
        return {"Authorization": f"Bearer {token}"} if token else {}


def read_access(environ: Mapping[str, str]) -> Access:
    """Read the tokens in `environ`. Raises UserError if one is weak, set twice, unreadable or shared by two roles."""
    tokens: dict[Role, str] = {}
    for role in ROLES:
        value = read_secret(environ, variable(role))
        if value:
            tokens[role] = strong_token(value, variable(role))
    if len(set(tokens.values())) < len(tokens):
        raise UserError(
            "two roles have the same token", why="its holder would have both roles", todo=f"make another: {MAKE_ONE}"
        )
    return Access(tokens)


def read_secret(environ: Mapping[str, str], name: str) -> str:
    """Return the secret in variable `name`, or in the file that `name`_FILE names; "" if neither is set.

    The value is redacted from then on. Raises UserError if both are set or the file cannot be read.
    """
    value, path = environ.get(name, "").strip(), environ.get(f"{name}_FILE", "")
    if value and path:
        raise UserError(f"{name} and {name}_FILE are both set", todo="unset one of them")
    try:
        value = Path(path).read_text().strip() if path else value
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or "" if isinstance(error, OSError) else "the file is not text"
        raise UserError(f"cannot read {path}", why=f"{name}_FILE names this file; {why}") from None
    remember(value)
    return value


def check_bind(host: str, access: Access, setting: str, *, off: str = "") -> None:
    """Raise UserError if a service without tokens would listen beyond loopback.

    setting  name of the setting with the address, e.g. "retriever.host"
    off      override that disables the service, if there is one
    """
    if access.open and not is_loopback(host):
        raise UserError(
            f"{setting} = {host!r} would expose this service to the network without a token",
            why="anyone who can reach the port could use it",
            todo="`foray init run.yaml --secure` makes tokens, and launch.secrets distributes them; "
            f"or export {variable('node')}=$({MAKE_ONE}); or set {setting}=127.0.0.1"
            + (f"; or disable it: {off}" if off else ""),
        )


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an address, is loopback. Names are not resolved."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def engine_key(access: Access, engine_id: str, incarnation: str) -> str:
    """Return the API key of one incarnation of a launched engine, "" without a node token.

    Nodes and rollout servers each derive it: HMAC-SHA256 of the engine's name, with the node token as the key. So Redis
    holds no secret, and the key of one engine is not valid for another.
    """
    token = access.tokens.get("node", "")
    if not token:
        return ""
    return hmac.new(token.encode(), f"engine\0{engine_id}\0{incarnation}".encode(), "sha256").hexdigest()


def member_token(access: Access, member: str, group: str) -> str:
    """Return the secret with which `member` ("engine id/incarnation") is admitted to a weight-update group.

    HMAC-SHA256 with the node token as the key, "" without one. A group's name has a random part, so it is valid once.
    """
    token = access.tokens.get("node", "")
    return hmac.new(token.encode(), f"member\0{member}\0{group}".encode(), "sha256").hexdigest() if token else ""


class Headers(Protocol):
    """The headers of a request, with case-insensitive names."""

    def get(self, name: str, default: str, /) -> str: ...


class RequestHead(NamedTuple):
    """The parts of a request that are known before its body is read."""

    path: str
    headers: Headers


class Verdict(NamedTuple):
    """The decision: status 0 accepts the request, otherwise answer 401, 403 or 415 with `message`."""

    status: int = 0
    message: str = ""


PASS = Verdict()


def decide(head: RequestHead, *, needs: Role, access: Access) -> Verdict:
    """Check a request to a route that requires role `needs`, before its body is read.

    401, 403  with tokens: no token, or the token of another role
    403       without tokens: a `Host` that is not a loopback name (DNS rebinding), or a page of another origin
    415       without tokens: a body that is not `application/json`, the only type that a page cannot send to
              another origin without a CORS preflight
    415       a compressed body: one megabyte could expand to a gigabyte
    """
    if head.path in OPEN:
        return PASS
    if not access.open:
        role = access.role_of(head.headers.get("Authorization", ""))
        if role is None:
            return Verdict(401, f"this route needs a token: Authorization: Bearer <{variable(needs)}>")
        if role not in MAY[needs]:
            return Verdict(403, f"this route needs the role {needs}, the token has the role {role}")
    return check_request(head, is_open=access.open)


def check_request(head: RequestHead, *, is_open: bool) -> Verdict:
    """Check a request by its headers alone, without roles.

    is_open  the service needs no token: a web page in a browser on this machine must not use it
    """
    headers = head.headers
    if is_open:
        if not _names_loopback(headers.get("Host", "")):
            return Verdict(403, "without tokens this service accepts loopback host names only")
        if not _is_own_page(headers):
            return Verdict(403, "without tokens this service accepts no requests from web pages of another origin")
    if headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
        return Verdict(415, "compressed bodies are not accepted: send the body without Content-Encoding")
    if is_open and _has_body(headers) and headers.get("Content-Type", "").partition(";")[0].strip().lower() != JSON:
        return Verdict(415, f"without tokens the body must be JSON: send Content-Type: {JSON}")
    return PASS


def strong_token(token: str, name: str) -> str:
    """Return the token of variable `name`. Raises UserError if it is weak."""
    if len(token) < MIN_CHARS or len(set(token)) < MIN_DISTINCT or not _TOKEN.fullmatch(token):
        raise UserError(
            f"{name} is too weak",
            why=f"a token needs {MIN_CHARS} or more printable characters, {MIN_DISTINCT} of them different, no spaces",
            todo=f"export {name}=$({MAKE_ONE})",
        )
    return token


def _names_loopback(header: str) -> bool:
    return not header or _is_loopback_url(f"//{header}")


def _is_own_page(headers: Headers) -> bool:
    origin = headers.get("Origin", "")
    return headers.get("Sec-Fetch-Site", "").lower() in OWN_SITES and (not origin or _is_loopback_url(origin))


def _is_loopback_url(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _has_body(headers: Headers) -> bool:
    return bool(headers.get("Transfer-Encoding", "") or headers.get("Content-Length", "").strip("0 "))
