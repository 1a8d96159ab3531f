"""The interface to inference: `Generate`, its request and result, and its errors.

Rollout code depends on `Generate` only, not on engines, routing or HTTP. `router.py` implements it;
`tests/support/fake_engine.py` is a scripted fake.
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
    """The sampled tokens of one turn.

    ids            [n] token ids, stop string included: never trimmed
    logprobs       [n] natural logarithms of softmax(logits / T) at the sampled ids, T = `Sampling.temperature`, over
                   the whole vocabulary: NOT renormalised to what top-p and top-k left. At T = 0 (greedy) the engine
                   takes the most likely token, and T = 1 for the log-prob. It is not usable in importance ratios, since
                   the token was not sampled. The settings are stored with the group.
    spans          policy versions, which cover [0, n) without gaps
    finish_reason  "stop" (a stop string or end-of-sequence token), "length" or "abort"
    matched        the stop string or token id that ended the turn, or None
    engine         id of the engine that sampled the last token
    pieces         number of requests that it took; more than one when an engine failed in the middle
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

    ids       all tokens so far: prompt, policy and environment
    session   id of the trajectory: its turns stay at one engine, whose prefix cache holds the earlier turns
    group     id of the group: its trajectories start at one engine and share the prompt
    sampling  sent with every request, so that the log-probs match the settings stored with the group
    pinned    evaluation: use any READY engine, whatever the target version is
    """

    ids: Sequence[int]
    session: str
    group: str
    max_new_tokens: int
    sampling: Sampling
    stop: Sequence[str] = ()
    pinned: bool = False
    seed: int | None = None


TOO_MANY_FILES = "too_many_files"
FaultOf = Literal["engine", "request", "network", "fleet", "server"]

FAULTS: Mapping[str, FaultOf] = MappingProxyType(
    {
        "unreachable": "network",  # no connection, or lost before the answer started
        "cut": "network",  # lost in the middle of the answer
        "timeout": "engine",  # not finished within the timeout of a call
        "stalled": "engine",  # started to answer, then sent nothing for too long
        "http_500": "engine",  # any 5xx, and an internal error inside a stream
        "denied": "engine",  # 401, 403, 404, ...: a wrong key, or not an engine
        "bad_output": "engine",  # wrong lengths, NaN, ids outside the vocabulary, garbage: all of it is dropped
        "refused": "request",  # 400, 413, 422: every engine would reject it
        "aborted": "fleet",  # aborted by the engine: it drains, updates its weights, or its queue is full
        "withdrawn": "fleet",  # the engine table removed the engine during the call
        TOO_MANY_FILES: "server",  # this process has no free file descriptor for the connection
        "no_engine": "fleet",  # no engine was usable within the wait timeout
    }
)
"""Cause of an EngineError -> where the fault is."""


class EngineError(ForayError):
    """There is no usable completion. `cause` is one of FAULTS and used in metrics; `engine` is the id of the engine."""

    def __init__(self, cause: str, engine: str = "", detail: str = "") -> None:
        super().__init__(f"{cause} at {engine or 'no engine'}: {detail}" if detail else f"{cause} at {engine}")
        self.cause, self.engine, self.detail = cause, engine, detail

    @property
    def fault(self) -> FaultOf:
        """Where the fault is."""
        return FAULTS.get(self.cause, "engine")


class Generate(Protocol):
    """Generate one turn. Raises EngineError when no engine could, after all useful retries."""

    async def __call__(self, request: GenerateRequest) -> Completion: ...
