"""Time limits do not count the time in which the event loop stood still."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from protocol.runtime.timing import GRACE_S, LoopClock, LoopTimer, backoff_s, loop_timeout


def block(seconds: float) -> None:
    """Block the event loop."""
    time.sleep(seconds)


async def test_a_blocked_loop_gives_its_peer_the_rest_of_the_limit():
    # A control with asyncio.timeout: it expires although the answer came while the loop was blocked.
    async def answered_during_a_block(limit) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with limit:
                asyncio.get_running_loop().call_soon(block, 0.7)
                for _ in range(4):
                    await reader.readexactly(1)  # each needs an iteration of the loop
            return True
        except TimeoutError:
            return False
        finally:
            writer.close()

    async def serve(_reader, writer):
        writer.write(b"abcd")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await answered_during_a_block(loop_timeout(0.5))
        late = asyncio.Event()

        async def slow(limit):
            async with limit:
                asyncio.get_running_loop().call_soon(block, 0.7)
                await asyncio.sleep(0)
                await asyncio.sleep(0.1)
            late.set()

        with pytest.raises(TimeoutError):
            await slow(asyncio.timeout(0.5))
        await slow(loop_timeout(0.5))
        assert late.is_set()


async def test_a_limit_still_expires_for_a_peer_that_is_really_silent():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with loop_timeout(0.3):
            await asyncio.sleep(60)
    assert time.monotonic() - began < 30
    with pytest.raises(TimeoutError):  # also after a standstill
        async with loop_timeout(0.6):
            block(0.8)
            await asyncio.sleep(60)


async def test_what_arrived_in_a_standstill_at_the_end_of_the_limit_is_read_first():
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    answer = threading.Timer(0.8, theirs.sendall, [b"abcd"])
    answer.start()
    try:
        async with loop_timeout(0.6):
            asyncio.get_running_loop().call_later(0.55, block, 0.9)  # the tick after the limit is due at 0.75
            for _ in range(4):
                await reader.readexactly(1)
                await asyncio.sleep(0)  # each takes an iteration of the loop
    finally:
        answer.join()
        writer.close()
        theirs.close()


async def test_a_loop_that_stands_still_again_and_again_excuses_no_silent_peer():
    async def stand_still() -> None:
        while True:
            block(0.6)
            await asyncio.sleep(0.05)

    standing = asyncio.create_task(stand_still())
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with loop_timeout(0.5):
            await asyncio.sleep(60)
    assert time.monotonic() - began < 30
    standing.cancel()


async def test_the_clock_stands_still_with_its_loop_and_stops_ticking_when_unused():
    clock = LoopClock.current()
    timer = LoopTimer(lambda: None)
    timer.arm(60)
    before = clock.time()
    await asyncio.sleep(0.01)
    block(0.9)
    stood = clock.time() - before
    await asyncio.sleep(0.01)  # the late tick runs now, and must not count the standstill again
    assert clock.time() - before < 0.6
    assert stood < 0.6
    assert clock is LoopClock.current()
    timer.cancel()
    timer.cancel()  # releases once
    await asyncio.sleep(GRACE_S)
    assert clock._handle is None and clock._users == 0


def test_backoff_doubles_up_to_its_bound_for_any_number_of_failures():
    assert [backoff_s(n, 0.1, 2.0) for n in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert {backoff_s(n, 0.5, 10.0) for n in (6, 1023, 1024, 1025, 2000, 10**9)} == {10.0}
    assert backoff_s(0, 0.5, 10.0) == 0.5
