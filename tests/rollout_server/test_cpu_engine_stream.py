"""Streams of the CPU engine: content and timing of chunks, without lost or repeated tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout_server.cpu_engine.config import EngineSettings, parse
from rollout_server.cpu_engine.model.tokenizer import Tokenizer as EngineTokenizer
from rollout_server.cpu_engine.scheduler.request import Request, SamplingParams
from rollout_server.cpu_engine.server.app import build_app, build_engine
from rollout_server.cpu_engine.server.response import IncrementalDetokenizer, MetaInfoJson, meta_info

PROMPT = list(range(40, 60))
GREEDY = {"ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["<search> müller 東京 </search>"] * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "eos_token_id": 0}
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "hidden_size": 48, "intermediate_size": 80}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, num_hidden_layers=2, initializer_range=0.2)).save_pretrained(path)
    return path


Client = TestClient[Any, Any]


@asynccontextmanager
async def serving(model: Path, **settings: Any) -> AsyncIterator[Client]:
    chosen = EngineSettings(model_path=model, weight_version="1.0", **settings)
    engine, tokenizer, config = build_engine(chosen)
    engine.start()
    try:
        async with TestClient(TestServer(build_app(engine, tokenizer, config, chosen, ("", "")))) as client:
            yield client
    finally:
        await asyncio.to_thread(engine.stop)


async def whole(client: Client, prompt: Any = PROMPT, **sampling: Any) -> Any:
    body = {"input_ids": prompt, "return_logprob": True, "sampling_params": GREEDY | sampling}
    answer = await client.post("/generate", json=body)
    assert answer.status == 200, await answer.text()
    return await answer.json()


async def chunks(
    client: Client, prompt: Any = PROMPT, fields: dict[str, Any] | None = None, **sampling: Any
) -> AsyncIterator[Any]:
    body = {"input_ids": prompt, "return_logprob": True, "stream": True, "sampling_params": GREEDY | sampling}
    async with client.post("/generate", json=body | (fields or {})) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        events = [b""]
        async for line in answer.content:
            if line.strip():
                assert line.startswith(b"data: ")
                events.append(line[6:].strip())
                if events[-1] != b"[DONE]":
                    yield json.loads(events[-1])
        assert events[-1] == b"[DONE]"


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def without_time(answer: Any) -> Any:
    meta = {k: v for k, v in answer["meta_info"].items() if k not in ("e2e_latency", "id", "cached_tokens")}
    return {**answer, "meta_info": meta}


async def test_the_last_cumulative_chunk_is_the_answer_without_streaming(model: Path) -> None:
    async with serving(model) as client:
        fields = {"top_logprobs_num": 2, "logprob_start_len": 3}
        body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": GREEDY | {"max_new_tokens": 40}}
        expected = await (await client.post("/generate", json=body | fields)).json()
        got = [c async for c in chunks(client, PROMPT, fields, max_new_tokens=40)]
        assert without_time(got[-1]) == without_time(expected)
        for chunk in got:
            n, meta = len(chunk["output_ids"]), chunk["meta_info"]
            assert chunk["output_ids"] == expected["output_ids"][:n]
            assert expected["text"].startswith(chunk["text"])
            assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == n
            assert meta["weight_versions"] == [{"version": "1.0", "start": 0, "end": n}]
            assert meta["weight_version"] == "1.0"
            for name in ("output_token_logprobs", "output_top_logprobs"):
                assert meta[name] == expected["meta_info"][name][:n]
            assert meta["input_token_logprobs"] == expected["meta_info"]["input_token_logprobs"]
            assert (meta["finish_reason"] is None) == (chunk is not got[-1])


async def test_increments_joined_are_the_answer_without_streaming(model: Path) -> None:
    async with serving(model, incremental_streaming_output=True) as client:
        expected = await whole(client, max_new_tokens=200)
        got = [c async for c in chunks(client, fields={"top_logprobs_num": 2}, max_new_tokens=200)]
        assert len(got) > 20
        assert joined(c["output_ids"] for c in got) == expected["output_ids"]
        assert "".join(c["text"] for c in got) == expected["text"]
        logprobs, wanted = joined(c["meta_info"]["output_token_logprobs"] for c in got), expected["meta_info"]
        assert [entry[1:] for entry in logprobs] == [entry[1:] for entry in wanted["output_token_logprobs"]]
        # the prompt's keys and values came from the cache this time: the last digits differ
        assert [e[0] for e in logprobs] == pytest.approx([e[0] for e in wanted["output_token_logprobs"]], abs=1e-4)
        assert len(joined(c["meta_info"]["output_top_logprobs"] for c in got)) == 200
        counts = [c["meta_info"]["completion_tokens"] for c in got]
        assert counts == sorted(counts) and counts[-1] == 200
        assert [c["meta_info"]["weight_versions"][-1]["end"] for c in got] == counts
        assert [c["meta_info"]["output_token_logprobs_length"] for c in got] == counts


@pytest.mark.parametrize("interval", [2, 8])
async def test_an_interval_gives_chunks_after_the_first_token_and_every_n_more(model: Path, interval: int) -> None:
    due = {*range(1, 50, interval), 50}
    async with serving(model) as client:
        got = [c async for c in chunks(client, max_new_tokens=50, stream_interval=interval)]
        # some may be missing: those that wait until the one before is sent go out as one
        assert {len(c["output_ids"]) for c in got} <= due
    request = Request("r", [1], SamplingParams(), 0, 50, lambda *_: None, stream_interval=interval)
    assert {n for n in range(1, 50) if request.due(n)} | {50} == due


@pytest.mark.parametrize("incremental", [False, True])
async def test_the_last_chunk_of_an_aborted_stream_holds_every_token(model: Path, incremental: bool) -> None:
    async with serving(model, incremental_streaming_output=incremental) as client:
        got = []
        async for chunk in chunks(client, fields={"rid": "a" * 32}, max_new_tokens=2000, stream_interval=512):
            got.append(chunk)
            if len(got) == 1:
                await asyncio.sleep(0.05)  # some tokens beyond the first chunk, none of which has been sent
                await client.post("/abort_request", json={"rid": "a" * 32})
        assert got[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        ids = joined(c["output_ids"] for c in got) if incremental else got[-1]["output_ids"]
        assert len(ids) == got[-1]["meta_info"]["completion_tokens"]
        assert ids == (await whole(client, max_new_tokens=len(ids)))["output_ids"]


async def test_a_stream_that_waits_behind_a_pause_and_is_aborted_ends_with_one_empty_chunk(model: Path) -> None:
    async with serving(model) as client:
        await client.post("/pause_generation", json={"mode": "retract"})
        stream = chunks(client, fields={"rid": "w"}, max_new_tokens=5)
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.1)
        await client.post("/abort_request", json={"rid": "w"})
        chunk = await first
        assert chunk["output_ids"] == [] and chunk["meta_info"]["weight_versions"] == []
        assert chunk["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
        assert [c async for c in stream] == []


@pytest.mark.slow
async def test_a_stream_names_both_versions_as_soon_as_there_are_two(model: Path) -> None:
    async with serving(model) as client:
        seen: list[list[tuple[str, int, int]]] = []
        async for chunk in chunks(client, max_new_tokens=600):
            meta = chunk["meta_info"]
            seen.append([(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]])
            assert meta["weight_version"] == seen[-1][-1][0]
            if len(seen) == 1:
                body = {"new_version": "2.0", "abort_all_requests": False}
                assert (await client.post("/update_weight_version", json=body)).status == 200
        border = seen[-1][0][2]
        assert seen[-1] == [("1.0", 0, border), ("2.0", border, 600)] and 0 < border < 600
        for spans in seen:
            assert spans[0][2] <= border and spans[-1][2] == max(end for _, _, end in spans)


async def test_the_streams_of_a_batch_are_complete_and_separate(model: Path) -> None:
    async with serving(model, incremental_streaming_output=True) as client:
        prompts = [[i + 1, i + 2, i + 3] for i in range(5)]
        expected = await whole(client, prompts, max_new_tokens=30)
        ids: dict[int, list[int]] = {i: [] for i in range(5)}
        async for chunk in chunks(client, prompts, max_new_tokens=30, stream_interval=3):
            ids[chunk["index"]] += chunk["output_ids"]
        assert list(ids.values()) == [answer["output_ids"] for answer in expected]


async def test_aborting_a_batch_between_two_tokens_ends_every_stream_of_it_once(model: Path) -> None:
    async with serving(model) as client:
        ends = dict.fromkeys(range(4), 0)
        begun = False
        async for chunk in chunks(client, [[7, 8, i + 1] for i in range(4)], {"rid": "b"}, max_new_tokens=1500):
            ends[chunk["index"]] += chunk["meta_info"]["finish_reason"] is not None
            if not begun:
                begun = True
                await client.post("/abort_request", json={"rid": "b"})
        assert ends == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize("wrong", [0, -1, "8", 1.5, True])
async def test_a_wrong_interval_is_refused(model: Path, wrong: Any) -> None:
    async with serving(model) as client:
        body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"stream_interval": wrong}}
        answer = await client.post("/generate", json=body)
        assert answer.status == 400 and "stream_interval" in await answer.text()


async def test_no_chunk_shows_the_beginning_of_a_stop_string_that_is_cut_off_in_the_end(model: Path) -> None:
    async with serving(model) as client:
        plain = (await whole(client, max_new_tokens=120))["text"]
        stop = next(plain[k : k + 6] for k in range(30, 200) if plain[k : k + 6].isascii() and len(plain) > k + 6)
        expected = await whole(client, max_new_tokens=120, stop=["never seen", stop])
        got = [c async for c in chunks(client, max_new_tokens=120, stop=["never seen", stop])]
        assert got[-1]["text"] == expected["text"] == plain[: plain.index(stop)]
        assert got[-1]["output_ids"] == expected["output_ids"]
        assert all(expected["text"].startswith(c["text"]) for c in got)


def grown(model: Path, text: str, step: int, **params: Any) -> list[str]:
    tokenizer = EngineTokenizer(model)
    ids = tokenizer.encode(text)
    request = Request("r", [1], SamplingParams(**params), 0, 0, lambda *_: None, output_ids=ids)
    growing = IncrementalDetokenizer(request, tokenizer)
    return [growing.grow(length) for length in [*range(step, len(ids), step), len(ids)]]


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_text_grows_by_whole_characters_only(model: Path, step: int) -> None:
    text = "héllo 東京 🙂🙂 <search> müller"
    shown = grown(model, text, step)
    assert shown[-1] == text
    assert all(text.startswith(part) for part in shown)


def byte_fallback(path: Path) -> EngineTokenizer:
    """A tokenizer as Gemma's and Phi-3's: characters that it does not have are the bytes of their UTF-8."""
    words = ["\u2581", "a", "b", "x"]
    vocab = {piece: i for i, piece in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return EngineTokenizer(path)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_text_of_a_byte_fallback_tokenizer_grows_to_the_whole_text(tmp_path: Path, step: int) -> None:
    tokenizer = byte_fallback(tmp_path)
    assert len(tokenizer.encode("東京都x")) == 10
    pick = random.Random(0)
    texts = [
        "".join(pick.choices(["a", "b", " ", "x", "東", "京", "é", "😀", "한", "<eos>"], k=12)) for _ in range(100)
    ]
    for text in ("東京都x", "a😀😀x", "x<eos><eos><eos><eos><eos>東x", *texts):
        ids = tokenizer.encode(text)
        request = Request("r", [1], SamplingParams(), 0, 0, lambda *_: None, output_ids=ids)
        growing = IncrementalDetokenizer(request, tokenizer)
        shown = [growing.grow(length) for length in [*range(step, len(ids), step), len(ids)]]
        whole = tokenizer.decode(ids, True)
        assert shown[-1] == whole == text.replace("<eos>", "")
        assert all(whole.startswith(part) for part in shown)


def test_only_what_may_become_a_stop_string_is_held_back(model: Path) -> None:
    stops = ("</search>", "<!>")
    assert grown(model, "ab </sea", 1, stop=stops)[-1] == "ab "
    assert grown(model, "ab </seal", 1, stop=stops)[-1] == "ab </seal"
    assert grown(model, "ab <", 1, stop=stops)[-1] == "ab "
    assert grown(model, "ab <!", 1, stop=stops)[-1] == "ab "
    assert grown(model, "ab </sea", 1, stop=stops, no_stop_trim=True)[-1] == "ab </sea"


@pytest.mark.parametrize("rid", ["a", f"x{1 << 60}", '"quoted" {%s} \\', "ü東"])
def test_what_is_kept_between_chunks_never_shows_in_them(rid: str) -> None:
    request = Request(rid, [1, 2], SamplingParams(), 0, 0, lambda *_: None)
    kept = MetaInfoJson(request)
    for length in range(30):
        request.output_ids.append(length)
        if length in (0, 9, 17):
            request.versions.append((f"{length}.0", length))
        request.cached_tokens, request.retractions = int(length > 4), int(length > 12)
        for asked in (length + 1, length, length // 2):
            assert json.loads(kept.json(asked, False, "z")) == meta_info(request, asked, "z", False)
    request.finish = {"type": "length", "length": 30}
    assert json.loads(kept.json(30, True, "z")) == meta_info(request, 30, "z", True)


def test_the_switch_for_increments_needs_no_value() -> None:
    line = ["--model-path", "x"]
    assert not parse(line).incremental_streaming_output
    assert parse([*line, "--incremental-streaming-output", "--seed", "1"]).incremental_streaming_output
    assert parse([*line, "--incremental-streaming-output", "true"]).incremental_streaming_output


async def test_loads_say_what_a_router_asks_for(model: Path) -> None:
    async with serving(model, max_running=7) as client:
        await whole(client, max_new_tokens=30)
        await whole(client, max_new_tokens=30)
        load = (await (await client.get("/v1/loads")).json())["loads"][0]
        assert load["max_running_requests"] == 7
        assert load["num_retracted_reqs"] == 0 and load["token_usage"] == 0
        assert 0.3 < load["cache_hit_rate"] < 0.6


def test_every_byte_of_a_byte_level_vocabulary_is_known(model: Path) -> None:
    tokenizer = EngineTokenizer(model)
    for text in ("a b\n\t", "müller 東京 🙂", "".join(map(chr, range(256)))):
        assert b"".join(map(tokenizer.bytes_of, tokenizer.encode(text))) == text.encode()
