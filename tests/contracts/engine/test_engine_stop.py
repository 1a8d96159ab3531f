"""Stopping: strings, ids, lengths. What trains is `output_ids`, which no stop string ever trims."""

from __future__ import annotations

from contract_client import Client
from contract_models import read_tokenizer
from tokenizers import Tokenizer

FLUSH = 50
"""SGLang hands the text of an unstreamed request on after every 50 tokens and cannot take back what went out: a stop
string across that border leaves its head in `text`. Another reason to read nothing but ids."""


def inside_tokens(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    """A string in the text of `ids` that begins inside one token and ends inside the next but one."""
    pieces = [tokenizer.decode([i], skip_special_tokens=True) for i in ids]
    for before, middle, after in zip(pieces[5:], pieces[6:], pieces[7:-1], strict=False):
        if len(before) > 1 and middle and len(after) > 1 and (before + middle + after).isascii():
            return before[1:] + middle + after[:-1]
    return None


async def test_stop_strings_trim_the_text_and_never_the_ids(client: Client) -> None:
    sampling = {"ignore_eos": True, "temperature": 0, "max_new_tokens": FLUSH - 2}
    tokenizer = read_tokenizer(client.server.first)
    prompts = [[i, 2 * i, 50 + i] for i in range(1, 60)]
    wholes = await client.generate(prompts, **sampling)
    stops = [inside_tokens(tokenizer, whole["output_ids"]) for whole in wholes]
    tried = [case for case in zip(prompts, wholes, stops, strict=True) if case[2] is not None]
    assert len(tried) >= 3
    for prompt, whole, stop in tried:
        assert stop is not None
        answer = await client.generate(prompt, stop=["never seen in text", stop], **sampling)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["output_ids"] == whole["output_ids"][: len(answer["output_ids"])]
        assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
        assert stop in tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
        assert stop not in tokenizer.decode(answer["output_ids"][:-1], skip_special_tokens=True)
        trimmed = whole["text"][: whole["text"].index(stop)]
        assert answer["text"] == trimmed
        untrimmed = await client.generate(prompt, stop=stop, no_stop_trim=True, **sampling)
        assert untrimmed["text"] == trimmed + stop
        assert untrimmed["output_ids"] == answer["output_ids"]


async def test_stop_token_ids_end_with_the_id_and_keep_it(client: Client) -> None:
    whole = await client.generate(max_new_tokens=20, temperature=0)
    wanted = whole["output_ids"][min(6, len(whole["output_ids"]) - 2)]
    answer = await client.generate(max_new_tokens=20, temperature=0, stop_token_ids=[wanted])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": wanted}
    assert answer["output_ids"] == whole["output_ids"][: whole["output_ids"].index(wanted) + 1]


async def test_ignore_eos_silences_stop_token_ids_too(client: Client) -> None:
    whole = await client.generate(max_new_tokens=20, temperature=0, ignore_eos=True)
    stops = {"stop_token_ids": whole["output_ids"][:3]}
    again = await client.generate(max_new_tokens=20, temperature=0, ignore_eos=True, **stops)
    assert again["output_ids"] == whole["output_ids"]


async def test_min_new_tokens_holds_back_end_tokens(client: Client) -> None:
    whole = await client.generate(max_new_tokens=30, temperature=0)
    early = whole["output_ids"][0]
    answer = await client.generate(max_new_tokens=30, temperature=0, stop_token_ids=[early], min_new_tokens=10)
    assert len(answer["output_ids"]) >= 10 and early not in answer["output_ids"][:10]


async def test_a_tag_that_is_one_word_ends_a_turn_and_stays_in_its_ids(guarded_client: Client) -> None:
    """The demo's tokenizer, a table of words, is read as tokenizer.json says and not as the model's family says."""
    client, tokenizer = guarded_client, read_tokenizer(guarded_client.server.first)
    tag = tokenizer.token_to_id("</search>")
    prompts = [[5 + i, 6, 7 + i] for i in range(16)]
    stopping = {"max_new_tokens": 400, "ignore_eos": True, "stop": ["</search>"], "skip_special_tokens": False}
    for answer in await client.generate(prompts, no_stop_trim=True, temperature=1.5, **stopping):
        if answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "</search>"}:
            assert answer["output_ids"].index(tag) == len(answer["output_ids"]) - 1
            assert answer["text"].endswith("</search>")
            break
    else:
        raise AssertionError("no attempt of 16 drew the tag in 400 tokens")


async def test_words_are_encoded_as_tokenizer_json_says(guarded_client: Client) -> None:
    text = "question : <search> a b </search> answer"
    ids = read_tokenizer(guarded_client.server.first).encode(text).ids
    # not the vocabulary's last word: SGLang reports its id as 0 among the prompt's log-probs
    body = {"text": text, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    answer = await guarded_client.ok("/generate", body)
    assert answer["meta_info"]["prompt_tokens"] == len(ids) == 7
    assert [entry[1] for entry in answer["meta_info"]["input_token_logprobs"]] == ids
