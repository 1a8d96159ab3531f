"""The shipped recipes say what their papers' scripts say."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import doctor_redis
from deploy.cli import main
from deploy.commands.init import PRESETS, presets
from deploy.config import RunConfig, load

# (updates a batch, trajectories an update, learning rate, clip_high, kl, entropy, beta2, warm-up)
PUBLISHED = {
    "search_r1_grpo": (10, 256, 1e-6, 0.2, ("k3", "loss", 1e-3), 1e-3, 0.999, 0.285),
    "search_r1_ppo": (2, 256, 1e-6, 0.2, ("k1", "reward", 1e-3), 1e-3, 0.999, 0.285),
    "research_grpo": (1, 1280, 1e-6, 0.2, ("k3", "loss", 1e-3), 0.0, 0.999, 0.0),
    "ema_pg": (10, 256, 1e-6, 0.28, ("reverse", "loss", 1e-3), 0.0, 0.95, 0.285),
}


def preset(name: str) -> RunConfig:
    return load(PRESETS / f"{name}.yaml")


def test_every_recipe_is_checked() -> None:
    assert presets() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_numbers_are_those_of_the_script(name: str) -> None:
    config = preset(name)
    algorithm, optim = config.learner.algorithm, config.learner.optim
    updates = algorithm.minibatches * algorithm.epochs
    trajectories = config.run.group_size * config.run.groups_per_step / algorithm.minibatches
    kl = (algorithm.kl.type, algorithm.kl.place, algorithm.kl.coefficient)
    found = (updates, trajectories, optim.lr, algorithm.clip_high, kl, algorithm.entropy_coefficient, optim.beta2)
    assert (*found, optim.warmup_fraction) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_recipe_has_a_dual_clip(name: str) -> None:
    """Search-R1's fork of verl, ReSearch's and EMA-PG's are older than verl's dual clip, which is Foray's default."""
    assert preset(name).learner.algorithm.dual_clip == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_an_algorithm_needs_is_there(name: str) -> None:
    config = preset(name)
    needs = config.learner.algorithm.build().needs
    assert needs.reference
    assert needs.values == (name == "search_r1_ppo")
    assert (config.learner.reference.kind == "ema") == (name == "ema_pg")
    assert config.rollout.episode.max_context <= config.learner.batch.row_tokens


def test_a_recipe_becomes_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    assert main(["init", str(path), "--preset", "ema_pg", "run.model=/models/mine"]) == 0
    config = load(path)
    assert str(config.run.model) == "/models/mine"
    assert config.learner.algorithm.type == "ema_pg"
    assert config.learner.algorithm.kl.type == "reverse"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_names_engines_and_a_transport_that_its_model_can_use(name: str) -> None:
    """A model of billions of parameters is nothing for the embedded engine, and nccl has not been tried."""
    config = preset(name)
    assert config.engine.kind.type == "sglang" and config.learner.publish.type == "disk"
    assert doctor_redis.memory_needed(config) <= config.launch.redis_maxmemory_mb << 20
