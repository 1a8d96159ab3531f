"""Requests that are wrong: refused with a reason, and nobody else's request suffers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from contract_client import Client

WRONG: dict[str, Any] = {
    "no prompt": {"sampling_params": {}},
    "empty prompt": {"input_ids": []},
    "negative id": {"input_ids": [1, -1]},
    "id beyond the vocabulary": {"input_ids": [1, 10_000_000]},
    "id of a wrong type": {"input_ids": [1, "2"]},
    "prompt longer than the context": {"input_ids": [1] * 200_000},
    "more new tokens than the context": {"input_ids": [1], "sampling_params": {"max_new_tokens": 10_000_000}},
    "unknown sampling parameter": {"input_ids": [1], "sampling_params": {"temprature": 1}},
    "negative temperature": {"input_ids": [1], "sampling_params": {"temperature": -1}},
    "temperature of a wrong type": {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
    "top_p zero": {"input_ids": [1], "sampling_params": {"top_p": 0}},
    "negative max_new_tokens": {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
    "stop of a wrong type": {"input_ids": [1], "sampling_params": {"stop": 3}},
    "sampling_params of a wrong type": {"input_ids": [1], "sampling_params": 3},
    "a list as body": [1, 2],
    "empty prompt in a batch": {"input_ids": [[1], []]},
    "id true": {"input_ids": [1, True]},
    "id as a fraction": {"input_ids": [1, 2.5]},
    "too many attempts": {"input_ids": [[1]] * 100, "sampling_params": {"n": 100}},
    "a feature we lack": {"input_ids": [1], "sampling_params": {"json_schema": "{}"}},
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_request_is_refused_and_the_others_go_on(client: Client, name: str) -> None:
    good = asyncio.create_task(client.generate(max_new_tokens=5, ignore_eos=True))
    status, answer = await client.post("/generate", WRONG[name])
    print(name, status, str(answer)[:200])
    assert status == 400 and answer["error"]["message"]
    assert len((await good)["output_ids"]) == 5


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "bytes", "nested"])
async def test_a_body_that_is_not_json_is_refused(client: Client, raw: bytes) -> None:
    async with client.session.post(client.server.url + "/generate", data=raw) as response:
        print(response.status, (await response.text())[:200])
        assert response.status in (400, 422)
    assert (await client.get("/model_info"))[0] == 200
