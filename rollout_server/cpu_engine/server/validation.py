"""Validate bodies of /generate and of the control routes: a wrong value is a BadRequest (HTTP 400) that names it.

Written without a schema library, which would cost as much as the rest of a request for each turn of each trajectory.
Features of SGLang that this engine lacks are rejected, never silently ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from protocol.runtime.timing import loop_timeout
from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.scheduler.request import SamplingParams

Body = dict[str, Any]

NEUTRAL: Body = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    **dict.fromkeys(("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "beam_width")),
    "custom_params": None,
}
"""Sampling parameters of SGLang that are accepted only with their neutral value."""

UNSUPPORTED = (
    "input_embeds",
    "token_ids_logprob",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "return_hidden_states",
    "return_routed_experts",
    "custom_logit_processor",
)
"""Unsupported fields that would change the answer: rejected when set. Other unknown fields are ignored, as in
SGLang."""


MOST_SAMPLES = 4096
"""Maximum of prompts times `n` in one call."""

MOST_TOPS = 1 << 22
"""Maximum alternatives of one call, over all tokens. They are kept as Python objects until the answer is sent."""


MOST_NUMBER = 1e300
"""Maximum value of integer fields."""
LARGEST_TEMPERATURE = 1e38
"""A float32 holds no more."""

_RID_BASE = secrets.token_hex(8)
_rid_numbers = itertools.count()
# not uuid4: its system call releases the GIL, and reacquiring it from a busy engine takes time

BODY_S = 30.0
"""Timeout for receiving a body, in seconds."""
LARGE_BODY = 1 << 16
"""Bodies larger than this (bytes) are validated in a thread: encoding 1 MiB of text takes seconds."""
_LARGE_WORK = ThreadPoolExecutor(1, "large-body")
T = TypeVar("T")
D = TypeVar("D", int, None)


class BadRequest(Exception):
    """The request is invalid. The message names the field."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request. `tokens`: prompt plus output, limited by context and cache."""

    vocab: int
    context: int
    cache: int


@dataclass(frozen=True)
class GenerateCall:
    """One validated prompt of a body, for `n` samples. `adapter`: name of a LoRA adapter, "" for none."""

    rids: list[str]
    ids: list[int]
    params: SamplingParams
    return_logprob: bool
    logprob_start: int
    top_logprobs: int
    logprob_texts: bool
    extra_key: str
    adapter: str


@dataclass(frozen=True)
class Parsed:
    """A validated body. `single`: the answer is one object, otherwise a list in order of prompts and samples."""

    calls: list[GenerateCall]
    single: bool
    stream: bool


