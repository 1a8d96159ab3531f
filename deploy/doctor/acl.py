"""Check that a Redis user has the permissions that its role needs, and no others, without executing a command.

Inside MULTI, Redis checks and queues a command, and DISCARD drops the queue: so every permission can be tested, even
FLUSHALL, without effect. The commands inside a function are tested one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deploy.doctor.finding import Finding
from deploy.doctor.redis import ANSWER_S
from deploy.run.redis_server import connect
from deploy.secrets.acl import REDIS_ROLES, RedisRole, rules
from protocol.functions import ACQUIRE, PUBLISH, REGISTER, REPORT
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.runtime.redis.url import cli, parse_redis_url

if TYPE_CHECKING:
    import redis

Command = tuple[str, ...]
SERVICES: tuple[RedisRole, ...] = ("learner", "rollout", "node")


def needs(run: str) -> Mapping[RedisRole, Sequence[Command]]:
    """Return, for each role, commands that represent all that it does."""
    k = Keys(run)
    return {
        "learner": _learner(k),
        "rollout": _rollout(k),
        "node": _node(k),
        "retriever": _retriever(k),
        "viewer": (("GET", k.issued), ("HGETALL", k.target), ("XINFO", "GROUPS", k.traj), ("XLEN", k.dlq), ("INFO",)),
        "operator": (("SADD", k.requeue, "1"), ("XDEL", k.dlq, "0-1"), ("XRANGE", k.dlq, "-", "+"), ("INFO",)),
    }


def _learner(k: Keys) -> tuple[Command, ...]:
    return (
        ("FUNCTION", "LOAD", "REPLACE", "#!lua name=foray"),
        ("FUNCTION", "LIST"),
        ("INFO",),
        ("FCALL", ACQUIRE, "2", k.lease, k.epoch),
        ("XGROUP", "CREATE", k.tasks, TASK_GROUP, "0", "MKSTREAM"),
        ("XREADGROUP", "GROUP", TRAJ_GROUP, "L1", "STREAMS", k.traj, ">"),
        ("XAUTOCLAIM", k.traj, TRAJ_GROUP, "L1", "0", "0-0"),
        ("XACK", k.traj, TRAJ_GROUP, "0-1"),
        ("XPENDING", k.traj, TRAJ_GROUP),
        ("XINFO", "GROUPS", k.tasks),
        ("XTRIM", k.traj, "MINID", "0-1"),
        ("XRANGE", k.traj, "-", "+"),
        ("XADD", k.dlq, "*", "f", "v"),
        ("HSET", k.lease, "f", "v"),
        ("HSET", k.meta, "f", "v"),
        ("PEXPIRE", k.lease, "1"),
        ("SET", k.view, "v"),
        ("GET", k.issued),
        ("DEL", k.lease),
        ("SMEMBERS", k.requeue),
        ("SREM", k.requeue, "1"),
        ("ZADD", k.processes, "0", "m"),
    )


def _rollout(k: Keys) -> tuple[Command, ...]:
    return (
        ("FCALL", PUBLISH, "3", k.tasks, k.traj, k.tokens),
        ("XREADGROUP", "GROUP", TASK_GROUP, "r", "STREAMS", k.tasks, ">"),
        ("XCLAIM", k.tasks, TASK_GROUP, "r", "0", "0-1"),
        ("XPENDING", k.tasks, TASK_GROUP),
        ("XACK", k.tasks, TASK_GROUP, "0-1"),
        ("XDEL", k.tasks, "0-1"),
        ("XADD", k.tasks, "*", "f", "v"),
        ("EXISTS", k.traj),
        ("XADD", k.traj, "*", "f", "v"),
        ("HINCRBY", k.tokens, "f", "1"),
        ("XADD", k.dlq, "*", "f", "v"),
        ("SET", k.metrics("rollout", "r"), "v"),
        ("FCALL", REPORT, "2", k.metrics("rollout", "r"), k.processes),
        ("INFO",),
        ("ZADD", k.processes, "0", "m"),
        ("SET", k.evaluation, "v"),
        ("GET", k.evaluation),
        ("ZRANGEBYSCORE", k.engines, "0", "1"),
        ("ZRANGEBYSCORE", k.processes, "0", "1"),
        ("GET", k.metrics("retriever", "r")),
        ("HGET", k.engine("e"), "b"),
        ("HMGET", k.target, "b", "state"),
        ("HGETALL", k.meta),
    )


def _node(k: Keys) -> tuple[Command, ...]:
    return (
        ("HSET", k.engine("e"), "b", "v"),
        ("HGET", k.engine("e"), "owner"),
        ("PEXPIRE", k.engine("e"), "1"),
        ("DEL", k.engine("e")),
        ("ZADD", k.engines, "0", "e"),
        ("HGET", k.target, "b"),
        ("HGETALL", k.meta),
        ("GET", k.view),
        ("FCALL", REGISTER, "2", k.engine("e"), k.engines),
        ("FCALL", REPORT, "2", k.metrics("node", "e"), k.processes),
        ("HSET", k.answers(1, 1), "m", "v"),
        ("GET", k.evaluation),
        ("SET", k.metrics("node", "e"), "v"),
        ("ZADD", k.processes, "0", "m"),
    )


def _retriever(k: Keys) -> tuple[Command, ...]:
    return (
        ("SET", k.metrics("retriever", "r"), "v"),
        ("FCALL", REPORT, "2", k.metrics("retriever", "r"), k.processes),
        ("DEL", k.metrics("retriever", "r")),
        ("ZADD", k.processes, "0", "m"),
        ("ZREM", k.processes, "m"),
    )


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
            missing = _refused(client, [c for part in ([named] if named else SERVICES) for c in needs(run)[part]])
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
