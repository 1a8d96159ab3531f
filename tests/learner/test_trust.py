"""A learner resumes only from checkpoints that its run signed, unless the user trusts another one."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy.run.snapshot import read_ledger_totals
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.replay import replay
from learner.checkpoint.signing import KEY_FILE
from learner.config.learner import LearnerSettings
from learner.main import serve as real
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.settings import RunSettings
from tests.support import tiny_learner


@pytest.fixture
def trained(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any]
) -> RunSettings:
    """A finished run, made longer: its settings for going on."""
    with tiny_learner.Player(address, run.id):
        serve(run, settings)
    return run.model_copy(update={"steps": run.steps + 2})


def manifest_of(run: RunSettings) -> Path:
    current = (run.checkpoint_dir / "CURRENT").read_text().strip()
    return run.checkpoint_dir / current / "manifest.json"


def test_a_checkpoint_under_another_key_is_refused_until_trusted(
    trained: RunSettings,
    settings: LearnerSettings,
    serve: Callable[..., int],
    address: dict[str, Any],
    db: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (trained.dir / KEY_FILE).stat().st_mode & 0o777 == 0o600
    shutil.move(trained.dir / KEY_FILE, trained.dir / "kept")  # as of a checkpoint that was copied from another run
    with pytest.raises(UserError, match="is not trusted: it is signed with another key") as caught:
        serve(trained, settings)
    assert "--trust-checkpoint" in caught.value.todo
    assert not db.exists(Keys(trained.id).lease), "a refused start leaves no lease behind"

    def make(run: RunSettings, settings: LearnerSettings) -> Any:
        return tiny_learner.TinyEngine(run, settings)

    with tiny_learner.Player(address, trained.id), caplog.at_level(logging.WARNING):
        assert real(trained, settings, trust_checkpoint=True, make_engine=make) == 0
    assert "--trust-checkpoint: resuming" in caplog.text
    assert serve(trained, settings) == 0, "what it has written since is signed with the new key"
    # The key that the environment gives goes before the file.
    monkeypatch.setenv("FORAY_RUN_KEY", "e" * 32)
    with pytest.raises(UserError, match="from FORAY_RUN_KEY"):
        serve(trained, settings)


def test_a_manually_changed_ledger_is_refused_but_readable(
    trained: RunSettings, settings: LearnerSettings, serve: Callable[..., int], tmp_path: Path
) -> None:
    path = manifest_of(trained)
    manifest = json.loads(path.read_text())
    manifest["ledger"]["notes"] = [[1, "dead", "corrupt"]]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="its signature is invalid"):
        serve(trained, settings)
    delivery = read_ledger_totals(trained.dir)
    assert delivery and delivery.step == 8
    assert Checkpoints(trained.checkpoint_dir, 2).load()
    again = trained.model_copy(update={"dir": tmp_path / "replay", "redis_url": ""})

    def make(run: RunSettings, settings: LearnerSettings) -> Any:
        return tiny_learner.TinyEngine(run, settings)

    assert replay(again, settings, trained.dir, make_engine=make) == 0, "a journal is evidence, and needs no key"
    assert "signature" in json.loads(manifest_of(again).read_text()), "its own checkpoints are signed"
    (again.dir / KEY_FILE).unlink()
    with pytest.raises(UserError, match="is not trusted"):
        replay(again, settings, trained.dir, make_engine=make)
    assert replay(again, settings, trained.dir, trust_checkpoint=True, make_engine=make) == 0
