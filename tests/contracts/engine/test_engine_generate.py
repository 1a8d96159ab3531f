"""Generating: ids in, ids and their log-probs out."""

from __future__ import annotations

import asyncio

import pytest
import torch
from contract_client import PROMPT, Client
from contract_engines import picked
from contract_models import CONTEXT, CORPUS, read_tokenizer
from contract_proof import close, reported, spans


@pytest.mark.engines("fake", "cpu", "sglang")
async def test_answers_have_sglangs_shape(client: Client) -> None:
    answer = await client.generate(max_new_tokens=6, ignore_eos=True, temperature=0, fields={"rid": "e" * 32})
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 6
    assert meta["id"] == "e" * 32
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[i, None] for i in answer["output_ids"]]
    assert meta["weight_version"] == "1.0"
    assert isinstance(answer["text"], str)


async def test_answers_count_tokens_and_time_and_name_the_version_of_each_token(client: Client) -> None:
    answer = await client.generate(max_new_tokens=6, ignore_eos=True)
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)
    assert meta["cached_tokens"] == meta["num_retractions"] == 0
    assert meta["e2e_latency"] > 0
    assert spans(answer) == [("1.0", 0, 6)]


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
        ids = prompt + answer["output_ids"]
        close(reported(answer), client.server.logprobs(client.server.first, ids, len(prompt), temperature))


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.95},
        {"top_k": 5},
        {"top_p": 0.7, "top_k": 5},
        {"top_p": 0.5, "temperature": 1.6},
        {"top_k": 2, "temperature": 0.6},
    ],
    ids=str,
)
async def test_logprobs_do_not_depend_on_top_p_and_top_k(client: Client, sampling: dict[str, float]) -> None:
    """They are of the whole distribution after temperature, as the learner's: at lag 0 the ratio is 1."""
    answer = await client.generate(max_new_tokens=20, ignore_eos=True, **sampling)
    ids, temperature = PROMPT + answer["output_ids"], sampling.get("temperature", 1.0)
    close(reported(answer), client.server.logprobs(client.server.first, ids, len(PROMPT), temperature))


async def test_temperature_zero_takes_the_likeliest_token_at_temperature_one(client: Client) -> None:
    answer = await client.generate(max_new_tokens=10, ignore_eos=True, temperature=0)
    ids = PROMPT + answer["output_ids"]
    with torch.inference_mode():
        logits = client.server.policy(client.server.first)(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer["output_ids"]
    close(reported(answer), picked(logits, answer["output_ids"]))


async def test_a_turn_that_extends_the_last_one_reuses_its_prefix_and_keeps_exact_logprobs(client: Client) -> None:
    first = await client.generate(max_new_tokens=16, ignore_eos=True)
    longer = PROMPT + first["output_ids"] + [70, 71, 72]
    second = await client.generate(longer, max_new_tokens=16, ignore_eos=True)
    assert second["meta_info"]["cached_tokens"] >= len(PROMPT)
    close(reported(second), client.server.logprobs(client.server.first, longer + second["output_ids"], len(longer)))


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
    close(torch.tensor([e[0] for e in entries[1:]]), client.server.logprobs(client.server.first, PROMPT, 1))
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


async def test_a_text_prompt_is_tokenised_by_the_engine(client: Client) -> None:
    ids = read_tokenizer(client.server.first).encode(CORPUS[0]).ids
    sampling = {"max_new_tokens": 2, "ignore_eos": True}
    answer = await client.ok("/generate", {"text": CORPUS[0], "sampling_params": sampling})
    assert answer["meta_info"]["prompt_tokens"] == len(ids)


async def test_an_output_is_cut_where_the_context_ends(client: Client) -> None:
    answer = await client.generate([5] * (CONTEXT - 24), ignore_eos=True)  # the default asks for 128 more
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    # SGLang leaves two places of its context unused
    assert len(answer["output_ids"]) == (22 if client.server.real else 24)


@pytest.mark.engines("cpu", why="SGLang heeds seeds only in its deterministic mode, which a CPU does not have")
async def test_a_sampling_seed_repeats_a_draw_whatever_runs_beside_it(client: Client) -> None:
    alone = await client.generate(max_new_tokens=24, ignore_eos=True, sampling_seed=7)
    crowd = await asyncio.gather(
        *(client.generate([3, 4, i + 5], max_new_tokens=24, ignore_eos=True) for i in range(8)),
        client.generate(max_new_tokens=24, ignore_eos=True, sampling_seed=7),
    )
    other = await client.generate(max_new_tokens=24, ignore_eos=True, sampling_seed=8)
    assert crowd[-1]["output_ids"] == alone["output_ids"] != other["output_ids"]


@pytest.mark.engines("fake", "cpu", "sglang")
async def test_unknown_fields_beside_the_sampling_parameters_are_ignored(client: Client) -> None:
    await client.generate(max_new_tokens=1, fields={"field_from_the_future": {"a": 1}})
