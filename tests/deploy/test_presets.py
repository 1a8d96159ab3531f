"""The presets have the values of their sources, or a reason why not: benchmarks/pages/preset_sources.yaml."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.pages.presets import Table, leaves, page, read_table
from deploy.config import RunConfig, load_config
from deploy.doctor import redis as doctor_redis
from foray.cli import main
from foray.commands.init import PRESETS, presets
from learner.algorithms import build_algorithm
from rollout_server.environment.prompts import research

TABLE = read_table()
DOCS = Path(__file__).parents[2] / "docs"
DECIDED = (
    *("run.group_size", "run.groups_per_step", "run.max_lag", "run.steps", "run.temperature", "run.top_p", "run.top_k"),
    *(f"rollout.episode.{name}" for name in ("template", "max_turns", "max_new_tokens", "max_obs_tokens")),
    *(f"rollout.episode.{name}" for name in ("max_context", "rewards")),
    *(f"learner.algorithm.{name}" for name in ("type", "clip_low", "clip_high", "dual_clip", "minibatches", "epochs")),
    *(f"learner.algorithm.{name}" for name in ("old_logprobs", "aggregation", "entropy_coefficient", "whiten")),
    *(f"learner.algorithm.{name}" for name in ("correction.mode", "rejection.level", "kl.type", "kl.place")),
    *("learner.algorithm.kl.coefficient", "learner.algorithm.kl.importance", "learner.reference.kind"),
    *(f"learner.optim.{name}" for name in ("lr", "warmup_fraction", "schedule", "beta2", "eps")),
    *("learner.optim.weight_decay", "learner.optim.clip_norm"),
)
"""What the table must say of every preset, whether its file says it or leaves it to a default."""


def preset(name: str) -> RunConfig:
    return load_config(PRESETS / f"{name}.yaml")


def written(name: str) -> dict[str, Any]:
    """What the preset's file says."""
    return dict(leaves(yaml.safe_load((PRESETS / f"{name}.yaml").read_text())))


def loaded(name: str) -> dict[str, Any]:
    """Every setting of the preset, defaults included; lists as the file has them."""
    config = preset(name).model_dump(mode="json")
    return dict(leaves(config)) | {k: v for k, v in written(name).items() if isinstance(v, list)}


def test_every_recipe_has_a_source() -> None:
    assert presets() == sorted(TABLE.sources)


@pytest.mark.parametrize("name", TABLE.sources)
def test_every_row_is_what_the_preset_says(name: str) -> None:
    values = loaded(name)
    assert {row.setting: row.here for row in TABLE.of(name)} == {
        r.setting: values.get(r.setting) for r in TABLE.of(name)
    }


@pytest.mark.parametrize("name", TABLE.sources)
def test_every_value_of_a_preset_has_its_row(name: str) -> None:
    assert unnamed(TABLE, name, written(name)) == [], "name its source in benchmarks/pages/preset_sources.yaml"
    rows = Counter(row.setting for row in TABLE.of(name))
    assert [setting for setting in DECIDED if rows[setting] != 1] == []
    assert max(rows.values()) == 1


def unnamed(table: Table, name: str, values: dict[str, Any]) -> list[str]:
    rows = {row.setting for row in table.of(name)}
    ours = tuple(f"{prefix}." for prefix in table.ours)
    return [s for s in values if s not in rows and not f"{s}.".startswith(ours)]


COMPUTED = (
    *("run.", "rollout.episode.", "rollout.search.", "learner.algorithm.", "learner.optim."),
    *("learner.reference.", "learner.critic.", "learner.model."),
)
"""Where a setting decides what is computed."""
OFF: tuple[Any, ...] = (0, False, "", None, "none", "off", [], {})


