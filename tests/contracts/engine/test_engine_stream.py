"""Streaming: chunks are cumulative, or increments with `--incremental-streaming-output`; nothing made is lost."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import aiohttp
import pytest
from contract_client import PROMPT, Client
from contract_engines import ADMIN_KEY, Server
from contract_proof import close, reported, spans


@pytest.mark.engines("fake", "cpu", "sglang")
async def test_chunks_are_cumulative_and_the_last_one_is_the_whole_answer(client: Client) -> None:
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0}
    chunks = [c async for c in client.chunks(**sampling)]
    for earlier, later in itertools.pairwise(chunks):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert later["text"].startswith(earlier["text"].rstrip("\ufffd"))
    assert all(c["meta_info"]["finish_reason"] is None for c in chunks[:-1])
    assert all(len(c["meta_info"]["output_token_logprobs"]) == len(c["output_ids"]) for c in chunks)
    whole = await client.generate(**sampling)
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    close(reported(chunks[-1]), reported(whole))
    assert spans(chunks[-1]) == [("1.0", 0, 12)]


@pytest.mark.engines("fake", "cpu", "sglang")
async def test_each_chunk_names_a_version_but_only_the_last_must_name_it_per_token(client: Client) -> None:
    chunks = [c async for c in client.chunks(max_new_tokens=6, ignore_eos=True)]
    assert {c["meta_info"]["weight_version"] for c in chunks} == {"1.0"}
    # the CPU engine says it in each chunk, so that an answer cut off by a dead engine is known per token
    assert [("weight_versions" in c["meta_info"]) for c in chunks[:-1]] == [client.server.kind == "cpu"] * (
        len(chunks) - 1
    )


@pytest.mark.engines("fake", "cpu", "sglang")
async def test_a_stream_interval_makes_chunks_of_many_tokens_after_a_first_one_of_one(client: Client) -> None:
    sampling = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0}
    chunks = [c async for c in client.chunks(stream_interval=8, **sampling)]
    counts = [len(c["output_ids"]) for c in chunks]
    # chunks that wait for the reader may go out as one, so some may be missing; a client cannot count on each
    assert set(counts) <= {1, 9, 17, 25, 30} and counts[-1] == 30
    assert chunks[-1]["output_ids"] == (await client.generate(**sampling))["output_ids"]


async def test_a_stream_interval_loses_no_token_of_an_aborted_request(client: Client) -> None:
    for _ in range(5):  # where the test does not get the CPU in time, the last token comes before the abort
        run = await client.begin(tokens=900, at_least=20, stream_interval=16)
        await client.ok("/abort_request", {"rid": run.rid})
        answer = await run.answer()
        if answer["meta_info"]["finish_reason"]["type"] == "abort":
            break
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) >= max(len(c["output_ids"]) for c in run.chunks[:-1]) >= 17
    close(reported(answer), client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT)))


async def test_a_stream_that_ends_by_a_stop_string_has_every_token_of_it(client: Client) -> None:
    sampling = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}
    whole = await client.generate(**sampling)
    stop = next(text for k in range(8, 30) if (text := whole["text"][k : k + 3]).isascii() and "\ufffd" not in text)
    chunks = [c async for c in client.chunks(stop=stop, **sampling)]
    answer = await client.generate(stop=stop, **sampling)
    assert chunks[-1]["output_ids"] == answer["output_ids"]
    assert chunks[-1]["text"] == answer["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_the_streams_of_a_batch_carry_an_index(client: Client) -> None:
    ends: dict[int, Any] = {}
    async for chunk in client.chunks([[5, 6, 7], [8, 9]], max_new_tokens=4, ignore_eos=True):  # type: ignore[list-item]
        ends[chunk["index"]] = chunk
    assert {i: c["meta_info"]["prompt_tokens"] for i, c in ends.items()} == {0: 3, 1: 2}
    assert all(len(c["output_ids"]) == 4 for c in ends.values())


async def test_increments_joined_are_the_whole_answer(guarded_client: Client) -> None:
    sampling = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0, "skip_special_tokens": False}
    prompt = [5, 6, 7]
    chunks = [c async for c in guarded_client.chunks(prompt, **sampling)]
    whole = await guarded_client.generate(prompt, **sampling)
    assert len(chunks) > 1 and all(chunk["output_ids"] for chunk in chunks[:-1])
    joined: dict[str, list[Any]] = {"ids": [], "logprobs": []}
    for chunk in chunks:
        joined["ids"] += chunk["output_ids"]
        joined["logprobs"] += chunk["meta_info"]["output_token_logprobs"]
        assert chunk["meta_info"]["completion_tokens"] == len(joined["ids"])  # counted from the start
    assert joined["ids"] == whole["output_ids"]
    assert [e[1] for e in joined["logprobs"]] == whole["output_ids"]
    assert "".join(c["text"] for c in chunks) == whole["text"]
    assert [(s["start"], s["end"]) for s in chunks[-1]["meta_info"]["weight_versions"]] == [(0, 20)]


async def test_increments_of_an_aborted_stream_joined_hold_every_token_once(guarded_client: Client) -> None:
    ids: list[int] = []
    chunks: list[Any] = []
    rid, prompt = uuid.uuid4().hex, [5, 6, 7]
    stream = guarded_client.chunks(prompt, {"rid": rid}, max_new_tokens=900, ignore_eos=True, stream_interval=8)
    async for chunk in stream:
        ids += chunk["output_ids"]
        chunks.append(chunk)
        if len(chunks) == 3:
            await abort_as_admin(guarded_client.server, rid)
    meta = chunks[-1]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["completion_tokens"] == len(ids) < 900
    logprobs = [e for c in chunks for e in c["meta_info"]["output_token_logprobs"]]
    assert [e[1] for e in logprobs] == ids


async def abort_as_admin(server: Server, rid: str) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        await Client(server, session).ok("/abort_request", {"rid": rid})
