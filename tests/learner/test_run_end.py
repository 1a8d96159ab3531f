"""How a run begins and ends: its metadata, back-pressure in both directions, and consistent accounting."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

import learner.main
from learner import cli
from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings
from learner.delivery.state import DeliveryState
from learner.delivery.token_accounting import TokenAccounting, TokenOutcome
from protocol import events
from protocol.codec import SCHEMA_MAJOR, decode_as, pack, unpack
from protocol.errors import UserError
from protocol.header import checksum, read_header
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot, Task
from protocol.run_meta import parse_run_meta, tokenizer_digest
from protocol.runtime.redis.server import function_library
from protocol.settings import RunSettings
from tests.support import tiny_learner

KEYS = Keys("t1")
Serve = Callable[..., int]


def facts(run: RunSettings) -> dict[str, Any]:
    found = Checkpoints(run.checkpoint_dir, 2).load()
    assert found is not None
    return found.facts


def history(db: redis.Redis) -> list[dict[str, str]]:
    return [events.parse(fields) for _, fields in db.xrange(KEYS.events)]


def values(db: redis.Redis) -> MetricsSnapshot:
    return decode_as(MetricsSnapshot, db.get(KEYS.metrics("learner", "0")))


def trained(run: RunSettings) -> list[int]:
    return [seq for batch in tiny_learner.surviving(run.dir).values() for seq in batch]


def test_a_run_publishes_its_metadata_and_its_history(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis,
) -> None:  # fmt: skip
    (run.model / "tokenizer.json").write_text('{"b": 1, "a": 2}')
    with tiny_learner.Player(address, run.id):
        serve(run, settings)
    meta = parse_run_meta(db.hgetall(KEYS.meta))
    assert meta is not None and meta.schema[0] == SCHEMA_MAJOR
    assert meta.tokenizer == tokenizer_digest(b'{"a": 2, "b": 1}')
    assert (meta.facts["run"], meta.facts["group_size"], meta.facts["max_lag"]) == ("t1", "4", "2")
    reported = history(db)
    assert {(line["process"], line["id"]) for line in reported} == {("learner", "0")}
    assert [line["kind"] for line in reported] == ["epoch", "checkpoint", "checkpoint", "checkpoint", "done"]
    assert reported[0]["text"] == "epoch 1 begins at step 0 of 8" and "accounting is consistent" in reported[-1]["text"]


def test_functions_of_another_foray_are_replaced_at_the_start(
    run: RunSettings, settings: LearnerSettings, db: redis.Redis
) -> None:
    def stop(*_: object) -> Any:
        raise UserError("no such model")

    db.function_load(function_library() + "\n-- older", replace=True)
    with pytest.raises(UserError, match="no such model"):
        learner.main.serve(run, settings, make_engine=stop)
    ((library),) = db.function_list(withcode=True)
    assert function_library().encode() in library


def test_token_accounting_is_exported(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis,
) -> None:  # fmt: skip
    with tiny_learner.Player(address, run.id, fails={3}):
        serve(run, settings)
    reported = values(db).values
    counts = {name: reported[f"token_accounting_{name}"] for name in (*TokenOutcome, "in_flight")}
    assert reported["tokens_generated_total"] == sum(counts.values()) == 32 * 16 + 7
    assert (counts["failed"], counts["trained"] + counts["masked"]) == (7, 512) and counts["trained"] > 400
    assert (
        reported["token_accounting_consistent"],
        reported["token_accounting_rejected"],
        reported["token_accounting_redis_lost"],
    ) == (1, 0, 0)


@pytest.mark.parametrize("wrong", ["token", "seq"])
def test_inconsistent_accounting_ends_the_run_with_status_1_and_the_difference(
    run: RunSettings, settings: LearnerSettings, address: dict[str, Any], db: redis.Redis,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str,
) -> None:  # fmt: skip
    tree = {
        "run": json.loads(run.model_dump_json()),
        "learner": {"questions": str(settings.questions), "checkpoint_every": 3, "reconcile_s": 0.3},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setitem(
        learner.main.serve.__kwdefaults__, "make_engine", lambda run, settings: tiny_learner.TinyEngine(run, settings)
    )
    if wrong == "token":
        real, calls = TokenAccounting.record, []

        def record(self: TokenAccounting, outcome: TokenOutcome, tokens: int) -> None:
            calls.append(outcome)
            real(self, outcome, tokens - (3 if len(calls) == 5 else 0))  # three tokens fall under the table

        monkeypatch.setattr(TokenAccounting, "record", record)
    else:
        finish = DeliveryState.commit_step

        def twice(self: DeliveryState, seqs: Any, **tokens: Any) -> None:
            finish(self, seqs, **tokens)
            self.counters.taken += self.step == 2  # a group that was trained and not booked

        monkeypatch.setattr(DeliveryState, "commit_step", twice)
    with tiny_learner.Player(address, run.id):
        assert cli.main(["--config", str(tmp_path / "c.yaml")]) == 1
    said = capsys.readouterr().err
    where = {"token": "512 tokens were generated", "seq": "32 seqs are recorded as trained, 33 groups were trained"}
    assert f"error: the accounting is not consistent: {where[wrong]}" in said
    assert wrong == "seq" or ": 3 are missing" in said
    (first, *_) = [line for line in history(db) if line["kind"] == "inconsistent"]
    assert "the accounting is not consistent" in first["text"], "reported at the next checkpoint, not only at the end"


@pytest.mark.fault(8)
def test_a_learner_killed_between_checkpoint_and_acknowledgement_acknowledges_and_counts_nothing_twice(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    real = DeliveryState.mark_durable

    def die(self: DeliveryState, state: dict[str, Any]) -> list[bytes]:
        assert len(real(self, state)) >= 12
        raise tiny_learner.Crash

    with tiny_learner.Player(address, run.id):
        with monkeypatch.context() as patch, pytest.raises(tiny_learner.Crash):
            patch.setattr(DeliveryState, "mark_durable", die)
            serve(run, settings)
        assert facts(run)["step"] == 3 and db.xpending(KEYS.traj, "learner")["pending"] >= 12
        with caplog.at_level(logging.INFO):
            serve(run, settings)
    assert "12 entries that the checkpoint had settled" in caplog.text
    made = facts(run)
    assert made["tally"]["duplicates"] == 0 == made["redis"]["lost"]
    assert made["tokens"]["generated"] == sum(made["tokens"]["buckets"].values()) == 512
    assert len(trained(run)) == len(set(trained(run))) == 32


def dialect(major: int, minor: int) -> Callable[[Task, bytes, bytes], tuple[bytes, bytes]]:
    """Groups as a rollout server of another version writes them."""

    def spoil(task: Task, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        if (task.seq, task.attempt) != (2, 1):
            return header, body
        envelope = unpack(body) | {"v": [major, minor]}
        envelope["body"]["a_field_of_the_future"] = 1
        other = pack(envelope)
        plain = read_header(header).model_dump() | {"num_bytes": len(other), "crc": checksum(other)}
        return pack(plain | {"another": "field"}), other

    return spoil


@pytest.mark.fault(31)
@pytest.mark.parametrize(("major", "minor", "read"), [(1, 99, True), (2, 0, False)])
def test_a_newer_minor_is_read_and_another_major_is_a_dead_letter_that_says_upgrade(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis, major: int, minor: int, read: bool,
) -> None:  # fmt: skip
    with tiny_learner.Player(address, run.id, spoil=dialect(major, minor)) as player:
        serve(run, settings)
    letters = [fields for _, fields in db.xrange(KEYS.dlq)]
    assert len(letters) == facts(run)["tally"]["dead_letters"] == (0 if read else 1)
    assert read or (letters[0][b"reason"] == b"unsupported_version" and b"upgrade" in letters[0][b"detail"])
    assert [attempt for seq, attempt in player.seen if seq == 2] == ([1] if read else [1, 2])
    assert 2 in trained(run)


@pytest.mark.fault(48)
def test_rollouts_that_are_faster_than_the_learner_are_held_by_the_credit_gate(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis,
) -> None:  # fmt: skip
    waiting: list[tuple[int, int]] = []

    def look(updates: int) -> None:
        deadline = time.monotonic() + 5
        while len(player.seen) < min(32, 4 * (updates + 3)) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)  # they would have had the time to do more
        waiting.append((len(player.seen) - 4 * updates, db.xlen(KEYS.traj)))

    with tiny_learner.Player(address, run.id) as player:
        serve(run, settings, before=look)
    open_, held = zip(*waiting, strict=True)
    window, unacknowledged = (run.max_lag + 1) * run.groups_per_step, 3 * run.groups_per_step
    assert max(open_) == window, "they wait for credit, and have used all of it"
    assert max(held) <= window + unacknowledged, "Redis holds what the design says and no more"
    lags = [line["lag_max"] for line in tiny_learner.step_lines(run.dir)]
    assert max(lags) <= run.max_lag


@pytest.mark.fault(49)
def test_a_learner_faster_than_the_rollouts_waits_without_polling_and_without_limit(
    run: RunSettings, settings: LearnerSettings, serve: Serve, address: dict[str, Any],
    db: redis.Redis,
) -> None:  # fmt: skip
    spent: list[tuple[float, float]] = []

    def pause(updates: int) -> None:
        spent.append((time.monotonic(), time.thread_time()))
        if updates == 2:
            player.paused.set()
            threading.Timer(1.5, player.paused.clear).start()

    with tiny_learner.Player(address, run.id) as player:
        assert serve(run, settings, before=pause) == 0
    wall, cpu = (max(b[i] - a[i] for a, b in pairwise(spent)) for i in (0, 1))
    assert wall > 0.8 and cpu < wall / 2
    assert values(db).waits["data"] > 0.8 and len(trained(run)) == 32
