"""Regression tests of fuzzing: each input once ended a process, hung it, or was answered with a 500."""

from __future__ import annotations

import gzip
import json
import logging
import queue
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import http_exceptions, web
from fuzz_targets import load
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.questions import load_questions
from protocol.errors import UserError
from protocol.runtime.http.auth import Access
from protocol.runtime.http.server import SERVER_OPTIONS
from protocol.runtime.log import without_trace_of_clients
from protocol.runtime.records import RecordReader
from retriever.api.app import create_app
from retriever.api.base import RetrieverState
from retriever.config import RetrieverSettings
from retriever.corpus.formats.base import COLUMNS, PASSAGES
from retriever.index.faiss_flat import check_readable
from rollout_server.api import app as rollout_app
from rollout_server.api.episodes import EpisodesRequest
from rollout_server.cpu_engine.scheduler.engine import Engine
from rollout_server.cpu_engine.server.auth import guard
from rollout_server.cpu_engine.server.validation import read_json
from rollout_server.environment.actions import InvalidAction, escape_tags, parse

HUGE = b"1" + b"0" * 4000
DEEP = b"[" * 3000
FOUND: list[tuple[str, str, bytes]] = [
    ("protocol", "ledger.from_state", b'{"watermark": [], "above": 3}'),
    ("protocol", "ledger.from_state", b'{"watermark": Infinity, "above": [], "counts": {}, "notes": []}'),
    ("protocol", "access.open", b"["),
    ("protocol", "access.token", b"Bearer \xff\xfe"),
    ("protocol", "settings.tree", b"run: \xff"),
    ("protocol", "settings.tree", b"3: {}"),
    ("protocol", "settings.tree", b"run: {id: 2026-99-99}"),
    ("protocol", "settings.tree", b"[" * 1000),
    ("learner", "checkpoint.manifest", b"1.5"),
    ("learner", "checkpoint.manifest", b'{"format": 1}'),
    ("learner", "checkpoint.manifest", b'{"format": 1, "epoch": 1, "lineage": [[]], "files": {}}'),
    ("learner", "checkpoint.manifest", DEEP),
    ("learner", "checkpoint.current", b"step_\xff.e1"),
    ("learner", "checkpoint.current", b"step_" + b"9" * 5000 + b".e1"),
    ("learner", "questions.load", DEEP),
    ("learner", "questions.load", b'{"question": "q", "answers": ["a"], "hops": ' + HUGE + b"}"),
    ("learner", "questions.load", b'{"question": "q", "answers": ["a"], "type": "\\ud800"}'),
    (
        "rollout",
        "engine.reply",
        b'{"meta_info": {"finish_reason": {"type": "abort", "status_code": []}, '
        b'"weight_version": "1"}, "output_ids": []}',
    ),
    (
        "rollout",
        "engine.reply",
        b'{"output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}, '
        b'"weight_version": '
        b'"1.1", "output_token_logprobs": [[-1e307, 5, null]]}}',
    ),
    (
        "rollout",
        "engine.reply_any_vocab",
        b'{"output_ids": [4294967296], "meta_info": '
        b'{"finish_reason": {"type": "stop"}, '
        b'"weight_version": "1.1", "output_token_logprobs": [[-1, 4294967296, null]]}}',
    ),
    (
        "rollout",
        "engine.reply",
        b'{"output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}, "weight_version": "1.1", '
        b'"output_token_logprobs": [[0.001, 5, null]]}}',
    ),
    ("rollout", "engine.loads", b'{"num_running_reqs": ' + HUGE + b"}"),
    ("rollout", "engine.generate_body", b'{"text": "\\ud800"}'),
    ("rollout", "engine.generate_body", b'{"input_ids": [1], "sampling_params": {"temperature": ' + HUGE + b"}}"),
    ("rollout", "weights.manifest", DEEP),
    (
        "rollout",
        "weights.manifest",
        b'{"version": "1.2", "digest": "d", "files": {"a.safetensors": {"bytes": Infinity, "sha256": ""}}}',
    ),
    ("retriever", "online.retry_after", b"Wed, 21 Oct 2026 99999999999999999999:28:00 GMT"),
    ("retriever", "pages.html", b"&#" + b"9" * 5000 + b"; <p>x"),
    ("retriever", "online.brave", b'{"type": "x", "web": {"results": [{"title": "&#' + b"9" * 5000 + b';"}]}}'),
    (
        "retriever",
        "encoder.openai",
        b'{"data": [{"index": 0, "embedding": [[1], [2], [3]]}, {"index": 1, "embedding": [[1], [2], [3]]}]}',
    ),
    ("retriever", "corpus.line", DEEP),
    ("retriever", "corpus.array", b"[" * 3000),
    ("retriever", "corpus.lines", b'{"a":' * 3000),
    ("retriever", "corpus.gzip", gzip.compress(b"x" * 100)[:12] + b"\xff" * 30),
    ("retriever", "corpus.tsv", b"id\ttext\n1\ta\tmore\n"),
    ("retriever", "corpus.tsv", b"id\ttext\n1\t" + b"a" * 200_000 + b"\n"),
    ("retriever", "index.build_journal", b"{"),
    ("retriever", "index.build_journal", b"1.5"),
    ("retriever", "index.build_journal", b'{"input": {}}'),
]


@pytest.mark.fault(30, 37)
@pytest.mark.parametrize(("part", "name", "raw"), FOUND, ids=[f"{name}-{n}" for n, (_, name, _) in enumerate(FOUND)])
def test_what_was_found_is_taken_or_refused_in_words(part: str, name: str, raw: bytes) -> None:
    decoder = next(d for d in load(part) if d.name == name)
    try:
        decoder.run(raw)
    except decoder.raises as error:
        assert str(error)


