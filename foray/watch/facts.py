"""The figures of a run in words, as `foray status`, `foray top` and the report show them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deploy.run.snapshot import RunSnapshot
from foray.watch.status import letters_line, seq_balance, step_line, throughput, token_balance
from protocol.messages import MetricsSnapshot

TRENDS = {
    "tokens/s": "tokens_generated_per_s",
    "reward": "reward_mean",
    "exact match": "reward/em",
    "lag": "lag_mean",
}
"""Fact -> the field of `metrics.jsonl` whose recent values are drawn after it."""


def facts(snapshot: RunSnapshot, *, max_lag: int, searches: Mapping[str, float] | None = None) -> dict[str, str]:
    """Return name -> text. `searches`: counters of the retrievers, if they were asked."""
    return dict(_facts(snapshot, max_lag, searches or {}))


def trends(snapshot: RunSnapshot) -> dict[str, list[float]]:
    """Return the values of the recent steps by the name of their fact."""
    return {name: snapshot.history.values(metric) for name, metric in TRENDS.items()}


def _facts(snapshot: RunSnapshot, max_lag: int, searches: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    rollouts, values = snapshot.of("rollout"), snapshot.figures
    yield "step", f"{step_line(snapshot).removeprefix('step ')}, weights {_weights(snapshot)}"
    yield "tokens/s", _tokens_line(snapshot)
    yield "reward", f"{_of(values, 'reward_mean')} trained, {_mean(rollouts, 'reward_mean')} generated"
    if "reward/em" in values or any("reward/em" in p.values for p in rollouts):
        yield "exact match", f"{_of(values, 'reward/em')} trained, {_mean(rollouts, 'reward/em')} generated"
    if "lag_mean" in values:
        yield "lag", f"mean {values['lag_mean']:.2f}, max {values.get('lag_max', 0.0):.0f} (bound {max_lag})"
    if snapshot.evaluations:
        still = " (new weights wait for it)" if snapshot.learner and snapshot.pinned_evaluations else ""
        yield "evaluation", f"{snapshot.evaluations} running{still}"
    if rollouts:
        in_flight = sum(p.values.get("groups_in_flight", 0.0) for p in rollouts)
        flying = sum(p.values.get("trajectories_in_flight", 0.0) for p in rollouts)
        yield "in flight", f"{in_flight:.0f} groups, {flying:.0f} trajectories"
    if snapshot.now:
        tasks, groups = snapshot.tasks, snapshot.traj
        text = f"tasks {tasks.waiting} waiting, {tasks.held} leased; "
        yield "streams", f"{text}groups {groups.waiting} ready, {groups.held} until the next checkpoint"
    balance = seq_balance(snapshot)
    yield "ledger", f"{balance.line()}{f' ({balance.source})' if balance.source else ''}"
    if tokens := token_balance(snapshot):
        yield "tokens", tokens.line()
    yield "dead letters", letters_line(snapshot)
    if rollouts:
        yield "search", _search_line(rollouts, searches)


def _weights(snapshot: RunSnapshot) -> str:
    if snapshot.target:
        return snapshot.target.version.label
    return f"{snapshot.totals.epoch}.{snapshot.totals.step} (checkpoint)" if snapshot.totals else "none yet"


def _tokens_line(snapshot: RunSnapshot) -> str:
    rates = throughput(snapshot)
    past = f" (mean of the last {rates.steps} steps)" if rates.steps else ""
    return f"{_number(rates.generated)} generated, {_number(rates.trained)} trained{past}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _search_line(rollouts: Sequence[MetricsSnapshot], searches: Mapping[str, float]) -> str:
    asked = sum(p.values.get("searches", 0.0) for p in rollouts)
    errors = sum(p.values.get("search_errors", 0.0) for p in rollouts)
    line = f"{asked:,.0f} searches, {errors:,.0f} failed"
    queries = searches.get("foray_retriever_queries_total")
    return f"{line}; retrievers answered {queries:,.0f} queries" if queries is not None else line


def _of(values: Mapping[str, float], name: str) -> str:
    return f"{values[name]:.3f}" if name in values else "-"


def _mean(found: Sequence[MetricsSnapshot], name: str) -> str:
    values = [p.values[name] for p in found if name in p.values]
    return f"{sum(values) / len(values):.3f}" if values else "-"
