"""A group that crashes its readers becomes a dead letter unread; its neighbours do not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import FilterSettings, LearnerSettings
from learner.data.filter import GroupFilter
from learner.delivery.consumer import StreamConsumer
from learner.delivery.dead_letters import CrashRecord, DeadLetterStore, EventLog
from learner.delivery.entry import StreamEntry
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from protocol import events
from protocol.codec import decode_as
from protocol.header import seal
from protocol.keys import Keys
from protocol.messages import Task, TrajectoryGroup
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.messages import make_group

KEYS = Keys("t1")
POISON = 7


class Died(BaseException):
    """The process would be gone."""


@pytest.fixture
def life(store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StreamConsumer]:
    """Start a consumer with an empty delivery state that crashes while it reads the entry of seq POISON."""
    import learner.delivery.consumer

    real = learner.delivery.consumer.read_entry

    def read(id_: bytes, fields: dict[bytes, bytes], run: str) -> StreamEntry:
        if fields[b"seq"] == b"%d" % POISON:
            raise Died
        return real(id_, fields, run)

    monkeypatch.setattr(learner.delivery.consumer, "read_entry", read)

    def make() -> StreamConsumer:
        parts = {"dead_letters": DeadLetterStore(store, tmp_path / "dead.jsonl"), "event_log": EventLog(store)}
        nothing = GroupFilter(FilterSettings(), 1)
        return StreamConsumer(store, DeliveryState(issued=40), "t1", nothing, capacity=30, **parts)

    return make


def live(source: StreamConsumer, turns: int = 4) -> bool:
    """Whether it survived."""
    try:
        for _ in range(turns):
            source.tick()
    except Died:
        return False
    return True


@pytest.mark.fault(35)
def test_after_three_deaths_an_entry_is_set_aside_unread_and_only_that_one(
    life: Callable[..., StreamConsumer], db: redis.Redis, tmp_path: Path
) -> None:
    for seq in range(1, 13):
        header, body = seal(make_group(seq, run="t1"))
        db.xadd(KEYS.traj, {"seq": seq, "h": header, "b": body, "t": 16})
    assert [live(life()) for _ in range(3)] == [False, False, False]
    fourth = life()
    assert live(fourth)
    delivery = fourth._delivery
    assert (
        delivery.pending == set(range(1, 13)) - {POISON} and delivery.due == {POISON} and delivery.attempts[POISON] == 2
    )
    assert (delivery.counters.poisoned, delivery.counters.dead_letters, delivery.accounting.totals["failed"]) == (
        1,
        1,
        16,
    )
    (line,) = [json.loads(text) for text in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert (line["seq"], line["reason"]) == (POISON, "poison") and "3 times" in line["detail"] and len(line["b"]) > 100
    ((_, letter),) = db.xrange(KEYS.dlq)
    assert letter[b"reason"] == b"poison" and len(letter[b"b"]) > 100
    assert any(events.parse(f)["kind"] == "dead-letter" for _, f in db.xrange(KEYS.events))


def test_a_connection_that_breaks_again_and_again_makes_no_group_poisonous(
    life: Callable[..., StreamConsumer], db: redis.Redis, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, body = seal(make_group(1, run="t1"))
    db.xadd(KEYS.traj, {"seq": 1, "h": header, "b": body})
    store.read(5)
    source, real = life(), store.redeliver

    def broken(id_: bytes) -> Any:
        real(id_)
        raise RedisUnavailable("the reply was lost")

    monkeypatch.setattr(store, "redeliver", broken)
    for _ in range(6):
        with pytest.raises(RedisUnavailable):
            source.tick()
    assert db.xpending_range(KEYS.traj, "learner", "-", "+", 1)[0]["times_delivered"] == 7
    monkeypatch.setattr(store, "redeliver", real)
    assert live(source, 1) and source._delivery.pending == {1} and source._delivery.counters.poisoned == 0
    assert db.xpending_range(KEYS.traj, "learner", "-", "+", 1)[0]["times_delivered"] == 0, "it did no harm"


@pytest.mark.fault(35)
@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_batch_that_ends_the_learner_in_training_is_set_aside_by_the_fourth_start(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, how: str,
) -> None:  # fmt: skip
    import learner.loop

    real, parent = learner.loop.batch_for_step, os.getpid()

    def build(conditions: Any, groups: list[TrajectoryGroup], *rest: Any) -> Any:
        if POISON in [group.seq for group in groups]:
            if how == "raises" or os.getpid() == parent:
                raise MemoryError
            os.kill(os.getpid(), signal.SIGKILL)
        return real(conditions, groups, *rest)

    monkeypatch.setattr(learner.loop, "batch_for_step", build)
    with tiny_learner.Player(address, run.id):
        for _ in range(3):
            if how == "raises":
                with pytest.raises(MemoryError):
                    serve(run, settings)
            elif (child := os.fork()) == 0:
                serve(run, settings)
                os._exit(1)
            else:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert serve(run, settings) == 0
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found is not None
    dead = {seq: (outcome, reason) for seq, outcome, reason in found.facts["ledger"]["notes"]}
    assert POISON in dead and len(dead) == run.groups_per_step and set(dead.values()) == {("dead", "poison")}
    assert found.facts["tally"]["poisoned"] == run.groups_per_step and found.facts["step"] == run.steps
    letters = [json.loads(line) for line in (run.dir / "dead_letters.jsonl").read_text().splitlines()]
    assert {letter["seq"] for letter in letters} == dead.keys()
    assert all("3 times while training a batch" in letter["detail"] and letter["b"] for letter in letters)


@pytest.mark.slow
def test_an_entry_that_is_read_again_beside_a_deadly_batch_is_no_dead_letter(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The reader always has an entry of a later batch in hand when the batch kills the learner, if it is let."""
    import learner.loop

    real_build, real_redeliver, parent = learner.loop.batch_for_step, RunStore.redeliver, os.getpid()
    building = threading.Event()

    def build(conditions: Any, groups: list[TrajectoryGroup], *rest: Any) -> Any:
        if POISON in [group.seq for group in groups]:
            building.set()
            time.sleep(0.3)  # the reader redelivers one more, if it may
            os.kill(os.getpid(), signal.SIGKILL)
        return real_build(conditions, groups, *rest)

    def redeliver(store: RunStore, id_: bytes) -> tuple[int, Any]:
        deliveries, fields = real_redeliver(store, id_)
        if os.getpid() != parent and fields is not None and int(fields[b"seq"]) > 2 * run.groups_per_step:
            building.wait(0.5)
            if building.is_set():
                time.sleep(60)
        return deliveries, fields

    monkeypatch.setattr(learner.loop, "batch_for_step", build)
    monkeypatch.setattr(RunStore, "redeliver", redeliver)
    with tiny_learner.Player(address, run.id):
        for _ in range(3):
            if (child := os.fork()) == 0:
                serve(run, settings)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        monkeypatch.setattr(learner.loop, "batch_for_step", real_build)
        assert serve(run, settings) == 0
    letters = [json.loads(line) for line in (run.dir / "dead_letters.jsonl").read_text().splitlines()]
    assert len(letters) == run.groups_per_step and POISON in [letter["seq"] for letter in letters]
    assert all("3 times while training a batch" in letter["detail"] for letter in letters)


