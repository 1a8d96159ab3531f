"""A finished step, told: to the terminal, to metrics.jsonl, to the trackers, and into the next snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learner.config import LearnerSettings
from learner.measuring import group_lags, group_metrics, token_lags
from learner.metrics import Meter, StepLog
from learner.progress import bottleneck, step_line
from learner.seams import Report
from learner.trackers.base import RunFacts
from learner.trackers.fan import Trackers
from protocol.messages import TrajectoryGroup
from protocol.settings import RunSettings


class Teller:
    """The one place that numbers of a step go through: the same names everywhere (`docs/observability.md`)."""

    def __init__(self, meter: Meter, log: StepLog, trackers: Trackers, *, steps: int) -> None:
        self._meter, self._log, self._trackers, self._steps = meter, log, trackers, steps

    def step(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        report: Report,
        lap: tuple[float, Mapping[str, float]],
        *,
        now_step: int,
        epoch: int,
        more: Mapping[str, float],
    ) -> None:
        """One step.

        groups    trained in it, without those that were mixed in
        lap       its seconds, whole and by cause
        now_step  of the policy before the update
        more      numbers of the caller
        """
        step_s, by_cause = lap
        self._meter.trained(report.tokens_trained, len(groups))
        for lag in group_lags(groups, now_step):
            self._meter.observe("group_lag_steps", lag)
        for lag, tokens in token_lags(groups, now_step).items():
            self._meter.observe("token_lag_steps", lag, tokens)
        values = report.metrics | group_metrics(groups, now_step)
        rate = 1 / max(step_s, 1e-9)
        values |= {
            "step": step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "step_s": step_s,
            "groups_per_s": len(groups) * rate,
            "trajectories_per_s": sum(len(g.trajectories) for g in groups) * rate,
            **more,
        }
        self._meter.put_step(values)
        generated = self._meter.generated_per_s
        whole = values | {
            "epoch": epoch,
            "time_s": self._meter.uptime_s(),
            "tokens_trained": report.tokens_trained,
            "tokens_generated": sum(t.num_sampled for g in groups for t in g.trajectories),
            **({} if generated is None else {"tokens_generated_per_s": generated}),
            "seqs": [group.seq for group in groups],
            "seconds": {"wait" if cause == "data" else cause: s for cause, s in by_cause.items()},
        }
        print(step_line(whole, steps=self._steps), flush=True)
        self._meter.say(bottleneck=bottleneck(whole))
        self._log.append(whole)
        self._trackers.log(step, whole)

    def close(self) -> None:
        """Closes metrics.jsonl and the trackers, which may take a moment to write out what is left."""
        self._log.close()
        self._trackers.close()


def open_trackers(run: RunSettings, settings: LearnerSettings, step: int, epoch: int) -> Trackers:
    """The trackers of a run that goes on after `step`; UserError when one's package is missing."""
    facts = RunFacts.of(run, settings, first_step=step + 1, epoch=epoch)
    return Trackers([tracker.build() for tracker in settings.trackers], facts)
