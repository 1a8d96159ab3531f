"""Choose the engine for a turn. Pure.

  1. A trajectory stays at its engine, whose prefix cache holds the earlier turns.
  2. A new trajectory goes to the engine of its group, so that the prompt is computed once.
  3. A new group goes to the least loaded engine.
Rules 1 and 2 do not apply when that engine is much busier than the least loaded one, so that an engine that joins late
gets work at once. Engines that have failed this turn come last.

Of E engines, a choice looks at those of its trajectory and group, and at the least loaded one that has not failed the
turn: cost O(log E), held by `EngineIndex`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import EngineInfo
from protocol.versions import PolicyVersion

BUSIER_RATIO, BUSIER_REQUESTS = 2.0, 4
"""An engine is much busier than the least loaded one at twice its load plus four requests of this size."""


@dataclass(frozen=True)
class Candidate:
    """An engine that may take the turn.

    load      tokens in flight there: ours, plus an estimate of the others'
    busy      requests that it reports, ours included: breaks ties between engines of equal load
    failures  how often it has failed this turn
    """

    id: str
    load: float
    busy: int = 0
    failures: int = 0


Load = tuple[float, int, str]
"""(load, busy, id) of an engine: its place in the order."""


class EngineIndex:
    """The engines that may get a request, and the order by load of those with capacity.

    Building it costs O(E log E): after a change of the table, a pin or an ejection. `update`: O(log E) comparisons.

    load   returns the place of an engine; None if it has no capacity
    pin    version that the engines have been restricted to
    until  time of `time.monotonic()` at which an ejected engine may be used again
    """

    def __init__(
        self,
        engines: Iterable[EngineInfo],
        load: Callable[[EngineInfo], Load | None],
        *,
        pin: PolicyVersion | None = None,
        until: float = math.inf,
    ) -> None:
        self.engines = {engine.id: engine for engine in engines}
        self.pin, self.until, self._load = pin, until, load
        self._places = {name: place for name, engine in self.engines.items() if (place := load(engine)) is not None}
        self._order = sorted(self._places.values())

    def update(self, name: str) -> None:
        """Apply a change of the load of an engine. Has no effect if the engine is not in the index."""
        old, engine = self._places.pop(name, None), self.engines.get(name)
        if old is not None:
            del self._order[bisect_left(self._order, old)]
        place = self._load(engine) if engine is not None else None
        if place is not None:
            self._places[name] = place
            insort(self._order, place)

    def idlest(self, failures: Mapping[str, int]) -> Iterator[str]:
        """Yield the ids of the least loaded engines with capacity, up to the first that has not failed this turn."""
        for *_, name in self._order:
            yield name
            if not failures.get(name):
                return


def pick_engine(candidates: Sequence[Candidate], usual: Sequence[str], size: int) -> str:
    """Return the id of the engine for a turn of `size` tokens, prompt included.

    candidates  at least one; `usual` and `EngineIndex.idlest` give the same choice as all engines
    usual       ids of the trajectory's engine and of its group's engine, "" if there is none
    """
    fewest = min(c.failures for c in candidates)
    sound = {c.id: c for c in candidates if c.failures == fewest}
    idlest = min(sound.values(), key=lambda c: (c.load, c.busy, c.id))
    for name in usual:
        known = sound.get(name)
        if known is not None:
            return idlest.id if known.load > BUSIER_RATIO * idlest.load + BUSIER_REQUESTS * size else known.id
    return idlest.id


def tokens_of_others(engine: EngineInfo, ours: int, size: int) -> float:
    """Estimate the tokens of other rollout servers in flight at an engine, from its last heartbeat.

    ours  requests from this server at that time
    size  tokens of one such request, for engines that do not report their cache usage
    """
    foreign = max(0, engine.running + engine.waiting - ours)
    held = engine.token_usage * engine.max_tokens
    return foreign * (held / engine.running if held and engine.running else size)
