"""The answer to a generation: SGLang's {text, output_ids, meta_info}. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout_server.cpu_engine.request import Request
from rollout_server.cpu_engine.stopping import visible_text
from rollout_server.cpu_engine.tokenizer import Tokenizer


def answer(request: Request, tokenizer: Tokenizer, label: str) -> dict[str, Any]:
    """A whole answer, after the request has ended; `label` is the engine's present weight version."""
    length = len(request.output_ids)
    meta = facts(request, length, label, True)
    if request.return_logprob:
        meta["output_token_logprobs"] = logprobs(request, 0, length, tokenizer)
        meta["output_token_logprobs_length"] = length
        meta |= prompt_logprobs(request, tokenizer)
        if request.top_logprobs:
            meta["output_top_logprobs"] = top_logprobs(request, 0, length, tokenizer)
    return {"text": visible_text(request, length, tokenizer), "output_ids": request.output_ids[:], "meta_info": meta}


def facts(request: Request, length: int, label: str, ended: bool) -> dict[str, Any]:
    """`meta_info` without log-probs, as known after `length` output tokens.

    `weight_version` is that of the newest token, as in SGLang. `weight_versions` is always there (SGLang: at the end).
    """
    spans = request.spans(length)
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish if ended else None,
        "completion_tokens": length,
        "weight_version": spans[-1]["version"] if spans else label,
        "weight_versions": spans,
    }
    if not (ended and request.finish and request.finish.get("message") == "Abort in waiting queue"):
        # SGLang leaves these out when a request is aborted while it waits
        meta["prompt_tokens"] = len(request.prompt_ids)
        meta["cached_tokens"] = request.cached_tokens
        meta["num_retractions"] = request.retractions
    if ended:
        meta["e2e_latency"] = request.ended_at - request.arrived
    return meta


def logprobs(request: Request, start: int, end: int, tokenizer: Tokenizer) -> list[list[Any]]:
    """SGLang's `output_token_logprobs` of output tokens start..end-1: [log-prob, id, text or null]."""
    pairs = zip(request.output_logprobs[start:end], request.output_ids[start:end], strict=True)
    return _triples(request, pairs, tokenizer)


def top_logprobs(request: Request, start: int, end: int, tokenizer: Tokenizer) -> list[list[list[Any]]]:
    """SGLang's `output_top_logprobs` of output tokens start..end-1."""
    return [_triples(request, best, tokenizer) for best in request.output_top[start:end]]


def prompt_logprobs(request: Request, tokenizer: Tokenizer) -> dict[str, list[Any]]:
    """Prompt tokens from logprob_start_len on; the first has no log-prob, as in SGLang."""
    found: dict[str, list[Any]] = {"input_token_logprobs": []}
    if request.input_logprobs is not None:
        pairs = zip([None, *request.input_logprobs], request.prompt_ids[request.logprob_start :], strict=False)
        found["input_token_logprobs"] = _triples(request, pairs, tokenizer)
        if request.top_logprobs:
            tops = [_triples(request, best, tokenizer) for best in request.input_top]
            found["input_top_logprobs"] = [None, *tops]
    return found


def _triples(request: Request, pairs: Iterable[tuple[float | None, int]], tokenizer: Tokenizer) -> list[list[Any]]:
    named = request.logprob_texts
    return [[logprob, token, tokenizer.text_of(token) if named else None] for logprob, token in pairs]
