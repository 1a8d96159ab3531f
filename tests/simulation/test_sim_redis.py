"""The model of Redis against a real one: the same random calls on both, and every reply compared.

Ids of entries come from two clocks: each reply is compared with its ids replaced by the order in which they appeared.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sim.network import perform
from sim.sim_redis import SimRedis

from protocol.runtime.redis.server import function_library
from tests.support.private_redis import client_of

TASKS, TRAJ, LEASE, EPOCH, ISSUED, TOKENS, META = (
    "{s}:tasks",
    "{s}:traj",
    "{s}:lease",
    "{s}:epoch",
    "{s}:issued",
    "{s}:tokens",
    "{s}:meta",
)
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
ID = re.compile(rb"^\d{9,}-\d+$")
WORDS = ("NOGROUP", "NOSTREAM", "FENCED", "BUSYGROUP", "BADKEY", "WRONGTYPE")
UNKNOWABLE = {"time_since_delivered", "since"}
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Entry(int):
    """The n-th id so far, as an argument."""


@pytest.fixture(scope="module")
def real(redis_socket: str) -> Iterator[redis.Redis]:
    client = client_of(redis_socket, protocol=2)
    client.set_response_callback("XAUTOCLAIM", lambda reply, **_: reply)
    yield client
    client.close()


class Side:
    """One of the two, with the ids that it gave."""

    def __init__(self, do: Any) -> None:
        self._do, self._ids = do, list[bytes]()

    def call(self, name: str, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """The reply without ids and moments, or the error by its kind."""
        try:
            reply = self._do(name, self._filled(args), self._filled(more))
        except redis.RedisError as error:
            word, _, rest = str(error).partition(" ")
            which = rest.split(": ")[0] if word == "BADKEY" else ""
            return type(error).__name__, word if word in WORDS else "", which
        return self._plain(reply)

    def _filled(self, value: Any) -> Any:
        if isinstance(value, Entry):
            return self._ids[value % len(self._ids)] if self._ids else "1-1"
        if isinstance(value, tuple | list):
            return type(value)(self._filled(v) for v in value)
        if isinstance(value, dict):
            return {k: self._filled(v) for k, v in value.items()}
        return value

    def _plain(self, value: Any) -> Any:
        if isinstance(value, bytes) and ID.match(value):
            if value not in self._ids:
                self._ids.append(value)
            return f"id {self._ids.index(value)}"
        if isinstance(value, list | tuple):
            return [self._plain(v) for v in value]
        if isinstance(value, set):
            return sorted(value)
        if isinstance(value, dict):
            return {str(k): self._plain(v) for k, v in value.items() if k not in UNKNOWABLE and k != b"since"}
        return value


def agree(model: Any, truth: Any) -> bool:
    """Whether replies are equal; of information, what the model knows of it."""
    if isinstance(model, dict) and isinstance(truth, dict):
        return all(key in truth and agree(value, truth[key]) for key, value in model.items())
    if isinstance(model, list) and isinstance(truth, list):
        return len(model) == len(truth) and all(map(agree, model, truth))
    if isinstance(model, int) and isinstance(truth, int) and min(model, truth) > 50_000:
        return abs(model - truth) < 5_000  # milliseconds that a lease has left
    return bool(model == truth)


seqs, who, entry = st.integers(1, 6), st.sampled_from(["a", "b"]), st.integers(0, 30).map(Entry)
lineage = st.sampled_from(["one", "two"])
owner = st.sampled_from([("1", "me"), ("1", "me"), ("2", "me"), ("1", "other")])
stream = st.sampled_from([(TASKS, "rollout"), (TASKS, "rollout"), (TRAJ, "learner")])


def fcall(name: str, keys: list[str], *args: Any) -> Call:
    return "fcall", (name, len(keys), *keys, *args), {}


def call(name: str, *args: Any, **more: Any) -> Call:
    return name, args, more


functions_calls = st.one_of(
    st.builds(
        lambda t, o: fcall("foray_acquire", [LEASE, EPOCH], t, 0, 60000, o),
        st.sampled_from(["me", "other"]),
        st.sampled_from("01"),
    ),
    st.builds(
        lambda t, o, i: fcall("foray_acquire", [LEASE, EPOCH, META], t, 0, 60000, o, i),
        st.sampled_from(["me", "other"]),
        st.sampled_from("01"),
        lineage,
    ),
    st.builds(lambda o, i: fcall("foray_meta", [LEASE, META], *o, "lineage_id", i, "schema", "1.0"), owner, lineage),
    st.builds(
        lambda o, i: fcall(
            "foray_reset", [LEASE, META, "{s}:tasks2", "{s}:traj2", ISSUED, TOKENS], *o, "lineage_id", i
        ),
        owner,
        lineage,
    ),
    st.builds(lambda o: fcall("foray_renew", [LEASE], *o, 60000), owner),
    st.builds(lambda o: fcall("foray_release", [LEASE], *o), owner),
    st.builds(
        lambda o, f, c, s: fcall(
            "foray_issue", [LEASE, ISSUED, TASKS], *o, f, c, *(x for n in sorted(s) for x in (n, b"b"))
        ),
        owner,
        st.integers(0, 3),
        st.sampled_from([2, 10**15]),
        st.sets(seqs),
    ),
    st.builds(
        lambda o, s: fcall("foray_reissue", [LEASE, TASKS], *o, *(x for n in s for x in (n, b"b"))),
        owner,
        st.lists(seqs, max_size=3),
    ),
    st.builds(lambda w, e: fcall("foray_beat", [TASKS], w, *e), who, st.lists(entry, max_size=3)),
    st.builds(
        lambda e, s, t, w: fcall("foray_publish", [TASKS, TRAJ, TOKENS], e, s, b"h", b"b", t, *w),
        entry,
        seqs,
        st.integers(0, 9),
        st.one_of(st.just(()), st.tuples(who)),
    ),
    st.builds(
        lambda e, s, t, w: fcall("foray_retry", [TASKS, TOKENS], e, s, b"b", t, *w),
        entry,
        seqs,
        st.integers(0, 9),
        st.one_of(st.just(()), st.tuples(who)),
    ),
    st.builds(lambda o, e: fcall("foray_ack", [LEASE, TRAJ], *o, *e), owner, st.lists(entry, min_size=1, max_size=3)),
    st.builds(
        lambda k: fcall("foray_register", ["{s}:e", *k], "b", b"x", 60000, "5", "p"), st.sampled_from([[], ["{s}:z"]])
    ),
    st.just(fcall("foray_report", ["{s}:m", "{s}:z"], b"x", 60000, "7", "q")),
    st.builds(lambda o: fcall("foray_target", [LEASE, "{s}:target"], *o, b"b", "ready"), owner),
    st.builds(lambda o: fcall("foray_view", [LEASE, "{s}:view"], *o, b"b", 60000), owner),
    st.just(fcall("foray_census", [TRAJ, TOKENS])),
    st.builds(lambda e, last: fcall("foray_unread", [TRAJ], e, last), entry, st.one_of(entry, st.just(LAST_ID))),
    st.builds(lambda e: fcall("foray_tokens_of", [TRAJ], *e), st.lists(entry, min_size=1, max_size=3)),
)
IDLE = [{}, {"idle": 0}, {"idle": 10**9}, {"idle": 0, "consumername": "a"}]
stream_calls = st.one_of(
    st.builds(lambda s, w, n: call("xreadgroup", s[1], w, {s[0]: ">"}, count=n), stream, who, st.integers(1, 3)),
    st.builds(
        lambda s, w, i, n, j: call("execute_command", "XAUTOCLAIM", s[0], s[1], w, i, "0-0", "COUNT", n, *j),
        stream,
        who,
        st.sampled_from([0, 10**9]),
        st.integers(1, 3),
        st.sampled_from([(), ("JUSTID",)]),
    ),
    st.builds(
        lambda s, w, e, m: call("xclaim", s[0], s[1], w, 0, [e], **m),
        stream,
        who,
        entry,
        st.sampled_from([{}, {"retrycount": 0, "justid": True}, {"retrycount": 3}]),
    ),
    st.builds(lambda s, e: call("xpending_range", s[0], s[1], e, e, 1), stream, entry),
    st.builds(lambda s, m: call("xpending_range", s[0], s[1], "-", "+", 99, **m), stream, st.sampled_from(IDLE)),
    st.builds(lambda s, w: call("xpending_range", s[0], s[1], "-", "+", 1, consumername=w), stream, who),
    st.builds(lambda s: call("xrange", s[0]), stream),
    st.builds(lambda s, e: call("xrange", s[0], e, e), stream, entry),
    st.builds(lambda s: call("xinfo_groups", s[0]), stream),
    st.builds(lambda s: call("xinfo_stream", s[0]), stream),
    st.builds(lambda s: call("xinfo_consumers", s[0], s[1]), stream),
    st.builds(lambda s: call("xlen", s[0]), stream),
    st.builds(lambda s, e: call("xdel", s[0], e), stream, entry),
    st.builds(lambda s, n: call("xtrim", s[0], maxlen=n, approximate=False), stream, st.integers(0, 4)),
    st.builds(lambda s, e: call("xack", s[0], s[1], e), stream, entry),
    st.builds(lambda s, w: call("xgroup_delconsumer", s[0], s[1], w), stream, who),
    st.builds(lambda s: call("xgroup_create", s[0], s[1], id="0", mkstream=True), stream),
    st.builds(lambda s, n: call("xadd", s[0], {"seq": n}), stream, seqs),
)
plain_calls = st.one_of(
    st.sampled_from(
        [
            call("hgetall", LEASE),
            call("hget", LEASE, "epoch"),
            call("hgetall", TOKENS),
            call("hgetall", META),
            call("get", ISSUED),
            call("hsetnx", TOKENS, "life", "x"),
            call("hmget", TOKENS, ["rejected", "life"]),
            call("hset", TOKENS, "commit", "c"),
            call("exists", LEASE),
            call("exists", "{s}:none"),
            call("smembers", "{s}:set"),
            call("srandmember", "{s}:set", 9),
            call("delete", ISSUED),
            call("delete", TASKS),
            call("zadd", "{s}:z", {"p": 5, "q": 3}),
            call("zrange", "{s}:z", 0, -1),
            call("zrangebyscore", "{s}:z", 4, "+inf"),
            call("set", "{s}:k", "v", px=60000),
            call("get", "{s}:k"),
            call("delete", LEASE),
            call("pttl", "{s}:none"),
        ]
    ),
    st.builds(lambda n: call("sadd", "{s}:set", n), seqs),
    st.builds(lambda n: call("srem", "{s}:set", n), seqs),
)
begin = [call("xgroup_create", s, g, id="0", mkstream=True) for s, g in ((TASKS, "rollout"), (TRAJ, "learner"))]
# from here on ids of the two streams differ, however fast the clock is
begin += [call("xadd", TRAJ, {"x": 1}, id="1900000000000-0"), call("xrange", TRAJ)]
begin += [fcall("foray_acquire", [LEASE, EPOCH], "me", 0, 60000, "0")]
begin += [
    fcall("foray_issue", [LEASE, ISSUED, TASKS], "1", "me", 0, 99, 1, b"b", 2, b"b", 3, b"b"),
    call("xrange", TASKS),
]
begin += [call("xreadgroup", "rollout", "a", {TASKS: ">"}, count=2)]

end = [call("delete", TRAJ), fcall("foray_publish", [TASKS, TRAJ, TOKENS], Entry(1), 1, b"h", b"b", 4)]
end += [fcall("foray_ack", [LEASE, TRAJ], "1", "me", Entry(0)), fcall("foray_census", [TRAJ, TOKENS])]
end += [fcall("foray_reset", [LEASE, META, TASKS, TRAJ, ISSUED], "1", "me", "lineage_id", "new"), call("get", ISSUED)]
end += [call("hgetall", META), call("xlen", TASKS), call("xinfo_groups", TRAJ), call("delete", TRAJ)]
end += [call("xreadgroup", "learner", "a", {TRAJ: ">"}, count=1), call("xinfo_stream", TRAJ)]


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(st.one_of(functions_calls, stream_calls, stream_calls, plain_calls), max_size=25))
@example([])
def test_the_model_answers_as_redis_does(real: redis.Redis, calls: list[Call]) -> None:
    compare(real, [*begin, *calls, *end])


def compare(real: redis.Redis, calls: list[Call]) -> None:
    """Both get the same calls, and every reply must be equal."""
    real.flushall()
    real.function_load(function_library(), replace=True)
    sim = SimRedis(lambda: time.time() * 1000)
    sim.function_load("")
    ours, theirs = Side(lambda n, a, m: perform(sim, n, a, m)), Side(lambda n, a, m: getattr(real, n)(*a, **m))
    log = []
    for name, args, more in calls:
        reply, truth = ours.call(name, args, more), theirs.call(name, args, more)
        log.append(f"{name}{args}{more or ''} -> {truth}")
        assert agree(reply, truth), "\n".join([*log, f"the model says {reply}"])


def spoilt(key: str) -> st.SearchStrategy[Call]:
    """Replace `key` by another type, delete it, or set an invalid or too large number."""
    return st.sampled_from(
        [call("delete", key), call("set", key, "abc"), call("set", key, "9" * 16), call("sadd", key, "x")]
    )


spoiling_calls = st.one_of(
    st.sampled_from([TASKS, TRAJ, LEASE, EPOCH, ISSUED, TOKENS]).flatmap(spoilt),
    st.sampled_from(
        [
            call("xadd", TRAJ, {"x": 1}, id=LAST_ID),
            call("xadd", TASKS, {"x": 1}, id=LAST_ID),
            call("xreadgroup", "learner", "a", {TRAJ: ">"}, count=9),
            call("hset", TOKENS, mapping={"published": 2**63 - 3, "rejected": "abc"}),
            call("hset", LEASE, "epoch", "abc"),
        ]
    ),
)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(st.one_of(functions_calls, functions_calls, stream_calls, plain_calls, spoiling_calls), max_size=25))
def test_the_model_refuses_keys_that_were_tampered_with_as_redis_does(real: redis.Redis, calls: list[Call]) -> None:
    compare(real, [*begin, *calls])


@pytest.mark.fault(25)
def test_a_full_redis_refuses_and_allows_the_same_calls(real: redis.Redis) -> None:
    real.flushall()
    real.function_load(function_library(), replace=True)
    sim = SimRedis(lambda: time.time() * 1000)
    sim.function_load("")
    ours, theirs = Side(lambda n, a, m: perform(sim, n, a, m)), Side(lambda n, a, m: getattr(real, n)(*a, **m))
    for one in begin:
        ours.call(*one), theirs.call(*one)
    tried = [
        fcall("foray_publish", [TASKS, TRAJ, TOKENS], Entry(0), 1, b"h", b"b", 4),
        fcall("foray_issue", [LEASE, ISSUED, TASKS], "1", "me", 0, 99, 9, b"b"),
        fcall("foray_reissue", [LEASE, TASKS], "1", "me", 9, b"b"),
        fcall("foray_retry", [TASKS, TOKENS], Entry(0), 1, b"b", 0),
        fcall("foray_target", [LEASE, "{s}:target"], "1", "me", b"b", "ready"),
        fcall("foray_acquire", [LEASE, EPOCH], "you", 0, 60000, "1"),
        fcall("foray_meta", [LEASE, META], "1", "me", "schema", "1.0"),
        fcall("foray_renew", [LEASE], "1", "me", 60000),
        fcall("foray_beat", [TASKS], "a", Entry(0)),
        fcall("foray_ack", [LEASE, TRAJ], "1", "me", "1-1"),
        fcall("foray_register", ["{s}:e"], "b", b"x", 60000),
        fcall("foray_report", ["{s}:m", "{s}:z"], b"x", 60000, "5", "p"),
        fcall("foray_view", [LEASE, "{s}:view"], "2", "you", b"b", 60000),
        call("function_load", function_library(), replace=True),
        call("xgroup_create", TASKS, "other", id="0"),
        call("xtrim", "{s}:none", maxlen=0, approximate=False),
        fcall("foray_census", [TRAJ, TOKENS]),
        call("xadd", TRAJ, {"x": 1}),
        call("hset", TOKENS, "commit", "c"),
        call("sadd", "{s}:set", 1),
        call("xreadgroup", "rollout", "b", {TASKS: ">"}, count=1),
        call("xack", TASKS, "rollout", Entry(0)),
        fcall("foray_release", [LEASE], "1", "me"),
    ]
    real.config_set("maxmemory", 1)
    sim.made_full = True
    try:
        replies = [(one, ours.call(*one), theirs.call(*one)) for one in tried]
    finally:
        real.config_set("maxmemory", 0)
    assert not [(one, said, truth) for one, said, truth in replies if not agree(said, truth)]
    assert sum(isinstance(truth, tuple) for _, _, truth in replies) >= 8, "some were refused"
