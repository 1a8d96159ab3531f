"""A full Redis pauses a run and never locks it: what frees memory gets through, and a starving learner checkpoints."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import learner.loop
import learner.main
from learner import cli
from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import FilterSettings, LearnerSettings
from learner.delivery.store import RunStore
from protocol.header import seal
from protocol.keys import TRAJ_GROUP, Keys
from protocol.messages import Task
from protocol.runtime.redis.errors import RedisFull, translate_errors
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.messages import make_group
from tests.support.wire import Wire

KEYS = Keys("t1")
Serve = Callable[..., int]
PATIENCE_S = 30.0
"""A run that is locked is freed after so long, and the test says so."""


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner.loop, "STARVING_S", 0.3)
    monkeypatch.setattr(learner.main, "REDIS_PATIENCE_S", 2.0)


@pytest.fixture
def settings(tmp_path: Path) -> LearnerSettings:
    """Questions, and so tasks and groups, of 100 KB: much beside what Redis itself uses for a moment. No checkpoint but
    the last, unless something asks for one.
    """
    path = tmp_path / "long.jsonl"
    lines = ({"id": f"q{i}", "question": f"{i} {'x' * 100_000}", "answers": [str(i)]} for i in range(7))
    path.write_text("\n".join(map(json.dumps, lines)))
    return LearnerSettings(questions=path, checkpoint_every=50, lease_s=3, reconcile_s=0.3)


class Limit:
    """Redis' maxmemory, and a rescue that comes when a run does not get on with it."""

    def __init__(self, db: redis.Redis) -> None:
        self._db = db
        self._timer: threading.Timer | None = None
        self.rescued = False

    def leave(self, room: int, run: RunSettings | None = None) -> None:
        """Limit memory to this many bytes above the current use. run: after its functions and streams exist."""
        if run is not None:
            store = RunStore(run.redis_url, run.id)
            store.prepare()
            store.close()
        self._db.config_resetstat()
        self._db.config_set("maxmemory", int(self._db.info("memory")["used_memory"]) + room)
        self._timer = threading.Timer(PATIENCE_S, self._rescue)
        self._timer.start()

    def _rescue(self) -> None:
        self.rescued = True
        self._db.config_set("maxmemory", 0)

    def refused(self) -> int:
        return int(self._db.info("errorstats").get("errorstat_OOM", {}).get("count", 0))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@pytest.fixture
def limit(db: redis.Redis) -> Iterator[Limit]:
    made = Limit(db)
    yield made
    made.close()


def committed(run: RunSettings) -> dict[str, Any]:
    """The manifest in force; {} where there is none."""
    found = Checkpoints(run.checkpoint_dir, 2).load()
    return found.facts if found is not None else {}


def assert_whole(run: RunSettings) -> None:
    seqs = [seq for batch in tiny_learner.surviving(run.dir).values() for seq in batch]
    assert len(seqs) == len(set(seqs)) == run.steps * run.groups_per_step


@pytest.mark.fault(25)
def test_a_redis_that_is_full_of_trained_groups_makes_the_starving_learner_checkpoint(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], limit: Limit,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fill(updates: int) -> None:
        if updates == 4:
            limit.leave(-1)

    with tiny_learner.Player(address, run.id):
        assert serve(run, settings, before=fill) == 0
    assert not limit.rescued, "nothing moved any more, though four of five groups in Redis were trained"
    assert limit.refused() > 0 and "Redis is full and no batch arrives: writing a checkpoint" in caplog.text
    assert_whole(run)
    assert committed(run)["lineage"] == [[1, 0]], "the lease was renewed all the time"


@pytest.mark.slow
@pytest.mark.fault(25)
def test_groups_that_are_filtered_before_the_first_step_do_not_fill_redis_for_good(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], limit: Limit
) -> None:
    """Two checkpoints of one step: what was decided between them is worth one."""
    boring = 50

    class Player(tiny_learner.Player):  # type: ignore[misc,name-defined]
        def _roll_out(self, task: Task) -> tuple[bytes, bytes]:
            if task.seq > boring:
                return super()._roll_out(task)  # type: ignore[no-any-return]
            group = make_group(task.seq, (1.0,) * 4, run=run.id).model_copy(update={"question": task.question})
            self._tokens = sum(t.num_sampled for t in group.trajectories)
            return seal(group)

    limit.leave(3_000_000, run)
    run = run.model_copy(update={"steps": 3})
    settings = settings.model_copy(update={"filter": FilterSettings(metric="reward")})
    with Player(address, run.id):
        assert serve(run, settings) == 0
    assert not limit.rescued and limit.refused() > 0
    made = committed(run)
    assert made["ledger"]["counts"]["filtered"] >= 32 and made["ledger"]["counts"]["trained"] == 12
    assert_whole(run)


@pytest.mark.slow
@pytest.mark.fault(25)
def test_evidence_in_redis_gives_way_to_groups(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis, limit: Limit,
) -> None:  # fmt: skip
    for number in range(60):
        db.xadd(KEYS.dlq, {"id": number, "b": b"x" * 100_000})
    limit.leave(100_000, run)  # less than a batch
    with tiny_learner.Player(address, run.id):
        assert serve(run, settings) == 0
    assert not limit.rescued and limit.refused() > 0
    left = [int(fields[b"id"]) for _, fields in db.xrange(KEYS.dlq)]
    assert len(left) < 60 and left == list(range(60 - len(left), 60)), "the oldest go first"
    assert_whole(run)


