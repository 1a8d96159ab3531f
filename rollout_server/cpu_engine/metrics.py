"""GET /metrics: the engine's numbers in Prometheus' text format under SGLang's names."""

from __future__ import annotations

from protocol.messages import MetricsSnapshot
from protocol.metrics import SECONDS, Page, Table, counter, gauge, histogram
from rollout_server.cpu_engine.engine import Engine

PREFIX = "sglang:"
ENGINE: Table = {
    "num_running_reqs": gauge("Requests that are being decoded."),
    "num_queue_reqs": gauge("Requests that wait."),
    "num_paused_reqs": gauge("Requests that a pause holds."),
    "num_used_tokens": gauge("Tokens of running requests in the cache."),
    "kv_used_tokens": gauge("Tokens in the cache, kept prefixes included."),
    "kv_available_tokens": gauge("Tokens that still fit into the cache."),
    "max_total_num_tokens": gauge("Size of the cache in tokens."),
    "token_usage": gauge("Share of the cache that running requests use."),
    "cache_hit_rate": gauge("Share of prompt tokens found in the cache since the start."),
    "gen_throughput": gauge("Generated tokens a second, over about the last second."),
    "prompt_tokens_total": counter("Prompt tokens taken in."),
    "cached_tokens_total": counter("Prompt tokens found in the cache."),
    "generation_tokens_total": counter("Tokens that were generated."),
    "num_requests_total": counter("Requests that ended."),
    "num_aborted_requests_total": counter("Requests that an abort or an error ended."),
    "num_retracted_reqs": gauge("Times that a request was put back since the start."),
    "weight_updates_total": counter("Weight updates done."),
    "step_errors_total": counter("Decoding steps that failed."),
    "time_to_first_token_seconds": histogram("Seconds from a request's arrival to its first token.", SECONDS),
    "e2e_request_latency_seconds": histogram("Seconds from a request's arrival to its end.", SECONDS),
}


def render(engine: Engine, model_name: str) -> str:
    """The whole page; every sample has the label model_name."""
    counters = engine.scheduler.counters
    drawn = {"time_to_first_token_seconds": counters.first_token, "e2e_request_latency_seconds": counters.latency}
    now = MetricsSnapshot(process="engine", id="", values=_values(engine))
    return Page(PREFIX, ENGINE, lambda: now, lambda: drawn, {"model_name": model_name}).text().decode()


def _values(engine: Engine) -> dict[str, float]:
    s = engine.scheduler
    c, budget = s.counters, s.runner.kv.budget
    used, kept = s.used_tokens, s.cache.tokens
    return {
        "num_running_reqs": len(s.running),
        "num_queue_reqs": engine.waiting,
        "num_paused_reqs": (len(s.running) + engine.waiting) if engine.paused else 0,
        "num_used_tokens": used,
        "kv_used_tokens": used + kept,
        "kv_available_tokens": max(budget - used - kept, 0),
        "max_total_num_tokens": budget,
        "token_usage": used / budget,
        "cache_hit_rate": c.hit_rate,
        "gen_throughput": c.throughput if s.running else 0.0,
        "prompt_tokens_total": c.prompt_tokens,
        "cached_tokens_total": c.cached_tokens,
        "generation_tokens_total": c.generated_tokens,
        "num_requests_total": c.requests,
        "num_aborted_requests_total": c.aborted,
        "num_retracted_reqs": c.retractions,
        "weight_updates_total": c.weight_updates,
        "step_errors_total": c.step_errors,
    }