def test_a_control_call_whose_client_has_gone_leaves_the_engine_alive() -> None:
    engine = Engine.__new__(Engine)
    engine._commands = queue.Queue()
    done: list[int] = []
    left, stays = engine._call(lambda: done.append(1)), engine._call(lambda: done.append(2))
    left.cancel()
    engine._commands.get()()  # this once raised InvalidStateError in the engine's thread, and ended it
    engine._commands.get()()
    assert done == [2] and stays.done()


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _rollout() -> web.Application:
    return rollout_app.build_app(cast(Any, object()), Access())


def _retriever() -> web.Application:
    return create_app(RetrieverState(RetrieverSettings()))


def _engine() -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(await read_json(request))

    app = web.Application(middlewares=[guard("", "")], handler_args=SERVER_OPTIONS)
    app.router.add_post("/generate", answer)
    return app


@pytest.mark.parametrize(
    ("make", "path"), [(_rollout, "/v1/episodes"), (_retriever, "/retrieve"), (_engine, "/generate")]
)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_says_it_is_compressed_is_refused(
    make: Callable[[], web.Application], path: str, encoding: str
) -> None:
    async with served(make()) as url, aiohttp.ClientSession() as session:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        # given as chunks: aiohttp would compress bytes by itself
        async with session.post(url + path, data=_pieces(), headers=headers, skip_auto_headers=["Accept"]) as answer:
            assert answer.status == 415, await answer.text()


async def _pieces() -> AsyncIterator[bytes]:
    yield b'{"queries": ["a"]}'


async def test_a_token_that_is_no_text_is_refused() -> None:
    app = create_app(RetrieverState(RetrieverSettings()), Access({"node": "t-0123456789-abcdefghijklmnopqrstuvw"}))
    async with served(app) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        import asyncio

        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /info HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()


def spent(work: Callable[[], object]) -> float:
    """Seconds of processor time."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def test_blanks_after_a_bracket_do_not_take_the_square_of_their_length() -> None:
    assert spent(lambda: escape_tags("<" + " " * 300_000)) < 2
    assert escape_tags("< \n/ search> < / answer> <  think") == "\u2039 \n/ search> \u2039 / answer> \u2039  think"


def test_tags_that_never_close_do_not_take_the_square_of_their_number() -> None:
    assert spent(lambda: parse("<search>" * 40_000)) < 2
    assert parse("<search>" * 40_000) == InvalidAction("no_action")


@settings(max_examples=120, deadline=None)
@given(st.lists(st.sampled_from(["<search>", "</search>", "<answer>", "</answer>", "<fetch>", "</fetch>", "a", " "])))
def test_the_first_complete_action_is_the_one_that_the_plain_pattern_finds(pieces: list[str]) -> None:
    text = "".join(pieces)
    plain = re.search(r"<(search|answer|fetch)>(.*?)</\1>", text, re.DOTALL)
    found = parse(text, tools=("fetch",))
    if plain is None:
        assert found == InvalidAction("no_action")
    else:
        inside = plain[2] if plain[1] == "fetch" else plain[2].strip()
        value = getattr(found, {"search": "query", "answer": "text", "fetch": "argument"}[plain[1]], None)
        assert value == inside or (isinstance(found, InvalidAction) and not inside.strip())


def test_an_array_of_many_small_records_is_read_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text("[" + ",".join('{"text":"a"}' for _ in range(60_000)) + "]")
    assert spent(lambda: [None for _ in RecordReader(path, PASSAGES, COLUMNS)]) < 5
    assert sum(1 for _ in RecordReader(path, PASSAGES, COLUMNS)) == 60_000


def test_a_question_may_hold_unicode_line_separators(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "who\u2028was\x85it ?", "answers": ["a"]}\n', encoding="utf-8")
    assert load_questions(path).questions[0].text == "who\u2028was\x85it ?"


def test_more_episodes_than_the_limit_are_refused_in_any_form() -> None:
    many = [{"id": "q", "question": "a ?"}] * 1000
    EpisodesRequest.model_validate({"questions": many, "n": 100})
    with pytest.raises(ValueError, match="exceed the limit of 100000 episodes"):
        EpisodesRequest.model_validate({"questions": many, "n": 101})


@pytest.mark.parametrize("raw", [b"IxSQ\x04\x00\x00\x00\x04" + b"\x00" * 16, b"junk"], ids=["cut short", "no index"])
def test_a_faiss_file_that_kills_its_reader_is_refused_before_it_is_read(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.faiss"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"cannot read .* as a FAISS index"):
        check_readable(path)


def test_broken_http_is_one_line_of_the_log_and_our_own_errors_keep_their_traceback() -> None:
    def line(error: Exception) -> str:
        try:
            raise error
        except Exception:
            record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "Error handling", (), sys.exc_info())
        assert without_trace_of_clients(record)
        return logging.Formatter().format(record)

    assert "Traceback" not in line(http_exceptions.BadHttpMessage("Bad header\n\n  b'x'"))
    assert "Traceback" not in line(ConnectionResetError("gone"))
    assert "Traceback" in line(ValueError("ours"))


def test_every_found_input_names_a_decoder() -> None:
    known = {d.name for part in ("protocol", "learner", "rollout", "retriever") for d in load(part)}
    assert {name for _, name, _ in FOUND} <= known
    assert json.loads(HUGE) == 10**4000
