"""Redis users by role, with the permissions that their code needs and no others. Pure.

A function runs with the caller's permissions, so the commands inside it are granted here too; FCALL alone grants
nothing. Each group of keys has its own commands (selectors, Redis 7.0), all below the run's prefix. A rollout server
may append to the trajectory stream, so it can forge or suppress any group of the run: see SECURITY.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, get_args

from protocol.settings import RUN_ID

RedisRole = Literal["learner", "rollout", "node", "retriever", "viewer", "operator", "admin"]
REDIS_ROLES: tuple[RedisRole, ...] = get_args(RedisRole)

EVERYBODY = "+ping +hello +auth +select +time +multi +exec +discard +client|setname +client|getname"
"""Handshake, clock, transactions (Redis checks each command in a transaction separately)."""
_SWEPT = "+zadd +zrem +zremrangebyscore"
_LOOK = (
    "(%R~{run}:* +get +hget +hgetall +hmget +exists +pttl +zrange +zrangebyscore +smembers +scard +sismember +xlen "
    "+xrange +xrevrange +xpending +xinfo|groups +xinfo|stream +xinfo|consumers)"
)

GRANTS: Mapping[RedisRole, tuple[str, ...]] = {
    # owns every key of its run; the only role that loads the functions, which all runs on a server share
    "learner": (
        "+function|load +function|list +info",
        "(~{run}:* +fcall +@stream +@hash +@string +@set +@sortedset +exists +del +pexpire +pttl)",
    ),
    "rollout": (
        "+info",
        "(~{run}:tasks ~{run}:traj ~{run}:tokens +fcall)",
        "(~{run}:tasks +xreadgroup +xautoclaim +xclaim +xpending +xack +xadd +xdel +xgroup|delconsumer)",
        "(~{run}:traj +exists +xadd)",
        "(~{run}:tokens +hincrby)",
        "(~{run}:dlq ~{run}:events +xadd)",
        "(~{run}:metrics:rollout:* +set +del)",
        "(~{run}:metrics:rollout:* ~{run}:processes +fcall)",
        f"(~{{run}}:processes {_SWEPT})",
        "(~{run}:evaluation +set +get +del)",
        "(%R~{run}:engines %R~{run}:processes +zrangebyscore)",
        # the addresses that get its queries
        "(%R~{run}:metrics:retriever:* +get)",
        "(%R~{run}:engine:* %R~{run}:wv:target %R~{run}:meta +hget +hmget +hgetall)",
    ),
    "node": (
        "(~{run}:engine:* +hset +hget +pexpire +del)",
        f"(~{{run}}:engines {_SWEPT})",
        "(~{run}:engine:* ~{run}:engines +fcall)",
        "(%R~{run}:wv:target %R~{run}:meta +hget +hmget +hgetall)",
        "(%R~{run}:wv:view %R~{run}:wv:plan +get)",
        "(%R~{run}:wv:wake +xread)",
        "(~{run}:wv:answers:* +hset +pexpire +xadd +fcall)",
        "(%R~{run}:evaluation %R~{run}:wv:validated +get)",
        "(~{run}:drain +srem)",
        "(~{run}:metrics:node:* +set +del)",
        "(~{run}:metrics:node:* ~{run}:processes +fcall)",
        f"(~{{run}}:processes {_SWEPT})",
        "(~{run}:events +xadd)",
    ),
    "retriever": (
        "(~{run}:metrics:retriever:* +set +del)",
        "(~{run}:metrics:retriever:* ~{run}:processes +fcall)",
        f"(~{{run}}:processes {_SWEPT})",
    ),
    "viewer": ("+info", _LOOK),
    "operator": (
        "+info",
        _LOOK,
        "(~{run}:requeue +sadd +srem)",
        "(~{run}:dlq +xdel)",
        "(~{run}:events +xadd)",
        "(~{run}:drain +sadd)",
        "(~{run}:launcher +hset +hdel)",
    ),
    # for users: server settings and repairs. No process of a run has it.
    "admin": ("~* &* +@all",),
}


def users_acl(run: str, passwords: Mapping[RedisRole, str]) -> str:
    """Return an ACL file (`aclfile`): a user per role with a password hash, and the default user off."""
    lines = ["user default off resetkeys resetchannels -@all"]
    return "\n".join([*lines, *(user_line(run, role, passwords[role]) for role in REDIS_ROLES)]) + "\n"


def user_line(run: str, role: RedisRole, password: str) -> str:
    """Return the line of one user. `run` must be a valid run id: it becomes part of key patterns."""
    assert RUN_ID.match(run), run
    return f"user {role} on #{hashlib.sha256(password.encode()).hexdigest()} {rules(run, role)}"


def rules(run: str, role: RedisRole) -> str:
    """Return the permissions of `role` in the syntax of ACL SETUSER."""
    grants = " ".join(GRANTS[role]).replace("{run}", f"{{{run}}}")
    first = f"resetkeys resetchannels -@all {EVERYBODY}" if role != "admin" else "resetkeys resetchannels -@all"
    return f"{first} {grants}"
