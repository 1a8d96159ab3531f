"""Which dead seqs may be tried again, and what will happen then. Pure: the learner does it (`Keys.requeue`)."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.dead_letters import Fates
from deploy.harmless import harmless
from deploy.observe import Observation
from protocol.errors import UserError

SHOWN = 20


def choose(seen: Observation, fates: Fates, seqs: Sequence[int], *, reason: str = "") -> list[int]:
    """The seqs to requeue, ascending: `seqs`, or every dead or stale one with `reason`, or every dead one.

    Raises UserError when the run is over, when there is no ledger to look at, or when a named seq is neither.
    """
    if seen.is_done:
        raise UserError(
            "the run is done: nothing would try them again",
            todo="make it longer first (raise run.steps and start the learner again), then requeue",
        )
    if fates.ledger is None:
        raise UserError(
            "no checkpoint says yet which seqs are dead", todo="wait for the first one (learner.checkpoint_every)"
        )
    lost = fates.reopenable
    if not seqs:
        chosen = [seq for seq, why in lost.items() if why == reason] if reason else list(fates.dead)
        if reason and not chosen:
            known = ", ".join(sorted({harmless(why) for why in lost.values()})) or "none at all"
            raise UserError(f"no dead or stale seq has the reason {reason!r}", why=f"reasons there are: {known}")
    else:
        chosen = list(seqs)
        if wrong := [seq for seq in chosen if seq not in lost]:
            told = ", ".join(f"{seq} is {fates.of(seq)}" for seq in wrong[:SHOWN])
            raise UserError(
                f"only dead and stale seqs can be requeued, by the last checkpoint: {told}",
                why="one that is open is being tried anyway, and one that is trained must not be trained twice",
                todo="foray dlq list shows which are dead; one that died just now waits for the next checkpoint",
            )
    return sorted({seq for seq in chosen if seq not in fates.requeued})


def outlook(seen: Observation, seqs: Sequence[int]) -> str:
    """What will happen, in a sentence or two."""
    if not seqs:
        return "nothing to requeue: what is dead was requeued already"
    some = ", ".join(map(str, seqs[:SHOWN])) + (", ..." if len(seqs) > SHOWN else "")
    then = "opens them again in its ledger and issues them again; until they end they count as in flight"
    if seen.learner is None:
        return f"{len(seqs)} seqs requeued: {some}\nNo learner reports. When one starts it {then}."
    return f"{len(seqs)} seqs requeued: {some}\nThe learner {then}."
