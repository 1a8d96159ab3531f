"""Redis URLs: one server, or the primary that Sentinels elect, each with or without TLS.

    redis://[user:password@]host[:6379][/db]                      one server
    unix://[user:password@]/path[?db=0]                           one server on this machine
    redis+sentinel://[user:password@]h1[:26379],h2,.../name[/db]  the primary that these Sentinels call `name`
    file://[user:password@]/path            a file with the URL of one server that may move: read at each connection

`rediss` instead of `redis` is TLS: the server's certificate is verified against `?ssl_ca_certs=FILE` (or the system's
authorities) and its name; `ssl_certfile` and `ssl_keyfile` are the client's. User and password are for the servers;
for Sentinels with a login set `?sentinel_username=` and `?sentinel_password=`. Other options are refused: timeouts and
retries in a URL would override those that delivery depends on. Redis Cluster is not supported: the keys of a run share
one slot, so a single shard would serve all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from protocol.errors import UserError
from protocol.redaction import SHOWN
from protocol.runtime.http.auth import is_loopback

Kind = Literal["server", "socket", "sentinel"]
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
OPTIONS = ("db", *TLS_OPTIONS, "sentinel_username", "sentinel_password")
SCHEMES: dict[str, tuple[Kind, bool]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("socket", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
FILE = "file://"
PORTS: dict[Kind, int] = {"server": 6379, "socket": 0, "sentinel": 26379}
FORMS = (
    "redis://host:port/db, rediss://..., unix:///path, redis+sentinel://h1,h2/name, or file:///path of a file with one"
)


@dataclass(frozen=True)
class RedisUrl:
    """A parsed URL. Its `repr` shows no password.

    hosts    (host, port) of the server, or of the Sentinels
    path     of the socket
    service  name of the primary at the Sentinels
    tls      keyword arguments of redis-py for TLS; None without it
    moves    the URL is the content of a file, which may change
    """

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: dict[str, str | bool] | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    moves: bool = False

    @property
    def is_loopback(self) -> bool:
        """Return whether all traffic stays on this machine."""
        return self.kind == "socket" or all(is_loopback(host) for host, _ in self.hosts)

    @property
    def verifies(self) -> bool:
        """Return whether the server is authenticated: TLS with both checks enabled."""
        return self.tls is not None and self.tls["ssl_cert_reqs"] == "required" and bool(self.tls["ssl_check_hostname"])


def parse_redis_url(url: str) -> RedisUrl:
    """Parse `url`. Raises UserError, without the password, if it has none of the forms above."""
    try:
        return _parse(url)
    except ValueError as error:
        raise UserError(f"run.redis_url={redacted(url)!r} is not a Redis URL", why=str(error), todo=FORMS) from None


def redacted_override(word: str) -> str:
    """Return an override `key=value` without the password of a Redis URL; other words are returned as they are."""
    key, equals, value = word.partition("=")
    return f"{key}={redacted(value)}" if key == "run.redis_url" and equals else word


def redacted(url: str) -> str:
    """Return `url` without passwords of servers and Sentinels."""
    place, mark, query = url.partition("?")
    parts = query.split("&") if query else []
    if any("@" in part and "password" not in part.partition("=")[0].lower() for part in parts) or (
        "@" in query and "@" not in place
    ):
        # a password that was not percent-encoded: its end is ambiguous
        return f"{url.partition('://')[0]}://{SHOWN}"
    # the last "@": such a password may contain others, and slashes
    scheme, colons, rest = place.partition("://")
    login, at, where = rest.rpartition("@")
    if at:
        user, colon, _ = login.partition(":")
        place = f"{scheme}{colons}{user}{f':{SHOWN}' if colon else ''}@{where}"
    shown = [part if "password" not in part.lower() else f"{part.partition('=')[0]}={SHOWN}" for part in parts]
    return place + mark + "&".join(shown)


def place_of(url: str) -> str:
    """Return `url` without user and password. Raises UserError as `parse_redis_url` does; a file need not exist yet."""
    if not url.startswith(FILE):
        parse_redis_url(url)
    scheme, colons, rest = url.partition("://")
    place, mark, query = rest.partition("?")
    return f"{scheme}{colons}{place.rpartition('@')[2]}{mark}{query}"


def with_login(url: str, username: str, password: str) -> str:
    """Return `url` for another user. Raises UserError as `parse_redis_url` does."""
    scheme, colons, rest = place_of(url).partition("://")
    return f"{scheme}{colons}{quote(username, '')}:{quote(password, '')}@{rest}"


def cli(url: str) -> str:
    """Return the `redis-cli` command for the server at `url`, without a password."""
    where = parse_redis_url(url)
    if where.kind == "socket":
        return f"redis-cli -s {where.path}"
    host, port = where.hosts[0]
    if where.kind == "sentinel":
        return f"redis-cli (on the primary that `redis-cli -h {host} -p {port} SENTINEL MASTERS` names)"
    tls = f" --tls --cacert {where.tls.get('ssl_ca_certs', 'CA.pem')}" if where.tls else ""
    login = " --user admin --askpass" if where.password else ""
    return f"redis-cli -h {host} -p {port}{tls}{login}"


def _parse(url: str) -> RedisUrl:
    parts = urlsplit(url)
    if parts.scheme in ("redis+cluster", "rediss+cluster"):
        raise ValueError(
            "Redis Cluster is not supported: all keys of a run are in one slot. Name a single server, or Sentinels"
        )
    if url.startswith(FILE):
        return _in_file(parts)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"the scheme must be one of {', '.join(SCHEMES)}, file")
    kind, secure = SCHEMES[parts.scheme]
    options = _options(parts)
    login, _, places = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    hosts: tuple[tuple[str, int], ...] = ()
    if kind != "socket":
        hosts = tuple(_place(place, PORTS[kind]) for place in (places or "localhost").split(","))
    if kind == "server" and len(hosts) > 1:
        raise ValueError("several hosts are valid with redis+sentinel:// only")
    service, database = _path(kind, parts.path)
    db = _number(database or options.get("db", "0"))
    return RedisUrl(
        kind=kind,
        hosts=hosts,
        path=unquote(parts.path) if kind == "socket" else "",
        service=service,
        db=db,
        username=unquote(user) or None,
        password=unquote(password) or None,
        tls=_tls(options) if secure else None,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
    )


def _in_file(parts: SplitResult) -> RedisUrl:
    """Return the URL in the file that `parts` names, with the login of `parts` if it has one."""
    path = unquote(parts.path)
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', '') or 'it is not text'}") from None
    found = _parse(text) if text.startswith(("redis://", "rediss://")) else None
    if found is None:
        raise ValueError(f"{path} must hold one line with a redis:// or rediss:// URL")
    if not parts.username:
        return replace(found, moves=True)
    return replace(found, moves=True, username=unquote(parts.username), password=unquote(parts.password or ""))


def _options(parts: SplitResult) -> dict[str, str]:
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(OPTIONS)}")
    kind, secure = SCHEMES[parts.scheme]
    if not secure and (wasted := [name for name in options if name in TLS_OPTIONS]):
        raise ValueError(f"{wasted[0]} needs TLS: write rediss:// instead of redis://")
    if kind != "sentinel" and (wasted := [name for name in options if name.startswith("sentinel_")]):
        raise ValueError(f"{wasted[0]} is valid with redis+sentinel:// only")
    return options


def _path(kind: Kind, path: str) -> tuple[str, str]:
    """Return (service, database) from the path."""
    words = [unquote(word) for word in path.split("/") if word]
    if kind == "socket":
        if not words:
            raise ValueError("a unix:// URL needs the path of a socket")
        return "", ""
    if kind == "sentinel":
        if not words:
            raise ValueError("the name of the primary is missing: redis+sentinel://h1,h2/NAME")
        service, words = words[0], words[1:]
    else:
        service = ""
    if len(words) > 1:
        raise ValueError(f"after the host comes the number of the database, not {'/'.join(words)!r}")
    return service, words[0] if words else ""


def _place(place: str, default: int) -> tuple[str, int]:
    # urlsplit handles brackets and checks the port range
    parts = urlsplit(f"//{place}")
    if not parts.hostname:
        raise ValueError(f"{place!r} is not host:port")
    return parts.hostname, parts.port or default


def _number(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"the database must be a number, not {text!r}")
    return int(text)


def _tls(options: dict[str, str]) -> dict[str, str | bool]:
    tls: dict[str, str | bool] = {name: options[name] for name in TLS_OPTIONS if name in options}
    needed = tls.setdefault("ssl_cert_reqs", "required")
    if needed not in ("required", "none"):
        raise ValueError("ssl_cert_reqs must be `required` or `none`")
    named = str(tls.get("ssl_check_hostname", str(needed == "required"))).lower()
    if named not in ("true", "false"):
        raise ValueError("ssl_check_hostname must be true or false")
    tls["ssl_check_hostname"] = named == "true"
    return tls
