"""Bodies for the CPU engine: defaults and limits, and that the OpenAPI document of the tests states the same limits."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_server.cpu_engine.server import openai_bodies, validation
from rollout_server.cpu_engine.server.openai_bodies import CompletionCall
from rollout_server.cpu_engine.server.validation import BadRequest, Limits, Parsed
from tests.support import engine_openapi

LIMITS = Limits(vocab=300, context=64, cache=48)
IDS = list(range(10))
ANY = 1 << 30


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [299] * special + list(text.encode())

    def decode(self, ids: list[int], skip: bool) -> str:
        return bytes(i for i in ids if i < 256).decode()


TOKENIZER: Any = Bytes()


def generate(limits: Limits = LIMITS, **body: Any) -> Parsed:
    return validation.parse({"input_ids": IDS} | body, TOKENIZER, limits)


def sampled(**params: Any) -> Any:
    return generate(sampling_params=params).calls[0].params


def completion(**body: Any) -> CompletionCall:
    return openai_bodies.completion({"prompt": IDS} | body, lambda model: "", TOKENIZER, LIMITS)


def chat(**body: Any) -> CompletionCall:
    body = {"messages": [{"role": "user", "content": "x" * 8}]} | body
    render = lambda messages, begin, variables: "".join(m["content"] for m in messages) + ">" * begin  # noqa: E731
    return openai_bodies.chat(body, lambda model: "", render, TOKENIZER, LIMITS)


def bounded(schema: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(field, bound, value) of the numbers in a schema of a body."""
    found = []
    for name, field in schema["properties"].items():
        for part in [field, *field.get("anyOf", [])]:
            found += [(name, bound, part[bound]) for bound in ("minimum", "maximum") if part.get(bound, ANY) != ANY]
    return found


@pytest.mark.parametrize(("name", "bound", "value"), bounded(engine_openapi.SAMPLING))
def test_the_documented_limits_of_sampling_are_those_that_are_checked(name: str, bound: str, value: int) -> None:
    generate(sampling_params={name: value})
    with pytest.raises(BadRequest, match=name):
        generate(sampling_params={name: value + (1 if bound == "maximum" else -1)})


@pytest.mark.parametrize(("name", "bound", "value"), bounded(engine_openapi.GENERATE))
def test_the_documented_limits_of_generate_are_those_that_are_checked(name: str, bound: str, value: int) -> None:
    assert bound == "minimum"
    generate(**{name: value})
    with pytest.raises(BadRequest, match=name):
        generate(**{name: value - 1})


def shortest(schema: dict[str, Any]) -> Any:
    """Return the shortest value that a schema of prompts allows."""
    if schema["type"] == "array":
        return [shortest(schema["items"])] * schema["minItems"]
    return {"integer": 0, "string": "x"}[schema["type"]]


@pytest.mark.parametrize("name", ["input_ids", "text"])
def test_the_documented_least_numbers_of_prompts_and_tokens_are_those_that_are_checked(name: str) -> None:
    parts = engine_openapi.GENERATE["properties"][name]["anyOf"]
    for value in map(shortest, parts):
        body = {"input_ids": None, name: value}
        generate(**body)
        with pytest.raises(BadRequest, match=r"non-empty|text must be"):
            generate(**body | {name: value[:-1] if isinstance(value, list) else []})


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_documented_limits_of_openais_bodies_are_those_that_are_checked(kind: str) -> None:
    schema, parse = (engine_openapi.COMPLETION, completion) if kind == "completion" else (engine_openapi.CHAT, chat)
    own = {"completion": {"logprobs"}, "chat": {"top_logprobs", "max_completion_tokens"}}[kind]
    limits = bounded(schema)
    assert own < {name for name, _, _ in limits}
    for name, bound, value in limits:
        parse(**{name: value})
        with pytest.raises(BadRequest):
            parse(**{"logprobs": True} if name == "top_logprobs" else {}, **{name: value + (1, -1)[bound == "minimum"]})


