"""A scripted engine: says what it is told, after the time and with the faults that it is told. For tests, benchmarks
of the rollout loop and dry runs without a model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.messages import VersionSpan
from protocol.versions import PolicyVersion
from rollout_server.engine.base import Completion, EngineError, GenerateRequest

FIRST = PolicyVersion(1, 0)


@dataclass(frozen=True)
class Play:
    """One turn as it shall be.

    ids            what is sampled; cut to the request's limit, and then the turn ends by "length"
    logprobs       one an id; empty: -0.5 each
    spans          policy versions that cover the ids; empty: all of `version`
    error          cause of the EngineError that is raised in place of a completion
    latency_s      seconds until either
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    spans: tuple[VersionSpan, ...] = ()
    version: PolicyVersion = FIRST
    finish_reason: str = "stop"
    matched: str | int | None = None
    error: str = ""
    latency_s: float = 0.0


Script = Callable[[GenerateRequest, int], Play]
"""What to play for a request; the number counts the requests of its session from 0."""


class FakeEngine:
    """A `Generate` that follows a script. `requests` holds every request in the order of arrival."""

    def __init__(self, script: Script, *, name: str = "fake") -> None:
        self._script = script
        self._name = name
        self._turns: Counter[str] = Counter()
        self.requests: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest) -> Completion:
        turn = self._turns[request.session]
        self._turns[request.session] += 1
        self.requests.append(request)
        play = self._script(request, turn)
        if play.latency_s:
            await asyncio.sleep(play.latency_s)
        if play.error:
            raise EngineError(play.error, self._name, "scripted")
        ids = list(play.ids)[: request.max_new_tokens]
        whole = len(ids) == len(play.ids)
        logprobs = list(play.logprobs)[: len(ids)] if play.logprobs else [-0.5] * len(ids)
        return Completion(
            ids=ids,
            logprobs=logprobs,
            spans=_cut(play.spans, len(ids)) if play.spans else _all_of(play.version, len(ids)),
            finish_reason=play.finish_reason if whole else "length",
            matched=play.matched if whole else None,
            engine=self._name,
        )


def in_turn(*plays: Play) -> Script:
    """Every session plays these turns in order; one request more is a fault of the test and raises IndexError."""
    return lambda request, turn: plays[turn]


def _all_of(version: PolicyVersion, count: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(epoch=version.epoch, step=version.step, start=0, end=count),) if count else ()


def _cut(spans: tuple[VersionSpan, ...], count: int) -> tuple[VersionSpan, ...]:
    return tuple(s.model_copy(update={"end": min(s.end, count)}) for s in spans if s.start < count)