def parse(body: Any, tokenizer: Tokenizer, limits: Limits) -> Parsed:
    """Validate a decoded JSON body. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name in UNSUPPORTED:
        if body.get(name):
            raise BadRequest(f"{name} is not supported by this engine")
    prompts, batched = _prompts(body, tokenizer, limits)
    given = _spread(body, "sampling_params", {}, len(prompts), dict)
    params = [_sampling(p, limits) for p in given]
    texts = _flag(body, "return_text_in_logprobs")
    calls = []
    names = _rids(body.get("rid"), [p.n for p in params], batched)
    columns = (
        _spread(body, "return_logprob", False, len(prompts), bool),
        _spread(body, "logprob_start_len", -1, len(prompts), int),
        _spread(body, "top_logprobs_num", 0, len(prompts), int),
        _spread(body, "extra_key", "", len(prompts), str),
        _spread(body, "cache_salt", "", len(prompts), str),
        _spread(body, "lora_path", "", len(prompts), str),
    )
    for ids, asked, own, rids, wanted, start, top, key, salt, adapter in zip(
        prompts, given, params, names, *columns, strict=True
    ):
        if not -1 <= start <= len(ids):
            raise BadRequest(f"logprob_start_len must be between -1 and {len(ids)}, the prompt's length, not {start}")
        if not 0 <= top <= limits.vocab:
            raise BadRequest(f"top_logprobs_num must be between 0 and {limits.vocab}, not {top}")
        # the default is reduced to what fits, as in SGLang; a requested number is not
        if asked.get("max_new_tokens") is not None and len(ids) + own.max_new_tokens > limits.context:
            raise BadRequest(
                f"{len(ids)} prompt tokens and max_new_tokens {own.max_new_tokens} "
                f"exceed the context of {limits.context}"
            )
        if len(ids) >= limits.cache:
            raise BadRequest(f"{len(ids)} prompt tokens do not fit in a cache of {limits.cache}")
        calls.append(
            GenerateCall(rids, ids, own, wanted, start, top if wanted else 0, texts, f"{key}\0{salt}", adapter)
        )
    if sum(map(_tops, calls)) > MOST_TOPS:
        raise BadRequest(f"more than {MOST_TOPS} log-probs of prompts and alternatives in one call; request fewer")
    return Parsed(calls, not batched and params[0].n == 1, _flag(body, "stream"))


def _tops(call: GenerateCall) -> int:
    """Return the maximum number of alternatives in the answers. A scored prompt token without any counts as one."""
    scored = len(call.ids) - call.logprob_start if call.return_logprob and call.logprob_start >= 0 else 0
    made = call.top_logprobs * call.params.max_new_tokens
    return len(call.rids) * (max(call.top_logprobs, 1) * scored + made)


def _prompts(body: Body, tokenizer: Tokenizer, limits: Limits) -> tuple[list[list[int]], bool]:
    """Return the prompts as ids, and whether the body has a list of prompts."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("give either input_ids or text")
    if text is not None:
        batched = isinstance(text, list)
        texts = text if batched else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise BadRequest("text must be a string or a list of strings")
        prompts = [encode(tokenizer, t, "text") for t in texts]
    else:
        if not isinstance(ids, list) or not ids:
            raise BadRequest("input_ids must be a non-empty list of token ids, or of such lists")
        batched = isinstance(ids[0], list)
        prompts = ids if batched else [ids]
    for prompt in prompts:
        check_ids(prompt, limits.vocab)
        if len(prompt) >= limits.context:
            raise BadRequest(f"{len(prompt)} prompt tokens are longer than the context of {limits.context}")
    return prompts, batched


