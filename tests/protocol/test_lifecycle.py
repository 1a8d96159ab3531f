"""Signals: what the first and the second one do, with and without an event loop, and outside the main thread."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from protocol.runtime.lifecycle import DeferredShutdown, Terminated, deferred_shutdown, shutdown_on_signals, terminating


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_asks_a_service_to_stop_and_the_second_forces_it(second: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with shutdown_on_signals() as shutdown:
        kill(signal.SIGTERM)
        await asyncio.wait_for(shutdown.requested.wait(), 10)
        assert not shutdown.forced.is_set()
        kill(second)
        await asyncio.wait_for(shutdown.forced.wait(), 10)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_without_a_loop_ends_at_once_or_reads_the_signal_if_it_is_deferred() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, deferred_shutdown():
        kill(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    with deferred_shutdown() as shutdown:
        shutdown.deferred = True
        assert (shutdown.is_set(), shutdown.exit_code) == (False, 0)
        kill(signal.SIGTERM)
        kill(signal.SIGTERM)  # a launcher may repeat it
        assert (shutdown.is_set(), shutdown.exit_code) == (True, 143)
        with pytest.raises(KeyboardInterrupt):
            kill(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_command_is_terminated_by_an_exception_and_the_handler_before_it_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as ended, terminating():
        kill(signal.SIGTERM)
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def check() -> None:
        with terminating(), deferred_shutdown() as shutdown:
            assert isinstance(shutdown, DeferredShutdown) and signal.getsignal(signal.SIGTERM) == before

    with ThreadPoolExecutor(1) as pool:
        pool.submit(check).result(10)
