"""Baseline routing policies, and a rollout server that uses one of them.

`python -m benchmarks.rollout.routing POLICY key=value ...` is `python -m rollout_server` with another choice of the
engine. All policies see the same candidates and prefer engines that have not failed this turn; they differ in the
engine they choose. Baselines have no adaptive request limit per engine (`rollout.adaptive: false`), like their
originals.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from itertools import count

from rollout_server.engine import router
from rollout_server.engine.selection import Candidate, EngineIndex, Work, pick_engine

Policy = Callable[[Sequence[Candidate], Sequence[str], Work], str]


def sound(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with the fewest failures in this turn."""
    fewest = min(c.failures for c in candidates)
    return sorted((c for c in candidates if c.failures == fewest), key=lambda c: c.id)


def at_random() -> Policy:
    """Return a policy that chooses a random engine for every turn."""
    draw = random.Random(0)
    return lambda candidates, usual, work: draw.choice(sound(candidates)).id


def round_robin() -> Policy:
    """Return a policy that takes the engines in turn (prime-rl's and AReaL's default)."""
    numbers = count()

    def policy(candidates: Sequence[Candidate], usual: Sequence[str], work: Work) -> str:
        choices = sound(candidates)
        return choices[next(numbers) % len(choices)].id

    return policy


def least_loaded() -> Policy:
    """Return a policy that chooses the engine with the fewest tokens in flight for every turn."""
    return lambda candidates, usual, work: min(sound(candidates), key=lambda c: (c.load, c.busy, c.id)).id


def sticky() -> Policy:
    """Return a policy that chooses the least loaded engine for a trajectory's first turn and keeps it (verl)."""

    def policy(candidates: Sequence[Candidate], usual: Sequence[str], work: Work) -> str:
        choices = sound(candidates)
        if usual and usual[0] in {c.id for c in choices}:
            return usual[0]
        return min(choices, key=lambda c: (c.load, c.busy, c.id)).id

    return policy


def only_one() -> Policy:
    """Return a policy that always chooses the first available engine, like a broken router."""
    return lambda candidates, usual, work: sound(candidates)[0].id


OURS = "foray"
BROKEN = "only_one"
POLICIES: dict[str, Callable[[], Policy]] = {
    OURS: lambda: pick_engine,
    "random": at_random,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "sticky": sticky,
    BROKEN: only_one,
}


def main(argv: Sequence[str]) -> int:
    """Run a rollout server and return its exit status."""
    from rollout_server.cli import main as serve

    setattr(router, "pick_engine", POLICIES[argv[0]]())  # noqa: B010  # the one name that the policies differ in
    if argv[0] != OURS:  # Foray's choice needs the fastest engine only
        setattr(EngineIndex, "fastest", lambda index, failures: [name for *_, name in index._order])  # noqa: B010
    return serve(list(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
