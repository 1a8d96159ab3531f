"""Two runs on one Redis: neither touches a key of the other, and what strays from one to the other is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings
from protocol.codec import decode_as
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot
from protocol.settings import RunSettings
from tests.support import tiny_learner

Serve = Callable[..., int]


@pytest.mark.fault(51, 30)
def test_two_runs_finish_side_by_side_and_refuse_what_is_the_others(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    db: redis.Redis,
) -> None:
    """Every fourth group of B is not what its rollout server made, but a group of A's, taken from A's stream."""
    one = run.model_copy(update={"id": "a", "dir": run.dir / "a"})
    two = run.model_copy(update={"id": "b", "dir": run.dir / "b"})
    strayed: list[int] = []

    def stray(task: Any, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        if task.seq % 4 or task.attempt > 1:
            return header, body
        foreign = [fields for _, fields in db.xrange(Keys("a").traj, count=1)]
        if not foreign:
            return header, body
        strayed.append(task.seq)
        return foreign[0][b"h"], foreign[0][b"b"]

    codes: dict[str, int] = {}
    begun = threading.Event()

    def learn(of: RunSettings) -> None:
        codes[of.id] = serve(of, settings, pace_s=0.05, before=lambda _: begun.set())

    with tiny_learner.Player(address, "a"), tiny_learner.Player(address, "b", spoil=stray):
        first = threading.Thread(target=learn, args=(one,))
        first.start()
        assert begun.wait(20), "A trains"
        learn(two)
        first.join(30)
    assert codes == {"a": 0, "b": 0} and strayed, "both are done, and something strayed"
    for of in (one, two):
        facts = Checkpoints(of.checkpoint_dir, 2).load().facts
        trained = [seq for batch in tiny_learner.surviving(of.dir).values() for seq in batch]
        assert len(trained) == len(set(trained)) == facts["ledger"]["counts"]["trained"] == of.steps * 4
        assert facts["run"] == of.id
    letters = [json.loads(line) for line in (two.dir / "dead_letters.jsonl").read_text().splitlines()]
    assert [letter["seq"] for letter in letters] == strayed
    assert {(letter["reason"], letter["detail"]) for letter in letters} == {("foreign_run", "it belongs to run 'a'")}
    assert not (one.dir / "dead_letters.jsonl").exists() and db.xlen(Keys("a").dlq) == 0
    reported = decode_as(MetricsSnapshot, db.get(Keys("b").metrics("learner", "0"))).values
    assert reported["dead_letters"] == len(strayed) == db.xlen(Keys("b").dlq)
    named = {key.decode() for key in db.scan_iter()}
    assert named == {key for key in named if key.startswith(("{a}:", "{b}:"))}, "a key of no run is everybody's"
