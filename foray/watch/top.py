"""The live table of a run: a frame is made from one snapshot, with rates relative to an earlier one. Pure except for
reading the retrievers' `/metrics`.

Every process counts the seconds it waits, by cause. The shares of the last seconds show which part of the ring is the
bottleneck.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException

from deploy.run.snapshot import RunSnapshot
from deploy.terminal import aligned, sparkline, wrapped
from foray.watch.facts import facts, trends
from foray.watch.status import problems, state
from learner.delivery.autoscale import wait_shares
from protocol.runtime.http.client import ask

IN_WORDS = {
    ("learner", "data"): "the learner waits for trajectories: generation is the bottleneck (add engines)",
    ("learner", "publish"): "the learner waits while it publishes weights",
    ("learner", "checkpoint"): "the learner waits while it writes a checkpoint",
    ("learner", "redis"): "the learner waits for Redis",
    ("learner", "compute"): "the learner computes: training is the bottleneck",
    ("rollout", "credit"): "rollout servers wait for tasks: the learner is the bottleneck (at the max_lag bound)",
    ("rollout", "learner"): "rollout servers wait for the learner to start",
    ("rollout", "engine"): "rollout servers wait for engines",
    ("rollout", "window"): "turns wait for a slot at an engine: generation is the bottleneck",
    ("rollout", "eval"): "evaluations wait for a slot at an engine of role eval (training does not)",
    ("rollout", "retriever"): "rollout servers wait for the retriever",
    ("rollout", "backlog"): "rollout servers lease no tasks: turns wait for engines",
    ("rollout", "redis"): "rollout servers wait for Redis",
    ("node", "eval"): "engines delay new weights until an evaluation ends",
}
WORKING = ("training", "waiting", "evaluating", "serving")
"""States in which wait times are shown: in others, processes are idle or wait for the learner to start."""
WINDOW_S = 10.0
_METRIC = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})? (\S+)")


@dataclass(frozen=True)
class Frame:
    """The content of one refresh, as text. `trends`: values of the recent steps, by the name of their fact."""

    title: str
    facts: tuple[tuple[str, str], ...]
    engines: tuple[tuple[str, ...], ...]
    waits: tuple[str, ...]
    problems: tuple[str, ...]
    trends: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def rows(self, width: int = 0) -> list[tuple[str, str]]:
        """Return the lines, each with the name of its part, most important first: a small terminal shows these.

        width  columns: lines are wrapped, the table is narrowed, and sparklines are drawn; 0: none of it
        """
        names = max(len(name) for name, _ in self.facts)
        named = {name: f"  {name:<{names}}  {text}" for name, text in self.facts}
        ends = [len(line) for name, line in named.items() if self.trends.get(name)]
        start = max((end for end in ends if end < ALIGNED), default=0) + 2
        facts = [self._fact(name, line, max(start, len(line) + 2), width) for name, line in named.items()]
        parts = {
            "problems": ([f"  problem: {text}" for text in self.problems], 4),
            "figures": (facts, names + 4),
            "waits": (["  time spent waiting", *(f"    {line}" for line in self.waits)] if self.waits else [], 10),
            "engines": (self._engines(width), 4),
        }
        rows = [("", piece) for piece in wrapped(self.title, width, 2)]
        for part, (lines, indent) in parts.items():
            if lines and rows[-1][0]:
                rows.append((part, ""))
            rows += [(part, piece) for line in lines for piece in wrapped(line, width, indent)]
        return rows

    def _fact(self, name: str, line: str, start: int, width: int) -> str:
        """Return `line` with as many recent values as fit from column `start` on, none if fewer than SHORTEST fit."""
        trend = self.trends.get(name, ())
        room = min(width - start, len(trend))
        return f"{line:<{start}}{sparkline(trend, room)}" if room >= SHORTEST else line

    def _engines(self, width: int) -> list[str]:
        if not self.engines:
            return []
        return [f"  {line}" for line in aligned(ENGINE_COLUMNS, self.engines, width=max(0, width - 2), less=LESS)]

    def plain(self) -> str:
        """Return the frame without colours, control codes and sparklines."""
        return "\n".join(text for _, text in self.rows())

    def fitted(self, width: int, height: int) -> list[tuple[str, str]]:
        """Return lines with their parts for a terminal of `width` and `height`; the last line names the parts that do
        not fit.
        """
        rows = self.rows(width)
        if len(rows) <= height:
            return rows
        shown, cut = rows[: max(1, height - 1)], [(part, text) for part, text in rows[max(1, height - 1) :] if text]
        missing = ", ".join(dict.fromkeys(part for part, _ in cut))
        note = f"  {len(cut)} more lines ({missing}): enlarge the terminal"
        return [*shown, ("", note[:width])]


ENGINE_COLUMNS = ("engine", "state", "version", "running", "waiting", "tok/s", "updates", "cache", "role")
LESS = ("updates", "cache", "waiting", "running", "tok/s", "role")
"""Columns that a narrow terminal does without, in this order."""
SHORTEST = 4
ALIGNED = 56
"""Sparklines begin in one column, but for those of longer lines."""


def frame(snapshot: RunSnapshot, before: RunSnapshot | None, searches: Mapping[str, float], *, max_lag: int) -> Frame:
    """Return the frame of `snapshot`; `before` is an earlier snapshot, for rates and shares."""
    engines = tuple(
        (
            e.id,
            str(e.state),
            e.version.label,
            str(e.running),
            str(e.waiting),
            f"{e.tokens_per_s:,.0f}",
            str(e.updates),
            f"{e.token_usage:.0%}",
            e.role,
        )
        for e in snapshot.engines
    )
    wrong = tuple(f"{p.what} -> {p.todo}" for p in problems(snapshot, max_lag=max_lag))
    waits: list[str] = []
    if snapshot.processes and state(snapshot) in WORKING:
        waits = waits_in_words(snapshot, before) or ["no wait of 5 % or more"]
    said = tuple(facts(snapshot, max_lag=max_lag, searches=searches).items())
    return Frame(f"run {snapshot.run}: {state(snapshot)}", said, engines, tuple(waits), wrong, trends(snapshot))


def waits_in_words(snapshot: RunSnapshot, before: RunSnapshot | None) -> list[str]:
    """Return sentences with the shares of time that processes wait, the largest first, from 5 % up."""
    ranked = sorted(wait_shares(snapshot, before).items(), key=lambda item: -item[1])
    return [
        f"{share:4.0%}  {IN_WORDS.get(key, f'{key[0]} waits for {key[1]}')}" for key, share in ranked if share >= 0.05
    ]


def read_searches(urls: Iterable[str], *, timeout_s: float = 0.5) -> dict[str, float]:
    """Return sums of the retrievers' counters by name, without retrievers that do not answer."""
    totals: dict[str, float] = {}
    for url in urls:
        try:
            with ask(f"{url}/metrics", "viewer", timeout_s=timeout_s) as response:
                text = response.read(1 << 20).decode(errors="replace")
        except (OSError, HTTPException):
            continue
        for line in text.splitlines():
            found = _METRIC.match(line)
            if found and found[1].startswith("foray_retriever"):
                totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    return totals


class Looks:
    """The snapshots of the last WINDOW_S seconds: one per second, and a step may take several."""

    def __init__(self) -> None:
        self._looks: deque[RunSnapshot] = deque()

    def before(self, snapshot: RunSnapshot) -> RunSnapshot | None:
        """Return the snapshot to compare `snapshot` with: the newest that is WINDOW_S old, else the oldest."""
        if snapshot.now:
            self._looks.append(snapshot)
        while len(self._looks) > 1 and self._looks[1].now <= snapshot.now - WINDOW_S:
            self._looks.popleft()
        return self._looks[0] if self._looks and self._looks[0] is not snapshot else None
