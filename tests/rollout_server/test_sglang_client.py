"""The client of one engine: its requests, and that answers are validated."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from protocol.messages import Sampling
from protocol.versions import PolicyVersion
from rollout_server.engine import client
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError, GenerateRequest
from rollout_server.engine.client import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, EngineCall, SglangClient
from rollout_server.engine.continuation import TurnAssembler
from rollout_server.engine.decoding import ReceivedTokens
from tests.support.fake_engine import FakeServer, Fault, next_ids
from tests.support.waiting import eventually

REQUEST = GenerateRequest(
    ids=(1, 2), session="s", group="g", max_new_tokens=4, sampling=Sampling(temperature=0.7), stop=("</answer>",)
)


def reply(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop", "matched": "</answer>"},
        "weight_version": "3.7",
        "output_token_logprobs": [[-0.1, 5, None], [-0.2, 6, None], [0.0, 7, None]],
    }
    return {"text": "", "output_ids": [5, 6, 7], "meta_info": meta | changes.pop("meta", {})} | changes


def parse(value: Any, *, limit: int = 8):
    received = ReceivedTokens("e", limit, vocab_size=100)
    received.take(value)
    turn = TurnAssembler(replace(REQUEST, max_new_tokens=limit))
    turn.add(received)
    return turn.completion()


def test_a_sound_reply_becomes_a_completion() -> None:
    done = parse(reply())
    assert (done.ids, done.logprobs, done.finish_reason) == ([5, 6, 7], [-0.1, -0.2, 0.0], "stop")
    assert (done.matched, done.engine) == ("</answer>", "e")
    assert [(s.version, s.start, s.end) for s in done.spans] == [(PolicyVersion(3, 7), 0, 3)]


def test_version_spans_are_taken_as_they_are_given() -> None:
    spans = [{"version": "3.7", "start": 0, "end": 2}, {"version": "3.8", "start": 2, "end": 3}]
    done = parse(reply(meta={"weight_versions": spans, "weight_version": "3.8"}))
    assert [(s.version.label, s.start, s.end) for s in done.spans] == [("3.7", 0, 2), ("3.8", 2, 3)]


def test_a_version_with_a_foreign_label_counts_as_none() -> None:
    assert parse(reply(meta={"weight_version": "default"})).spans[0].version == PolicyVersion(0, 0)


@pytest.mark.parametrize(
    "broken",
    [
        reply(output_ids=[5, 6]),
        reply(output_ids=[5, 6, 8]),
        reply(output_ids=[], meta={"output_token_logprobs": []}),
        reply(meta={"output_token_logprobs": [[float("nan"), 5], [-1, 6], [-1, 7]]}),
        reply(meta={"output_token_logprobs": [[float("-inf"), 5], [-1, 6], [-1, 7]]}),
        reply(meta={"output_token_logprobs": [[0.5, 5], [-1, 6], [-1, 7]]}),
        reply(meta={"output_token_logprobs": [[None, 5], [-1, 6], [-1, 7]]}),
        reply(output_ids=[5, 6, 100], meta={"output_token_logprobs": [[-1, 5], [-1, 6], [-1, 100]]}),
        reply(output_ids=[5, 6, -1], meta={"output_token_logprobs": [[-1, 5], [-1, 6], [-1, -1]]}),
        reply(meta={"weight_versions": [{"version": "3.7", "start": 0, "end": 2}]}),
        reply(meta={"weight_versions": [{"version": "3.7", "start": 1, "end": 3}]}),
        reply(meta={"finish_reason": {"type": "nonsense"}}),
        {"text": "hello"},
        [],
        None,
        "oops",
    ],
)
@pytest.mark.fault(21)
def test_a_broken_reply_is_bad_output(broken: Any) -> None:
    with pytest.raises(EngineError) as caught:
        parse(broken)
    assert (caught.value.cause, caught.value.engine) == ("bad_output", "e")


@pytest.mark.fault(21)
def test_more_tokens_than_were_asked_for_are_bad_output() -> None:
    with pytest.raises(EngineError, match="but at most 2 were requested") as caught:
        parse(reply(), limit=2)
    assert caught.value.cause == "bad_output"


@pytest.mark.parametrize(
    ("status", "cause", "fault"),
    [(None, "aborted", "fleet"), (503, "aborted", "fleet"), (500, "http_500", "engine"), (400, "refused", "request")],
)
def test_an_aborted_request_is_no_completion_but_its_tokens_are_kept(status, cause: str, fault: str) -> None:
    received = ReceivedTokens("e", 8)
    abort = {"type": "abort", "message": "Abort in waiting queue", "status_code": status}
    with pytest.raises(EngineError) as caught:
        received.take(reply(meta={"finish_reason": abort}))
    assert (caught.value.cause, caught.value.fault) == (cause, fault)
    assert received.ids == [5, 6, 7] and received.spans() == ((PolicyVersion(3, 7), 0, 3),)


def test_a_short_answer_to_a_request_aborted_in_the_queue_removes_no_tokens() -> None:
    received = ReceivedTokens("e", 8, label="3.7")
    received.take(reply(meta={"finish_reason": None, "completion_tokens": 3}))
    with pytest.raises(EngineError, match="aborted"):
        received.take(
            {"text": "", "meta_info": {"id": "r", "finish_reason": {"type": "abort"}, "weight_version": "3.7"}}
        )
    assert received.ids == [5, 6, 7]


async def test_the_request_to_the_engine() -> None:
    async with FakeServer(version="3.7") as engine, aiohttp.ClientSession() as session:
        client = SglangClient(session, engine.url)
        done = await client.generate(REQUEST, version="3.7", timeout_s=5.0)
        await client.generate(REQUEST, version="3.7", timeout_s=5.0)
        first, second = engine.requests
    assert done.ids == next_ids([1, 2], 4) and done.finish_reason == "length"
    assert first["input_ids"] == [1, 2] and first["return_logprob"] is True and first["extra_key"] == "3.7"
    assert first["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "stop": ["</answer>"],
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "stream_interval": 8,
    }
    assert first["stream"] is True and "lora_path" not in first
    assert len(first["rid"]) == len(second["rid"]) == 32 and first["rid"] != second["rid"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault(status=500), "http_500"),
        (Fault(status=503), "http_500"),
        (Fault(status=429), "http_500"),
        (Fault(status=400), "refused"),
        (Fault(status=401), "denied"),
        (Fault(status=404), "denied"),
        (Fault(drop=True), "unreachable"),
        (Fault(hang=True), "timeout"),
        (Fault(body=[]), "bad_output"),
        (Fault(body=reply(meta={"finish_reason": None})), "bad_output"),
        (Fault(raw=b"<html>welcome</html>", content_type="text/html"), "bad_output"),
        (Fault(raw=b"data: {}", content_type="application/json"), "bad_output"),
        (Fault(raw=b"", after=0, drop=True), "unreachable"),
        (Fault(raw=b"data: not json\n\n", after=1), "bad_output"),
        (Fault(raw=b"welcome\n", after=1), "bad_output"),
        (Fault(raw=b'data: {"error": {"message": "too long", "code": 400}}\n\n', after=0), "refused"),
        (Fault(raw=b'data: {"error": {"message": "oops"}}\n\n', after=1), "http_500"),
        (Fault(after=1, drop=True), "cut"),
        (Fault(after=1, hang=True), "timeout"),
        (Fault(after=1, spoil=lambda chunk: []), "bad_output"),
        (Fault(after=1, spoil=lambda chunk: chunk | {"output_ids": [1]}), "bad_output"),
    ],
)
async def test_every_fault_has_its_cause(fault: Fault, cause: str) -> None:
    async with FakeServer() as engine, aiohttp.ClientSession() as session:
        engine.faults["/generate"] = fault
        with pytest.raises(EngineError) as caught:
            await SglangClient(session, engine.url, name="e").generate(REQUEST, version="", timeout_s=0.3)
    assert (caught.value.cause, caught.value.engine) == (cause, "e")


async def test_an_engine_that_is_not_there_is_unreachable() -> None:
    engine = FakeServer()
    await engine.start()
    await engine.stop()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineError) as caught:
            await EngineAdmin(session, engine.url).version()
    assert caught.value.cause == "unreachable"


@pytest.mark.parametrize(
    ("status", "cause"), [(400, "refused"), (499, "refused"), (500, "http_500"), (503, "http_500")]
)
async def test_a_control_call_that_is_answered_by_a_failure_has_its_cause(status: int, cause: str) -> None:
    async with FakeServer() as engine, aiohttp.ClientSession() as session:
        engine.faults["/pause_generation"] = Fault(status=status)
        with pytest.raises(EngineError, match=f"/pause_generation: {status}") as caught:
            await EngineAdmin(session, engine.url, name="e").pause("retract")
    assert (caught.value.cause, caught.value.engine) == (cause, "e")


async def test_checksums_that_the_engine_cannot_give_are_bad_output() -> None:
    async with FakeServer() as engine, aiohttp.ClientSession() as session:
        engine.faults["/weights_checker"] = Fault(body={"success": False, "message": "no weights", "ranks": [{}]})
        with pytest.raises(EngineError, match="no weights") as caught:
            await EngineAdmin(session, engine.url).checksums(timeout_s=5)
    assert caught.value.cause == "bad_output"


async def test_a_stream_that_hangs_after_its_finish_reason_is_given_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "GRACE_S", 0.05)
    received = ReceivedTokens("e", 8, vocab_size=100)
    received.take(reply())
    with pytest.raises(EngineError, match=r"silent for 0\.05 s after 3 tokens") as caught:
        async with asyncio.timeout(10), EngineCall(received, timeout_s=60.0, stall_s=30.0) as call:
            call.on_data()
            await asyncio.Event().wait()
    assert caught.value.cause == "stalled"


async def test_a_cancelled_turn_leaves_the_engine() -> None:
    async with FakeServer(latency_s=30.0) as engine, aiohttp.ClientSession() as session:
        client = SglangClient(session, engine.url)
        turn = asyncio.create_task(client.generate(REQUEST, version="", timeout_s=60.0))
        await eventually(lambda: engine.requests, "the engine has the request")
        turn.cancel()
        await eventually(lambda: turn.done() and engine._in_flight == 0, "the engine is rid of it")


async def test_an_update_goes_through_pause_load_read_back_and_continue() -> None:
    async with FakeServer(version="1.0") as engine, aiohttp.ClientSession() as session:
        client = EngineAdmin(session, engine.url)
        await client.pause("retract")
        assert engine.paused
        await client.update_weights_from_disk("/weights/v1.1", label="1.1", flush=True, timeout_s=5.0)
        assert await client.version() == PolicyVersion(1, 1)
        await client.resume()
        assert not engine.paused and engine.loaded == "/weights/v1.1"
        engine.faults["/update_weights_from_disk"] = Fault(body={"success": False, "message": "no such file"})
        with pytest.raises(EngineError, match="no such file"):
            await client.update_weights_from_disk("/gone", label="1.2", flush=True, timeout_s=5.0)


async def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    async def note(request: web.Request) -> web.Response:
        seen[request.path] = request.headers.get("Authorization", "")
        return web.json_response(reply() if request.path == "/generate" else {"status": "ok"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", note)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv(API_KEY_VARIABLE, "open sesame")
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "chief")
    try:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await SglangClient(session, url).generate(REQUEST, version="", timeout_s=5.0)
            await EngineAdmin(session, url).pause("retract")
    finally:
        await runner.cleanup()
    assert seen == {"/generate": "Bearer open sesame", "/pause_generation": "Bearer chief"}
