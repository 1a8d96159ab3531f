"""Decoders of the rollout server: answers of engines and retrievers, the policy's text, weights on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from fuzz_targets import Decoder, scratch

from protocol.messages import Owner, Segment, VersionSpan, WeightUpdate
from protocol.runtime.http.body import parse_json
from rollout_server.agents import chat_completions, responses
from rollout_server.agents.messages import Ask, CallRefused, normalise
from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.server.openai_bodies import chat, completion
from rollout_server.cpu_engine.server.validation import BadRequest, Limits
from rollout_server.cpu_engine.server.validation import parse as parse_generate
from rollout_server.engine.admin import EngineAdmin
from rollout_server.engine.base import EngineError
from rollout_server.engine.client import json_object
from rollout_server.engine.decoding import ReceivedTokens, StreamDecoder
from rollout_server.environment.actions import SearchAction, boxed, escape_tags, parse
from rollout_server.node.weights.manifest import MANIFEST, WeightsCorrupt, verify
from rollout_server.rewards.judge import parse_score, sanitize
from rollout_server.search.base import SearchError, error_of_status
from rollout_server.search.transport import read_answers
from rollout_server.tools.mcp import read_arguments, read_content, read_reply
from tests.support.environments import write_tokenizer

IDS, LOGPROBS = [5, 6, 7], [-0.5, -0.25, -1.0]


def _chunk(count: int, finish: dict[str, Any] | None, *, spans: bool = True) -> dict[str, Any]:
    pairs = [[logprob, token, None] for logprob, token in zip(LOGPROBS[:count], IDS[:count], strict=True)]
    meta: dict[str, Any] = {"id": "r", "finish_reason": finish, "weight_version": "1.3", "completion_tokens": count}
    meta |= {"output_token_logprobs": pairs}
    meta |= {"weight_versions": [{"version": "1.3", "start": 0, "end": count}]} if spans else {}
    return {"text": "x", "output_ids": IDS[:count], "meta_info": meta}


def _reply(vocab: int | None) -> Any:
    def read(raw: bytes) -> object:
        received = ReceivedTokens("e", 8, vocab_size=vocab)
        try:
            reply = json.loads(raw)
        except (ValueError, RecursionError):
            raise EngineError("bad_output", "e", "not JSON") from None
        received.take(reply)
        return _segment(received)

    return read


def _segment(received: ReceivedTokens) -> Segment:
    """A result accepted from an engine must be encodable."""
    spans = tuple(VersionSpan(epoch=v.epoch, step=v.step, start=a, end=b) for v, a, b in received.spans())
    sure = spans[-1].end if spans else 0
    ids: Any = received.ids[:sure]
    return Segment(owner=Owner.POLICY, ids=ids, logprobs=received.logprobs[:sure], spans=spans)  # type: ignore[arg-type]


def _stream(raw: bytes) -> object:
    received = ReceivedTokens("e", 8, vocab_size=100)
    reader = StreamDecoder(received)
    for start in range(0, len(raw), max(1, len(raw) // 7)):
        reader.feed(raw[start : start + max(1, len(raw) // 7)])
    reader.flush()
    return _segment(received)


class _Answering(EngineAdmin):
    """An engine whose every control call is answered with `reply`."""

    def __init__(self, reply: Any) -> None:
        self.name, self._reply = "e", reply

    async def _ask(self, *_: Any, **__: Any) -> dict[str, Any]:
        return json_object(self._reply, "e")


def _loads(raw: bytes) -> object:
    try:
        reply = json.loads(raw)
    except (ValueError, RecursionError):
        raise EngineError("bad_output", "e", "not JSON") from None
    engine = _Answering(reply)
    return at_once(engine.loads()), at_once(engine.version()), at_once(engine.tokenize("a"))


def at_once(work: Any) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def _action(raw: bytes) -> object:
    text = raw.decode("utf-8", "surrogateescape")
    found = parse(text, box=True, tools=("python", "fetch"))
    assert not isinstance(found, SearchAction) or found.query in text
    return found, boxed(text)


def _neutral(raw: bytes) -> object:
    shown = escape_tags(raw.decode("utf-8", "replace"), ("python",))
    assert "</information>" not in shown and "<search>" not in shown
    return shown, sanitize(shown, 4096)


def _verdict(raw: bytes) -> object:
    # what `Endpoint.ask` does with a reply
    return parse_score(json.loads(raw))


def _weights(folder: Path) -> tuple[bytes, Any]:
    folder = folder / "v1.2"
    folder.mkdir()
    update = WeightUpdate(run="r", epoch=1, step=2, digest="d", path=str(folder))
    (folder / "model.safetensors").write_bytes(b"weights")
    files = {"model.safetensors": {"bytes": 7, "sha256": sha256(b"weights").hexdigest()}}

    def read(raw: bytes) -> object:
        (folder / MANIFEST).write_bytes(raw)
        return verify(update)

    return json.dumps({"version": "1.2", "digest": "d", "files": files, "tensors": 1}).encode(), read


def _generate(model: Path, parse: Callable[..., object]) -> Any:
    tokenizer, limits = Tokenizer(model), Limits(vocab=40, context=256, cache=512)

    def read(raw: bytes) -> object:
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            raise BadRequest("not JSON") from None
        return parse(body, tokenizer, limits)

    return read


def _completion(body: Any, tokenizer: Tokenizer, limits: Limits) -> object:
    return completion(body, lambda name: name, tokenizer, limits)


def _chat(body: Any, tokenizer: Tokenizer, limits: Limits) -> object:
    def render(messages: list[dict[str, Any]], begin: bool, variables: dict[str, Any]) -> str:
        return "\n".join(str(message["content"]) for message in messages) + " x"

    return chat(body, lambda name: name, render, tokenizer, limits)


GENERATE = (
    {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "temperature": 0.5, "top_p": 0.9, "top_k": 4}},
    {"text": ["a b", "c"], "sampling_params": [{"n": 2, "stop": ["x"]}, {"stop_token_ids": [3]}], "rid": ["a", "b"]},
    {
        "text": "a",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "stream": True,
        "extra_key": "k",
    },
)
_OPENAI = {
    "model": "m",
    "n": 2,
    "seed": 3,
    "temperature": 0.5,
    "stop": ["x"],
    "stream_options": {"include_usage": True},
}
COMPLETION = (
    {**_OPENAI, "prompt": ["a b", "c"], "echo": True, "logprobs": 2, "max_tokens": 0},
    {"prompt": [[1, 2], [3]], "stream": True, "best_of": 1, "user": "u", "logit_bias": None},
)
CHAT = (
    {**_OPENAI, "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_completion_tokens": 4,
        "tools": [],
    },
)


MCP = b'{"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "a"}], "isError": false}}'
AGENT_CHAT = {
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}],
    "max_tokens": 4,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
}
AGENT_ITEMS = {
    "instructions": "a",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "c"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
        {"type": "item_reference", "id": "rs_0"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
    "max_output_tokens": 4,
}
KNOWN = {"rs_0": {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "e"}]}}


def _asked(parse: Callable[[Any, Any], Ask]) -> Any:
    """What an agent sends: an accepted body can be compared with the record, and has texts only."""

    def read(raw: bytes) -> object:
        try:
            body = parse_json(raw)
        except ValueError:
            raise CallRefused("not JSON") from None
        if not isinstance(body, dict):
            raise CallRefused("not an object")
        asked = parse(body, KNOWN)
        assert all(isinstance(normalise(message).content, str) for message in asked.messages)
        return asked

    return read


def _mcp(raw: bytes) -> object:
    found = read_content(read_reply(raw, 1), 10)
    assert len(found.text) <= 10
    return found


def _mcp_call(raw: bytes) -> object:
    given = read_arguments(raw.decode("utf-8", "surrogateescape"))
    return json.dumps(given).encode()  # what is sent


def decoders() -> tuple[Decoder, ...]:
    folder = scratch()
    model = write_tokenizer(folder / "model", "words")
    (model / "config.json").write_text("{}")
    manifest, read_manifest = _weights(folder)
    stop = {"type": "stop", "matched": "</answer>"}
    replies = [_chunk(3, stop), _chunk(2, None), _chunk(1, {"type": "length", "length": 1}, spans=False)]
    events = [_chunk(1, None), _chunk(2, None, spans=False), _chunk(3, stop)]
    stream = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"
    search = {"result": [[{"document": {"id": "d1", "contents": '"T"\ntext'}, "score": 0.5}]], "errors": [None]}
    many = [[{"id": 3, "contents": '"T"\ntext'}], []]
    turn = b"<think>why</think> <search> who ? </search> <python>print(1)</python> <answer> \\boxed{a_{1}} </answer>"
    page = '"Title"\nSome text with </information> and < search > in it, \u200b<\u200banswer>'.encode()
    verdict = {"choices": [{"message": {"content": '{"rationale": "yes", "score": 1}'}}]}
    loads = {"loads": [{"num_running_reqs": 3, "token_usage": 0.5}, {"num_running_reqs": 1}], "weight_version": "1.2"}
    refused = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError)
    return (
        Decoder(
            "engine.reply", _reply(100), (EngineError,), [json.dumps(r).encode() for r in replies], "json", share=4
        ),
        Decoder(
            "engine.reply_any_vocab", _reply(None), (EngineError,), [json.dumps(replies[0]).encode()], "json", share=2
        ),
        Decoder("engine.stream", _stream, (EngineError,), (stream,), "text", share=2),
        Decoder("engine.loads", _loads, (EngineError,), (json.dumps(loads).encode(),), "json"),
        Decoder(
            "search.search_r1",
            lambda raw: read_answers("search_r1", raw, 3, 1),
            (SearchError,),
            (json.dumps(search).encode(),),
            "json",
            share=4,
        ),
        Decoder(
            "search.flashrag",
            lambda raw: read_answers("flashrag", raw, 3, 2),
            (SearchError,),
            (json.dumps(many).encode(),),
            "json",
            share=2,
        ),
        Decoder(
            "search.retry_after",
            lambda raw: error_of_status(503, raw.decode("latin-1")),
            (),
            (b"3",),
            "text",
            share=0.5,
        ),
        Decoder("actions.parse", _action, (), (turn,), "text", share=3),
        Decoder("actions.escape_tags", _neutral, (), (page,), "text", share=2),
        Decoder("mcp.reply", _mcp, (SearchError,), [MCP, b"event: message\ndata: " + MCP + b"\n\n"], "json", share=2),
        Decoder("mcp.call", _mcp_call, (), (b'{"query": "a", "n": 1.5}',), "json"),
        *(
            Decoder(name, _asked(dialect.parse), (CallRefused,), (json.dumps(body).encode(),), "json", share=2)
            for name, dialect, body in (
                ("agents.chat", chat_completions, AGENT_CHAT),
                ("agents.responses", responses, AGENT_ITEMS),
            )
        ),
        Decoder("judge.verdict", _verdict, refused, (json.dumps(verdict).encode(),), "json", share=1),
        Decoder("weights.manifest", read_manifest, (WeightsCorrupt,), (manifest,), "json", share=0.5),
        Decoder(
            "engine.generate_body",
            _generate(model, parse_generate),
            (BadRequest,),
            [json.dumps(b).encode() for b in GENERATE],
            "json",
            share=3,
        ),
        *(
            Decoder(
                name, _generate(model, parse), (BadRequest,), [json.dumps(b).encode() for b in bodies], "json", share=2
            )
            for name, parse, bodies in (
                ("engine.completion_body", _completion, COMPLETION),
                ("engine.chat_body", _chat, CHAT),
            )
        ),
    )
