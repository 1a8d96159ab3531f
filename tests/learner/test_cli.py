"""The command answers at once with what happened, why and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner import cli
from learner import main as serve
from protocol.errors import Fenced, ForayError


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 2
    return capsys.readouterr().err


def test_user_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FORAY_REDIS_URL", raising=False)
    url = "run.redis_url=redis://127.0.0.1:1/0"
    assert "did you mean 'checkpoint_every'" in refusal(capsys, url, "learner.chekpoint_every=3")
    assert "no Redis is configured" in refusal(capsys)
    assert "needs model.lora.rank" in refusal(capsys, url, "learner.publish.type=adapter")
    alone = ("run.group_size=1", "learner.algorithm.type=reinforce", "learner.algorithm.baseline=group")
    assert "a group of one has advantage 0" in refusal(capsys, url, *alone)
    assert "cannot read the questions" in refusal(capsys, url, f"learner.questions={tmp_path / 'none'}")
    (tmp_path / "q").write_text('{"question": "who ?", "answers": ["x"]}\n')
    rest = (f"learner.questions={tmp_path / 'q'}", f"run.dir={tmp_path / 'r'}")
    assert "is not a Redis URL" in refusal(capsys, "run.redis_url=nonsense", *rest)
    monkeypatch.setattr(serve, "REDIS_PATIENCE_S", 0.0)
    secret = "run.redis_url=redis://u:geheim@127.0.0.1:1/0"
    reported = refusal(capsys, secret, *rest)
    assert "cannot reach Redis at redis://u:[secret]@127.0.0.1:1/0" in reported and "geheim" not in reported


@pytest.mark.parametrize(
    ("error", "status"), [(Fenced("by x"), 75), (ForayError("the accounting is not consistent"), 1)]
)
def test_the_exit_status_distinguishes_outcomes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(serve, "serve", fail)
    assert cli.main(["run.redis_url=redis://127.0.0.1:1/0"]) == status
    assert str(error) in capsys.readouterr().err
