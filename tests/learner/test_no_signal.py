"""A run from which nothing can be learned keeps its state, bounds Redis, says why, and ends or waits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
import yaml

import learner.main
from learner import cli, recovery
from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings
from learner.data import filter as data_filter
from protocol import events
from protocol.codec import decode_as
from protocol.errors import NoSignal
from protocol.header import seal
from protocol.keys import Keys
from protocol.ledger import Ledger
from protocol.messages import MetricsSnapshot, Task
from protocol.runtime.service_cli import EXIT_NO_SIGNAL
from protocol.settings import RunSettings
from tests.learner.test_loop import assert_exactly_once
from tests.support import tiny_learner
from tests.support.messages import make_group

KEYS = Keys("t1")
Serve = Callable[..., int]
DEAD = {"fails": set(range(1, 5000))}


def ledger(run: RunSettings) -> Ledger:
    """The ledger in the checkpoint."""
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found is not None
    return Ledger.from_state(found.facts["ledger"])


def notes(run: RunSettings) -> list[tuple[str, str]]:
    """(outcome, reason) of every dead or stale seq in the checkpoint."""
    return list(ledger(run).notes.values())


def last_event(db: redis.Redis) -> dict[str, str]:
    return [events.parse(fields) for _, fields in db.xrange(KEYS.events)][-1]


@pytest.mark.parametrize("reason", ["no tokens", "not finite"])
def test_redis_holds_no_more_than_the_design_says_though_no_batch_is_trained(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], db: redis.Redis, reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(recovery, "MAX_SKIPPED", 20)
    held: list[int] = []

    def verdict(updates: int) -> str:
        held.append(db.xlen(KEYS.traj))
        return reason if len(held) <= 19 else ""

    with tiny_learner.Player(address, run.id):
        assert serve(run, settings, verdict=verdict) == 0
    assert_exactly_once(run, extra=19 * 4)
    bound = (run.max_lag + 1 + 2 * settings.checkpoint_every) * run.groups_per_step
    assert max(held) <= bound + run.groups_per_step, "and those of the batch that is being trained"


@pytest.mark.slow
def test_redis_holds_no_more_than_that_though_every_group_is_filtered_or_stale(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], db: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(data_filter, "PATIENCE", 16)
    most = [0]

    def spoil(task: Task, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        time.sleep(0.01)
        most[0] = max(most[0], db.xlen(KEYS.traj))
        return seal(make_group(task.seq, (1.0, 1.0), run=run.id))

    filtered = settings.model_copy(update={"checkpoint_every": 1}).model_dump()
    filtered |= {"filter": {"metric": "reward"}}
    with tiny_learner.Player(address, run.id, spoil=spoil):
        assert serve(run.model_copy(update={"steps": 1}), LearnerSettings.model_validate(filtered)) == 0
    assert ledger(run).filtered.total() >= 16 * 4 - 4
    assert most[0] <= 48, "without a checkpoint before the next batch it is 64"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokenless", "nonfinite", "dead"])
def test_a_run_without_a_signal_keeps_its_state_and_ends_with_a_code_of_its_own(
    run: RunSettings, settings: LearnerSettings, address: dict[str, Any], db: redis.Redis, kind: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tree = {"run": json.loads(run.model_dump_json())}
    tree["learner"] = {"questions": str(settings.questions), "checkpoint_every": 100, "reconcile_s": 0.3}
    (run.dir.parent / "c.yaml").write_text(yaml.safe_dump(tree))
    verdict = {"tokenless": "no tokens", "nonfinite": "not finite", "dead": ""}[kind]

    def make(run: RunSettings, settings: LearnerSettings) -> tiny_learner.TinyEngine:
        return tiny_learner.TinyEngine(run, settings, verdict=lambda updates: verdict if updates == 2 else "")

    monkeypatch.setitem(learner.main.serve.__kwdefaults__, "make_engine", make)
    fails = DEAD["fails"] - set(range(1, 9)) if kind == "dead" else set()
    with tiny_learner.Player(address, run.id, fails=fails) as player:
        assert cli.main(["--config", str(run.dir.parent / "c.yaml")]) == EXIT_NO_SIGNAL == 65
        what = {"tokenless": "20 batches in a row had no token", "nonfinite": "3 batches in a row were not trained",
                "dead": " questions in a row failed, and no group arrived"}[kind]  # fmt: skip
        assert what in capsys.readouterr().err
        assert last_event(db)["kind"] == "no-signal" and what in last_event(db)["text"]
        expected = {"tokenless": ("stale", "no_tokens"), "nonfinite": ("dead", "nonfinite"), "dead": ("dead", "engine")}
        least = {"tokenless": 80, "nonfinite": 12, "dead": 100}[kind]
        kept = notes(run)
        assert len(kept) >= least and set(kept) == {expected[kind]}, "the checkpoint has them: no start repeats them"
        verdict = ""
        player.fails.clear()
        assert cli.main(["--config", str(run.dir.parent / "c.yaml")]) == 0
    assert_exactly_once(run, extra=len(notes(run)))
    assert len(notes(run)) >= least


@pytest.mark.slow
def test_it_waits_for_the_operator_if_configured(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any], db: redis.Redis
) -> None:
    seen: list[MetricsSnapshot] = []

    def operate() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            raw = db.get(KEYS.metrics("learner", "0"))
            now = decode_as(MetricsSnapshot, raw) if raw else None
            if now is not None and now.text["state"] == "paused":
                seen.append(now)
                player.fails.clear()
                (run.dir / "continue").touch()
                return
            time.sleep(0.05)

    operator = threading.Thread(target=operate)
    operator.start()
    with tiny_learner.Player(address, run.id, fails=set(DEAD["fails"])) as player:
        assert serve(run, settings.model_copy(update={"on_no_signal": "wait"})) == 0
    operator.join()
    assert "questions in a row failed" in seen[0].text["no_signal"]
    assert_exactly_once(run, extra=len(notes(run)))


def test_the_limit_of_failures_is_more_than_an_outage_ends_at_once(run: RunSettings) -> None:
    assert recovery.fewest_dead(run) == 100
    large = run.model_copy(update={"groups_per_step": 128, "max_lag": 4})
    assert recovery.fewest_dead(large) == 4 * 5 * 128


def test_only_failures_in_a_row_count_and_their_reasons_are_named(run: RunSettings) -> None:
    from learner.delivery.state import DeliveryState
    from protocol.ledger import Outcome

    guard, delivery = recovery.SignalGuard(run.dir, max_dead=5), DeliveryState()
    for first in range(1, 41, 4):  # three fail, one arrives
        delivery.settle(range(first, first + 3), Outcome.DEAD, "engine")
        delivery.settle([first + 3], Outcome.TRAINED)
        guard.observe(delivery)
    delivery.settle(range(41, 46), Outcome.DEAD, "no_engine")
    with pytest.raises(NoSignal, match="5 questions in a row") as caught:
        guard.observe(delivery)
    assert caught.value.why == "failed so far: 30 engine, 5 no_engine"


def test_skipped_batches_between_trained_ones_are_not_in_a_row(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any]
) -> None:
    calls = iter(range(10_000))
    with tiny_learner.Player(address, run.id):
        assert serve(run, settings, verdict=lambda updates: "not finite" if next(calls) % 2 else "") == 0
    assert next(calls) > 2 * recovery.MAX_SKIPPED + 2
    assert_exactly_once(run, extra=len(notes(run)))
