"""What the engine has done, as numbers. Written by the engine thread only, read by anybody."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.metrics import Histogram
from rollout_server.cpu_engine.request import Request


@dataclass
class Counters:
    """Totals since start; `throughput` is generated tokens a second over about the last second of work."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    step_errors: int = 0
    weight_updates: int = 0
    throughput: float = 0.0
    first_token: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    _since: float = 0.0
    _tokens: int = 0

    def count_tokens(self, tokens: int, now: float) -> None:
        """One step gave `tokens` tokens at `now` (perf_counter)."""
        self.steps += 1
        self.generated_tokens += tokens
        self._tokens += tokens
        if now - self._since > 5.0:  # after a rest: start anew, do not average the rest in
            self._since, self._tokens = now, 0
        elif now - self._since >= 1.0:
            self.throughput = self._tokens / (now - self._since)
            self._since, self._tokens = now, 0

    def count_end(self, request: Request) -> None:
        """A request ended."""
        self.requests += 1
        self.aborted += bool(request.finish and request.finish["type"] == "abort")
        self.latency.observe(request.ended_at - request.arrived)
        if request.first_token_at:
            self.first_token.observe(request.first_token_at - request.arrived)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
