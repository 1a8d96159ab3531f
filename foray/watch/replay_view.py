"""Render trajectories from the journal as text: owner, training mask and policy version of each part.

Lines that the policy did not write have their owner as a prefix (`│env│`, `│prompt│`), so that the loss mask is visible
without colours, for example in a file. Texts come from models and from the web: control characters are replaced,
because a terminal would interpret them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deploy.run.run_dir import configuration_of, read_configuration
from protocol.errors import UserError
from protocol.messages import Owner, Segment, Trajectory, TrajectoryGroup, VersionSpan
from protocol.runtime.config import section
from protocol.settings import RunSettings
from protocol.staleness import lag

if TYPE_CHECKING:
    from rollout_server.environment.tokenizer import TrajectoryTokenizer

MARKS = {Owner.PROMPT: "│prompt│ ", Owner.ENVIRONMENT: "│env│ ", Owner.POLICY: ""}
BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


class Decoder(Protocol):
    """The part of a tokenizer that is needed to show tokens."""

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Shown:
    """One trajectory to print: the `index`-th of its group, trained in step `step`.

    max_lag: the run's bound; tokens of an older version were masked. None: unknown, and not shown.
    """

    group: TrajectoryGroup
    index: int
    step: int
    epoch: int
    max_lag: int | None = None

    @property
    def trajectory(self) -> Trajectory:
        """Return the trajectory."""
        return self.group.trajectories[self.index]

    def lag(self, span: VersionSpan) -> int:
        """Return the steps between the version that sampled the span and the one trained (n - 1 in step n)."""
        return lag(self.step - 1, span.version)


def choose(
    entries: Iterable[Any], *, best: int = 1, every: bool = False, max_lag: int | None = None
) -> Iterator[Shown]:
    """Yield trajectories of the journal's entries (objects with `step`, `epoch` and `group`), one entry at a time.

    Of each group the `best` with the highest reward (of equals, the first with most searches), or all with `every`.
    """
    for entry in entries:
        trajectories = entry.group.trajectories
        order = sorted(range(len(trajectories)), key=lambda i: (-trajectories[i].reward, -trajectories[i].searches, i))
        for index in range(len(trajectories)) if every else order[:best]:
            yield Shown(entry.group, index, entry.step, entry.epoch, max_lag)


def render(shown: Shown, tokens: Decoder, *, colour: bool) -> str:
    """Return the trajectory as text."""
    group, trajectory = shown.group, shown.trajectory
    scores = ", ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items())
    head = [
        f"━━ seq {group.seq} (question {visible(group.question.id)}), trajectory {shown.index + 1} of "
        f"{len(group.trajectories)}, trained in step {shown.step} ━━",
        f"question  {visible(group.question.text)}",
        f"gold      {' | '.join(visible(answer) for answer in group.question.answers)}",
        f"answer    {visible(trajectory.answer) or '(none)'}",
        f"reward    {trajectory.reward:g} ({scores or 'no parts'}); rewards of the group: "
        + " ".join(f"{t.reward:g}" for t in group.trajectories),
        f"status    {trajectory.status}{f' ({visible(trajectory.cause)})' if trajectory.cause else ''}; "
        f"{trajectory.turns} turns, {trajectory.searches} searches, {len(trajectory.ids)} tokens, "
        f"{trajectory.num_sampled} of them trained on, {trajectory.seconds:.1f} s",
    ]
    return "\n".join([*head, *_body(shown, tokens, colour)])


def _body(shown: Shown, tokens: Decoder, colour: bool) -> Iterator[str]:
    turn = 0
    for segment in shown.trajectory.segments:
        turn += segment.owner is Owner.POLICY
        yield f"── {_label(segment, turn, shown)}"
        style = BOLD if segment.owner is Owner.POLICY else DIM
        for line in visible(tokens.decode(segment.ids.tolist()).strip("\n"), newline=True).split("\n"):
            text = MARKS[segment.owner] + line
            yield f"{style}{text}{PLAIN}" if colour else text


def _label(segment: Segment, turn: int, shown: Shown) -> str:
    count = f"{len(segment.ids)} tokens"
    if segment.owner is Owner.PROMPT:
        # a prompt that is not the first begins a sequence; its reason is there
        begun = f" · new sequence: {visible(segment.finish_reason)}" if segment.finish_reason else ""
        return f"prompt · {count}, not trained on{begun}"
    if segment.owner is Owner.ENVIRONMENT:
        parts = [f"environment · {count}, not trained on"]
        if segment.query or segment.tool:
            asked = f"called {visible(segment.tool)} with" if segment.tool else "searched for"
            parts.append(f"{asked} {visible(segment.query)!r}")
            if segment.passage_ids or not segment.tool:
                parts.append(f"passages {', '.join(visible(i) for i in segment.passage_ids) or 'none'}")
            parts.append(f"{segment.latency_s * 1000:.0f} ms")
        return " · ".join([*parts, f"error {visible(segment.error)}"] if segment.error else parts)
    by = ", ".join(_version(span, shown) for span in segment.spans)
    ended = f" · ended by {visible(segment.finish_reason)}" if segment.finish_reason else ""
    engine = f" · {visible(segment.engine)}" if segment.engine else ""
    return f"turn {turn} · policy · {count}, trained on · version {by or 'none'}{engine}{ended}"


def _version(span: VersionSpan, shown: Shown) -> str:
    """Return `1.4 (lag 2)`, and the number of tokens masked because that version was too old."""
    behind = shown.lag(span)
    masked = ""
    if shown.max_lag is not None and behind > shown.max_lag:
        masked = f", too old: {span.end - span.start} tokens not trained on"
    return f"{span.version.label} (lag {behind}{masked})"


def to_json(shown: Shown, tokens: Decoder) -> dict[str, Any]:
    """Return the trajectory as JSON values, with texts unchanged."""
    group, trajectory = shown.group, shown.trajectory
    return {
        "seq": group.seq,
        "step": shown.step,
        "epoch": shown.epoch,
        "question_id": group.question.id,
        "question": group.question.text,
        "answers": list(group.question.answers),
        "index": shown.index,
        "group_rewards": [t.reward for t in group.trajectories],
        "status": str(trajectory.status),
        "cause": trajectory.cause,
        "answer": trajectory.answer,
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "turns": trajectory.turns,
        "searches": trajectory.searches,
        "segments": [
            {
                "owner": str(s.owner),
                "trained": s.owner is Owner.POLICY,
                "text": tokens.decode(s.ids.tolist()),
                "tokens": len(s.ids),
                "versions": [[span.version.label, span.start, span.end] for span in s.spans],
                "lags": [shown.lag(span) for span in s.spans],
                "tool": s.tool,
                "query": s.query,
                "passage_ids": list(s.passage_ids),
                "latency_s": s.latency_s,
                "error": s.error,
            }
            for s in trajectory.segments
        ],
    }


def read_settings(directory: Path) -> RunSettings | None:
    """Return the run's settings; None if it was started manually, with a configuration elsewhere."""
    path = configuration_of(directory)
    return section(read_configuration(path, directory), "run", RunSettings) if path is not None else None


def find_tokenizer(directory: Path, model: Path | None, run: RunSettings | None) -> TrajectoryTokenizer:
    """Load the tokenizer of `model`, else of the run's newest published weights, else of its initial model.

    Raises UserError if none of them has one.
    """
    from rollout_server.environment.tokenizer import load_tokenizer

    candidates = [model] if model is not None else sorted((directory / "weights").glob("v*/"), reverse=True)
    if model is None and run is not None:
        candidates.append(run.model)
    for candidate in candidates:
        if (candidate / "tokenizer.json").is_file():
            return load_tokenizer(candidate)
    raise UserError(f"no tokenizer found for {directory}", todo="give the model's directory with --model DIR")


def visible(text: str, *, newline: bool = False) -> str:
    """Return `text` with control and format characters replaced by U+FFFD; `newline` keeps line breaks."""
    kept = []
    for char in text:
        if char == "\n":
            kept.append("\n" if newline else " ")
        elif char == "\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs"):
            kept.append(char)
        else:
            kept.append("\N{REPLACEMENT CHARACTER}")
    return "".join(kept)
