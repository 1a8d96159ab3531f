"""Every way that Redis may fail, as one of four errors.

RedisUnavailable  no answer, or Redis is loading, full or read-only: wait and try again
StateLost         streams, groups or functions are gone: the learner re-creates them
Fenced            the lease is not ours (any more)
UserError         a password or an address that only a person can mend
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.exceptions import AuthorizationError, NoPermissionError

from protocol.errors import Fenced, ForayError, StateLost, UserError

# Sought anywhere in the message: in a pipeline redis-py puts the command before the error.
_LOST = ("NOGROUP", "NOSTREAM", "UNBLOCKED", "Function not found", "no such key")
_BUSY = ("OOM", "MISCONF", "READONLY", "LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY")


class RedisUnavailable(ForayError):
    """Redis does not answer or refuses writes at the moment."""


@contextmanager
def translated() -> Iterator[None]:
    """redis-py's errors as the four above."""
    try:
        yield
    except (redis.AuthenticationError, AuthorizationError, NoPermissionError) as error:
        todo = "check the user and password of FORAY_REDIS_URL; `foray doctor` says what the user may not do"
        raise UserError("Redis refuses this user or password", why=_readable(error), todo=todo) from error
    except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ReadOnlyError) as error:
        raise RedisUnavailable(f"{type(error).__name__}: {_readable(error)}") from error
    except redis.exceptions.OutOfMemoryError as error:
        # by design nothing is lost: publishing and issuing are refused as a whole, reading and renewing go on
        raise RedisUnavailable(f"Redis is full, all wait until maxmemory is raised: {_readable(error)}") from error
    except redis.ResponseError as error:
        text = _readable(error)
        if text.startswith("FENCED"):
            raise Fenced(text) from error
        if any(word in text for word in _LOST):
            raise StateLost(text) from error
        if any(word in text for word in _BUSY):
            raise RedisUnavailable(text) from error
        raise


def _readable(error: Exception) -> str:
    # In a pipeline redis-py quotes the command, bodies and all.
    return "".join(c if c.isprintable() else "." for c in str(error)[:300])
