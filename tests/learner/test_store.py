"""The learner's calls to a real Redis, one by one: how much is in one call, what is counted, and when it expires."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from learner.delivery.lease import LearnerLease
from learner.delivery.store import CHUNK, LeaseHolder, RunStore
from protocol.codec import encode
from protocol.errors import Fenced, StateLost, UserError
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, WeightUpdate, WeightView
from protocol.settings import RunSettings
from tests.support.waiting import wait_until

KEYS = Keys("t1")


@pytest.fixture
def rival(run: RunSettings) -> Iterator[RunStore]:
    """The store of another learner."""
    made = RunStore(run.redis_url, run.id)
    yield made
    made.close()


def calls(db: redis.Redis) -> int:
    """Function calls since the last time."""
    found = db.info("commandstats").get("cmdstat_fcall", {"calls": 0})["calls"]
    db.config_resetstat()
    return int(found)


HALF = 1 << 15


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([], 0),
        ([10 * HALF], 1),
        ([HALF, HALF], 1),
        ([HALF, HALF + 1], 2),
        ([HALF, HALF, 1, HALF, HALF - 1], 2),
        ([1] * CHUNK, 1),
        ([1] * (CHUNK + 1), 2),
        ([1] * (2 * CHUNK + 1), 3),
    ],
)
@pytest.mark.parametrize("name", ["issue", "reissue"])
def test_a_call_adds_at_most_so_many_tasks_and_bytes(
    store: RunStore, db: redis.Redis, name: str, sizes: list[int], wanted: int
) -> None:
    """Redis refuses a request that its memory limit has no room for."""
    pairs = [(seq, b"x" * size) for seq, size in enumerate(sizes, 1)]
    calls(db)
    if name == "issue":
        assert store.issue(0, pairs) == len(sizes)
    else:
        store.reissue(pairs)
    assert calls(db) == wanted
    assert [(int(f[b"seq"]), len(f[b"b"])) for _, f in db.xrange(KEYS.tasks)] == list(enumerate(sizes, 1))


def delivered(store: RunStore, db: redis.Redis, count: int) -> list[bytes]:
    """Entries that this learner has read and not acknowledged."""
    with db.pipeline() as pipe:
        for number in range(count):
            pipe.xadd(KEYS.traj, {"seq": number})
        pipe.execute()
    return [id_ for id_, _ in store.read(count)]


def test_acknowledging_counts_what_was_pending_over_several_calls(store: RunStore, db: redis.Redis) -> None:
    ids = delivered(store, db, 2 * CHUNK + 1)
    calls(db)
    assert store.ack(ids[:CHUNK]) == CHUNK and calls(db) == 1
    assert store.ack(ids) == CHUNK + 1 and calls(db) == 3
    assert store.ack(ids) == 0 and db.xlen(KEYS.traj) == 0


def test_a_successor_claims_every_pending_entry_in_order(store: RunStore, db: redis.Redis, rival: RunStore) -> None:
    ids = delivered(store, db, 1100)
    assert store.claim() == ids
    assert rival.acquire("heir", 0, 60_000, takeover=True) == 2
    rival.set_owner(2, "heir")
    assert store.snapshot().foreign_consumers is False and rival.snapshot().foreign_consumers is True
    assert rival.claim() == ids
    assert store.snapshot().foreign_consumers is True and rival.snapshot().foreign_consumers is False


def test_deliveries_are_counted_until_an_entry_is_read_successfully(store: RunStore, db: redis.Redis) -> None:
    first, second = delivered(store, db, 2)
    assert store.redeliver(first) == (2, {b"seq": b"0"})
    assert store.redeliver(first) == (3, {b"seq": b"0"})
    store.reset_deliveries(first)
    assert store.redeliver(first)[0] == 1
    store.ack([second])
    assert store.redeliver(second) == (1, None), "it does not exist any more"


def test_the_holder_is_named_with_the_age_of_its_lease(store: RunStore, db: redis.Redis, rival: RunStore) -> None:
    db.pexpire(KEYS.lease, 40_000)
    holder = rival.acquire("you", 0, 60_000, takeover=False)
    assert isinstance(holder, LeaseHolder) and (holder.epoch, holder.token) == (1, "me")
    assert 30 < holder.ttl_s <= 40 and holder.renewed_s is not None and 20 <= holder.renewed_s < 30
    assert abs(holder.since - store.now()) < 60
    assert store.renew(90_000) and 80 < store.holder().ttl_s <= 90
    assert store.holder().renewed_s == 0.0, "a longer lease than at first was not renewed in the future"
    db.hdel(KEYS.lease, "ttl", "since")
    older = store.holder()
    assert (older.renewed_s, older.since) == (None, 0.0), "of a Foray that does not say"
    rival.set_owner(1, "you")
    assert not rival.renew(1)
    rival.release()
    assert store.holder() is not None, "it frees only its own"
    store.release()
    assert store.holder() is None and not store.renew(1000)


def test_only_the_lease_of_a_holder_that_has_ended_is_taken_over(store: RunStore, db: redis.Redis) -> None:
    for ended in ("", "another"):
        assert isinstance(store.acquire("you", 0, 60_000, takeover=False, ended=ended), LeaseHolder)
    assert store.acquire("you", 5, 60_000, takeover=False, ended="me") == 6
    assert store.acquire("him", 0, 60_000, takeover=False, ended="you", lineage_id="1" * 32) == 7
    assert store.meta()[b"lineage_id"] == b"1" * 32
    assert store.acquire("her", 0, 60_000, takeover=False, ended="him", lineage_id="2" * 32) is None


def test_the_redis_of_another_run_is_refused_by_its_lineage(store: RunStore, db: redis.Redis, run: RunSettings) -> None:
    db.hset(KEYS.meta, "lineage_id", "1" * 32)
    store.release()
    for lineage_id in ("1" * 32, ""):
        assert isinstance(store.acquire("me", 0, 1000, takeover=False, lineage_id=lineage_id), int)
    assert store.acquire("me", 0, 1000, takeover=False, lineage_id="2" * 32) is None
    lease = LearnerLease(store, 5.0, run.dir / "epochs", "2" * 32)
    with pytest.raises(UserError, match=r"already holds another run named 't1' \(lineage 11111111"):
        lease.acquire(0)
    assert lease.acquire(0, takeover=True) == 4
    with pytest.raises(Fenced):
        store.set_owner(3, "me")
        store.write_meta({"a": "b"})
    store.set_owner(4, lease.token)
    store.write_meta({"a": "b"})
    assert store.meta() == {b"a": b"b"} and store.epoch == 4


def snapshot_of(id_: str) -> MetricsSnapshot:
    return MetricsSnapshot(process="rollout", id=id_, text={"url": f"http://{id_}"} if id_ else {})


def test_what_processes_report_is_found_until_it_expires(store: RunStore, db: redis.Redis) -> None:
    assert store.rollout_urls() == []
    for name in ("b", "c", "a"):
        store.report(snapshot_of(name))
    store.report(MetricsSnapshot(process="learner", id="0", text={"url": "http://learner"}))
    assert store.rollout_urls() == ["http://a", "http://b", "http://c"]
    assert 5000 < db.pttl(KEYS.metrics("rollout", "a")) <= 10_000
    assert 5 < db.zscore(KEYS.processes, "rollout:a") - store.now() <= 10
    db.delete(KEYS.metrics("rollout", "c"))
    db.set(KEYS.metrics("rollout", "b"), b"of another Foray")
    assert store.rollout_urls() == ["http://a"]


def test_registrations_that_cannot_be_read_are_passed_over(store: RunStore, db: redis.Redis) -> None:
    info = EngineInfo(id="e1", url="u", state=NodeState.READY, incarnation="i", epoch=1, step=0)
    for name, body in (("e1", encode(info)), ("e2", b"of another Foray"), ("e3", None)):
        db.zadd(KEYS.engines, {name: store.now() + 60})
        if body is not None:
            db.hset(KEYS.engine(name), "b", body)
    assert store.engines() == [info]


def test_announcements_expire_when_they_are_to(store: RunStore, db: redis.Redis) -> None:
    update = WeightUpdate(run="t1", epoch=1, step=2, digest="d", path="/v1.2")
    assert store.announced() is None
    store.target(update, "ready")
    assert store.announced() == update.version and db.hget(KEYS.target, "state") == b"ready"
    store.validate(update, 2.5)
    assert 1500 < db.pttl(KEYS.validated) <= 2500
    view: dict[str, Any] = {"run": "t1", "epoch": 1, "step": 2, "number": 1, "phase": "prepare", "members": ("e1/i",)}
    view |= {"rank_offsets": (1,), "group": "g", "address": "h", "port": 1, "world_size": 2, "buckets": ()}
    store.view(WeightView(**view), 2.5)
    assert 1500 < db.pttl(KEYS.view) <= 2500


def test_a_task_is_where_it_is_until_it_is_acknowledged(store: RunStore, db: redis.Redis) -> None:
    store.issue(0, [(seq, b"task") for seq in (1, 2, 3, 4)])
    (_, entries), *_ = db.xreadgroup(TASK_GROUP, "r", {KEYS.tasks: ">"}, count=2)
    assert store.snapshot().tasks == {1, 2, 3, 4}
    db.xack(KEYS.tasks, TASK_GROUP, entries[0][0])
    db.xadd(KEYS.tasks, {"x": "of another program"})
    found = store.snapshot()
    assert (found.tasks, found.unread, found.foreign_consumers) == ({2, 3, 4}, False, False)
    db.xadd(KEYS.traj, {"seq": 1})
    assert store.snapshot().unread
    db.xreadgroup(TRAJ_GROUP, store.consumer, {KEYS.traj: ">"})
    assert not store.snapshot().unread
    assert abs(store.snapshot().ahead_s) < 60
    db.xadd(KEYS.traj, {"seq": 2}, id=f"{int(store.now() * 1000) + 500_000}-0")
    assert 400 < store.snapshot().ahead_s <= 501


def test_connections_end_with_the_store_and_when_redis_is_silent(run: RunSettings, db: redis.Redis) -> None:
    before = db.info("clients")["connected_clients"]
    made = RunStore(run.redis_url, run.id)
    made.prepare()
    assert made.read(1) == []
    assert db.info("clients")["connected_clients"] == before + 2
    for client in (made._db, made._reader):
        assert 1 < client.connection_pool.connection_kwargs["socket_timeout"] < 60
    made.close()
    wait_until(lambda: db.info("clients")["connected_clients"] == before, "both connections are closed")


@pytest.mark.parametrize(
    ("denied", "policy"), [((), "noeviction"), (("info",), "noeviction"), (("info", "config|get"), "")]
)
def test_the_eviction_policy_is_asked_for_as_far_as_the_account_may(
    run: RunSettings, db: redis.Redis, redis_socket: str, denied: tuple[str, ...], policy: str
) -> None:
    rules = " ".join(f"-{name}" for name in denied)
    db.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", *rules.split())
    made = RunStore(f"unix://limited:secret@{redis_socket}", run.id)
    assert made.eviction_policy() == policy
    made.close()
    db.execute_command("ACL", "DELUSER", "limited")


def test_time_is_that_of_redis(store: RunStore, db: redis.Redis) -> None:
    before, now, after = db.time(), store.now(), db.time()
    assert before[0] + before[1] / 1e6 <= now <= after[0] + after[1] / 1e6


def test_a_consumer_group_that_is_gone_is_lost_state(store: RunStore, db: redis.Redis) -> None:
    assert not store.snapshot().tasks
    for stream, group in ((KEYS.tasks, TASK_GROUP), (KEYS.traj, TRAJ_GROUP)):
        db.xgroup_create(stream, "another")
        db.xgroup_destroy(stream, group)
        with pytest.raises(StateLost):
            store.snapshot()
        db.xgroup_create(stream, group)
