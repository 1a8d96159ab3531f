"""Weights that arrive by broadcast: the trainer's end is the learner's own, the engine is a process."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from learner.weights.process_group import BroadcastGroup, Rendezvous
from protocol.runtime.net import free_port
from tests.support.engine_http import post, serving

TIMEOUT_S = 3.0
PROMPT = list(range(40, 60))
GROUPS = itertools.count()
Tensors = dict[str, torch.Tensor]


def write_model(path: Path, seed: int, **changes: Any) -> Path:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 0}
    config = Qwen2Config(**sizes, **heads, initializer_range=0.2, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


class Engine:
    """A running engine, its two sets of weights, and the calls of these tests."""

    def __init__(self, url: str, first: Path, second: Path, process: subprocess.Popen[str]) -> None:
        self.url, self.first, self.second, self.process = url, first, second, process
        self.tensors: Tensors = load_file(second / "model.safetensors")
        self.session: aiohttp.ClientSession

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def ok(self, path: str, **body: Any) -> Any:
        status, answer = await self.post(path, **body)
        assert status == 200, answer
        return answer

    async def refused(self, path: str, **body: Any) -> str:
        status, answer = await self.post(path, **body)
        assert status == 400 and answer["success"] is False, answer
        return str(answer["message"])

    async def sums(self) -> Any:
        return (await self.ok("/weights_checker", action="checksum"))["checksums"]

    async def version(self) -> Any:
        async with self.session.get(self.url + "/model_info") as answer:
            return (await answer.json())["weight_version"]

    async def running(self) -> int:
        async with self.session.get(self.url + "/v1/loads") as answer:
            return int((await answer.json())["num_running_reqs"])

    async def generate(self, tokens: int, prompt: list[int] = PROMPT) -> Any:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        return await self.ok("/generate", input_ids=prompt, return_logprob=True, sampling_params=sampling)

    async def begun(self, tokens: int) -> asyncio.Task[Any]:
        task = asyncio.create_task(self.generate(tokens))
        for _ in range(500):
            if await self.running():
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return task

    async def group(self) -> BroadcastGroup:
        """Both ends of a new group of two."""
        name, port = f"test-{next(GROUPS)}", free_port("127.0.0.1")
        meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        ours = asyncio.to_thread(BroadcastGroup, Rendezvous(name, "127.0.0.1", port, 2, "gloo", 10, 10))
        theirs = self.ok("/init_weights_update_group", **meeting, group_name=name, backend="gloo")
        return (await asyncio.gather(ours, theirs))[0]

    async def send(
        self, group: BroadcastGroup, tensors: Tensors, flattened: bool = True, **more: Any
    ) -> tuple[int, Any]:
        """One bucket: the announcement and the broadcast at once."""

        def broadcast() -> None:
            if flattened:
                group.broadcast(torch.cat([t.flatten().view(torch.uint8) for t in tensors.values()]))
            else:
                for tensor in tensors.values():
                    group.broadcast(tensor.clone())

        announced = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "load_format": "flattened_bucket" if flattened else None,
            "group_name": group.name,
        }
        call = self.post("/update_weights_from_distributed", **announced, **more)
        answer, _ = await asyncio.gather(call, asyncio.to_thread(broadcast))
        return answer

    async def close(self, group: BroadcastGroup) -> None:
        await self.ok("/destroy_weights_update_group", group_name=group.name)
        await asyncio.to_thread(group.close)

    async def reset(self) -> None:
        await self.post("/end_weight_update")
        await self.ok("/abort_request", abort_all=True)
        await self.ok("/continue_generation")
        await self.ok("/update_weights_from_disk", model_path=str(self.first), weight_version="1.0")


def start(model: Path, timeout_s: float = TIMEOUT_S) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "rollout_server.cpu_engine", "--model-path", str(model), "--port", "0"]
    command += ["--weight-version", "1.0", "--update-timeout-s", str(timeout_s)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=model.parent, env=env)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on "), line
    return process, line.removeprefix("listening on ").strip()


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    torch.set_num_threads(1)
    scratch = tmp_path_factory.mktemp("distributed")
    first, second = write_model(scratch / "first", 0), write_model(scratch / "second", 1)
    process, url = start(first)
    try:
        yield Engine(url, first, second, process)
    finally:
        stop(process)


@pytest.fixture
async def engine(running: Engine) -> AsyncIterator[Engine]:
    async with aiohttp.ClientSession() as running.session:
        await running.reset()
        yield running
        await running.reset()


def logprobs(path: Path, ids: list[int]) -> torch.Tensor:
    """Of ids[len(PROMPT):], by transformers with the weights in `path`."""
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1].gather(1, torch.tensor(ids[len(PROMPT) :])[:, None])[
        :, 0
    ]


def reported(answer: Any) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def halves(tensors: Tensors) -> list[Tensors]:
    items = list(tensors.items())
    return [dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])]


@pytest.mark.parametrize("flattened", [True, False], ids=["flattened", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
async def test_weights_that_were_sent_are_those_that_were_read(
    engine: Engine, flattened: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = {name: t.to(dtype) for name, t in engine.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    await engine.ok("/update_weights_from_disk", model_path=str(tmp_path))
    expected = await engine.sums()
    await engine.reset()
    group = await engine.group()
    await engine.ok("/begin_weight_update", selector="all")
    for part in halves(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}):
        status, answer = await engine.send(group, part, flattened, weight_version="2.0")
        assert status == 200 and answer["success"] is True, answer
    assert await engine.version() == "1.0"
    await engine.ok("/end_weight_update")
    assert await engine.sums() == expected
    assert await engine.version() == "2.0"
    await engine.close(group)


async def test_a_bucket_of_several_dtypes_is_cut_at_any_offset(engine: Engine) -> None:
    kinds = itertools.cycle([torch.float32, torch.bfloat16, torch.float64])
    mixed = {name: t.to(kind) for (name, t), kind in zip(engine.tensors.items(), kinds, strict=False)}
    names = sorted(mixed, key=lambda name: (mixed[name].dtype != torch.bfloat16, name))
    odd = {"layers.0.rotary_emb.inv_freq": torch.zeros(3, dtype=torch.bfloat16)}  # 6 bytes: what follows is not aligned
    group = await engine.group()
    await engine.ok("/begin_weight_update")
    assert (await engine.send(group, odd | {name: mixed[name] for name in names}))[0] == 200
    await engine.ok("/end_weight_update")
    answer = await engine.generate(12)
    expected = logprobs(engine.second, PROMPT + answer["output_ids"])
    torch.testing.assert_close(reported(answer), expected, atol=0.5, rtol=0)
    await engine.close(group)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_generation_goes_on_while_buckets_arrive_and_changes_over_at_the_end(engine: Engine, mode: str) -> None:
    group = await engine.group()
    task = await engine.begun(2500)
    await engine.ok("/begin_weight_update")
    for part in halves(engine.tensors):
        status, _ = await engine.send(group, part, weight_version="2.0", flush_cache=mode == "retract")
        assert status == 200
        assert await engine.running() == 1
    await engine.ok("/pause_generation", mode=mode)
    assert not task.done()
    await engine.ok("/end_weight_update")
    await engine.ok("/continue_generation")
    answer = await task
    one, two = answer["meta_info"]["weight_versions"]
    assert (one["version"], two["version"]) == ("1.0", "2.0")
    border = one["end"]
    assert 0 == one["start"] < border == two["start"] < two["end"] == 2500
    ids = PROMPT + answer["output_ids"]
    old, new, got = logprobs(engine.first, ids), logprobs(engine.second, ids), reported(answer)
    torch.testing.assert_close(got[:border], old[:border], atol=1e-3, rtol=0)
    assert (got[border:] - old[border:]).abs().median() > 0.1
    if mode == "retract":
        torch.testing.assert_close(got[border:], new[border:], atol=1e-3, rtol=0)
    await engine.close(group)


async def test_without_a_pause_the_end_waits_for_what_runs_and_the_prefix_cache_is_dropped(engine: Engine) -> None:
    group = await engine.group()
    task = await engine.begun(400)
    await engine.ok("/begin_weight_update")
    await engine.send(group, engine.tensors, weight_version="2.0")
    await engine.ok("/end_weight_update")
    assert {s["version"] for s in (await task)["meta_info"]["weight_versions"]} == {"1.0"}
    answer = await engine.generate(8)
    assert answer["meta_info"]["cached_tokens"] == 0
    expected = logprobs(engine.second, PROMPT + answer["output_ids"])
    torch.testing.assert_close(reported(answer), expected, atol=1e-4, rtol=0)
    await engine.close(group)


async def test_the_calls_of_a_session_have_their_order(engine: Engine) -> None:
    bucket = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    assert "begin_weight_update" in await engine.refused("/end_weight_update")
    assert "begin_weight_update" in await engine.refused("/update_weights_from_distributed", **bucket)
    before = await engine.sums()
    await engine.ok("/begin_weight_update")
    assert "already open" in await engine.refused("/begin_weight_update")
    assert "init_weights_update_group" in await engine.refused("/update_weights_from_distributed", **bucket)
    await engine.ok("/end_weight_update")  # nothing was sent: nothing changes
    assert await engine.sums() == before and await engine.version() == "1.0"
    assert "does not exist" in await engine.refused("/destroy_weights_update_group", group_name="nobody's")


WRONG: dict[str, Any] = {
    "missing": lambda t: t.popitem(),
    "unknown": lambda t: t.update({"model.layers.9.odd.weight": torch.zeros(2)}),
    "shape": lambda t: t.update({"model.norm.weight": torch.zeros(47)}),
    "not finite": lambda t: t.update({"model.norm.weight": torch.full([48], torch.nan)}),
    "beyond float32": lambda t: t.update({"model.norm.weight": torch.full([48], 1e300, dtype=torch.float64)}),
    "no float": lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int64)}),
    "sent again, rightly": lambda t: t.update({"model.norm.weight": torch.full([48], torch.nan)}),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_a_session_with_a_fault_is_refused_whole_and_leaves_the_old_weights(engine: Engine, kind: str) -> None:
    before = await engine.sums()
    tensors = dict(engine.tensors)
    WRONG[kind](tensors)
    group = await engine.group()
    await engine.ok("/begin_weight_update")
    status, answer = await engine.send(group, tensors, weight_version="2.0")  # and the trainer is not left waiting
    assert status == (200 if kind == "missing" else 400), answer
    if kind == "sent again, rightly":
        await engine.send(group, engine.tensors, weight_version="2.0")
    assert "tensor" in await engine.refused("/end_weight_update")
    assert await engine.sums() == before and await engine.version() == "1.0"
    # and the next one is not burdened by it
    await engine.ok("/begin_weight_update")
    assert (await engine.send(group, engine.tensors))[0] == 200
    await engine.ok("/end_weight_update")
    assert await engine.sums() != before and await engine.version() == "1.0"
    await engine.close(group)


async def test_a_flush_is_refused_while_requests_are_frozen_in_place(engine: Engine) -> None:
    before, group, task = await engine.sums(), await engine.group(), await engine.begun(1000)
    await engine.ok("/pause_generation", mode="in_place")
    await engine.ok("/begin_weight_update")
    status, answer = await engine.send(group, engine.tensors, weight_version="2.0")
    assert status == 400 and "flush" in answer["message"]
    assert "flush" in await engine.refused("/end_weight_update")
    await engine.ok("/continue_generation")
    assert (await task)["meta_info"]["weight_versions"] == [{"version": "1.0", "start": 0, "end": 1000}]
    assert await engine.sums() == before
    await engine.close(group)


async def test_all_requests_are_aborted_on_demand(engine: Engine) -> None:
    group, task = await engine.group(), await engine.begun(3000)
    await engine.ok("/begin_weight_update")
    await engine.send(group, engine.tensors, abort_all_requests=True)
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    await engine.ok("/end_weight_update")
    await engine.close(group)


MALFORMED: dict[str, dict[str, Any]] = {
    "no names": {"names": []},
    "uneven": {"shapes": [[1], [2]]},
    "dtype": {"dtypes": ["float33"]},
    "no dtype": {"dtypes": ["nn"]},
    "shape": {"shapes": [[-1]]},
    "name": {"names": [3]},
    "format": {"load_format": "pickled"},
    "far too large": {"shapes": [[1 << 40]]},
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_announcement_is_refused_before_the_group_is_touched(engine: Engine, name: str) -> None:
    group = await engine.group()
    await engine.ok("/begin_weight_update")
    bucket = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": group.name, **MALFORMED[name]}
    assert await engine.refused("/update_weights_from_distributed", **bucket)
    assert (await engine.send(group, engine.tensors))[0] == 200
    await engine.ok("/end_weight_update")
    await engine.close(group)


MEETINGS: dict[str, dict[str, Any]] = {
    "nccl": {"backend": "nccl"},
    "no backend is nccl": {"backend": None},
    "rank of the trainer": {"rank_offset": 0},
    "rank beyond the world": {"rank_offset": 2},
    "no port": {"master_port": 0},
    "address of a wrong type": {"master_address": 7},
}


@pytest.mark.parametrize("name", MEETINGS)
async def test_an_impossible_rendezvous_is_refused_at_once(engine: Engine, name: str) -> None:
    meeting = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    began = time.monotonic()
    assert await engine.refused("/init_weights_update_group", **meeting | MEETINGS[name])
    assert time.monotonic() - began < 0.9 * TIMEOUT_S, "it did not wait for anybody"


@pytest.mark.slow
async def test_a_trainer_that_never_comes_costs_the_timeout_and_no_token(engine: Engine) -> None:
    meeting = {"master_address": "127.0.0.1", "master_port": free_port("127.0.0.1"), "rank_offset": 1, "world_size": 2}
    began = time.monotonic()
    waiting = asyncio.create_task(
        engine.refused("/init_weights_update_group", **meeting, backend="gloo", group_name="alone")
    )
    assert len((await engine.generate(50))["output_ids"]) == 50
    assert not waiting.done()
    assert await engine.refused("/init_weights_update_group", **meeting, backend="gloo", group_name="alone")
    assert "Failed to initialize" in await waiting
    assert time.monotonic() - began > 0.9 * TIMEOUT_S


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "stalls", "destroyed"])
async def test_a_trainer_that_fails_within_a_bucket_leaves_the_engine_healthy(engine: Engine, how: str) -> None:
    before, group = await engine.sums(), await engine.group()
    await engine.ok("/begin_weight_update")
    first, second = halves(engine.tensors)
    assert (await engine.send(group, first))[0] == 200
    announced = {"names": list(second), "dtypes": ["float32"] * len(second), "group_name": group.name}
    shapes = [list(t.shape) for t in second.values()]
    began = time.monotonic()
    call = asyncio.create_task(engine.refused("/update_weights_from_distributed", **announced, shapes=shapes))
    await asyncio.sleep(0.2)
    assert len((await engine.generate(20))["output_ids"]) == 20
    if how == "dies":
        await asyncio.to_thread(group.close)
    if how == "destroyed":
        await engine.ok("/destroy_weights_update_group", group_name=group.name)
    assert "Failed to receive" in await call
    # a trainer that is gone is noticed before the time-out, one that stalls by it
    assert (time.monotonic() - began > 0.9 * TIMEOUT_S) == (how == "stalls")
    assert "not received" in await engine.refused("/end_weight_update")
    assert await engine.sums() == before
    if how != "destroyed":
        await engine.ok("/destroy_weights_update_group", group_name=group.name)
    if how != "dies":
        await asyncio.to_thread(group.close)
    another = await engine.group()
    await engine.ok("/begin_weight_update")
    assert (await engine.send(another, engine.tensors))[0] == 200
    await engine.ok("/end_weight_update")
    assert await engine.sums() != before
    await engine.close(another)


async def test_a_group_that_is_destroyed_within_a_bucket_does_not_wait_for_its_trainer(running: Engine) -> None:
    """With both ends in this process. torch registers a name once, so ours is made as its helper makes the other."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    ours = PrefixStore("cpu/", PrefixStore("g/", PrefixStore("g", store)))
    meeting = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
    meeting |= {"group_name": "g", "backend": "gloo"}
    shapes = {name: list(tensor.shape) for name, tensor in running.tensors.items()}
    bucket = {"names": list(shapes), "shapes": list(shapes.values()), "dtypes": ["float32"] * len(shapes)}
    bucket |= {"group_name": "g", "weight_version": "2.0"}
    async with serving(running.first, update_timeout_s=30.0) as client, asyncio.timeout(20.0):
        joining = asyncio.create_task(post(client, "/init_weights_update_group", **meeting))
        trainer = await asyncio.to_thread(ProcessGroupGloo, ours, 0, 2, timedelta(seconds=20))
        await joining
        await post(client, "/begin_weight_update")
        large = {"names": ["a"], "shapes": [[1 << 40]], "dtypes": ["float32"], "group_name": "g"}
        refused = await post(client, "/update_weights_from_distributed", 400, **large)
        assert refused["success"] is False and "exceed the size of this model" in refused["message"]
        sent = [asyncio.create_task(post(client, "/update_weights_from_distributed", **bucket))]
        for tensor in running.tensors.values():
            await asyncio.to_thread(trainer.broadcast(tensor.clone(), 0).wait)
        await asyncio.gather(*sent)
        await post(client, "/end_weight_update")
        assert (await (await client.get("/weight_version")).json())["weight_version"] == "2.0"
        await post(client, "/begin_weight_update")
        late = asyncio.create_task(post(client, "/update_weights_from_distributed", 400, **bucket))
        await asyncio.sleep(0.05)
        await post(client, "/destroy_weights_update_group", group_name="g")
        assert "the group was destroyed" in (await late)["message"]
        del trainer


