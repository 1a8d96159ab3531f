"""Continuous batching: who runs, who waits, who is put back. Pure bookkeeping around `ModelRunner.step`.

                submit                admit (copy known prefix, prompt pass)            stop, abort
    HTTP side ----------> waiting ------------------------------------> running ----------------> finished
                             ^                                             |                          |
                             +------ retract (keys and values dropped) ----+                          v
                                                                                          keys and values kept for reuse

`running[i]` lives in row i. When one ends, the last row moves into its place, so that rows stay dense. A step
admits what fits, then decodes every running request by one token in the same forward pass.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from rollout_server.cpu_engine.model.runner import CHUNK, BannedTokens, ModelRunner, Prompt, Sampled
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

WAVE_TOKENS = 4096
"""Most new prompt tokens admitted in one step, so that long prompts do not hold up decoding for long."""
WAVE_PAIRS = 1 << 24
"""Most pairs of a new token and a token that it sees, padding included, of the prompts of one step: each takes 4 bytes
in the mask of each window, and as many in the scores of each head."""
HEADROOM = 32
"""Tokens by which a newcomer must fit beyond its prompt, so that it is not put back at once."""


class Scheduler:
    """Owned by the engine thread.

    version     labels new tokens
    generation  counts weights and keys the prefix cache
    wake_loop   called when requests have been notified, once for all of a step
    """

    def __init__(
        self, runner: ModelRunner, stopping: StopCriteria, counters: EngineCounters, max_running: int, version: str
    ) -> None:
        self.runner, self.stopping, self.counters = runner, stopping, counters
        self.max_running, self.version, self.generation = max_running, version, 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.cache = PrefixCache()
        self.wake_loop: Callable[[], None] = lambda: None
        self._submitted = 0
        self._ended: list[Request] = []

    @property
    def used_tokens(self) -> int:
        """Tokens of the running requests."""
        return int(self.runner.length[: len(self.running)].sum())

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._submitted += 1
        request.order = self._submitted
        request.end_ids = self.stopping.end_ids(request)
        self.waiting.append(request)

    def step(self) -> None:
        """Advance every running request by one token and start those that fit; tell listeners of streams and of
        ends."""
        self._make_room()
        active = len(self.running)
        prompts = self._admit()
        if not self.running:
            return
        sampled = self.runner.step(active, prompts, self._bans(), self._wanted_tops())
        started = list(zip(self.running[active:], prompts, strict=True))
        for request, prompt in started:
            self._started(request, prompt)
        self._advance(sampled, {request: prompt.scores for request, prompt in started})
        self._flush_ended()

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        """End every chosen request, running or waiting, with what it has."""
        for request in [r for r in self.waiting if chosen(r)]:
            self.waiting.remove(request)
            self._end(request, ABORTED_WAITING)
        for request in sorted((r for r in self.running if chosen(r)), key=lambda r: -r.row):
            self._leave_row(request)
            self._end(request, ABORTED)
        self._flush_ended()

    def retract_all(self) -> None:
        """Put every running request back in the queue, before those that never ran, in order of arrival."""
        for request in sorted(self.running, key=lambda r: -r.order):
            self._retract(request)

    def drop_everything(self, message: str) -> None:
        """After an error inside a step: end what ran with status 500 and forget all keys and values."""
        if not self.running and self.waiting:  # not even the first could start: it would fail again for ever
            self._end(self.waiting.popleft(), failed(message))
        for request in list(self.running):
            self.cache.withdraw(request)
            self.runner.kv.scrub(request.row)
            request.row = -1
            self._end(request, failed(message))
        self.running.clear()
        self.cache.clear()
        self._flush_ended()

    def weights_changed(self) -> None:
        """New weights: nothing that was computed before may be reused, not even from rows that go on."""
        self.generation += 1
        self.cache.clear()
        for request in self.running:
            self.cache.withdraw(request)

    def _make_room(self) -> None:
        """Put back the newest until one more token of every row fits."""
        kv = self.runner.kv
        while self.running:
            longest = int(self.runner.length[: len(self.running)].max()) + 1
            if kv.fits(len(self.running), longest):
                kv.reserve(len(self.running), longest)
                self.cache.trim(kv.budget - kv.tokens)
                return
            self._retract(max(self.running, key=lambda r: r.order))

    def _admit(self) -> list[Prompt]:
        """Give free rows to waiting requests, first come first served; their prompts, prefix already in place.

        A request that shares a longer prefix with another newcomer of this very step than with anything known waits one
        step: then it copies that newcomer's row instead of computing the same again.
        """
        kv, lengths = self.runner.kv, self.runner.length
        # one more than what is stored: the step writes the next token of every running row
        longest = int(lengths[: len(self.running)].max()) + 1 if self.running else 0
        budget, new_longest, new_width = WAVE_TOKENS, 0, 0
        prompts: list[Prompt] = []
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
                new = (len(ids) - shared - 1) % CHUNK + 1  # what the runner computes beside others
                new_longest, new_width = max(new_longest, new), max(new_width, len(ids))
                if prompts and (len(prompts) + 1) * new_longest * new_width > WAVE_PAIRS:
                    self.waiting.appendleft(request)
                    break
                newcomers.update(request.block_keys)
                longest = needed
                prompts.append(self._take_row(request, ids, holder, shared, longest))
                budget -= len(ids) - shared
        finally:
            self.waiting.extendleft(reversed(put_off))
        return prompts

    def _awaits_scores(self, request: Request) -> bool:
        """Whether the first attempt at this prompt is still to score it; takes over its scores where they are there."""
        first = request.first
        if first is None or not request.scores_prompt:
            return False
        if first.input_logprobs is not None and first.generation == self.generation:
            request.input_logprobs, request.input_top = first.input_logprobs, first.input_top
        return first.input_logprobs is None and first.finish is None

    def _keys(self, request: Request, ids: list[int]) -> list[int]:
        """The chain of `ids` under the present weights; the prompt's own is remembered with the request."""
        if request.generation != self.generation:
            request.block_keys = chain(request.prompt_ids, request.extra_key, self.generation)
            request.generation = self.generation
        # one that was put back may find its own output again
        return chain(ids, request.extra_key, self.generation) if request.output_ids else request.block_keys

    def _take_row(
        self, request: Request, ids: list[int], holder: CachedPrefix | Request | None, shared: int, longest: int
    ) -> Prompt:
        kv, row = self.runner.kv, len(self.running)
        request.row = row
        self.running.append(request)  # before anything can fail, so that it is answered then
        kv.reserve(row + 1, longest)
        if isinstance(holder, CachedPrefix):
            kv.restore(row, holder.payload, shared)
        elif holder is not None:
            kv.copy(holder.row, row, shared)
        self.cache.trim(kv.budget - kv.tokens)
        if not request.retractions:
            request.cached_tokens = shared
        self.counters.prompt_tokens += len(ids)
        self.counters.cached_tokens += shared
        score = max(request.logprob_start, 0) if request.scores_prompt else None
        return Prompt(ids, shared, request.params, request.seed, score, request.adapter, request.top_logprobs)

    def _started(self, request: Request, prompt: Prompt) -> None:
        if prompt.score_from is not None:
            request.input_logprobs, request.input_top = prompt.scores, prompt.tops
        self.cache.lend(request)

    def _bans(self) -> list[BannedTokens]:
        """End tokens of the requests that have not reached min_new_tokens."""
        return [
            BannedTokens(row, sorted(r.end_ids))
            for row, r in enumerate(self.running)
            if r.params.min_new_tokens > len(r.output_ids) and r.end_ids
        ]

    def _wanted_tops(self) -> dict[int, int]:
        return {row: r.top_logprobs for row, r in enumerate(self.running) if r.top_logprobs}

    def _advance(self, sampled: Sampled, new_scores: Mapping[Request, list[float]]) -> None:
        """Give each running request its token, then take those out that ended; `new_scores`: of prompts of this
        step."""
        version, now, check = self.version, time.perf_counter(), self.stopping.check
        ends: list[tuple[Request, Finish]] = []
        for request, token, logprob in zip(self.running, sampled.tokens, sampled.logprobs, strict=True):
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
        self.counters.count_tokens(len(self.running), now)
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
        """Keep the row's keys and values for reuse where they are of the present weights, and close the gap."""
        runner, row = self.runner, request.row
        self.cache.withdraw(request)
        length = int(runner.length[row])
        room = runner.kv.budget - runner.kv.tokens
        if request.generation == self.generation and BLOCK <= length <= room:
            ids = (request.prompt_ids + request.output_ids)[:length]
            keys = chain(ids, request.extra_key, self.generation)
            self.cache.keep(ids, keys, runner.kv.save(row, length))
            self.cache.trim(room)
        last = self.running.pop()
        if last is not request:
            runner.move(last.row, row)
            last.row = row
            self.running[row] = last
        request.row = -1

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
    """Requests whose rid starts with `rid`: SGLang's scheduler compares so, aborting "r1" aborts "r10" too."""
    return lambda request: request.rid.startswith(rid)


def one_of(requests: Iterable[Request]) -> Callable[[Request], bool]:
    """Exactly these requests."""
    chosen = set(requests)
    return lambda request: request in chosen
