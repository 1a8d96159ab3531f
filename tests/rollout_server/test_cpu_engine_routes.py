"""Routes and fields of SGLang that other trainers' clients use, on the embedded engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout_server.cpu_engine.server.absent import ABSENT
from tests.support.engine_http import Client, post, serving, write_policy

IDS = list(range(40, 60))
DOCS = Path(__file__).parents[2] / "docs" / "engines.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
async def client(model: Path) -> AsyncIterator[Client]:
    async with serving(model) as client:
        yield client


@pytest.mark.parametrize("spaces", [False, True])
async def test_the_body_that_slime_sends_is_answered(client: Client, spaces: bool) -> None:
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 4,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": spaces,
    }
    answer = await post(client, "/generate", input_ids=IDS, sampling_params=sampling, return_logprob=True)
    assert len(answer["meta_info"]["output_token_logprobs"]) == 4


async def test_texts_of_tokens_come_with_their_logprobs_whole_and_streamed(client: Client) -> None:
    body: dict[str, Any] = {"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    body |= {"return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    meta = (await post(client, "/generate", **body))["meta_info"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        texts = (await post(client, "/detokenize", tokens=[[entry[1]] for entry in meta[name]]))["text"]
        assert [entry[2] for entry in meta[name]] == texts
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"]) == len(IDS)
    assert all(isinstance(entry[2], str) for best in meta["input_top_logprobs"][1:] for entry in best)
    streamed = await (await client.post("/generate", json={**body, "stream": True})).text()
    last = json.loads(streamed.split("\n\n")[-3].removeprefix("data: "))["meta_info"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [entry[1:] for entry in last[name]] == [entry[1:] for entry in meta[name]]
    plain = await post(client, "/generate", **{**body, "return_text_in_logprobs": False})
    assert {entry[2] for entry in plain["meta_info"]["output_token_logprobs"]} == {None}


async def test_more_alternatives_than_memory_holds_are_refused(client: Client) -> None:
    body = {"input_ids": [IDS] * 100, "return_logprob": True, "logprob_start_len": 0}
    sampling = {"max_new_tokens": 400, "n": 4}
    refused = await post(client, "/generate", 400, **body, top_logprobs_num=100, sampling_params=sampling)
    assert "request fewer" in refused["message"]


@pytest.mark.parametrize("path", ["/get_weight_version", "/weight_version"])
async def test_the_weight_version_has_a_route(client: Client, path: str) -> None:
    assert await (await client.get(path)).json() == {"weight_version": "7"}


async def test_released_memory_holds_requests_back_until_it_is_resumed(client: Client, model: Path) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 0}
    before = await post(client, "/generate", input_ids=IDS, sampling_params=sampling)
    assert await post(client, "/release_memory_occupation") is None
    info = await (await client.get("/v1/loads")).json()
    assert info["num_kept_tokens"] == 0 and (await client.get("/ready")).status == 503
    waiting = asyncio.create_task(post(client, "/generate", input_ids=IDS, sampling_params=sampling))
    while not (await (await client.get("/v1/loads")).json())["num_waiting_reqs"]:
        pass
    await post(client, "/resume_memory_occupation", tags=["weights"])
    await post(client, "/update_weights_from_disk", model_path=str(model))  # not held up by the request that waits
    assert not waiting.done()
    await post(client, "/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    after = await waiting
    assert after["output_ids"] == before["output_ids"] and after["meta_info"]["cached_tokens"] == 0
    assert "disk" in (await post(client, "/release_memory_occupation", 400, tags=["disk"]))["message"]


async def test_memory_of_running_requests_is_not_released(client: Client) -> None:
    body = {"input_ids": IDS, "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    async with client.post("/generate", json=body) as answer:
        await answer.content.readline()
        await post(client, "/pause_generation", mode="in_place")
        assert "1 running" in (await post(client, "/release_memory_occupation", 400))["message"]
        await post(client, "/continue_generation")


async def test_a_comparison_finds_what_an_update_did_not_bring_back(client: Client, model: Path) -> None:
    assert "snapshot" in (await post(client, "/weights_checker", 400, action="compare"))["message"]
    for action in ("snapshot", "compare", "reset_tensors"):
        assert (await post(client, "/weights_checker", action=action))["success"] is True
    assert "differ" in (await post(client, "/weights_checker", 400, action="compare"))["message"]
    await post(client, "/update_weights_from_disk", model_path=str(model))
    await post(client, "/weights_checker", action="compare")
    await post(client, "/post_process_weights", restore_weights_before_load=False, post_process_quantization=True)


async def test_what_cannot_be_had_says_why_and_the_documentation_lists_it(client: Client) -> None:
    listed = set(re.findall(r"`(/[a-z_/0-9]+)`", DOCS.read_text()))
    for path, why in ABSENT.items():
        assert why in (await post(client, path, 400))["error"]["message"] and path in listed
    assert (await post(client, "/open_session", 404))["error"]["type"] == "not_found_error"
