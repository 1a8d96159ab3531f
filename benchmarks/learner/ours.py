"""Foray in the learner benchmark: the real Trainer. `python -m benchmarks.learner.ours SPEC LOGIT_CHUNK_MIB [MORE]`.

MORE: JSON, settings over those of `trainer_settings`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from benchmarks.learner.settings import CLIP_HIGH, CLIP_LOW, LearnerBench

if TYPE_CHECKING:
    from learner.config.learner import TrainerSettings


def own_stdout() -> IO[str]:
    """Return the pipe to the parent, and redirect stdout to stderr. Call it before importing libraries that print."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def serve(pipe: IO[str], step: Callable[[], dict[str, float]], tokens: int) -> None:
    """Report that it is ready, then run one step per line until the input ends.

    step    one training step on `tokens` trained tokens; returns its `loss` and `grad_norm`, before the update
    """
    start = peak_mib()
    print(json.dumps({"ready": True}), file=pipe, flush=True)
    for _ in sys.stdin:
        begun, cpu = time.monotonic(), time.process_time()
        figures = step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
        memory = {"start_mib": start, "peak_mib": peak_mib()}
        speed = {"tokens_per_s": tokens / seconds, "seconds": seconds, "cpu_ms_per_token": 1000 * cpu / tokens}
        answer = speed | figures | memory
        print(json.dumps(answer), file=pipe, flush=True)


def peak_mib() -> float:
    """Return the peak memory of this process in MiB: on the GPU if there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    # not getrusage: it inherits the maximum of the parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def trainer_settings(settings: LearnerBench, *, logit_chunk_mib: int, variant: str = "{}") -> TrainerSettings:
    """Return the settings of the step that the other contenders make: their loss has no dual clip."""
    from learner.config.learner import TrainerSettings

    given = json.loads(variant)
    algorithm = {"type": "grpo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "dual_clip": 0}
    return TrainerSettings.model_validate(
        {
            **given,
            "algorithm": algorithm | given.get("algorithm", {}),
            "optim": {"lr": settings.lr},
            "batch": {"row_tokens": settings.row_tokens, "micro_batch_tokens": settings.micro_batch_tokens},
            "model": {
                "dtype": settings.dtype,
                "gradient_checkpointing": settings.gradient_checkpointing,
                "logit_chunk_bytes": logit_chunk_mib << 20,
            },
            # plain DeepSpeed keeps no float32 weights beside bfloat16 ones
            "engine": {"zero_stage": 0 if settings.dtype == "float32" else 1, "threads": settings.threads},
        }
    )


def main(argv: Sequence[str]) -> None:
    """Serve until the input ends."""
    pipe = own_stdout()
    from benchmarks.learner.workload import our_batch, utilisation
    from learner.trainer.trainer import Trainer
    from protocol.settings import RunSettings

    spec = json.loads(Path(argv[0]).read_text())
    settings = LearnerBench.model_validate(spec["settings"])
    batch = our_batch(settings, settings.row_tokens, settings.micro_batch_tokens)
    run = RunSettings(model=Path(spec["model"]), steps=settings.rounds + 1)
    trainer = Trainer(run, trainer_settings(settings, logit_chunk_mib=int(argv[1]), variant=next(iter(argv[2:]), "{}")))
    measured = utilisation(settings, Path(spec["model"]), batch)

    def step() -> dict[str, float]:
        report = trainer.train(batch)
        if report.skipped:
            raise RuntimeError(f"the step was skipped: {report.reason}")
        return {"loss": report.loss, "grad_norm": report.grad_norm, **measured(report.seconds)}

    try:
        serve(pipe, step, batch.num_tokens)
    finally:
        trainer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
