"""One table of Redis errors for both clients: each answer, from either library, becomes one error of Foray."""

from __future__ import annotations

import pytest
from redis import exceptions

from protocol.errors import Fenced, ForayError, StateLost, UserError
from protocol.runtime.redis.errors import ERRORS, RedisFull, RedisRefused, RedisUnavailable, translate_errors

PIPELINE = "Command # 2 (FCALL foray_publish 4 {run}:traj) of pipeline caused error: "


def raised(error: Exception, *, wait_if_refused: bool = False) -> Exception:
    with pytest.raises(Exception) as caught, translate_errors("{run}:traj", wait_if_refused=wait_if_refused):
        raise error
    return caught.value


@pytest.mark.parametrize("wait_if_refused", [False, True])
@pytest.mark.parametrize(("word", "kind"), ERRORS.items())
def test_a_word_means_the_same_to_both_clients_anywhere_in_the_answer(
    word: str, kind: type[ForayError], wait_if_refused: bool
) -> None:
    for text in (word, f"{word} and more", f"{PIPELINE}{word} and more", f"{PIPELINE}('{word} and more',)"):
        assert type(raised(exceptions.ResponseError(text), wait_if_refused=wait_if_refused)) is kind, text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.ConnectionError("gone"), RedisUnavailable),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), RedisUnavailable),
        (exceptions.TimeoutError("late"), RedisUnavailable),
        (TimeoutError(), RedisUnavailable),
        (ConnectionResetError("reset"), RedisUnavailable),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), RedisUnavailable),
        (exceptions.MasterDownError("Link with MASTER is down"), RedisUnavailable),
        (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), RedisFull),
        (exceptions.AuthenticationError("invalid username-password pair"), UserError),
        (exceptions.NoPermissionError("this user has no permissions"), UserError),
        (exceptions.ResponseError("UNBLOCKED the stream key no longer exists"), StateLost),
        (
            exceptions.ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"),
            RedisUnavailable,
        ),
        (exceptions.ResponseError("FENCED 3 script: foray_ack, on @user_function:10."), Fenced),
    ],
)
def test_errors_that_both_sides_wait_for_or_end_by(error: Exception, kind: type[Exception]) -> None:
    assert type(raised(error)) is type(raised(error, wait_if_refused=True)) is kind


def test_an_answer_that_is_not_expected_ends_the_learner_and_is_waited_for_by_others() -> None:
    odd = exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    assert isinstance(raised(odd), UserError) and "{run}:traj" in str(raised(odd))
    refused = raised(odd, wait_if_refused=True)
    assert type(refused) is RedisRefused and "`DEL {run}:traj`" in str(refused)
    other = exceptions.ResponseError("ERR value is not an integer or out of range")
    assert raised(other) is other and type(raised(other, wait_if_refused=True)) is RedisRefused


@pytest.mark.parametrize("text", ["unknown command 'X'", "syntax error", "wrong number of arguments for 'get' command"])
def test_a_command_that_is_wrong_in_itself_passes(text: str) -> None:
    for wait_if_refused in (False, True):
        bug = exceptions.ResponseError(text)
        assert raised(bug, wait_if_refused=wait_if_refused) is bug


def test_a_group_that_exists_is_no_busy_server() -> None:
    exists = exceptions.ResponseError("BUSYGROUP Consumer Group name already exists")
    assert raised(exists) is exists


def test_what_is_no_error_of_redis_passes() -> None:
    for error in (exceptions.DataError("no bytes"), exceptions.WatchError("changed"), KeyError("k")):
        assert raised(error) is error and raised(error, wait_if_refused=True) is error
