"""Traces of a small ring in one process: a real learner loop, rollout server and retriever; the engine is scripted."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis

from learner.config.learner import LearnerSettings
from learner.delivery import store as learner_redis
from learner.main import serve as learn
from protocol.codec import decode_as, encode
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState
from protocol.runtime import tracing_export
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.runtime.redis import aio
from protocol.runtime.tracing import NO_SPAN, Tracer, build_tracer, span
from protocol.runtime.tracing_export import EndedSpan, SpanQueue
from protocol.settings import RunSettings
from rollout_server.config import RolloutSettings
from rollout_server.environment.tokenizer import load_tokenizer
from rollout_server.server import serve as roll
from tests.support.environments import write_tokenizer
from tests.support.fake_search import canned_retriever
from tests.support.rollout_process import FOUND, talker
from tests.support.tiny_learner import TinyEngine

STEPS, GROUPS, SIZE = 3, 2, 2
Span = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path, redis_socket: str, monkeypatch: pytest.MonkeyPatch) -> RunSettings:
    """A run of 3 steps on an empty Redis; everything that waits, waits briefly."""
    monkeypatch.setattr(learner_redis, "BLOCK_MS", 50)
    monkeypatch.setattr(aio, "BLOCK_MS", 100)
    monkeypatch.setattr(tracing_export, "WAIT_S", 0.05)
    model = write_tokenizer(tmp_path / "model", "words")
    (model / "config.json").write_text('{"model_type": "tiny"}')
    with closing(redis.Redis(unix_socket_path=redis_socket)) as db:
        db.flushall()
    return RunSettings(
        **{"id": "traced", "dir": tmp_path / "run", "redis_url": f"unix://{redis_socket}", "model": model},
        **{"group_size": SIZE, "groups_per_step": GROUPS, "max_lag": STEPS, "steps": STEPS},
    )


def traced(run: RunSettings, **trace: Any) -> RunSettings:
    return RunSettings.model_validate(run.model_dump() | {"trace": {"share": 1.0} | trace})


async def ring(run: RunSettings) -> MetricsSnapshot:
    """Train the run to its end, and return the last snapshot of the rollout server."""
    tokens, stop, keys = load_tokenizer(run.model), ShutdownSignal(), Keys(run.id)
    questions = run.model.parent / "questions.jsonl"
    questions.write_text("".join(f'{{"id": "q{i}", "question": "a b {i}", "answers": ["c"]}}\n' for i in range(5)))
    settings = LearnerSettings(questions=questions, lease_s=3, reconcile_s=0.3, metrics_port=None)
    with closing(redis.Redis.from_url(run.redis_url)) as db:
        async with talker(tokens, version="1.0") as engine, canned_retriever(FOUND) as retriever:
            info = EngineInfo(id="e", url=engine.url, epoch=1, step=0, state=NodeState.READY, incarnation="a")
            db.hset(keys.engine("e"), "b", encode(info))
            db.zadd(keys.engines, {"e": time.time() + 600})
            rollout = RolloutSettings.model_validate(
                {"id": "r", "fleet_poll_s": 0.05, "episode": {"template": "demo", "max_turns": 4}}
                | {"search": {"type": "http", "urls": retriever.url}}
            )
            rolling = asyncio.create_task(roll(run, rollout, stop=stop))
            try:
                done = await asyncio.to_thread(learn, run, settings, make_engine=TinyEngine)
                assert done == 0
                await asyncio.sleep(1.5)  # snapshots are written once a second
                return decode_as(MetricsSnapshot, db.get(keys.metrics("rollout", "r")))
            finally:
                stop.requested.set()
                await asyncio.wait_for(rolling, 30)


def read_spans(run: RunSettings) -> list[Span]:
    """All spans of the run's files, with the process that made them and plain attributes."""
    found = []
    for path in sorted((run.dir / "traces").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            for part in json.loads(line)["resourceSpans"]:
                process = plain(part["resource"]["attributes"])["service.name"]
                for scope in part["scopeSpans"]:
                    found += [s | {"process": process, "facts": plain(s.get("attributes", []))} for s in scope["spans"]]
    return found


def plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {a["key"].removeprefix("foray."): next(iter(a["value"].values())) for a in attributes}


def of(spans: list[Span], name: str, parent: Span) -> list[Span]:
    """The spans of this name below `parent`, by start."""
    below = [s for s in spans if s["name"] == name and s.get("parentSpanId") == parent["spanId"]]
    return sorted(below, key=lambda s: int(s["startTimeUnixNano"]))


async def test_one_trajectory_is_followed_from_its_question_to_the_step_in_the_file(run: RunSettings) -> None:
    pytest.importorskip("opentelemetry.sdk")
    run = traced(run, exporter="file")
    reported = await ring(run)
    spans = read_spans(run)
    assert {p.name for p in (run.dir / "traces").iterdir()} == {"learner-0.jsonl", "rollout-r.jsonl"}
    traces = {s["traceId"]: [t for t in spans if t["traceId"] == s["traceId"]] for s in spans}
    trained = [t for t in traces.values() if any(s["name"] == "step" for s in t)]
    assert len(trained) == STEPS * GROUPS and all(len(s["traceId"]) == 32 and len(s["spanId"]) == 16 for s in spans)
    for trace in trained:
        (root,) = (s for s in trace if "parentSpanId" not in s)
        assert (root["name"], root["process"]) == ("question", "foray-learner")
        known = {s["spanId"] for s in trace}
        assert len(known) == len(trace) and all(s["parentSpanId"] in known for s in trace if s is not root)
        (rollout,) = of(trace, "rollout", root)
        (publish,) = of(trace, "publish", rollout)
        (batch,) = of(trace, "batch", publish)
        (step,) = of(trace, "step", batch)
        chain = (root, rollout, publish, batch, step)
        starts = [int(s["startTimeUnixNano"]) for s in chain]
        assert starts[0] <= starts[1] <= starts[2] and starts[3] <= starts[4] <= int(step["endTimeUnixNano"])
        processes = [s["process"].removeprefix("foray-") for s in chain]
        assert processes == ["learner", "rollout", "rollout", "learner", "learner"]
        assert step["facts"]["version"] in {f"1.{n}" for n in range(1, STEPS + 1)}
        assert {s["facts"]["seq"] for s in chain} == {root["facts"]["seq"]}
        trajectories = of(trace, "trajectory", rollout)
        assert [t["facts"]["number"] for t in trajectories] == [str(n) for n in range(SIZE)]
        first, last = of(trace, "turn", trajectories[0])
        (request,), (search,) = of(trace, "engine request", first), of(trace, "search", first)
        assert (request["facts"]["engine"], request["facts"]["version"]) == ("e", "1.0")
        assert (search["facts"]["query"], search["facts"]["passages"]) == ("a b", "1")
        assert int(request["endTimeUnixNano"]) <= int(search["startTimeUnixNano"])
        assert of(trace, "engine request", last) and not of(trace, "search", last)
        assert trajectories[0]["facts"]["status"] == "answered" and of(trace, "reward", trajectories[0])
    assert reported.values["trace_spans_dropped"] == 0 and reported.values["trace_spans_exported"] > 0


@contextmanager
def collector(kind: str, seen: list[bytes]) -> Iterator[str]:
    """The URL of a collector that accepts spans, never answers, or is not there."""
    if kind == "accepts":

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as server, ExitStack() as ended:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            ended.callback(thread.join)
            ended.callback(server.shutdown)
            yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "hangs":
            listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accepts", "hangs", "refuses"])
async def test_a_collector_that_is_away_loses_spans_and_nothing_else(
    kind: str, run: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setattr(tracing_export, "TIMEOUT_S", 0.3)
    seen: list[bytes] = []
    with collector(kind, seen) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url)
        reported = await ring(traced(run, exporter="otlp"))
    lines = (run.dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3], "the run trains to its end"
    exported, dropped = reported.values["trace_spans_exported"], reported.values["trace_spans_dropped"]
    if kind == "accepts":
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        bodies = [ExportTraceServiceRequest.FromString(body) for body in seen]
        names = {s.name for b in bodies for r in b.resource_spans for scope in r.scope_spans for s in scope.spans}
        assert {"question", "rollout", "turn", "search", "batch", "step"} <= names and not dropped
    else:
        assert dropped > 0 and not exported


def test_a_full_queue_drops_spans_at_once_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_export, "QUEUE_SPANS", 4)
    hold, taken = threading.Event(), threading.Event()

    def export(spans: object) -> bool:
        taken.set()
        hold.wait(30)
        return True

    monkeypatch.setattr(tracing_export, "BATCH_SPANS", 1)
    sink = SpanQueue(export)
    tracer = Tracer(sink, run="r")
    tracer.record("question", 1, 0, 1.0, 2.0)
    assert taken.wait(10)
    for seq in range(2, 12):
        tracer.record("question", seq, 0, 1.0, 2.0)
    assert sink.dropped == 10 - 4
    hold.set()
    tracer.close()
    assert (sink.exported, sink.dropped) == (5, 6)


