"""Weights from a directory: all of them or none."""

from __future__ import annotations

import asyncio

import pytest
from contract_client import PROMPT, Client
from contract_models import FAULTS, spoilt
from contract_proof import close, reported, spans


@pytest.mark.engines("fake", "cpu", "sglang")
async def test_an_update_takes_the_label_that_comes_with_it(client: Client) -> None:
    await client.swap(client.server.second, "2.0")
    assert await client.version() == "2.0"
    answer = await client.generate(max_new_tokens=3, ignore_eos=True)
    assert answer["meta_info"]["weight_version"] == "2.0"


async def test_an_update_without_a_label_keeps_the_old_one(client: Client) -> None:
    before = await client.checksums()
    await client.swap(client.server.second, None)
    assert await client.version() == "1.0"
    assert await client.checksums() != before
    await client.swap(client.server.first, "1.0")
    assert await client.checksums() == before


async def test_the_prefix_cache_never_crosses_an_update(client: Client) -> None:
    await client.generate(max_new_tokens=4)
    await client.swap(client.server.second, "2.0")
    answer = await client.generate(max_new_tokens=4, ignore_eos=True)
    assert answer["meta_info"]["cached_tokens"] == 0
    close(reported(answer), client.server.logprobs(client.server.second, PROMPT + answer["output_ids"], len(PROMPT)))


async def test_an_update_without_a_pause_waits_for_running_requests_and_holds_later_ones(client: Client) -> None:
    running = await client.begin(tokens=400)
    # no flush: SGLang may still count the request that it has just ended, and then a flush that fails ends itself
    update = asyncio.create_task(client.load(client.server.second, "2.0", flush_cache=False))
    await asyncio.sleep(0.05)
    later = asyncio.create_task(client.generate(PROMPT, {"extra_key": "2.0"}, max_new_tokens=4, ignore_eos=True))
    assert (await update)[0] == 200
    assert spans(await running.answer()) == [("1.0", 0, 400)]
    ids = PROMPT + (await later)["output_ids"]
    close(reported(await later), client.server.logprobs(client.server.second, ids, len(PROMPT)))


async def test_the_checksum_follows_the_weights(client: Client) -> None:
    first = await client.checksums()
    await client.swap(client.server.second, "2.0")
    second = await client.checksums()
    await client.swap(client.server.first, "1.0")
    assert first == await client.checksums() != second
    assert first.keys() == second.keys()


async def test_a_directory_that_is_not_there_is_refused_and_the_label_stays(client: Client) -> None:
    status, answer = await client.load(client.server.scratch / "nowhere", "2.0")
    assert status == 400 and answer["success"] is False and answer["message"]
    assert await client.version() == "1.0"
    await client.generate(max_new_tokens=2)


@pytest.mark.engines("cpu", why="SGLang takes wrong tensors without a word, and a file cut off ends its process")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_update_is_refused_and_leaves_the_old_weights(client: Client, fault: str) -> None:
    before = await client.checksums()
    greedy = await client.generate(max_new_tokens=8, temperature=0, ignore_eos=True)
    status, answer = await client.load(spoilt(client.server.second, client.server.scratch / "bad", fault), "2.0")
    assert status == 400 and answer["success"] is False and answer["message"]
    assert await client.checksums() == before
    _, info = await client.get("/model_info")
    assert info["weight_version"] == "1.0" and info["model_path"] == str(client.server.first)
    after = await client.generate(max_new_tokens=8, temperature=0, ignore_eos=True)
    assert after["output_ids"] == greedy["output_ids"]
