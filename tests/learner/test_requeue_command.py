"""`foray dlq requeue` against a learner that is training: given-up seqs are retried and trained."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
import yaml

from foray.cli import main
from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings
from protocol.keys import Keys
from protocol.settings import RunSettings
from tests.support import tiny_learner
from tests.support.waiting import wait_until


def test_a_dead_seq_is_requeued_by_its_number_and_trained(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Callable[..., int],
    address: dict[str, Any],
    db: redis.Redis,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run.model_copy(update={"steps": 12})
    config = run.dir.parent / "c.yaml"
    config.write_text(yaml.safe_dump({"run": json.loads(run.model_dump_json())}))
    fails = {3, 5}
    codes: list[int] = []

    def ask(updates: int) -> None:
        if updates == 4:  # the checkpoint of step 3, written in the background, books both as dead
            checkpoints = Checkpoints(run.checkpoint_dir, 1)
            booked = lambda: (found := checkpoints.load()) is not None and found.facts["step"] >= 3  # noqa: E731
            wait_until(booked, "the checkpoint of step 3", 60)
            fails.clear()
            codes.append(main(["dlq", "list", "--config", str(config), "--json"]))
            codes.append(main(["dlq", "requeue", "3", "--config", str(config)]))
            codes.append(main(["dlq", "requeue", "1", "--config", str(config)]))
            deadline = time.monotonic() + 60
            while b"requeued" not in [fields[b"kind"] for _, fields in db.xrange(Keys(run.id).events)]:
                assert time.monotonic() < deadline, "the learner sees the request"
                time.sleep(0.02)

    with tiny_learner.Player(address, run.id, fails=fails):
        assert serve(run, settings, before=ask) == 0
    out, err = capsys.readouterr()
    assert codes == [0, 0, 2] and "1 seqs requeued: 3" in out and "1 is trained" in err
    listed = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert [(d["seq"], d["reason"], d["fate"]) for d in listed["dead"]] == [
        (3, "engine", "dead"),
        (5, "engine", "dead"),
    ]
    facts = Checkpoints(run.checkpoint_dir, 2).load().facts
    trained = [seq for batch in tiny_learner.surviving(run.dir).values() for seq in batch]
    assert trained.count(3) == 1 and len(trained) == len(set(trained)) == run.steps * run.groups_per_step
    assert {seq for seq, outcome, _ in facts["ledger"]["notes"] if outcome == "dead"} == {5}
    assert db.scard(Keys(run.id).requeue) == 0, "the request is dealt with"
