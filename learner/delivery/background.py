"""Background threads: periodic work that must not wait for a training step.

The lease thread renews the lease from its acquisition to the end, and does nothing else: neither a long load nor many
tasks to issue delay a renewal. The maintenance thread issues tasks as credit allows, reconciles, publishes metrics
every second, and serves requests. It waits for its clock (TICK_S) and is unblocked by `wake`: a step has been settled,
there is credit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from learner.delivery.audit import RedisAudit
from learner.delivery.autoscale import LOOK_S
from learner.delivery.issuer import TaskIssuer
from learner.delivery.lease import LearnerLease
from learner.delivery.reconciler import MissingSeqReconciler, RequeueRequests
from learner.delivery.store import RunStore
from protocol.errors import Fenced, StateLost, UserError
from protocol.messages import MetricsSnapshot
from protocol.runtime.redis.errors import BestEffort, RedisFull, RedisUnavailable
from protocol.runtime.timing import backoff_s

log = logging.getLogger(__name__)

TICK_S = 0.2
METRICS_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
SILENCE_S = 15.0
"""Minimum time between warnings about Redis, in seconds: some calls may work while others fail (a full Redis)."""


class ErrorSlot:
    """Holds the first error that a background thread could not handle; while it is set, these threads pause."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.is_clear = threading.Event()
        self.is_clear.set()

    def set(self, error: BaseException) -> None:
        """Set the error unless one is set: later errors are consequences."""
        with self._lock:
            if self._error is None:
                self._error = error
                self.is_clear.clear()

    def raise_if_set(self) -> None:
        """Raise the error if there is one."""
        if self._error is not None:
            raise self._error

    def clear(self) -> None:
        """Clear the error: the background threads continue."""
        with self._lock:
            self._error = None
            self.is_clear.set()


class BackgroundLoop:
    """Calls `tick` repeatedly in its own thread.

    A tick that finds Redis unavailable is repeated after a pause. After StateLost, Fenced or UserError, the loop sets
    `errors` and waits until the training thread clears it (also if another thread set it). Any other exception sets
    `errors` and ends the loop.
    Unblocked by: the tick's own waits, `errors.clear`, `stop`.
    """

    def __init__(self, name: str, tick: Callable[[], None], errors: ErrorSlot) -> None:
        self._tick, self._errors = tick, errors
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 15.0) -> None:
        """End the loop after the current tick."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._repeat()
        except BaseException as error:  # also one that is raised while another one is handled
            log.exception("%s failed", self._thread.name)
            self._errors.set(error)

    def _repeat(self) -> None:
        failures, last_logged = 0, -SILENCE_S
        while not self._stop.is_set():
            if not self._errors.is_clear.wait(0.2):
                continue
            try:
                self._tick()
                failures = 0
            except RedisUnavailable as error:
                failures += 1
                if time.monotonic() > last_logged + SILENCE_S:
                    last_logged = time.monotonic()
                    log.warning("%s: Redis is unavailable, retrying: %s", self._thread.name, error)
                self._stop.wait(backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            except (StateLost, Fenced, UserError) as error:
                self._errors.set(error)


class Interval:
    """Due every `seconds`, and immediately at first."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next = seconds, 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True

    def make_due(self) -> None:
        """Make it due immediately, after the work has failed."""
        self._next = 0.0


class LeaseRenewal:
    """Work of the lease thread (see the module). Raises the errors of `LearnerLease.renew`, and may be retried."""

    def __init__(self, lease: LearnerLease, lease_s: float) -> None:
        self._lease, self._renewal, self._clock = lease, Interval(lease_s / 3), threading.Event()

    def tick(self) -> None:
        self._clock.wait(TICK_S)
        if self._renewal.due():
            try:
                self._lease.renew()
            except BaseException:
                self._renewal.make_due()
                raise


class MaintenanceTask:
    """Work of the maintenance thread (see the module). Raises the errors of its parts, and may be retried."""

    def __init__(
        self,
        store: RunStore,
        issuer: TaskIssuer,
        reconciler: MissingSeqReconciler,
        requests: RequeueRequests,
        cross: RedisAudit,
        snapshot: Callable[[], MetricsSnapshot],
        *,
        reconcile_s: float,
        autoscale: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._issuer, self._reconciler = store, issuer, reconciler
        self._requests, self._cross, self.snapshot = requests, cross, snapshot
        self._autoscale, self._autoscaling = autoscale, Interval(LOOK_S)
        self._reconciling, self._metrics, self._complaints = map(Interval, (reconcile_s, METRICS_S, SILENCE_S))
        self._reconciling.due()  # first due after one interval
        self._best_effort = BestEffort()
        self.wake = threading.Event()

    def tick(self) -> None:
        self.wake.wait(TICK_S)
        self.wake.clear()
        if self._issuer.enabled.is_set() and self._reconciling.due():
            self._reconciler.tick()
        try:
            self._issuer.tick()
        except RedisFull as error:  # keep reporting
            if self._complaints.due():
                log.warning("issuing tasks is paused: %s", error)
        if self._metrics.due():
            self._cross.update()
            self.report()
            if self._autoscaling.due():
                self._best_effort(self._autoscale)
            if self._issuer.enabled.is_set():
                self._best_effort(self._requests.tick)

    def report(self) -> None:
        """Publish the current metrics."""
        snapshot = self.snapshot()
        self._best_effort(lambda: self._store.report(snapshot))
