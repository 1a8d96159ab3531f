"""Check the Redis of a run: whether it answers, whether it could lose work in flight, and its clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from deploy.config import RunConfig
from deploy.doctor.finding import Finding
from deploy.hardware.host_memory import memory_needed
from deploy.run.redis_server import OLDEST, connect, find_server
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.runtime.net import PortOwner, port_owner, unix_socket_owner
from protocol.runtime.redis.server import eviction_refusal
from protocol.runtime.redis.url import cli, parse_redis_url, redacted

if TYPE_CHECKING:
    import redis

MOST_SKEW_S = 1.0
ANSWER_S = 3.0
"""Timeout for an answer, in seconds: a slower Redis would stall a run."""
FULL = 0.98
"""Share of maxmemory above which there is no room for a task."""
FIXED_IN = (8, 6, 3)
"""First Redis without CVE-2026-23479 (a use after free in blocking reads, since 7.2.0)."""


def program() -> Iterator[Finding]:
    """Check that a server program for `foray up` is installed."""
    try:
        server = find_server()
    except UserError as error:
        yield Finding("redis", "fail", f"{error.what}: {error.why}", error.todo)
    else:
        yield Finding("redis", "ok", f"{server.path} {server.version} ({server.origin})")


def server(url: str, config: RunConfig, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Check the server at `url`, or report why it cannot be checked."""
    import redis

    with connect(url, timeout_s=ANSWER_S) as client:
        try:
            client.ping()
            yield from _transport(url)
            yield skew(client, clock)
            try:
                info: dict[str, Any] = client.info()
            except redis.exceptions.NoPermissionError:
                todo = "run `foray doctor` with the viewer's or admin's URL in FORAY_REDIS_URL"
                yield Finding("redis", "warn", f"{redacted(url)} answers, but this user may not call INFO", todo)
                return
            yield from _version(url, info)
            yield from _room(client, url, config.run.id, info)
            yield from _settings(url, info, memory_needed(config))
        except (redis.RedisError, OSError) as error:
            yield _away(url, error)


def memory(needed: int, limit: int, setting: str, todo: str = "") -> Finding:
    """Check that `limit` bytes (0: no limit) suffice for the groups that a run may have in flight."""
    detail = f"needs up to {needed / 2**20:.0f} MiB for groups in flight and until the next checkpoint"
    if limit == 0:
        return Finding("redis memory", "warn", f"{detail}; maxmemory is not set, so the kernel may kill Redis", todo)
    detail += f", the limit is {limit / 2**20:.0f} MiB"
    if needed > limit:
        todo = f"raise {setting}, or lower learner.checkpoint_every (a full Redis pauses rollouts, nothing is lost)"
        return Finding("redis memory", "warn", detail, todo)
    return Finding("redis memory", "ok", detail)


def skew(client: redis.Redis, clock: Callable[[], float] = time.time) -> Finding:
    """Check the offset between the clocks of Redis and this machine, to within half a round trip."""
    before = clock()
    seconds, micros = client.time()
    after = clock()
    off, unsure = seconds + micros / 1e6 - (before + after) / 2, (after - before) / 2
    detail = f"Redis is {abs(off):.3f} s {'ahead of' if off > 0 else 'behind'} this machine (+/- {unsure:.3f} s)"
    if abs(off) - unsure > MOST_SKEW_S:
        detail += "; leases use the Redis clock only, but times in logs and metrics differ"
        return Finding("clock", "warn", detail, "on both hosts: timedatectl set-ntp true (or chronyc makestep)")
    return Finding("clock", "ok", detail)


def _transport(url: str) -> Iterator[Finding]:
    where = parse_redis_url(url)
    hosts = ", ".join(host for host, _ in where.hosts)
    if where.is_loopback:
        yield Finding("redis transport", "ok", "loopback or unix socket")
    elif where.tls is None:
        detail = f"passwords and trajectories go to {hosts} unencrypted: no TLS"
        todo = f"foray init run.yaml --secure --hosts {hosts.replace(', ', ',')}; then rediss:// with its ca.pem"
        yield Finding("redis transport", "warn", detail, todo)
    elif not where.verifies:
        detail = f"TLS to {hosts}, but the certificate is not verified: a man in the middle could read the traffic"
        yield Finding("redis transport", "warn", detail, "remove ssl_cert_reqs and ssl_check_hostname from the URL")
    else:
        yield Finding("redis transport", "ok", f"TLS to {hosts}, certificate verified")


