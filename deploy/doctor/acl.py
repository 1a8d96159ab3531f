"""Check that a Redis user has the permissions that its role needs, and no others, without executing a command.

Inside MULTI, Redis checks and queues a command, and DISCARD drops the queue: so every permission can be tested, even
FLUSHALL, without effect. The commands inside a function are tested one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from deploy.doctor.finding import Finding
from deploy.doctor.redis import ANSWER_S
from deploy.run.redis_server import connect
from deploy.secrets.acl import GRANTS, REDIS_ROLES, RedisRole, rules
from protocol.keys import Keys
from protocol.runtime.redis.url import cli, parse_redis_url

if TYPE_CHECKING:
    import redis

Command = tuple[str, ...]
SERVICES: tuple[RedisRole, ...] = ("learner", "rollout", "node")


def needs(run: str, role: RedisRole) -> Iterator[Command]:
    """Yield a command for each permission and key that `deploy.secrets.acl` grants to `role`."""
    for grant in GRANTS[role]:
        words = grant.strip("()").replace("{run}", f"{{{run}}}").replace("*", "x").split()
        names = [word[1:] for word in words if word[0] == "+"]
        keys = [word.partition("~")[2] for word in words if "~" in word]
        for name in chain.from_iterable(CATEGORIES.get(name, name).split() for name in names):
            head, arguments = name.upper().split("|"), ARGUMENTS[name].split()
            for group in [keys] if name == "fcall" else [[key] for key in keys or [""]]:
                given = {"KEYS": group, "COUNT": [str(len(group))]}
                yield (*head, *chain.from_iterable(given.get(word, [word]) for word in arguments))


CATEGORIES = {
    "@stream": "xadd xread xreadgroup xautoclaim xack xpending xrange xtrim xgroup|create xinfo|groups",
    "@hash": "hset",
    "@string": "set get",
    "@set": "smembers srem",
    "@sortedset": "zadd",
}
"""Category of commands -> those of it that the processes use."""
_USED = {
    "": "info function|list",
    "REPLACE #!lua": "function|load",
    "foray_publish COUNT KEYS": "fcall",
    "KEYS": "get hgetall exists del pttl smembers scard xlen xinfo|groups xinfo|stream",
    "KEYS 1": "set pexpire sadd srem sismember hget hmget hdel zrem",
    "KEYS 0 1": "zadd zrange zrangebyscore zremrangebyscore",
    "KEYS f 1": "hset hincrby",
    "KEYS * f v": "xadd",
    "KEYS 0-1": "xdel",
    "KEYS g": "xpending xinfo|consumers",
    "KEYS g 0-1": "xack xgroup|create xgroup|delconsumer",
    "KEYS g c 0 0-1": "xclaim xautoclaim",
    "KEYS - +": "xrange xrevrange",
    "KEYS MINID 0-1": "xtrim",
    "GROUP g c STREAMS KEYS >": "xreadgroup",
    "STREAMS KEYS 0": "xread",
}
ARGUMENTS = {name: arguments for arguments, names in _USED.items() for name in names.split()}
"""Command -> arguments that Redis accepts before it executes it."""
TOO_MUCH: Sequence[Command] = (
    ("FLUSHALL",),
    ("CONFIG", "SET", "maxmemory", "0"),
    ("FUNCTION", "FLUSH"),
    ("KEYS", "*"),
    ("EVAL", "return 1", "0"),
    ("ACL", "LIST"),
    ("GET", Keys("another-run").issued),
)


def user(url: str, run: str, role: RedisRole | None = None) -> Iterator[Finding]:
    """Check the user of `url`. Its role is `role`, or its name, or it serves every process of the run."""
    import redis

    name = parse_redis_url(url).username or "default"
    named = role or next((known for known in REDIS_ROLES if known == name), None)
    if named == "admin":
        yield Finding("redis user", "ok", "admin: for users, no process should use it")
        return
    with connect(url, timeout_s=ANSWER_S) as client:
        try:
            missing = _refused(client, [c for part in ([named] if named else SERVICES) for c in needs(run, part)])
            beyond = [command for command in TOO_MUCH if command not in _refused(client, TOO_MUCH)]
        except (redis.RedisError, OSError) as error:
            todo = f"`foray init --secure` creates users that can be checked ({type(error).__name__}: {error})"
            yield Finding(f"redis user {name}", "warn", "cannot check its permissions: Redis refuses MULTI", todo)
            return
    wanted = f"{cli(url)} ACL SETUSER {name} {rules(run, named or 'learner')}"
    if missing:
        words = ", ".join(" ".join(command[:2]) for command in missing[:4]) + (" ..." if len(missing) > 4 else "")
        detail = f"lacks permissions for {named or 'all processes'}: {words}"
        yield Finding(f"redis user {name}", "fail", detail, wanted)
    elif beyond and not (name == "default" and parse_redis_url(url).is_loopback):
        words = ", ".join(" ".join(command[:2]) for command in beyond)
        todo = wanted if named else "`foray init run.yaml --secure` creates a user per role; launch.secrets uses them"
        yield Finding(f"redis user {name}", "warn", f"has more permissions than it needs: {words}", todo)
    else:
        yield Finding(
            f"redis user {name}", "ok", "has the permissions it needs" + (", and all others" if beyond else "")
        )


def _refused(client: redis.Redis, commands: Sequence[Command]) -> list[Command]:
    """Return those of `commands` that the user of `client` may not send. None is executed."""
    import redis

    pool: Any = client.connection_pool
    connection = pool.get_connection()
    refused: list[Command] = []
    try:
        connection.send_command("MULTI")
        connection.read_response()
        for command in commands:
            connection.send_command(*command)
            try:
                connection.read_response()
            except redis.exceptions.NoPermissionError:
                refused.append(command)
            except redis.ResponseError:
                pass  # permitted, but it fails otherwise: the server does not know it, or is full
        connection.send_command("DISCARD")
        connection.read_response()
    finally:
        # closing the connection drops the queue too, if DISCARD fails
        connection.disconnect()
        pool.release(connection)
    return refused
