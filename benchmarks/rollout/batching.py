"""Model of an engine with finite capacity: continuous batching, chunked prefill, a prefix cache. Pure.

One step of the engine writes one token of every running request, and computes the missing tokens of new prompts:

    seconds = slowness * (step_s + request_s * requests + prefill_s * prompt tokens computed)

`step_s` models reading the weights, `request_s` attention and sampling of one request: the time of a step grows with
the load, and the tokens/s of a single request fall. Requests beyond `max_running` wait in a queue. Prompt tokens whose
blocks are in the prefix cache cost nothing. (Orca, OSDI 2022; vLLM's block hashes, arXiv
2309.06180; chunked prefill, arXiv 2308.16369.)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Speed:
    """Cost of a step, in seconds, and limits of one engine. The defaults have the proportions of a 7B model on one
    GPU, at about a third of its speed: decoding 32 requests yields 890 tokens/s, a prefill 10,000 tokens/s.
    """

    slowness: float = 1.0
    step_s: float = 0.02
    request_s: float = 0.0005
    prefill_s: float = 0.0001
    max_running: int = 32
    prefill_chunk: int = 2048
    cache_tokens: int = 65_536

    @property
    def token_s(self) -> float:
        """Return the minimum engine time per token: its share of a step with a full batch."""
        return self.slowness * (self.step_s / self.max_running + self.request_s)

    @property
    def alone_s(self) -> float:
        """Return the minimum time between two tokens of one request."""
        return self.slowness * (self.step_s + self.request_s)


class BlockCache:
    """Blocks of tokens by the hash of everything up to their end, least recently used first."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, ids: Sequence[int]) -> int:
        """Return the number of leading tokens of `ids` in the cache."""
        found = 0
        for key in _block_keys(ids):
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            found += BLOCK_TOKENS
        return found

    def add(self, ids: Sequence[int]) -> None:
        """Add the complete blocks of `ids`."""
        for key in _block_keys(ids):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Clear the cache, as after a weight update."""
        self._blocks.clear()


def _block_keys(ids: Sequence[int]) -> Iterator[int]:
    key = 0
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, *ids[start : start + BLOCK_TOKENS]))
        yield key


class Decoding:
    """One request: its `prompt`, the `output` that the engine will write, and the number of tokens `written`.

    missing  prompt tokens still to compute; `cached`: those found in the prefix cache
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.prompt, self.output = list(prompt), list(output)
        self.written = self.missing = self.cached = 0

    @property
    def done(self) -> bool:
        return self.written == len(self.output)


class BatchingEngine:
    """Requests that run together. The caller waits for the seconds of `step` before it shows its tokens."""

    def __init__(self, speed: Speed, cache: BlockCache | None = None) -> None:
        self.speed = speed
        self.cache = BlockCache(speed.cache_tokens) if cache is None else cache
        self.waiting: deque[Decoding] = deque()
        self.running: list[Decoding] = []

    @property
    def busy(self) -> bool:
        """Return whether a step has work to do."""
        return bool(self.waiting or self.running)

    @property
    def held_tokens(self) -> int:
        """Return the number of tokens of running requests."""
        return sum(len(request.prompt) + request.written for request in self.running)

    def add(self, request: Decoding) -> None:
        """Queue `request`."""
        self.waiting.append(request)

    def drop(self, request: Decoding) -> None:
        """Remove `request` from the queue or the running batch."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def step(self) -> tuple[float, list[Decoding]]:
        """Run a step. Return (its duration in seconds, requests that got a token). Finished requests are removed."""
        speed = self.speed
        while self.waiting and len(self.running) < speed.max_running:
            request = self.waiting.popleft()
            request.cached = self.cache.cached(request.prompt)
            request.missing = max(1, len(request.prompt) - request.cached)
            self.running.append(request)
        budget, advanced = speed.prefill_chunk, []
        for request in self.running:
            if request.missing:
                computed = min(request.missing, budget)
                budget -= computed
                request.missing -= computed
                if request.missing:
                    continue
                self.cache.add(request.prompt)
            advanced.append(request)
        prefilled = speed.prefill_chunk - budget
        for request in advanced:
            request.written += 1
            if request.done:
                self.cache.add(request.prompt + request.output)
        self.running = [request for request in self.running if not request.done]
        seconds = speed.step_s + speed.request_s * len(advanced) + speed.prefill_s * prefilled
        return speed.slowness * seconds, advanced
