"""Every way that Redis may fail, as one of four errors.

RedisUnavailable  no answer, or Redis is loading, full (RedisFull) or read-only: wait and try again
StateLost         streams, groups or functions are gone: the learner re-creates them
Fenced            the lease is not ours (any more)
UserError         a password, an address, or a key that holds something else: only a person can mend it
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
from redis.exceptions import AuthorizationError, NoPermissionError

from protocol.errors import Fenced, ForayError, StateLost, UserError, redis_text

log = logging.getLogger(__name__)

_LOST = ("NOGROUP", "NOSTREAM", "UNBLOCKED", "Function not found", "no such key")
_BUSY = ("OOM", "MISCONF", "READONLY", "LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY")
_KEY = re.compile(r"\{[\w-]+\}:[\w.-]+(:[\w.-]+)*", re.ASCII)


class RedisUnavailable(ForayError):
    """Redis does not answer or refuses writes at the moment."""


class RedisFull(RedisUnavailable):
    """At maxmemory: what adds is refused, all else works. A checkpoint and its acknowledgement may make room."""


@contextmanager
def translated(key: str = "") -> Iterator[None]:
    """redis-py's errors as the four above. key: what the commands are about, where their errors do not name it."""
    try:
        yield
    except (redis.AuthenticationError, AuthorizationError, NoPermissionError) as error:
        todo = "check the user and password of FORAY_REDIS_URL; `foray doctor` says what the user may not do"
        raise UserError("Redis refuses this user or password", why=redis_text(error), todo=todo) from error
    except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ReadOnlyError) as error:
        raise RedisUnavailable(f"{type(error).__name__}: {redis_text(error)}") from error
    except redis.exceptions.OutOfMemoryError as error:
        # by design nothing is lost: publishing and issuing are refused as a whole, reading and renewing go on
        raise RedisFull(f"Redis is full (at its maxmemory): {redis_text(error)}") from error
    except redis.ResponseError as error:
        text = redis_text(error)
        if text.startswith("FENCED"):
            raise Fenced(text) from error
        if any(word in text for word in _LOST):
            raise StateLost(text) from error
        if any(word in text for word in _BUSY):
            raise RedisUnavailable(text) from error
        with unusable_keys(key):
            raise


@contextmanager
def unusable_keys(key: str = "") -> Iterator[None]:
    """Answers that a key of ours holds something else, as UserErrors that name it; every other error passes."""
    try:
        yield
    except redis.ResponseError as error:
        answer = redis_text(error)
        if not answer.startswith(("BADKEY", "WRONGTYPE")) and "exhausted the last possible ID" not in answer:
            raise
        named = _KEY.search(str(error))
        raise unusable(named[0] if named else key, answer) from error


def unusable(key: str, why: str) -> UserError:
    """`key` cannot be used as it is; Foray creates each of its keys again."""
    return UserError(
        f"the key {key} in Redis does not hold what Foray writes there",
        why=f"{why.partition(' script: ')[0].rpartition(key + ': ')[2]}; another program or a person has written to it",
        todo=f"remove it with `DEL {key}` and start again: it is created again, and what was in it is regenerated",
    )


class Tolerated:
    """Calls that only inform people. What keeps one from Redis, a key or a missing right, is logged once."""

    def __init__(self) -> None:
        self._told = set[str]()

    def __call__(self, call: Callable[[], object]) -> bool:
        """Whether `call` went through. Raises what is no UserError."""
        try:
            call()
        except UserError as error:
            if error.what not in self._told:
                self._told.add(error.what)
                log.error("left out, training goes on: %s", error.render())
            return False
        return True
