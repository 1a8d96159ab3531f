"""The whole service half on a real Redis: exactly once in the lineage that survives, whatever happens."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
import torch
import yaml
from safetensors.torch import save_file

from learner.checkpoint.checkpoint import Checkpoints, PartialCheckpoint
from learner.checkpoint.journal import read_journal
from learner.config.learner import LearnerSettings
from learner.data.batch import Batch
from learner.delivery.lease import LearnerLease
from learner.delivery.state import DeliveryState
from learner.delivery.store import RunStore
from learner.delivery.token_accounting import TokenOutcome
from learner.weights.disk import DiskPublisher
from learner.weights.disk import _save as disk_save
from protocol import events
from protocol.codec import decode_as, encode
from protocol.errors import Fenced, UserError
from protocol.header import seal
from protocol.keys import Keys
from protocol.messages import NEEDS_FILES, EngineInfo, MetricsSnapshot, Task, WeightUpdate
from protocol.runtime.redis.errors import RedisUnavailable
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.messages import make_group

Serve = Callable[..., int]


def manifest(run: RunSettings) -> dict[str, Any]:
    """The manifest of the committed checkpoint."""
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found
    return found.facts


def assert_exactly_once(run: RunSettings, extra: int = 0) -> dict[str, Any]:
    """Every step trained a batch, no seq twice; the ledger holds every seq and nothing is in flight."""
    batches = tiny_learner.surviving(run.dir)
    seqs = [seq for batch in batches.values() for seq in batch]
    assert list(batches) == list(range(1, run.steps + 1))
    assert len(seqs) == len(set(seqs)) == run.steps * run.groups_per_step
    facts = manifest(run)
    total = run.steps * run.groups_per_step + extra
    assert facts["ledger"]["counts"]["trained"] == len(seqs)
    assert (facts["ledger"]["watermark"], facts["ledger"]["above"]) == (total, [])
    others = set(range(1, total + 1)) - set(seqs)
    noted = {seq for seq, _, _ in facts["ledger"]["notes"]}
    assert noted <= others and len(others - noted) == sum(facts["ledger"]["filtered"].values())
    tokens = facts["tokens"]
    assert tokens["generated"] == sum(tokens["buckets"].values()) >= facts["tally"]["tokens_sampled"]
    return facts


@pytest.mark.fault(50)
def test_a_run_ends_with_every_seq_trained_once_and_nothing_in_flight(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    with tiny_learner.Player(address, run.id) as player:
        assert serve(run, settings) == 0
    keys = Keys(run.id)
    assert_exactly_once(run)
    assert len(player.seen) == len(set(player.seen)) == 32
    assert db.hget(keys.target, "state") == b"done"
    update = decode_as(WeightUpdate, db.hget(keys.target, "b"))
    assert update.version == (1, 8) and Path(update.path, "model.safetensors").is_file()
    assert db.xpending(keys.traj, "learner")["pending"] == 0 and db.xlen(keys.traj) == 0
    assert db.exists(keys.lease) == 0
    reported = decode_as(MetricsSnapshot, db.get(keys.metrics("learner", "0")))
    assert reported.text["state"] == "done"
    assert (reported.values["issued"], reported.values["trained"], reported.values["in_flight"]) == (32, 32, 0)
    journalled = list(read_journal(run.dir / "journal"))
    assert [e.group.seq for e in journalled] == [s for batch in tiny_learner.surviving(run.dir).values() for s in batch]
    line = tiny_learner.step_lines(run.dir)[-1]
    assert line["step"] == 8 and line["lag_max"] <= run.max_lag and line["reward/em"] == 0.5
    assert {"wait", "compute", "publish", "checkpoint"} <= set(line["seconds"])


@pytest.mark.fault(7)
def test_a_crash_between_step_and_checkpoint_rolls_back_and_trains_nothing_twice(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any]
) -> None:
    def die(updates: int) -> None:
        if updates == 5:
            raise tiny_learner.Crash

    with tiny_learner.Player(address, run.id) as player:
        with pytest.raises(tiny_learner.Crash):
            serve(run, settings, before=die)
        assert manifest(run)["step"] == 3
        assert serve(run, settings) == 0
    facts = assert_exactly_once(run)
    assert facts["lineage"] == [[1, 0], [2, 3]]
    assert facts["tally"]["redelivered"] >= 8, "steps 4 and 5 were replayed, not generated again"
    assert len({seq for seq, _ in player.seen}) == 32 and max(seq for seq, _ in player.seen) == 32
    abandoned = [line for line in tiny_learner.step_lines(run.dir) if line["epoch"] == 1 and line["step"] > 3]
    assert [line["step"] for line in abandoned] == [4, 5]
    lineage = Checkpoints(run.checkpoint_dir, 2).load().lineage
    kept = [(e.step, e.group.seq) for e in read_journal(run.dir / "journal", lineage=lineage)]
    assert kept == [(step, seq) for step, batch in tiny_learner.surviving(run.dir).items() for seq in batch]


def test_a_resumed_learner_has_the_weights_of_its_checkpoint_and_publishes_them_first(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    def die(updates: int) -> None:
        if updates == 4:
            raise tiny_learner.Crash

    seen: list[tuple[int, int]] = []

    def look(updates: int) -> None:
        seen.append(decode_as(WeightUpdate, db.hget(Keys(run.id).target, "b")).version)

    with tiny_learner.Player(address, run.id):
        with pytest.raises(tiny_learner.Crash):
            serve(run, settings, before=die)
        serve(run, settings, before=look)
    assert seen[0] == (2, 3), "the engines received the resumed version before the first step"
    saved = json.loads((Checkpoints(run.checkpoint_dir, 2).load().path / "state" / "tiny.json").read_text())
    assert saved[0] == run.steps


@pytest.mark.parametrize("needs_files", [False, True])
def test_the_first_version_is_the_engines_own_model_unless_one_needs_files(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], db: redis.Redis,
    needs_files: bool,
) -> None:  # fmt: skip
    save_file({name: torch.zeros(4) for name in ("weights", "tied")}, run.model / "model.safetensors")
    keys, seen = Keys(run.id), []
    if needs_files:
        engine = EngineInfo(id="e", url="x", state="syncing", detail=f"{NEEDS_FILES} 1.0")
        db.hset(keys.engine("e"), "b", encode(engine))
        db.zadd(keys.engines, {"e": db.time()[0] + 600})

    def look(updates: int) -> None:
        seen.append(decode_as(WeightUpdate, db.hget(keys.target, "b")))

    with tiny_learner.Player(address, run.id):
        serve(run, settings, before=look)
    first, second = seen[:2]
    assert first.version == (1, 0) and first.is_initial != needs_files
    assert Path(first.path) == (run.weights_dir / "v1.0" if needs_files else run.model)
    assert second.version == (1, 1) and not second.is_initial
    assert_exactly_once(run)


@pytest.mark.parametrize("choice", ["train", "mask"])
def test_tokens_of_steps_that_a_crash_undid_are_trained_or_masked(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], choice: str
) -> None:
    def die(updates: int) -> None:
        if updates == 5:
            raise tiny_learner.Crash

    settings = settings.model_copy(update={"on_orphan": choice})
    with tiny_learner.Player(address, run.id):
        with pytest.raises(tiny_learner.Crash):
            serve(run, settings, before=die, pace_s=0.1)  # slow enough for groups of steps 4 and 5 to be made
        serve(run, settings)
    facts = manifest(run)
    stale = [seq for seq, outcome, reason in facts["ledger"]["notes"] if (outcome, reason) == ("stale", "no_tokens")]
    assert_exactly_once(run, extra=len(stale))
    masked = sum(line["tokens_orphan"] for line in tiny_learner.step_lines(run.dir))
    assert bool(masked or stale) == (choice == "mask")


@pytest.mark.fault(10)
def test_a_signal_before_training_ends_it_at_once(run: RunSettings, settings: LearnerSettings, db: redis.Redis) -> None:
    from learner.main import serve

    def reported(run: RunSettings, settings: LearnerSettings) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        raise AssertionError("the signal was not heard")

    with pytest.raises(SystemExit) as caught:
        serve(run, settings, make_engine=reported)
    assert caught.value.code == 143 and not db.exists(Keys(run.id).lease)


@pytest.mark.fault(32)
def test_publishing_twice_and_redelivery_are_suppressed(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    def replay(updates: int) -> None:
        # Adds groups that were trained, or are buffered, bypassing the publishing function.
        for seq in (1, 2, 4 * updates + 6):
            header, body = seal(make_group(seq, run=run.id))
            db.xadd(Keys(run.id).traj, {"seq": seq, "h": header, "b": body})

    with tiny_learner.Player(address, run.id, twice=True) as player:
        serve(run, settings, before=replay)
    facts = assert_exactly_once(run)
    assert player.replies["DUP"] == player.replies["published"] == 32
    assert facts["tally"]["duplicates"] > 8


@pytest.mark.fault(30, 51)
def test_groups_that_arrive_corrupt_are_generated_again_and_dead_after_three_attempts(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    def spoil(task: Task, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        if task.seq == 3 and task.attempt == 1:
            return header, body[:-1] + b"\x00\x00"
        if task.seq == 5:
            return b"\xc1", body
        if task.seq == 6 and task.attempt == 1:
            return seal(make_group(6, run="other"))
        if task.seq == 7 and task.attempt < 3:
            return header, b""
        return header, body

    with tiny_learner.Player(address, run.id, spoil=spoil) as player:
        serve(run, settings)
    facts = assert_exactly_once(run, extra=1)
    assert facts["ledger"]["notes"] == [[5, "dead", "corrupt"]]
    assert [attempt for seq, attempt in player.seen if seq == 5] == [1, 2, 3]
    assert [attempt for seq, attempt in player.seen if seq == 7] == [1, 2, 3]
    evidence = [json.loads(line) for line in (run.dir / "dead_letters.jsonl").read_text().splitlines()]
    assert len(evidence) == db.xlen(Keys(run.id).dlq) == facts["tally"]["dead_letters"] == 7
    assert {line["reason"] for line in evidence if line["seq"] == 6} == {"foreign_run"}


def test_failed_groups_are_dead_and_make_room_for_others(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any]
) -> None:
    with tiny_learner.Player(address, run.id, fails={2, 9, 10}):
        serve(run, settings)
    facts = assert_exactly_once(run, extra=3)
    assert sorted(facts["ledger"]["notes"]) == [[s, "dead", "engine"] for s in (2, 9, 10)]


@pytest.mark.fault(29)
def test_flushing_redis_in_the_middle_costs_only_rollouts(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    def wipe(updates: int) -> None:
        if updates in (2, 5):
            db.flushall()
            db.function_flush()

    with tiny_learner.Player(address, run.id):
        serve(run, settings, before=wipe, pace_s=0.05)
    facts = assert_exactly_once(run)
    assert [epoch for epoch, _ in facts["lineage"]] == [1, 2, 3], "a lapsed lease is taken again with a new epoch"
    assert (facts["tally"]["state_lost"], facts["tally"]["lease_lapsed"]) == (2, 2)
    assert facts["redis"]["lost"] < 0, "received tokens that Redis has lost are reported"
    keys, kinds = Keys(run.id), [events.parse(e)["kind"] for _, e in db.xrange(Keys(run.id).events)]
    assert "state-lost" in kinds and "redis-lost" in kinds and kinds[-1] == "done"
    assert db.hget(keys.meta, "schema") and db.hget(keys.tokens, "life"), "meta and the counts are there again"


@pytest.mark.fault(29)
def test_flushing_redis_while_the_learner_waits_is_repaired_immediately(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    with tiny_learner.Player(address, run.id) as player:

        def wipe(updates: int) -> None:
            if updates == 3:
                player.paused.set()
                time.sleep(0.1)
                db.flushall()
                player.paused.clear()

        serve(run, settings, before=wipe)
    assert_exactly_once(run)


@pytest.mark.fault(7, 29)
@pytest.mark.fault(23, 27)
def test_a_target_that_redis_has_forgotten_is_announced_again(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    target, forgotten = Keys(run.id).target, []
    with tiny_learner.Player(address, run.id) as player:

        def forget() -> None:
            while db.hget(target, "state") is None or not player.resting.wait(0.01):
                pass
            time.sleep(0.3)  # the step is announced, and the learner waits for groups that never begin
            forgotten.append(db.delete(target))
            player.paused.clear()

        def lose(updates: int) -> None:
            if updates == 2:
                player.paused.set()
                threading.Thread(target=forget, daemon=True).start()

        serve(run, settings.model_copy(update={"reconcile_s": 0.2}), before=lose)
    assert forgotten == [1]
    assert_exactly_once(run)


def test_losing_redis_and_the_learner_at_once_costs_only_the_steps_since_the_checkpoint(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    def die(updates: int) -> None:
        if updates == 5:
            raise tiny_learner.Crash

    with tiny_learner.Player(address, run.id):
        with pytest.raises(tiny_learner.Crash):
            serve(run, settings, before=die)
        db.flushall()
        serve(run, settings)
    facts = assert_exactly_once(run)
    assert facts["lineage"] == [[1, 0], [2, 3]], "the epoch does not run backwards with Redis"


@pytest.mark.fault(11, 13)
def test_a_second_learner_fences_the_first(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    rival = RunStore(run.redis_url, run.id)

    def lose(updates: int) -> None:
        while updates == 3 and any(thread.name == "checkpoint" for thread in threading.enumerate()):
            time.sleep(0.01)  # it is committed after step 4
        if updates == 4:
            assert rival.acquire("rival:1:2:3", 1, 60_000, takeover=True) == 2

    with tiny_learner.Player(address, run.id), pytest.raises(Fenced, match="epoch 2, process 1 on rival"):
        serve(run, settings, before=lose)
    assert manifest(run)["step"] == 3, "the fenced learner committed nothing more"
    assert rival.holder().token == "rival:1:2:3", "nor did it free the other's lease"
    rival.close()


def test_a_learner_that_finds_its_successors_checkpoint_names_the_successor(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rival, commit = RunStore(run.redis_url, run.id), Checkpoints.commit

    def sleep_before_the_pointer(self: Checkpoints, part: PartialCheckpoint, confirm: Callable[[], None]) -> Path:
        def confirmed() -> None:
            confirm()
            successor = LearnerLease(rival, 60.0, run.checkpoint_dir / "epochs")
            assert successor.acquire(1, takeover=True) == 2
            self.write({}, step=3, epoch=2, lineage=[], save=lambda path: None, confirm=lambda: None)

        monkeypatch.undo()
        return commit(self, part, confirmed)

    monkeypatch.setattr(Checkpoints, "commit", sleep_before_the_pointer)
    with (
        tiny_learner.Player(address, run.id),
        pytest.raises(Fenced, match="was replaced by epoch 2, process") as caught,
    ):
        serve(run, settings)
    assert "epoch 2 has committed a checkpoint" in str(caught.value.__cause__)
    rival.close()


@pytest.mark.parametrize("redis_answers", [True, False])
def test_a_successor_that_removes_unfinished_weights_fences_their_writer(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    redis_answers: bool,
) -> None:
    """The writer's error is that of a disk: a missing folder."""
    rival = RunStore(run.redis_url, run.id)

    def save(tensors: Any, path: Path, inspection: Any) -> str:
        digest = disk_save(tensors, path, inspection)
        if path.parent.name.startswith(".v1.4."):
            successor = LearnerLease(rival, 60.0, run.checkpoint_dir / "epochs")
            assert successor.acquire(1, takeover=True) == 2
            DiskPublisher(settings.publish, run, [], rival)
            if not redis_answers:
                monkeypatch.setattr(RunStore, "holder", Mock(side_effect=RedisUnavailable("gone")))
        return digest

    monkeypatch.setattr("learner.weights.disk._save", save)
    with tiny_learner.Player(address, run.id), pytest.raises(Fenced, match="epoch 2, process") as caught:
        serve(run, settings)
    assert "cannot write the weights" in str(caught.value.__cause__)
    rival.close()


