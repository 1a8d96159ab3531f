"""One generation request: parameters, output so far, finish reason. Also the engine's counters and stop criteria."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protocol.runtime.metrics import Histogram
from rollout_server.cpu_engine.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rollout_server.cpu_engine.model.lora import Adapter

Finish = dict[str, Any]
"""SGLang's `finish_reason`."""

ABORTED: Finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: Finish = {"type": "abort", "message": "Abort in waiting queue"}


def failed(message: str) -> Finish:
    """Return the finish reason of a request that failed in the engine (HTTP 500)."""
    return {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SGLang's sampling_params, validated. `top_k` 1 is greedy (also for temperature 0); 1 << 30 has no effect.

    stream_interval  tokens per chunk of a stream; 0: one
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1 << 30
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    sampling_seed: int | None = None
    stream_interval: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request. Its lists only grow, on the engine thread; the HTTP side reads prefixes of the length in `notify`.

    versions  [label, index of the first output token with it], in order
    first     the first sample of the same prompt, which scores it for all; None: this one
    extra_key requests share cached prefixes only with the same key; differs between adapters
    seed      64 bits; seed and position determine each sample
    limit     maximum output tokens: max_new_tokens, or less if they would not fit into context or cache
    notify    called with the number of output tokens at the end, and for `stream_interval` n > 0 after the first
              token and every n tokens after it
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    limit: int
    notify: Callable[[Request, int], None]
    end_ids: frozenset[int] = frozenset()
    stream_interval: int = 0
    return_logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    logprob_texts: bool = False
    extra_key: str = ""
    adapter: Adapter | None = None
    arrived: float = 0.0
    first: Request | None = None

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float] | None = None
    input_top: list[list[tuple[float, int]]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0
    finish: Finish | None = None
    first_token_at: float = 0.0
    ended_at: float = 0.0
    row: int = -1
    generation: int = -1
    order: int = 0
    block_keys: list[int] = field(default_factory=list)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probs of prompt tokens must still be computed."""
        return self.return_logprob and self.logprob_start >= 0 and self.input_logprobs is None

    def due(self, length: int) -> bool:
        """Return whether a chunk is due after `length` tokens: after 1, n + 1, 2n + 1, ..., as in SGLang."""
        n = self.stream_interval
        return n == 1 or (n > 1 and length % n == 1)

    def spans(self, length: int) -> list[dict[str, Any]]:
        """Return SGLang's `weight_versions` of the first `length` output tokens: half-open [start, end)."""
        ends = [start for _, start in self.versions[1:]] + [length]
        return [
            {"version": label, "start": start, "end": min(end, length)}
            for (label, start), end in zip(self.versions, ends, strict=False)
            if start < length
        ]


@dataclass
class EngineCounters:
    """Totals since the start. Written by the engine thread only, read by any thread.

    computed_tokens  prompt tokens in forward passes, counted before each
    throughput       generated tokens per second, over about the last second of work
    step_began       time (perf_counter) at which the step in progress began; 0.0: none is
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    step_errors: int = 0
    weight_updates: int = 0
    throughput: float = 0.0
    step_began: float = 0.0
    first_token: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    _since: float = 0.0
    _tokens: int = 0
    _slowest_s: float = 0.0

    def end_step(self, now: float) -> None:
        """Note the duration of the step that ends at time `now` (perf_counter)."""
        self._slowest_s = max(now - self.step_began, 0.95 * self._slowest_s)
        self.step_began = 0.0

    @property
    def pace_s(self) -> float:
        """Seconds of the slowest recent step, the one in progress included. Half-life of an earlier one: 14 steps."""
        began = self.step_began
        return max(self._slowest_s, time.perf_counter() - began if began else 0.0)

    def count_tokens(self, tokens: int, now: float) -> None:
        """Count a step that generated `tokens` tokens, at time `now` (perf_counter)."""
        self.steps += 1
        self.generated_tokens += tokens
        self._tokens += tokens
        if now - self._since > 5.0:  # restart after an idle time instead of averaging it in
            self._since, self._tokens = now, 0
        elif now - self._since >= 1.0:
            self.throughput = self._tokens / (now - self._since)
            self._since, self._tokens = now, 0

    def count_end(self, request: Request) -> None:
        """Count a request that has ended."""
        self.requests += 1
        self.aborted += bool(request.finish and request.finish["type"] == "abort")
        self.latency.observe(request.ended_at - request.arrived)
        if request.first_token_at:
            self.first_token.observe(request.first_token_at - request.arrived)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class StopStrings:
    """A set of stop strings for a tokenizer, shared by all requests with the same set.

    A stop string may span tokens, and a token may be a part of a character, so the tail of the output must be decoded.
    Decoding at every token would cost more than the forward pass of a small model. But a stop string can end inside the
    newest token only if a prefix of the token's text is a suffix of the stop string, or the text contains it. This is
    computed once per token id, and nearly always False.
    """

    def __init__(self, stops: tuple[str, ...], tokenizer: Tokenizer) -> None:
        self.stops, self._tokenizer = stops, tokenizer
        # a character takes up to 4 byte tokens; the margin is for tokens without text
        self._window = 4 * max(len(stop) for stop in stops) + 8
        self._may_end: dict[int, bool] = {}

    def hit(self, ids: list[int]) -> str | None:
        """Return the first stop string (in the given order) in the decoded tail of `ids`, or None."""
        newest = ids[-1]
        may_end = self._may_end.get(newest)
        if may_end is None:
            may_end = self._may_end[newest] = self._can_end_with(newest)
        if not may_end:
            return None
        tail = self._tokenizer.decode(ids[-self._window :], False)
        return next((stop for stop in self.stops if stop in tail), None)

    def _can_end_with(self, token: int) -> bool:
        text = self._tokenizer.decode([token], False)
        if not text or "\ufffd" in text:
            return True
        # tokenizers drop or add spaces between words, which a single token does not show
        return any(_reaches(stop, form) for stop in self.stops for form in (text, text.lstrip(), " " + text))


def _reaches(stop: str, text: str) -> bool:
    return stop in text or any(text.startswith(stop[-n:]) for n in range(1, min(len(stop), len(text)) + 1))


class StopCriteria:
    """Decides after each token whether a request ends. Requests with the same stop strings share a StopStrings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._strings: dict[tuple[str, ...], StopStrings] = {}

    def end_ids(self, request: Request) -> frozenset[int]:
        """Return the tokens that end `request`; none with ignore_eos, which in SGLang also disables stop_token_ids."""
        params = request.params
        return frozenset() if params.ignore_eos else self._tokenizer.eos_ids | params.stop_token_ids

    def check(self, request: Request) -> Finish | None:
        """Return why `request` ends with its newest token, or None. Checks the length first, as SGLang does."""
        ids = request.output_ids
        if len(ids) >= request.limit:
            return {"type": "length", "length": len(ids)}
        if ids[-1] in request.end_ids:
            return {"type": "stop", "matched": ids[-1]}
        if request.params.stop:
            matched = self._of(request.params.stop).hit(ids)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        return None

    def _of(self, stops: tuple[str, ...]) -> StopStrings:
        found = self._strings.get(stops)
        if found is None:
            if len(self._strings) >= 256:  # bounds memory if a client always sends new sets
                self._strings.clear()
            found = self._strings[stops] = StopStrings(stops, self._tokenizer)
        return found


def visible_text(request: Request, length: int, tokenizer: Tokenizer) -> str:
    """Return the text of the first `length` output tokens, cut before the stop string or token, as in SGLang.

    With no_stop_trim the stop string is included; the newest token may extend beyond it. The ids are never cut.
    """
    ids, params, finish = request.output_ids[:length], request.params, request.finish
    matched = finish.get("matched") if finish else None
    if isinstance(matched, int) and not params.no_stop_trim and ids and ids[-1] == matched:
        ids.pop()
    text = tokenizer.decode(ids, params.skip_special_tokens)
    if isinstance(matched, str) and (at := text.find(matched)) >= 0:
        return text[: at + len(matched)] if params.no_stop_trim else text[:at]
    return text
