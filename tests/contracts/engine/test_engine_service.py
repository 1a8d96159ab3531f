"""Health, load, metrics: what a node and a router read."""

from __future__ import annotations

import contextlib
from pathlib import Path

import aiohttp
import pytest
from contract_client import PROMPT, Client
from contract_engines import Server, cpu_engine

from tests.support.forks import Zygote
from tests.support.metrics_page import check_page


@pytest.mark.engines("fake", "cpu", "sglang")
async def test_an_engine_that_generates_is_healthy(client: Client) -> None:
    assert (await client.get("/health_generate"))[0] == 200


async def test_an_idle_engine_is_healthy_and_ready(client: Client) -> None:
    assert (await client.get("/health"))[0] == 200
    assert (await client.get("/ready"))[0] == 200


async def test_model_info_names_the_model_and_its_version(client: Client) -> None:
    _, info = await client.get("/model_info")
    assert info["weight_version"] == "1.0"
    assert info["model_path"] == str(client.server.first)
    assert info["is_generation"] is True
    _, info = await client.get("/server_info")
    assert info["weight_version"] == "1.0"


async def test_loads_count_what_runs(client: Client) -> None:
    _, idle = await client.get("/v1/loads")
    names = {"num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage", "gen_throughput"}
    assert names <= idle["loads"][0].keys()
    assert idle["loads"][0]["num_running_reqs"] == 0
    runs = [await client.begin() for _ in range(3)]
    await client.until_running(3)
    _, busy = await client.get("/v1/loads")
    assert busy["loads"][0]["num_used_tokens"] > 0 and busy["loads"][0]["token_usage"] > 0
    assert not any(run.done for run in runs)


async def test_metrics_carry_sglangs_names(client: Client) -> None:
    await client.generate(max_new_tokens=3)
    status, page = await client.get("/metrics")
    assert status == 200
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput", "generation_tokens_total"):
        assert f"sglang:{name}{{" in page


@pytest.mark.engines("cpu", why="SGLang's own page is its own affair")
async def test_every_metric_has_a_sentence_and_a_type(client: Client) -> None:
    await client.generate(max_new_tokens=3)
    _, page = await client.get("/metrics")
    families = check_page(page)
    assert families["sglang:generation_tokens"].type == "counter"
    assert families["sglang:generation_tokens"].samples[0].value >= 3
    (first,) = (s for s in families["sglang:time_to_first_token_seconds"].samples if s.name.endswith("_count"))
    assert first.value >= 1 and first.labels.keys() == {"model_name"}


async def test_flush_is_refused_while_requests_run(client: Client) -> None:
    run = await client.begin()
    assert (await client.post("/flush_cache"))[0] == 400
    await client.ok("/abort_request", {"abort_all": True})
    await run.answer()
    await client.until_running(0)
    assert (await client.get("/flush_cache"))[0] == 200


@pytest.mark.engines("cpu", why="SGLang is ended as a process group, by its node")
async def test_a_signal_ends_the_engine_cleanly_while_a_request_runs(
    server: Server, zygote: Zygote, tmp_path: Path
) -> None:
    import asyncio

    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(cpu_engine(zygote, server.first, tmp_path / "log"))
        async with aiohttp.ClientSession() as session, session.post(url + "/generate", json=body) as response:
            await response.content.readline()
            await asyncio.to_thread(stack.close)  # sends SIGTERM and asserts exit code 0
