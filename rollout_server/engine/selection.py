"""Choose the engine for a turn: pure.

  1. a trajectory stays with its engine, whose prefix cache holds its earlier turns;
  2. a new trajectory goes where its group started, so that the prompt is computed once;
  3. a new group goes to the engine with the least load.
Rules 1 and 2 give way when that engine is much busier than the idlest one: an engine that joins late is given work
at once, and not only when the others are idle. Engines that have failed this very turn come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import EngineInfo

BUSIER_RATIO, BUSIER_REQUESTS = 2.0, 4
"""An engine is much busier at twice the idlest one's load and four requests of this size more."""


@dataclass(frozen=True)
class Candidate:
    """An engine that may take the turn.

    load      tokens in flight there: ours, and what others seem to have
    busy      requests that it reports, ours included: decides between engines of the same load
    failures  times that it has failed this turn
    """

    id: str
    load: float
    busy: int = 0
    failures: int = 0


def pick_engine(candidates: Sequence[Candidate], usual: Sequence[str], size: int) -> str:
    """Id of the engine for a turn of `size` tokens, prompt included.

    candidates  at least one
    usual       ids of the trajectory's engine and of its group's, "" where there is none
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
    """Tokens that other rollout servers have in flight at an engine, as far as its last heartbeat shows.

    ours  requests of ours at that time
    size  tokens of one request of ours, for engines that do not say how full their cache is
    """
    foreign = max(0, engine.running + engine.waiting - ours)
    held = engine.token_usage * engine.max_tokens
    return foreign * (held / engine.running if held and engine.running else size)