async def test_a_caller_that_goes_away_does_not_break_the_session(engine: Engine) -> None:
    group = await engine.group()
    await engine.ok("/begin_weight_update")
    first, second = halves(engine.tensors)
    assert (await engine.send(group, first))[0] == 200
    bucket = {"names": list(second), "dtypes": ["float32"] * len(second), "group_name": group.name}
    shapes = [list(t.shape) for t in second.values()]
    call = asyncio.create_task(
        engine.post("/update_weights_from_distributed", **bucket, shapes=shapes, weight_version="2.0")
    )
    await asyncio.sleep(0.2)
    call.cancel()
    await asyncio.sleep(0.1)
    for tensor in second.values():
        await asyncio.to_thread(group.broadcast, tensor)
    await engine.ok("/end_weight_update")
    assert await engine.version() == "2.0"
    await engine.close(group)


@pytest.mark.slow
async def test_a_signal_ends_an_engine_that_waits_for_a_trainer(running: Engine) -> None:
    process, url = start(running.first, timeout_s=60)
    try:
        async with aiohttp.ClientSession() as session:
            engine = Engine(url, running.first, running.second, process)
            engine.session = session
            group = await engine.group()
            await engine.ok("/begin_weight_update")
            bucket = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": group.name}
            call = asyncio.create_task(engine.post("/update_weights_from_distributed", **bucket))
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 5) == 0
            with pytest.raises(aiohttp.ClientError):
                await call
            await asyncio.to_thread(group.close)
    finally:
        stop(process)