def test_the_document_states_the_limits_of_a_group() -> None:
    fields = engine_openapi.describe()["paths"]["/init_weights_update_group"]["post"]["requestBody"]["content"]
    found = bounded(fields["application/json"]["schema"])
    assert ("master_port", "minimum", 1) in found and ("master_port", "maximum", 65535) in found
    assert ("rank_offset", "minimum", 1) in found and ("world_size", "minimum", 2) in found


def test_the_document_says_which_bodies_are_required_and_which_keys_open_a_route() -> None:
    paths = engine_openapi.describe()["paths"]
    assert set(paths["/generate"]) == {"post", "put"} and set(paths["/v1/completions"]) == {"post"}
    required = {path for path, kinds in paths.items() if kinds.get("post", {}).get("requestBody", {}).get("required")}
    assert required == {
        *("/generate", "/v1/completions", "/v1/chat/completions", "/update_weights_from_disk"),
        *("/update_weight_version", "/init_weights_update_group", "/update_weights_from_distributed"),
        *("/load_lora_adapter", "/unload_lora_adapter"),
    }
    assert paths["/generate"]["post"]["security"] == [{}, {"key": []}]
    assert paths["/pause_generation"]["post"]["security"] == [{}, {"admin": []}]
    assert paths["/health"]["get"]["security"] == []
    assert [p["name"] for p in paths["/v1/models/{model}"]["get"]["parameters"]] == ["model"]
    answers = {path: paths[path]["post"]["responses"]["200"].get("content", {}) for path in engine_openapi.BODIES}
    assert set(answers["/generate"]) == {"application/json", "text/event-stream"}
    assert set(answers["/flush_cache"]) == {"text/plain"} and answers["/abort_request"] == {}
    assert paths["/health"]["get"]["responses"]["503"]["content"] == {}
    assert "application/json" in paths["/ready"]["get"]["responses"]["503"]["content"]


def test_what_a_body_does_not_say_has_its_default() -> None:
    parsed = generate()
    (call,) = parsed.calls
    p = call.params
    assert (parsed.single, parsed.stream, call.ids, len(call.rids)) == (True, False, IDS, 1)
    assert (call.return_logprob, call.logprob_start, call.top_logprobs, call.logprob_texts) == (False, -1, 0, False)
    assert (call.extra_key, call.adapter) == ("\0", "")
    assert (p.max_new_tokens, p.min_new_tokens, p.temperature, p.top_p, p.top_k, p.min_p) == (128, 0, 1.0, 1.0, ANY, 0)
    assert (p.stop, p.stop_token_ids, p.n, p.stream_interval, p.sampling_seed) == ((), frozenset(), 1, 0, None)
    assert (p.ignore_eos, p.no_stop_trim, p.skip_special_tokens) == (False, False, True)
    assert completion().parsed.calls[0].params.max_new_tokens == 16
    assert chat().parsed.calls[0].ids == list(b"x" * 8 + b">")


@pytest.mark.parametrize(
    ("given", "temperature", "top_k"),
    [
        ({"temperature": 0}, 1.0, 1),
        ({"temperature": 0.9e-6, "top_k": 5}, 1.0, 1),
        ({"temperature": 1e-6}, 1e-6, ANY),
        ({"temperature": 2, "top_k": 0}, 2.0, ANY),
        ({"top_k": 1}, 1.0, 1),
        ({"top_k": 7}, 1.0, 7),
    ],
)
def test_no_temperature_is_greedy_and_no_top_k_is_all(given: dict[str, Any], temperature: float, top_k: int) -> None:
    params = sampled(**given)
    assert (params.temperature, params.top_k) == (temperature, top_k)