def test_a_step_that_is_trained_clears_what_earlier_crashes_said_of_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    for crashes in (1, 2):
        with pytest.raises(Died), CrashRecord(path).training([b"1-1", b"2-1"]):
            raise Died
        assert CrashRecord(path).of(b"1-1") == crashes == CrashRecord(path).of(b"2-1")
    record = CrashRecord(path)
    with record.training([b"1-1"]):
        record.prepare([b"3-1"])
    assert [CrashRecord(path).of(id_) for id_ in (b"1-1", b"2-1", b"3-1")] == [0, 2, 1], "the next batch is being built"
    with record.training([b"3-1"]):
        pass
    assert [CrashRecord(path).of(id_) for id_ in (b"1-1", b"2-1", b"3-1")] == [0, 2, 0]
    for damaged in ("", "[]", "3", '{"1-1": "x"}', '{"1-1": []}'):
        path.write_text(damaged)
        assert CrashRecord(path).of(b"1-1") == 0


@pytest.mark.slow
@pytest.mark.fault(35)
def test_a_learner_that_a_group_kills_trains_on_with_its_fourth_start(
    run: RunSettings, settings: LearnerSettings, address: dict[str, Any], tmp_path: Path
) -> None:
    def spoil(task: Task, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        if (task.seq, task.attempt) != (POISON, 1):
            return header, body
        made = decode_as(TrajectoryGroup, body)
        return seal(made.model_copy(update={"template": "poison-poison"}))

    tree = {
        "run": json.loads(run.model_dump_json()),
        "learner": {"questions": str(settings.questions), "checkpoint_every": 3, "reconcile_s": 0.3},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    program = [sys.executable, "-m", "tests.support.poisoned", "4", "--config", str(tmp_path / "c.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tiny_learner.Player(address, run.id, spoil=spoil) as player:
        done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1]) == [-11, -11, -11, 0], done.stderr
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found is not None
    facts = found.facts
    assert facts["step"] == run.steps and facts["ledger"]["counts"] == {
        "trained": 32,
        "filtered": sum(facts["ledger"]["filtered"].values()),
        "stale": 0,
        "dead": 0,
    }
    assert facts["tally"]["poisoned"] == 1 and [a for s, a in player.seen if s == POISON] == [1, 2]
    tokens = facts["tokens"]
    assert tokens["generated"] == sum(tokens["buckets"].values()) and tokens["buckets"]["failed"] == 16
    assert facts["redis"]["lost"] == 0
