"""The page of `foray status`: the state of a run, its problems, then its parts. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from deploy.run.learning import learning_state
from deploy.run.snapshot import RunSnapshot
from deploy.terminal import escape_untrusted, sparkline, wrapped
from foray.watch.facts import facts, trends
from foray.watch.status import problems, state

LABEL = 14
"""Columns of the name of a line."""
BOLD, RED, PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"


def render(snapshot: RunSnapshot, *, max_lag: int, width: int = 0, colour: bool = False) -> str:
    """Return the page of `foray status`.

    Args:
        width: Columns of the terminal: lines are wrapped, and a sparkline shows the reward. 0: a pipe, neither.
        colour: Whether the state is bold and problems are red.
    """
    wrong = problems(snapshot, max_lag=max_lag)
    pages = [[f"run {snapshot.run}: {state(snapshot)}, {'healthy' if not wrong else 'NOT healthy'}"], [], []]
    for problem in wrong:
        pages[1] += [f"{'problem:':<{LABEL}}{problem.what}", f"{'   do:':<{LABEL}}{problem.todo}"]
    pages[2] = [f"{name:<{LABEL}}{text}" for name, text in _lines(snapshot, max_lag, trend=width > 0)]
    marks = (BOLD, BOLD + RED, "") if colour else ("", "", "")
    return "\n".join(
        f"{mark}{piece}{PLAIN if mark else ''}"
        for mark, page in zip(marks, pages, strict=True)
        for line in page
        for piece in wrapped(line, width, LABEL)
    )


def _lines(snapshot: RunSnapshot, max_lag: int, *, trend: bool) -> Iterator[tuple[str, str]]:
    """Yield name and text of a line for each figure, then for each part of the run."""
    yield "redis", snapshot.redis_url
    if snapshot.target:
        yield "target", f"{snapshot.target.version.label} ({snapshot.target_state}), epoch {snapshot.learner_epoch}"
    recent = trends(snapshot) if trend else {}
    for name, text in facts(snapshot, max_lag=max_lag).items():
        past = recent.get(name, []) if name == "reward" else []
        line = f"  {sparkline(past, len(past))} last {len(past)} steps" if len(past) > 1 else ""
        yield name, f"{text}{line}"
    if (now := learning_state(snapshot.history)).word:
        yield "learning", f"{now.word}: {now.sign}"
    if "publish_bytes" in (values := snapshot.figures):
        yield "weights", _weights_text(values)
    if last := snapshot.totals:
        verdict = "consistent" if last.closes else "INCONSISTENT"
        yield "checkpoint", f"of step {last.step}, epoch {last.epoch}: {last.settled} settled, {verdict}"
    elif "checkpoint_step" in values:
        yield "checkpoint", f"of step {values['checkpoint_step']:.0f}"
    yield from snapshot.validations.items()
    for p in snapshot.of("rollout"):
        v = p.values
        yield (
            "rollout",
            f"{p.id}: {v.get('groups_in_flight', 0):.0f} groups in flight, "
            f"{v.get('groups_published', 0):.0f} published, {v.get('groups_failed', 0):.0f} failed",
        )
    for e in snapshot.engines:
        yield (
            "engine",
            f"{e.id}: {e.state}, {'role eval, ' if e.role == 'eval' else ''}version {e.version.label}, "
            f"{e.running} running, {e.waiting} waiting, "
            f"{e.tokens_per_s:.0f} tok/s, paused {e.pause_s:.2f} s at the last update, {e.url}",
        )
    yield from (("event", line) for line in event_lines(snapshot))
    if snapshot.stopped:
        yield "next", f"resume from the checkpoint with {snapshot.again or 'the command that started the run'}"


def event_lines(snapshot: RunSnapshot) -> list[str]:
    """Return the last events, the oldest first: `12:31:07 UTC  rollout r1  lease-lost: another took seq 7`."""
    return [
        f"{time.strftime('%H:%M:%S UTC', time.gmtime(event.at))}  {escape_untrusted(event.process, 32)} "
        f"{escape_untrusted(event.id, 64)}  "
        f"{escape_untrusted(event.kind, 32)}: {escape_untrusted(event.text, 300)}"
        for event in snapshot.events
    ]


def _weights_text(v: Mapping[str, float]) -> str:
    """Return the phases of the last weight transfer, and the transfers since the learner's start."""
    phases = ("gather", "prepare", "transfer", "verify", "commit", "disk")
    seconds = {phase: v.get(f"publish_{phase}_s", 0.0) for phase in phases}
    listed = ", ".join(f"{phase} {s:.2f}" for phase, s in seconds.items() if s) or "nothing yet"
    line = f"{v['publish_bytes'] / 1e6:.1f} MB, last version in {sum(seconds.values()):.2f} s ({listed})"
    if "publish_distributed" in v:
        sent, files, fallbacks = (v.get(f"publish_{name}", 0.0) for name in ("distributed", "disk", "fallbacks"))
        line += f"; {sent:.0f} versions sent, {files:.0f} by files ({fallbacks:.0f} after a failed transfer)"
    return line
