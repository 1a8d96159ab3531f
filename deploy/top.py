"""The live table of a run: one frame from one observation, with rates from the change since the frame before. Pure
but for reading the retrievers' `/metrics`.

"Who waits for whom" is the point: every process counts the seconds it stood waiting, by cause. The share of the last
interval says which part of the ring is the narrow one.
"""

from __future__ import annotations

import re
import urllib.error
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from deploy.asking import ask
from deploy.delivery import letters_line, token_law
from deploy.observe import Observation
from deploy.status import conservation, problems, state
from protocol.messages import MetricsSnapshot

IN_WORDS = {
    ("learner", "data"): "the learner waits for trajectories: generation is the narrow part (add engines)",
    ("learner", "publish"): "the learner waits while it publishes weights",
    ("learner", "checkpoint"): "the learner waits while it writes a checkpoint",
    ("learner", "redis"): "the learner waits for Redis",
    ("learner", "compute"): "the learner computes: training is the narrow part",
    ("rollout", "credit"): "rollout servers wait for tasks: the learner is the narrow part (max_lag bounds them)",
    ("rollout", "engine"): "rollout servers wait for engines",
    ("rollout", "retriever"): "rollout servers wait for the retriever",
    ("rollout", "backlog"): "rollout servers lease nothing: turns wait for engines",
    ("rollout", "redis"): "rollout servers wait for Redis",
    ("node", "eval"): "engines wait with new weights for an evaluation to end",
}
_METRIC = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})? (\S+)")


