"""The growing trajectory: segments with their owner, appended and never changed. Pure.

Token ids are stored as sampled or encoded, and text is never tokenised again. Mask, log-probs and versions are derived
from the segments, so they are always consistent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.messages import Owner, Segment
from protocol.versions import PolicyVersion
from rollout_server.engine.base import Completion


class Transcript:
    """The tokens of one trajectory: at most `max_context`, prompt included."""

    def __init__(self, prompt: Sequence[int], max_context: int, *, reason: str = "") -> None:
        """Begin with `prompt`. `reason`: why it begins a further sequence of its trajectory."""
        self._ids: list[int] = []
        self._segments: list[Segment] = []
        self._max_context = max_context
        self.append(Segment(owner=Owner.PROMPT, ids=np.asarray(prompt, np.int32), finish_reason=reason[:256]))

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def ids(self) -> list[int]:
        """[T] a copy of all ids: the context of the next turn."""
        return list(self._ids)

    @property
    def remaining(self) -> int:
        """Number of tokens that still fit into the context; never negative."""
        return max(0, self._max_context - len(self._ids))

    @property
    def first_version(self) -> PolicyVersion | None:
        """Oldest policy version of the sampled tokens; None before the first turn."""
        return min((span.version for s in self._segments for span in s.spans), default=None)

    def write(self, completion: Completion) -> Segment:
        """Append a turn of the policy. Raises ValueError as `policy_segment`."""
        return self.append(policy_segment(completion))

    def observe(
        self,
        ids: Sequence[int],
        *,
        query: str = "",
        passage_ids: Sequence[str] = (),
        latency_s: float = 0.0,
        error: str = "",
        tool: str = "",
    ) -> Segment:
        """Append an observation. `query` and the later arguments describe its search, or its call of `tool`.

        Raises ValueError if it does not fit: the caller must cut an observation to `remaining`.
        """
        if len(ids) > self.remaining:
            raise ValueError(f"an observation of {len(ids)} tokens does not fit into the {self.remaining} left")
        segment = Segment(
            owner=Owner.ENVIRONMENT,
            ids=np.asarray(ids, np.int32),
            query=query,
            # untrusted names: longer ones are cut to the limit of the message, not rejected
            passage_ids=tuple(name[:256] for name in passage_ids[:1000]),
            latency_s=latency_s,
            error=error[:256],
            tool=tool,
        )
        return self.append(segment)

    def append(self, segment: Segment) -> Segment:
        """Append a segment as it is, and return it."""
        self._segments.append(segment)
        self._ids.extend(segment.ids.tolist())
        return segment


def policy_segment(completion: Completion) -> Segment:
    """Return a turn of the policy, ids and log-probs as the engine sampled them.

    Raises ValueError if the completion is inconsistent: lengths, gaps between spans, positive log-probs.
    """
    return Segment(
        owner=Owner.POLICY,
        ids=np.asarray(completion.ids, np.int32),
        logprobs=np.asarray(completion.logprobs, np.float32),
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        engine=completion.engine,
    )