@pytest.mark.parametrize(
    "params",
    [
        {"min_new_tokens": 5, "max_new_tokens": 4},
        {"top_p": 0},
        {"min_p": 1.1},
        {"temperature": float("nan")},
        {"temperature": 1e301},
        {"temperature": True},
        {"top_k": 1.0},
        {"stop": ["x"] * 65},
        {"stop": "x" * 1001},
        {"stop": [1]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [300]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": 3},
        {"ignore_eos": 1},
        {"sampling_seed": (1 << 63) + 1},
        {"sampling_seed": -(1 << 63) - 1},
        {"stream_interval": 0},
        {"spaces_between_special_tokens": 1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 1},
        {"repetition_penalty": 2},
        {"json_schema": {"type": "object"}},
        {"tempratur": 1},
    ],
)
def test_a_wrong_parameter_is_named(params: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="|".join(params)):
        sampled(**params)


def test_parameters_at_their_limits() -> None:
    params = sampled(
        max_new_tokens=4, min_new_tokens=4, top_p=1e-12, min_p=1, stop=["x" * 1000, *["", "y"] * 31, "z"],
        stop_token_ids=[0, 299], sampling_seed=-(1 << 63), stream_interval=1, json_schema={},
        frequency_penalty=0, presence_penalty=0, repetition_penalty=1,
    )  # fmt: skip
    assert len(params.stop) == 33 and params.stop_token_ids == {0, 299} and params.sampling_seed == -(1 << 63)
    assert (params.min_new_tokens, params.top_p, params.min_p, params.stream_interval) == (4, 1e-12, 1.0, 1)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input_ids": [0] * 47, "sampling_params": {"max_new_tokens": 17}}, ""),
        ({"input_ids": [0] * 47, "sampling_params": {"max_new_tokens": 18}}, "exceed the context of 64"),
        ({"input_ids": [0] * 47}, ""),
        ({"input_ids": [0] * 48}, "do not fit in a cache of 48"),
        ({"input_ids": [0] * 64}, "longer than the context of 64"),
        ({"input_ids": [299, 0]}, ""),
        ({"input_ids": [300, 0]}, "token id 300 is outside the vocabulary"),
        ({"input_ids": [0, -1]}, "token id -1 is outside"),
        ({"input_ids": [0, True]}, "must be integers"),
        ({"input_ids": [[1], []]}, "at least one token"),
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": None}, "either input_ids or text"),
        ({"text": "x"}, "either input_ids or text"),
        ({"input_ids": None, "text": []}, "text must be"),
        ({"input_ids": None, "text": ["a", 1]}, "text must be"),
        ({"logprob_start_len": 10}, ""),
        ({"logprob_start_len": 11}, "between -1 and 10"),
        ({"top_logprobs_num": 300}, ""),
        ({"top_logprobs_num": 301}, "between 0 and 300"),
        ({"top_logprobs_num": [1, 2]}, "2 entries for 1 prompts"),
        ({"return_logprob": 1}, "must be of type bool"),
        ({"image_data": "x"}, "image_data is not supported"),
        ({"image_data": ""}, ""),
    ],
)
def test_what_fits_is_accepted_and_one_more_is_not(body: dict[str, Any], says: str) -> None:
    if not says:
        generate(**body)
        return
    with pytest.raises(BadRequest, match=says):
        generate(**body)


@pytest.mark.parametrize(
    ("rid", "prompts", "n", "names"),
    [
        ("a", 0, 1, [["a"]]),
        ("a", 0, 2, [["a_0", "a_1"]]),
        ("a", 1, 1, [["a_0"]]),
        ("a", 2, 2, [["a_0", "a_1"], ["a_2", "a_3"]]),
        (["a"], 0, 1, [["a"]]),
        (["a", "b"], 2, 1, [["a"], ["b"]]),
        (["a", "b"], 2, 2, [["a_0", "a_1"], ["b_0", "b_1"]]),
        ("", 0, 1, None),
        ([""], 0, 1, None),
        (["a", "a"], 2, 1, None),
        (["a"], 2, 1, None),
        (["a", 1], 2, 1, None),
        (7, 0, 1, None),
    ],
)
def test_names_of_requests(rid: Any, prompts: int, n: int, names: list[list[str]] | None) -> None:
    """prompts  length of a list of prompts; 0: one prompt without a list."""
    body = {"input_ids": [IDS] * prompts if prompts else IDS, "rid": rid, "sampling_params": {"n": n}}
    if names is None:
        with pytest.raises(BadRequest, match="rid"):
            generate(**body)
        return
    parsed = generate(**body)
    assert [call.rids for call in parsed.calls] == names and parsed.single is (prompts == 0 and n == 1)


