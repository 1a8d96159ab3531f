"""The answer to a generation: SGLang's {text, output_ids, meta_info}. Pure."""

from __future__ import annotations

from typing import Any

from rollout_server.cpu_engine.request import Request
from rollout_server.cpu_engine.stopping import visible_text
from rollout_server.cpu_engine.tokenizer import Tokenizer


def answer(request: Request, length: int, tokenizer: Tokenizer, label: str) -> dict[str, Any]:
    """What is known after `length` output tokens; `label` is the engine's present weight version.

    `weight_versions` is always there (SGLang: only when the version changed meanwhile), in stream chunks too.
    """
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish,
        "completion_tokens": length,
        "weight_version": label,
        "weight_versions": request.spans(length),
    }
    if request.finish is None or request.finish.get("message") != "Abort in waiting queue":
        # SGLang leaves these out when a request is aborted while it waits
        meta["prompt_tokens"] = len(request.prompt_ids)
        meta["cached_tokens"] = request.cached_tokens
        meta["num_retractions"] = request.retractions
    if request.return_logprob:
        meta["output_token_logprobs"] = _entries(request.output_logprobs[:length], request.output_ids)
        meta["output_token_logprobs_length"] = length
        meta["input_token_logprobs"] = _prompt_entries(request)
        if request.top_logprobs:
            meta["output_top_logprobs"] = [[[lp, i, None] for lp, i in best] for best in request.output_top[:length]]
    if request.finish is not None:
        meta["e2e_latency"] = request.ended_at - request.arrived
    return {
        "text": visible_text(request, length, tokenizer),
        "output_ids": request.output_ids[:length],
        "meta_info": meta,
    }


def _entries(logprobs: list[float], ids: list[int]) -> list[list[Any]]:
    return [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=False)]


def _prompt_entries(request: Request) -> list[list[Any]]:
    """Prompt tokens from logprob_start_len on; the first has no log-prob, as in SGLang."""
    if request.input_logprobs is None:
        return []
    ids = request.prompt_ids[request.logprob_start :]
    return [[logprob, token, None] for logprob, token in zip([None, *request.input_logprobs], ids, strict=False)]
