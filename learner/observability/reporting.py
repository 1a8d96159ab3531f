"""Reports each finished step to the terminal, metrics.jsonl, the trackers and the next snapshot."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from learner.config.learner import LearnerSettings
from learner.data.sampler import Sampler
from learner.delivery.audit import AccountingAudit
from learner.delivery.dead_letters import LEARNER_ID
from learner.delivery.entry import StreamEntry
from learner.delivery.identity import location_facts
from learner.delivery.lease import LearnerLease
from learner.delivery.state import DeliveryState
from learner.interfaces import StepReport
from learner.observability.metrics import Meter, StepLog
from learner.observability.trackers import build_tracker
from learner.observability.trackers.base import TABLE_ROWS, Cell, Decode, RunInfo, StepDetail, decoder, table_rows
from learner.observability.trackers.fanout import Trackers
from protocol.ledger import Outcome
from protocol.messages import MetricsSnapshot, Owner, Status, Trajectory, TrajectoryGroup
from protocol.run_meta import RunMeta, tokenizer_digest
from protocol.runtime.tracing import Tracer
from protocol.settings import RunSettings
from protocol.staleness import lag
from protocol.versions import PolicyVersion

SHARED = ("group_size", "groups_per_step", "max_lag", "steps", "temperature", "top_p", "top_k", "seed")
"""Settings of the run that all processes must share."""
WORDS = {
    "wait": "learner waits for rollouts",
    "compute": "rollouts wait for the learner",
    "publish": "publishing weights",
    "checkpoint": "writing a checkpoint",
    "redis": "waiting for Redis",
}
"""Keys: names of `seconds` in `metrics.jsonl`."""
THOUGHTS = 64
"""Trajectories of a step whose thoughts are decoded: at most some ten milliseconds."""
BALANCED = 0.5
"""Below this share of the step, no single cause is called the bottleneck."""
UNREPORTED = {"taken", "excess"}
"""Counters that only check others."""
SHOWN = {
    "reward_mean": ".3f",
    "reward/em": ".3f",
    "response_length_mean": ".0f",
    "searches_mean": ".1f",
    "lag_mean": ".1f",
    "lag_max": ".0f",
}
"""Fields of `metrics.jsonl` in the line of a step; unmeasured fields are omitted."""


def snapshot_source(
    run: RunSettings, delivery: DeliveryState, lease: LearnerLease, meter: Meter, audit: AccountingAudit
) -> Callable[[], MetricsSnapshot]:
    """Return a thread-safe function that returns the current snapshot."""

    def snapshot() -> MetricsSnapshot:
        with delivery.lock:
            counts = delivery.ledger.counts
            values = {
                **{str(outcome): counts[outcome] for outcome in Outcome},
                "step": delivery.step,
                "steps": run.steps,
                "epoch": lease.epoch,
                "groups_trained": counts[Outcome.TRAINED],
                "issued": delivery.issued,
                "settled": delivery.ledger.settled,
                "watermark": delivery.ledger.watermark,
                "in_flight": delivery.ledger.open(delivery.issued),
                "held": len(delivery.pending),
                **{name: count for name, count in vars(delivery.counters).items() if name not in UNREPORTED},
                **audit.values(),
                **delivery.filtered_counts(),
            }
        return meter.snapshot(LEARNER_ID, **values)

    return snapshot


def group_metrics(groups: Sequence[TrajectoryGroup], now_step: int) -> dict[str, float]:
    """Return the rollout metrics of a step from all its groups, before packing and before splitting over ranks.

    now_step  of the policy that is trained on them, before its update

    Means are over all trajectories, those of rewards over the valid ones. Unmeasured values (a reward of some name, a
    token of the policy) are omitted, never 0; without trajectories the result is empty.
    """
    everyone = [t for g in groups for t in g.trajectories]
    if not everyone:
        return {}
    valid = [t for t in everyone if t.status.is_valid]
    values = {f"status/{status}": _mean([t.status is status for t in everyone]) for status in Status}
    for name, of_each in {
        "response_length": [t.num_sampled for t in everyone],
        "trajectory_length": [sum(len(s.ids) for s in t.segments) for t in everyone],
        "turns": [t.turns for t in everyone],
        "searches": [t.searches for t in everyone],
        "group_lag": group_lags(groups, now_step),
    }.items():
        if of_each:  # a group without a sampled token has no lag
            values |= {f"{name}_mean": _mean(of_each), f"{name}_max": float(max(of_each))}
    turns = [[s.ids.tobytes() for s in t.segments if s.owner is Owner.POLICY] for t in everyone]
    if any(turns):
        values["turns_repeated"] = 1 - sum(len(set(of_one)) for of_one in turns) / sum(map(len, turns))
    values["tool_errors_mean"] = _mean([sum(bool(s.error) for s in t.segments) for t in everyone])
    values["invalid_actions_mean"] = _mean([_invalid_actions(t) for t in everyone])
    if valid:
        rewards = [t.reward for t in valid]
        values |= {"reward_mean": _mean(rewards), "reward_std": float(np.std(np.asarray(rewards, np.float64)))}
    for part in sorted({name for t in valid for name in t.rewards}):
        values[f"reward/{part}"] = _mean([t.rewards[part] for t in valid if part in t.rewards])
    return values | _by_source(groups)


def thought_metrics(groups: Sequence[TrajectoryGroup], decode: Decode) -> dict[str, float]:
    """Return the shares of thoughts that are empty, or repeat an earlier one of their trajectory, in the first
    trajectories of at most THOUGHTS groups. A thought is a turn's text up to `</think>`; empty if no turn has one.
    """
    total, empty, repeated = 0, 0, 0
    for one in (g.trajectories[0] for g in groups[:THOUGHTS] if g.trajectories):
        texts = [decode(s.ids.tolist()).partition("</think>") for s in one.segments if s.owner is Owner.POLICY]
        found = [before.replace("<think>", "").strip() for before, end, _ in texts if end]
        written = [thought for thought in found if thought]
        total, empty = total + len(found), empty + len(found) - len(written)
        repeated += len(written) - len(set(written))
    return {"thoughts_empty": empty / total, "thoughts_repeated": repeated / total} if total else {}


def _by_source(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the number of groups of each data set, and the means of its rewards over the valid trajectories."""
    values: dict[str, float] = {}
    for source in sorted({g.question.source for g in groups} - {""}):
        here = [g for g in groups if g.question.source == source]
        values[f"source_groups/{source}"] = float(len(here))
        valid = [t for g in here for t in g.trajectories if t.status.is_valid]
        if valid:
            values[f"source_reward/{source}"] = _mean([t.reward for t in valid])
        for part in sorted({name for t in valid for name in t.rewards}):
            scores = [t.rewards[part] for t in valid if part in t.rewards]
            values[f"source_reward_part/{source}/{part}"] = _mean(scores)
    return values


