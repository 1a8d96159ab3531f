"""One group or trajectory as JSON values: who wrote what, passages, tokens, and the life of its question. Pure.

Texts are passed on unchanged: JSON escapes them, the page and the export show them as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from foray.watch.replay_view import Decoder, Shown, to_json
from protocol.messages import Owner, Segment, TrajectoryGroup
from protocol.search import unquoted
from protocol.versions import PolicyVersion, is_orphan
from rollout_server.environment.actions import RESERVED_TAGS

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
        r"Doc \d+\s*\((?:Id: \S+ )?Title: (?P<title>.*?)\)\s(?P<text>.*?)(?=Doc \d+\s*\((?:Id|Title): |\Z)", re.DOTALL
    ),
    re.compile(r"\( (?P<title>[^()\n]{1,200}?) \) (?P<text>.*?)(?=\( [^()\n]{1,200}? \) |\Z)", re.DOTALL),
)
"""The formats of passages: Search-R1's and the demo's. Others are shown as one text."""
_NOT_TRAINED = {"stale": "older than max_lag", "orphan": "of a step that a crash rolled back", "invalid": "not valid"}
"""Why a sampled token is not trained on -> in words."""


@dataclass(frozen=True)
class GroupView:
    """A group of the journal and what is needed to show it. `text` None: the tokenizer was not found."""

    group: TrajectoryGroup
    step: int
    epoch: int
    text: Decoder | None
    lineage: tuple[PolicyVersion, ...] = ()
    max_lag: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the group and all its trajectories, without tokens."""
        group = self.group
        valid = [t.reward for t in group.trajectories if t.status.is_valid]
        versions = [v.label if v is not None else None for v in (group.first_version(), group.last_version())]
        return {
            "seq": group.seq,
            "step": self.step,
            "epoch": self.epoch,
            "rolled_back": is_orphan(PolicyVersion(self.epoch, self.step), self.lineage),
            "attempt": group.attempt,
            "producer": group.producer,
            "seconds": group.seconds,
            "template": group.template,
            "temperature": group.sampling.temperature,
            "question": group.question.model_dump(mode="json") | {"supporting": list(group.question.supporting)},
            "reward_mean": sum(valid) / len(valid) if valid else None,
            "versions": versions,
            "trajectories": [self.trajectory(place) for place in range(len(group.trajectories))],
        }

    def trajectory(self, place: int) -> dict[str, Any]:
        """Return one trajectory: facts as in `foray replay --json`, and its segments cut into parts."""
        found = self.group.trajectories[place]
        shown = Shown(self.group, place, self.step, self.epoch, self.max_lag)
        valid = [t.reward for t in self.group.trajectories if t.status.is_valid]
        plain = to_json(shown, self.text or _Ids())
        for segment, part in zip(found.segments, plain["segments"], strict=True):
            part |= {
                "parts": _parts(segment, part["text"]),
                "finish_reason": segment.finish_reason,
                "engine": segment.engine,
                "reward": segment.reward,
                "not_trained": self._not_trained(place, segment),
            }
        return plain | {
            "seconds": found.seconds,
            "sampled": found.num_sampled,
            "tokens": len(found.ids),
            "valid": found.status.is_valid,
            "reward_minus_mean": found.reward - sum(valid) / len(valid) if valid and found.status.is_valid else None,
            "decoded": self.text is not None,
        }

    def tokens(self, place: int, values: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})) -> list[dict[str, Any]]:
        """Return the tokens of each segment: ids, texts, and for sampled ones log-probs, versions and lags.

        values  what the learner computed, of `read_token_values`: for each column a list with None where a token was
                not trained
        """
        shown = Shown(self.group, place, self.step, self.epoch, self.max_lag)
        trajectory = self.group.trajectories[place]
        starts = accumulate((len(segment.ids) for segment in trajectory.segments), initial=0)
        return [
            {
                "owner": str(segment.owner),
                "ids": segment.ids.tolist(),
                "texts": [self.text.decode([i]) for i in segment.ids.tolist()] if self.text is not None else [],
                "logprobs": [round(float(value), 5) for value in segment.logprobs],
                "learner": _by_position(values, start, len(segment.ids)) if segment.owner is Owner.POLICY else {},
                "spans": [
                    {
                        "start": span.start,
                        "end": span.end,
                        "version": span.version.label,
                        "lag": shown.lag(span),
                        "not_trained": _NOT_TRAINED.get(self._cause(place, span.version, shown.lag(span)), ""),
                    }
                    for span in segment.spans
                ],
            }
            for start, segment in zip(starts, trajectory.segments, strict=False)
        ]

    def _not_trained(self, place: int, segment: Segment) -> dict[str, int]:
        """Return the number of sampled tokens that are not trained on, by reason."""
        shown = Shown(self.group, place, self.step, self.epoch, self.max_lag)
        found: dict[str, int] = {}
        for span in segment.spans:
            if cause := self._cause(place, span.version, shown.lag(span)):
                words = _NOT_TRAINED[cause]
                found[words] = found.get(words, 0) + span.end - span.start
        return found

    def _cause(self, place: int, version: PolicyVersion, behind: int) -> str:
        if not self.group.trajectories[place].status.is_valid:
            return "invalid"
        if is_orphan(version, self.lineage):
            return "orphan"
        return "stale" if self.max_lag is not None and behind > self.max_lag else ""

    def life(self) -> list[dict[str, Any]]:
        """Return what the journal knows of the question's way from issue to training, in order."""
        group = self.group
        turns = [s for t in group.trajectories for s in t.segments if s.owner is Owner.POLICY]
        searches = [s for t in group.trajectories for s in t.segments if s.query]
        engines = sorted({s.engine for s in turns if s.engine})
        versions = sorted({span.version for s in turns for span in s.spans})
        failed = sum(1 for s in searches if s.error)
        return [
            {"what": "issued", "text": f"as seq {group.seq}, question {group.question.id}"},
            {"what": "leased", "text": f"attempt {group.attempt}, by {group.producer or 'an unnamed rollout server'}"},
            {
                "what": "generated",
                "text": f"{len(turns)} turns of {len(group.trajectories)} trajectories on "
                f"{', '.join(engines) or 'no engine'}, "
                f"versions {', '.join(v.label for v in versions) or 'none'}, {group.seconds:.1f} s",
            },
            {
                "what": "searched",
                "text": f"{len(searches)} searches and tool calls, {failed} failed, "
                f"{sum(s.latency_s for s in searches):.2f} s in all",
            },
            {"what": "rewarded", "text": " ".join(f"{t.reward:g}" for t in group.trajectories)},
            {"what": "trained", "text": f"in step {self.step} by the learner of epoch {self.epoch}"},
        ]


def _by_position(values: Mapping[str, npt.NDArray[Any]], start: int, length: int) -> dict[str, list[float | None]]:
    """Return each column for the tokens from `start`, None where it has no value."""
    if "position" not in values:
        return {}
    at = values["position"] - start
    inside = (at >= 0) & (at < length)
    found: dict[str, list[float | None]] = {}
    for name, column in values.items():
        if name != "position":
            found[name] = [None] * length
            for i, value in zip(at[inside].tolist(), column[inside].tolist(), strict=True):
                found[name][i] = round(value, 5)
    return found


class _Ids:
    """Shows ids in place of text, where no tokenizer is found."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def _parts(segment: Segment, text: str) -> list[dict[str, Any]]:
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


def _passages(text: str, ids: Sequence[str]) -> dict[str, Any]:
    """Return the passages with their titles and ids if the text has a known format, else the text."""
    for form in _PASSAGES:
        found = [(unquoted(match["title"].strip()), match["text"].strip()) for match in form.finditer(text)]
        if found and len(found) == len(ids) and form.match(text.lstrip()):
            return {
                "text": "",
                "passages": [{"id": i, "title": t, "text": body} for i, (t, body) in zip(ids, found, strict=True)],
            }
    return {"text": text, "passages": []}