@dataclass(frozen=True)
class Row:
    """One line of a table: a name and its cells, as they are printed."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Frame:
    """Everything one look shows, as text."""

    title: str
    facts: tuple[tuple[str, str], ...]
    engines: tuple[Row, ...]
    waits: tuple[str, ...]
    problems: tuple[str, ...]

    def plain(self) -> str:
        """The frame without colours or control codes."""
        width = max(len(name) for name, _ in self.facts)
        lines = [self.title, *(f"  {name:<{width}}  {text}" for name, text in self.facts)]
        lines += ["", *table(ENGINE_COLUMNS, self.engines)]
        lines += ["", "  who waits for whom", *(f"    {line}" for line in self.waits or ("nothing was measured yet",))]
        if self.problems:
            lines += ["", *(f"  problem: {text}" for text in self.problems)]
        return "\n".join(lines)


ENGINE_COLUMNS = ("engine", "state", "version", "running", "waiting", "tok/s", "updates", "cache")


def table(columns: tuple[str, ...], rows: Iterable[Row]) -> list[str]:
    """Aligned lines: the header, then a line a row."""
    cells = [columns, *((row.name, *row.cells) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]


def frame(
    seen: Observation,
    before: Observation | None,
    searches: Mapping[str, float],
    *,
    max_lag: int,
    last: Mapping[str, float] = MappingProxyType({}),
) -> Frame:
    """What to show of `seen`; `before` is the look that precedes it, for rates and shares of the time between.

    last  the learner's figures of its last step, for when it reports no more
    """
    learner, rollouts = seen.learner, seen.of("rollout")
    target = seen.target.version.label if seen.target else "none yet"
    values = learner.values if learner else last
    generated = sum(p.values.get("tokens_generated_per_s", 0.0) for p in rollouts)
    in_flight = sum(p.values.get("groups_in_flight", 0.0) for p in rollouts)
    flying = sum(p.values.get("trajectories_in_flight", 0.0) for p in rollouts)
    facts = [
        ("step", f"{values.get('step', 0):.0f} of {values.get('steps', 0):.0f}, weights {target}"),
        ("tokens/s", f"{generated:,.0f} generated, {values.get('tokens_trained_per_s', 0.0):,.0f} trained"),
        ("reward", f"{_of(values, 'reward_mean')} trained, {_mean(rollouts, 'reward_mean')} generated"),
        ("exact match", f"{_of(values, 'reward/em')} trained, {_mean(rollouts, 'reward/em')} generated"),
        ("lag", f"mean {values.get('lag_mean', 0.0):.2f}, max {values.get('lag_max', 0.0):.0f} (bound {max_lag})"),
        ("in flight", f"{in_flight:.0f} groups, {flying:.0f} trajectories"),
        (
            "streams",
            f"tasks {seen.tasks.waiting} waiting, {seen.tasks.held} leased; groups {seen.traj.waiting} ready, "
            f"{seen.traj.held} until the next checkpoint",
        ),
        ("ledger", conservation(seen).line()),
        *((("tokens", law.line()),) if (law := token_law(seen)) else ()),
        ("dead letters", letters_line(seen)),
        ("search", _search_line(rollouts, searches)),
    ]
    engines = tuple(
        Row(
            e.id,
            (
                str(e.state),
                e.version.label,
                str(e.running),
                str(e.waiting),
                f"{e.tokens_per_s:,.0f}",
                str(e.updates),
                f"{e.token_usage:.0%}",
            ),
        )
        for e in seen.engines
    )
    wrong = tuple(f"{p.what} -> {p.todo}" for p in problems(seen, max_lag=max_lag))
    return Frame(f"run {seen.run}: {state(seen)}", tuple(facts), engines, tuple(waits_in_words(seen, before)), wrong)


def waits_in_words(seen: Observation, before: Observation | None) -> list[str]:
    """Sentences with the share of time each kind of process stood waiting, the largest first; below 5 % is left out.

    The share is of the time between the two looks (of the whole life of a process that was not there before), as a
    mean over the processes of a kind; one that waits for several things at once may pass 100 %.
    """
    earlier = {(p.process, p.id): p for p in before.processes} if before else {}
    shares: dict[tuple[str, str], list[float]] = {}
    for now in seen.processes:
        old = earlier.get((now.process, now.id))
        # a process that was restarted under its name counts from zero again
        old = old if old is not None and old.uptime_s < now.uptime_s else None
        seconds = now.uptime_s - (old.uptime_s if old else 0.0)
        for cause, total in now.waits.items():
            waited = total - (old.waits.get(cause, 0.0) if old else 0.0)
            shares.setdefault((now.process, cause), []).append(waited / seconds if seconds > 0 else 0.0)
    means = {key: sum(found) / len(found) for key, found in shares.items()}
    ranked = sorted((item for item in means.items() if item[1] >= 0.05), key=lambda item: -item[1])
    return [f"{share:4.0%}  {IN_WORDS.get(key, f'{key[0]} waits for {key[1]}')}" for key, share in ranked]


def read_searches(urls: Iterable[str], *, timeout_s: float = 0.5) -> dict[str, float]:
    """Sums of the retrievers' own counters by name; a retriever that does not answer is left out."""
    totals: dict[str, float] = {}
    for url in urls:
        try:
            with ask(f"{url}/metrics", "viewer", "node", "operator", timeout_s=timeout_s) as response:
                text = response.read(1 << 20).decode(errors="replace")
        except (urllib.error.URLError, OSError):
            continue
        for line in text.splitlines():
            found = _METRIC.match(line)
            if found and found[1].startswith("foray_retriever"):
                totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    return totals


def _search_line(rollouts: tuple[MetricsSnapshot, ...], searches: Mapping[str, float]) -> str:
    asked = sum(p.values.get("searches", 0.0) for p in rollouts)
    errors = sum(p.values.get("search_errors", 0.0) for p in rollouts)
    line = f"{asked:,.0f} searches, {errors:,.0f} failed"
    queries = searches.get("foray_retriever_queries_total")
    return f"{line}; retrievers answered {queries:,.0f} queries" if queries is not None else line


def _of(values: Mapping[str, float], name: str) -> str:
    return f"{values[name]:.3f}" if name in values else "-"


def _mean(found: tuple[MetricsSnapshot, ...], name: str) -> str:
    values = [p.values[name] for p in found if name in p.values]
    return f"{sum(values) / len(values):.3f}" if values else "-"
