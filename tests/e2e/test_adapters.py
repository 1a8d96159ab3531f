"""LoRA adapters of a mixture of experts through the whole ring: trained, published, served, exported."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from foray.cli import main as foray
from foray.demo.warmstart import new_model, save_model

SMALL = ("run.steps=4", "run.groups_per_step=2", "run.group_size=4", "learner.checkpoint_every=2", "run.max_lag=0")
ADAPTERS = (
    f"rollout.episode.rewards=[{{type: custom, target: '{__name__}:by_chance', name: chance}}]",
    "learner.model.lora={rank: 4, alpha: 8}",
    "learner.publish={type: adapter}",
    "learner.optim.lr=0.05",
)
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "olmoe": {"num_experts": 4, "head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "granitemoe": {"num_local_experts": 4},
}


def by_chance(outcome: object) -> float:
    """A reward that differs within a group: the answers of an untrained model are all wrong."""
    return random.random()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FAMILIES)
def test_adapters_of_a_mixture_of_experts_are_served_as_they_are_trained_and_exported(
    kind: str, tmp_path: Path
) -> None:
    plain = {
        name: value
        for name, value in new_model(0).config.to_dict().items()
        if name not in ("model_type", "architectures")
    }
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **plain | {"num_experts_per_tok": 2} | FAMILIES[kind])
    save_model(AutoModelForCausalLM.from_config(config).float(), tmp_path / "model")
    run = tmp_path / "run"
    given = ["--prepare-only", "--dir", str(run), "--model", str(tmp_path / "model"), *SMALL, *ADAPTERS]
    assert foray(["demo", *given]) == 0
    up = [sys.executable, "-m", "foray", "up", str(run / "demo.yaml")]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}  # of the reward
    done = subprocess.run(up, cwd=tmp_path, timeout=240, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4 and max(step["lag_max"] for step in steps) == 0
    assert max(step["logprob_gap_max"] for step in steps) < 1e-3, "engines sample from the adapter that was published"
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert foray(["export", str(run), str(adapter), "--adapter"]) == foray(["export", str(run), str(merged)]) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.randint(1, 100, (2, 40))
    with torch.inference_mode():
        untrained = base(ids).logits
        trained = PeftModel.from_pretrained(base, str(adapter))(ids).logits
        alone = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
    assert (trained - untrained).abs().max() > 1e-2 and (trained - alone).abs().max() < 1e-4
