"""The transcript of a trained trajectory: who wrote each part, what is trained on, by which version, and why not.

Terminal, report, dashboard and `foray replay --json` show this model. `render` is the terminal's text: lines that the
policy did not write have their owner as a prefix (`│env│`, `│prompt│`), so that the loss mask is visible without
colours, for example in a file. Texts come from models and from the web: control characters are replaced, because a
terminal would interpret them. JSON has them unchanged.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from protocol.messages import Owner, Segment, Trajectory, TrajectoryGroup, VersionSpan
from protocol.search import unquoted
from protocol.staleness import lag
from protocol.versions import PolicyVersion, is_orphan
from rollout_server.environment.actions import RESERVED_TAGS

MARKS = {Owner.PROMPT: "│prompt│ ", Owner.ENVIRONMENT: "│env│ ", Owner.POLICY: ""}
OF_SEGMENT = {"finish_reason", "engine", "reward", "tool", "query", "passage_ids", "latency_s", "error"}
OF_TRAJECTORY = {"status", "cause", "answer", "reward", "rewards", "turns", "searches", "seconds"}
"""Fields of a message that JSON has under the same name."""
BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_TAGGED = re.compile(rf"<({'|'.join(RESERVED_TAGS)}|python|fetch)>(.*?)(</\1>|\Z)", re.DOTALL)
_KINDS = {
    "result": "information",
    "tool_response": "information",
    "tool_call": "tool",
    "python": "tool",
    "fetch": "tool",
}
_PASSAGES = (
    re.compile(
        r"Doc \d+\s*\((?:Id: \S+ )?Title: (?P<title>.*?)\)\s(?P<text>.*?)(?=Doc \d+\s*\((?:(?:Id|Title): |\w*:?\Z)|\Z)",
        re.DOTALL,
    ),
    re.compile(r"\( (?P<title>[^()\n]{1,200}?) \) (?P<text>.*?)(?=\( [^()\n]{1,200}? \) |\Z)", re.DOTALL),
)
"""The formats of passages: Search-R1's and the demo's. Others are shown as one text."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed to show tokens."""

    def decode(self, ids: Sequence[int]) -> str: ...


class SampledSpan(NamedTuple):
    """Sampled tokens of one version. `not_trained`: why they are not trained on, "" if they are."""

    span: VersionSpan
    lag: int
    not_trained: str


@dataclass(frozen=True)
class Shown:
    """One trajectory to show: the `index`-th of its group, trained in step `step`.

    max_lag  the run's bound; tokens of an older version were masked. None: unknown, and not shown
    lineage  the run's learner starts; () if unknown
    """

    group: TrajectoryGroup
    index: int
    step: int
    epoch: int
    max_lag: int | None = None
    lineage: tuple[PolicyVersion, ...] = ()

    @property
    def trajectory(self) -> Trajectory:
        """Return the trajectory."""
        return self.group.trajectories[self.index]

    def lag(self, span: VersionSpan) -> int:
        """Return the steps between the version that sampled the span and the one trained (n - 1 in step n)."""
        return lag(self.step - 1, span.version)

    def spans(self, segment: Segment) -> list[SampledSpan]:
        """Return the spans of a segment."""
        return [self._sampled(span, self.lag(span)) for span in segment.spans]

    def _sampled(self, span: VersionSpan, behind: int) -> SampledSpan:
        why = ""
        if not self.trajectory.status.is_valid:
            why = "not valid"
        elif is_orphan(span.version, self.lineage):
            why = "of a step that a crash rolled back"
        elif self.max_lag is not None and behind > self.max_lag:
            why = "older than max_lag"
        return SampledSpan(span, behind, why)

    def facts(self) -> list[tuple[str, str]]:
        """Return what is said above a transcript, as (name, text)."""
        group, one = self.group, self.trajectory
        scores = ", ".join(f"{name} {value:g}" for name, value in one.rewards.items())
        group_rewards = " ".join(f"{t.reward:g}" for t in group.trajectories)
        counts = f"{one.turns} turns, {one.searches} searches, {len(one.ids)} tokens, {one.num_sampled} of them sampled"
        return [
            ("question", group.question.text),
            ("gold", " | ".join(group.question.answers)),
            ("answer", one.answer or "(none)"),
            ("reward", f"{one.reward:g} ({scores or 'no parts'}); rewards of the group: {group_rewards}"),
            ("status", f"{one.status}{f' ({one.cause})' if one.cause else ''}; {counts}, {one.seconds:.1f} s"),
        ]


