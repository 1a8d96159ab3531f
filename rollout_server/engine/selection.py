"""Choose the engine for a turn. Pure.

  1. A trajectory stays at its engine, whose prefix cache holds the earlier turns.
  2. A new trajectory goes to the engine of its group, so that the prompt is computed once.
  3. A new group goes to the least loaded engine.
Rules 1 and 2 do not apply when that engine is much busier than the least loaded one, so that an engine that joins late
gets work at once. Engines that have failed this turn come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import EngineInfo

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


def pick_engine(candidates: Sequence[Candidate], usual: Sequence[str], size: int) -> str:
    """Return the id of the engine for a turn of `size` tokens, prompt included.

    candidates  at least one
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
