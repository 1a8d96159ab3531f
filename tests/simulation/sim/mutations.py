"""The product, broken in known ways: some schedule must find each, or the invariants are too weak.

A mutation replaces names like `install.replacements`. Each is a classic bug of such a system.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sim import functions
from sim.knobs import Knobs, draw
from sim.sim_redis import SimRedis

from learner.checkpointing import CheckpointWriter
from learner.delivery.consumer import StreamConsumer
from learner.delivery.reconciler import MissingSeqReconciler
from learner.delivery.state import DeliveryState
from learner.loop import TrainingLoop
from protocol.ledger import Ledger


@dataclass(frozen=True)
class Mutation:
    """name.of.what -> replacement; `invariants`: the finding must contain one of these texts.

    faults  added to every schedule, so that the bug is triggered soon
    tight   Redis holds little more than one batch in all of them
    fixed   knobs that have these values in every schedule
    """

    replaced: Callable[[], dict[str, Any]]
    invariants: tuple[str, ...]
    faults: dict[str, int] = field(default_factory=dict)
    tight: bool = False
    fixed: dict[str, Any] = field(default_factory=dict)

    def knobs(self, seed: int) -> Knobs:
        """The schedule of `seed` with these faults in it."""
        knobs = replace(draw(seed), **self.fixed)
        knobs.faults = knobs.faults | self.faults
        if self.tight:
            knobs.tighten(seed % 3)
        return knobs


def ack_before_commit() -> dict[str, Any]:
    """Acknowledge entries after their step, not after the checkpoint that contains it."""
    step = TrainingLoop.step

    def broken(self: TrainingLoop, entries: list[Any]) -> bool:
        done = step(self, entries)
        self.recovery.retry_until_available(lambda: self.ctx.store.ack([e.id for e in entries]))
        return done

    return {"learner.loop.TrainingLoop.step": broken}


def ack_before_the_disk() -> dict[str, Any]:
    """Acknowledge first, then write the checkpoint."""
    begin = CheckpointWriter.begin

    def broken(self: CheckpointWriter) -> bool:
        ids = [name.encode() for name in self.ctx.delivery.to_state()["entries"]]
        self.recovery.retry_until_available(lambda: self.ctx.store.ack(ids))
        return begin(self)

    return {"learner.checkpointing.CheckpointWriter.begin": broken}


def ack_what_came_later() -> dict[str, Any]:
    """Acknowledge what is settled when the checkpoint is committed, not what its snapshot contains."""
    durable = DeliveryState.mark_durable

    def broken(self: DeliveryState, state: dict[str, Any]) -> list[bytes]:
        return durable(self, self.to_state())

    return {"learner.delivery.state.DeliveryState.mark_durable": broken}


class _Forgetful(Ledger):
    """A ledger that reports every seq as new, and records it again."""

    def __contains__(self, seq: int) -> bool:
        return False


def no_ledger_check() -> dict[str, Any]:
    """Train a group again if it arrives again: skip the ledger checks on arrival and on settling."""
    admit, settle = StreamConsumer._admit, DeliveryState.settle

    def admits(self: StreamConsumer, *rest: Any) -> None:
        delivery = self._delivery
        truth, delivery.ledger = delivery.ledger, _Forgetful()
        try:
            admit(self, *rest)
        finally:
            delivery.ledger = truth

    def settles(self: DeliveryState, seqs: Any, *rest: Any, **more: Any) -> None:
        settle(self, [seq for seq in seqs if seq not in self.ledger], *rest, **more)

    return {
        "learner.delivery.consumer.StreamConsumer._admit": admits,
        "learner.delivery.state.DeliveryState.settle": settles,
    }


def not_fenced() -> dict[str, Any]:
    """Do not check the lease in Redis."""
    return {"sim.functions.own": lambda *_: True}


def one_look() -> dict[str, Any]:
    """Reissue a seq that the reconciler missed only once."""
    turn = MissingSeqReconciler.tick

    def broken(self: MissingSeqReconciler) -> list[int]:
        self._missing_once = frozenset(range(1, 1000))
        return turn(self)

    return {"learner.delivery.reconciler.MissingSeqReconciler.tick": broken}


def no_reconciler() -> dict[str, Any]:
    """Never reissue missing seqs."""
    return {"learner.delivery.reconciler.MissingSeqReconciler.tick": lambda self: []}


def unguarded_publish() -> dict[str, Any]:
    """Add a group even if its task is no longer leased."""

    def publish(r: SimRedis, k: list[str], a: list[bytes]) -> Any:
        r.xack(k[0], "rollout", a[0])
        functions.count(r, k, 2, "published", a, 4)
        return r.xadd(k[1], {"seq": a[1], "h": a[2], "b": a[3], "t": a[4]})

    return {"sim.functions.FUNCTIONS": functions.FUNCTIONS | {"foray_publish": (publish, False)}}


def gate_without_watermark() -> dict[str, Any]:
    """Compute credit from settled seqs only, so that others run far ahead of a straggler."""

    def limit(*, settled: int, watermark: int, max_lag: int, groups_per_step: int) -> int:
        return settled + (max_lag + 1) * groups_per_step

    return {"learner.delivery.state.issue_limit": limit}


def stuck_gate() -> dict[str, Any]:
    """The earlier credit gate, which could deadlock, as the simulation found."""

    def limit(*, settled: int, watermark: int, max_lag: int, groups_per_step: int) -> int:
        window = (max_lag + 1) * groups_per_step
        return min(settled + window, watermark + 4 * window)

    return {"learner.delivery.state.issue_limit": limit}


def nothing_taken_over() -> dict[str, Any]:
    """Do not read entries that were delivered to the previous learner."""
    return {"learner.delivery.store.RunStore.claim": lambda self: []}


def no_reclaim() -> dict[str, Any]:
    """Do not reclaim the tasks of dead rollout servers."""

    async def broken(self: Any) -> list[Any]:
        return []

    return {"rollout_server.dispatch.leases.LeasePool._reclaim": broken}


def begun_twice() -> dict[str, Any]:
    """Start a task even if this rollout server already works on it."""
    from rollout_server.dispatch.leases import LeasePool

    start = LeasePool._start

    class Blind(dict[str, Any]):
        def __contains__(self, entry: object) -> bool:
            return False

    def broken(self: LeasePool, *rest: Any) -> None:
        if not isinstance(self.in_flight, Blind):
            self.in_flight = Blind(self.in_flight)
        start(self, *rest)

    return {"rollout_server.dispatch.leases.LeasePool._start": broken}


def no_checkpoint_while_starving() -> dict[str, Any]:
    """Wait for a batch without a checkpoint, even if Redis is full."""
    return {"learner.loop.TrainingLoop._make_room_in_redis": lambda self: None}


def one_checkpoint_a_step() -> dict[str, Any]:
    """Delay decisions between two steps until the next step."""
    begin = CheckpointWriter.begin

    def broken(self: CheckpointWriter) -> bool:
        return self.ctx.checkpoints.committed(self.ctx.delivery.step, self.ctx.lease.epoch) or begin(self)

    return {"learner.checkpointing.CheckpointWriter.begin": broken}


def refused_when_full(name: str) -> Callable[[], dict[str, Any]]:
    """A function without the flag allow-oom."""
    return lambda: {"sim.functions.FUNCTIONS": functions.FUNCTIONS | {name: (functions.FUNCTIONS[name][0], False)}}


def prepared_blindly() -> dict[str, Any]:
    """Always load the functions at start, even if they are present."""
    return {"learner.delivery.redis_setup._has_functions": lambda db: False}


FEW_STRAGGLERS = {
    "steps": 20,
    "groups_per_step": 3,
    "max_lag": 1,
    "rollout_s": 0.1,
    "step_s": 0.05,
    "straggler": 0.14,
    "reconcile_s": 4.0,
    "idle_s": 4.0,
    "broken": 0.026,
    "same_reward": 0.19,
    "reject": 0.0,
    "corrupt": 0.0,
    "nonfinite": 0.0,
    "disk": 0.0,
    "memory": 0,
    "checkpoint_every": 3,
    "faults": {},
}
"""Quick groups, a few that last until the others have used up the credit, and no fault that would end the wait."""
ENDLESS = ("did not end", "no end")
LOCKED = (*ENDLESS, "is full")
MUTATIONS: dict[str, Mutation] = {
    "ack before commit": Mutation(ack_before_commit, ("acknowledged is durable",)),
    "ack before the disk": Mutation(ack_before_the_disk, ("acknowledged is durable",)),
    "ack what came later": Mutation(ack_what_came_later, ("acknowledged is durable",)),
    "no ledger check": Mutation(no_ledger_check, ("trained once", "the ledger is true"), {"redis rolled back": 4}),
    "not fenced": Mutation(not_fenced, ("fenced",)),
    "reissue after one look": Mutation(one_look, ("missing twice",), {"redis stopped": 3}),
    "no reconciler": Mutation(no_reconciler, ENDLESS, {"task deleted": 3}),
    "publish without its task": Mutation(unguarded_publish, ("published once",)),
    "gate without watermark": Mutation(gate_without_watermark, ("credit",)),
    "gate that locks itself": Mutation(stuck_gate, ENDLESS, fixed=FEW_STRAGGLERS),
    "nothing taken over": Mutation(nothing_taken_over, (*ENDLESS, "not settled", "accounting is not consistent")),
    "tasks of the dead stay": Mutation(no_reclaim, ENDLESS, {"rollouts killed": 3}),
    "no checkpoint while starving": Mutation(no_checkpoint_while_starving, ENDLESS, tight=True),
    "one checkpoint a step": Mutation(one_checkpoint_a_step, ENDLESS, tight=True),
    "ack refused when full": Mutation(refused_when_full("foray_ack"), ENDLESS, tight=True),
    "acquire refused when full": Mutation(
        refused_when_full("foray_acquire"), LOCKED, {"learner killed": 3}, tight=True
    ),
    "target refused when full": Mutation(refused_when_full("foray_target"), ENDLESS, tight=True),
    "functions loaded blindly": Mutation(prepared_blindly, LOCKED, {"learner killed": 3}, tight=True),
    "task begun twice": Mutation(begun_twice, ("broke",), {"redis rolled back": 6}),
}
