"""Variants of the demo: their file, and the table of results."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from deploy.config import from_tree
from foray.demo.compare import GOAL, VARIANTS, read_variants, render, row, with_weights
from foray.demo.run import CONFIG
from learner.algorithms import build_algorithm
from learner.config.algorithm import AlgorithmSettings
from protocol.errors import UserError
from protocol.runtime.config import read_tree


def test_every_shipped_variant_is_a_demo_that_can_be_built() -> None:
    variants = read_variants(VARIANTS, [])
    assert {"grpo", "ppo", "rloo", "reinforce_pp", "gspo", "ema_pg", "lora"} <= set(variants)
    for overrides in variants.values():
        config = from_tree(read_tree(CONFIG, overrides))
        requirements = build_algorithm(config.learner.algorithm).requirements
        assert requirements.values == (config.learner.algorithm.type == "ppo")


def test_every_algorithm_has_a_variant_that_makes_a_figure() -> None:
    union = get_args(get_args(AlgorithmSettings)[0])
    assert len(union) >= 16
    configs = [from_tree(read_tree(CONFIG, overrides)) for overrides in read_variants(VARIANTS, []).values()]
    missing = {kind.model_fields["type"].default for kind in union} - {c.learner.algorithm.type for c in configs}
    assert not missing, f"{VARIANTS.name} has no variant of {missing}"


def test_a_name_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "v.yaml"
    path.write_text("a: []\nb: [run.steps=3]\n")
    assert read_variants(path, ["b"]) == {"b": ["run.steps=3"]}
    with pytest.raises(UserError, match="no variant c"):
        read_variants(path, ["c"])
    path.write_text("- a\n")
    with pytest.raises(UserError, match="not a list of variants"):
        read_variants(path, [])


def test_a_variant_can_take_the_last_weights_of_another(tmp_path: Path) -> None:
    for label in ("1.9", "1.60", "2.5"):
        (tmp_path / "grpo" / "weights" / f"v{label}").mkdir(parents=True)
    assert with_weights("a.b=last:grpo", tmp_path) == f"a.b={tmp_path}/grpo/weights/v2.5"
    assert with_weights("a.b=lasting", tmp_path) == "a.b=lasting"
    with pytest.raises(UserError, match="variant ppo"):
        with_weights("a.b=last:ppo", tmp_path)


def test_reached_is_the_first_step_whose_window_is_good_enough() -> None:
    summary = {
        "steps": 30,
        "curve": [0.5] * 10 + [1.0] * 10 + [0.9] * 10,
        "em_before": 0.2,
        "em_after": 0.9,
        "em_greedy_after": 0.95,
        "em_after_without_search": 0.0,
        "searches_after": 1.5,
        "seconds_by_phase": {"training": 12.0},
    }
    found = row(summary)
    # means of ten steps: .5 + .05 n after 10 + n of them
    assert found["reached"] == 10 + round((GOAL - 0.5) / 0.05)
    assert (found["em_last"], found["em_best"]) == (0.9, 1.0)
    assert row(summary | {"curve": [0.1] * 30})["reached"] is None
    assert "never" in render({"x": row(summary | {"curve": [0.1] * 30})})