def test_requests_without_a_name_have_different_ones_and_are_limited() -> None:
    parsed = generate(input_ids=[IDS] * 8, sampling_params={"n": 512})
    assert len({rid for call in parsed.calls for rid in call.rids}) == 4096
    with pytest.raises(BadRequest, match="limit of 4096"):
        generate(input_ids=[IDS] * 9, sampling_params=[{"n": 512}] * 8 + [{"n": 1}])


def test_values_of_several_prompts_are_given_once_or_for_each() -> None:
    body = {"input_ids": [IDS, IDS], "extra_key": ["a", None], "cache_salt": "s", "lora_path": [None, "l"]}
    parsed = generate(**body, return_logprob=[True, False], top_logprobs_num=3, logprob_start_len=[0, None])
    assert [(c.extra_key, c.adapter) for c in parsed.calls] == [("a\0s", ""), ("\0s", "l")]
    assert [(c.return_logprob, c.logprob_start, c.top_logprobs) for c in parsed.calls] == [(True, 0, 3), (False, -1, 0)]


@pytest.mark.parametrize(
    ("body", "n", "made", "fits"),
    [
        ({"logprob_start_len": 0, "top_logprobs_num": 2}, 2, 15, True),  # 2 x (2 x 10 + 2 x 15)
        ({"logprob_start_len": 0, "top_logprobs_num": 2}, 2, 16, False),
        ({"logprob_start_len": 0, "top_logprobs_num": 0}, 10, 50, True),
        ({"logprob_start_len": 0, "top_logprobs_num": 0}, 11, 50, False),
        ({"logprob_start_len": 9, "top_logprobs_num": 1}, 10, 9, True),
        ({"logprob_start_len": 9, "top_logprobs_num": 1}, 10, 10, False),
        ({"logprob_start_len": -1, "top_logprobs_num": 2}, 1, 50, True),
        ({"logprob_start_len": -1, "top_logprobs_num": 2}, 1, 51, False),
        ({"logprob_start_len": 0, "return_logprob": False}, 11, 50, True),
    ],
)
def test_alternatives_of_one_call_are_limited(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], n: int, made: int, fits: bool
) -> None:
    monkeypatch.setattr(validation, "MOST_TOPS", 100)
    body = {"return_logprob": True, "sampling_params": {"n": n, "max_new_tokens": made}} | body
    if fits:
        generate(**body)
        return
    with pytest.raises(BadRequest, match="more than 100"):
        generate(**body)


def test_the_limit_of_alternatives_is_that_of_memory() -> None:
    limits = Limits(vocab=1 << 23, context=1 << 23, cache=1 << 23)
    body = {"return_logprob": True, "top_logprobs_num": 1 << 21}
    generate(limits, **body, sampling_params={"max_new_tokens": 2})
    with pytest.raises(BadRequest, match=f"more than {1 << 22}"):
        generate(limits, **body, sampling_params={"max_new_tokens": 3})


@pytest.mark.parametrize("body", [[], None, "x", 3])
def test_a_body_is_an_object(body: Any) -> None:
    for parse in (
        lambda: validation.parse(body, TOKENIZER, LIMITS),
        lambda: openai_bodies.completion(body, str, TOKENIZER, LIMITS),
    ):
        with pytest.raises(BadRequest, match="must be a JSON object"):
            parse()


