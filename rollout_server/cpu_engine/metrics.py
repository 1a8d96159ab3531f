"""GET /metrics: the engine's numbers in Prometheus' text format under SGLang's names."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_server.cpu_engine.counters import BUCKETS, Histogram
from rollout_server.cpu_engine.engine import Engine

Rows = Iterator[tuple[str, str, float, str]]


def render(engine: Engine, model_name: str) -> str:
    """The whole page; every row carries the label model_name."""
    label = 'model_name="' + model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
    lines = []
    for name, kind, value, text in _rows(engine):
        lines += [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{label}}} {value:g}"]
    counters = engine.scheduler.counters
    lines += _histogram("time_to_first_token_seconds", counters.first_token, label)
    lines += _histogram("e2e_request_latency_seconds", counters.latency, label)
    return "\n".join(lines) + "\n"


def _rows(engine: Engine) -> Rows:
    s = engine.scheduler
    c, budget = s.counters, s.runner.kv.budget
    used, kept = s.used_tokens, s.cache.tokens
    yield "num_running_reqs", "gauge", len(s.running), "Requests being decoded."
    yield "num_queue_reqs", "gauge", engine.waiting, "Requests that wait."
    yield (
        "num_paused_reqs",
        "gauge",
        (len(s.running) + engine.waiting) if engine.paused else 0,
        "Requests held by a pause.",
    )
    yield "num_used_tokens", "gauge", used, "Tokens of running requests in the cache."
    yield "kv_used_tokens", "gauge", used + kept, "Tokens in the cache, kept prefixes included."
    yield "kv_available_tokens", "gauge", max(budget - used - kept, 0), "Tokens that still fit."
    yield "max_total_num_tokens", "gauge", budget, "Size of the cache in tokens."
    yield "token_usage", "gauge", used / budget, "Share of the cache used by running requests."
    yield "cache_hit_rate", "gauge", c.hit_rate, "Share of prompt tokens found in the cache since start."
    yield "gen_throughput", "gauge", c.throughput if s.running else 0.0, "Tokens a second over about the last second."
    yield "prompt_tokens_total", "counter", c.prompt_tokens, "Prompt tokens taken in."
    yield "cached_tokens_total", "counter", c.cached_tokens, "Prompt tokens found in the cache."
    yield "generation_tokens_total", "counter", c.generated_tokens, "Tokens generated."
    yield "num_requests_total", "counter", c.requests, "Requests ended."
    yield "num_aborted_requests_total", "counter", c.aborted, "Requests ended by an abort or an error."
    yield "num_retracted_reqs", "gauge", c.retractions, "Times a request was put back since start."
    yield "weight_updates_total", "counter", c.weight_updates, "Weight updates done."
    yield "step_errors_total", "counter", c.step_errors, "Steps that failed."


def _histogram(name: str, histogram: Histogram, label: str) -> list[str]:
    lines, below = [f"# TYPE sglang:{name} histogram"], 0
    for bound, count in zip((*BUCKETS, float("inf")), histogram.counts, strict=True):
        below += count
        edge = "+Inf" if bound == float("inf") else f"{bound:g}"
        lines.append(f'sglang:{name}_bucket{{{label},le="{edge}"}} {below}')
    return [*lines, f"sglang:{name}_sum{{{label}}} {histogram.total:g}", f"sglang:{name}_count{{{label}}} {below}"]
