"""What Foray expects of an engine that speaks SGLang's HTTP API, run against real servers.

Engines: the embedded CPU engine as a subprocess, and, where FORAY_SGLANG_URL is set, a running SGLang 0.5.21 or
later that serves a small model in float32 from a directory that this machine can read. Tests marked `embedded`
hold what we do better or otherwise than SGLang; the deviations are documented in the package.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

PROMPT = list(range(40, 60))
CORPUS = ["<search> who founded the city of müller </search>", "<answer> the 3 rivers 東京 </answer>"] * 4


@dataclass
class Server:
    """A running engine and the directories it was and can be loaded from."""

    url: str
    first: Path
    second: Path
    scratch: Path
    embedded: bool
    policies: dict[Path, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return 1e-4 if self.embedded else 2e-2

    def policy(self, path: Path) -> Any:
        if path not in self.policies:
            self.policies[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return self.policies[path]

    def logprobs(self, path: Path, ids: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs of ids[start:] by transformers with the weights in `path`."""
        with torch.inference_mode():
            logits = self.policy(path)(torch.tensor([ids])).logits[0]
        return picked(logits[start - 1 : -1], ids[start:], temperature)


class Client:
    """The calls of these tests; every answer is (status, decoded body)."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(self.server.url + path, json=body, **kwargs) as response:
            return response.status, decoded(await response.text())

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(self.server.url + path, **kwargs) as response:
            return response.status, decoded(await response.text())

    async def generate(self, ids: Any = PROMPT, fields: dict[str, Any] | None = None, **sampling: Any) -> Any:
        body = {"input_ids": ids, "return_logprob": True, "sampling_params": sampling, **(fields or {})}
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        return answer

    async def chunks(self, ids: list[int], fields: dict[str, Any] | None = None, **sampling: Any) -> AsyncIterator[Any]:
        body = {"input_ids": ids, "return_logprob": True, "stream": True, "sampling_params": sampling, **(fields or {})}
        async with self.session.post(self.server.url + "/generate", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield line[6:].strip() if line.startswith(b"data: [DONE]") else json.loads(line[6:])

    async def ok(self, path: str, body: Any = None) -> Any:
        status, answer = await self.post(path, body or {})
        assert status == 200, answer
        return answer

    async def running(self) -> int:
        _, loads = await self.get("/v1/loads")
        return sum(load["num_running_reqs"] for load in loads["loads"])

    async def until_running(self, count: int) -> None:
        for _ in range(200):
            if await self.running() == count:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{await self.running()} requests run, expected {count}")

    async def load(self, path: Path, version: str, **more: Any) -> tuple[int, Any]:
        return await self.post(
            "/update_weights_from_disk", {"model_path": str(path), "weight_version": version, **more}
        )


def decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def picked(logits: torch.Tensor, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def reported(answer: Any, kind: str = "output") -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"][f"{kind}_token_logprobs"]])


def write_model(path: Path, seed: int) -> Path:
    """A random Qwen2 with a byte-level BPE tokenizer; initialised widely, so that two seeds differ everywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@contextlib.contextmanager
