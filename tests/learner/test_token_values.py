"""What the learner computed for single tokens: it is what the loss used, at the tokens' own positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.config.learner import TokenValuesSettings, TrainerSettings
from learner.data.batch import build_batch
from learner.data.token_values import FOLDER, TokenValues, TrajectorySource, read_token_values
from learner.trainer.trainer import Trainer
from protocol.messages import TrajectoryGroup
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.learner.test_trainer import groups


def train(trainer: Trainer, given: list[TrajectoryGroup], step: int, **layout: Any) -> None:
    batch = build_batch(
        given,
        trainer.algorithm,
        now_step=step - 1,
        lineage=(PolicyVersion(1, 0),),
        max_lag=9,
        settings=TrainerSettings(batch=layout).batch,
        temperature=1.0,
    )
    assert not trainer.train(batch).skipped


@pytest.mark.parametrize("shared", [False, True])
def test_they_are_what_the_loss_used_at_the_tokens_own_positions(tiny_qwen: Path, tmp_path: Path, shared: bool) -> None:
    settings = TrainerSettings.model_validate(
        {"token_values": {"every": 2}, "optim": {"lr": 1e-2}, "algorithm": {"type": "grpo", "kl": {"coefficient": 0.1}}}
    )
    trainer = Trainer(RunSettings(model=tiny_qwen, steps=20, dir=tmp_path), settings)
    given = groups(trainer)
    train(trainer, given, 1, share_prompts=shared)
    assert not (tmp_path / FOLDER).exists(), "step 1 is not one of every second"
    given = groups(trainer, seed=1)  # sampled by the policy as it is now
    train(trainer, given, 2, share_prompts=shared)
    for group in given:
        rewards = np.array([t.reward for t in group.trajectories])
        for place, trajectory in enumerate(group.trajectories):
            found = read_token_values(tmp_path, 2, group.seq, place)
            sampled = np.flatnonzero(trajectory.mask)
            np.testing.assert_array_equal(found["position"], sampled)
            np.testing.assert_allclose(found["logprob"], trajectory.logprobs[sampled], atol=1e-4)
            assert np.abs(found["reference"] - found["logprob"]).max() > 1e-3, "the policy has left the reference"
            expected = (rewards[place] - rewards.mean()) / rewards.std(ddof=1)
            np.testing.assert_allclose(found["advantage"], expected, rtol=1e-4)
    assert read_token_values(tmp_path, 2, 99, 0)["position"].size == 0 and read_token_values(tmp_path, 3, 1, 0) == {}


def test_the_values_of_every_nth_step_are_kept_and_none_of_before_the_first() -> None:
    assert [step for step in range(11) if TokenValuesSettings(every=5).due(step)] == [5, 10]
    assert [step for step in range(4) if TokenValuesSettings(every=1).due(step)] == [1, 2, 3]
    assert not any(TokenValuesSettings(every=0).due(step) for step in range(4))


def written(folder: Path, step: int, rank: int, keep: int = 2) -> None:
    values = TokenValues()
    values.add(
        trajectory=np.array([1, 1, 0]), position=np.array([5, 4, 4 + rank]), logprob=np.array([-1, -2, -3], np.float32)
    )
    values.write(folder, TrajectorySource(step, np.array([7, 7]), np.array([0, 1])), rank=rank, keep=keep)


def test_the_files_of_all_ranks_are_joined_and_the_oldest_steps_removed(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    for step in (10, 20, 30):
        written(folder, step, 0)
        written(folder, step, 1)
    assert {path.name.partition(".")[0] for path in folder.iterdir()} == {"step-00000020", "step-00000030"}
    found = read_token_values(tmp_path, 30, 7, 0)
    assert found["position"].tolist() == [4, 5] and found["logprob"].tolist() == [-3, -3]
    assert read_token_values(tmp_path, 30, 7, 1)["position"].tolist() == [4, 4, 5, 5]


def test_a_file_that_cannot_be_written_or_read_is_said_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    written(tmp_path / FOLDER, 10, 0)
    assert "the token values of step 10 are not kept" in caplog.text
    (tmp_path / FOLDER).unlink()
    written(tmp_path / FOLDER, 10, 0)
    path = tmp_path / FOLDER / "step-00000010.rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert read_token_values(tmp_path, 10, 7, 0) == {} and f"cannot read {path}" in caplog.text


def test_what_was_not_collected_is_not_written(tmp_path: Path) -> None:
    TokenValues().write(tmp_path / FOLDER, TrajectorySource(), rank=0, keep=1)
    assert not (tmp_path / FOLDER).exists()
