"""Redis errors: one taxonomy, and one translation of redis-py's errors for the synchronous and the asynchronous client.

RedisUnavailable   no connection, no answer in time, or the server cannot serve now: worth waiting for
  RedisFull        at maxmemory: what adds is refused, all else works
  RedisRefused     an answer that Foray does not expect
StateLost          streams or functions are gone: the learner creates them again
Fenced             another learner holds the lease
UserError          wrong password, missing right or, for the learner, a key that holds something else
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from redis import exceptions

from protocol.errors import Fenced, ForayError, StateLost, UserError

log = logging.getLogger(__name__)


class RedisUnavailable(ForayError):
    """Redis does not answer, or cannot serve at the moment. Nothing is lost: try again later."""


class RedisFull(RedisUnavailable):
    """Redis is at maxmemory: nothing was written. The acknowledgements of a checkpoint may free memory."""


class RedisRefused(RedisUnavailable):
    """Redis gave an answer that Foray does not expect: most often another program has written to a key.

    Waited for like an outage, since ending would lose what is in flight, and shown to people.
    """


ERRORS: Mapping[str, type[ForayError]] = {
    "FENCED": Fenced,
    "instance state changed": RedisUnavailable,  # UNBLOCKED: the server became a replica
    "NOGROUP": StateLost,
    "NOSTREAM": StateLost,
    "UNBLOCKED": StateLost,  # the stream of a blocked read was deleted
    "Function not found": StateLost,
    "no such key": StateLost,
    "OOM": RedisFull,
    "MISCONF": RedisUnavailable,
    "READONLY": RedisUnavailable,
    "LOADING": RedisUnavailable,
    "CLUSTERDOWN": RedisUnavailable,
    "MASTERDOWN": RedisUnavailable,
    "TRYAGAIN": RedisUnavailable,
    "NOREPLICAS": RedisUnavailable,
    "BUSY": RedisUnavailable,
}
"""Word in an answer of Redis -> our error; the first that the answer holds counts. Words are searched anywhere in the
text, because a Lua function and a pipeline put their own before the server's."""
_ERRORS = [(re.compile(rf"\b{word}\b"), error) for word, error in ERRORS.items()]
_DENIED = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
_UNAVAILABLE = (
    *(exceptions.ConnectionError, exceptions.TimeoutError, OSError),
    *(exceptions.ReadOnlyError, exceptions.ClusterDownError, exceptions.TryAgainError),
)
_BUGS = (
    "unknown command",
    "unknown subcommand",
    "wrong number of arguments",
    "syntax error",
    "Invalid stream ID",
)
"""Answers to a command that is wrong in itself, whatever Redis holds: a bug of Foray, or a server that is too old."""
_KEY = re.compile(r"\{[\w-]+\}:[\w.-]+(:[\w.-]+)*", re.ASCII)


@contextmanager
def translate_errors(key: str = "", *, wait_if_refused: bool = False) -> Iterator[None]:
    """Re-raise errors of redis-py as the errors above. A command that is wrong in itself is a bug and passes.

    key              what the commands are about, for answers that do not name their key
    wait_if_refused  raise RedisRefused for an answer that Foray does not expect. Without it a key that holds something
                     else raises UserError, and any other such answer passes.
    """
    try:
        yield
    except (exceptions.RedisError, OSError) as error:
        translated = _translate(error, key, wait_if_refused=wait_if_refused)
        if translated is None:
            raise
        raise translated from error


def _translate(error: Exception, key: str, *, wait_if_refused: bool) -> ForayError | None:
    text = redis_text(error)
    if isinstance(error, _DENIED):
        todo = "check the user and password of FORAY_REDIS_URL; `foray doctor` says what the user may not do"
        return UserError("Redis refuses this user or password", why=text, todo=todo)
    if isinstance(error, _UNAVAILABLE):
        return RedisUnavailable(f"{type(error).__name__}: {text}")
    if isinstance(error, exceptions.OutOfMemoryError):
        return _full(text)
    if not isinstance(error, exceptions.ResponseError):
        return None
    kind = next((kind for word, kind in _ERRORS if word.search(text)), None)
    if kind is not None:
        return _full(text) if kind is RedisFull else kind(text)
    if not wait_if_refused:
        return _unusable_key(error, key)
    if any(words in text for words in _BUGS):
        return None
    name, why = _key_of(error, key), text.partition(" script: ")[0]
    if not name or not _is_unusable(text):
        return RedisRefused(f"{name}: {why}" if name else why)
    why = why.removeprefix(f"BADKEY {name}: ")
    advice = f"`DEL {name}` lets the learner create it again"
    return RedisRefused(f"{name} does not hold what Foray writes there ({why}): {advice}")


def _full(text: str) -> RedisFull:
    return RedisFull(f"Redis is full (at its maxmemory): {text}")


def redis_text(error: Exception) -> str:
    """Return what Redis answered, in one printable line, without the command that redis-py quotes in a pipeline."""
    quoted, _, text = str(error).rpartition(" of pipeline caused error: ")
    if quoted:  # the asynchronous library quotes a tuple with the answer, too
        text = text.removeprefix("(").removesuffix(",)").strip("\"'")
    return "".join(c if " " <= c <= "~" else "." for c in text[:300])


@contextmanager
def unusable_keys(key: str = "") -> Iterator[None]:
    """Re-raise an answer that a key of Foray holds something else as a UserError; every other error passes."""
    try:
        yield
    except exceptions.ResponseError as error:
        translated = _unusable_key(error, key)
        if translated is None:
            raise
        raise translated from error


def _unusable_key(error: Exception, key: str) -> UserError | None:
    answer = redis_text(error)
    return unusable(_key_of(error, key), answer) if _is_unusable(answer) else None


def _is_unusable(answer: str) -> bool:
    return answer.startswith(("BADKEY", "WRONGTYPE")) or "exhausted the last possible ID" in answer


def _key_of(error: Exception, key: str) -> str:
    named = _KEY.search(str(error))
    return named[0] if named else key


def unusable(key: str, why: str) -> UserError:
    """Return the error for a `key` that cannot be used as it is; Foray creates each of its keys again."""
    return UserError(
        f"the key {key} in Redis does not hold what Foray writes there",
        why=f"{why.partition(' script: ')[0].rpartition(key + ': ')[2]}; another program or a person has written to it",
        todo=f"remove it with `DEL {key}` and start again: it is created again, and what was in it is regenerated",
    )


class BestEffort:
    """Calls that only inform people. What keeps one from Redis, a key or a missing right, is logged once."""

    def __init__(self) -> None:
        self._logged = set[str]()

    def __call__(self, call: Callable[[], object]) -> bool:
        """Return whether `call` succeeded. Raises what is no UserError."""
        try:
            call()
        except UserError as error:
            if error.what not in self._logged:
                self._logged.add(error.what)
                log.error("left out, training goes on: %s", error.render())
            return False
        return True