@pytest.mark.fault(10, 25)
def test_sigterm_in_a_full_redis_keeps_every_step_that_was_done(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis, limit: Limit, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(learner.loop, "STARVING_S", 1000.0)

    def fill(updates: int) -> None:
        if updates == 4:
            limit.leave(-400_000)
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    with tiny_learner.Player(address, run.id):
        assert serve(run, settings, before=fill) == 143
    made, last = committed(run), tiny_learner.step_lines(run.dir)[-1]["step"]
    assert made and made["step"] == last >= 5 and made["ledger"]["counts"]["trained"] == 4 * last, "steps were lost"
    assert limit.refused() > 0 and not limit.rescued and not db.exists(KEYS.lease)
    pending = {id_["message_id"] for id_ in db.xpending_range(KEYS.traj, TRAJ_GROUP, "-", "+", 1000)}
    assert not pending & {id_.encode() for id_ in made["entries"]}, "what the checkpoint decided is acknowledged"


@pytest.mark.slow
@pytest.mark.fault(10, 14)
def test_sigterm_while_a_step_waits_for_a_redis_that_is_away_keeps_the_step(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    redis_socket: str, ) -> None:  # fmt: skip
    with Wire(redis_socket) as link:
        away = run.model_copy(update={"redis_url": f"redis://127.0.0.1:{link.port}/0"})

        def cut(updates: int) -> None:
            if updates == 4:
                link.cut()
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

        with tiny_learner.Player(address, run.id):
            assert serve(away, settings, before=cut) == 143
            assert committed(run).get("step") == 5, "the step that waited for Redis was lost"
            link.restore()
            assert serve(run, settings) == 0
    assert_whole(run)
    assert [version[1] for version in committed(run)["lineage"]] == [0, 5]


@pytest.mark.fault(7, 25)
def test_a_learner_starts_again_on_a_full_redis_and_makes_room(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], limit: Limit,
    db: redis.Redis, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def die(updates: int) -> None:
        if updates == 6:
            raise tiny_learner.Crash

    def unheard(self: RunStore, ids: object) -> int:
        raise tiny_learner.Crash

    with tiny_learner.Player(address, run.id) as player:
        with monkeypatch.context() as patch, pytest.raises(tiny_learner.Crash):
            # its last checkpoint is in force, and it dies before it can acknowledge
            patch.setattr(RunStore, "ack", lambda self, ids: unheard(self, ids) if ids else 0)
            serve(run, settings.model_copy(update={"checkpoint_every": 5}), before=die)
        assert committed(run)["step"] == 5
        player.paused.set()
        limit.leave(-200_000)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            db.set("x", "y")
        player.paused.clear()
        assert serve(run, settings) == 0
    assert not limit.rescued
    assert_whole(run)
    assert [version[0] for version in committed(run)["lineage"]] == [1, 2]


@pytest.mark.fault(25)
def test_a_full_redis_that_lacks_what_the_run_needs_is_named_with_the_way_out(
    run: RunSettings, settings: LearnerSettings, db: redis.Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
    db.config_set("maxmemory", "1")
    argv = [f"run.id={run.id}", f"run.dir={run.dir}", f"run.redis_url={run.redis_url}", f"run.model={run.model}"]
    assert cli.main([*argv, f"learner.questions={settings.questions}"]) == 2
    said = capsys.readouterr().err
    assert f"error: the Redis at {run.redis_url} is full" in said and "cannot reach" not in said
    assert "raise its maxmemory" in said and said.isascii()


def test_what_is_there_already_is_not_written_again(store: RunStore, db: redis.Redis) -> None:
    db.config_set("maxmemory", "1")
    assert store.prepare() is False
    store.write_meta({"schema": "1.1"})
    assert db.hgetall(KEYS.meta) == {b"schema": b"1.1"}
    db.function_flush()
    with pytest.raises(RedisFull):
        store.prepare()
    db.config_set("maxmemory", 0)
    assert store.prepare() is False and store.renew(1000)
    db.xgroup_destroy(KEYS.tasks, "rollout")
    assert store.prepare() is True and store.prepare() is False


def test_an_error_of_a_pipeline_names_no_bytes_of_its_commands(db: redis.Redis) -> None:
    db.config_set("maxmemory", "1")
    with pytest.raises(RedisFull) as raised, translate_errors(), db.pipeline(transaction=False) as pipe:
        pipe.set("k", "\u00ef\u00bf secret body".encode())
        pipe.execute()
    assert "used memory > 'maxmemory'" in str(raised.value)
    assert "secret body" not in str(raised.value) and str(raised.value).isascii()


def test_a_checkpoint_that_is_overdue_is_written_while_the_learner_waits_for_data(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any]
) -> None:
    seen: list[int] = []

    def pause(updates: int) -> None:
        if updates == 2:
            player.paused.set()
            threading.Thread(target=wait, daemon=True).start()

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not seen and time.monotonic() < deadline:
            if committed(run).get("step") == 3:
                seen.append(3)
            time.sleep(0.05)
        player.paused.clear()

    run = run.model_copy(update={"groups_per_step": 4, "max_lag": 0})
    with tiny_learner.Player(address, run.id) as player:
        assert serve(run, settings.model_copy(update={"checkpoint_s": 0.5}), before=pause) == 0
    assert seen, "no checkpoint while nothing came"
    assert_whole(run)
