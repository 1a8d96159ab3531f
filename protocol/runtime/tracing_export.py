"""Export ended spans to an OpenTelemetry collector or to a file. Without a setting OpenTelemetry is not imported.

loop            consumes      produces             waits for     unblocked by
SpanQueue._work ended spans   calls of the export  a span        a process that traces, or `close`

A full queue or a failed export drops spans and never blocks the process. Dropped spans are counted, and logged once.
"""

from __future__ import annotations

import base64
import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import UserError

log = logging.getLogger(__name__)

QUEUE_SPANS = 8192
"""Ended spans that may wait for the exporter."""
BATCH_SPANS = 512
WAIT_S = 0.5
TIMEOUT_S = 5.0
"""Timeout of one export, retries included."""
CLOSE_S = 3.0
"""Time at the end of a process to export what is queued."""
SCOPE = "foray"
_IDS = ("traceId", "spanId", "parentSpanId")

Value = str | int | float | bool


@dataclass(frozen=True)
class EndedSpan:
    """A span that has ended. `parent_id` 0: it is the root of its trace. Times are nanoseconds since 1970."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    error: str = ""


Export = Callable[[Sequence[EndedSpan]], bool]
"""Exports spans; returns whether they were accepted. May raise or take TIMEOUT_S."""


class SpanQueue:
    """The bounded queue in front of an exporter, and the thread that empties it."""

    def __init__(self, export: Export) -> None:
        self._export = export
        self._queue: queue.Queue[EndedSpan] = queue.Queue(QUEUE_SPANS)
        self._ending, self._lock, self._complained = threading.Event(), threading.Lock(), False
        self.exported = self.dropped = 0
        # a daemon: a collector that hangs must not block the end of the process
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def put(self, span: EndedSpan) -> None:
        """Queue a span, or drop it if the queue is full. Returns at once."""
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._drop(1, f"{QUEUE_SPANS} spans wait for the exporter")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Export what is queued, for at most `timeout_s`; the rest is dropped."""
        self._ending.set()
        self._thread.join(timeout_s)
        if self._queue.qsize():
            self._drop(self._queue.qsize(), "the exporter did not finish in time")
        if self.dropped:
            log.warning("traces: dropped %d spans, exported %d", self.dropped, self.exported)

    def _work(self) -> None:
        while batch := self._next():
            try:
                accepted, why = self._export(batch), "the exporter did not accept them"
            except Exception as error:  # whatever a collector or a disk answers
                accepted, why = False, repr(error)
            if accepted:
                self.exported += len(batch)
            else:
                self._drop(len(batch), why)

    def _next(self) -> list[EndedSpan]:
        """Wait for spans and return them; [] after `close`, when none are left."""
        batch: list[EndedSpan] = []
        while len(batch) < BATCH_SPANS:
            try:
                batch.append(self._queue.get(timeout=WAIT_S))
            except queue.Empty:
                if batch or self._ending.is_set():
                    break
        return batch

    def _drop(self, spans: int, why: str) -> None:
        with self._lock:
            self.dropped += spans
            first, self._complained = not self._complained, True
        if first:
            log.warning("traces: dropped %d spans: %s; the run continues (logged once)", spans, why)


def otlp_export(resource: Mapping[str, Value]) -> Export:
    """Return an export to the collector of OTEL_EXPORTER_OTLP_ENDPOINT, or of this host, over OTLP/HTTP.

    Raises UserError if OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise _not_installed(error) from error
    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)  # the queue logs the first loss
    exporter: Any = OTLPSpanExporter(timeout=TIMEOUT_S)
    convert = _converter(resource)

    def export(spans: Sequence[EndedSpan]) -> bool:
        return bool(exporter.export(convert(spans)) is SpanExportResult.SUCCESS)

    return export


def file_export(path: Path, resource: Mapping[str, Value]) -> Export:
    """Return an export to a file of OTLP JSON lines. Raises UserError if OpenTelemetry is not installed."""
    try:
        from google.protobuf.json_format import MessageToDict
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    except ImportError as error:
        raise _not_installed(error) from error
    convert = _converter(resource)

    def export(spans: Sequence[EndedSpan]) -> bool:
        message = MessageToDict(encode_spans(convert(spans)), use_integers_for_enums=True)
        line = json.dumps(_with_hex_ids(message), separators=(",", ":")) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
        return True

    return export


def _converter(resource: Mapping[str, Value]) -> Callable[[Sequence[EndedSpan]], list[Any]]:
    """Return a function from ended spans to OpenTelemetry's."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    made, scope = Resource.create(dict(resource)), InstrumentationScope(SCOPE)

    def context(trace_id: int, span_id: int) -> Any:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def convert(spans: Sequence[EndedSpan]) -> list[Any]:
        return [
            ReadableSpan(
                span.name,
                context=context(span.trace_id, span.span_id),
                parent=context(span.trace_id, span.parent_id) if span.parent_id else None,
                resource=made,
                attributes=dict(span.attributes),
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=scope,
            )
            for span in spans
        ]

    return convert


def _with_hex_ids(value: Any) -> Any:
    """Return a message with ids in hex, as OTLP's JSON has them: protobuf's own JSON has base64."""
    if isinstance(value, dict):
        return {k: base64.b64decode(v).hex() if k in _IDS else _with_hex_ids(v) for k, v in value.items()}
    return [_with_hex_ids(item) for item in value] if isinstance(value, list) else value


def _not_installed(error: ImportError) -> UserError:
    return UserError(
        "run.trace.exporter needs OpenTelemetry, which cannot be imported",
        why=str(error),
        todo='pip install "foray[otel]", or set run.trace.exporter=none',
    )