def test_a_disk_that_refuses_spans_loses_them_and_a_name_is_never_a_path(
    run: RunSettings, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    run = traced(run, exporter="file")
    run.dir.mkdir()
    for name, lost in (("../r/1", 0), ("r2", 1)):
        tracer = build_tracer(run, "rollout", name, str)
        tracer.record("question", 1, 0, 1.0, 2.0)
        tracer.close()
        assert {what: read() for what, read in tracer.counts().items()} == {
            **{"trace_spans_exported": 1 - lost, "trace_spans_dropped": lost}
        }
        assert [path.name for path in run.dir.rglob("*.jsonl")] == ([] if lost else ["rollout-.._r_1.jsonl"])
        shutil.rmtree(run.dir / "traces", ignore_errors=True)
        (run.dir / "traces").write_text("a file")
    assert "traces: dropped 1 spans: FileExistsError" in caplog.text


def test_processes_choose_the_same_groups_and_without_a_setting_nothing_is_made(run: RunSettings) -> None:
    def chosen(share: float) -> set[int]:
        ended: list[EndedSpan] = []
        sink = SpanQueue(lambda spans: not ended.extend(spans))
        tracer = Tracer(sink, run="r", lineage=lambda: "l", share=share)
        for seq in range(1000):
            tracer.record("rollout", seq, 1, 1.0, 2.0)
        tracer.close()
        return {int(s.attributes["foray.seq"]) for s in ended}

    few, more = chosen(0.1), chosen(0.3)
    assert 50 < len(few) < 150 and few < more and few == chosen(0.1)
    off = build_tracer(run, "rollout", "r", lambda: "l")
    assert not off.on and not off.counts() and off.stage("rollout", 1, 1) is NO_SPAN and span("turn") is NO_SPAN


@pytest.mark.parametrize("exporter", ["otlp", "file"])
def test_a_missing_package_is_answered_with_the_line_that_installs_it(
    exporter: str, run: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules, "opentelemetry"]:
        if name.split(".")[0] == "opentelemetry":
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        build_tracer(traced(run, exporter=exporter), "rollout", "r", str)
    assert 'pip install "foray[otel]"' in caught.value.todo
