"""Traces: one per trajectory group, from its question to the step that trained it. Off unless `run.trace` is set.

    question -> rollout -> trajectory -> turn -> engine request
                   |            |          +---> search, tool
                   |            +-> reward
                   +-> publish -> batch -> step

Learner and rollout servers produce their own spans. No message carries a context: the ids of the trace and of the
stages are hashes of what the messages carry already (run, lineage id, seq, attempt).
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import MappingProxyType

from protocol.runtime.tracing_export import EndedSpan, SpanQueue, Value, file_export, otlp_export
from protocol.settings import RunSettings

PARENTS = MappingProxyType(
    {"question": "", "reissue": "question", "rollout": "question", "publish": "rollout", "batch": "publish"}
    | {"step": "batch"}
)
"""Stage -> the stage that it follows. The other spans are below a stage, in the same process."""
MAX_TEXT = 200
_current: ContextVar[Span | None] = ContextVar("span", default=None)
_random = random.Random()  # a separate generator, so that seeded ones of the process are not advanced


class NoSpan:
    """A span of a group that is not traced."""

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        pass

    def set(self, **attributes: Value) -> None:
        """Do nothing."""

    def fail(self, why: str) -> None:
        """Do nothing."""


NO_SPAN = NoSpan()


class Span(NoSpan):
    """A span in progress. Inside its `with` block it is the parent of new spans, also in tasks that start there."""

    def __init__(self, sink: SpanQueue, name: str, ids: tuple[int, int, int], attributes: dict[str, Value]) -> None:
        self._sink, self._name, self._attributes, self._error = sink, name, attributes, ""
        self.trace_id, self.span_id, self.parent_id = ids
        self._start_ns, self._started = time.time_ns(), time.monotonic_ns()
        self._token: Token[Span | None] | None = None

    def set(self, **attributes: Value) -> None:
        """Add attributes."""
        self._attributes |= attributes

    def fail(self, why: str) -> None:
        """Mark the span as failed, with the cause."""
        self._error = why

    def child(self, name: str, attributes: dict[str, Value]) -> Span:
        """Return a new span below this one."""
        return Span(self._sink, name, (self.trace_id, _random.getrandbits(64) or 1, self.span_id), attributes)

    def __enter__(self) -> Span:
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._token is not None:
            _current.reset(self._token)
        if kind is not None and not self._error:
            self._error = kind.__name__
        # the wall clock may be set meanwhile
        self.end(self._start_ns, self._start_ns + time.monotonic_ns() - self._started)

    def end(self, start_ns: int, end_ns: int) -> None:
        """End the span with these times, in nanoseconds since 1970."""
        named = {f"foray.{k}": v[:MAX_TEXT] if isinstance(v, str) else v for k, v in self._attributes.items()}
        ids = (self.trace_id, self.span_id, self.parent_id)
        self._sink.put(EndedSpan(self._name, *ids, start_ns, max(start_ns, end_ns), named, self._error))


def span(name: str, **attributes: Value) -> NoSpan:
    """Return a span below the current one; without a current one, a span that does nothing."""
    parent = _current.get()
    return NO_SPAN if parent is None else parent.child(name, attributes)


class Tracer:
    """The traces of a process. Without a sink it is off, and its methods do nothing.

    Args:
        run: Id of the run.
        lineage: Returns the lineage id of the run; "" while it is unknown.
        share: Share of the groups to trace.
    """

    def __init__(
        self, sink: SpanQueue | None = None, *, run: str = "", lineage: Callable[[], str] = str, share: float = 1.0
    ) -> None:
        self._sink, self._run, self._lineage, self._share = sink, run, lineage, share

    @property
    def on(self) -> bool:
        """Return whether groups are traced."""
        return self._sink is not None

    def counts(self) -> dict[str, Callable[[], float]]:
        """Return functions that read the metrics of the traces by name; empty when off."""
        sink = self._sink
        if sink is None:
            return {}
        return {"trace_spans_exported": lambda: sink.exported, "trace_spans_dropped": lambda: sink.dropped}

    def stage(self, name: str, seq: int, attempt: int = 0, **attributes: Value) -> NoSpan:
        """Return the span of a stage (PARENTS) of seq's group, as a context manager."""
        return self._stage(name, seq, attempt, attributes) or NO_SPAN

    def record(self, name: str, seq: int, attempt: int, start_s: float, end_s: float, **attributes: Value) -> None:
        """Record a stage that has passed, between two times in seconds since 1970."""
        if found := self._stage(name, seq, attempt, attributes):
            found.end(int(start_s * 1e9), int(end_s * 1e9))

    def _stage(self, name: str, seq: int, attempt: int, attributes: dict[str, Value]) -> Span | None:
        if self._sink is None:
            return None
        group = f"{self._run}/{self._lineage()}/{seq}"
        trace_id = _hashed(group, 16)
        # as TraceIdRatioBased of OpenTelemetry: by the lower 8 bytes
        if trace_id & (2**64 - 1) >= self._share * 2**64:
            return None
        above = PARENTS[name]
        parent = _hashed(_place(group, above, attempt), 8) if above else 0
        ids = (trace_id, _hashed(_place(group, name, attempt), 8), parent)
        facts: dict[str, Value] = {"run": self._run, "seq": seq}
        return Span(self._sink, name, ids, facts | ({"attempt": attempt} if attempt else {}) | attributes)

    def close(self) -> None:
        """Export what is left, for a few seconds at most."""
        if self._sink is not None:
            self._sink.close()


def _place(group: str, name: str, attempt: int) -> str:
    return f"{group}/{0 if name == 'question' else attempt}/{name}"


def _hashed(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1


def build_tracer(run: RunSettings, process: str, process_id: str, lineage: Callable[[], str]) -> Tracer:
    """Return the tracer of a process, off unless `run.trace` says otherwise. Raises UserError without OpenTelemetry."""
    settings = run.trace
    if settings.exporter == "none":
        return Tracer()
    resource = {"service.name": f"foray-{process}", "service.instance.id": process_id, "foray.run": run.id}
    if settings.exporter == "otlp":
        export = otlp_export(resource)
    else:
        name = re.sub(r"[^\w.-]", "_", f"{process}-{process_id}")
        export = file_export(run.dir / "traces" / f"{name}.jsonl", resource)
    return Tracer(SpanQueue(export), run=run.id, lineage=lineage, share=settings.share)
