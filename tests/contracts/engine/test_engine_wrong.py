"""Invalid requests are rejected with a reason and do not affect other requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from contract_client import Client

REFUSED: dict[str, Any] = {
    "no prompt": {"sampling_params": {}},
    "empty prompt": {"input_ids": []},
    "id of a wrong type": {"input_ids": [1, "2"]},
    "id as a fraction": {"input_ids": [1, 2.5]},
    "prompt longer than the context": {"input_ids": [1] * 200_000},
    "more new tokens than the context": {"input_ids": [1], "sampling_params": {"max_new_tokens": 10_000_000}},
    "negative temperature": {"input_ids": [1], "sampling_params": {"temperature": -1}},
    "top_p zero": {"input_ids": [1], "sampling_params": {"top_p": 0}},
    "negative max_new_tokens": {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
    "sampling_params of a wrong type": {"input_ids": [1], "sampling_params": 3},
    "a list as body": [1, 2],
}
"""HTTP 400 and a message."""

BLUNT: dict[str, Any] = {
    "unknown sampling parameter": {"input_ids": [1], "sampling_params": {"temprature": 1}},
    "temperature of a wrong type": {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
    "stop of a wrong type": {"input_ids": [1], "sampling_params": {"stop": 3}},
}
"""HTTP 400 and an error, in SGLang a text. Before 0.5.23 SGLang answered 500."""

OWN: dict[str, Any] = {
    "negative id": {"input_ids": [1, -1]},
    "id beyond the vocabulary": {"input_ids": [1, 10_000_000]},
    "empty prompt in a batch": {"input_ids": [[1], []]},
    "id true": {"input_ids": [1, True]},
    "too many attempts": {"input_ids": [[1]] * 100, "sampling_params": {"n": 100}},
    "a feature we lack": {"input_ids": [1], "sampling_params": {"json_schema": "{}"}},
}
"""Accepted by SGLang, which crashes if the id is outside the vocabulary: clients must check ids first."""


async def refuse(client: Client, body: Any) -> tuple[int, Any]:
    """Send it beside a good request, which must get its answer."""
    good = asyncio.create_task(client.generate(max_new_tokens=5, ignore_eos=True))
    refused = await client.post("/generate", body)
    assert len((await good)["output_ids"]) == 5
    return refused


@pytest.mark.parametrize("name", REFUSED)
async def test_a_wrong_request_is_refused_with_a_message_and_the_others_go_on(client: Client, name: str) -> None:
    status, answer = await refuse(client, REFUSED[name])
    assert status == 400
    assert answer.get("error", answer)["message"]


@pytest.mark.parametrize("name", BLUNT)
async def test_a_wrong_sampling_parameter_is_refused_and_the_others_go_on(client: Client, name: str) -> None:
    status, answer = await refuse(client, BLUNT[name])
    assert status == 400 and answer["error"], answer


@pytest.mark.engines("cpu", why="SGLang takes them; an id outside of the vocabulary ends its process")
@pytest.mark.parametrize("name", OWN)
async def test_the_cpu_engine_refuses_what_sglang_takes(client: Client, name: str) -> None:
    status, answer = await refuse(client, OWN[name])
    assert status == 400 and answer["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "bytes", "nested"])
async def test_a_body_that_is_not_json_is_refused(client: Client, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}  # an engine without a key wants it
    async with client.session.post(client.server.url + "/generate", data=raw, headers=headers) as response:
        assert response.status == 400
    assert (await client.get("/model_info"))[0] == 200
