"""What `test_sharded_loading.py` measures: one rank of a trainer at ZeRO stage 3, alone or with others.

Run as a program it is one rank: `sharded_ranks.py ROLE MODEL OUT`, with the environment of torchrun.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.checkpoint.replay import NoEngines
from learner.config.learner import DiskPublishSettings, TrainerSettings
from learner.data.batch import Batch, build_batch
from learner.engine import DeepSpeedEngine, join_ranks
from learner.engine.deepspeed import import_deepspeed
from learner.interfaces import TrainEngine
from learner.model.loading import load_policy
from learner.trainer.distributed.leader import lead, run_follower
from learner.trainer.reference import build_reference
from learner.trainer.trainer import Trainer
from learner.weights import build_publisher
from protocol.messages import Status, Trajectory, TrajectoryGroup
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support.messages import make_question, policy_segment, prompt_segment

M_MMAP_THRESHOLD = -3
VOCABULARY = 40
SETTINGS: dict[str, Any] = {
    "algorithm": {"type": "grpo", "kl": {"coefficient": 0.05}},
    "optim": {"lr": 1e-2, "eps": 1e-3},
    "model": {"gradient_checkpointing": True},
    "batch": {"row_tokens": 60, "micro_batch_tokens": 60},
    "engine": {"zero_stage": 3},
}


def batch(step: int, engine: TrainEngine) -> Batch:
    """The batch of one step: five groups of three trajectories of 8 to 40 tokens."""
    rng = np.random.default_rng(step)

    def trajectory(reward: float) -> Trajectory:
        ids = rng.integers(4, VOCABULARY, rng.integers(5, 38)).tolist()
        logprobs = np.minimum(-3.5 + 0.3 * rng.standard_normal(len(ids)), 0.0).tolist()
        return Trajectory(
            status=Status.ANSWERED, segments=(prompt_segment([1, 2, 3]), policy_segment(ids, logprobs)), reward=reward
        )

    groups = [
        TrajectoryGroup(
            run="t", seq=s, question=make_question(s), trajectories=tuple(trajectory(r) for r in (1.0, 0.0, 0.3 * s))
        )
        for s in range(1, 6)
    ]
    return build_batch(
        groups,
        engine.algorithm,
        now_step=0,
        lineage=(PolicyVersion(1, 0),),
        max_lag=2,
        settings=TrainerSettings.model_validate(SETTINGS).batch,
        temperature=1.0,
        ranks=engine.world_size,
    )


def drive(engine: TrainEngine, run: RunSettings, out: Path) -> list[float]:
    """Train two steps, publish, save, and train a third step; or resume what was saved, and train the third."""
    state = out / "state"
    found = []
    if state.exists():
        engine.load_state(state)
    else:
        found = [step(engine, n) for n in (0, 1)]
        publisher = build_publisher(DiskPublishSettings(), run, engine.model_files, NoEngines())
        publisher.publish(PolicyVersion(1, 2), engine.iter_weights())
        state.mkdir()
        engine.save_state(state)
    found.append(step(engine, 2))
    weights = {name: tensor.flatten().tolist() for name, tensor in engine.iter_weights()}
    (out / f"weights.{engine.world_size}.json").write_text(json.dumps(weights))
    return [value for pair in found for value in pair]


def step(engine: TrainEngine, number: int) -> tuple[float, float]:
    """Loss and norm."""
    report = engine.train(batch(number, engine))
    assert not report.skipped
    return report.loss, report.grad_norm


def role_train(model: Path, out: Path) -> None:
    """A whole trainer."""
    run = RunSettings(model=model, steps=4, dir=out)
    trainer = Trainer(run, TrainerSettings.model_validate(SETTINGS))
    if trainer.rank:
        run_follower(trainer)
        return
    engine = lead(trainer)
    found = drive(engine, run, out)
    engine.close()
    (out / f"found.{trainer.world_size}.json").write_text(json.dumps(found))


class PeakMemory:
    """Anonymous memory of this process, sampled every millisecond: file pages are shared, and not counted."""

    def __init__(self) -> None:
        self.begin = self.now()
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        """Bytes."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, self.now())

    def taken(self) -> dict[str, int]:
        """Peak and present bytes above the beginning; begins again."""
        now = self.now()
        taken = {"peak": max(self.peak - self.begin, now - self.begin), "held": now - self.begin}
        self.begin = self.peak = now
        return taken

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


def role_memory(model: Path, out: Path) -> None:
    """Load a policy and a reference; with WHOLE set as below stage 3, the whole model on every rank.

    The files have half the width of the model's dtype, so every parameter that is loaded is a private copy, as on a
    GPU. Only adapters are trained, so that the optimiser does not hide what loading takes.
    """
    settings = TrainerSettings.model_validate(
        {
            "model": {"lora": {"rank": 2}},
            "engine": {"zero_stage": 3, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 10_000}}},
            "reference": {"model": str(model)},
        }
    )
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # the heap would keep what was freed
    sharded = "WHOLE" not in os.environ
    import_deepspeed()
    join_ranks()
    load_policy(model / "tiny", settings.model)  # imports
    torch.distributed.barrier()
    memory = PeakMemory()
    policy = load_policy(model, settings.model, sharded=sharded)
    engine = DeepSpeedEngine(
        policy, optim=settings.optim, engine=settings.engine, dtype="float32", total_updates=9, seed=0
    )
    found = {"policy": memory.taken()}
    if sharded:
        reference = build_reference(settings.reference, model, settings.model, engine)
        found["reference"] = memory.taken()
        del reference
    memory.close()
    torch.distributed.barrier()
    (out / f"memory.{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": role_train, "memory": role_memory}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
