"""The interface to inference: what a rollout needs of it, and how it may fail.

Rollout code knows `Generate` and nothing of engines, routing or HTTP. `router.py` is the real one,
`tests/support/fake_engine.py` the scripted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from protocol.errors import ForayError
from protocol.messages import Sampling, VersionSpan


@dataclass(frozen=True)
class Completion:
    """What was sampled in one turn.

    ids            [n] token ids, stop string included: never trimmed
    logprobs       [n] natural logarithms of softmax(logits / T) at the sampled ids, T = `Sampling.temperature`, over
                   the whole vocabulary: NOT renormalised to what top-p and top-k left. At T = 0 (greedy) the engine
                   takes the likeliest token and T = 1 for the log-prob: it is the model's own, and no importance
                   ratio can be formed with it, since the token was not drawn. The settings travel with the group.
    spans          policy versions that cover [0, n) without a gap
    finish_reason  "stop" (a stop string or end-of-sequence token), "length" or "abort"
    matched        the stop string or token id that ended it, None otherwise
    engine         id of the engine that sampled the last token
    pieces         requests that it was sampled in; more than one when an engine failed in the middle
    """

    ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    matched: str | int | None = None
    engine: str = ""
    pieces: int = 1


@dataclass(frozen=True)
class GenerateRequest:
    """One turn to be generated.

    ids       every token so far: prompt, policy and environment
    session   id of the trajectory: its turns stick to one engine, whose prefix cache holds the earlier turns
    group     id of the group: its trajectories start together on one engine, sharing the prompt
    sampling  sent with every request, so that the log-probs mean what the group says of them
    pinned    evaluation: any READY engine will do, whatever the target version is
    """

    ids: Sequence[int]
    session: str
    group: str
    max_new_tokens: int
    sampling: Sampling
    stop: Sequence[str] = ()
    pinned: bool = False
    seed: int | None = None


FaultOf = Literal["engine", "request", "network", "fleet"]

FAULTS: Mapping[str, FaultOf] = MappingProxyType(
    {
        "unreachable": "network",  # no connection, or lost before the answer began
        "cut": "network",  # lost in the middle of the answer
        "timeout": "engine",  # not done within the time for a whole call
        "stalled": "engine",  # began to answer, then said nothing for too long
        "http_500": "engine",  # any 5xx, and an internal error inside a stream
        "denied": "engine",  # 401, 403, 404, ...: another key, or no engine at all
        "bad_output": "engine",  # wrong lengths, NaN, ids of another vocabulary, garbage: nothing of it is believed
        "refused": "request",  # 400, 413, 422: every engine would say so
        "aborted": "fleet",  # the engine ended it itself: it drains, or its update or its queue asked for it
        "withdrawn": "fleet",  # the engine table took the engine away while it generated
        "no_engine": "fleet",  # none could be asked within the time for waiting
    }
)
"""Cause of an EngineError -> whose fault it is."""


class EngineError(ForayError):
    """No usable completion. `cause` is one of FAULTS, a word for metrics; `engine` says at which engine it happened."""

    def __init__(self, cause: str, engine: str = "", detail: str = "") -> None:
        super().__init__(f"{cause} at {engine or 'no engine'}: {detail}" if detail else f"{cause} at {engine}")
        self.cause, self.engine, self.detail = cause, engine, detail

    @property
    def fault(self) -> FaultOf:
        """Whose fault it was."""
        return FAULTS.get(self.cause, "engine")


class Generate(Protocol):
    """Generates one turn; raises EngineError when no engine could, after every retry that makes sense."""

    async def __call__(self, request: GenerateRequest) -> Completion: ...
