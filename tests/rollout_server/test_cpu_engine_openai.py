"""OpenAI's routes of the CPU engine: equal to /generate and to transformers, whole and streamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM

from rollout_server.cpu_engine.model.tokenizer import Tokenizer as EngineTokenizer
from rollout_server.cpu_engine.server.openai_bodies import conversation
from tests.support.engine_http import Client, post, serving, write_policy

PROMPT = "where is müller? 東京"
GREEDY = {"temperature": 0, "ignore_eos": True}
ALL = {"echo": True, "logprobs": 2, "max_tokens": 4, **GREEDY}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
async def client(model: Path) -> AsyncIterator[Client]:
    async with serving(model) as client:
        yield client


async def stream(client: Client, path: str, **body: Any) -> list[Any]:
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status == 200 and answer.content_type == "text/event-stream", await answer.text()
    events = [line[6:] for line in (await answer.text()).splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


async def ids_of(client: Client, text: str = PROMPT) -> list[int]:
    found: list[int] = (await post(client, "/tokenize", prompt=text))["tokens"]
    return found


def alike(a: Any, b: Any) -> bool:
    """Equal but for the noise of float32."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    return bool(a == pytest.approx(b, abs=1e-4)) if isinstance(a, float) else bool(a == b)


def by_transformers(model: Path, ids: list[int]) -> torch.Tensor:
    """Log-probs [len(ids) - 1, vocab] of what follows each token."""
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits, -1)[:-1]