def _version(url: str, info: dict[str, Any]) -> Iterator[Finding]:
    valkey = info.get("valkey_version")
    product, version = ("Valkey", str(valkey)) if valkey else ("Redis", str(info.get("redis_version", "0")))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    detail = f"{product} {version} at {redacted(url)}"
    newest = "apt-get install --only-upgrade redis-server, or install Redis 8.6.3 or newer, or Valkey"
    if numbers < OLDEST:
        todo = f"use Redis {OLDEST[0]}.{OLDEST[1]} or newer: {newest}"
        yield Finding("redis", "fail", f"{detail}: versions before {OLDEST[0]}.{OLDEST[1]} have no functions", todo)
    elif product == "Redis" and (7, 2) <= numbers < FIXED_IN:
        yield Finding("redis", "warn", f"{detail} has CVE-2026-23479 (use after free, blocked clients)", newest)
    elif product == "Redis" and numbers < (7, 2):
        detail += ": has CVE-2025-49844 (Lua) unless the distribution backported the fix"
        yield Finding("redis", "ok", detail)
    else:
        yield Finding("redis", "ok", detail)


def _settings(url: str, info: dict[str, Any], needed: int) -> Iterator[Finding]:
    policy = str(info.get("maxmemory_policy", "?"))
    evicts = eviction_refusal(policy, url)
    yield Finding.of("redis policy", evicts) if evicts else Finding("redis policy", "ok", policy)
    room = max(256, needed * 2 >> 20)
    limit = f"{cli(url)} CONFIG SET maxmemory {room}mb"
    yield memory(needed, int(info.get("maxmemory", 0)), "its maxmemory", limit)
    if info.get("role", "master") != "master":
        todo = f"use the primary ({info.get('master_host')}:{info.get('master_port')}), or its Sentinels"
        yield Finding("redis role", "fail", "the server is a replica and refuses writes", todo)
    if not int(info.get("aof_enabled", 0)):
        detail = "appendonly is off: a restart loses the work in flight, which is then generated again"
        yield Finding("redis persistence", "warn", detail, f"{cli(url)} CONFIG SET appendonly yes")
    elif str(info.get("aof_last_write_status", "ok")) != "ok":
        todo = "free space on the disk of its `dir`; it then resumes by itself"
        yield Finding(
            "redis persistence", "fail", "Redis cannot write its append-only file, so it refuses writes", todo
        )
    else:
        yield Finding("redis persistence", "ok", "append-only file")


def _room(client: redis.Redis, url: str, run: str, info: dict[str, Any]) -> Iterator[Finding]:
    """Check that a Redis with a memory limit still accepts writes. This run may be what fills it."""
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if not limit or used < FULL * limit:
        return
    detail = f"Redis is full: {used / 2**20:.0f} of {limit / 2**20:.0f} MiB used"
    if client.exists(Keys(run).traj):
        todo = "start the learner, which frees memory as it trains; or raise maxmemory"
        yield Finding("redis room", "warn", detail, todo, "it contains this run, whose groups may fill it")
    else:
        todo = f"{cli(url)} CONFIG SET maxmemory {limit * 2 >> 20}mb, or delete the data of other programs in it"
        yield Finding(
            "redis room", "fail", detail, todo, "it would refuse the tasks of a new run, and all processes would wait"
        )


def _away(url: str, error: Exception) -> Finding:
    """Return the reason why Redis cannot be used: stopped, not running, or access denied."""
    import redis

    where, cause = parse_redis_url(url), f"{type(error).__name__}: {error}"
    found: PortOwner | None = None
    if where.kind == "socket":
        found = unix_socket_owner(where.path)
    elif where.is_loopback and where.kind == "server":
        found = port_owner(where.hosts[0][1])
    process = f"process {found.pid} ({found.name})" if found else "it"
    if found is not None and found.stopped:
        detail = f"{redacted(url)} does not answer: {process} is stopped (SIGSTOP)"
        return Finding("redis", "fail", detail, f"kill -CONT {found.pid}")
    if isinstance(error, redis.exceptions.NoPermissionError):
        return Finding("redis", "fail", f"{redacted(url)}: {cause}", "give this user +ping +time (foray init --secure)")
    if isinstance(error, redis.AuthenticationError):
        todo = "set -a; . secrets/learner.env (of `foray init --secure`), or put user and password into FORAY_REDIS_URL"
        return Finding("redis", "fail", f"{redacted(url)} refuses the login: {cause}", todo)
    if isinstance(error, redis.TimeoutError):
        detail = f"{redacted(url)} accepts connections but does not answer within {ANSWER_S:g} s: stopped, or very busy"
        todo = f"kill -CONT {found.pid}, or start it again" if found else "on its host: kill -CONT its process"
        return Finding("redis", "fail", detail, todo)
    start = "start it (redis-server secrets/redis.conf, or foray redis --dir DIR)"
    todo = f"{start}, correct run.redis_url or FORAY_REDIS_URL, or leave both empty"
    return Finding("redis", "fail", f"no Redis answers at {redacted(url)}: {cause}", todo)
