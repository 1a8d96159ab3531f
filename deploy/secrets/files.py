"""Write the directory of secrets of `foray init --secure`: one file per reader, and how to use each.

users.acl redis.conf ca.pem redis.crt redis.key      for the Redis host (ca.pem: for every host)
learner.env rollout.env node.env retriever.env       for the processes of the run
viewer.env operator.env admin.env                    for users: to monitor, to operate, to repair Redis
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.secrets.acl import REDIS_ROLES, RedisRole, users_acl
from deploy.secrets.env import RUN_KEY_VARIABLE
from deploy.secrets.tls import make_certificates
from protocol.errors import UserError
from protocol.runtime.http.auth import ROLES, Role, is_loopback, variable
from protocol.settings import REDIS_URL_VARIABLE

LOCAL = ("localhost", "127.0.0.1")
CONFIG = """\
# A Redis for run {run}, with TLS, users with least privilege, and no eviction.
# Start it as the owner of these files: redis-server {directory}/redis.conf
{listen}
{tls}aclfile {directory}/users.acl
maxmemory {maxmemory_mb}mb
maxmemory-policy noeviction
appendonly yes
appendfsync everysec
save 900 1
"""
TLS_LINES = """\
port 0
tls-port {port}
tls-cert-file {directory}/redis.crt
tls-key-file {directory}/redis.key
tls-ca-cert-file {directory}/ca.pem
tls-auth-clients optional
tls-replication yes
"""
TOKENS_OF: Mapping[str, tuple[Role, ...]] = {
    # `node` admits engines to weight-update groups, `operator` asks rollout servers for validations
    "learner": ("viewer", "node", "operator"),
    "rollout": ("viewer", "node", "operator"),
    "node": ("viewer", "node"),
    "retriever": ("viewer", "node"),
    "viewer": ("viewer",),
    "operator": ("operator",),
    "admin": (),
}
"""A service has the tokens of all roles that may call it; a user has one token."""


@dataclass(frozen=True)
class Written:
    """A written file, and how to use it."""

    path: Path
    use: str


@dataclass(frozen=True)
class RedisEndpoint:
    """Address of the run's Redis. `hosts[0]` is the name in the URLs, all hosts are in the certificate."""

    hosts: tuple[str, ...] = LOCAL
    port: int = 6379
    tls: bool = True
    maxmemory_mb: int = 1024

    def url(self, user: str, password: str, directory: Path) -> str:
        """Return the URL with the login of `user`."""
        host = f"[{self.hosts[0]}]" if ":" in self.hosts[0] else self.hosts[0]
        scheme, query = ("rediss", f"?ssl_ca_certs={directory / 'ca.pem'}") if self.tls else ("redis", "")
        return f"{scheme}://{user}:{password}@{host}:{self.port}/0{query}"


def write_secrets(directory: Path, run: str, place: RedisEndpoint, *, force: bool) -> list[Written]:
    """Write new secrets for `run`. Raises UserError if `directory` already contains some, unless `force`."""
    directory = directory.absolute()
    if any(not (char.isalnum() or char in "/._-+@,=") for char in str(directory)):
        raise UserError(
            f"{directory} cannot be used for secrets",
            why="its name is part of files for a shell, systemd and Redis, which have different quoting rules",
            todo="use a path of letters, digits and ._-",
        )
    if directory.exists() and any(directory.iterdir()) and not force:
        raise UserError(
            f"{directory} is not empty",
            why="new secrets would lock out processes that have the old ones",
            todo="choose another directory with --secrets, or replace them with --force",
        )
    texts = {**_redis(directory, run, place), **_roles(directory, run, place)}
    uses = _uses(directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    _write(directory / ".gitignore", "*\n")
    for name, text in texts.items():
        _write(directory / name, text)
    return [Written(directory / name, uses[name]) for name in texts]


def _redis(directory: Path, run: str, place: RedisEndpoint) -> dict[str, str]:
    local = all(is_loopback(host) for host in place.hosts)
    listen = "bind 127.0.0.1 -::1" if local else "# all interfaces, protected by passwords and TLS\nbind * -::*"
    tls = TLS_LINES.format(port=place.port, directory=directory) if place.tls else f"port {place.port}\n"
    values = {"run": run, "directory": directory, "listen": listen, "tls": tls, "maxmemory_mb": place.maxmemory_mb}
    texts = {"redis.conf": CONFIG.format(**values)}
    if place.tls:
        made = make_certificates(f"redis of {run}", place.hosts)
        texts |= {"ca.pem": made.ca, "redis.crt": made.certificate, "redis.key": made.key}
    return texts


def _roles(directory: Path, run: str, place: RedisEndpoint) -> dict[str, str]:
    passwords: dict[RedisRole, str] = {role: secrets.token_urlsafe(32) for role in REDIS_ROLES}
    tokens = {role: secrets.token_urlsafe(32) for role in ROLES}
    texts = {"users.acl": users_acl(run, passwords)}
    for name, roles in TOKENS_OF.items():
        values = {variable(role): tokens[role] for role in roles}
        if name in passwords:
            values[REDIS_URL_VARIABLE] = place.url(name, passwords[name], directory)
        if name == "learner":
            values[RUN_KEY_VARIABLE] = secrets.token_hex(32)
        texts[f"{name}.env"] = "".join(f"{key}={value}\n" for key, value in values.items())
    return texts


def _uses(directory: Path) -> dict[str, str]:
    source = f"set -a; . {directory}/"
    return {
        "redis.conf": f"on the Redis host: redis-server {directory}/redis.conf (TLS needs a server built with it)",
        "ca.pem": "on every host, at this path: the authority that verifies Redis' certificate",
        "redis.crt": "on the Redis host only",
        "redis.key": "on the Redis host only",
        "users.acl": "on the Redis host only: users by role, with password hashes",
        "learner.env": f"on the learner's host: `{source}learner.env`, then `foray learner`",
        "rollout.env": f"on hosts of rollout servers: `{source}rollout.env`, then `foray rollout`",
        "node.env": f"on hosts of engines: `{source}node.env`, then `foray engine`",
        "retriever.env": f"on hosts of retrievers: `{source}retriever.env`, then `foray retriever`",
        "viewer.env": f"for viewers: `{source}viewer.env`, then `foray status` or `foray top`",
        "operator.env": f"for operators: `{source}operator.env`, then `foray eval` or `foray dlq requeue`",
        "admin.env": "to administer Redis; no process of the run needs it",
    }


def _write(path: Path, text: str) -> None:
    # never readable by others, not even briefly; a replaced file may have had another mode
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
