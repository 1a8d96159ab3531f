"""One group or trajectory as JSON values: the group, its trajectories, tokens, and the life of its question. Pure.

Texts are passed on unchanged: JSON escapes them, the page and the export show them as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from foray.watch.transcript import Decoder, Shown, to_json, transcript
from protocol.messages import Owner, TrajectoryGroup
from protocol.versions import PolicyVersion, is_orphan


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
            **group.model_dump(include={"attempt", "producer", "seconds", "template"}),
            "temperature": group.sampling.temperature,
            "question": group.question.model_dump() | {"supporting": list(group.question.supporting)},
            "reward_mean": sum(valid) / len(valid) if valid else None,
            "versions": versions,
            "trajectories": [self.trajectory(place) for place in range(len(group.trajectories))],
        }

    def shown(self, place: int) -> Shown:
        """Return one trajectory of the group."""
        return Shown(self.group, place, self.step, self.epoch, self.max_lag, self.lineage)

    def trajectory(self, place: int) -> dict[str, Any]:
        """Return one trajectory as in `foray replay --json`, with the pieces of each part."""
        shown, tokens = self.shown(place), self.text or _Ids()
        segments = [part.to_json() | {"parts": part.pieces()} for part in transcript(shown, tokens)]
        return to_json(shown, tokens) | {"segments": segments, "decoded": self.text is not None}

    def tokens(self, place: int, values: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})) -> list[dict[str, Any]]:
        """Return the tokens of each segment: ids, texts, and for sampled ones log-probs, versions and lags.

        values  what the learner computed, of `read_token_values`: for each column a list with None where a token was
                not trained
        """
        shown = self.shown(place)
        segments = shown.trajectory.segments
        starts = accumulate((len(segment.ids) for segment in segments), initial=0)
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
                        "lag": behind,
                        "not_trained": why,
                    }
                    for span, behind, why in shown.spans(segment)
                ],
            }
            for start, segment in zip(starts, segments, strict=False)
        ]

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
