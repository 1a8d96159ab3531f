"""Choose the engine for a turn. Pure.

A turn goes to the engine at which it should end first: the engine's seconds per token with one more request, times the
tokens that the turn is expected to have plus the share of a token that each prompt token costs. The engine of the
trajectory, and for its first turn that of its group, has the prompt in its prefix cache and computes none of it. So a
trajectory stays where it is unless another engine is faster by more than its prefix is worth, and an engine that joins
late gets work at once. Engines that have failed this turn come last.

Of E engines, a choice looks at those of its trajectory and group, and at the fastest one that has not failed the turn:
cost O(log E), held by `EngineIndex`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import EngineInfo
from protocol.versions import PolicyVersion

PROMPT_TOKENS = 32
"""Prompt tokens that cost as much as one token of the answer, with the time that the other requests wait for them. A
prefill of a 7B model computes about 200 in the time of a decoding step."""


@dataclass(frozen=True)
class Candidate:
    """An engine that may take the turn.

    load      tokens in flight there: ours, plus an estimate of the others'. Breaks ties between engines of equal pace
    busy      requests that it reports, ours included: breaks the remaining ties
    failures  how often it has failed this turn
    pace      seconds per token that it would need with one more request; only ratios count
    """

    id: str
    load: float
    busy: int = 0
    failures: int = 0
    pace: float = 1.0


@dataclass(frozen=True)
class Work:
    """What a turn costs: `prompt` tokens to compute unless they are cached, and `answer` tokens expected."""

    prompt: int
    answer: float


Place = tuple[float, float, int, str]
"""(pace, load, busy, id) of an engine: its place in the order."""


class EngineIndex:
    """The engines that may get a request, and the order by pace of those with capacity.

    Building it costs O(E log E): after a change of the table, a pin or an ejection. `update`: O(log E) comparisons.

    place  returns the place of an engine; None if it has no capacity
    pin    version that the engines have been restricted to
    until  time of `time.monotonic()` at which an ejected engine may be used again
    """

    def __init__(
        self,
        engines: Iterable[EngineInfo],
        place: Callable[[EngineInfo], Place | None],
        *,
        pin: PolicyVersion | None = None,
        until: float = math.inf,
    ) -> None:
        self.engines = {engine.id: engine for engine in engines}
        self.pin, self.until, self._place = pin, until, place
        self._places = {name: at for name, engine in self.engines.items() if (at := place(engine)) is not None}
        self._order = sorted(self._places.values())

    def update(self, name: str) -> None:
        """Apply a change at an engine. Has no effect if the engine is not in the index."""
        old, engine = self._places.pop(name, None), self.engines.get(name)
        if old is not None:
            del self._order[bisect_left(self._order, old)]
        place = self._place(engine) if engine is not None else None
        if place is not None:
            self._places[name] = place
            insort(self._order, place)

    def fastest(self, failures: Mapping[str, int]) -> Iterator[str]:
        """Yield the ids of the engines with capacity, fastest first, up to the first that has not failed this turn."""
        for *_, name in self._order:
            yield name
            if not failures.get(name):
                return


def pick_engine(candidates: Sequence[Candidate], usual: Sequence[str], work: Work) -> str:
    """Return the id of the engine for a turn.

    candidates  at least one; `usual` and `EngineIndex.fastest` give the same choice as all engines
    usual       ids of the trajectory's engine and of its group's engine, "" if there is none. The first known one has
                the prompt in its prefix cache
    """
    fewest = min(c.failures for c in candidates)
    sound = {c.id: c for c in candidates if c.failures == fewest}
    cached = next(filter(None, usual), "")

    def seconds(candidate: Candidate) -> float:
        return candidate.pace * (work.answer + (candidate.id != cached) * work.prompt / PROMPT_TOKENS)

    return min(sound.values(), key=lambda c: (seconds(c), c.id != cached, c.load, c.busy, c.id)).id


def tokens_of_others(engine: EngineInfo, ours: int, size: int) -> float:
    """Estimate the tokens of other rollout servers in flight at an engine, from its last heartbeat.

    ours  requests from this server at that time
    size  tokens of one such request, for engines that do not report their cache usage
    """
    foreign = max(0, engine.running + engine.waiting - ours)
    held = engine.token_usage * engine.max_tokens
    return foreign * (held / engine.running if held and engine.running else size)
