"""The server-side functions, on a real server: atomic, fenced, and usable when memory is full."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
import redis

from protocol import functions as fn
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.runtime.redis.server import function_library

KEYS = Keys("t")


def call(db: redis.Redis, name: str, keys: list[str], *args: object) -> object:
    return db.fcall(name, len(keys), *keys, *args)


@pytest.fixture
def run(db: redis.Redis) -> redis.Redis:
    db.function_load(function_library(), replace=True)
    db.xgroup_create(KEYS.tasks, TASK_GROUP, "0", mkstream=True)
    db.xgroup_create(KEYS.traj, TRAJ_GROUP, "0", mkstream=True)
    return db


def acquire(db: redis.Redis, token: str, checkpoint_epoch: int = 0, takeover: int = 0) -> list[object]:
    return call(db, fn.ACQUIRE, [KEYS.lease, KEYS.epoch], token, checkpoint_epoch, 15000, takeover)


def issue(db: redis.Redis, epoch: object, token: str, floor: int, seqs: range, *, ceiling: int = 10**15) -> object:
    pairs = [x for seq in seqs for x in (seq, b"body%d" % seq)]
    return call(db, fn.ISSUE, [KEYS.lease, KEYS.issued, KEYS.tasks], epoch, token, floor, ceiling, *pairs)


def lease_task(db: redis.Redis, consumer: str, count: int = 1) -> list[tuple[bytes, dict[bytes, bytes]]]:
    reply = db.xreadgroup(TASK_GROUP, consumer, {KEYS.tasks: ">"}, count=count)
    return reply[0][1] if reply else []


def publish(db: redis.Redis, task_id: bytes, seq: int) -> bytes:
    return call(db, fn.PUBLISH, [KEYS.tasks, KEYS.traj], task_id, seq, b"h", b"b")


def test_the_epoch_is_beyond_both_redis_and_the_checkpoint(run: redis.Redis) -> None:
    assert acquire(run, "a", checkpoint_epoch=6) == [1, 7]
    assert acquire(run, "a") == [1, 8]


def test_a_held_lease_is_refused_with_its_holder_unless_taken_over(run: redis.Redis) -> None:
    assert acquire(run, "a") == [1, 1]
    held, epoch, ttl, holder = acquire(run, "b")
    assert (held, epoch, holder) == (0, 1, b"a") and 0 < ttl <= 15000
    assert acquire(run, "b", takeover=1) == [1, 2]
    assert call(run, fn.RENEW, [KEYS.lease], 1, "a", 15000) == 0
    assert call(run, fn.RENEW, [KEYS.lease], 2, "b", 15000) == 1


@pytest.mark.fault(11, 13)
def test_a_fenced_learner_can_do_nothing(run: redis.Redis) -> None:
    acquire(run, "a")
    acquire(run, "b", takeover=1)
    for name, keys, args in [
        (fn.ISSUE, [KEYS.lease, KEYS.issued, KEYS.tasks], (1, "a", 0, 9, 1, b"x")),
        (fn.REISSUE, [KEYS.lease, KEYS.tasks], (1, "a", 1, b"x")),
        (fn.ACK, [KEYS.lease, KEYS.traj], (1, "a", "1-1")),
        (fn.TARGET, [KEYS.lease, KEYS.target], (1, "a", b"x", "ready")),
        (fn.META, [KEYS.lease, KEYS.meta], (1, "a", "schema", "1.0")),
        (fn.RESET, [KEYS.lease, KEYS.meta, KEYS.tasks, KEYS.traj], (1, "a", "schema", "1.0")),
    ]:
        with pytest.raises(redis.ResponseError, match="FENCED"):
            call(run, name, keys, *args)
    assert call(run, fn.RELEASE, [KEYS.lease], 1, "a") == 0
    assert run.xlen(KEYS.tasks) == 0 and not run.exists(KEYS.target, KEYS.meta)


def test_issue_never_repeats_a_seq_and_starts_above_the_ledger(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    assert issue(run, epoch, "a", 0, range(1, 4)) == 3
    assert issue(run, epoch, "a", 0, range(1, 6)) == 5
    assert [int(e[1][b"seq"]) for e in run.xrange(KEYS.tasks)] == [1, 2, 3, 4, 5]
    run.delete(KEYS.issued)
    assert issue(run, epoch, "a", 5, range(1, 8)) == 7  # state lost: the floor is the ledger's watermark
    assert [int(e[1][b"seq"]) for e in run.xrange(KEYS.tasks)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_count_above_the_ceiling_is_not_believed_and_corrected(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    issue(run, epoch, "a", 0, range(1, 4))
    run.set(KEYS.issued, 5_000_000)
    assert issue(run, epoch, "a", 0, range(4, 6), ceiling=12) == 5 == int(run.get(KEYS.issued))
    assert [int(e[1][b"seq"]) for e in run.xrange(KEYS.tasks)] == [1, 2, 3, 4, 5]


def test_a_lease_of_another_lineage_is_refused_and_changes_nothing(run: redis.Redis) -> None:
    keys = [KEYS.lease, KEYS.epoch, KEYS.meta]
    assert call(run, fn.ACQUIRE, keys, "a", 0, 15000, 0, "one") == [1, 1]
    assert run.hgetall(KEYS.meta) == {b"lineage_id": b"one"}, "claimed with the first lease"
    call(run, fn.RELEASE, [KEYS.lease], 1, "a")
    assert call(run, fn.ACQUIRE, keys, "b", 0, 15000, 0, "two") == [2, b"one"]
    assert not run.exists(KEYS.lease) and run.get(KEYS.epoch) == b"1"
    assert call(run, fn.ACQUIRE, keys, "b", 0, 15000, 1, "two") == [1, 2]
    assert run.hgetall(KEYS.meta) == {b"lineage_id": b"one"}, "until the reset"


def test_the_lease_of_a_holder_that_has_ended_is_taken_over_only_from_that_one(run: redis.Redis) -> None:
    keys = [KEYS.lease, KEYS.epoch, KEYS.meta]
    assert call(run, fn.ACQUIRE, keys, "a", 0, 15000, 0, "one") == [1, 1]
    assert call(run, fn.ACQUIRE, keys, "b", 0, 15000, 0, "one", "x") == [0, 1, ANY, b"a"]
    assert call(run, fn.ACQUIRE, keys, "b", 0, 15000, 0, "two", "a") == [2, b"one"], "the lineage is compared first"
    assert call(run, fn.ACQUIRE, keys, "b", 0, 15000, 0, "", "a") == [1, 2], "a learner without a lineage"
    assert call(run, fn.ACQUIRE, keys, "c", 0, 15000, 0, "one", "a") == [0, 2, ANY, b"b"]
    assert run.hgetall(KEYS.meta) == {b"lineage_id": b"one"}


def test_a_reset_leaves_an_empty_run_of_the_new_lineage(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    issue(run, epoch, "a", 0, range(1, 4))
    [(task_id, _)] = lease_task(run, "r1")
    publish(run, task_id, 1)
    lease_task(run, "r1")
    run.sadd(KEYS.requeue, 9)
    work = [KEYS.tasks, KEYS.traj, KEYS.issued, KEYS.requeue]
    pairs = ("lineage_id", "two", "schema", "1.3")
    assert call(run, fn.RESET, [KEYS.lease, KEYS.meta, *work], epoch, "a", *pairs) == 1
    assert not run.exists(KEYS.issued, KEYS.requeue)
    assert [run.xlen(key) for key in work[:2]] == [0, 0]
    assert run.xpending(KEYS.tasks, TASK_GROUP)["pending"] == run.xpending(KEYS.traj, TRAJ_GROUP)["pending"] == 0
    assert run.hgetall(KEYS.meta) == {b"lineage_id": b"two", b"schema": b"1.3"}
    assert publish(run, task_id, 1) == b"DUP", "what was leased before cannot be published"
    assert call(run, fn.RENEW, [KEYS.lease], epoch, "a", 15000) == 1, "the lease stays"


@pytest.mark.fault(32)
def test_publishing_twice_gives_one_entry(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    issue(run, epoch, "a", 0, range(1, 2))
    [(task_id, _)] = lease_task(run, "r1")
    assert publish(run, task_id, 1) != b"DUP"
    assert publish(run, task_id, 1) == b"DUP"
    assert run.xlen(KEYS.traj) == 1


@pytest.mark.fault(3, 32)
def test_a_zombie_whose_task_was_reclaimed_and_published_gets_dup(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    issue(run, epoch, "a", 0, range(1, 2))
    [(task_id, _)] = lease_task(run, "r1")
    run.xautoclaim(KEYS.tasks, TASK_GROUP, "r2", 0)
    assert publish(run, task_id, 1) != b"DUP"  # by whichever of the two is first
    assert publish(run, task_id, 1) == b"DUP"


def test_beat_renews_only_what_is_still_mine(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    issue(run, epoch, "a", 0, range(1, 3))
    ids = [entry[0] for entry in lease_task(run, "r1", 2)]
    run.xclaim(KEYS.tasks, TASK_GROUP, "r2", 0, [ids[1]])
    assert call(run, fn.BEAT, [KEYS.tasks], "r1", *ids) == [ids[0]]
    pending = run.xpending_range(KEYS.tasks, TASK_GROUP, "-", "+", 10)
    assert {p["message_id"]: p["consumer"] for p in pending} == {ids[0]: b"r1", ids[1]: b"r2"}


def test_retry_replaces_the_failed_attempt_once(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    issue(run, epoch, "a", 0, range(1, 2))
    [(task_id, _)] = lease_task(run, "r1")
    assert call(run, fn.RETRY, [KEYS.tasks], task_id, 1, b"second") != b"DUP"
    assert call(run, fn.RETRY, [KEYS.tasks], task_id, 1, b"second") == b"DUP"
    assert [e[1][b"b"] for e in lease_task(run, "r1", 9)] == [b"second"]


@pytest.mark.fault(3)
def test_only_the_owner_of_a_lease_settles_its_task_and_an_older_server_names_none(run: redis.Redis) -> None:
    lost, old = leased(run, 2)
    run.xclaim(KEYS.tasks, TASK_GROUP, "r2", 0, [lost, old])
    failed, retried = [KEYS.tasks, KEYS.traj, KEYS.tokens], [KEYS.tasks, KEYS.tokens]
    assert call(run, fn.PUBLISH, failed, lost, 1, b"h", b"failed", 7, "r") == b"DUP"
    assert call(run, fn.RETRY, retried, lost, 1, b"again", 7, "r") == b"DUP"
    assert run.xlen(KEYS.traj) == 0 and run.xlen(KEYS.tasks) == 2 and not run.exists(KEYS.tokens)
    assert call(run, fn.BEAT, [KEYS.tasks], "r2", lost, old) == [lost, old], "the owner works on"
    assert call(run, fn.PUBLISH, failed, lost, 1, b"h", b"group", 7) != b"DUP", "a finished group is welcome"
    assert call(run, fn.PUBLISH, failed, lost, 1, b"h", b"failed", 7, "r2") == b"DUP"
    assert call(run, fn.RETRY, retried, old, 2, b"again", 7) != b"DUP", "as from an older rollout server"
    ((again, _),) = lease_task(run, "r2")
    assert call(run, fn.RETRY, retried, again, 2, b"third", 7, "r2") != b"DUP"
    ((third, _),) = lease_task(run, "r2")
    assert call(run, fn.PUBLISH, failed, third, 2, b"h", b"failed", 7, "r2") != b"DUP"


def test_trimming_removes_only_what_is_acknowledged(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    issue(run, epoch, "a", 0, range(1, 5))
    for task_id, fields in lease_task(run, "r1", 4):
        publish(run, task_id, int(fields[b"seq"]))
    read = run.xreadgroup(TRAJ_GROUP, "l", {KEYS.traj: ">"}, count=3)[0][1]
    ids = [entry[0] for entry in read]
    assert call(run, fn.ACK, [KEYS.lease, KEYS.traj], epoch, "a", ids[1]) == 1
    assert [int(e[1][b"seq"]) for e in run.xrange(KEYS.traj)] == [1, 3, 4]  # at once, though the first is pending
    assert call(run, fn.ACK, [KEYS.lease, KEYS.traj], epoch, "a", ids[0], ids[2]) == 2
    assert [int(e[1][b"seq"]) for e in run.xrange(KEYS.traj)] == [4]  # unread stays
    assert run.xinfo_groups(KEYS.traj)[0]["lag"] in (1, None)


def test_lost_streams_are_an_error_and_the_task_stays_leased(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    issue(run, epoch, "a", 0, range(1, 2))
    [(task_id, _)] = lease_task(run, "r1")
    run.delete(KEYS.traj)
    with pytest.raises(redis.ResponseError, match="NOSTREAM"):
        publish(run, task_id, 1)
    assert run.xpending(KEYS.tasks, TASK_GROUP)["pending"] == 1
    run.delete(KEYS.tasks)
    with pytest.raises(redis.ResponseError, match="NOSTREAM"):
        issue(run, epoch, "a", 0, range(2, 3))


def test_a_full_redis_refuses_to_publish_but_lets_leases_live(run: redis.Redis) -> None:
    _, epoch = acquire(run, "a")
    issue(run, epoch, "a", 0, range(1, 2))
    [(task_id, _)] = lease_task(run, "r1")
    run.config_set("maxmemory-policy", "noeviction")
    run.config_set("maxmemory", 1)
    with pytest.raises(redis.ResponseError, match=r"OOM|memory"):
        publish(run, task_id, 1)
    assert call(run, fn.RENEW, [KEYS.lease], epoch, "a", 15000) == 1
    assert call(run, fn.BEAT, [KEYS.tasks], "r1", task_id) == [task_id]
    assert call(run, fn.ACK, [KEYS.lease, KEYS.traj], epoch, "a", "1-1") == 0
    run.config_set("maxmemory", 0)
    assert publish(run, task_id, 1) != b"DUP"


def test_a_census_says_where_every_entry_is_in_one_moment_and_reads_a_full_redis(run: redis.Redis) -> None:
    acquire(run, "a")
    issue(run, 1, "a", 0, range(1, 41))
    for task_id, fields in lease_task(run, "r", 40):
        keys = [KEYS.tasks, KEYS.traj, KEYS.tokens]
        call(run, fn.PUBLISH, keys, task_id, fields[b"seq"], b"h", b"b", 10 + int(fields[b"seq"]))
    ids = [id_ for id_, _ in run.xrange(KEYS.traj)]
    run.xreadgroup(TRAJ_GROUP, "L1", {KEYS.traj: ">"}, count=3)
    call(run, fn.ACK, [KEYS.lease, KEYS.traj], 1, "a", ids[1])
    run.xadd(KEYS.traj, {"no": "tokens"})
    run.config_set("maxmemory", "1mb")
    counts, last, delivered = call(run, fn.CENSUS, [KEYS.traj, KEYS.tokens])
    assert counts == [b"published", b"%d" % sum(range(11, 51))] and delivered == ids[2]
    assert last == run.xinfo_stream(KEYS.traj)["last-generated-id"] != ids[-1]
    unread = call(run, fn.UNREAD, [KEYS.traj], delivered, last)
    assert unread[1::2] == [b"%d" % n for n in range(14, 51)] + [b"0"] and unread[0] == ids[3]
    assert call(run, fn.UNREAD, [KEYS.traj], ids[3], ids[5]) == [ids[4], b"15", ids[5], b"16"]
    assert call(run, fn.UNREAD, [KEYS.traj], last, last) == []
    assert call(run, fn.TOKENS_OF, [KEYS.traj], ids[2], b"99-99", ids[0]) == [b"13", b"0", b"11"]
    run.config_set("maxmemory", 0)
    run.delete(KEYS.traj)
    for name, keys, args in [(fn.CENSUS, [KEYS.traj, KEYS.tokens], ()), (fn.UNREAD, [KEYS.traj], ("0-0", last))]:
        with pytest.raises(redis.ResponseError, match="NOSTREAM"):
            call(run, name, keys, *args)


@pytest.mark.parametrize("entries", [12, 96])
def test_a_call_reads_a_page_of_unread_entries_however_many_wait(run: redis.Redis, entries: int) -> None:
    ids = [run.xadd(KEYS.traj, {"b": b"x" * (256 << 10), "t": n}) for n in range(entries)]

    def page(name: str, *args: object) -> list[bytes]:
        run.config_resetstat()
        reply = call(run, name, [KEYS.traj], *args)
        read = int(run.info("commandstats")["cmdstat_xrange"]["calls"])
        assert read == 4, "one entry each, 256 KiB: a mebibyte"
        return reply

    found: list[bytes] = []
    while len(found) < 2 * entries:
        found += page(fn.UNREAD, found[-2] if found else "0-0", ids[-1])
    assert found[::2] == ids and found[1::2] == [b"%d" % n for n in range(entries)]
    found = []
    while len(found) < entries:
        found += page(fn.TOKENS_OF, *ids[len(found) :])
    assert found == [b"%d" % n for n in range(entries)]


MOST = 2**63 - 1
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"


def leased(db: redis.Redis, count: int = 1) -> list[bytes]:
    """Ids of `count` tasks that are issued and leased."""
    _, epoch = acquire(db, "a")
    issue(db, epoch, "a", 0, range(1, count + 1))
    return [id_ for id_, _ in lease_task(db, "r", count)]


@pytest.mark.parametrize("tokens", ["at its end", "no number", "of another type"])
def test_a_statistic_that_cannot_be_written_stops_no_delivery(run: redis.Redis, tokens: str) -> None:
    first, second = leased(run, 2)
    if tokens == "of another type":
        run.set(KEYS.tokens, "x")
    else:
        values = MOST if tokens == "at its end" else "abc"
        run.hset(KEYS.tokens, mapping={"published": values, "rejected": values})
    assert call(run, fn.PUBLISH, [KEYS.tasks, KEYS.traj, KEYS.tokens], first, 1, b"h", b"b", 5) != b"DUP"
    assert call(run, fn.RETRY, [KEYS.tasks, KEYS.tokens], second, 2, b"again", 5) != b"DUP"
    assert [fields[b"t"] for _, fields in run.xrange(KEYS.traj)] == [b"5"]
    assert [fields[b"b"] for _, fields in lease_task(run, "r", 9)] == [b"again"]


def full_to_the_last_id(db: redis.Redis, stream: str) -> None:
    db.xadd(stream, {"x": "y"}, id=LAST_ID)


def of_another_type(db: redis.Redis, stream: str) -> None:
    db.set(stream, "x")


@pytest.mark.parametrize("spoil", [full_to_the_last_id, of_another_type])
def test_what_cannot_be_delivered_is_refused_before_the_task_is_acknowledged(run: redis.Redis, spoil: Any) -> None:
    (task,) = leased(run)
    spoil(run, KEYS.traj)
    for _ in range(2):  # trying again changes nothing
        with pytest.raises(redis.ResponseError, match=f"^BADKEY {KEYS.traj}: "):
            publish(run, task, 1)
        assert run.xpending(KEYS.tasks, TASK_GROUP)["pending"] == 1
    run.delete(KEYS.traj)
    run.xgroup_create(KEYS.traj, TRAJ_GROUP, "0", mkstream=True)
    assert publish(run, task, 1) != b"DUP"
    assert publish(run, task, 1) == b"DUP"


def test_an_attempt_that_cannot_be_replaced_stays_leased(run: redis.Redis) -> None:
    (task,) = leased(run)
    full_to_the_last_id(run, KEYS.tasks)
    with pytest.raises(redis.ResponseError, match=f"^BADKEY {KEYS.tasks}: .*exhausted"):
        call(run, fn.RETRY, [KEYS.tasks, KEYS.tokens], task, 1, b"again", 5)
    assert run.xpending(KEYS.tasks, TASK_GROUP)["pending"] == 1 and not run.exists(KEYS.tokens)
    assert publish(run, task, 1) != b"DUP"  # what is leased can be finished all the same


def test_errors_name_the_key_that_is_of_another_type_or_holds_no_number(run: redis.Redis) -> None:
    (task,) = leased(run)
    for key in (KEYS.lease, KEYS.epoch, KEYS.issued, KEYS.tasks, KEYS.traj, KEYS.tokens):
        kept = run.dump(key)
        run.delete(key)
        run.rpush(key, "of another type")
        issuing = [KEYS.lease, KEYS.issued, KEYS.tasks]
        for name, keys, args in [
            (fn.ACQUIRE, [KEYS.lease, KEYS.epoch], ("a", 0, 15000, 0)),
            (fn.RENEW, [KEYS.lease], (1, "a", 15000)),
            (fn.ISSUE, issuing, (1, "a", 0, 99, 9, b"x")),
            (fn.REISSUE, [KEYS.lease, KEYS.tasks], (1, "a", 9, b"x")),
            (fn.BEAT, [KEYS.tasks], ("r", task)),
            (fn.PUBLISH, [KEYS.tasks, KEYS.traj], (task, 1, b"h", b"b")),
            (fn.RETRY, [KEYS.tasks], (task, 1, b"b")),
            (fn.ACK, [KEYS.lease, KEYS.traj], (1, "a", "1-1")),
            (fn.CENSUS, [KEYS.traj, KEYS.tokens], ()),
            (fn.UNREAD, [KEYS.traj], ("0-0", "1-1")),
            (fn.TOKENS_OF, [KEYS.traj], ("1-1",)),
        ]:
            if key in keys:
                with pytest.raises(redis.ResponseError, match=f"^BADKEY {key}: WRONGTYPE"):
                    call(run, name, keys, *args)
        run.delete(key)
        if kept is not None:
            run.restore(key, 0, kept)
    for garbage in ("abc", "-1", "1e3", "9" * 16):
        run.mset({KEYS.issued: garbage, KEYS.epoch: garbage})
        with pytest.raises(redis.ResponseError, match=f"^BADKEY {KEYS.issued}: it holds no count"):
            issue(run, 1, "a", 0, range(1, 3))
        with pytest.raises(redis.ResponseError, match=f"^BADKEY {KEYS.epoch}: it holds no count"):
            acquire(run, "a")


def test_ids_far_beyond_the_clock_are_trimmed_without_loss(run: redis.Redis) -> None:
    acquire(run, "a")
    ahead = 2**64 - 2
    for number in (2**60, 2**60 + 1, 2**60 + 2):
        run.xadd(KEYS.traj, {"n": number}, id=f"{ahead}-{number}")
    [(_, [(first, _)])] = run.xreadgroup(TRAJ_GROUP, "l", {KEYS.traj: ">"}, count=1)
    assert call(run, fn.ACK, [KEYS.lease, KEYS.traj], 1, "a", first) == 1
    [(_, unread)] = run.xreadgroup(TRAJ_GROUP, "l", {KEYS.traj: ">"})
    assert [fields[b"n"] for _, fields in unread] == [b"%d" % (2**60 + 1), b"%d" % (2**60 + 2)]
    full_to_the_last_id(run, KEYS.traj)
    [(_, [(last, _)])] = run.xreadgroup(TRAJ_GROUP, "l", {KEYS.traj: ">"})
    ids = [id_ for id_, _ in unread]
    assert call(run, fn.CENSUS, [KEYS.traj, KEYS.tokens])[1:] == [LAST_ID.encode(), last]
    assert call(run, fn.UNREAD, [KEYS.traj], last, LAST_ID) == []
    assert call(run, fn.UNREAD, [KEYS.traj], ids[-1], LAST_ID) == [last, b"0"]
    assert call(run, fn.ACK, [KEYS.lease, KEYS.traj], 1, "a", *ids, last) == 3
