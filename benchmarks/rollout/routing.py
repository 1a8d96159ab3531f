"""Routing policies to compare ours with, and a rollout server that routes by one of them.

`python -m benchmarks.rollout.routing POLICY key=value ...` is `python -m rollout_server` with the choice of an engine
replaced. All policies see the same candidates, and leave an engine that failed this turn for last; what differs is
which engine they take. Baselines have no window of requests for each engine (`rollout.adaptive: false`), as their
originals have none.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from itertools import count

from rollout_server.engine import router
from rollout_server.engine.selection import Candidate, pick_engine

Policy = Callable[[Sequence[Candidate], Sequence[str], int], str]


def sound(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those that failed this turn least often."""
    fewest = min(c.failures for c in candidates)
    return sorted((c for c in candidates if c.failures == fewest), key=lambda c: c.id)


def at_random() -> Policy:
    """Any engine, for every turn."""
    draw = random.Random(0)
    return lambda candidates, usual, size: draw.choice(sound(candidates)).id


def round_robin() -> Policy:
    """Return one engine after the other, for every turn (prime-rl's and AReaL's default)."""
    numbers = count()

    def policy(candidates: Sequence[Candidate], usual: Sequence[str], size: int) -> str:
        choices = sound(candidates)
        return choices[next(numbers) % len(choices)].id

    return policy


def least_loaded() -> Policy:
    """Return the engine with the fewest tokens in flight, for every turn."""
    return lambda candidates, usual, size: min(sound(candidates), key=lambda c: (c.load, c.busy, c.id)).id


def sticky() -> Policy:
    """Return the least loaded engine for the first turn of a trajectory, which then stays there (verl)."""

    def policy(candidates: Sequence[Candidate], usual: Sequence[str], size: int) -> str:
        choices = sound(candidates)
        if usual and usual[0] in {c.id for c in choices}:
            return usual[0]
        return min(choices, key=lambda c: (c.load, c.busy, c.id)).id

    return policy


def only_one() -> Policy:
    """Everything to the first engine that can be asked: what a broken router would do."""
    return lambda candidates, usual, size: sound(candidates)[0].id


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
    """Run a rollout server; its exit status."""
    from rollout_server.cli import main as serve

    setattr(router, "pick_engine", POLICIES[argv[0]]())  # noqa: B010  # the one name that the policies differ in
    return serve(list(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
