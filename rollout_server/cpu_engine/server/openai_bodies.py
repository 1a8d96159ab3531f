"""Convert bodies of OpenAI's routes to bodies of /generate, which `validation.py` checks. Pure.

Fields that are not in a table here are rejected. Unsupported fields are accepted only with a value that has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.server.validation import (
    MOST_TOPS,
    NEUTRAL,
    BadRequest,
    Body,
    Limits,
    Parsed,
    encode,
    optional,
    parse,
)

SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids")},
    **{name: name for name in ("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens")},
    **{name: name for name in NEUTRAL},
    **{"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"},
}
"""Field of OpenAI's body, including SGLang's extensions -> sampling parameter."""
ROUTED = ("rid", "extra_key", "cache_salt", "lora_path")
"""Fields with the same name in /generate."""
COMMON = frozenset({*SAMPLING, *ROUTED, "model", "logprobs", "stream", "stream_options"})
COMPLETION = COMMON | {"prompt", "echo"}
CHAT = COMMON | {"messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt", "chat_template_kwargs"}
IDLE: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "continue_final_message": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
}
"""Fields that are accepted only with a value without effect: null, or one of these."""
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
        # of SGLang's reasoning parser, which is off by default; its router always sends them
        *("separate_reasoning", "stream_reasoning"),
    }
)
"""Fields that do not change the answer."""


@dataclass(frozen=True)
class CompletionCall:
    """A validated body. `echoes`: text before the answers, per prompt; `top`: alternatives per token."""

    parsed: Parsed
    model: str
    samples: int
    echoes: list[str] | None
    logprobs: bool
    top: int
    include_usage: bool

    def echo(self, number: int) -> str:
        """Return the text before the answer of request `number`."""
        return self.echoes[number // self.samples] if self.echoes else ""


def completion(body: Any, adapter: Callable[[str], str], tokenizer: Tokenizer, limits: Limits) -> CompletionCall:
    """Validate a body of /v1/completions. `adapter` maps a model name to its adapter. Raises BadRequest."""
    body = _checked(body, COMPLETION)
    prompt, echo = body.get("prompt"), optional(body, "echo", bool, False)
    texts = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str))
    top = optional(body, "logprobs", int, None)
    asked = {"text" if texts else "input_ids": prompt, **_generate(body, {"max_new_tokens": 16}, adapter)}
    if prompt is None:
        raise BadRequest("prompt is missing")
    asked |= {"return_logprob": top is not None, "top_logprobs_num": top or 0}
    asked |= {"logprob_start_len": 0} if echo and top is not None else {}
    parsed = parse(asked, tokenizer, limits)
    given = prompt if isinstance(prompt, list) and texts else [prompt]
    echoes = given if texts else [tokenizer.decode(call.ids, True) for call in parsed.calls]
    return _asked(body, parsed, echoes if echo else None, top)


def chat(
    body: Any,
    adapter: Callable[[str], str],
    render: Callable[[list[Body], bool, Body], str],
    tokenizer: Tokenizer,
    limits: Limits,
) -> CompletionCall:
    """Validate a body of /v1/chat/completions. `render` applies the chat template. Raises BadRequest."""
    body = _checked(body, CHAT)
    ids = conversation(body, render, tokenizer)
    wanted = optional(body, "logprobs", bool, False)
    top = optional(body, "top_logprobs", int, 0)
    if top and not wanted:
        raise BadRequest("top_logprobs requires logprobs: true")
    longest = optional(body, "max_completion_tokens", int, None)
    room = max(min(limits.context, limits.cache) - len(ids), 0)
    if top > 0:  # a body without a limit must not be rejected for the default set here
        room = min(room, max(MOST_TOPS // (top * max(optional(body, "n", int, 1), 1)), 1))
    asked = _generate(body, {"max_new_tokens": room if longest is None else longest}, adapter)
    asked |= {"input_ids": ids, "return_logprob": wanted, "top_logprobs_num": top}
    return _asked(body, parse(asked, tokenizer, limits), None, top if wanted else None)


def conversation(body: Body, render: Callable[[list[Body], bool, Body], str], tokenizer: Tokenizer) -> list[int]:
    """Return the prompt ids of `messages`. The template adds the special tokens. Raises BadRequest."""
    messages = [_message(message) for message in optional(body, "messages", list, [])]
    if not messages:
        raise BadRequest("messages is missing")
    begin = optional(body, "add_generation_prompt", bool, True)
    text = render(messages, begin, optional(body, "chat_template_kwargs", dict, {}))
    return encode(tokenizer, text, "messages", special=False)


def _message(message: Any) -> Body:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("each of messages must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(map(_text, content))
    if content is not None and not isinstance(content, str):
        raise BadRequest("content must be a string or a list of parts")
    calls = optional(message, "tool_calls", list, None)
    # as in SGLang: templates render missing content as "None", and encode the arguments themselves
    return {**message, "content": content or ""} | ({"tool_calls": list(map(_tool_call, calls))} if calls else {})


def _tool_call(call: Any) -> Body:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest("each of tool_calls must be an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the arguments of a tool call are not JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise BadRequest("each part of content must be of type text")
    return text


def _checked(body: Any, known: frozenset[str]) -> Body:
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name, value in body.items():
        if name in IDLE:
            if value is not None and value not in IDLE[name]:
                raise BadRequest(f"{name} is not supported by this engine")
        elif name not in known and name not in IGNORED:
            raise BadRequest(f"unknown field {name!r:.80}")
    return body


def _generate(body: Body, defaults: Mapping[str, Any], adapter: Callable[[str], str]) -> Body:
    """Return the fields that both kinds of body share with /generate."""
    given = {ours: body[theirs] for theirs, ours in SAMPLING.items() if body.get(theirs) is not None}
    asked: Body = {name: body[name] for name in ROUTED if body.get(name) is not None}
    named = adapter(optional(body, "model", str, ""))
    return {"sampling_params": {**defaults, **given}, "stream": body.get("stream"), "lora_path": named, **asked}


def _asked(body: Body, parsed: Parsed, echoes: list[str] | None, top: int | None) -> CompletionCall:
    options = optional(body, "stream_options", dict, {})
    return CompletionCall(
        parsed=parsed,
        model=optional(body, "model", str, ""),
        samples=parsed.calls[0].params.n,
        echoes=echoes,
        logprobs=top is not None,
        top=top or 0,
        include_usage=optional(options, "include_usage", bool, False),
    )