def group_lags(groups: Sequence[TrajectoryGroup], now_step: int) -> list[int]:
    """Return the steps from each group's oldest version to `now_step`; groups without sampled tokens are omitted."""
    return [lag(now_step, first) for g in groups if (first := g.first_version()) is not None]


def token_lags(groups: Sequence[TrajectoryGroup], now_step: int) -> dict[int, int]:
    """Return lag in steps -> number of the policy's tokens with that lag."""
    found: Counter[int] = Counter()
    for span in (span for g in groups for t in g.trajectories for s in t.segments for span in s.spans):
        found[lag(now_step, span.version)] += span.end - span.start
    return dict(found)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(np.asarray(list(values), np.float64)))


def _invalid_actions(trajectory: Trajectory) -> int:
    """Return the number of turns without a valid action: no query and no tool call."""
    return sum(s.owner is Owner.ENVIRONMENT and not s.query and not s.tool for s in trajectory.segments)


def summary(delivery: DeliveryState) -> str:
    """Return the accounting by seq and by token in one line, for the end of a run."""
    counts = ", ".join(f"{delivery.ledger.counts[outcome]} {outcome}" for outcome in Outcome)
    tokens = ", ".join(f"{number} {bucket}" for bucket, number in delivery.accounting.totals.items())
    return (
        f"{delivery.issued} seqs issued = {counts}, 0 in flight; {delivery.counters.duplicates} duplicates suppressed; "
        f"{delivery.accounting.generated} tokens generated = {tokens}"
    )


def run_meta(run: RunSettings, sampler: Sampler, lineage_id: str) -> RunMeta:
    """Return the metadata on which all processes of the run must agree."""
    try:
        tokenizer = tokenizer_digest((run.model / "tokenizer.json").read_bytes())
    except OSError:  # a model without a tokenizer: nothing to compare
        tokenizer = ""
    facts = {name: str(getattr(run, name)) for name in SHARED} | {"run": run.id, "foray": version("foray")}
    facts |= location_facts(run) | {"questions": sampler.questions.fingerprint[:16]}
    return RunMeta(tokenizer=tokenizer, facts=facts, lineage_id=lineage_id)


def step_line(record: Mapping[str, Any], *, steps: int) -> str:
    """Return the line for the terminal of one record of `metrics.jsonl`; missing or null fields are omitted."""
    parts = [f"step {int(record['step']):>{len(str(steps))}}/{steps}"]
    parts += [f"{name} {record[name]:{how}}" for name, how in SHOWN.items() if record.get(name) is not None]
    generated, total_s = record.get("tokens_generated_per_s"), record.get("step_s") or 0.0
    if generated is not None:
        parts.append(f"generated {_short(generated)} tok/s")
    if total_s:
        trained = (record.get("tokens_trained") or 0) / total_s
        parts += [f"trained {_short(trained)} tok/s", f"{total_s:.1f} s", bottleneck(record)]
    return "  ".join(part for part in parts if part)


