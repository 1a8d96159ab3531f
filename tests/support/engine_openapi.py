"""The OpenAPI 3.1 document of the CPU engine, from which tests draw requests. The engine does not serve it.

`validation.py` and `openai_bodies.py` validate bodies without a schema, so the schemas are here. Tests compare paths
and methods with the application's routes, and sampling parameters with those in `validation.py`, and send generated
requests to a running engine.
"""

from __future__ import annotations

from protocol.runtime.http.openapi import (
    EVENTS,
    JSON,
    STRING,
    TEXT,
    Object,
    document,
    operation,
    parameter,
)
from rollout_server.cpu_engine.scheduler.engine import MEMORY
from rollout_server.cpu_engine.server.admin import ABSENT
from rollout_server.cpu_engine.server.auth import OPEN
from rollout_server.cpu_engine.server.openai_bodies import SAMPLING as SAMPLED_AS
from rollout_server.cpu_engine.server.validation import NEUTRAL

ADMIN = frozenset(
    {
        *ABSENT,
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/weights_checker",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weights_from_distributed",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/post_process_weights",
    }
)
"""Routes that need the admin key."""
FLAG: Object = {"type": "boolean"}
IDS: Object = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _integer(least: int, most: int = 1 << 30) -> Object:
    return {"type": "integer", "minimum": least, "maximum": most}


def _either(*schemas: Object) -> Object:
    return {"anyOf": list(schemas)}


def _listed(schema: Object) -> Object:
    """Return the schema of a value for all prompts, or a list with one per prompt."""
    return _either(schema, {"type": "array", "items": schema})


SAMPLING: Object = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "max_new_tokens": _integer(0),
        "min_new_tokens": _integer(0),
        "temperature": {"type": "number", "minimum": 0},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _integer(-1),
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "stop": _either(STRING, {"type": "array", "items": STRING, "maxItems": 64}),
        "stop_token_ids": {"type": "array", "items": _integer(0)},
        "ignore_eos": FLAG,
        "no_stop_trim": FLAG,
        "skip_special_tokens": FLAG,
        "n": _integer(1, 512),
        "sampling_seed": {"type": "integer"},
        "stream_interval": _integer(1),
        "spaces_between_special_tokens": FLAG,
    },
}
GENERATE: Object = {
    "type": "object",
    "properties": {
        "input_ids": _either(IDS, {"type": "array", "items": IDS, "minItems": 1}),
        "text": _either(STRING, {"type": "array", "items": STRING, "minItems": 1}),
        "sampling_params": _listed(SAMPLING),
        "return_logprob": _listed(FLAG),
        "logprob_start_len": _listed(_integer(-1)),
        "top_logprobs_num": _listed(_integer(0)),
        "return_text_in_logprobs": FLAG,
        "stream": FLAG,
        "rid": _either(STRING, {"type": "array", "items": STRING}),
        "extra_key": _listed(STRING),
        "cache_salt": _listed(STRING),
        "lora_path": _listed(STRING),
    },
}
_NAMED = {
    **{ours: SAMPLING["properties"][SAMPLED_AS[ours]] for ours in SAMPLED_AS if SAMPLED_AS[ours] not in NEUTRAL},
    "model": {"enum": ["default"]},
    "stream": FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
    "rid": STRING,
    "extra_key": STRING,
    "cache_salt": STRING,
    "user": STRING,
}
COMPLETION: Object = {
    "type": "object",
    "required": ["prompt"],
    "additionalProperties": False,
    "properties": {
        **_NAMED,
        "prompt": _either(
            STRING, {"type": "array", "items": STRING, "minItems": 1}, IDS, {"type": "array", "items": IDS}
        ),
        "echo": FLAG,
        "logprobs": _integer(0),
    },
}
MESSAGES: Object = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"enum": ["system", "user", "assistant", "tool"]}, "content": STRING},
    },
}
CHAT: Object = {
    "type": "object",
    "required": ["messages"],
    "additionalProperties": False,
    "properties": {
        **_NAMED,
        "messages": MESSAGES,
        "max_completion_tokens": _integer(0),
        "logprobs": FLAG,
        "top_logprobs": _integer(0),
        "add_generation_prompt": FLAG,
        "chat_template_kwargs": {"type": "object"},
    },
}
TOKENIZE: Object = {
    "type": "object",
    "properties": {
        "prompt": _either(STRING, {"type": "array", "items": STRING}),
        "messages": MESSAGES,
        "add_special_tokens": FLAG,
    },
}
NAMES: Object = {"type": "array", "items": STRING, "minItems": 1}
TAGS: Object = {"type": "array", "items": {"enum": list(MEMORY)}}
STREAMED = ("/generate", "/v1/completions", "/v1/chat/completions")
SHAPES: Object = {"type": "array", "items": {"type": "array", "items": _integer(0)}, "minItems": 1}