async def test_an_echo_has_the_logprobs_and_best_tokens_that_transformers_computes(client: Client, model: Path) -> None:
    answer = await post(client, "/v1/completions", prompt=PROMPT, **ALL)
    (choice,) = answer["choices"]
    ids = await ids_of(client)
    made = (await post(client, "/generate", input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 4}))[
        "output_ids"
    ]
    columns = choice["logprobs"]
    assert choice["text"].startswith(PROMPT) and choice["finish_reason"] == "length"
    assert len(columns["tokens"]) == len(ids) + 4 and columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    expected = by_transformers(model, ids + made)
    chosen = expected.gather(1, torch.tensor((ids + made)[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(columns["token_logprobs"][1:]), chosen, atol=1e-4, rtol=0)
    for best, row in zip(columns["top_logprobs"][1:], expected, strict=True):
        highest = sorted(best.values(), reverse=True)[:2]
        torch.testing.assert_close(torch.tensor(highest), row.topk(2).values, atol=1e-4, rtol=0)
    assert all(token in best for token, best in zip(columns["tokens"][1:], columns["top_logprobs"][1:], strict=True))
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 4)
    assert usage["total_tokens"] == len(ids) + 4 and answer["metadata"]["weight_version"] == "7"
    scored = await post(client, "/v1/completions", prompt=PROMPT, **ALL | {"max_tokens": 0})
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(columns["token_logprobs"][:-4], abs=1e-5)


async def test_tokens_are_spelt_so_that_no_byte_is_lost(client: Client) -> None:
    answer = await post(client, "/v1/completions", prompt=PROMPT, **ALL | {"max_tokens": 0})
    columns = answer["choices"][0]["logprobs"]
    raw = b""
    for token in columns["tokens"]:
        raw += bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
    assert raw.decode() == PROMPT and any(token.startswith("bytes:") for token in columns["tokens"])
    lengths = [len(token) for token in columns["tokens"]]
    assert columns["text_offset"] == [sum(lengths[:n]) for n in range(len(lengths))]


async def test_text_offsets_index_the_text_where_the_tokenizer_adds_a_token(tmp_path: Path) -> None:
    model = write_policy(tmp_path)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    begin = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    tokenizer.post_processor = begin
    tokenizer.save(str(model / "tokenizer.json"))
    async with serving(model) as client:
        for prompt in ("where is", "<|user|>is"):
            answer = await post(client, "/v1/completions", prompt=prompt, echo=True, logprobs=0, max_tokens=0)
            (choice,) = answer["choices"]
            columns = choice["logprobs"]
            assert choice["text"] == prompt and columns["tokens"][0] == "<eos>"
            assert columns["text_offset"][:2] == [0, 0]
            for token, at in list(zip(columns["tokens"], columns["text_offset"], strict=True))[1:]:
                assert prompt.startswith(token, at)


async def test_every_form_of_a_prompt_gives_the_same_answer(client: Client) -> None:
    ids = await ids_of(client)
    forms = [PROMPT, [PROMPT, PROMPT], ids, [ids, ids]]
    answers = [await post(client, "/v1/completions", prompt=form, n=2, **ALL) for form in forms]
    assert [len(answer["choices"]) for answer in answers] == [2, 4, 2, 4]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len(ids), 2 * len(ids)] * 2
    for answer in answers:
        for number, choice in enumerate(answer["choices"]):
            first = answers[0]["choices"][0]
            assert alike(choice, first | {"index": number})


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
async def test_the_chunks_of_a_stream_joined_are_the_whole_answer(client: Client, kind: str) -> None:
    chat = kind.startswith("chat")
    body = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 2} if chat else {}
    body = body or {"prompt": [PROMPT, "is"], "echo": True, "logprobs": 2}
    body |= {"n": 2, "seed": 5, "max_tokens": 30, "stop": ["e"], "ignore_eos": True}
    whole = await post(client, f"/v1/{kind}", **body)
    events = await stream(client, f"/v1/{kind}", stream_options={"include_usage": True}, **body)
    last = events.pop()
    assert last["choices"] == [] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert {event["object"] for event in events} == {"chat.completion.chunk" if chat else "text_completion"}
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        texts = [part["delta"].get("content", "") if chat else part["text"] for part in parts]
        assert "".join(texts) == (choice["message"]["content"] if chat else choice["text"])
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["matched_stop"] == choice["matched_stop"]
        for column in choice["logprobs"]:
            joined = [entry for part in parts if part["logprobs"] for entry in part["logprobs"][column]]
            assert alike(joined, choice["logprobs"][column]), column
    if chat:
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_a_seed_repeats_an_answer_and_another_gives_another(client: Client) -> None:
    texts = [
        (await post(client, "/v1/completions", prompt=PROMPT, seed=seed, max_tokens=12))["choices"][0]["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_a_chat_is_the_completion_of_its_template(client: Client) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "where"}]},
        {"role": "assistant", "content": "is"},
    ]
    chat = await post(client, "/v1/chat/completions", messages=messages, max_completion_tokens=5, **GREEDY)
    text = "<|user|>where<|assistant|>is<|assistant|>"
    plain = await post(client, "/v1/completions", prompt=text, max_tokens=5, **GREEDY)
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": plain["choices"][0]["text"]}
    assert chat["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    tokens = await post(client, "/v1/tokenize", messages=messages)
    assert (await post(client, "/detokenize", tokens=tokens["tokens"], skip_special_tokens=False))["text"] == text
    refused = await post(client, "/v1/chat/completions", 400, messages=messages, chat_template_kwargs={"strict": True})
    assert "one message only" in refused["error"]["message"]


def test_a_template_gets_no_content_as_empty_and_the_arguments_of_a_call_decoded(model: Path) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": '{"query": "a"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user"}]
    seen: list[Any] = []
    conversation({"messages": messages}, lambda given, *_: str(seen.extend(given)), EngineTokenizer(model))
    assert [message["content"] for message in seen] == ["", ""]
    function = {"name": "search", "arguments": {"query": "a"}}
    assert seen[0]["tool_calls"] == [{"type": "function", "function": function}] and "tool_calls" not in seen[1]


