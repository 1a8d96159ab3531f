"""Weights over a process group: sessions, buckets, and what happens when one of them fails."""

from __future__ import annotations

import asyncio

import pytest
import torch
from contract_client import LONG, PROMPT, Client
from contract_engines import picked
from contract_group import FLATTENED, Trainer, buckets_of, trainer
from contract_models import read_weights
from contract_proof import border, close, over_old_cache, reported, spans


async def update(there: Trainer, load_format: str | None, version: str, *, flush: bool = True) -> None:
    """The second weights in three buckets, and then their label: the whole of what a trainer does."""
    client = there.client
    await client.ok("/begin_weight_update")
    for bucket in buckets_of(client.server.second):
        status, answer = await there.send(bucket, load_format, flush_cache=flush)
        assert (status, answer["success"]) == (200, True), answer
    await client.ok("/end_weight_update")
    await client.ok("/update_weight_version", {"new_version": version, "abort_all_requests": False})


@pytest.mark.parametrize("load_format", [None, FLATTENED])
async def test_weights_sent_in_buckets_are_the_weights_read_from_disk(client: Client, load_format: str | None) -> None:
    before = await client.checksums()
    async with trainer(client) as there:
        await update(there, load_format, "2.0")
    sent = await client.checksums()
    answer = await client.generate(max_new_tokens=8, ignore_eos=True)
    assert spans(answer) == [("2.0", 0, 8)]
    close(reported(answer), client.server.logprobs(client.server.second, PROMPT + answer["output_ids"], len(PROMPT)))
    await client.swap(client.server.second, "2.1")
    assert before != sent == await client.checksums()


async def test_one_group_serves_one_update_after_another(client: Client) -> None:
    async with trainer(client) as there:
        for version in ("2.0", "2.1", "2.2"):
            await update(there, FLATTENED, version)
            assert await client.version() == version


async def test_a_single_bucket_may_bring_the_label(client: Client) -> None:
    async with trainer(client) as there:
        await client.ok("/begin_weight_update")
        everything = sorted(read_weights(client.server.second).items())
        status, answer = await there.send(everything, FLATTENED, weight_version="2.0")
        assert status == 200, answer
        await client.ok("/end_weight_update")
        assert await client.version() == "2.0"


@pytest.mark.parametrize("load_format", [None, FLATTENED])
async def test_retract_samples_each_span_from_its_own_weights_when_they_are_sent(
    client: Client, load_format: str | None
) -> None:
    server = client.server
    async with trainer(client) as there:
        run = await client.begin(tokens=LONG)
        await client.ok("/pause_generation", {"mode": "retract"})
        await update(there, load_format, "2.0")
        await client.ok("/continue_generation")
        answer = await run.answer()
    start, got, ids = border(answer), reported(answer), PROMPT + answer["output_ids"]
    close(got[:start], server.logprobs(server.first, ids, len(PROMPT))[:start])
    close(got[start:], server.logprobs(server.second, ids, len(PROMPT))[start:])


async def test_in_place_swaps_at_the_same_border_when_weights_are_sent(client: Client) -> None:
    server = client.server
    async with trainer(client) as there:
        run = await client.begin(tokens=LONG)
        await client.ok("/pause_generation", {"mode": "in_place"})
        await update(there, FLATTENED, "2.0", flush=False)
        await client.ok("/continue_generation")
        answer = await run.answer()
    start = border(answer) + (1 if server.real else 0)
    got, ids = reported(answer), PROMPT + answer["output_ids"]
    close(got[:start], server.logprobs(server.first, ids, len(PROMPT))[:start])
    close(got[start:], over_old_cache(server, ids, len(PROMPT) + start - 1))


async def test_a_tensor_that_the_engine_holds_already_changes_nothing(client: Client) -> None:
    """The proof of a new group: requests stay in place, and continue as if nothing had been sent."""
    server = client.server
    before = await client.checksums()
    norms = [(name, tensor) for name, tensor in read_weights(server.first).items() if name.endswith("norm.weight")]
    async with trainer(client) as there:
        run = await client.begin(tokens=LONG)
        await client.ok("/pause_generation", {"mode": "in_place"})
        await client.ok("/begin_weight_update")
        status, answer = await there.send(norms[:1], FLATTENED, flush_cache=False)
        assert status == 200, answer
        status, answer = await client.post("/end_weight_update", {})
        assert status == (200 if server.real else 400), "the CPU engine refuses an incomplete set"
        await client.ok("/continue_generation")
        answer = await run.answer()
    assert await client.checksums() == before
    close(reported(answer), server.logprobs(server.first, PROMPT + answer["output_ids"], len(PROMPT)))
    assert [(start, end) for _, start, end in spans(answer)] == [(0, LONG)]


