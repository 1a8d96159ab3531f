"""Metrics of every process: tables of names, the Prometheus page made from them, and timers of waits.

A metric has the same name everywhere: in the step line, `metrics.jsonl`, the trackers and the snapshots in Redis. In
Prometheus it has the prefix `foray_PROCESS_`, and units are spelt out (`prometheus_name`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from protocol.messages import MetricsSnapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of buckets for durations, in seconds; every histogram has one more bucket without a bound."""
COUNTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 16, 32)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
REWARDS = (-1, -0.5, -0.1, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 2)


@dataclass(frozen=True)
class Metric:
    """One row of a table. Its key is the name, or a pattern with one `*` for a family of names.

    help     a sentence
    labels   of a pattern: labels for the text that matches `*`, one for each part between slashes
    name     name in Prometheus, if it is not the key
    buckets  upper bounds of a histogram
    """

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    name: str = ""
    buckets: tuple[float, ...] = ()


Table = dict[str, Metric]


def counter(help: str, *labels: str, name: str = "") -> Metric:
    """Return a row for a value that never decreases during the life of the process."""
    return Metric("counter", help, labels, name)


def gauge(help: str, *labels: str, name: str = "") -> Metric:
    """Return a row for a current value."""
    return Metric("gauge", help, labels, name)


def histogram(help: str, buckets: tuple[float, ...]) -> Metric:
    """Return a row for the distribution of a value."""
    return Metric("histogram", help, buckets=buckets)


class Histogram:
    """Number of observations in each bucket, and their sum."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add `times` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it), cumulative as in Prometheus."""
        total, found = 0, []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found

    @property
    def sum(self) -> float:
        return self._sum


class WaitTimer:
    """Seconds spent waiting, by cause. Put `with waits.blocked_on("engine"): ...` around every wait.

    A cause accrues wall-clock time while one or more coroutines wait for it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total: dict[str, float] = {}
        self._waiting: dict[str, tuple[int, float]] = {}
        """cause -> (number of waiting coroutines, time since when there is at least one)"""

    @contextmanager
    def blocked_on(self, cause: str) -> Iterator[None]:
        """Count the duration of the block as a wait for `cause`."""
        count, since = self._waiting.get(cause, (0, 0.0))
        self._waiting[cause] = (count + 1, since if count else self._clock())
        try:
            yield
        finally:
            count, since = self._waiting.pop(cause)
            if count > 1:
                self._waiting[cause] = (count - 1, since)
            else:
                self._total[cause] = self._total.get(cause, 0.0) + self._clock() - since

    def seconds(self, now: float | None = None) -> dict[str, float]:
        """Return the seconds by cause, including waits in progress, as of `now` on the same clock."""
        now = self._clock() if now is None else now
        out = dict(self._total)
        for cause, (_, since) in self._waiting.items():
            out[cause] = out.get(cause, 0.0) + now - since
        return out


EXTENSION = gauge("A metric that an extension reports; its name is the label.", "name")
"""One family for all extension metrics, so that two names cannot become the same Prometheus name."""


def row_of(table: Table, name: str) -> tuple[str, Metric, list[str]]:
    """Return (key, row, label values) for `name`: the row with this name, else the longest pattern, else EXTENSION."""
    if name in table:
        return name, table[name], []
    for key in sorted(table, key=len, reverse=True):
        begin, star, end = key.partition("*")
        if star and name.startswith(begin) and name.endswith(end) and len(name) > len(begin) + len(end):
            row = table[key]
            found = name[len(begin) : len(name) - len(end)].split("/", len(row.labels) - 1)
            return key, row, [*found, *[""] * (len(row.labels) - len(found))]
    return "extension", EXTENSION, [name]


def prometheus_name(prefix: str, key: str, row: Metric) -> str:
    """Return the name of a family, without the `_total` of counters: units spelt out, slashes replaced.

    A row whose name begins with foray_ has no other prefix: it is of the run, not of the process that serves it.
    """
    name = row.name or key.replace("*", "").rstrip("_/")
    name = name.removesuffix("_total") if row.kind == "counter" else name
    for short, long in (("_per_s", "_per_second"), ("_s", "_seconds")):
        if name.endswith(short):
            name = name.removesuffix(short) + long
            break
    return name if name.startswith("foray_") else prefix + name.replace("/", "_")


@dataclass(eq=False)
class MetricsPage:
    """A prometheus_client collector over the tables of one process; makes the body of its `/metrics`.

    prefix      prefix of every family, e.g. foray_learner_
    read        returns the current values
    histograms  histograms by name; those in the table without observations are empty
    labels      labels of every sample
    waits       name and row of `MetricsSnapshot.waits`
    """

    prefix: str
    table: Table
    read: Callable[[], MetricsSnapshot]
    histograms: Callable[[], Mapping[str, Histogram]]
    labels: Mapping[str, str]
    waits: Metric | None = None

    def collect(self) -> Iterator[Family]:
        """Yield every family with its samples."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        now, families = self.read(), dict[str, CounterMetricFamily | GaugeMetricFamily]()
        names, values = list(self.labels), list(self.labels.values())
        if self.waits is not None:
            whole = prometheus_name(self.prefix, "", self.waits)
            waits = CounterMetricFamily(whole, self.waits.help, labels=[*names, *self.waits.labels])
            for cause, seconds in now.waits.items():
                waits.add_metric([*values, cause], seconds)
            yield waits
        for name, value in now.values.items():
            if f"{name}_*" in self.table:
                continue  # a total of families that differ in a label
            key, row, own = row_of(self.table, name)
            kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            whole = prometheus_name(self.prefix, key, row)
            families.setdefault(key, kind(whole, row.help, labels=[*names, *row.labels])).add_metric(
                [*values, *own], value
            )
        yield from families.values()
        found = self.histograms()
        for name, row in self.table.items():
            if row.kind == "histogram":
                shown = found.get(name) or Histogram(row.buckets)
                drawn = HistogramMetricFamily(prometheus_name(self.prefix, name, row), row.help, labels=names)
                buckets, labels = shown.buckets(), dict(self.labels)
                # prometheus_client omits these two for a negative bound
                drawn.add_metric(values, buckets=buckets, sum_value=None)
                drawn.add_sample(f"{drawn.name}_count", labels, buckets[-1][1])
                drawn.add_sample(f"{drawn.name}_sum", labels, shown.sum)
                yield drawn

    def describe(self) -> Iterator[Family]:
        """Yield nothing: the set of families depends on the current values."""
        return iter(())

    def text(self) -> bytes:
        """Return the body of `GET /metrics`."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)
