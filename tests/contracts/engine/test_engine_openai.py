"""OpenAI's routes: the same tokens as /generate, in the shapes of SGLang."""

from __future__ import annotations

import json
from typing import Any

import pytest
from contract_client import PROMPT, Client

BODY: dict[str, Any] = {"model": "default", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


async def test_a_completion_is_the_generation_of_its_prompt(client: Client) -> None:
    made = await client.generate(max_new_tokens=6, temperature=0, ignore_eos=True)
    answer = await client.ok("/v1/completions", BODY)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["index"], choice["finish_reason"]) == (made["text"], 0, "length")
    assert answer["object"] == "text_completion" and choice["logprobs"] is None
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": len(PROMPT), "completion_tokens": 6, "total_tokens": len(PROMPT) + 6}
    assert answer["metadata"]["weight_version"] == "1.0"


async def test_an_echo_brings_the_logprobs_of_the_prompt(client: Client) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    meta = (await client.generate(fields=fields, max_new_tokens=6, temperature=0, ignore_eos=True))["meta_info"]
    (choice,) = (await client.ok("/v1/completions", {**BODY, "echo": True, "logprobs": 1}))["choices"]
    both = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    columns = choice["logprobs"]
    assert columns["token_logprobs"][0] is None and both[0][0] is None
    assert columns["token_logprobs"][1:] == pytest.approx([entry[0] for entry in both[1:]], abs=1e-3)
    assert len(columns["tokens"]) == len(columns["text_offset"]) == len(columns["top_logprobs"]) == len(both)
    tops = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    highest = [max(best.values()) for best in columns["top_logprobs"][1:]]
    assert highest == pytest.approx([best[0][0] for best in tops], abs=1e-3)


async def test_the_chunks_of_a_completion_make_up_its_text(client: Client) -> None:
    whole = await client.ok("/v1/completions", BODY)
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    async with client.session.post(client.server.url + "/v1/completions", json=body) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert events[-1]["choices"] == [] and events.pop()["usage"]["completion_tokens"] == 6
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]


async def test_the_model_is_listed_and_its_tokenizer_can_be_asked(client: Client) -> None:
    status, listed = await client.get("/v1/models")
    (card,) = listed["data"]
    assert status == 200 and (listed["object"], card["object"]) == ("list", "model") and card["max_model_len"] > 0
    text = (await client.ok("/detokenize", {"tokens": PROMPT}))["text"]
    found = await client.ok("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert found["count"] == len(found["tokens"])
    assert (await client.ok("/detokenize", {"tokens": found["tokens"]}))["text"] == text


@pytest.mark.parametrize("wrong", [{"max_tokens": "x"}, {"prompt": None}, {"stop": 3}], ids=str)
async def test_a_wrong_completion_is_refused_with_a_message(client: Client, wrong: dict[str, Any]) -> None:
    status, answer = await client.post("/v1/completions", {**BODY, **wrong})
    assert status == 400 and answer.get("error", answer)["message"]
