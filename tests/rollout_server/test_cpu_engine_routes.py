"""Routes and fields of SGLang that other trainers' clients use, on the CPU engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout_server.cpu_engine.server.admin import ABSENT
from tests.support.engine_http import Client, post, serving, write_policy

IDS = list(range(40, 60))
DOCS = Path(__file__).parents[2] / "docs" / "design" / "engine-contract.md"


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


async def test_generation_is_refused_until_all_released_memory_is_resumed(client: Client, model: Path) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 0}
    before = await post(client, "/generate", input_ids=IDS, sampling_params=sampling)
    assert await post(client, "/release_memory_occupation") is None
    info = await (await client.get("/v1/loads")).json()
    assert info["num_kept_tokens"] == 0 and (await client.get("/ready")).status == 503
    await post(client, "/resume_memory_occupation", tags=["weights"])
    await post(client, "/update_weights_from_disk", model_path=str(model))
    await post(client, "/resume_memory_occupation", tags=["kv_cache"])
    for path, body in (("/generate", {"input_ids": IDS}), ("/v1/completions", {"model": model.name, "prompt": "a"})):
        assert "memory is released (cuda_graph)" in (await post(client, path, 503, **body))["message"]
    await post(client, "/resume_memory_occupation", tags=["cuda_graph"])
    after = await post(client, "/generate", input_ids=IDS, sampling_params=sampling)
    assert after["output_ids"] == before["output_ids"] and after["meta_info"]["cached_tokens"] == 0
    assert "disk" in (await post(client, "/release_memory_occupation", 400, tags=["disk"]))["message"]


async def test_memory_of_running_requests_is_not_released(client: Client) -> None:
    body = {"input_ids": IDS, "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    async with client.post("/generate", json=body) as answer:
        await answer.content.readline()
        await post(client, "/pause_generation", mode="in_place")
        assert "1 running" in (await post(client, "/release_memory_occupation", 400))["message"]
        await post(client, "/continue_generation")


async def test_the_load_in_figures_idle_running_and_paused(model: Path) -> None:
    async def values(client: Client) -> dict[str, float]:
        lines = (await (await client.get("/metrics")).text()).splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("sglang:")]
        return {name.partition("{")[0].removeprefix("sglang:"): float(value) for name, value in pairs}

    async def load(client: Client) -> dict[str, Any]:
        return dict(await (await client.get("/v1/loads")).json())

    async with serving(model, max_running=1, max_total_tokens=512) as client:
        idle, still = await values(client), await load(client)
        zero = ("num_running_reqs", "num_queue_reqs", "num_paused_reqs", "num_used_tokens", "token_usage")
        assert [idle[name] for name in zero] == [0.0] * 5 and idle["max_total_num_tokens"] == 512
        assert idle["kv_available_tokens"] == 512 and idle["num_requests_total"] == idle["gen_throughput"] == 0
        assert (still["num_total_reqs"], still["utilization"], still["dp_rank"]) == (0, 0, 0)
        body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        asked = [asyncio.create_task(post(client, "/generate", **body)) for _ in range(3)]
        while (await load(client))["num_waiting_reqs"] < 2:
            pass
        await post(client, "/pause_generation", mode="in_place")
        held, busy = await values(client), await load(client)
        assert [held[name] for name in zero[:3]] == [1.0, 2.0, 3.0]
        used = held["num_used_tokens"]
        assert len(IDS) <= used == busy["num_used_tokens"] and held["token_usage"] == used / 512
        assert held["kv_used_tokens"] + held["kv_available_tokens"] == 512
        assert (busy["num_running_reqs"], busy["num_waiting_reqs"], busy["num_total_reqs"]) == (1, 2, 3)
        assert (busy["utilization"], busy["max_running_requests"]) == (1.0, 1)
        assert (await client.post("/abort_request", json={"abort_all": True})).status == 200
        await post(client, "/continue_generation")
        await asyncio.gather(*asked)
        done = await values(client)
        assert [done[name] for name in zero] == [0.0] * 5
        assert (done["num_requests_total"], done["num_aborted_requests_total"], done["gen_throughput"]) == (3, 3, 0)
        assert done["prompt_tokens_total"] == len(IDS) and done["step_errors_total"] == 0


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/pause_generation", {"mode": "stop"}, "abort, retract, in_place"),
        ("/release_memory_occupation", {"tags": ["kv_cache", "disk"]}, "disk"),
        ("/abort_request", {"rid": 3}, "rid must be of type str"),
        ("/abort_request", {"abort_all": "yes"}, "abort_all must be of type bool"),
    ],
)
async def test_a_wrong_control_call_is_refused(client: Client, path: str, body: dict[str, Any], says: str) -> None:
    assert says in (await post(client, path, 400, **body))["message"]


async def test_control_calls_need_no_body_but_accept_no_other_one(client: Client) -> None:
    for path in ("/continue_generation", "/abort_request", "/flush_cache", "/resume_memory_occupation"):
        assert (await client.post(path)).status == 200
    for path in ("/continue_generation", "/abort_request", "/pause_generation"):
        assert (await client.post(path, json=[1])).status == 400
        assert (await client.post(path, data="{", headers={"Content-Type": "application/json"})).status == 400


async def test_a_paused_engine_is_alive_and_not_ready(client: Client, model: Path) -> None:
    assert [(await client.get(path)).status for path in ("/health", "/health_generate", "/ready")] == [200] * 3
    await post(client, "/pause_generation", mode="retract")
    assert [(await client.get(path)).status for path in ("/health", "/health_generate", "/ready")] == [200, 503, 503]
    assert (await (await client.get("/model_info")).json())["paused"] == "retract"
    await post(client, "/continue_generation")
    assert [(await client.get(path)).status for path in ("/health", "/health_generate", "/ready")] == [200] * 3
    info = await (await client.get("/server_info")).json()
    assert (info["internal_states"][0]["num_running_reqs"], info["served_model_name"]) == (0, model.name)


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


async def test_a_session_that_was_never_begun_cannot_end(client: Client) -> None:
    answer = await client.post("/end_weight_update", json={})
    assert answer.status == 400 and "begin_weight_update" in await answer.text()
