"""The page of `foray status`: the state of a run, its problems, then its parts. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from deploy.run.learning import learning_state
from deploy.run.snapshot import RunSnapshot
from deploy.terminal import escape_untrusted, sparkline, wrapped
from foray.watch.status import letters_line, problems, seq_balance, state, step_line, token_balance

LABEL = 10
"""Columns of the first word of a line."""
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
        pages[1] += [f"problem:  {problem.what}", f"   do:    {problem.todo}"]
    pages[2] = list(_lines(snapshot, trend=width > 0))
    marks = (BOLD, BOLD + RED, "") if colour else ("", "", "")
    return "\n".join(
        f"{mark}{piece}{PLAIN if mark else ''}"
        for mark, page in zip(marks, pages, strict=True)
        for line in page
        for piece in wrapped(line, width, LABEL)
    )


def _lines(snapshot: RunSnapshot, *, trend: bool) -> Iterator[str]:
    """Yield a line for each part of the run."""
    yield f"redis     {snapshot.redis_url}"
    if snapshot.target:
        yield f"target    {snapshot.target.version.label} ({snapshot.target_state}), epoch {snapshot.learner_epoch}"
    yield from _learner_lines(snapshot, trend=trend)
    yield from snapshot.evaluation_lines()
    for p in snapshot.of("rollout"):
        v = p.values
        yield (
            f"rollout   {p.id}: {v.get('groups_in_flight', 0):.0f} groups in flight, "
            f"{v.get('groups_published', 0):.0f} published, {v.get('groups_failed', 0):.0f} failed"
        )
    for e in snapshot.engines:
        yield (
            f"engine    {e.id}: {e.state}, {'role eval, ' if e.role == 'eval' else ''}version {e.version.label}, "
            f"{e.running} running, {e.waiting} waiting, "
            f"{e.tokens_per_s:.0f} tok/s, paused {e.pause_s:.2f} s at the last update, {e.url}"
        )
    yield (
        f"streams   tasks {snapshot.tasks.waiting} waiting, {snapshot.tasks.held} leased; "
        f"trajectory groups {snapshot.traj.waiting} ready, {snapshot.traj.held} unacknowledged; "
        f"dead letters {letters_line(snapshot)}"
    )
    yield from _accounts(snapshot)
    yield from (f"event     {line}" for line in event_lines(snapshot))
    if snapshot.stopped:
        yield f"next      resume from the checkpoint with {snapshot.again or 'the command that started the run'}"


def _learner_lines(snapshot: RunSnapshot, *, trend: bool) -> Iterator[str]:
    v = snapshot.figures
    if "step" in v:
        lag = f", lag {v['lag_mean']:.2f} (max {v.get('lag_max', 0):.0f})" if "lag_mean" in v else ""
        checkpoint = f", checkpoint at step {v['checkpoint_step']:.0f}" if "checkpoint_step" in v else ""
        yield f"learner   {step_line(snapshot)}{lag}{checkpoint}"
    if "reward_mean" in v:
        rewards = snapshot.history.values("reward_mean") if trend else []
        line = f"  {sparkline(rewards, len(rewards))} last {len(rewards)} steps" if len(rewards) > 1 else ""
        yield f"reward    {v['reward_mean']:.3f}{line}"
    if (now := learning_state(snapshot.history)).word:
        yield f"learning  {now.word}: {now.sign}"
    if "publish_bytes" in v:
        yield _weights_line(v)


def _accounts(snapshot: RunSnapshot) -> Iterator[str]:
    totals = seq_balance(snapshot)
    if totals.source:
        yield f"ledger    {totals.line()} ({totals.source})"
    if balance := token_balance(snapshot):
        yield f"tokens    {balance.line()}"
    if last := snapshot.totals:
        verdict = "consistent" if last.closes else "INCONSISTENT"
        yield f"checkpoint step {last.step}, epoch {last.epoch}: {last.settled} settled, {verdict}"


def event_lines(snapshot: RunSnapshot) -> list[str]:
    """Return the last events, the oldest first: `12:31:07 UTC  rollout r1  lease-lost: another took seq 7`."""
    return [
        f"{time.strftime('%H:%M:%S UTC', time.gmtime(event.at))}  {escape_untrusted(event.process, 32)} "
        f"{escape_untrusted(event.id, 64)}  "
        f"{escape_untrusted(event.kind, 32)}: {escape_untrusted(event.text, 300)}"
        for event in snapshot.events
    ]


def _weights_line(v: Mapping[str, float]) -> str:
    """Return the phases of the last weight transfer, and the transfers since the learner's start."""
    phases = ("gather", "prepare", "transfer", "verify", "commit", "disk")
    seconds = {phase: v.get(f"publish_{phase}_s", 0.0) for phase in phases}
    listed = ", ".join(f"{phase} {s:.2f}" for phase, s in seconds.items() if s) or "nothing yet"
    line = f"weights   {v['publish_bytes'] / 1e6:.1f} MB, last version in {sum(seconds.values()):.2f} s ({listed})"
    if "publish_distributed" in v:
        sent, files, fallbacks = (v.get(f"publish_{name}", 0.0) for name in ("distributed", "disk", "fallbacks"))
        line += f"; {sent:.0f} versions sent, {files:.0f} by files ({fallbacks:.0f} after a failed transfer)"
    return line
