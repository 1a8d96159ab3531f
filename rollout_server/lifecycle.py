"""How a process of the rollout side starts and stops: signals, the port file, and errors out of a task group."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import UserError

log = logging.getLogger(__name__)


@dataclass
class Stop:
    """`asked`: finish what is in flight, then end. `hurry`: a second signal; end now."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop` while the block runs; the handlers are removed afterwards."""
    loop = asyncio.get_running_loop()

    def heard(name: str) -> None:
        if stop.asked.is_set():
            log.warning("%s again: stopping at once", name)
            stop.hurry.set()
        else:
            log.info("%s: stopping", name)
            stop.asked.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, heard, number.name)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def write_port_file(path: Path | None, port: int) -> None:
    """The port as text, by rename: a reader sees the whole number or no file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n")
    partial.replace(path)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Lets a UserError out of a task group as itself, so that the command line can print it."""
    try:
        yield
    except BaseExceptionGroup as group:
        found = group.subgroup(UserError)
        if found is None:
            raise
        error: BaseException = found
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