async def test_the_bodies_that_sglangs_router_sends_are_answered(client: Client, model: Path) -> None:
    """sglang-router 0.3.2 rewrites each body, with these defaults."""
    idle = {"stream": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True}
    idle |= {"return_hidden_states": False, "model": model.name}
    await post(client, "/v1/completions", prompt=PROMPT, echo=False, max_tokens=3, **idle)
    idle |= {"logprobs": False, "continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True}
    messages = [{"role": "user", "content": PROMPT}]
    await post(client, "/v1/chat/completions", messages=messages, max_completion_tokens=3, **idle)


async def test_a_chat_says_the_day_of_the_run(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "dated")
    (tmp_path / "dated" / "chat_template.jinja").write_text("{{ strftime_now('%d.%m.%Y') }} {{ messages[0].content }}")
    async with serving(tmp_path / "dated", date=date(2026, 1, 31)) as client:
        tokens = (await post(client, "/tokenize", messages=[{"role": "user", "content": "where"}]))["tokens"]
        assert (await post(client, "/detokenize", tokens=tokens))["text"] == "31.01.2026 where"


async def test_a_chat_without_a_limit_fills_the_context(client: Client) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    answer = await post(client, "/v1/chat/completions", messages=messages, **GREEDY)
    assert answer["usage"]["total_tokens"] == 512 and answer["choices"][0]["finish_reason"] == "length"


async def test_models_name_what_a_request_may_name(client: Client, model: Path) -> None:
    listed = await (await client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == [model.name] and listed["data"][0]["max_model_len"] == 512
    assert await (await client.get(f"/v1/models/{model.name}")).json() == listed["data"][0]
    for name in (model.name, str(model), "default"):
        await post(client, "/v1/completions", model=name, prompt=PROMPT, max_tokens=1)
    unknown = await post(client, "/v1/completions", 404, model="polcy", prompt=PROMPT)
    assert unknown["error"]["type"] == "not_found_error" and "polcy" in unknown["error"]["message"]
    assert (await client.get("/v1/models/polcy")).status == 404


async def test_texts_and_ids_are_converted_one_by_one_or_in_lists(client: Client) -> None:
    one, two = await ids_of(client, "where"), await ids_of(client, "is")
    whole = await post(client, "/tokenize", prompt="where")
    assert whole == {"tokens": one, "count": len(one), "max_model_len": 512}
    lists = await post(client, "/v1/tokenize", prompt=["where", "is"])
    assert (lists["tokens"], lists["count"]) == ([one, two], [len(one), len(two)])
    assert (await post(client, "/tokenize", prompt=["is"]))["tokens"] == [two]
    assert (await post(client, "/detokenize", tokens=one))["text"] == "where"
    assert (await post(client, "/v1/detokenize", tokens=[one, two]))["text"] == ["where", "is"]
    assert (await post(client, "/detokenize"))["text"] == (await post(client, "/detokenize", tokens=[]))["text"] == ""
    assert (await post(client, "/detokenize", tokens=[0, *one]))["text"] == "where"
    assert (await post(client, "/detokenize", tokens=[0, *one], skip_special_tokens=False))["text"] == "<eos>where"
    for wrong in ({}, {"prompt": "a", "messages": [{"role": "user"}]}, {"prompt": 3}, {"prompt": ["a", 3]}):
        await post(client, "/tokenize", 400, **wrong)
    for bad in ([1 << 20], [[0], []], [[0], 3], ["a"]):
        await post(client, "/detokenize", 400, tokens=bad)


@pytest.mark.parametrize(
    ("path", "wrong", "says"),
    [
        ("completions", {"prompt": PROMPT, "temprature": 1}, "temprature"),
        ("completions", {"prompt": PROMPT, "best_of": 3}, "best_of"),
        ("completions", {"prompt": PROMPT, "presence_penalty": 1}, "presence_penalty"),
        ("completions", {"max_tokens": 1}, "prompt is missing"),
        ("completions", {"prompt": [3, "a"]}, "integers"),
        ("completions", {"prompt": [["a"]]}, "integers"),
        ("completions", {"prompt": PROMPT, "logprobs": -1}, "top_logprobs_num"),
        ("completions", {"prompt": PROMPT, "model": 3}, "model"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ("tokenize", {"prompt": "\ud800"}, "surrogate"),
        ("tokenize", {"prompt": ["a", "\ud800"]}, "surrogate"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "arguments",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "logprobs"),
    ],
)
async def test_what_is_wrong_or_not_supported_is_an_error_object(
    client: Client, path: str, wrong: dict[str, Any], says: str
) -> None:
    answer = await post(client, f"/v1/{path}", 400, **wrong)
    error = answer["error"]
    assert says in error["message"] and (answer["success"], answer["object"]) == (False, "error")
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
