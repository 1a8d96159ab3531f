"""All metrics of a rollout server and a node, with their help texts (source of `docs/metrics.md`)."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.runtime.metrics import COUNTS, REWARDS, SECONDS, TOKENS, Table, counter, gauge, histogram

WAITS = counter("Seconds in which at least one coroutine waited for this cause.", "cause", name="wait_seconds")

ROLLOUT: Table = {
    # groups and tasks
    "groups_published": counter("Groups that were published to the learner."),
    "groups_failed": counter("Groups reported as failed after the last attempt."),
    "groups_rejected": counter("Attempts at a group that ended without enough valid trajectories."),
    "groups_per_s": gauge("Groups published per second, over the last 10 seconds."),
    "groups_in_flight": gauge("Groups in progress."),
    "duplicates": counter(
        "Groups that were already published, by another server or an earlier try; failed groups whose lease was lost."
    ),
    "reclaimed": counter("Tasks taken over from servers that stopped renewing their leases."),
    "leases_lost": counter("Leases of this server that another server took over."),
    "tasks_released": counter("Tasks released at shutdown, for another server to take."),
    "unreadable_tasks": counter("Tasks that could not be decoded and became dead letters."),
    "events_lost": counter("Events of the run's history that Redis did not accept."),
    "task_queue_age_seconds": histogram(
        "Seconds from the issue of a task (Redis' clock) to its lease (this host's).", SECONDS
    ),
    "spooled_groups": gauge("Finished groups that wait for Redis."),
    "spooled_bytes": gauge("Bytes of the finished groups that wait for Redis."),
    "spool_age_s": gauge("Age in seconds of the oldest finished group that waits for Redis."),
    # trajectories
    "trajectories": counter("Trajectories that ended, with any status."),
    "trajectories_per_s": gauge("Trajectories that ended per second, over the last 10 seconds."),
    "trajectories_in_flight": gauge("Trajectories in progress."),
    "trajectories_cut": counter("Trajectories that `rollout.oversample` cancelled, the slowest of their groups."),
    "ended_*": counter("Trajectories that ended, by status.", "status", name="trajectories_ended"),
    "stale": counter("Trajectories stopped because their first version was too old."),
    "turns": counter("Turns of the policy."),
    "tokens_generated": counter("Tokens sampled for training."),
    "tokens_generated_per_s": gauge("Tokens sampled for training per second, over the last 10 seconds."),
    "tokens_observed": counter("Tokens of observations: results of searches and tools in the context."),
    "episodes": counter("Episodes run on request (POST /v1/episodes). They are not trained on."),
    "episodes_repeated": counter(
        "Episodes repeated because the weights changed meanwhile: an evaluation uses one version."
    ),
    "evaluations": gauge("Requests for episodes (POST /v1/episodes) in progress."),
    "pinned_evaluations": gauge("Requests for episodes for which training engines postpone new weights."),
    "chat_calls": counter("Calls of `foray serve`."),
    "chat_refused": counter("Calls of `foray serve` that got an error."),
    "chat_left": counter("Calls of `foray serve` whose client left before the end."),
    "chat_tokens": counter("Tokens sampled for calls of `foray serve`."),
    "chat_in_progress": gauge("Calls of `foray serve` in progress."),
    "episode_tokens": counter("Tokens sampled for episodes on request."),
    "reward_mean": gauge("Mean reward of the last 256 valid trajectories."),
    "reward/*": gauge(
        "Mean of one part of the reward, before weighting, over the last 256 valid trajectories.",
        "part",
        name="reward_part_mean",
    ),
    "reward": histogram("Reward of the valid trajectories.", REWARDS),
    "trajectory_turns": histogram("Turns per trajectory.", COUNTS),
    "trajectory_searches": histogram("Searches per trajectory.", COUNTS),
    "response_length_tokens": histogram("Sampled tokens per trajectory.", TOKENS),
    # engines
    "engines_routable": gauge("Engines that this server may send requests to."),
    "engine_strikes": gauge("Strikes of all engines together. They decay with time; too many eject an engine."),
    "engine_*": counter("Failed requests to engines, by cause.", "cause", name="engine_errors"),
    "failovers": counter("Turns that continued at another engine."),
    "tokens_continued": counter("Tokens of failed requests that were kept and continued at another engine."),
    "tokens_discarded": counter("Tokens dropped because the engine sent malformed data."),
    "tokens_unattributed": counter("Tokens dropped because their policy version is unknown."),
    "turns_waiting": gauge("Turns that wait for an engine."),
    "engine_ms": counter(
        "Milliseconds of requests for training at engines, added up: 1000 per second are one request in flight.",
        name="engine_busy_milliseconds",
    ),
    "requests_in_flight": gauge("Requests of this server in flight at engines."),
    # searches and tools
    "searches": counter("Searches requested by the policy."),
    "search_errors_*": counter("Searches that failed, by cause.", "kind"),
    "search_faults_*": counter("Failed attempts at a search, by cause. Most are retried.", "kind"),
    "search_outcome_*": counter("Answered searches, by outcome.", "outcome", name="search_outcomes"),
    "search_seconds": histogram("Seconds from a search's request to its result, retries included.", SECONDS),
    "search_seconds_mean": gauge("Mean duration in seconds of the last 256 searches."),
    "search_retries": counter("Attempts at a search after the first."),
    "searches_shared": counter("Searches that joined an identical one in flight."),
    "search_outages": counter("Outages: times when no retriever was healthy."),
    "search_window": gauge("Limit of queries in flight at all healthy retrievers together."),
    "search_breaker": gauge("Circuit breaker of the search: 0 closed, 0.5 half open, 1 open."),
    "searches_in_flight": gauge("Queries in flight at retrievers."),
    "searches_queued": gauge("Searches queued for a retriever."),
    "retrievers": gauge("Retrievers in the configuration."),
    "retrievers_healthy": gauge("Retrievers that are healthy."),
    "retriever_ejections": counter("Ejections of failing retrievers."),
    "retriever_fingerprints": gauge("Number of different indexes that the retrievers serve; should be 1."),
    "tool_calls_*": counter("Calls of a tool.", "tool"),
    "tool_invalid_calls_*": counter("Invalid calls of a tool by the policy.", "tool"),
    "tool_errors_*": counter("Calls in which a tool failed.", "tool"),
    "tool_failures_*": counter("Calls in which a tool failed, by cause.", "tool", "cause"),
    # agents
    "agent_calls": counter("Calls of the model by agents (rollout.agent)."),
    "agent_retries": counter("Repeated calls of agents, answered with the turn of the first."),
    "agent_sequences_*": counter(
        "Calls of agents that did not continue recorded tokens and began a new sequence, by reason.", "reason"
    ),
    "agent_ignored_*": counter("Parameters of calls that were ignored: sampling is the run's.", "parameter"),
    "agent_refusals": counter("Requests of agents that the gateway refused."),
    "agent_late_calls": counter("Requests with a key of no trajectory in progress, such as calls after its end."),
    "agent_failures_*": counter("Trajectories that failed because of the agent, by cause.", "cause"),
    "agents_running": gauge("Agents in progress."),
    "agents_waiting": gauge("Trajectories that wait for rollout.agent.concurrency."),
    "trajectory_sequences": histogram("Training sequences per trajectory of an agent.", COUNTS),
    # the process
    "trace_spans_exported": counter("Spans of traces that were exported (run.trace)."),
    "trace_spans_dropped": counter("Spans of traces that were dropped: the collector is away or too slow."),
    "event_loop_lag_s": gauge("Delay in seconds of the last one-second timer of the event loop."),
    "redis_refused": counter("Calls that Redis refused as forbidden or invalid."),
}

NODE: Table = {
    "updates": counter("Weight updates loaded by the engine."),
    "updates_distributed": counter("Weight updates received by broadcast; the others were read from files."),
    "views_failed": counter("Weight broadcasts that failed at this engine."),
    "restarts": counter("Restarts of the engine process."),
    "strikes": counter("Failures of the engine seen by its node. Several in a row restart or quarantine it."),
    "hangs": counter("Times that the engine was considered hung because it did not answer."),
    "events_lost": ROLLOUT["events_lost"],
    "rechecks": counter("Checks of the weight version after the engine may have changed."),
    "found_paused": counter("Times that the engine was found paused for too long, so its weights were loaded again."),
    "pause_s": gauge("Pause of generation in the last weight update, in seconds."),
    "load_s": gauge("Duration of the last weight load, in seconds."),
    "event_loop_lag_s": ROLLOUT["event_loop_lag_s"],
    "redis_refused": ROLLOUT["redis_refused"],
}

TABLES: Mapping[str, Table] = {"rollout": ROLLOUT, "node": NODE}
"""By `MetricsSnapshot.process`."""