@dataclass(frozen=True)
class TranscriptPart:
    """A segment with its text. `turn`: the number of turns of the policy up to it."""

    segment: Segment
    text: str
    turn: int
    sampled: tuple[SampledSpan, ...]

    @property
    def not_trained(self) -> dict[str, int]:
        """Return the number of sampled tokens that are not trained on, by reason."""
        found: dict[str, int] = {}
        for span, _, why in self.sampled:
            if why:
                found[why] = found.get(why, 0) + span.end - span.start
        return found

    def label(self) -> str:
        """Return owner, tokens and origin on one line."""
        segment = self.segment
        count = f"{len(segment.ids)} tokens"
        if segment.owner is Owner.PROMPT:
            # a prompt that is not the first begins a sequence; its reason is there
            begun = f" · new sequence: {segment.finish_reason}" if segment.finish_reason else ""
            return f"prompt · {count}, not trained on{begun}"
        if segment.owner is Owner.ENVIRONMENT:
            parts = [f"environment · {count}, not trained on"]
            if segment.query or segment.tool:
                parts.append(
                    f"{f'called {segment.tool} with' if segment.tool else 'searched for'} {visible(segment.query)!r}"
                )
                if segment.passage_ids or not segment.tool:
                    parts.append(f"passages {', '.join(segment.passage_ids) or 'none'}")
                parts.append(f"{segment.latency_s * 1000:.0f} ms")
            return " · ".join([*parts, f"error {segment.error}"] if segment.error else parts)
        versions = ", ".join(f"{span.version.label} (lag {behind})" for span, behind, _ in self.sampled)
        masked = "".join(f" · {number} tokens not trained on: {why}" for why, number in self.not_trained.items())
        ended = f" · ended by {segment.finish_reason}" if segment.finish_reason else ""
        engine = f" · {segment.engine}" if segment.engine else ""
        return f"turn {self.turn} · policy · {count} · version {versions or 'none'}{masked}{engine}{ended}"

    def to_json(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        segment = self.segment
        return {
            "owner": str(segment.owner),
            "trained": segment.owner is Owner.POLICY,
            "text": self.text,
            "tokens": len(segment.ids),
            "versions": [[span.version.label, span.start, span.end] for span, _, _ in self.sampled],
            "lags": [behind for _, behind, _ in self.sampled],
            "not_trained": self.not_trained,
            **segment.model_dump(include=OF_SEGMENT),
        }

    def pieces(self) -> list[dict[str, Any]]:
        """Return the text cut at its tags: think, search, information with its passages, answer, tool, text."""
        segment, text = self.segment, self.text
        if segment.owner is Owner.PROMPT:
            return [{"kind": "prompt", "text": text}]
        found: list[dict[str, Any]] = []
        end = 0
        for tag in _TAGGED.finditer(text):
            if text[end : tag.start()].strip():
                found.append({"kind": "text", "text": text[end : tag.start()]})
            kind = _KINDS.get(tag[1], tag[1])
            if segment.owner is Owner.ENVIRONMENT:
                found.append({"kind": "information", "tag": tag[1]} | _passages(tag[2], segment.passage_ids))
            else:  # what the policy writes between the environment's tags is text of the policy
                found.append({"kind": "text" if kind == "information" else kind, "tag": tag[1], "text": tag[2]})
            end = tag.end()
        if text[end:].strip():
            found.append({"kind": "text", "text": text[end:]})
        if segment.owner is Owner.ENVIRONMENT:
            return [part if part["kind"] == "information" else part | {"kind": "environment"} for part in found]
        return found


def choose(
    entries: Iterable[Any],
    *,
    best: int = 1,
    every: bool = False,
    max_lag: int | None = None,
    lineage: tuple[PolicyVersion, ...] = (),
) -> Iterator[Shown]:
    """Yield trajectories of the journal's entries (objects with `step`, `epoch` and `group`), one entry at a time.

    Of each group the `best` with the highest reward (of equals, the first with most searches), or all with `every`.
    """
    for entry in entries:
        trajectories = entry.group.trajectories
        order = sorted(range(len(trajectories)), key=lambda i: (-trajectories[i].reward, -trajectories[i].searches, i))
        for index in range(len(trajectories)) if every else order[:best]:
            yield Shown(entry.group, index, entry.step, entry.epoch, max_lag, lineage)


def transcript(shown: Shown, tokens: Decoder) -> Iterator[TranscriptPart]:
    """Yield the parts of a trajectory in order."""
    turn = 0
    for segment in shown.trajectory.segments:
        turn += segment.owner is Owner.POLICY
        yield TranscriptPart(segment, tokens.decode(segment.ids.tolist()), turn, tuple(shown.spans(segment)))


def render(shown: Shown, tokens: Decoder, *, colour: bool) -> str:
    """Return the trajectory as text."""
    group = shown.group
    lines = [
        f"━━ seq {group.seq} (question {visible(group.question.id)}), trajectory {shown.index + 1} of "
        f"{len(group.trajectories)}, trained in step {shown.step} ━━",
        *(f"{name:<8}  {visible(text)}" for name, text in shown.facts()),
    ]
    for part in transcript(shown, tokens):
        lines.append(f"── {visible(part.label())}")
        style = BOLD if part.segment.owner is Owner.POLICY else DIM
        for line in visible(part.text.strip("\n"), newline=True).split("\n"):
            text = MARKS[part.segment.owner] + line
            lines.append(f"{style}{text}{PLAIN}" if colour else text)
    return "\n".join(lines)


def to_json(shown: Shown, tokens: Decoder) -> dict[str, Any]:
    """Return the trajectory as JSON values, with texts unchanged. Stable: names are added, never changed."""
    group, trajectory = shown.group, shown.trajectory
    valid = [t.reward for t in group.trajectories if t.status.is_valid]
    return {
        "seq": group.seq,
        "step": shown.step,
        "epoch": shown.epoch,
        "question_id": group.question.id,
        "question": group.question.text,
        "answers": list(group.question.answers),
        "index": shown.index,
        "group_rewards": [t.reward for t in group.trajectories],
        "valid": trajectory.status.is_valid,
        "reward_minus_mean": trajectory.reward - sum(valid) / len(valid) if trajectory.status.is_valid else None,
        **trajectory.model_dump(include=OF_TRAJECTORY),
        "sampled": trajectory.num_sampled,
        "tokens": len(trajectory.ids),
        "segments": [part.to_json() for part in transcript(shown, tokens)],
    }


def _passages(text: str, ids: Sequence[str]) -> dict[str, Any]:
    """Return the passages with their titles and ids if the text has a known format, else the text.

    Text that was cut to `max_obs_tokens` may have fewer titles than ids: the last ones are not shown.
    """
    for form in _PASSAGES:
        found = [(unquoted(match["title"].strip()), match["text"].strip()) for match in form.finditer(text)]
        if found and len(found) <= len(ids) and form.match(text.lstrip()):
            return {
                "text": "",
                "passages": [{"id": i, "title": t, "text": body} for i, (t, body) in zip(ids, found, strict=False)],
            }
    return {"text": text, "passages": []}


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