def encode(tokenizer: Tokenizer, text: str, field: str, special: bool = True) -> list[int]:
    """Return the ids of `text`, the value of `field`. Raises BadRequest if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{field} contains an unpaired surrogate, which is not a character") from None
    return tokenizer.encode(text, special)


def check_ids(ids: Any, vocab: int) -> None:
    """Raise BadRequest unless `ids` is a non-empty list of token ids."""
    if not isinstance(ids, list) or not ids:
        raise BadRequest("a prompt must be a list of at least one token id")
    if set(map(type, ids)) != {int}:  # exact types: isinstance(True, int) is True
        raise BadRequest("token ids must be integers")
    if min(ids) < 0 or max(ids) >= vocab:
        wrong = next(i for i in ids if not 0 <= i < vocab)
        raise BadRequest(f"token id {wrong} is outside the vocabulary of {vocab}")


def _spread(body: Body, name: str, default: Any, count: int, kind: type) -> list[Any]:
    """Return a field as one value per prompt. It may be given once, or as a list of `count`."""
    value = body.get(name)
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise BadRequest(f"{name} has {len(values)} entries for {count} prompts")
    values = [default if v is None else v for v in values]
    for v in values:
        if type(v) is not kind:
            raise BadRequest(f"{name} must be of type {kind.__name__}, not {type(v).__name__}")
    return values


def _rids(rid: Any, samples: list[int], batched: bool) -> list[list[str]]:
    """Return the rids of the samples of each prompt. A single rid for many is their prefix, as in SGLang."""
    total = sum(samples)
    if total > MOST_SAMPLES:
        raise BadRequest(f"{total} samples in one call exceed the limit of {MOST_SAMPLES}")
    if rid is None:
        names = [f"{_RID_BASE}{next(_rid_numbers):016x}" for _ in range(total)]
    elif isinstance(rid, str) and rid:
        names = [rid] if total == 1 and not batched else [f"{rid}_{i}" for i in range(total)]
    elif isinstance(rid, list) and len(rid) == len(samples) and all(isinstance(r, str) and r for r in rid):
        names = [r if n == 1 else f"{r}_{i}" for r, n in zip(rid, samples, strict=True) for i in range(n)]
    else:
        raise BadRequest("rid must be a non-empty string, or a list with one per prompt")
    if len(set(names)) != total:
        raise BadRequest("rids must differ")
    rest = iter(names)
    return [list(itertools.islice(rest, n)) for n in samples]


def _sampling(given: Body, limits: Limits) -> SamplingParams:
    for name, value in given.items():
        if name in NEUTRAL:
            if value is not None and value != NEUTRAL[name] and value != {}:
                raise BadRequest(f"sampling parameter {name}={value!r} is not supported by this engine")
        elif name not in _KNOWN:
            raise BadRequest(f"unknown sampling parameter {name!r}")
    _flag(given, "spaces_between_special_tokens")
    temperature = _number(given, "temperature", 1.0, 0, LARGEST_TEMPERATURE)
    top_k = _integer(given, "top_k", -1, -1, 1 << 30)
    stops = given.get("stop")
    stop_ids = given.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not all(type(i) is int and 0 <= i < limits.vocab for i in stop_ids):
        raise BadRequest("stop_token_ids must be a list of token ids of the vocabulary")
    maximum = _integer(given, "max_new_tokens", 128, 0, 1 << 30)
    return SamplingParams(
        max_new_tokens=maximum,
        min_new_tokens=_integer(given, "min_new_tokens", 0, 0, maximum),
        temperature=temperature if temperature >= 1e-6 else 1.0,
        top_p=_number(given, "top_p", 1.0, 1e-12, 1),
        top_k=1 if temperature < 1e-6 else top_k if top_k > 0 else 1 << 30,
        min_p=_number(given, "min_p", 0.0, 0, 1),
        stop=_stops(stops),
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=_flag(given, "ignore_eos"),
        no_stop_trim=_flag(given, "no_stop_trim"),
        skip_special_tokens=_flag(given, "skip_special_tokens", True),
        n=_integer(given, "n", 1, 1, 512),
        stream_interval=_integer(given, "stream_interval", 0, 1, 1 << 30),
        sampling_seed=_integer(given, "sampling_seed", None, -(1 << 63), 1 << 63),
    )


_KNOWN = frozenset(SamplingParams.__dataclass_fields__) | {"spaces_between_special_tokens"}
"""The last one affects only the text of slow tokenizers, as in SGLang: both values are accepted and equivalent."""


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and len(s) <= 1000 for s in stops) or len(stops) > 64:
        raise BadRequest("stop must be a string or a list of at most 64 strings of at most 1000 characters")
    return tuple(s for s in stops if s)


def _flag(given: Body, name: str, default: bool = False) -> bool:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false")
    return value


def _integer(given: Body, name: str, default: D, least: int, most: int) -> int | D:
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(f"{name} must be an integer from {least} to {most}, not {value!r:.40}")
    return value


def _number(given: Body, name: str, default: float, least: float, most: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    # an integer may overflow a float
    if type(value) not in (int, float) or not least <= value <= min(most, MOST_NUMBER):
        raise BadRequest(f"{name} must be a number from {least} to {most}, not {value!r:.40}")
    return float(value)


async def read_json(http: web.Request) -> Any:
    """Return the body as JSON. Raises BadRequest, or the HTTP errors 408 and 413."""
    if (http.content_length or 0) > http.client_max_size:
        raise web.HTTPRequestEntityTooLarge(http.client_max_size, http.content_length or 0)
    try:
        async with loop_timeout(BODY_S):
            raw = await http.read()
        return json.loads(raw)
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"the request body did not arrive within {BODY_S:g} s") from None
    except web.RequestPayloadError:
        raise BadRequest("the request body does not match its headers") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


async def unblocked(large: bool, work: Callable[[], T]) -> T:
    """Return `work()`. If `large`, run it in a thread so that the event loop can serve other requests.

    There is a single thread for it: large jobs wait only for each other.
    """
    return await asyncio.get_running_loop().run_in_executor(_LARGE_WORK, work) if large else work()


async def is_large(http: web.Request) -> bool:
    """Return whether the body, which has been read, may contain text that is slow to encode."""
    return len(await http.read()) > LARGE_BODY


async def read_object(http: web.Request) -> dict[str, Any]:
    """Return the body as an object. An empty body is an empty object."""
    if not http.can_read_body:
        return {}
    body = await read_json(http)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def optional(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field of exactly type `kind`; `default` if it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise BadRequest(f"{name} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def required(body: dict[str, Any], name: str, kind: type) -> Any:
    """Return a required field of exactly type `kind`; a string or list must not be empty."""
    value = optional(body, name, kind, None)
    if value is None or value == "" or value == []:
        raise BadRequest(f"{name} is missing")
    return value
