"""Build SGLang's answer to a generation: {text, output_ids, meta_info}. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.scheduler.request import Request, visible_text


def answer(request: Request, tokenizer: Tokenizer, label: str) -> dict[str, Any]:
    """Return the complete answer of a finished request. `label`: the engine's current weight version."""
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
    """Return `meta_info` without log-probs after `length` output tokens.

    `weight_version` is the version of the newest token, as in SGLang. `weight_versions` is always included (SGLang: at
    the end).
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
        # SGLang omits these when a request is aborted in the queue
        meta["prompt_tokens"] = len(request.prompt_ids)
        meta["cached_tokens"] = request.cached_tokens
        meta["num_retractions"] = request.retractions
    if ended:
        meta["e2e_latency"] = request.ended_at - request.arrived
    return meta


def logprobs(request: Request, start: int, end: int, tokenizer: Tokenizer) -> list[list[Any]]:
    """Return SGLang's `output_token_logprobs` of output tokens start..end-1: [log-prob, id, text or null]."""
    pairs = zip(request.output_logprobs[start:end], request.output_ids[start:end], strict=True)
    return _triples(request, pairs, tokenizer)


def top_logprobs(request: Request, start: int, end: int, tokenizer: Tokenizer) -> list[list[list[Any]]]:
    """Return SGLang's `output_top_logprobs` of output tokens start..end-1."""
    return [_triples(request, best, tokenizer) for best in request.output_top[start:end]]


def prompt_logprobs(request: Request, tokenizer: Tokenizer) -> dict[str, list[Any]]:
    """Return the log-probs of prompt tokens from logprob_start_len on. The first has none, as in SGLang."""
    found: dict[str, list[Any]] = {"input_token_logprobs": []}
    if request.input_logprobs is not None:
        pairs = zip([None, *request.input_logprobs], request.prompt_ids[request.logprob_start :], strict=False)
        found["input_token_logprobs"] = _triples(request, pairs, tokenizer)
        if request.top_logprobs:
            tops = [_triples(request, best, tokenizer) for best in request.input_top]
            found["input_top_logprobs"] = [None, *tops][: len(found["input_token_logprobs"])]
    return found


def _triples(request: Request, pairs: Iterable[tuple[float | None, int]], tokenizer: Tokenizer) -> list[list[Any]]:
    named = request.logprob_texts
    return [[logprob, token, tokenizer.text_of(token) if named else None] for logprob, token in pairs]


class StreamEncoder:
    """Encodes the events of a stream. The cost of a chunk depends on its new tokens only: nothing is encoded twice.

    Chunks are cumulative, as in SGLang by default, or `incremental`: then text, output_ids and output log-probs contain
    only the new tokens, and the rest of meta_info still counts from the beginning, as in SGLang.

    index  index of the request in a batch; None if there is no batch
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
        """Return the event after `length` output tokens. `label`: the engine's current weight version."""
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
    """Encodes `meta_info`. Within a stream only two of its numbers change, unless the weights change."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._key: tuple[object, ...] = ()
        self._before = self._between = self._after = ""

    def json(self, length: int, ended: bool, label: str) -> str:
        """Return the same as json.dumps(meta_info(...))."""
        request = self._request
        key = (len(request.versions), request.retractions, request.cached_tokens)
        if ended or not length or not request.versions or request.versions[-1][1] >= length:
            return json.dumps(meta_info(request, length, label, ended))
        if key != self._key:
            mark = 1 << 60
            pieces = json.dumps(meta_info(request, mark, label, False)).split(str(mark))
            if len(pieces) != 3:  # the marker occurs in the rid
                return json.dumps(meta_info(request, length, label, ended))
            self._key, (self._before, self._between, self._after) = key, pieces
        return f"{self._before}{length}{self._between}{length}{self._after}"


def _joined(entries: str, more: str) -> str:
    return f"{entries}, {more}" if entries and more else entries or more


class IncrementalDetokenizer:
    """Decodes the tokens of a request incrementally. `shown` only grows.

    A token may be a part of a character, and a decoder may join tokens with spaces. So new tokens are decoded together
    with the tokens before them, and the difference is the new text (as in text-generation-inference). The context
    starts at the end of a character: a byte-fallback decoder garbles bytes that start inside a character. A suffix that
    may be the start of a stop string is held back, since the final text would be cut there.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._stops = () if request.params.no_stop_trim else request.params.stop
        self._context = self._decoded = 0
        self._text = self.shown = ""

    def grow(self, length: int) -> str:
        """Return the text that may be shown after `length` output tokens."""
        ids, skip = self._request.output_ids, self._request.params.skip_special_tokens
        known = self._tokenizer.decode(ids[self._context : self._decoded], skip)
        both = self._tokenizer.decode(ids[self._context : length], skip)
        if not both.endswith("\ufffd"):  # otherwise an incomplete character, which the next token may complete
            self._text += both[len(known) :]
            if len(both) > len(known):  # otherwise the new tokens are skipped tokens, which are no context
                self._context = self._decoded
            self._decoded = length
            self.shown = self._text[: len(self._text) - _held_back(self._text, self._stops)]
        return self.shown


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
    longest = max((min(len(stop) - 1, len(text)) for stop in stops), default=0)
    for n in range(longest, 0, -1):
        if text.endswith(tuple(stop[:n] for stop in stops if len(stop) > n)):
            return n
    return 0