@pytest.mark.parametrize("name", TABLE.sources)
def test_what_no_row_names_is_off(name: str) -> None:
    """A default that is on, like a new safeguard of the loss, changes a recipe whose file does not say it."""
    without = "learner.critic." if preset(name).learner.algorithm.type != "ppo" else "-"
    values = {k: v for k, v in loaded(name).items() if k.startswith(COMPUTED) and not k.startswith(without)}
    left = [k for k in unnamed(TABLE, name, values) if values[k] not in OFF and k not in TABLE.inert]
    assert left == [], "name it, and the source's value, in deploy/preset_sources.yaml; say the source's in the preset"


def test_a_value_without_a_row_is_found() -> None:
    values = written("ema_pg") | {"learner.algorithm.filter": True, "run.identity": 1}
    assert unnamed(TABLE, "ema_pg", values) == ["learner.algorithm.filter", "run.identity"]


def test_what_differs_is_reasoned_and_what_does_not_needs_none() -> None:
    assert [row.setting for row in TABLE.rows if row.equal == bool(row.why)] == []
    assert all(row.source for row in TABLE.rows)
    assert all(item.why for item in TABLE.behaviour)


def test_the_page_is_that_of_the_table() -> None:
    assert (DOCS / "presets.md").read_text() == page(TABLE), "make reference"


@pytest.mark.parametrize("name", TABLE.sources)
def test_updates_are_as_large_as_there(name: str) -> None:
    """Trajectories of one update, by way of ppo_mini_batch_size."""
    config = preset(name)
    trajectories = config.run.group_size * config.run.groups_per_step / config.learner.algorithm.minibatches
    assert trajectories == (1280 if name.startswith("research") else 256)


@pytest.mark.parametrize("name", TABLE.sources)
def test_no_recipe_has_the_defaults_that_are_younger_than_its_source(name: str) -> None:
    """The forks of verl of Search-R1, ReSearch and EMA-PG have no dual clip, round logits to bfloat16, and give nothing
    for what truncation cut off."""
    config = preset(name)
    assert config.learner.algorithm.dual_clip == 0
    assert (config.learner.model.fp32_lm_head, config.engine.kind.fp32_lm_head) == (False, False)
    assert not build_algorithm(config.learner.algorithm).bootstraps


@pytest.mark.parametrize("name", TABLE.sources)
def test_what_an_algorithm_needs_is_there(name: str) -> None:
    config = preset(name)
    requirements = build_algorithm(config.learner.algorithm).requirements
    assert requirements.reference
    assert requirements.values == (config.learner.algorithm.type == "ppo")
    assert (config.learner.reference.kind == "ema") == (name == "ema_pg")
    assert config.rollout.episode.max_context <= config.learner.batch.row_tokens


def test_a_recipe_becomes_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    assert main(["init", str(path), "--preset", "ema_pg", "--model", "/models/mine", "--data", "q.parquet"]) == 0
    assert load_config(path).learner.questions == Path("q.parquet").absolute()
    config = load_config(path)
    assert str(config.run.model) == "/models/mine"
    assert config.learner.algorithm.type == "ema_pg"
    assert config.learner.algorithm.kl.type == "reverse"
    assert config.learner.algorithm.correction.mode == "truncate"


@pytest.mark.parametrize("name", TABLE.sources)
def test_a_recipe_names_engines_and_a_transport_that_its_model_can_use(name: str) -> None:
    """A model of billions of parameters is nothing for the CPU engine, and nccl has not been tried."""
    config = preset(name)
    assert config.engine.kind.type == "sglang" and config.learner.publish.type == "disk"
    assert doctor_redis.memory_needed(config) <= config.launch.redis_maxmemory_mb << 20


def test_the_texts_on_research_agree_with_its_presets() -> None:
    """The docstring of the template and the fragment in docs/rewards.md give the limits of both presets."""
    names = ("max_turns", "max_new_tokens", "max_obs_tokens", "max_context")
    for text in (research.__doc__ or "", (DOCS / "rewards.md").read_text().partition("# ReSearch: ")[2]):
        said = {name: int(text.partition(f"{name}: ")[2].split()[0]) for name in names}
        for preset_name in ("research_grpo", "research_base_grpo"):
            values = loaded(preset_name)
            assert said == {name: values[f"rollout.episode.{name}"] for name in names}