def bottleneck(record: Mapping[str, Any]) -> str:
    """Return the bottleneck as text; "" in a replay, which never waits."""
    seconds = {name: s or 0.0 for name, s in (record.get("seconds") or {}).items() if name in WORDS}
    if "wait" not in seconds:
        return ""
    cause = max(seconds, key=lambda name: seconds[name])
    share = seconds.get(cause, 0.0) / max(record.get("step_s") or 0.0, 1e-9)
    return f"{WORDS[cause]} ({share:.0%})" if share >= BALANCED else "balanced"


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


class StepReporter:
    """Reports the metrics of a step everywhere, under the same names (`docs/metrics.md`)."""

    def __init__(
        self,
        meter: Meter,
        log: StepLog,
        trackers: Trackers,
        *,
        steps: int,
        model: Path,
        tracer: Tracer | None = None,
    ) -> None:
        self._meter, self._log, self._trackers = meter, log, trackers
        self._steps, self._model = steps, model
        self._tracer = tracer or Tracer()

    def step(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        report: StepReport,
        lap: tuple[float, Mapping[str, float]],
        *,
        now_step: int,
        epoch: int,
        more: Mapping[str, float],
    ) -> None:
        """Report one step.

        groups    groups trained in it, without mixed-in ones
        lap       its seconds, in total and by cause
        now_step  step of the policy before the update
        more      further values of the caller
        """
        step_s, by_cause = lap
        self._meter.trained(report.tokens_trained, len(groups))
        for steps in group_lags(groups, now_step):
            self._meter.observe("group_lag_steps", steps)
        for steps, tokens in token_lags(groups, now_step).items():
            self._meter.observe("token_lag_steps", steps, tokens)
        values = report.metrics | group_metrics(groups, now_step) | thought_metrics(groups, decoder(self._model))
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
        self._meter.set_step(values)
        whole = values | {
            "epoch": epoch,
            "time_s": self._meter.uptime_s(),
            "tokens_trained": report.tokens_trained,
            "tokens_generated": sum(t.num_sampled for g in groups for t in g.trajectories),
            "seqs": [group.seq for group in groups],
            "seconds": {"wait" if cause == "data" else cause: s for cause, s in by_cause.items()},
        }
        print(step_line(whole, steps=self._steps), flush=True)
        self._meter.set_text(bottleneck=bottleneck(whole))
        self._log.append(whole)
        self._trackers.log(step, whole, self._detail(step, groups, now_step) if self._trackers else None)

    def _detail(self, step: int, groups: Sequence[TrajectoryGroup], now_step: int) -> StepDetail:
        def rows(count: int) -> list[list[Cell]]:
            return table_rows(groups, step, now_step, decoder(self._model), count)

        return StepDetail(token_lags(groups, now_step), rows)

    def trace(self, entries: Sequence[StreamEntry], taken_s: float, report: StepReport, version: PolicyVersion) -> None:
        """Record the last stages of the groups' traces: their batch, taken at `taken_s`, and the step that trained it.

        version  of the policy after the step
        """
        if not self._tracer.on:
            return
        now = time.time()
        for entry in entries:
            place = entry.seq, entry.message.attempt
            self._tracer.record("batch", *place, min(entry.published_s, taken_s), taken_s, groups=len(entries))
            self._tracer.record("step", *place, taken_s, now, version=version.label, skipped=report.reason)
        self._meter.set(**{name: read() for name, read in self._tracer.counts().items()})

    def validating(self, step: int, ended: int, total: int) -> None:
        """Show the progress of a validation in snapshots; `total` 0: none is in progress. Thread-safe."""
        self._meter.set_text(validating=f"step {step}: {ended} of {total} episodes" if total else "")

    def show_validation(self, step: int, text: str, suites: Mapping[str, Mapping[str, float]]) -> None:
        """Show the last validation in snapshots."""
        self._meter.set(**validation_values(step, suites))
        self._meter.set_text(validation=text)

    def validated(self, step: int, validated: int, text: str, suites: Mapping[str, Mapping[str, float]]) -> None:
        """Report a finished validation, of the policy after step `validated`, during step `step`."""
        print(f"validation of {text}", flush=True)
        self._trackers.log(step, validation_values(validated, suites))

    def close(self) -> None:
        """Close metrics.jsonl, the trackers and the traces, which may take a moment to flush."""
        self._log.close()
        self._trackers.close()
        self._tracer.close()


def validation_values(step: int, suites: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a validation by the names in `metric_table`."""
    means = {f"validation/{suite}/{name}": value for suite, found in suites.items() for name, value in found.items()}
    return means | {"validation_step": float(step)}


def open_trackers(run: RunSettings, settings: LearnerSettings, step: int, epoch: int) -> Trackers:
    """Return the trackers of a run that continues after `step`. Raises UserError if a tracker's package is missing."""
    facts = RunInfo.of(run, settings, first_step=step + 1, epoch=epoch)
    tables = [(tracker.table_every, TABLE_ROWS) for tracker in settings.trackers]
    return Trackers([build_tracker(tracker) for tracker in settings.trackers], facts, tables)
