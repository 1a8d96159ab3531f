"""Continuous batching: running, waiting and retracted requests. Pure bookkeeping around `ModelRunner.step`.

                submit                admit (copy known prefix, prompt passes)            stop, abort
    HTTP side ----------> waiting ------------------------------------> running ----------------> finished
                             ^                                             |                          |
                             +------ retract (keys and values dropped) ----+                          v
                                                                                          keys and values kept for reuse

`running[i]` uses row i. When a request ends, the last row moves into its place, so that rows stay dense. A step admits
requests that fit, and decodes every running request by one token in the same forward pass. A long prompt is computed
in parts, one per step, so that others keep decoding (chunked prefill). It has the last row until it is complete.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from rollout_server.cpu_engine.model.runner import BannedTokens, ModelRunner, Prompt, Sampled
from rollout_server.cpu_engine.scheduler.kv_cache import round_up
from rollout_server.cpu_engine.scheduler.prefix_cache import BLOCK, CachedPrefix, PrefixCache, chain
from rollout_server.cpu_engine.scheduler.request import (
    ABORTED,
    ABORTED_WAITING,
    EngineCounters,
    Finish,
    Request,
    StopCriteria,
    failed,
)

log = logging.getLogger(__name__)

CHUNK = 1024
"""Maximum new tokens of one prompt per step: bounds the attention mask and scores."""
WAVE_TOKENS, WAVE_PRODUCTS, LEAST_TOKENS = 4096, 1 << 36, 64
"""Maximum new prompt tokens per step, and products of a parameter and a new prompt token, so that no step delays
decoding for long: about 2 s on a slow core. But at least LEAST_TOKENS tokens."""
WAVE_PAIRS = 1 << 24
"""Maximum number of (new token, visible token) pairs of the prompts in one step, padding included. Each pair takes 4
bytes in the mask of each window, and 4 bytes in the scores of each head."""
HEADROOM = 32
"""Free tokens required beyond the prompt of a new request, so that it is not retracted at once."""


class Scheduler:
    """Owned by the engine thread.

    version     label of new tokens
    generation  incremented at each weight change; part of the prefix cache keys
    wake_loop   called after requests have been notified, once per step
    """

    def __init__(
        self, runner: ModelRunner, stopping: StopCriteria, counters: EngineCounters, max_running: int, version: str
    ) -> None:
        self.runner, self.stopping, self.counters = runner, stopping, counters
        self.max_running, self.version, self.generation = max_running, version, 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.cache = PrefixCache()
        parameters = sum(place.view.numel() for place in runner.model.weights.places.values())
        self.wave = min(WAVE_TOKENS, max(LEAST_TOKENS, WAVE_PRODUCTS // parameters))
        """Maximum new prompt tokens per step."""
        self._partial: Prompt | None = None
        """The prompt of the last row, if not all of it has been computed."""
        self.wake_loop: Callable[[], None] = lambda: None
        self._submitted = 0
        self._ended: list[Request] = []

    @property
    def used_tokens(self) -> int:
        """Number of tokens of the running requests."""
        return int(self.runner.length[: len(self.running)].sum())

    @property
    def row_tokens(self) -> int:
        """Allocated memory of the rows in tokens, padding included; 0 if no request runs."""
        return self.runner.kv.tokens if self.running else 0

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._submitted += 1
        request.order = self._submitted
        request.end_ids = self.stopping.end_ids(request)
        self.waiting.append(request)

    def step(self) -> None:
        """Advance every running request by one token, start requests that fit, and call `notify` where due."""
        self._make_room()
        active = len(self.running) - (self._partial is not None)
        prompts = self._prompts()
        if not self.running:
            return
        self._partial = prompts[-1] if prompts and prompts[-1].end < len(prompts[-1].ids) else None
        ready = self.running[:-1] if self._partial is not None else self.running[:]
        self.counters.computed_tokens += sum(prompt.end - prompt.start for prompt in prompts)
        sampled = self.runner.step(active, prompts, self._bans(ready), self._wanted_tops(ready))
        started = list(zip(ready[active:], prompts, strict=False))
        for request, prompt in started:
            self._started(request, prompt)
        self._advance(ready, sampled, {request: prompt.scores for request, prompt in started})
        self._flush_ended()

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        """End every chosen request, running or waiting, with its tokens so far."""
        for request in [r for r in self.waiting if chosen(r)]:
            self.waiting.remove(request)
            self._end(request, ABORTED_WAITING)
        for request in sorted((r for r in self.running if chosen(r)), key=lambda r: -r.row):
            self._leave_row(request)
            self._end(request, ABORTED)
        self._flush_ended()

    def retract_all(self) -> None:
        """Requeue every running request, before those that never ran, in order of arrival."""
        for request in sorted(self.running, key=lambda r: -r.order):
            self._retract(request)

    def drop_everything(self, message: str) -> None:
        """End the running requests with status 500 and drop the KV cache, after an error in a step."""
        if not self.running and self.waiting:  # the first request could not start and would fail for ever
            self._end(self.waiting.popleft(), failed(message))
        for request in self.running:
            self.cache.withdraw(request)
            request.row = -1
            self._end(request, failed(message))
        self.running.clear()
        self._partial = None
        self.runner.kv.shrink()
        self.cache.clear()
        self._flush_ended()

    def weights_changed(self) -> None:
        """Invalidate all cached keys and values, also those of rows that continue, after a weight change.

        A prompt in parts starts again: its scores and first token are of one version.
        """
        self.generation += 1
        if self._partial is not None:
            self._retract(self.running[-1])
        self.cache.clear()
        for request in self.running:
            self.cache.withdraw(request)

    @property
    def _longest(self) -> int:
        """Number of tokens that the longest row holds after the next step."""
        decoding = len(self.running) - (self._partial is not None)
        written = int(self.runner.length[:decoding].max()) + 1 if decoding else 0
        return max(written, len(self._partial.ids) if self._partial is not None else 0)

    def _make_room(self) -> None:
        """Retract the newest requests until one more token per row fits."""
        kv = self.runner.kv
        while self.running:
            if kv.fits(len(self.running), longest := self._longest):
                kv.reserve(len(self.running), longest, kv.budget - self.cache.tokens)
                self.cache.trim(kv.budget - kv.tokens)
                return
            self._retract(max(self.running, key=lambda r: r.order))

    def _prompts(self) -> list[Prompt]:
        """Return the prompts of this step: the next part of the last one, alone, or those of new requests."""
        if self._partial is None:
            return self._admit() if self.waiting else []
        new = len(self._partial.ids) - self._partial.start
        self._partial.end = self._partial.start + self._part(new, len(self._partial.ids), self.wave)
        return [self._partial]

    def _part(self, new: int, width: int, budget: int) -> int:
        """Return how many of the `new` tokens of a prompt of `width` tokens one step computes."""
        return min(new, CHUNK, budget, max(1, WAVE_PAIRS // width))

    def _admit(self) -> list[Prompt]:
        """Assign free rows to waiting requests, first come, first served. Return their prompts, with prefixes copied.

        A request that shares a longer prefix with another new request of this step than with any known sequence waits
        one step, and then copies that request's row instead of computing the prefix again. A prompt that one step
        cannot compute is the only one of its first step.
        """
        kv, longest = self.runner.kv, self._longest
        budget, new_longest, new_width = self.wave, 0, 0
        prompts: list[Prompt] = []
        holders: list[CachedPrefix | Request | None] = []
        put_off: list[Request] = []
        newcomers: set[int] = set()
        try:
            while self.waiting and len(self.running) < self.max_running and budget > 0:
                request = self.waiting[0]
                ids = request.prompt_ids + request.output_ids
                needed = max(longest, len(ids))
                roomy = min(needed + HEADROOM, kv.budget) if self.running else needed
                if not kv.fits(len(self.running) + 1, roomy):
                    break
                self.waiting.popleft()
                if self._awaits_scores(request):
                    put_off.append(request)
                    continue
                keys = self._keys(request, ids)
                most = min(len(ids) - 1, request.logprob_start) if request.scores_prompt else len(ids) - 1
                holder, shared = self.cache.find(ids, keys, most)
                if any(key in newcomers for key in keys[shared // BLOCK : most // BLOCK]):
                    put_off.append(request)
                    continue
                new = self._part(len(ids) - shared, len(ids), budget)
                new_longest, new_width = max(new_longest, new), max(new_width, len(ids))
                pairs = (len(prompts) + 1) * new_longest * new_width
                if prompts and (new < len(ids) - shared or pairs > WAVE_PAIRS):
                    self.waiting.appendleft(request)
                    break
                newcomers.update(request.block_keys)
                longest = needed
                holders.append(holder)
                prompts.append(self._take_row(request, ids, shared, shared + new))
                budget = budget - new if prompts[-1].end == len(ids) else 0
        finally:
            self.waiting.extendleft(reversed(put_off))
        self._copy_prefixes(prompts, holders, longest)
        return prompts

    def _awaits_scores(self, request: Request) -> bool:
        """Return whether the first sample of this prompt must still score it. Copies its scores if they exist."""
        first = request.first
        if first is None or not request.scores_prompt:
            return False
        if first.input_logprobs is not None and first.generation == self.generation:
            request.input_logprobs, request.input_top = first.input_logprobs, first.input_top
        return first.input_logprobs is None and first.finish is None

    def _keys(self, request: Request, ids: list[int]) -> list[int]:
        """Return the hash chain of `ids` for the current weights. The chain of the prompt is cached in the request."""
        if request.generation != self.generation:
            request.block_keys = chain(request.prompt_ids, request.extra_key, self.generation)
            request.generation = self.generation
        # a retracted request may find its own output in the cache
        return chain(ids, request.extra_key, self.generation) if request.output_ids else request.block_keys

    def _take_row(self, request: Request, ids: list[int], shared: int, end: int) -> Prompt:
        request.row = len(self.running)
        self.running.append(request)  # before anything can fail, so that the request gets an answer
        self.runner.length[request.row] = shared
        if not request.retractions:
            request.cached_tokens = shared
        self.counters.prompt_tokens += len(ids)
        self.counters.cached_tokens += shared
        score = max(request.logprob_start, 0) if request.scores_prompt else None
        return Prompt(ids, shared, end, request.params, request.seed, score, request.adapter, request.top_logprobs)

    def _copy_prefixes(self, prompts: list[Prompt], holders: list[CachedPrefix | Request | None], longest: int) -> None:
        """Allocate the newest rows, of `prompts`, and copy their known prefixes into them."""
        kv = self.runner.kv
        kv.reserve(len(self.running), longest, kv.budget - self.cache.tokens)
        first = len(self.running) - len(prompts)
        for row, (prompt, holder) in enumerate(zip(prompts, holders, strict=True), first):
            if isinstance(holder, CachedPrefix):
                kv.restore(row, holder.payload, prompt.start)
            elif holder is not None:
                kv.copy(holder.row, row, prompt.start)
        self.cache.trim(kv.budget - kv.tokens)

    def _started(self, request: Request, prompt: Prompt) -> None:
        if prompt.score_from is not None:
            request.input_logprobs, request.input_top = prompt.scores, prompt.tops
        self.cache.lend(request)

    def _bans(self, ready: list[Request]) -> list[BannedTokens]:
        """Return bans on end tokens for requests below min_new_tokens."""
        return [
            BannedTokens(row, sorted(r.end_ids))
            for row, r in enumerate(ready)
            if r.params.min_new_tokens > len(r.output_ids) and r.end_ids
        ]

    def _wanted_tops(self, ready: list[Request]) -> dict[int, int]:
        return {row: r.top_logprobs for row, r in enumerate(ready) if r.top_logprobs}

    def _advance(self, ready: list[Request], sampled: Sampled, new_scores: Mapping[Request, list[float]]) -> None:
        """Append a token to each ready request and remove those that ended. `new_scores`: prompts of this step."""
        version, now, check = self.version, time.perf_counter(), self.stopping.check
        ends: list[tuple[Request, Finish]] = []
        for request, token, logprob in zip(ready, sampled.tokens, sampled.logprobs, strict=True):
            if not (math.isfinite(logprob) and all(map(math.isfinite, new_scores.get(request, ())))):
                self.runner.kv.scrub(request.row)
                self.runner.length[request.row] = 0
                request.input_logprobs, request.input_top = None, []
                ends.append((request, failed("the model's output is not finite")))
                continue
            if request.limit == 0:  # score only
                ends.append((request, {"type": "length", "length": 0}))
                continue
            if not request.output_ids:
                request.first_token_at = now
            if not request.versions or request.versions[-1][0] != version:
                request.versions.append((version, len(request.output_ids)))
            request.output_ids.append(token)
            request.output_logprobs.append(logprob)
            if request.top_logprobs:
                request.output_top.append(sampled.top[request.row])
            finish = check(request)
            if finish is not None:
                ends.append((request, finish))
            elif request.due(len(request.output_ids)):
                request.notify(request, len(request.output_ids))
        self.counters.count_tokens(len(ready), now)
        for request, finish in sorted(ends, key=lambda pair: -pair[0].row):
            self._leave_row(request)
            self._end(request, finish)

    def _retract(self, request: Request) -> None:
        self._leave_row(request)
        request.retractions += 1
        self.counters.retractions += 1
        at = next((i for i, other in enumerate(self.waiting) if other.order > request.order), len(self.waiting))
        self.waiting.insert(at, request)

    def _leave_row(self, request: Request) -> None:
        """Keep the row's keys and values for reuse if they belong to the current weights, and close the gap."""
        kv, row = self.runner.kv, request.row
        self.cache.withdraw(request)
        length = int(self.runner.length[row])
        ids = (request.prompt_ids + request.output_ids)[:length]
        current = request.generation == self.generation and length >= BLOCK
        payload = kv.save(row, length) if current else None
        self._close_gap(row)
        request.row = -1
        room = self._room(length if current else 0)
        if payload is not None and length <= room:
            self.cache.keep(ids, chain(ids, request.extra_key, self.generation), payload)
            self.cache.trim(room)

    def _close_gap(self, row: int) -> None:
        """Remove a row. The last one takes its place; if that is a prompt in parts, which must stay last, both do."""
        tail = len(self.running) - 1
        if row == tail:
            self._partial = None
        for last in (tail,) if self._partial is None else (tail - 1, tail):
            if row < last:
                self.runner.move(last, row)
                self.running[row] = self.running[last]
                self.running[row].row = row
                row = last
        self.running.pop()

    def _room(self, more: int) -> int:
        """Return the room for prefixes in tokens, after freeing unused rows if it is short of `more`."""
        kv, rows = self.runner.kv, len(self.running)
        if self.cache.tokens + more > kv.budget - kv.tokens:
            longest = self._longest
            if 2 * kv.tokens > 3 * rows * round_up(longest):  # not at every change: it costs a copy of all rows
                kv.shrink(rows, longest)
        return kv.budget - kv.tokens

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish, request.ended_at = finish, time.perf_counter()
        self.counters.count_end(request)
        self._ended.append(request)

    def _flush_ended(self) -> None:
        ended, self._ended = self._ended, []
        for request in ended:
            request.notify(request, len(request.output_ids))
        self.wake_loop()


def by_prefix(rid: str) -> Callable[[Request], bool]:
    """Match requests whose rid starts with `rid`, as in SGLang: aborting "r1" also aborts "r10"."""
    return lambda request: request.rid.startswith(rid)


def one_of(requests: Iterable[Request]) -> Callable[[Request], bool]:
    """Match exactly these requests."""
    chosen = set(requests)
    return lambda request: request in chosen
