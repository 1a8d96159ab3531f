"""Redis is away for more than an hour: the learner's real loops in virtual time go on with a bounded pause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
from sim import install
from sim.clock import Clock, Fiber, Process

from learner.delivery.background import BackgroundLoop, ErrorSlot
from learner.recovery import Recovery
from protocol.runtime.redis.errors import RedisUnavailable

FAILURES = 2000


class Away:
    """A call to a Redis that is away for FAILURES calls."""

    def __init__(self) -> None:
        self.calls, self.times = 0, list[float]()

    def __call__(self) -> None:
        self.calls += 1
        self.times.append(install.TIME.clock.now)
        if self.calls <= FAILURES:
            raise RedisUnavailable("connection refused")
        install.TIME.sleep(1)  # a tick waits for its clock

    def pauses(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)][:FAILURES]


def live(main: Callable[[], None]) -> None:
    """Run `main` as the training thread of a learner, in virtual time."""
    clock, ended = Clock(1), list[bool]()
    for module in (install.TIME, install.THREADING, install.RANDOM):
        module.clock = clock
    with install.installed():
        Fiber(clock, Process("L"), lambda: (main(), ended.append(True)), "train")
        assert clock.run(lambda: bool(ended), 5 * FAILURES)


@pytest.mark.fault(14)
def test_a_background_loop_survives_two_thousand_failures_in_a_row() -> None:
    away, errors = Away(), list[Any]()

    def main() -> None:
        slot = ErrorSlot()
        loop = BackgroundLoop("maintenance", away, slot)
        loop.start()
        while away.calls <= FAILURES and slot.is_clear.is_set():
            install.TIME.sleep(5)
        loop.stop()
        errors.append(slot._error)

    live(main)
    assert errors == [None] and away.calls > FAILURES
    assert max(away.pauses()) < 2.3 and away.times[FAILURES] > 3600


@pytest.mark.fault(14)
def test_the_training_thread_survives_two_thousand_failures_in_a_row() -> None:
    away = Away()
    recovery = []
    live(
        lambda: recovery.append(
            Recovery(MagicMock(), lambda: False, lambda: None).retry_until_available(away)  # type: ignore[func-returns-value]
        )
    )
    assert recovery == [None] and max(away.pauses()) < 2.3


def test_an_error_while_another_one_is_handled_reaches_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    from learner.delivery import background

    def broken(*_: object) -> float:
        raise OverflowError("int too large to convert to float")

    def fail() -> None:
        raise RedisUnavailable("connection refused")

    monkeypatch.setattr(background, "backoff_s", broken)
    slot = ErrorSlot()
    loop = BackgroundLoop("maintenance", fail, slot)
    loop.start()
    loop._thread.join(10)
    with pytest.raises(OverflowError):
        slot.raise_if_set()
