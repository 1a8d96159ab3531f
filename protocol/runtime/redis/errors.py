"""Redis errors: one taxonomy, and the translation of redis-py's errors, for the synchronous and asynchronous client.

RedisUnavailable   no connection, no answer in time, or the server cannot serve now: retry
  RedisFull        at maxmemory: commands that add data are refused, all others work
  RedisRefused     an unexpected answer
StateLost          streams or functions are missing: the learner creates them again
Fenced             another learner holds the lease
UserError          wrong password, missing permission or, for the learner, a key with foreign content
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
    """Redis does not answer, or cannot serve at the moment. Nothing is lost: retry."""


class RedisFull(RedisUnavailable):
    """Redis is at maxmemory: nothing was written. The acknowledgements of a checkpoint may free memory."""


class RedisRefused(RedisUnavailable):
    """Redis gave an unexpected answer, most often because another program has written to a key.

    Retried like an outage, because exiting would lose the work in flight, and reported to the user.
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
"""Text in an answer of Redis -> error; the first match counts. It may occur anywhere in the answer, because Lua
functions and pipelines prepend text."""
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
"""Answers to an invalid command: a bug in Foray, or a server that is too old."""
_KEY = re.compile(r"\{[\w-]+\}:[\w.-]+(:[\w.-]+)*", re.ASCII)


@contextmanager
def translate_errors(key: str = "", *, wait_if_refused: bool = False) -> Iterator[None]:
    """Re-raise errors of redis-py as the errors above. The error of an invalid command is a bug and is not translated.

    key              key of the commands, for answers that do not name it
    wait_if_refused  raise RedisRefused for an unexpected answer. Without it, a key with foreign content raises
                     UserError, and any other unexpected answer is not translated.
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
        todo = "check the user and password in FORAY_REDIS_URL; `foray doctor` lists the permissions that are missing"
        return UserError("Redis rejected the user, the password or a command", why=text, todo=todo)
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
    advice = f"run `DEL {name}`, and the learner creates it again"
    return RedisRefused(f"the key {name} has unexpected content ({why}): {advice}")


def _full(text: str) -> RedisFull:
    return RedisFull(f"Redis is full (maxmemory reached): {text}")


def redis_text(error: Exception) -> str:
    """Return the answer of Redis as one printable line, without the command that redis-py quotes in a pipeline."""
    quoted, _, text = str(error).rpartition(" of pipeline caused error: ")
    if quoted:  # the asynchronous client quotes the command in a tuple together with the answer
        text = text.removeprefix("(").removesuffix(",)").strip("\"'")
    return "".join(c if " " <= c <= "~" else "." for c in text[:300])


@contextmanager
def unusable_keys(key: str = "") -> Iterator[None]:
    """Re-raise an answer that a key has foreign content as a UserError. Other errors are not translated."""
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
    """Return the error for a `key` with foreign content. Foray can create each of its keys again."""
    return UserError(
        f"the key {key} in Redis has unexpected content",
        why=f"{why.partition(' script: ')[0].rpartition(key + ': ')[2]}; another program or a user has written to it",
        todo=f"delete it with `DEL {key}` and start again: Foray creates it again and regenerates its content. A Redis "
        "that `foray up` started has stopped with the run: `foray redis --dir RUN_DIR/redis` starts it meanwhile",
    )


class BestEffort:
    """Calls whose failure may be ignored, such as events. Each different UserError is logged once."""

    def __init__(self) -> None:
        self._logged = set[str]()

    def __call__(self, call: Callable[[], object]) -> bool:
        """Return whether `call` succeeded. Raises any error that is not a UserError."""
        try:
            call()
        except UserError as error:
            if error.what not in self._logged:
                self._logged.add(error.what)
                log.error("skipped an optional write, training continues: %s", error.render())
            return False
        return True
