"""The sender over a group with NCCL's behaviour: what would hang or end the learner is aborted, and counts as failed.

The same faults with real engines, over gloo and over this group, are in `test_publish_distributed.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from learner.weights.process_group import GroupSender, Rendezvous, StallTimer
from protocol.runtime.net import free_port
from tests.support.lazy_group import LazyGroup, lazy_groups
from tests.support.waiting import wait_until

TENSOR = torch.arange(8)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LazyGroup]]:
    with lazy_groups(monkeypatch) as groups:
        yield groups


def meeting(name: str, *, stall_s: float = 60.0, timeout_s: float = 60.0, join_s: float = 20.0) -> Rendezvous:
    """A group of this rank alone."""
    return Rendezvous(name, "127.0.0.1", free_port(), 1, "gloo", join_s, timeout_s, stall_s)


def joined(rendezvous: Rendezvous, proof: torch.Tensor | None = TENSOR) -> GroupSender:
    sender = GroupSender(rendezvous, proof)
    sender.joined.result(20)
    return sender


def test_a_broadcast_that_hangs_is_aborted_while_nobody_waits_for_it(opened: list[LazyGroup]) -> None:
    sender = joined(meeting("g", stall_s=0.2, timeout_s=20.0))
    LazyGroup.stuck.set()
    done = sender.send([TENSOR])
    wait_until(lambda: opened[0].aborts == 1, "the group is aborted")
    with pytest.raises(RuntimeError, match="aborted"):  # although it looks complete
        done.result(10)
    with pytest.raises(RuntimeError, match="an earlier broadcast"):
        sender.send([TENSOR]).result(10)
    sender.close()
    sender.join()
    assert not sender.alive


def test_without_the_timer_the_watchdog_would_end_the_process(opened: list[LazyGroup]) -> None:
    """What the test before shows is not shown by a double that never kills."""
    sender = joined(meeting("g", timeout_s=0.2))
    LazyGroup.stuck.set()
    sender.send([TENSOR])
    wait_until(lambda: LazyGroup.killed == ["g"], "the watchdog fires")
    LazyGroup.killed.clear()
    sender.abort()
    sender.close()
    sender.join()


def test_a_group_that_does_not_connect_is_not_joined(opened: list[LazyGroup]) -> None:
    LazyGroup.stuck.set()
    sender = GroupSender(meeting("g", join_s=0.3), TENSOR)
    with pytest.raises(RuntimeError, match="not every rank has connected"):
        sender.joined.result(20)
    assert opened[0].aborts == 1
    with pytest.raises(RuntimeError, match="an earlier broadcast"):
        sender.send([TENSOR]).result(10)
    sender.close()
    sender.join()
    assert not sender.alive


def test_the_learner_can_abort_at_any_time_without_waiting(opened: list[LazyGroup]) -> None:
    sender = joined(meeting("g"))
    LazyGroup.stuck.set()
    under_way = [sender.send([TENSOR]) for _ in range(3)]
    sender.abort()
    sender.close()
    for done in under_way:
        with pytest.raises(RuntimeError):
            done.result(10)
    sender.join()
    assert not sender.alive and opened[0].aborts == 1


def test_a_sender_has_ended_only_when_its_abort_has(opened: list[LazyGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100 the process ended with SIGABRT: Python unwound the timer's thread out of NCCL's abort."""
    sender, go = joined(meeting("g")), threading.Event()
    abort = opened[0].abort
    monkeypatch.setattr(sender._timer, "_expired", lambda: (go.wait(20), abort()))
    LazyGroup.stuck.set()
    done = sender.send([TENSOR])
    sender.abort()
    sender.close()
    with pytest.raises(RuntimeError):
        done.result(10)
    sender._thread.join(0.2)
    assert sender.alive and not opened[0].aborts
    go.set()
    sender.join()
    assert not sender.alive and opened[0].aborts == 1


def test_what_is_expected_after_an_abort_does_not_revoke_it() -> None:
    """The thread that sends may begin a broadcast before the timer's thread has seen the abort."""
    aborts: list[int] = []
    timer = StallTimer("g", lambda: aborts.append(1))
    with timer._changed:  # the timer's thread sees nothing before both calls
        timer.expire()
        timer.expect(60.0)
    assert timer.fired.wait(10)
    wait_until(lambda: aborts == [1], "the abort")


def test_broadcasts_are_under_way_together_and_complete_in_order(opened: list[LazyGroup]) -> None:
    sender = joined(meeting("g"))
    LazyGroup.stuck.set()
    finished: list[int] = []
    under_way = [sender.send([TENSOR + i, TENSOR]) for i in range(3)]
    for i, done in enumerate(under_way):
        done.add_done_callback(lambda _, i=i: finished.append(i))
    wait_until(lambda: len(opened[0].marks) == 7, "the proof and all six are enqueued")
    assert not any(done.done() for done in under_way)
    LazyGroup.stuck.clear()
    sender.close()  # after what is under way
    sender.join()
    assert finished == [0, 1, 2] and all(done.exception() is None for done in under_way)
    assert opened[0].aborts == 0


def test_what_is_complete_is_marked_by_the_thread_that_makes_it(opened: list[LazyGroup]) -> None:
    """A GPU computes what a thread has enqueued: the thread that sends knows nothing of it."""
    sender = joined(meeting("g"), proof=None)
    sender.send([TENSOR]).result(10)
    assert [mark.thread for mark in opened[0].marks] == [threading.get_ident()]
    sender.close()
    sender.join()
