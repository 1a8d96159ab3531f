"""The engine thread, the only one that uses torch. Receives commands from a queue, reports results through `notify`.

Loop: consumes commands (submit, abort, pause, update, ...) and, while not paused, the scheduler's requests; produces
tokens. Waits for a command when paused or idle; unblocked by any command, `stop` included.

Without a pause, a weight update waits until all earlier requests have ended, and later requests wait for the update, as
in SGLang. During a pause it is applied at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from rollout_server.cpu_engine.model.config import read_model_config
from rollout_server.cpu_engine.model.loader import Weights, WeightsError
from rollout_server.cpu_engine.scheduler.request import Request
from rollout_server.cpu_engine.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)
T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]
MEMORY = ("kv_cache", "weights", "cuda_graph")
"""SGLang's tags of memory that can be released."""


class Refused(Exception):
    """The state of the engine does not allow the command (HTTP 400). Nothing was changed."""


@dataclass(frozen=True)
class Update:
    """One weight update: a directory to read, or a complete verified set. `version` None keeps the label."""

    source: Path | Weights
    version: str | None
    flush_cache: bool
    abort_all: bool


class Engine:
    """Thread-safe interface of the scheduler. Public methods may be called from any thread; most return a Future."""

    def __init__(self, scheduler: Scheduler, model_path: Path, threads: int) -> None:
        self.scheduler, self.model_path = scheduler, model_path
        self.paused: PauseMode | None = None
        self.released: frozenset[str] = frozenset()
        """Tags of released memory: no request runs until all are resumed."""
        self._snapshot: dict[str, str] = {}
        self._threads = threads
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._held: list[Request] = []
        self._update: tuple[Update, Future[int]] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    @property
    def stopped(self) -> bool:
        """Whether generation is stopped."""
        return self.paused is not None or bool(self.released)

    @property
    def weights(self) -> Weights:
        """The weights in use."""
        return self.scheduler.runner.model.weights

    @property
    def waiting(self) -> int:
        """Number of waiting requests, including those that wait for an update."""
        return len(self.scheduler.waiting) + len(self._held)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current step. Requests in flight get no answer."""

        def stop() -> None:
            self._stopping = True

        self._commands.put(stop)
        self._thread.join()

    def submit(self, requests: list[Request]) -> None:
        """Queue requests together. Their `notify` is called on the engine thread."""
        self._commands.put(lambda: self._submit(requests))

    def abort(self, chosen: Callable[[Request], bool]) -> Future[None]:
        """End the chosen requests with their tokens so far."""
        return self._call(lambda: self._abort(chosen))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Pause generation. Running requests are aborted, requeued or frozen, depending on `mode`."""

        def pause() -> None:
            if mode == "abort":
                self._abort(lambda _: True)
            elif mode == "retract":
                self.scheduler.retract_all()
            self.paused = mode

        return self._call(pause)

    def resume(self) -> Future[None]:
        """Continue after `pause`."""

        def resume() -> None:
            self.paused = None

        return self._call(resume)

    def flush_cache(self) -> Future[None]:
        """Clear the prefix cache. Raises Refused while requests run, or wait without a pause."""

        def flush() -> None:
            self._check_idle("cache not flushed")
            self.scheduler.cache.clear()

        return self._call(flush)

    def release(self, tags: frozenset[str]) -> Future[None]:
        """Free the KV cache and stop until `reoccupy`. Raises Refused as `flush_cache` does.

        Weights stay in memory, as in SGLang with `--enable-weights-cpu-backup`; the other tags only stop generation.
        """

        def release() -> None:
            self._check_idle("memory not released")
            if "kv_cache" in tags:
                self.scheduler.cache.clear()
                self.scheduler.runner.kv.shrink()
            self.released |= tags

        return self._call(release)

    def reoccupy(self, tags: frozenset[str]) -> Future[None]:
        """Undo `release` for these tags."""

        def reoccupy() -> None:
            self.released -= tags

        return self._call(reoccupy)

    def update(self, update: Update) -> Future[int]:
        """Replace the weights. Returns the number of requests paused meanwhile.

        If it raises Refused or WeightsError, the weights are unchanged.
        """
        result: Future[int] = Future()

        def begin() -> None:
            if not result.set_running_or_notify_cancel():
                return
            if self._update is not None:
                result.set_exception(Refused("another weight update is already waiting"))
                return
            if update.abort_all:
                self._abort(lambda _: True)
            self._update = update, result
            self._try_update()

        self._commands.put(begin)
        return result

    def relabel(self, version: str, abort_all: bool) -> Future[None]:
        """Set another label for the current weights."""

        def relabel() -> None:
            if abort_all:
                self._abort(lambda _: True)
            self.scheduler.version = version

        return self._call(relabel)

    def checksums(self, algorithm: str = "sha256") -> Future[dict[str, str]]:
        """Return the checksum of each tensor by name, computed between two steps if it is not known."""
        return self._call(lambda: self.weights.checksums(algorithm))

    def snapshot(self) -> Future[None]:
        """Store the checksums of the weights, for `compare`."""

        def snapshot() -> None:
            self._snapshot = self.weights.checksums()

        return self._call(snapshot)

    def compare(self) -> Future[None]:
        """Raise Refused if the weights differ from the last snapshot, or if there is none."""

        def compare() -> None:
            if not self._snapshot:
                raise Refused("weights not compared: call snapshot first")
            sums = self.weights.checksums()
            different = [name for name in sums if sums[name] != self._snapshot[name]]
            if different:
                raise Refused(f"{len(different)} tensor(s) differ from the snapshot, first {different[0]!r}")

        return self._call(compare)

    def reset_tensors(self) -> Future[None]:
        """Fill every tensor with random numbers, so that `compare` can prove that an update replaced them all."""

        def reset() -> None:
            self._check_idle("tensors not reset")
            self.weights.randomize()
            self.scheduler.weights_changed()

        return self._call(reset)

    def _check_idle(self, what: str) -> None:
        """Raise Refused while requests run, or wait without a pause."""
        s = self.scheduler
        if s.running or (s.waiting and not self.stopped):
            raise Refused(f"{what}: {len(s.running)} running and {len(s.waiting)} waiting requests")

    def _call(self, action: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()

        def run() -> None:
            # the caller may be gone: setting the result of a cancelled future would raise and end this thread
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(action())
            except Exception as error:
                result.set_exception(error)

        self._commands.put(run)
        return result

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # applies to the calling thread only
        with torch.inference_mode():
            while not self._stopping:
                self._take_commands()
                if not self.stopped and not self._stopping:
                    self._step()
                self._try_update()

    def _take_commands(self) -> None:
        s = self.scheduler
        idle = self.stopped or not (s.running or s.waiting)
        try:
            while True:
                self._commands.get(block=idle)()
                idle = False
        except queue.Empty:
            pass

    def _step(self) -> None:
        counters = self.scheduler.counters
        counters.step_began = time.perf_counter()
        try:
            self.scheduler.step()
        except Exception as error:
            # an error of one request must not end the engine; the running requests get status 500
            log.exception("a step failed; ending its requests")
            counters.step_errors += 1
            self.scheduler.drop_everything(f"{type(error).__name__} in the engine: {error}")
        finally:
            counters.end_step(time.perf_counter())

    def _submit(self, requests: list[Request]) -> None:
        if self._update is not None:
            self._held += requests
            return
        for request in requests:
            self.scheduler.submit(request)

    def _abort(self, chosen: Callable[[Request], bool]) -> None:
        for request in self._held:
            if chosen(request):
                self.scheduler.submit(request)
        self._held = [r for r in self._held if not chosen(r)]
        self.scheduler.abort(chosen)

    def _try_update(self) -> None:
        """Apply the waiting update once no request runs or generation is paused."""
        s = self.scheduler
        if self._update is None or (not self.stopped and (s.running or s.waiting)):
            return
        (update, result), self._update = self._update, None
        try:
            self._load(update)
            result.set_result(len(s.running) + len(s.waiting) if self.paused else 0)
        except Exception as error:
            result.set_exception(error)
        held, self._held = self._held, []
        self._submit(held)

    def _load(self, update: Update) -> None:
        s = self.scheduler
        if update.flush_cache and s.running:
            raise Refused(
                f"the cache cannot be flushed while {len(s.running)} requests are paused in place: "
                "the weights were not changed; send flush_cache=false or pause with retract"
            )
        if isinstance(update.source, Path):
            self._read(update.source)
        else:
            s.runner.model.weights = update.source
        s.weights_changed()
        s.counters.weight_updates += 1
        if update.version is not None:
            s.version = update.version

    def _read(self, directory: Path) -> None:
        if (directory / "config.json").is_file() and read_model_config(directory) != self.weights.config:
            raise WeightsError(f"{directory / 'config.json'} describes a different architecture")
        self.weights.load(directory)
        self.model_path = directory