def test_logprobs_without_a_number_of_alternatives_have_none() -> None:
    (call,) = generate(return_logprob=True).calls
    assert (call.return_logprob, call.top_logprobs, call.logprob_start) == (True, 0, -1)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, 48 - 9),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 0}, 0),
        ({"logprobs": True}, 48 - 9),
        ({"logprobs": True, "top_logprobs": 1, "n": 1}, 39),
        ({"logprobs": True, "top_logprobs": 4}, 10),
        ({"logprobs": True, "top_logprobs": 4, "n": 2}, 5),
        ({"logprobs": True, "top_logprobs": 41}, 1),
    ],
)
def test_a_chat_without_a_limit_may_use_what_is_left(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], tokens: int
) -> None:
    monkeypatch.setattr(openai_bodies, "MOST_TOPS", 40)
    asked = chat(**body)
    assert asked.parsed.calls[0].params.max_new_tokens == tokens
    assert (asked.logprobs, asked.top) == ("logprobs" in body, body.get("top_logprobs", 0))


@pytest.mark.parametrize("room", [0, 1])
def test_a_chat_as_long_as_the_context_has_no_room(room: int) -> None:
    limits = Limits(vocab=300, context=10, cache=100)
    body = {"messages": [{"role": "user", "content": "x" * (10 - room)}]}
    call = lambda: openai_bodies.chat(body, str, lambda m, b, v: m[0]["content"], TOKENIZER, limits)  # noqa: E731
    if room:
        assert call().parsed.calls[0].params.max_new_tokens == 1
        return
    with pytest.raises(BadRequest, match="longer than the context"):
        call()


@pytest.mark.parametrize(
    ("body", "echoes", "logprobs", "start"),
    [
        ({"prompt": "ab"}, [""], False, -1),
        ({"prompt": "ab", "echo": True}, ["ab"], False, -1),
        ({"prompt": ["ab", "c"], "echo": True, "n": 2}, ["ab", "ab", "c", "c"], False, -1),
        ({"prompt": [97, 98], "echo": True, "logprobs": 0}, ["ab"], True, 0),
        ({"prompt": [[97], [98]], "echo": True, "logprobs": 3}, ["a", "b"], True, 0),
        ({"prompt": "ab", "logprobs": 3}, [""], True, -1),
    ],
)
def test_echo_and_logprobs_of_a_completion(body: dict[str, Any], echoes: list[str], logprobs: bool, start: int) -> None:
    asked = completion(**body)
    assert [asked.echo(number) for number in range(len(echoes))] == echoes
    assert (asked.logprobs, asked.top) == (logprobs, body.get("logprobs") or 0)
    assert asked.parsed.calls[0].logprob_start == start and asked.parsed.calls[0].return_logprob is logprobs


@pytest.mark.parametrize(
    ("name", "value", "works"),
    [
        ("best_of", 1, True), ("best_of", None, True), ("best_of", 2, False), ("suffix", "", True),
        ("tool_choice", "auto", True), ("tool_choice", "required", False), ("tools", [], True),
        ("user", "anyone", True), ("stream_options", {"include_usage": True}, True), ("unheard", None, False),
        ("frequency_penalty", 0, True), ("frequency_penalty", 1, False),
    ],
)  # fmt: skip
def test_fields_without_an_effect_are_accepted(name: str, value: Any, works: bool) -> None:
    if works:
        assert completion(**{name: value}).include_usage is (name == "stream_options")
        return
    with pytest.raises(BadRequest, match=name):
        completion(**{name: value})


@pytest.mark.parametrize("value", [None, "", [], 3])
def test_a_required_field_may_not_be_empty(value: Any) -> None:
    with pytest.raises(BadRequest, match="name"):
        validation.required({"name": value}, "name", list if value == [] else str)
    assert validation.required({"name": "x"}, "name", str) == "x"
