"""Answers of OpenAI's routes, complete or streamed. Pure.

The format is OpenAI's with two additions of SGLang: `matched_stop` in a choice, and `metadata` with the weight version.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.scheduler.request import Request, visible_text
from rollout_server.cpu_engine.server.openai_bodies import CompletionCall
from rollout_server.cpu_engine.server.response import IncrementalDetokenizer, meta_info

Object = dict[str, Any]
Kind = Literal["text_completion", "chat.completion"]
Best = Sequence[tuple[float, int]]


class OpenAIResponse:
    """The answer to one call: `whole`, or the events of a stream from `chunk` and `last`. `created`: Unix time."""

    def __init__(
        self, kind: Kind, asked: CompletionCall, requests: list[Request], model: str, created: int, tokenizer: Tokenizer
    ) -> None:
        self._asked, self._requests, self._tokenizer, self._chat = asked, requests, tokenizer, kind != "text_completion"
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{requests[0].rid}"
        self._kind = kind
        self._head = {"id": name, "created": created, "model": asked.model or model}
        self._texts = [IncrementalDetokenizer(request, tokenizer) for request in requests]
        self._sent: list[int | None] = [None] * len(requests)
        self._offsets = [0] * len(requests)
        """For each request: text offset of the next token."""

    def whole(self, label: str) -> Object:
        """Return the answer after all requests have ended. `label`: the engine's current weight version."""
        choices = []
        for number, request in enumerate(self._requests):
            text = visible_text(request, len(request.output_ids), self._tokenizer)
            choice = self._choice(number, None, len(request.output_ids), text) | _finish(request)
            if self._chat:
                choice["message"] = choice.pop("delta")
            choices.append(choice)
        meta = meta_info(self._requests[0], len(self._requests[0].output_ids), label, True)
        known = {name: meta[name] for name in ("weight_version", "weight_versions")}
        return {**self._head, "object": self._kind, "choices": choices, "usage": self._usage(), "metadata": known}

    def chunk(self, number: int, length: int, ended: bool) -> bytes:
        """Return the event with the new text of request `number` after `length` tokens; empty if it is held back."""
        request, start = self._requests[number], self._sent[number]
        before = self._texts[number].shown
        if ended:
            text = visible_text(request, length, self._tokenizer)[len(before) :]
        else:
            text = self._texts[number].grow(length)[len(before) :]
        if not text and not ended and start is not None:
            return b""
        self._sent[number] = length
        events = []
        if self._chat and start is None:
            events.append({"index": number, "delta": {"role": "assistant", "content": ""}, "logprobs": None})
        if text or length > (start or 0) or not self._chat:
            events.append(self._choice(number, start, length, text))
        if ended and self._chat:
            events.append({"index": number, "delta": {}, "logprobs": None})
        for event in events:
            event |= {"finish_reason": None, "matched_stop": None}
        if ended:
            events[-1] |= _finish(request)
        return b"".join(self._event(choices=[event]) for event in events) + (self._failure(request) if ended else b"")

    def last(self) -> bytes:
        """Return the event with the usage, if it was requested."""
        return self._event(choices=[], usage=self._usage()) if self._asked.include_usage else b""

    def _event(self, **fields: Any) -> bytes:
        kind = "chat.completion.chunk" if self._chat else self._kind
        return f"data: {json.dumps({**self._head, 'object': kind, 'usage': None, **fields})}\n\n".encode()

    def _failure(self, request: Request) -> bytes:
        finish = request.finish or {}
        if not finish.get("status_code"):
            return b""
        error = {"message": finish["message"], "type": "server_error", "param": None, "code": finish["status_code"]}
        return f"data: {json.dumps({'error': error})}\n\n".encode()

    def _choice(self, number: int, start: int | None, end: int, text: str) -> Object:
        """Return the choice with output tokens start..end-1 of request `number`; `start` None: all, with the echo."""
        request, wanted = self._requests[number], self._asked.logprobs
        if self._chat:
            role = {"role": "assistant"} if start is None and request.finish else {}
            content = {"content": self._chat_logprobs(request, start or 0, end)} if wanted else None
            return {"index": number, "delta": {**role, "content": text}, "logprobs": content}
        shown = self._asked.echo(number) + text if start is None else text
        return {
            "index": number,
            "text": shown,
            "logprobs": self._text_logprobs(number, start, end) if wanted else None,
        }

    def _chat_logprobs(self, request: Request, start: int, end: int) -> list[Object]:
        none: list[Best] = [()] * (end - start)
        tops: Sequence[Best] = request.output_top[start:end] or none
        return [
            {**self._token(logprob, token), "top_logprobs": [self._token(*pair) for pair in best]}
            for token, logprob, best in zip(
                request.output_ids[start:end], request.output_logprobs[start:end], tops, strict=True
            )
        ]

    def _token(self, logprob: float, token: int) -> Object:
        return {
            "token": self._tokenizer.spelling(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.bytes_of(token)),
        }

    def _text_logprobs(self, number: int, start: int | None, end: int) -> Object:
        """Return OpenAI's four lists. Each call continues where the previous one ended.

        Echoed prompt tokens come first; the first of them has no log-prob.
        """
        request, spelling = self._requests[number], self._tokenizer.spelling
        ids = request.output_ids[start or 0 : end]
        logprobs: list[float | None] = [*request.output_logprobs[start or 0 : end]]
        tops: list[Best | None] = [*request.output_top[start or 0 : end]]
        echoed = 0
        if start is None and self._asked.echoes is not None and request.input_logprobs is not None:
            ids, echoed = request.prompt_ids + ids, len(request.prompt_ids)
            logprobs = [None, *request.input_logprobs, *logprobs]
            tops = [None, *request.input_top, *tops]
        offsets, at, echo = [], self._offsets[number], self._asked.echo(number)
        for place, token in enumerate(ids):
            offsets.append(at)
            text = spelling(token)
            special = self._tokenizer.is_special(token)
            absent = not echo.startswith(text, at) if place < echoed else request.params.skip_special_tokens
            at += 0 if special and absent else len(text)
        self._offsets[number] = at
        named = [
            None if best is None else self._best(best, token, logprob)
            for best, token, logprob in zip(tops, ids, logprobs, strict=False)
        ]
        return {
            "tokens": [spelling(token) for token in ids],
            "token_logprobs": logprobs,
            "top_logprobs": named if self._asked.top else None,
            "text_offset": offsets,
        }

    def _best(self, best: Best, token: int, logprob: float | None) -> dict[str, float]:
        """Return the best tokens by spelling (the most likely of equal spellings), and always the token itself."""
        found: dict[str, float] = {}
        for value, other in best:
            found.setdefault(self._tokenizer.spelling(other), value)
        if logprob is not None:
            found.setdefault(self._tokenizer.spelling(token), logprob)
        return found

    def _usage(self) -> Object:
        """Return the usage. A prompt counts once for all its samples."""
        firsts = self._requests[:: self._asked.samples]
        prompt, made = sum(len(r.prompt_ids) for r in firsts), sum(len(r.output_ids) for r in self._requests)
        cached = sum(r.cached_tokens for r in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _finish(request: Request) -> Object:
    finish = request.finish or {}
    return {"finish_reason": finish.get("type"), "matched_stop": finish.get("matched")}
