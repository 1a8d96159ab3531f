"""A finished step, told: to the terminal, to metrics.jsonl, to the trackers, and into the next snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learner.config import LearnerSettings
from learner.metrics import Meter, StepLog
from learner.progress import StepFacts
from learner.seams import Report
from learner.trackers.base import RunFacts
from learner.trackers.fan import Trackers
from protocol.settings import RunSettings


class Teller:
    """The one place that numbers of a step go through."""

    def __init__(self, meter: Meter, log: StepLog, trackers: Trackers) -> None:
        self._meter, self._log, self._trackers = meter, log, trackers

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
            "length_mean": facts.length,
            "searches_mean": facts.searches,
            "lag_mean": facts.lag_mean,
            "lag_max": facts.lag_max,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "step_s": facts.total_s,
            **more,
        }
        self._meter.put(**values)
        whole = values | {
            "epoch": epoch,
            "time_s": self._meter.uptime_s(),
            "tokens_trained": report.tokens_trained,
            "tokens_generated": facts.sampled,
            "seqs": list(seqs),
            "seconds": {"wait" if cause == "data" else cause: s for cause, s in facts.seconds.items()},
        }
        self._log.append(whole)
        self._trackers.log(facts.step, whole)

    def close(self) -> None:
        """Closes metrics.jsonl and the trackers, which may take a moment to write out what is left."""
        self._log.close()
        self._trackers.close()


def open_trackers(run: RunSettings, settings: LearnerSettings, step: int, epoch: int) -> Trackers:
    """The trackers of a run that goes on after `step`; UserError when one's package is missing."""
    facts = RunFacts.of(run, settings, first_step=step + 1, epoch=epoch)
    return Trackers([tracker.build() for tracker in settings.trackers], facts)
