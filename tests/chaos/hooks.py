"""Places for faults inside the ring's processes. They change nothing until a file in the ring's `hooks` folder says so.

    ejections     a rollout server prints each ejection of an engine
    blocked_loop  SIGUSR1 blocks the event loop of a rollout server for the seconds in NAME.block
    burst         SIGUSR2 makes a rollout server publish its last group again, NAME.burst times at once
    slow_load     a learner needs the seconds in NAME.slow_load longer to verify a checkpoint
    deadly_batch  a learner that trains the seq in NAME.deadly ends with SIGSEGV

Installed in the child of the zygote before the product's `main`. Run as a program (`hooks.py JSON`), it is that child
after an exec, for a process with a preloaded library.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER, NAME = "FORAY_CHAOS_HOOKS", "FORAY_CHAOS_NAME"
OF = {"rollout_server": ("ejections", "blocked_loop", "burst"), "learner": ("slow_load", "deadly_batch")}
"""Hooks of each module."""
JUMPED, FAR_S = "the wall clock jumped by", 10.0


def file(hook: str) -> Path:
    """Return the file that controls a hook of this process."""
    return Path(os.environ[FOLDER]) / f"{os.environ[NAME]}.{hook}"


def asked(hook: str) -> float:
    """Return the number in the file of a hook, 0 if there is none."""
    try:
        return float(file(hook).read_text() or 0)
    except OSError:
        return 0.0


def tell(text: str) -> None:
    """Print a line with the monotonic time, which no fault changes and which all processes share."""
    print(f"chaos: {time.clock_gettime(time.CLOCK_MONOTONIC):.3f} {text}", flush=True)


def ejections() -> None:
    from rollout_server.engine.health import EngineHealth

    def telling(blame: Callable[..., Any]) -> Callable[..., Any]:
        def told(self: EngineHealth, key: str, *why: Any, **more: Any) -> Any:
            before = self.usable(key)
            result = blame(self, key, *why, **more)
            if before and not self.usable(key):
                tell(f"ejected {key}: {why}")
            return result

        return told

    for name in ("strike", "unreachable"):
        setattr(EngineHealth, name, telling(getattr(EngineHealth, name)))


def blocked_loop() -> None:
    def block(*_: object) -> None:
        seconds = asked("block")
        time.sleep(seconds)  # in the main thread, between two callbacks of the loop
        tell(f"the event loop stood still for {seconds:.1f} s")

    signal.signal(signal.SIGUSR1, block)


def burst() -> None:
    from rollout_server.dispatch.publisher import GroupPublisher

    publish = GroupPublisher.publish
    last: list[Callable[[], None]] = []
    running: set[asyncio.Task[None]] = set()

    async def remembering(self: GroupPublisher, *args: Any, **more: Any) -> bool:
        done = await publish(self, *args, **more)
        loop = asyncio.get_running_loop()

        async def again() -> None:
            count, began = int(asked("burst")), time.monotonic()
            results = await asyncio.gather(*(publish(self, *args, **more) for _ in range(count)))
            new = sum(map(bool, results))
            tell(f"{count} groups published at once, {new} of them new, in {time.monotonic() - began:.1f} s")

        def start() -> None:
            task = loop.create_task(again())
            running.add(task)
            task.add_done_callback(running.discard)

        last[:] = [lambda: loop.call_soon_threadsafe(start) and None]
        return done

    GroupPublisher.publish = remembering  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR2, lambda *_: [call() for call in last] and None)


def slow_load() -> None:
    from learner.checkpoint.checkpoint import Checkpoints

    load = Checkpoints.load

    def slowly(self: Checkpoints, *args: Any, **more: Any) -> Any:
        if seconds := asked("slow_load"):
            tell(f"verifying the checkpoint takes {seconds:.1f} s longer")
            time.sleep(seconds)
        return load(self, *args, **more)

    Checkpoints.load = slowly  # type: ignore[method-assign]


def deadly_batch() -> None:
    from learner.loop import TrainingLoop
    from learner.trainer.trainer import Trainer

    step, train = TrainingLoop.step, Trainer.train
    seqs: set[int] = set()

    def stepping(self: TrainingLoop, entries: Any) -> bool:
        seqs.clear()
        seqs.update(entry.seq for entry in entries)
        return step(self, entries)

    def training(self: Trainer, *args: Any, **more: Any) -> Any:
        if (seq := int(asked("deadly"))) in seqs:
            tell(f"training seq {seq} ends this process")
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
        return train(self, *args, **more)

    TrainingLoop.step = stepping  # type: ignore[method-assign]
    Trainer.train = training  # type: ignore[method-assign]


def report_jumps() -> None:
    """Print each jump of the wall clock against the monotonic one, as this process sees them. Does not return."""
    before = time.time() - time.monotonic()
    while True:
        threading.Event().wait(0.5)
        now = time.time() - time.monotonic()
        if abs(now - before) > FAR_S:
            tell(f"{JUMPED} {now - before:+.0f} s")
            before = now


HOOKS: dict[str, Callable[[], None]] = {
    hook.__name__: hook for hook in (ejections, blocked_loop, burst, slow_load, deadly_batch)
}


def main() -> int:
    from control import install

    os.environ.pop("LD_PRELOAD")  # for this process alone, not for an engine that it starts
    time.sleep = lambda seconds: select.select([], [], [], seconds) and None  # libfaketime refuses a sleep to a moment
    threading.Thread(target=report_jumps, name="jumps", daemon=True).start()
    order = json.loads(sys.argv[1])
    install(order["wrong"])
    sys.argv = [order["module"], *order["argv"]]
    return int(importlib.import_module(order["main"]).main(order["argv"]) or 0)


if __name__ == "__main__":
    sys.exit(main())
