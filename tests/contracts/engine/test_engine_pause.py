"""Pausing: abort, retract, in_place. None of them changes the tokens generated before."""

from __future__ import annotations

import asyncio
import uuid

import aiohttp
import pytest
from contract_client import ENDLESS, LONG, PROMPT, Client
from contract_proof import close, reported


async def hold(client: Client, rid: str = "") -> asyncio.Task[object]:
    """A short request that arrives during a pause."""
    fields = {"rid": rid or uuid.uuid4().hex}
    held = asyncio.create_task(client.generate(fields=fields, max_new_tokens=3, ignore_eos=True))
    await asyncio.sleep(0.2)
    return held


@pytest.mark.engines("fake", "cpu", "sglang")
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_paused_engine_holds_new_requests_until_it_goes_on(client: Client, mode: str) -> None:
    await client.ok("/pause_generation", {"mode": mode})
    held = await hold(client)
    assert not held.done()
    assert await client.version() == "1.0"  # answers at once, unlike a dead engine
    await client.ok("/continue_generation")
    answer = await held
    assert isinstance(answer, dict) and len(answer["output_ids"]) == 3


async def test_readiness_follows_the_pause(client: Client) -> None:
    await client.ok("/pause_generation", {"mode": "retract"})
    assert (await client.get("/ready"))[0] == 503
    await client.ok("/continue_generation")
    assert (await client.get("/ready"))[0] == 200


async def test_pause_abort_is_the_default_and_returns_partial_answers(client: Client) -> None:
    run = await client.begin()
    await client.ok("/pause_generation", {})
    answer = await run.answer()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < ENDLESS


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_stops_running_requests_and_they_go_on_with_exact_logprobs(client: Client, mode: str) -> None:
    run = await client.begin(tokens=LONG)
    await client.ok("/pause_generation", {"mode": mode})
    await asyncio.sleep(0.1)  # what was on its way when the pause came
    count = run.count
    await asyncio.sleep(0.3)
    assert run.count == count < LONG
    await client.ok("/continue_generation")
    answer = await run.answer()
    assert len(answer["output_ids"]) == LONG
    # keys and values of a retracted request are computed again
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    close(reported(answer), client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT)))


async def test_loads_say_nothing_new_while_sglang_is_paused(client: Client) -> None:
    """SGLang writes its load down after each step, and a paused engine takes none: a router must not believe it."""
    await client.begin()
    await client.until_running(1)
    await client.ok("/pause_generation", {"mode": "retract"})
    await client.ok("/flush_cache")  # answered after the retraction
    _, loads = await client.get("/v1/loads")
    assert loads["loads"][0]["num_running_reqs"] == (1 if client.server.real else 0)
    assert loads["loads"][0]["num_waiting_reqs"] == (0 if client.server.real else 1)


async def test_the_cache_can_be_flushed_after_retract_and_not_in_place(client: Client) -> None:
    run = await client.begin(tokens=LONG)
    await client.ok("/pause_generation", {"mode": "in_place"})
    assert (await client.post("/flush_cache"))[0] == 400
    await client.ok("/continue_generation")
    await run.reached(run.count + 8)
    await client.ok("/pause_generation", {"mode": "retract"})
    assert (await client.post("/flush_cache"))[0] == 200
    await client.ok("/continue_generation")
    answer = await run.answer()
    close(reported(answer), client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT)))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_an_abort_during_a_pause_ends_a_stream_with_every_token_that_was_sent(client: Client, mode: str) -> None:
    run = await client.begin()
    await client.ok("/pause_generation", {"mode": mode})
    await asyncio.sleep(0.1)
    received = run.chunks[-1]["output_ids"]
    await client.ok("/abort_request", {"rid": run.rid})
    if mode == "in_place":
        # SGLang ends a frozen request at its next step, which comes after the pause
        await client.ok("/continue_generation")
    answer = await run.answer()
    assert answer["output_ids"][: len(received)] == received
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["finish_reason"]["message"] == (
        "Abort in waiting queue" if mode == "retract" else "Aborted"
    )


async def test_an_unstreamed_call_aborted_in_the_queue_loses_what_sglang_had_not_handed_on(client: Client) -> None:
    """SGLang hands tokens of an unstreamed call on by fifties: reason enough to stream."""
    rid = "d" * 32
    task = asyncio.create_task(client.generate(fields={"rid": rid}, max_new_tokens=ENDLESS, ignore_eos=True))
    await client.begin(at_least=120)  # decoded together, so the other has come about as far
    await client.ok("/pause_generation", {"mode": "retract"})
    await client.ok("/abort_request", {"rid": rid})
    answer = await task
    assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    count = len(answer["output_ids"])
    assert 0 < count < ENDLESS
    if client.server.real:
        assert count % 50 == 0


async def test_an_abort_during_a_pause_reaches_a_held_request_or_not(client: Client) -> None:
    await client.ok("/pause_generation", {"mode": "retract"})
    held = await hold(client, "c" * 32)
    await client.ok("/abort_request", {"rid": "c" * 32})
    await asyncio.sleep(0.2)
    # SGLang parks requests before its scheduler knows them: they cannot be aborted, only left
    assert held.done() is not client.server.real
    await client.ok("/continue_generation")
    answer = await held
    assert isinstance(answer, dict)
    meta = answer["meta_info"]
    if client.server.real:
        assert meta["finish_reason"]["type"] == "length"
        return
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    # a short meta_info, as SGLang's for a request that is aborted in its queue
    assert "prompt_tokens" not in meta and "cached_tokens" not in meta and "num_retractions" not in meta


async def test_health_is_no_sign_of_life_while_sglang_is_paused_and_model_info_is(client: Client) -> None:
    """SGLang's /health generates a token, so a pause makes it wait and say 503; /health_generate is the same."""
    await client.ok("/pause_generation", {"mode": "retract"})
    patience = aiohttp.ClientTimeout(30 if client.server.real else 1)
    assert (await client.get("/health", timeout=patience))[0] == (503 if client.server.real else 200)
    assert (await client.get("/model_info", timeout=aiohttp.ClientTimeout(1)))[0] == 200
    if not client.server.real:
        assert (await client.get("/health_generate", timeout=patience))[0] == 503
