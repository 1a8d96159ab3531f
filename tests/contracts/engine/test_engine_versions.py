"""Which weights sampled which token, proven by log-probs that transformers computes with each version's weights."""

from __future__ import annotations

import asyncio

import pytest
from contract_client import ENDLESS, LONG, PROMPT, Client
from contract_proof import border, close, expect_apart, over_old_cache, reported, spans


async def change(client: Client, *, flush: bool) -> None:
    status, answer = await client.load(client.server.second, "2.0", flush_cache=flush)
    assert status == 200 and answer["success"] is True, answer


@pytest.mark.slow
async def test_retract_samples_each_span_from_exactly_its_own_weights(client: Client) -> None:
    server = client.server
    runs = [await client.begin(tokens=LONG) for _ in range(3)]
    await client.ok("/pause_generation", {"mode": "retract"})
    await change(client, flush=True)
    await client.ok("/continue_generation")
    for answer in await asyncio.gather(*(run.answer() for run in runs)):
        start = border(answer)
        ids, got = PROMPT + answer["output_ids"], reported(answer)
        old, new = (server.logprobs(path, ids, len(PROMPT)) for path in (server.first, server.second))
        close(got[:start], old[:start])
        close(got[start:], new[start:])
        expect_apart(got[:start], new[:start])
        expect_apart(got[start:], old[start:])
        assert answer["meta_info"]["weight_version"] == "2.0"


async def test_in_place_goes_on_with_new_weights_over_old_keys_and_values(client: Client) -> None:
    """SGLang names the border one token too early: the first token of a new span was sampled by the old weights,
    since it was in flight when the pause came. Clients must move such a boundary by one."""
    server = client.server
    run = await client.begin(tokens=LONG)
    await client.ok("/pause_generation", {"mode": "in_place"})
    await change(client, flush=False)
    await client.ok("/continue_generation")
    answer = await run.answer()
    assert answer["meta_info"]["num_retractions"] == 0
    start = border(answer) + (1 if server.real else 0)
    ids, got = PROMPT + answer["output_ids"], reported(answer)
    old = server.logprobs(server.first, ids, len(PROMPT))
    close(got[:start], old[:start])
    expect_apart(got[start:], old[start:])
    # the newest token of the old weights was not in the cache yet when they went
    close(got[start:], over_old_cache(server, ids, len(PROMPT) + start - 1))


async def test_keys_and_values_of_two_versions_are_kept_apart_by_the_extra_key(client: Client) -> None:
    """After in_place a cache may hold what two versions computed together; only requests of the old key may meet it."""
    run = await client.begin(tokens=LONG)
    await client.ok("/pause_generation", {"mode": "in_place"})
    await change(client, flush=False)
    await client.ok("/continue_generation")
    ids = PROMPT + (await run.answer())["output_ids"]
    for fields, may_meet_it in (({}, client.server.real), ({"extra_key": "2.0"}, False)):
        again = await client.generate(ids[:-1], fields, max_new_tokens=4, ignore_eos=True)
        assert (again["meta_info"]["cached_tokens"] > 0) is may_meet_it
    close(reported(again), client.server.logprobs(client.server.second, ids[:-1] + again["output_ids"], len(ids) - 1))


@pytest.mark.engines("cpu", why="SGLang has put the new weights in when it finds out, and its process ends")
async def test_in_place_with_a_flush_is_refused_before_any_weight_changes(client: Client) -> None:
    before = await client.checksums()
    run = await client.begin(tokens=LONG)
    await client.ok("/pause_generation", {"mode": "in_place"})
    status, answer = await client.load(client.server.second, "2.0")
    assert status == 400 and "flush" in answer["message"]
    assert await client.checksums() == before
    await client.ok("/continue_generation")
    assert spans(await run.answer()) == [("1.0", 0, LONG)]


@pytest.mark.slow
async def test_a_request_through_two_updates_has_three_spans(client: Client) -> None:
    server = client.server
    run = await client.begin(tokens=ENDLESS)
    for path, version in ((server.second, "2.0"), (server.first, "3.0")):
        await client.ok("/pause_generation", {"mode": "retract"})
        assert (await client.load(path, version))[0] == 200
        await client.ok("/continue_generation")
        await run.reached(run.count + 30)
    answer = await run.answer()
    (a, _, first), (b, _, second), (c, _, _) = spans(answer)
    assert (a, b, c) == ("1.0", "2.0", "3.0")
    assert answer["meta_info"]["num_retractions"] == 2
    ids, got = PROMPT + answer["output_ids"], reported(answer)
    one, two = (server.logprobs(path, ids, len(PROMPT)) for path in (server.first, server.second))
    close(got[:first], one[:first])
    close(got[first:second], two[first:second])
    close(got[second:], one[second:])


@pytest.mark.engines("fake", "cpu", "sglang")
async def test_an_update_during_a_pause_splits_the_spans_after_all_that_was_sent(client: Client) -> None:
    run = await client.begin(tokens=LONG)
    await client.ok("/pause_generation", {"mode": "retract"})
    await asyncio.sleep(0.1)
    sent = run.count
    await change(client, flush=True)
    await client.ok("/continue_generation")
    assert sent <= border(await run.answer()) < LONG


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_label_that_is_changed_during_a_pause_ends_the_span_of_running_requests(
    client: Client, mode: str
) -> None:
    """What a trainer does whose weights came in several buckets."""
    run = await client.begin(tokens=LONG)
    await client.ok("/pause_generation", {"mode": mode})
    await client.ok("/update_weight_version", {"new_version": "1.1", "abort_all_requests": False})
    await client.ok("/continue_generation")
    answer = await run.answer()
    assert [version for version, _, _ in spans(answer)] == ["1.0", "1.1"]
    close(reported(answer), client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT)))


async def test_a_new_label_alone_changes_no_weights(client: Client) -> None:
    before = await client.checksums()
    await client.ok("/update_weight_version", {"new_version": "1.1", "abort_all_requests": False})
    assert await client.version() == "1.1"
    assert await client.checksums() == before


async def test_a_new_label_aborts_everything_by_default(client: Client) -> None:
    run = await client.begin()
    await client.ok("/update_weight_version", {"new_version": "1.2"})
    assert (await run.answer())["meta_info"]["finish_reason"]["type"] == "abort"
