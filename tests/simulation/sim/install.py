"""Run product code in the simulation: give its modules virtual time, threads, connections and a disk with crash points.

All replacements are listed here. Everything else is unchanged product code.
"""

from __future__ import annotations

import importlib
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from sim.clock import Clock, Process
from sim.engine import SimBatch
from sim.threads import Random, RLock, Threading, Time

from learner.data.questions import QuestionSet, fingerprint
from tests.support.messages import make_question

TIME, THREADING, RANDOM = Time(), Threading(), Random()
"""One of each for the life of the process: modules keep them, `clock` is set for each schedule."""

PRODUCT = ("learner.", "rollout_server.", "protocol.")
BORROWED = {"time": (time, TIME), "threading": (threading, THREADING), "random": (random, RANDOM)}
QUESTIONS = tuple(make_question(n) for n in range(1, 8))
QUESTION_SET = QuestionSet(QUESTIONS, fingerprint(QUESTIONS))


class World(Protocol):
    """What replaced parts need of the present schedule."""

    clock: Clock

    def sync_client(self, timeout_s: float) -> Any: ...
    def async_client(self) -> Any: ...
    def disk(self, path: Path) -> None: ...
    def committed(self, process: Process, folder: Path) -> None: ...
    def reissues(self, again: list[int]) -> None: ...


class _Quiet:
    """Replaces metrics.jsonl, the trackers and the terminal output."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def append(self, *_: object, **__: object) -> None: ...
    def log(self, *_: object, **__: object) -> None: ...
    def step(self, *_: object, **__: object) -> None: ...
    def trace(self, *_: object, **__: object) -> None: ...
    def close(self) -> None: ...


world: Any = None
"""The present schedule."""


def _books(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **more: Any) -> Any:
        made = make(*args, lock=RLock(world.clock), **more)
        world.clock.current.state = made
        return made

    return made


Guard = Callable[[Path], AbstractContextManager[None]]


def _atomic_write(path: Path, text: str, *, durable: bool, guard: Guard | None = None) -> None:
    """protocol.runtime.files.atomic_write: a crash happens before or after it, because rename is atomic."""
    part = path.with_name(f".{path.name}.{random.getrandbits(40):x}.tmp")
    with guard(part) if guard else nullcontext():
        world.disk(path)
        part.write_text(text)
        part.replace(path)
        if path.name == "CURRENT":
            world.committed(world.clock.current, path.parent / text.strip())
    world.disk(path)


def _fsync_tree(folder: Path) -> None:
    """protocol.runtime.files.fsync_tree; the manifest had its moments when it was written."""
    inside = sorted(p for p in folder.rglob("*") if p.name != "manifest.json")
    for path in [*sorted(inside, key=Path.is_dir), folder]:
        world.disk(path)


class _Disk:
    """Replaces shutil: dead processes delete nothing."""

    def rmtree(self, path: Path, ignore_errors: bool = False) -> None:
        if world.clock.current.alive:
            shutil.rmtree(path, ignore_errors=ignore_errors)


@contextmanager
def _deferred_shutdown() -> Iterator[Any]:
    yield world.clock.current.stop


def _reconciler_turn(turn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def watched(self: Any) -> Any:
        again = turn(self)
        world.reissues(list(again))
        return again

    return watched


def replacements() -> dict[str, Any]:
    """module.name[.name] -> its replacement during a simulation."""
    from learner.delivery.reconciler import MissingSeqReconciler
    from learner.delivery.state import DeliveryState

    return {
        "learner.delivery.store.connect": lambda url, timeout_s=10.0: world.sync_client(timeout_s),
        "protocol.runtime.redis.aio.connect_async": lambda url: world.async_client(),
        "protocol.runtime.redis.aio.close_async": lambda client: client.aclose(),
        "learner.main.load_questions": lambda path: QUESTION_SET,
        "learner.main.deferred_shutdown": _deferred_shutdown,
        "learner.main.DeliveryState": _books(DeliveryState),
        "learner.main.StepLog": _Quiet,
        "learner.main.StepReporter": _Quiet,
        "learner.main.open_trackers": _Quiet,
        "learner.loop.batch_for_step": lambda conditions, groups, *_, **__: SimBatch(groups),
        "learner.checkpoint.checkpoint.fsync_path": lambda path: world.disk(path),
        "learner.checkpoint.checkpoint.fsync_tree": _fsync_tree,
        "learner.checkpoint.checkpoint.atomic_write": _atomic_write,
        "learner.checkpoint.checkpoint.shutil": _Disk(),
        "rollout_server.dispatch.publisher.seal": lambda message: world.seal(message),
        "learner.delivery.lease.has_ended": lambda token: world.is_dead(token),
        "learner.delivery.reconciler.MissingSeqReconciler.tick": _reconciler_turn(MissingSeqReconciler.tick),
    }


@contextmanager
def installed(more: dict[str, Any] | None = None) -> Iterator[None]:
    """Apply all replacements while the block runs. more: mutations, applied first."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    try:
        for dotted, value in (more or {}).items():
            put(*_place(dotted), value)
        for dotted, value in replacements().items():
            put(*_place(dotted), value)
        for module in [m for n, m in sorted(sys.modules.items()) if n.startswith(PRODUCT)]:
            for name, (real, ours) in BORROWED.items():
                if module.__dict__.get(name) is real:
                    put(module, name, ours)
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def _place(dotted: str) -> tuple[Any, str]:
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:cut]))
        if module is None:
            try:
                module = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
        owner: Any = module
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise LookupError(dotted)
