"""Settings that would do nothing, or fail in the first step, are refused where they are read; neighbours are not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import yaml
from pydantic import TypeAdapter, ValidationError

from learner.config.algorithm import AlgorithmSettings
from learner.config.learner import LearnerSettings, require_groups
from protocol.errors import UserError
from protocol.runtime.config import section
from protocol.settings import RunSettings

REFUSED = {
    "rejection: {also: [{measure: k3, high: 1.0e-9}]}": "level off",
    "rejection: {also: [{}]}": "needs a level",
    "rejection: {measure: k3, high: .01}": "rejection.measure has no effect",
    "rejection: {high: 1.5}": "rejection.high has no effect",
    "rejection: {low: .9, veto: .1}": "rejection.low has no effect",
    "rejection: {level: token, measure: k2, low: .1, high: 1}": "no lower bound",
    "rejection: {level: token, low: 3}": "low 3 is above rejection.high 2",
    "rejection: {level: sequence, high: .3}": "low 0.5 is above rejection.high 0.3",
    "rejection: {level: token, also: [{level: max, low: 3}]}": "low 3 is above",
    "rejection: {second_moment: .inf}": "finite",
    "correction: {low: 3}": "correction.low 3 is above correction.high 2",
    "correction: {high: .nan}": "finite",
    "drift_coefficient: .inf": "finite",
    "entropy_coefficient: .nan": "finite",
    "parts: {em: .nan}": "finite",
    "parts: {em: .inf}": "finite",
    "parts: {em: 0, format: 0}": "all weights in parts are 0",
    "{normalize_batch: true, turns: turn}": "normalize_batch",
    "{normalize_batch: true, turns: group}": "normalize_batch",
    "{turns: turn, std: none}": "std group",
    "{type: dr_grpo, turns: group}": "std group",
    "{turns: turn, estimator: opo}": "estimator grpo",
    "{type: distill, kl: {type: k1, importance: false}}": "expected gradient of 0",
    "{type: distill, filter: true}": "remove filter",
    "{type: distill, whiten: true}": "remove whiten",
}
ACCEPTED = (
    "rejection: {level: token, low: 2, high: 2}",
    "rejection: {level: token, measure: k3, high: .01, also: [{level: geometric}]}",
    "rejection: {level: sequence, low: .1, high: .3}",
    "rejection: {veto: .1, also: [{level: token}]}",
    "parts: {em: 0, format: -1}",
    "{normalize_batch: true, parts: {em: 1}}",
    "{type: distill, kl: {type: k1}}",
    "{type: distill, kl: {type: abs, importance: false}}",
    "{type: dppo, divergence: kl, clip_low: 1.5}",
)


def read(text: str) -> Any:
    return TypeAdapter(AlgorithmSettings).validate_python(yaml.safe_load(text))


@pytest.mark.parametrize("text", REFUSED)
def test_settings_without_effect_or_that_fail_later_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match=REFUSED[text]):
        read(text)


@pytest.mark.parametrize("text", [*ACCEPTED, "{}"])
def test_effective_settings_and_files_with_every_default_are_accepted(text: str) -> None:
    settings = read(text)
    assert read(yaml.safe_dump(settings.model_dump(mode="json"))) == settings


def test_the_largest_seed_of_a_run_seeds_every_rank() -> None:
    largest = RunSettings(seed=(1 << 48) - 1).seed
    torch.manual_seed((largest << 16) + 65535)  # as DeepSpeedEngine does
    for seed in (1 << 48, time.time_ns(), -1):
        with pytest.raises(UserError, match=r"run\.seed"):
            section({"run": {"seed": seed}}, "run", RunSettings)


def test_no_setting_of_any_section_is_infinite() -> None:
    with pytest.raises(UserError, match=r"run\.temperature = inf.*finite"):
        section({"run": {"temperature": float("inf")}}, "run", RunSettings)
    with pytest.raises(UserError, match=r"learner\.optim\.lr = nan"):
        section({"learner": {"optim": {"lr": float("nan")}}}, "learner", LearnerSettings)


def test_a_group_of_one_learns_where_its_turns_are_compared_with_each_other() -> None:
    run = RunSettings(group_size=1)
    require_groups(run, LearnerSettings(algorithm=read("turns: group")))
    for text in ("turns: turn", "turns: 'off'"):
        with pytest.raises(UserError, match="group_size is 1"):
            require_groups(run, LearnerSettings(algorithm=read(text)))
