"""The answer to a generation: SGLang's {text, output_ids, meta_info}. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.scheduler.request import Request, visible_text


def answer(request: Request, tokenizer: Tokenizer, label: str) -> dict[str, Any]:
    """A whole answer, after the request has ended; `label` is the engine's present weight version."""
    length = len(request.output_ids)
    meta = meta_info(request, length, label, True)
    if request.return_logprob:
        meta["output_token_logprobs"] = logprobs(request, 0, length, tokenizer)
        meta["output_token_logprobs_length"] = length
        meta |= prompt_logprobs(request, tokenizer)
        if request.top_logprobs:
            meta["output_top_logprobs"] = top_logprobs(request, 0, length, tokenizer)
    return {"text": visible_text(request, length, tokenizer), "output_ids": request.output_ids[:], "meta_info": meta}


def meta_info(request: Request, length: int, label: str, ended: bool) -> dict[str, Any]:
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


class StreamEncoder:
    """The events of one request's stream. Nothing is encoded twice: a chunk costs what is new in it.

    Chunks are cumulative, as SGLang's are by default, or `incremental`: then text, output_ids and output log-probs of
    the chunks are disjoint and everything else in meta_info still counts from the beginning, as in SGLang.

    index  place of the request in a batch, None outside of one
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, *, incremental: bool, index: int | None) -> None:
        self._request, self._tokenizer, self._incremental = request, tokenizer, incremental
        self._tail = "}\n\n" if index is None else f', "index": {index}}}\n\n'
        self._text = IncrementalDetokenizer(request, tokenizer)
        self._sent = 0
        self._ids = self._logprobs = self._tops = ""
        self._prompt = ""
        self._facts = MetaInfoJson(request)

    def chunk(self, length: int, ended: bool, label: str) -> bytes:
        """The event after `length` output tokens; `label` is the engine's present weight version."""
        request, start, self._sent = self._request, self._sent, length
        if self._incremental:
            self._ids = self._logprobs = self._tops = ""
        self._ids = _joined(self._ids, str(request.output_ids[start:length])[1:-1])
        parts = ['data: {"text": ', json.dumps(self._shown(length, ended)), ', "output_ids": [', self._ids]
        parts += ['], "meta_info": ', self._facts.json(length, ended, label)[:-1]]
        if request.return_logprob:
            new = logprobs(request, start, length, self._tokenizer)
            self._logprobs = _joined(self._logprobs, json.dumps(new)[1:-1])
            self._prompt = self._prompt or json.dumps(prompt_logprobs(request, self._tokenizer))[1:-1]
            parts += [', "output_token_logprobs": [', self._logprobs, f'], "output_token_logprobs_length": {length}']
            parts += [", ", self._prompt]
            if request.top_logprobs:
                self._tops = _joined(
                    self._tops, json.dumps(top_logprobs(request, start, length, self._tokenizer))[1:-1]
                )
                parts += [', "output_top_logprobs": [', self._tops, "]"]
        parts += ["}", self._tail]
        return "".join(parts).encode()

    def _shown(self, length: int, ended: bool) -> str:
        before = self._text.shown
        whole = visible_text(self._request, length, self._tokenizer) if ended else self._text.grow(length)
        return whole[len(before) :] if self._incremental else whole


class MetaInfoJson:
    """`meta_info` as JSON. Within a stream only two numbers of it change, until weights or place do."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._key: tuple[object, ...] = ()
        self._before = self._between = self._after = ""

    def json(self, length: int, ended: bool, label: str) -> str:
        """Equal to json.dumps(meta_info(...))."""
        request = self._request
        key = (len(request.versions), request.retractions, request.cached_tokens)
        if ended or not length or not request.versions or request.versions[-1][1] >= length:
            return json.dumps(meta_info(request, length, label, ended))
        if key != self._key:
            mark = 1 << 60
            pieces = json.dumps(meta_info(request, mark, label, False)).split(str(mark))
            if len(pieces) != 3:  # the mark stands in the request's own name
                return json.dumps(meta_info(request, length, label, ended))
            self._key, (self._before, self._between, self._after) = key, pieces
        return f"{self._before}{length}{self._between}{length}{self._after}"


def _joined(entries: str, more: str) -> str:
    return f"{entries}, {more}" if entries and more else entries or more


class IncrementalDetokenizer:
    """The text of a request's tokens while they come; `shown` only grows.

    A token may be a piece of a character, and a decoder may join tokens by spaces: so new tokens are decoded together
    with those before them, and only what this adds is new (as text-generation-inference does it). The context starts
    where a character ends: a byte-fallback decoder spoils a whole run of bytes that begins inside a character. An end
    that may turn out to be the beginning of a stop string is held back, since the finished text would be cut there.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._stops = () if request.params.no_stop_trim else request.params.stop
        self._context = self._decoded = 0
        self._text = self.shown = ""

    def grow(self, length: int) -> str:
        """The text that may be shown after `length` output tokens."""
        ids, skip = self._request.output_ids, self._request.params.skip_special_tokens
        known = self._tokenizer.decode(ids[self._context : self._decoded], skip)
        both = self._tokenizer.decode(ids[self._context : length], skip)
        if not both.endswith("\ufffd"):  # else half a character: the next token may complete it
            self._text += both[len(known) :]
            if len(both) > len(known):  # else the new tokens are skipped ones, and no context for the next
                self._context = self._decoded
            self._decoded = length
            self.shown = self._text[: len(self._text) - _held_back(self._text, self._stops)]
        return self.shown


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which one of the stop strings begins."""
    longest = max((min(len(stop) - 1, len(text)) for stop in stops), default=0)
    for n in range(longest, 0, -1):
        if text.endswith(tuple(stop[:n] for stop in stops if len(stop) > n)):
            return n
    return 0