def launched(model: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """The embedded engine as a process of its own; yields its URL."""
    command = [sys.executable, "-m", "rollout_server.cpu_engine", "--model-path", str(model), "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=model.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        yield line.removeprefix("listening on ").strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


ENGINES = ["embedded", *(["sglang"] if os.environ.get("FORAY_SGLANG_URL") else [])]


@pytest.fixture(scope="module", params=ENGINES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    torch.set_num_threads(1)
    scratch = tmp_path_factory.mktemp("engine")
    if request.param == "sglang":
        url = os.environ["FORAY_SGLANG_URL"].rstrip("/")
        first = Path(os.environ["FORAY_SGLANG_MODEL"])
        yield Server(url, first, perturbed(first, scratch / "second"), scratch, embedded=False)
        return
    first, second = write_model(scratch / "first", 0), write_model(scratch / "second", 1)
    with launched(first, "--weight-version", "1.0", "--max-running", "32") as url:
        yield Server(url, first, second, scratch, embedded=True)


def perturbed(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    changed = {n: t + 0.05 * torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in tensors.items()}
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    """A client of an engine that holds the first weights as version 1.0, not paused, with an empty cache."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session:
        client = Client(server, session)
        _, info = await client.get("/model_info")
        if info["weight_version"] != "1.0":
            status, answer = await client.load(server.first, "1.0")
            assert status == 200, answer
        await client.ok("/flush_cache")
        yield client
        await client.ok("/abort_request", {"abort_all": True})
        await client.ok("/continue_generation")
        await client.until_running(0)


@pytest.fixture
def embedded(server: Server) -> None:
    if not server.embedded:
        pytest.skip("the embedded engine's own behaviour")


# ---- generating


async def test_answers_have_sglangs_shape(client: Client) -> None:
    answer = await client.generate(max_new_tokens=6, ignore_eos=True, temperature=0)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 6
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[i, None] for i in answer["output_ids"]]
    assert isinstance(answer["text"], str) and isinstance(meta["id"], str) and meta["e2e_latency"] > 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_equal_transformers_for_uneven_prompts_at_once(client: Client, temperature: float) -> None:
    prompts = [[(7 * i + k) % 290 + 1 for k in range(length)] for i, length in enumerate((1, 9, 33, 64, 130))]
    answers = await asyncio.gather(
        *(
            client.generate(p, max_new_tokens=12 + 3 * i, ignore_eos=True, temperature=temperature)
            for i, p in enumerate(prompts)
        )
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = client.server.logprobs(client.server.first, prompt + answer["output_ids"], len(prompt), temperature)
        torch.testing.assert_close(reported(answer), expected, atol=client.server.tolerance, rtol=0)


async def test_logprobs_are_not_renormalised_for_top_p_and_top_k(client: Client) -> None:
    answer = await client.generate(max_new_tokens=20, ignore_eos=True, top_p=0.7, top_k=5)
    expected = client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT))
    torch.testing.assert_close(reported(answer), expected, atol=client.server.tolerance, rtol=0)


async def test_temperature_zero_takes_the_likeliest_token_at_temperature_one(client: Client) -> None:
    answer = await client.generate(max_new_tokens=10, ignore_eos=True, temperature=0)
    ids = PROMPT + answer["output_ids"]
    with torch.inference_mode():
        logits = client.server.policy(client.server.first)(torch.tensor([ids])).logits[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == answer["output_ids"]
    expected = picked(logits[len(PROMPT) - 1 : -1], answer["output_ids"])
    torch.testing.assert_close(reported(answer), expected, atol=client.server.tolerance, rtol=0)


async def test_a_turn_that_extends_the_last_one_reuses_its_prefix_and_keeps_exact_logprobs(client: Client) -> None:
    first = await client.generate(max_new_tokens=16, ignore_eos=True)
    longer = PROMPT + first["output_ids"] + [70, 71, 72]
    second = await client.generate(longer, max_new_tokens=16, ignore_eos=True)
    assert second["meta_info"]["cached_tokens"] >= len(PROMPT)
    expected = client.server.logprobs(client.server.first, longer + second["output_ids"], len(longer))
    torch.testing.assert_close(reported(second), expected, atol=client.server.tolerance, rtol=0)


async def test_an_extra_key_isolates_the_prefix_cache(client: Client) -> None:
    await client.generate(max_new_tokens=4, fields={"extra_key": "a"})
    other = await client.generate(max_new_tokens=4, fields={"extra_key": "b"})
    same = await client.generate(max_new_tokens=4, fields={"extra_key": "a"})
    assert other["meta_info"]["cached_tokens"] == 0
    assert same["meta_info"]["cached_tokens"] > 0


async def test_prompt_logprobs_start_with_null_and_equal_transformers(client: Client) -> None:
    await client.generate(max_new_tokens=1)  # fills the cache, which scoring must not fall for
    answer = await client.generate(max_new_tokens=0, fields={"logprob_start_len": 0})
    entries = answer["meta_info"]["input_token_logprobs"]
    assert entries[0][:2] == [None, PROMPT[0]] and [entry[1] for entry in entries] == PROMPT
    expected = client.server.logprobs(client.server.first, PROMPT, 1)
    torch.testing.assert_close(
        torch.tensor([e[0] for e in entries[1:]]), expected, atol=client.server.tolerance, rtol=0
    )
    assert answer["output_ids"] == []


async def test_top_logprobs_are_the_best_of_each_step(client: Client) -> None:
    answer = await client.generate(max_new_tokens=5, ignore_eos=True, temperature=0, fields={"top_logprobs_num": 3})
    tops = answer["meta_info"]["output_top_logprobs"]
    assert [len(top) for top in tops] == [3] * 5
    assert [top[0][1] for top in tops] == answer["output_ids"]
    assert all(top[0][0] >= top[1][0] >= top[2][0] for top in tops)


async def test_a_batch_is_answered_in_order_and_n_gives_n_answers(client: Client) -> None:
    batch = await client.generate([[5, 6, 7], [8, 9]], max_new_tokens=3, ignore_eos=True)
    assert [a["meta_info"]["prompt_tokens"] for a in batch] == [3, 2]
    several = await client.generate(PROMPT, max_new_tokens=24, ignore_eos=True, n=3)
    assert len({tuple(a["output_ids"]) for a in several}) == 3


@pytest.mark.usefixtures("embedded")
async def test_without_max_new_tokens_the_default_is_cut_to_the_context(client: Client) -> None:
    answer = await client.generate([5] * 1000, ignore_eos=True)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 24}


async def test_a_text_prompt_is_tokenised_by_the_engine(client: Client) -> None:
    text = CORPUS[0]
    ids = Tokenizer.from_file(str(client.server.first / "tokenizer.json")).encode(text).ids
    answer = await client.ok("/generate", {"text": text, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}})
    assert answer["meta_info"]["prompt_tokens"] == len(ids)


def stop_inside_tokens(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    """A string in the text of `ids` that begins inside one token and ends inside the next but one."""
    pieces = [tokenizer.decode([i], skip_special_tokens=True) for i in ids]
    for before, middle, after in zip(pieces[5:], pieces[6:], pieces[7:-1], strict=False):
        if len(before) > 1 and middle and len(after) > 1 and (before + middle + after).isascii():
            return before[1:] + middle + after[:-1]
    return None


async def test_stop_strings_trim_the_text_and_never_the_ids(client: Client) -> None:
    sampling = {"ignore_eos": True, "temperature": 0, "max_new_tokens": 60}
    tokenizer = Tokenizer.from_file(str(client.server.first / "tokenizer.json"))
    prompts = [[i, 2 * i, 50 + i] for i in range(1, 60)]
    wholes = await client.generate(prompts, **sampling)
    cases = (
        (prompt, whole, stop_inside_tokens(tokenizer, whole["output_ids"]))
        for prompt, whole in zip(prompts, wholes, strict=True)
    )
    tried = 0
    for prompt, whole, stop in cases:
        if stop is None:
            continue
        tried += 1
        answer = await client.generate(prompt, stop=["never seen in text", stop], **sampling)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["output_ids"] == whole["output_ids"][: len(answer["output_ids"])]
        assert answer["text"] == whole["text"][: whole["text"].index(stop)]
        assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
        text_of_ids = tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
        assert stop in text_of_ids
        assert stop not in tokenizer.decode(answer["output_ids"][:-1], skip_special_tokens=True)
        untrimmed = await client.generate(prompt, stop=stop, no_stop_trim=True, **sampling)
        assert untrimmed["text"] == text_of_ids
    assert tried


async def test_stop_token_ids_end_with_the_id_and_keep_it(client: Client) -> None:
    whole = await client.generate(max_new_tokens=20, temperature=0)
    wanted = whole["output_ids"][min(6, len(whole["output_ids"]) - 2)]
    answer = await client.generate(max_new_tokens=20, temperature=0, stop_token_ids=[wanted])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": wanted}
    assert answer["output_ids"] == whole["output_ids"][: whole["output_ids"].index(wanted) + 1]


async def test_min_new_tokens_holds_back_end_tokens(client: Client) -> None:
    whole = await client.generate(max_new_tokens=30, temperature=0)
    early = whole["output_ids"][0]
    answer = await client.generate(max_new_tokens=30, temperature=0, stop_token_ids=[early], min_new_tokens=10)
    assert len(answer["output_ids"]) >= 10 and early not in answer["output_ids"][:10]


async def test_stream_chunks_are_cumulative_and_end_with_done(client: Client) -> None:
    chunks = [c async for c in client.chunks(PROMPT, max_new_tokens=12, ignore_eos=True)]
    assert chunks.pop() == b"[DONE]"
    for earlier, later in itertools.pairwise(chunks):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert later["text"].startswith(earlier["text"].rstrip("\ufffd"))
    assert all(c["meta_info"]["finish_reason"] is None for c in chunks[:-1])
    last = chunks[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert len(last["output_ids"]) == len(last["meta_info"]["output_token_logprobs"]) == 12


@pytest.mark.usefixtures("embedded")
async def test_a_sampling_seed_repeats_a_draw_whatever_runs_beside_it(client: Client) -> None:
    alone = await client.generate(max_new_tokens=24, ignore_eos=True, sampling_seed=7)
    crowd = await asyncio.gather(
        *(client.generate([3, 4, i + 5], max_new_tokens=24, ignore_eos=True) for i in range(8)),
        client.generate(max_new_tokens=24, ignore_eos=True, sampling_seed=7),
    )
    other = await client.generate(max_new_tokens=24, ignore_eos=True, sampling_seed=8)
    assert crowd[-1]["output_ids"] == alone["output_ids"] != other["output_ids"]


# ---- aborting and pausing


async def begin(client: Client, rid: str, tokens: int = 900) -> asyncio.Task[Any]:
    """A long request that has begun to decode."""
    before = await client.running()
    fields = {"rid": rid}
    task = asyncio.create_task(client.generate(fields=fields, max_new_tokens=tokens, ignore_eos=True))
    await client.until_running(before + 1)
    await asyncio.sleep(0.05)
    return task


async def test_an_aborted_request_returns_what_it_has(client: Client) -> None:
    task = await begin(client, "a" * 32)
    await client.ok("/abort_request", {"rid": "a" * 32})
    answer = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert 0 < len(answer["output_ids"]) < 900
    expected = client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT))
    torch.testing.assert_close(reported(answer), expected, atol=client.server.tolerance, rtol=0)


async def test_abort_matches_rids_by_prefix_which_is_why_rids_have_a_fixed_length(client: Client) -> None:
    tasks = [await begin(client, rid) for rid in ("r1", "r10", "r2")]
    await client.ok("/abort_request", {"rid": "r1"})
    done, _ = await asyncio.wait(tasks[:2], timeout=5)
    assert len(done) == 2
    assert await client.running() == 1
    await client.ok("/abort_request", {"rid": "r2"})
    assert (await tasks[2])["meta_info"]["id"] == "r2"


async def test_aborting_an_unknown_rid_is_fine(client: Client) -> None:
    assert (await client.post("/abort_request", {"rid": "nobody"}))[0] == 200


async def test_pause_abort_returns_partial_answers_and_holds_new_requests(client: Client) -> None:
    task = await begin(client, "b" * 32)
    await client.ok("/pause_generation", {})
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await client.get("/ready"))[0] == 503
    held = asyncio.create_task(client.generate(max_new_tokens=3, ignore_eos=True))
    await asyncio.sleep(0.2)
    assert not held.done()
    assert (await client.get("/model_info"))[0] == 200
    await client.ok("/continue_generation")
    assert len((await held)["output_ids"]) == 3
    assert (await client.get("/ready"))[0] == 200


@pytest.mark.usefixtures("embedded")
async def test_health_answers_at_once_while_paused_and_a_held_request_can_be_aborted(client: Client) -> None:
    await client.ok("/pause_generation", {"mode": "retract"})
    assert (await client.get("/health", timeout=aiohttp.ClientTimeout(1)))[0] == 200
    assert (await client.get("/health_generate", timeout=aiohttp.ClientTimeout(1)))[0] == 503
    held = asyncio.create_task(client.generate(fields={"rid": "c" * 32}, max_new_tokens=3))
    await asyncio.sleep(0.1)
    await client.ok("/abort_request", {"rid": "c" * 32})
    meta = (await held)["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert "prompt_tokens" not in meta and "cached_tokens" not in meta and "num_retractions" not in meta


async def test_retract_without_an_update_goes_on_with_exact_logprobs(client: Client) -> None:
    task = await begin(client, "d" * 32, tokens=500)
    await client.ok("/pause_generation", {"mode": "retract"})
    assert await client.running() == 0
    await client.ok("/flush_cache")
    await client.ok("/continue_generation")
    answer = await task
    assert len(answer["output_ids"]) == 500
    assert answer["meta_info"]["num_retractions"] == 1
    expected = client.server.logprobs(client.server.first, PROMPT + answer["output_ids"], len(PROMPT))
    torch.testing.assert_close(reported(answer), expected, atol=client.server.tolerance, rtol=0)


# ---- weights


def two_spans(answer: Any) -> int:
    """The index at which version 2.0 begins; the spans cover the output without a gap."""
    spans = answer["meta_info"]["weight_versions"]
    assert [s["version"] for s in spans] == ["1.0", "2.0"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == len(answer["output_ids"])
    assert 0 < spans[1]["start"] < len(answer["output_ids"])
    return int(spans[1]["start"])


async def test_retract_samples_each_span_from_exactly_its_own_weights(client: Client) -> None:
    server = client.server
    tasks = [await begin(client, f"{i}" * 32, tokens=500) for i in range(3)]
    await client.ok("/pause_generation", {"mode": "retract"})
    status, answer = await client.load(server.second, "2.0")
    assert status == 200 and answer["success"] is True, answer
    await client.ok("/continue_generation")
    for answer in await asyncio.gather(*tasks):
        border = two_spans(answer)
        ids = PROMPT + answer["output_ids"]
        old, new = (server.logprobs(path, ids, len(PROMPT)) for path in (server.first, server.second))
        got = reported(answer)
        torch.testing.assert_close(got[:border], old[:border], atol=server.tolerance, rtol=0)
        torch.testing.assert_close(got[border:], new[border:], atol=server.tolerance, rtol=0)
        # and the other weights would not have said the same: the border is proven, not just labelled
        assert (got[:border] - new[:border]).abs().median() > 0.1
        assert (got[border:] - old[border:]).abs().median() > 0.1
        assert answer["meta_info"]["weight_version"] == "2.0"


@pytest.mark.usefixtures("embedded")
async def test_in_place_goes_on_with_new_weights_over_old_keys_and_values(client: Client) -> None:
    server = client.server
    task = await begin(client, "e" * 32, tokens=400)
    await client.ok("/pause_generation", {"mode": "in_place"})
    assert await client.running() == 1
    status, _ = await client.load(server.second, "2.0", flush_cache=False)
    assert status == 200
    await client.ok("/continue_generation")
    answer = await task
    border = two_spans(answer)
    assert answer["meta_info"]["num_retractions"] == 0
    ids = PROMPT + answer["output_ids"]
    got = reported(answer)
    torch.testing.assert_close(
        got[:border], server.logprobs(server.first, ids, len(PROMPT))[:border], atol=server.tolerance, rtol=0
    )
    # the engine's own arithmetic, redone: old weights made the cache up to the last token but one, new weights go on
    stored = len(PROMPT) + border - 1
    with torch.inference_mode():
        cache = server.policy(server.first)(torch.tensor([ids[:stored]]), use_cache=True).past_key_values
        logits = server.policy(server.second)(
            torch.tensor([ids[stored:]]), past_key_values=copy.deepcopy(cache)
        ).logits[0]
    torch.testing.assert_close(got[border:], picked(logits[:-1], ids[stored + 1 :]), atol=server.tolerance, rtol=0)
    # its mixed keys and values are of no version: nobody may find them
    again = await client.generate(ids[:-1], max_new_tokens=1)
    assert again["meta_info"]["cached_tokens"] == 0


@pytest.mark.usefixtures("embedded")
async def test_in_place_with_flush_is_refused_before_any_weight_changes(client: Client) -> None:
    before = await client.ok("/weights_checker", {"action": "checksum"})
    task = await begin(client, "f" * 32, tokens=300)
    await client.ok("/pause_generation", {"mode": "in_place"})
    assert (await client.post("/flush_cache"))[0] == 400
    status, answer = await client.load(client.server.second, "2.0")
    assert status == 400 and "flush" in answer["message"]
    assert await client.ok("/weights_checker", {"action": "checksum"}) == before
    await client.ok("/continue_generation")
    assert (await task)["meta_info"]["weight_versions"] == [{"version": "1.0", "start": 0, "end": 300}]


async def test_the_prefix_cache_never_crosses_an_update(client: Client) -> None:
    await client.generate(max_new_tokens=4)
    await client.load(client.server.second, "2.0")
    answer = await client.generate(max_new_tokens=4, ignore_eos=True)
    assert answer["meta_info"]["cached_tokens"] == 0
    expected = client.server.logprobs(client.server.second, PROMPT + answer["output_ids"], len(PROMPT))
    torch.testing.assert_close(reported(answer), expected, atol=client.server.tolerance, rtol=0)


async def test_an_update_without_a_pause_waits_for_running_requests_and_holds_later_ones(client: Client) -> None:
    running = await begin(client, "9" * 32, tokens=400)
    update = asyncio.create_task(client.load(client.server.second, "2.0"))
    await asyncio.sleep(0.05)
    later = asyncio.create_task(client.generate(max_new_tokens=4, ignore_eos=True))
    assert (await update)[0] == 200
    assert running.done() or (await running)
    assert {s["version"] for s in (await running)["meta_info"]["weight_versions"]} <= {"1.0"}
    expected = client.server.logprobs(client.server.second, PROMPT + (await later)["output_ids"], len(PROMPT))
    torch.testing.assert_close(reported(await later), expected, atol=client.server.tolerance, rtol=0)


async def test_a_new_label_alone_changes_no_weights(client: Client) -> None:
    before = await client.ok("/weights_checker", {"action": "checksum"})
    await client.ok("/update_weight_version", {"new_version": "1.1", "abort_all_requests": False})
    _, info = await client.get("/model_info")
    assert info["weight_version"] == "1.1"
    assert await client.ok("/weights_checker", {"action": "checksum"}) == before


async def test_a_new_label_aborts_everything_unless_told_otherwise(client: Client) -> None:
    task = await begin(client, "8" * 32)
    await client.ok("/update_weight_version", {"new_version": "1.2"})
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_the_checksum_follows_the_weights(client: Client) -> None:
    first = await client.ok("/weights_checker", {"action": "checksum"})
    await client.load(client.server.second, "2.0")
    second = await client.ok("/weights_checker", {"action": "checksum"})
    await client.load(client.server.first, "1.0")
    assert first == await client.ok("/weights_checker", {"action": "checksum"}) != second


def spoil(server: Server, kind: str) -> Path:
    """A copy of the second weights with one thing wrong."""
    path = server.scratch / f"bad-{kind}"
    if kind == "no directory":
        return path
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(server.second, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    if kind == "missing tensor":
        del tensors[name]
    elif kind == "unknown tensor":
        tensors["model.layers.9.odd.weight"] = torch.zeros(2)
    elif kind == "wrong shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif kind == "not finite":
        tensors[name][0, 0] = float("nan")
    elif kind == "other architecture":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2, "num_key_value_heads": 1}))
    save_file(tensors, file, metadata={"format": "pt"})
    if kind == "cut off":
        file.write_bytes(file.read_bytes()[:-1000])
    return path


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize(
    "kind",
    ["no directory", "missing tensor", "unknown tensor", "wrong shape", "not finite", "cut off", "other architecture"],
)
async def test_a_bad_update_is_refused_and_leaves_the_old_weights(client: Client, kind: str) -> None:
    before = await client.ok("/weights_checker", {"action": "checksum"})
    greedy = await client.generate(max_new_tokens=8, temperature=0, ignore_eos=True)
    status, answer = await client.load(spoil(client.server, kind), "2.0")
    assert status == 400 and answer["success"] is False and answer["message"]
    assert await client.ok("/weights_checker", {"action": "checksum"}) == before
    _, info = await client.get("/model_info")
    assert info["weight_version"] == "1.0" and info["model_path"] == str(client.server.first)
    after = await client.generate(max_new_tokens=8, temperature=0, ignore_eos=True)
    assert after["output_ids"] == greedy["output_ids"]


# ---- staying in service


async def test_flush_is_refused_while_requests_run(client: Client) -> None:
    task = await begin(client, "7" * 32)
    assert (await client.post("/flush_cache"))[0] == 400
    await client.ok("/abort_request", {"abort_all": True})
    await task
    assert (await client.get("/flush_cache"))[0] == 200


async def test_a_client_that_goes_away_frees_its_slot(client: Client) -> None:
    async with aiohttp.ClientSession() as other:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
        task = asyncio.create_task(other.post(client.server.url + "/generate", json=body))
        await client.until_running(1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await asyncio.wait_for(client.until_running(0), 3)


async def test_a_stream_that_is_left_frees_its_slot(client: Client) -> None:
    async with aiohttp.ClientSession() as other:
        body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
        async with other.post(client.server.url + "/generate", json=body) as response:
            await response.content.readline()
    await asyncio.wait_for(client.until_running(0), 3)


WRONG = {
    "no prompt": {"sampling_params": {}},
    "empty prompt": {"input_ids": []},
    "empty prompt in a batch": {"input_ids": [[1], []]},
    "negative id": {"input_ids": [1, -1]},
    "id beyond the vocabulary": {"input_ids": [1, 10_000_000]},
    "id of a wrong type": {"input_ids": [1, "2"]},
    "id true": {"input_ids": [1, True]},
    "id as a fraction": {"input_ids": [1, 2.5]},
    "prompt longer than the context": {"input_ids": [1] * 200_000},
    "more new tokens than the context": {"input_ids": [1], "sampling_params": {"max_new_tokens": 10_000_000}},
    "unknown sampling parameter": {"input_ids": [1], "sampling_params": {"temprature": 1}},
    "negative temperature": {"input_ids": [1], "sampling_params": {"temperature": -1}},
    "temperature of a wrong type": {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
    "top_p zero": {"input_ids": [1], "sampling_params": {"top_p": 0}},
    "negative max_new_tokens": {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
    "stop of a wrong type": {"input_ids": [1], "sampling_params": {"stop": 3}},
    "a feature we lack": {"input_ids": [1], "sampling_params": {"json_schema": "{}"}},
    "sampling_params of a wrong type": {"input_ids": [1], "sampling_params": 3},
    "too many attempts": {"input_ids": [[1]] * 100, "sampling_params": {"n": 100}},
    "a list as body": [1, 2],
}


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_request_is_400_and_the_others_go_on(client: Client, name: str) -> None:
    good = asyncio.create_task(client.generate(max_new_tokens=5, ignore_eos=True))
    status, answer = await client.post("/generate", WRONG[name])
    assert status == 400 and answer["error"]["message"]
    assert len((await good)["output_ids"]) == 5


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "bytes", "nested"])
async def test_a_body_that_is_not_json_is_400(client: Client, raw: bytes) -> None:
    async with client.session.post(client.server.url + "/generate", data=raw) as response:
        assert response.status == 400
    assert (await client.get("/health"))[0] == 200


async def test_unknown_fields_beside_the_sampling_parameters_are_ignored(client: Client) -> None:
    await client.generate(max_new_tokens=1, fields={"field_from_the_future": {"a": 1}})


async def test_metrics_carry_sglangs_names(client: Client) -> None:
    await client.generate(max_new_tokens=3)
    status, page = await client.get("/metrics")
    assert status == 200
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput", "generation_tokens_total"):
        assert f"sglang:{name}{{" in page


async def test_loads_and_server_info_name_the_load_and_the_version(client: Client) -> None:
    _, loads = await client.get("/v1/loads")
    assert {"num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage"} <= loads["loads"][0].keys()
    _, info = await client.get("/server_info")
    assert info["weight_version"] == "1.0"


@pytest.mark.usefixtures("embedded")
async def test_a_signal_ends_the_engine_cleanly_while_a_request_runs(server: Server) -> None:
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(launched(server.first))
        async with aiohttp.ClientSession() as session, session.post(url + "/generate", json=body) as response:
            await response.content.readline()
            await asyncio.to_thread(stack.close)  # sends SIGTERM and asserts exit code 0


@pytest.fixture(scope="module")
def locked(server: Server) -> Iterator[str]:
    if not server.embedded:
        pytest.skip("starts a server of its own")
    flags = ("--api-key-env", "TEST_KEY", "--admin-api-key-env", "TEST_ADMIN_KEY")
    with launched(server.first, *flags, env={"TEST_KEY": "user-key", "TEST_ADMIN_KEY": "admin-key"}) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/health", "", 200),
        ("/metrics", "", 200),
        ("/ready", "", 200),
        ("/model_info", "", 401),
        ("/model_info", "wrong", 401),
        ("/model_info", "user-key", 200),
        ("/flush_cache", "user-key", 401),
        ("/flush_cache", "admin-key", 200),
    ],
)
async def test_keys_open_the_routes_that_they_are_for(locked: str, path: str, key: str, status: int) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as session, session.get(locked + path, headers=headers) as response:
        assert response.status == status