@pytest.mark.fault(39)
def test_batches_that_are_not_finite_are_dead_and_three_in_a_row_stop_the_run(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any]
) -> None:
    calls: list[int] = []

    def verdict(updates: int) -> str:
        calls.append(updates)
        return "not finite" if len(calls) in (3, 4, 6) else ""

    with tiny_learner.Player(address, run.id):
        serve(run, settings, verdict=verdict)
        facts = assert_exactly_once(run, extra=12)
        assert {reason for _, _, reason in facts["ledger"]["notes"]} == {"nonfinite"}
        more = run.model_copy(update={"steps": 12})
        with pytest.raises(UserError, match="3 batches in a row"):
            serve(more, settings, verdict=lambda n: "not finite")
    assert manifest(run)["step"] == 8
    assert len({e.group.seq for e in read_journal(run.dir / "skipped")}) == 12 + 12


@pytest.mark.fault(39)
def test_a_batch_that_is_finite_only_in_part_is_booked_in_part_and_counts(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two minibatches only the first is trained in steps 2, 5, 6 and 7."""
    settings = LearnerSettings.model_validate(settings.model_dump() | {"algorithm": {"type": "grpo", "minibatches": 2}})
    train, applied = tiny_learner.TinyEngine.train, {}

    def partly(self: tiny_learner.TinyEngine, batch: Batch) -> tiny_learner.TinyReport:
        report = train(self, batch)
        tokens = [sum(len(m.index) for m in part) for part in batch.minibatches]
        bad = self.updates in (2, 5, 6, 7)
        applied[self.updates] = (tokens[0] if bad else sum(tokens), sum(tokens))
        if bad:
            report.reason, report.minibatches, report.tokens_trained = "not finite", 1, tokens[0]
        return report

    books, commit = [], DeliveryState.commit_step

    def committed(self: DeliveryState, *seqs: Any, **tokens: Any) -> None:
        commit(self, *seqs, **tokens)
        books.append(self)

    monkeypatch.setattr(tiny_learner.TinyEngine, "train", partly)
    monkeypatch.setattr(DeliveryState, "commit_step", committed)
    refused = pytest.raises(UserError, match="3 batches in a row were not trained in full")
    with tiny_learner.Player(address, run.id), refused:
        serve(run, settings)
    assert sorted({e.step for e in read_journal(run.dir / "journal")}) == list(range(1, 8)), "a replay needs each step"
    assert sorted({e.step for e in read_journal(run.dir / "skipped")}) == [2, 5, 6, 7]
    assert [line["step"] for line in tiny_learner.step_lines(run.dir)] == list(range(1, 8)), (
        "booked before the run ends"
    )
    totals, counters = books[-1].accounting.totals, books[-1].counters
    assert totals[TokenOutcome.TRAINED] == counters.tokens_trained == sum(done for done, _ in applied.values())
    assert totals[TokenOutcome.MASKED] == sum(every - done for done, every in applied.values()) > 0
    assert counters.skipped_steps == 4 and not books[-1].accounting.inconsistency()


def test_stale_groups_are_dropped_if_configured(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    def spoil(task: Task, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        if task.seq in (30, 31):  # began at version 0
            return seal(make_group(task.seq, run=run.id))
        return header, body

    with tiny_learner.Player(address, run.id, spoil=spoil):
        serve(run, settings.model_copy(update={"on_stale": "drop"}))
    facts = assert_exactly_once(run, extra=2)
    assert sorted(facts["ledger"]["notes"]) == [[30, "stale", "too_old"], [31, "stale", "too_old"]]


def test_a_deleted_task_is_found_and_issued_again(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    keys = Keys(run.id)
    with tiny_learner.Player(address, run.id) as player:

        def unread() -> list[bytes]:
            """Tasks that were not leased."""
            last = db.xinfo_groups(keys.tasks)[0]["last-delivered-id"]
            return [id_ for id_, _ in db.xrange(keys.tasks, min=b"(" + last)]

        def delete(updates: int) -> None:
            if updates == 1:
                time.sleep(0.3)  # all that could be issued has been rolled out
                player.paused.set()
                player.resting.clear()
                assert player.resting.wait(10)
            if updates == 2:  # the credit of the second step becomes tasks that are not leased
                deadline = time.monotonic() + 10
                while len(unread()) < 4 and time.monotonic() < deadline:
                    time.sleep(0.02)
                assert db.xdel(keys.tasks, *unread()) >= 4
                player.paused.clear()

        serve(run, settings, before=delete)
    facts = assert_exactly_once(run)
    assert facts["tally"]["reissued"] >= 4


def test_a_full_disk_keeps_the_old_checkpoint_and_training_goes_on(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    real, tries = tiny_learner.TinyEngine.save_state, []

    def full(self: Any, directory: Path) -> None:
        tries.append(self.updates)
        if self.updates in (4, 5, 6):
            raise OSError(28, "No space left on device")
        real(self, directory)

    monkeypatch.setattr(tiny_learner.TinyEngine, "save_state", full)
    with tiny_learner.Player(address, run.id), caplog.at_level(logging.ERROR):
        serve(run, settings.model_copy(update={"checkpoint_every": 2}))
    assert (tries[:2] == [2, 4] and tries[-1] == 8 and 5 in tries) or 6 in tries, "training goes on, and tries again"
    assert "step 2 remains current" in caplog.text and "issuing tasks is paused" in caplog.text
    assert_exactly_once(run)


def test_a_finished_run_started_again_ends_at_once_and_can_be_made_longer(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    with tiny_learner.Player(address, run.id):
        serve(run, settings)
        assert serve(run, settings) == 0
        assert len(tiny_learner.step_lines(run.dir)) == 8
        longer = run.model_copy(update={"steps": 10})
        serve(longer, settings)
    assert_exactly_once(longer)
    with pytest.raises(UserError, match=r"run\.steps is 8"):
        serve(run, settings)


def test_other_questions_or_another_seed_are_refused_on_resume(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    with tiny_learner.Player(address, run.id):
        serve(run, settings)
    with pytest.raises(UserError, match=r"questions or run\.seed"):
        serve(run.model_copy(update={"seed": 7, "steps": 9}), settings)
    assert not db.exists(Keys(run.id).lease), "a refused start leaves no lease behind"


@pytest.mark.fault(42)
def test_versions_that_an_engine_still_serves_are_not_collected(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    keys = Keys(run.id)
    db.hset(keys.engine("slow"), "b", encode(EngineInfo(id="slow", url="x", state="ready", epoch=1, step=1)))
    db.zadd(keys.engines, {"slow": 1e12})
    with tiny_learner.Player(address, run.id):
        serve(run, settings)
    assert {p.name for p in run.weights_dir.iterdir()} == {"v1.1", "v1.5", "v1.6", "v1.7", "v1.8"}


# --- real processes ---


@pytest.fixture
def launch(run: RunSettings, settings: LearnerSettings, tmp_path: Path) -> Callable[[int], subprocess.Popen[str]]:
    """Starts a learner process for this many steps."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(steps: int) -> subprocess.Popen[str]:
        tree = {
            "run": json.loads(run.model_copy(update={"steps": steps}).model_dump_json()),
            "learner": {"questions": str(settings.questions), "checkpoint_every": 4, "reconcile_s": 0.3},
        }
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
        argv = [sys.executable, "-m", "tests.support.tiny_learner", "--config", str(tmp_path / "c.yaml")]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    return start


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    for line in process.stdout:
        if line.split()[:1] == ["step"] and int(line.split()[1].split("/")[0]) >= step:
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
@pytest.mark.fault(13)
def test_a_load_that_outlasts_the_lease_keeps_it(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    short = settings.model_copy(update={"lease_s": 1.5})  # two thirds of it are there for a loaded machine
    free: list[bool] = []

    def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*rest: Any) -> Any:
            for _ in range(15):
                time.sleep(0.12)
                free.append(not db.exists(Keys(run.id).lease))
            return call(*rest)

        return slow

    with tiny_learner.Player(address, run.id):
        assert serve(run, short) == 0
        monkeypatch.setattr(Checkpoints, "_verified", slowly(Checkpoints._verified))
        monkeypatch.setattr(tiny_learner.TinyEngine, "load_state", slowly(tiny_learner.TinyEngine.load_state))
        assert serve(run.model_copy(update={"steps": 10}), short) == 0
    assert len(free) == 30 and not any(free), "no other learner could have taken it"
    facts = manifest(run)
    assert facts["lineage"] == [[1, 0], [2, 8]] and facts["tally"]["lease_lapsed"] == 0


@pytest.mark.slow
@pytest.mark.fault(7, 10)
def test_a_learner_killed_at_any_moment_goes_on_with_the_same_command(
    launch: Callable[[int], subprocess.Popen[str]], run: RunSettings, address: dict[str, Any]
) -> None:
    with tiny_learner.Player(address, run.id):
        process = launch(20)
        wait_for_step(process, 7)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
        process = launch(20)
        wait_for_step(process, 14)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 143 and "run the same command to continue" in log, log
        stopped_at = manifest(run)["step"]
        assert stopped_at >= 14, "SIGTERM writes a checkpoint"
        process = launch(20)
        _, log = process.communicate(timeout=40)
        assert process.returncode == 0, log
    done = run.model_copy(update={"steps": 20})
    facts = assert_exactly_once(done, extra=facts_extra(run))
    assert [epoch for epoch, _ in facts["lineage"]] == [1, 2, 3]
    assert facts["lineage"][1:] == [[2, 4], [3, stopped_at]]


def facts_extra(run: RunSettings) -> int:
    ledger = manifest(run)["ledger"]
    return len(ledger["notes"]) + sum(ledger["filtered"].values())