def _object(required: tuple[str, ...] = (), **properties: Object) -> Object:
    return {"type": "object", "properties": properties, "required": list(required)}


BODIES: dict[str, Object] = {
    "/generate": GENERATE,
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), TOKENIZE),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), _object(tokens=IDS, skip_special_tokens=FLAG)),
    "/flush_cache": _object(),
    "/abort_request": _object(rid=STRING, abort_all=FLAG),
    "/pause_generation": _object(mode={"enum": ["abort", "retract", "in_place"]}),
    "/continue_generation": _object(),
    "/update_weights_from_disk": _object(
        ("model_path",), model_path=STRING, weight_version=STRING, flush_cache=FLAG, abort_all_requests=FLAG
    ),
    "/update_weight_version": _object(("new_version",), new_version=STRING, abort_all_requests=FLAG),
    "/weights_checker": _object(action={"enum": ["checksum", "snapshot", "reset_tensors", "compare"]}),
    "/post_process_weights": _object(),
    "/init_weights_update_group": _object(
        ("master_address", "master_port", "rank_offset", "world_size"),
        master_address=STRING,
        master_port=_integer(1, 65535),
        rank_offset=_integer(1),
        world_size=_integer(2),
        group_name=STRING,
        backend={"const": "gloo"},
    ),
    "/destroy_weights_update_group": _object(group_name=STRING),
    "/begin_weight_update": _object(),
    "/update_weights_from_distributed": _object(
        ("names", "dtypes", "shapes"),
        names=NAMES,
        dtypes=NAMES,
        shapes=SHAPES,
        group_name=STRING,
        weight_version=STRING,
        flush_cache=FLAG,
        abort_all_requests=FLAG,
        load_format={"enum": [None, "flattened_bucket"]},
    ),
    "/end_weight_update": _object(),
    "/load_lora_adapter": _object(("lora_name", "lora_path"), lora_name=STRING, lora_path=STRING),
    "/unload_lora_adapter": _object(("lora_name",), lora_name=STRING),
    **dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation"), _object(tags=TAGS)),
    **dict.fromkeys(ABSENT, _object()),
}
"""Path of a POST -> schema of its body. Other fields are ignored, except for weights from disk and OpenAI's routes.
Routes in ABSENT always answer 400."""

GETS: dict[str, str | None] = {
    **dict.fromkeys(("/ready", "/health", "/health_generate"), None),
    "/metrics": TEXT,
    "/flush_cache": TEXT,
    **dict.fromkeys(("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/loads"), JSON),
    **dict.fromkeys(("/get_weight_version", "/weight_version", "/v1/models", "/v1/models/{model}"), JSON),
    **dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation"), JSON),
}
"""Path of a GET -> media type of the answer; None: empty."""

PROBLEM: Object = {
    "type": "object",
    "required": ["message", "error"],
    "properties": {
        "message": STRING,
        "error": {"type": "object", "required": ["message", "type", "code"], "properties": {"message": STRING}},
    },
}
FAILURES = {
    "400": "the request is invalid, or not possible in the current state",
    "401": "the key is missing or wrong for this route",
    "404": "unknown model or adapter",
    "403": "without an API key: another origin, or not a loopback name",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is compressed, or (without an API key) not JSON",
    "500": "the generation failed",
    "503": "the engine is paused or has ended",
}


def describe() -> Object:
    """Return the whole document."""
    paths: Object = {}
    for path, kind in GETS.items():
        paths.setdefault(path, {})["get"] = _operation(path, _content(kind))
    for path, schema in BODIES.items():
        streamed = path in STREAMED
        answer = {**_content(JSON), **_content(EVENTS)} if streamed else _content(_kind_of(path))
        for method in ("post", "put") if schema is GENERATE else ("post",):
            made = _operation(path, answer, schema)
            made["requestBody"]["required"] = bool(schema.get("required")) or streamed
            paths.setdefault(path, {})[method] = made
    return document("Foray CPU engine", paths, tokens=("key", "admin"))


def _kind_of(path: str) -> str | None:
    return {"/flush_cache": TEXT, "/abort_request": None}.get(path, JSON)


def _content(kind: str | None) -> Object:
    return {} if kind is None else {kind: {"schema": STRING} if kind == TEXT else {}}


def _operation(path: str, content: Object, body: Object | None = None) -> Object:
    done: Object = {"description": "done"} | ({"content": content} if content else {})
    failures = {status: {"description": why, "content": _failed(path)} for status, why in FAILURES.items()}
    return operation(
        {"200": done} | failures,
        body=body,
        parameters=[parameter("model", "path")] if "{model}" in path else [],
        security=() if path in OPEN else ({}, {"admin" if path in ADMIN else "key": []}),
    )


def _failed(path: str) -> Object:
    return {} if path in ("/health", "/health_generate") else {JSON: {"schema": PROBLEM}}