async def test_buckets_in_bfloat16_are_taken_by_a_float32_engine(client: Client) -> None:
    server = client.server
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in read_weights(server.second).items()}
    async with trainer(client) as there:
        await client.ok("/begin_weight_update")
        status, answer = await there.send(sorted(rounded.items()), FLATTENED)
        assert status == 200, answer
        await client.ok("/end_weight_update")
        await client.ok("/update_weight_version", {"new_version": "2.0", "abort_all_requests": False})
    answer = await client.generate(max_new_tokens=8, ignore_eos=True)
    with torch.inference_mode():
        logits = server.policy_of(rounded)(torch.tensor([PROMPT + answer["output_ids"]])).logits[0]
    close(reported(answer), picked(logits[len(PROMPT) - 1 : -1], answer["output_ids"]))


async def test_a_session_is_opened_once_and_closed_once(client: Client) -> None:
    assert (await client.post("/begin_weight_update", {}))[0] == 200
    status, answer = await client.post("/begin_weight_update", {})
    assert status == 400 and answer["success"] is False and "open" in answer["message"]
    async with trainer(client) as there:
        bucket = sorted(read_weights(client.server.first).items())
        assert (await there.send(bucket, FLATTENED))[0] == 200
        assert (await client.post("/end_weight_update", {}))[0] == 200
    status, answer = await client.post("/end_weight_update", {})
    assert status == 400 and answer["success"] is False


async def test_weights_outside_of_a_session_are_refused(client: Client) -> None:
    before = await client.checksums()
    async with trainer(client) as there:
        # refused before the engine joins the broadcast: a trainer that broadcast now would wait in vain
        status, answer = await there.announce(buckets_of(client.server.second)[0], FLATTENED)
    assert status == 400 and answer["success"] is False and "begin_weight_update" in answer["message"]
    assert await client.checksums() == before


async def test_an_unknown_group_is_refused(client: Client) -> None:
    await client.ok("/begin_weight_update")
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": "nobody"}
    status, answer = await client.post("/update_weights_from_distributed", body)
    assert status == 400 and answer["success"] is False and "nobody" in answer["message"]
    await client.post("/end_weight_update", {})
    status, answer = await client.post("/destroy_weights_update_group", {"group_name": "nobody"})
    assert status == 400 and answer["success"] is False


async def test_a_trainer_that_leaves_in_the_middle_fails_the_bucket_and_not_the_engine(client: Client) -> None:
    async with trainer(client) as there:
        await client.ok("/begin_weight_update")
        first, second, _ = buckets_of(client.server.second)
        assert (await there.send(first, FLATTENED))[0] == 200
        call = asyncio.create_task(there.announce(second, FLATTENED))
        await asyncio.sleep(0.3)
        assert not call.done()
        await there.leave()
        status, answer = await asyncio.wait_for(call, 30)
        assert status == 400 and answer["success"] is False and answer["message"]
        await client.post("/end_weight_update", {})
    # whatever was half sent is made good from disk, on the same engine
    await client.swap(client.server.first, "1.0")
    answer = await client.generate(max_new_tokens=4, ignore_eos=True)
    close(reported(answer), client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT)))


async def test_a_group_that_was_destroyed_takes_no_more_and_another_may_come(client: Client) -> None:
    async with trainer(client) as there:
        await client.ok("/destroy_weights_update_group", {"group_name": there.name})
        await client.ok("/begin_weight_update")
        status, answer = await there.announce(buckets_of(client.server.second)[0], FLATTENED)
        assert status == 400 and answer["success"] is False
    async with trainer(client) as there:
        await update(there, FLATTENED, "2.0")
    assert await client.version() == "2.0"


@pytest.mark.engines("cpu", why="SGLang takes unknown names without a word, and a wrong shape ends its process")
@pytest.mark.parametrize("fault", ["unknown name", "wrong shape", "not finite", "missing"])
async def test_a_faulty_bucket_is_refused_and_leaves_the_old_weights(client: Client, fault: str) -> None:
    before = await client.checksums()
    tensors = read_weights(client.server.second)
    name = "model.layers.1.mlp.down_proj.weight"
    if fault == "unknown name":
        tensors["model.layers.9.odd.weight"] = tensors[name]
    elif fault == "wrong shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif fault == "not finite":
        tensors[name][0, 0] = float("nan")
    else:
        del tensors[name]
    async with trainer(client) as there:
        await client.ok("/begin_weight_update")
        statuses = [(await there.send(sorted(tensors.items()), FLATTENED))[0]]
        statuses.append((await client.post("/end_weight_update", {}))[0])
    assert 400 in statuses
    assert await client.checksums() == before
    assert await client.version() == "1.0"
