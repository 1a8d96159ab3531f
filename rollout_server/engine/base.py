"""The seam to inference: what a rollout needs of it, and how it may fail.

Rollout code knows `Generate` and nothing of engines, routing or HTTP. `router.py` is the real one, `fake.py` the
scripted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.errors import ForayError
from protocol.messages import Sampling, VersionSpan


@dataclass(frozen=True)
class Completion:
    """What an engine sampled in one turn.

    ids            [n] token ids, stop string included: never trimmed
    logprobs       [n] of softmax(logits / T) at sampling
    spans          policy versions that cover [0, n) without a gap
    finish_reason  "stop" (a stop string or end-of-sequence token), "length" or "abort"
    matched        the stop string or token id that ended it, None otherwise
    engine         id of the engine that sampled the last token
    """

    ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    matched: str | int | None = None
    engine: str = ""


@dataclass(frozen=True)
class GenerateRequest:
    """One turn to be generated.

    ids      every token so far: prompt, policy and environment
    session  id of the trajectory: its turns stick to one engine, whose prefix cache holds the earlier turns
    group    id of the group: its trajectories start together on one engine, sharing the prompt
    pinned   evaluation: any READY engine will do, whatever the target version is
    """

    ids: Sequence[int]
    session: str
    group: str
    max_new_tokens: int
    sampling: Sampling
    stop: Sequence[str] = ()
    pinned: bool = False
    seed: int | None = None


class EngineError(ForayError):
    """No usable completion. `cause` is a short word for metrics; `engine` says whose fault it was.

    Causes: unreachable, timeout, http_500 (any 5xx), refused (4xx: our fault), bad_output (wrong lengths, NaN),
    aborted (it ended the request itself), no_engine (nothing routable within the deadline).
    """

    def __init__(self, cause: str, engine: str = "", detail: str = "") -> None:
        super().__init__(f"{cause} at {engine or 'no engine'}: {detail}" if detail else f"{cause} at {engine}")
        self.cause, self.engine, self.detail = cause, engine, detail


class Generate(Protocol):
    """Generates one turn; raises EngineError when no engine could, after every retry that makes sense."""

    async def __call__(self, request: GenerateRequest) -> Completion: ...
