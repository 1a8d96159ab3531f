"""What `test_trainer_ranks.py` compares: the whole training step, alone or as one of two ranks of gloo.

Run as a program it is one rank: `rank_pair.py MODEL GROUPS OUT`, with the environment of torchrun.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from learner.config.learner import TrainerSettings
from learner.data.batch import build_batch
from learner.trainer.trainer import Trainer
from protocol.codec import decode_as
from protocol.messages import TrajectoryGroup
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

STEPS = 2
OPTIM = {"lr": 1e-2, "eps": 1e-3}
"""With a large eps a step follows the gradient's size: a wrong scale shows, and rounding is not blown up."""
CASES: dict[str, dict[str, Any]] = {
    "grpo, stage 0": {"algorithm": {"type": "grpo", "kl": {"coefficient": 0.02}}},
    "grpo, stage 1": {"algorithm": {"type": "grpo", "kl": {"coefficient": 0.02}}, "engine": {"zero_stage": 1}},
    "grpo, stage 2": {"algorithm": {"type": "grpo", "kl": {"coefficient": 0.02}}, "engine": {"zero_stage": 2}},
    "grpo, stage 3": {"algorithm": {"type": "grpo", "kl": {"coefficient": 0.02}}, "engine": {"zero_stage": 3}},
    "ppo, stage 2": {
        "algorithm": {"type": "ppo", "gamma": 0.97, "lam": 0.9, "kl": {"coefficient": 0.02}, "minibatches": 2},
        "engine": {"zero_stage": 2},
    },
    "reinforce_pp, stage 1": {
        "algorithm": {"type": "reinforce_pp", "gamma": 0.97, "kl": {"coefficient": 0.1, "target": 0.01}},
        "engine": {"zero_stage": 1},
    },
    "gspo, stage 2": {"algorithm": {"type": "gspo", "epochs": 2}, "engine": {"zero_stage": 2}},
    "ema_pg, stage 3": {
        "algorithm": {"type": "ema_pg", "kl": {"coefficient": 0.05, "top": 4}},
        "reference": {"kind": "ema", "every": 1, "tau": 0.5},
        "engine": {"zero_stage": 3},
    },
    "reinforce, normalized weights": {
        "algorithm": {"type": "reinforce", "correction": {"normalize": True, "level": "sequence", "high": 2}},
    },
    "dppo, what spans the batch": {
        "algorithm": {
            "type": "dppo",
            "old_logprobs": "recompute",
            "parts": {"one": 1.0, "two": -0.5},
            "normalize_batch": True,
            "rejection": {"measure": "k3", "level": "mean", "high": 0.1, "second_moment": 0.008},
            "drift_coefficient": 0.1,
            "minibatches": 2,
            "preserve": {"coefficient": 0.2, "gate": "trajectory"},
        },
    },
    "lora, stage 2": {"model": {"lora": {"rank": 4}}, "engine": {"zero_stage": 2}},
}


def measure(model: Path, groups: list[TrajectoryGroup], case: str) -> dict[str, Any]:
    """Losses, norms and metrics of STEPS steps, and the weights after them."""
    given = {"optim": OPTIM, "critic": {"optim": OPTIM}, "batch": {"micro_batch_tokens": 24}} | CASES[case]
    settings = TrainerSettings.model_validate(given)
    trainer = Trainer(RunSettings(model=model, steps=4), settings)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "metrics": []}
    per_step = len(groups) // STEPS
    for step in range(STEPS):
        batch = build_batch(
            groups[step * per_step : (step + 1) * per_step],
            trainer.algorithm,
            now_step=0,
            lineage=(PolicyVersion(1, 0),),
            max_lag=2,
            settings=settings.batch,
            temperature=1.0,
            ranks=trainer.world_size,
        )
        report = trainer.train(batch)
        found["loss"].append(report.loss)
        found["grad_norm"].append(report.grad_norm)
        found["metrics"].append(report.metrics)
    found["weights"] = {name: tensor.flatten().tolist() for name, tensor in trainer.iter_weights()}
    return found


def read_groups(path: Path) -> list[TrajectoryGroup]:
    """Encoded groups, one a line, in hexadecimal."""
    return [decode_as(TrajectoryGroup, bytes.fromhex(line)) for line in path.read_text().split()]


def main(model: str, groups: str, out: str) -> None:
    """One rank: every case, in one process group."""
    torch.set_num_threads(1)
    given = read_groups(Path(groups))
    found = {case: measure(Path(model), given, case) for case in CASES}
    Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
