"""Ours in the learner benchmark: the real Trainer. `python -m deploy.bench.learner_ours SPEC LOGIT_CHUNK_MIB`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> None:
    """Serve until the input ends."""
    from deploy.bench.learner_child import own_stdout, serve

    pipe = own_stdout()
    from deploy.bench.learner import LearnerBench
    from deploy.bench.learner_flops import utilisation
    from deploy.bench.learner_work import our_batch
    from learner.config_trainer import TrainerSettings
    from learner.trainer import Trainer
    from protocol.settings import RunSettings

    spec = json.loads(Path(argv[0]).read_text())
    settings = LearnerBench.model_validate(spec["settings"])
    batch = our_batch(settings, settings.row_tokens, settings.micro_batch_tokens)
    trainer = Trainer(
        RunSettings(model=Path(spec["model"]), steps=settings.rounds + 1),
        TrainerSettings.model_validate(
            {
                "optim": {"lr": settings.lr},
                "batch": {"row_tokens": settings.row_tokens, "micro_batch_tokens": settings.micro_batch_tokens},
                "model": {
                    "dtype": settings.dtype,
                    "gradient_checkpointing": settings.gradient_checkpointing,
                    "logit_chunk_bytes": int(argv[1]) << 20,
                },
                # plain DeepSpeed keeps no float32 weights beside bfloat16 ones
                "engine": {"zero_stage": 0 if settings.dtype == "float32" else 1, "threads": settings.threads},
            }
        ),
    )
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
