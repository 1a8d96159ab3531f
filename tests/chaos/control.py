"""The control: a ring without the delivery rules, patched into the zygote's children only. The checker must fail it.

ack_on_receive  the learner acknowledges entries when it reads them; no_ledger  it trains everything that arrives
no_reconciler   lost seqs are not reissued; plain_publish  XADD, then XACK, and one group in twenty twice
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hooks import HOOKS

EVERYTHING = ("ack_on_receive", "no_ledger", "no_reconciler", "plain_publish")
TWICE_EVERY = 20
"""One in this many publications is made twice."""


def install(wrong: Sequence[str]) -> None:
    """Patch this process with the named bugs and hooks (hooks.py)."""
    for name in wrong:
        {
            **HOOKS,
            "ack_on_receive": ack_on_receive,
            "no_ledger": no_ledger,
            "no_reconciler": no_reconciler,
            "plain_publish": plain_publish,
        }[name]()


def ack_on_receive() -> None:
    from learner.delivery.store import RunStore
    from protocol.keys import TRAJ_GROUP

    read = RunStore.read

    def careless(self: RunStore, count: int) -> Any:
        found = read(self, count)
        if found:
            self._db.xack(self.keys.traj, TRAJ_GROUP, *(id_ for id_, _ in found))
        return found

    RunStore.read = careless  # type: ignore[method-assign]


def no_ledger() -> None:
    from learner.delivery.consumer import StreamConsumer
    from learner.delivery.state import DeliveryState
    from protocol.messages import TrajectoryGroup

    admit, settle = StreamConsumer._admit, DeliveryState.settle

    def credulous(self: StreamConsumer, entry: Any, *more: Any) -> None:
        delivery = self._delivery
        if isinstance(entry.message, TrajectoryGroup) and (
            entry.seq in delivery.ledger or entry.seq in delivery.pending
        ):
            self._buffer.append(entry)
            self._changed.notify_all()
        else:
            admit(self, entry, *more)

    def forgetful(self: DeliveryState, seqs: Any, *rest: Any, **more: Any) -> None:
        settle(self, [seq for seq in dict.fromkeys(seqs) if seq not in self.ledger], *rest, **more)

    StreamConsumer._admit = credulous  # type: ignore[method-assign]
    DeliveryState.settle = forgetful  # type: ignore[method-assign]


def no_reconciler() -> None:
    from learner.delivery.reconciler import MissingSeqReconciler

    MissingSeqReconciler.tick = lambda self: []  # type: ignore[method-assign]


def plain_publish() -> None:
    from protocol.header import seal
    from protocol.keys import TASK_GROUP
    from protocol.runtime.redis.aio import Backoff, retry_until_available
    from rollout_server.dispatch.publisher import GroupPublisher

    published = itertools.count(1)

    async def publish(self: GroupPublisher, entry: str, message: Any, *_: Any, **__: Any) -> bool:
        header, body = seal(message)
        keys = self._redis.keys

        async def add() -> None:
            await self._redis.batch(("XADD", keys.traj, "*", "seq", message.seq, "h", header, "b", body, "t", 0))

        async def ack() -> None:
            await self._redis.batch(("XACK", keys.tasks, TASK_GROUP, entry))

        backoff = Backoff(f"publishing seq {message.seq}", self._stats.waits)
        for _ in range(2 if next(published) % TWICE_EVERY == 0 else 1):
            await retry_until_available(backoff, add)
        await retry_until_available(backoff, ack)
        self._stats.counts["groups_published"] += 1
        return True

    GroupPublisher.publish = publish  # type: ignore[method-assign]
