"""A finished step, told: to the terminal, to metrics.jsonl, and into the next snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learner.metrics import Meter, StepLog
from learner.progress import StepFacts
from learner.seams import Report


class Teller:
    """The one place that numbers of a step go through."""

    def __init__(self, meter: Meter, log: StepLog) -> None:
        self._meter, self._log = meter, log

    def step(
        self, facts: StepFacts, seqs: Sequence[int], report: Report, *, epoch: int, more: Mapping[str, float]
    ) -> None:
        """One step. more: numbers of whoever ran it."""
        print(facts.line(), flush=True)
        self._meter.say(bottleneck=facts.bottleneck)
        self._meter.trained(report.tokens_trained)
        values = report.metrics | {
            "step": facts.step,
            "reward_mean": facts.reward,
            "em_mean": facts.em,
            "lag_mean": facts.lag_mean,
            "lag_max": facts.lag_max,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "step_s": facts.total_s,
            **more,
        }
        self._meter.put(**values)
        self._log.append(
            values
            | {
                "epoch": epoch,
                "time_s": self._meter.uptime_s(),
                "tokens_trained": report.tokens_trained,
                "tokens_generated": facts.sampled,
                "seqs": list(seqs),
                "seconds": {"wait" if cause == "data" else cause: s for cause, s in facts.seconds.items()},
            }
        )

    def close(self) -> None:
        """Closes metrics.jsonl."""
        self._log.close()
