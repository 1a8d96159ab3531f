"""Aborting: the generated tokens are returned by the aborted call."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
from contract_client import ENDLESS, PROMPT, Client
from contract_proof import close, reported, spans


async def test_an_aborted_stream_ends_with_everything_so_far(client: Client) -> None:
    run = await client.begin()
    await client.ok("/abort_request", {"rid": run.rid})
    answer = await run.answer()
    reason = answer["meta_info"]["finish_reason"]
    assert (reason["type"], reason["message"]) == ("abort", "Aborted")
    count = len(answer["output_ids"])
    assert 8 <= count < ENDLESS and count >= max(len(c["output_ids"]) for c in run.chunks)
    assert spans(answer) == [("1.0", 0, count)]
    close(reported(answer), client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT)))


async def test_an_aborted_call_that_does_not_stream_returns_what_it_has(client: Client) -> None:
    rid = "a" * 32
    task = asyncio.create_task(client.generate(fields={"rid": rid}, max_new_tokens=ENDLESS, ignore_eos=True))
    await client.begin(at_least=16)  # decoded together, so the other has come about as far
    await client.ok("/abort_request", {"rid": rid})
    answer = await task
    assert answer["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert 0 < len(answer["output_ids"]) < ENDLESS
    close(reported(answer), client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT)))


async def test_abort_matches_rids_by_prefix_which_is_why_rids_have_a_fixed_length(client: Client) -> None:
    runs = [await client.begin(rid) for rid in ("r1", "r10", "r2")]
    await client.ok("/abort_request", {"rid": "r1"})
    for run in runs[:2]:
        assert (await run.answer())["meta_info"]["finish_reason"]["type"] == "abort"
    assert not runs[2].done
    await client.ok("/abort_request", {"rid": "r2"})
    assert (await runs[2].answer())["meta_info"]["id"] == "r2"


async def test_aborting_all_ends_all(client: Client) -> None:
    runs = [await client.begin() for _ in range(3)]
    await client.ok("/abort_request", {"abort_all": True})
    assert {(await run.answer())["meta_info"]["finish_reason"]["type"] for run in runs} == {"abort"}


async def test_aborting_an_unknown_rid_is_fine(client: Client) -> None:
    assert (await client.post("/abort_request", {"rid": "nobody"}))[0] == 200


async def test_a_client_that_goes_away_frees_its_slot(client: Client) -> None:
    async with aiohttp.ClientSession() as other:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
        task = asyncio.create_task(other.post(client.server.url + "/generate", json=body))
        await client.until_running(1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await client.until_running(0, seconds=8)


async def test_a_stream_that_is_left_frees_its_slot(client: Client) -> None:
    async with aiohttp.ClientSession() as other:
        body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
        async with other.post(client.server.url + "/generate", json=body) as response:
            await response.content.readline()
    await client.until_running(0, seconds=8)
