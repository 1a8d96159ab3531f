"""The keeper: what must happen on time however long a training step takes.

An I/O thread. It renews the lease, issues tasks as credit allows, reconciles, publishes the metrics of each second
and looks for what people ask. It waits for its clock (TICK_S) and is unblocked by `wake`: a step has been settled,
there is credit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from learner.crosscheck import CrossCheck
from learner.io_loop import SILENCE_S
from learner.issue import Issuer
from learner.lease import Lease
from learner.metrics import Meter
from learner.reconcile import Reconciler
from learner.redis_client import RedisFull, RunStore
from learner.redis_errors import Tolerated
from learner.requests import Requests
from protocol.messages import MetricsSnapshot

log = logging.getLogger(__name__)

TICK_S = 0.2
METRICS_S = 1.0


class Every:
    """True once in `seconds`. Starts due."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next = seconds, 0.0

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True

    def again(self) -> None:
        """What was due has failed: it is due at once."""
        self._next = 0.0


class Keeper:
    """One turn of the I/O thread; see the module. Raises what its parts raise, and may be called again."""

    def __init__(
        self,
        store: RunStore,
        lease: Lease,
        issuer: Issuer,
        reconciler: Reconciler,
        requests: Requests,
        cross: CrossCheck,
        meter: Meter,
        snapshot: Callable[[], MetricsSnapshot],
        *,
        lease_s: float,
        reconcile_s: float,
    ) -> None:
        self._store, self._lease, self._issuer, self._reconciler = store, lease, issuer, reconciler
        self._meter = meter
        self._requests, self._cross, self.snapshot = requests, cross, snapshot
        self._renewal, self._reconciling, self._metrics = Every(lease_s / 3), Every(reconcile_s), Every(METRICS_S)
        self._complaints = Every(SILENCE_S)
        self._reconciling.due()  # not before the first interval has passed
        self._tolerated = Tolerated()
        self.wake = threading.Event()

    def turn(self) -> None:
        self.wake.wait(TICK_S)
        self.wake.clear()
        if self._renewal.due():
            try:
                self._lease.renew()
            except BaseException:
                self._renewal.again()
                raise
        if self._issuer.open.is_set() and self._reconciling.due():
            self._reconciler.turn()
        try:
            self._issuer.turn()
        except RedisFull as error:  # no reason to renew the lease less often, or to report less
            if self._complaints.due():
                log.warning("no tasks are issued at the moment: %s", error)
        if self._metrics.due():
            self._cross.update()
            self._tolerated(self._note_rate)
            self.report()
            if self._issuer.open.is_set():
                self._tolerated(self._requests.turn)

    def _note_rate(self) -> None:
        self._meter.generated_per_s = None
        self._meter.generated_per_s = self._store.generated_per_s()

    def report(self) -> None:
        """Publishes the metrics as they are."""
        snapshot = self.snapshot()
        self._tolerated(lambda: self._store.report(snapshot))
