"""Every number that a rollout server and a node report, with what it says (`docs/observability.md`)."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.runtime.metrics import COUNTS, REWARDS, SECONDS, TOKENS, Table, counter, gauge, histogram

WAITS = counter("Seconds in which at least one coroutine waited for this cause.", "cause", name="wait_seconds")

ROLLOUT: Table = {
    # groups and tasks
    "groups_published": counter("Groups that were published to the learner."),
    "groups_failed": counter("Failed last attempts that were published in the place of a group."),
    "groups_rejected": counter("Attempts at a group that ended without enough usable trajectories."),
    "groups_per_s": gauge("Groups published a second, over the last 10 seconds."),
    "groups_in_flight": gauge("Groups that are being generated."),
    "duplicates": counter("Groups that another server, or a try of our own, had published before."),
    "reclaimed": counter("Tasks taken over from servers that no longer renewed their leases."),
    "leases_lost": counter("Leases of our own that another server took over."),
    "tasks_released": counter("Tasks given back at a stop, for another server to take."),
    "unreadable_tasks": counter("Tasks that could not be decoded, and became dead letters."),
    "events_lost": counter("Lines of the run's history that Redis did not take."),
    "task_queue_age_seconds": histogram(
        "Seconds from the issue of a task (Redis' clock) to its lease (this host's).", SECONDS
    ),
    "spooled_groups": gauge("Groups that have ended and wait for Redis to take them."),
    "spooled_bytes": gauge("Bytes of the groups that wait for Redis."),
    "spool_age_s": gauge("Seconds that the oldest of the groups that wait for Redis has waited."),
    # trajectories
    "trajectories": counter("Trajectories that ended, however."),
    "trajectories_per_s": gauge("Trajectories ended a second, over the last 10 seconds."),
    "trajectories_in_flight": gauge("Trajectories that are being generated."),
    "ended_*": counter("Trajectories by how they ended.", "status", name="trajectories_ended"),
    "stale": counter("Trajectories ended because their first version had fallen too far behind."),
    "turns": counter("Turns that the policy wrote."),
    "tokens_generated": counter("Tokens that the policy sampled for training."),
    "tokens_generated_per_s": gauge("Tokens that the policy sampled for training a second, over the last 10 seconds."),
    "tokens_observed": counter("Tokens of observations: what searches and tools brought into the context."),
    "episodes": counter("Trajectories that were played on request (POST /v1/episodes), and are not trained on."),
    "episodes_repeated": counter(
        "Episodes played again since a weight swap fell into them: evaluations are of one version."
    ),
    "evaluations": gauge("Requests for episodes (POST /v1/episodes) that are going on."),
    "pinned_evaluations": gauge("Those among them for which engines that train put off new weights."),
    "episode_tokens": counter("Tokens that the policy sampled for episodes on request."),
    "reward_mean": gauge("Mean reward of the last 256 trajectories that vote."),
    "reward/*": gauge(
        "Mean of one part of the reward, before weighting, over the last 256 trajectories that vote.",
        "part",
        name="reward_part_mean",
    ),
    "reward": histogram("Reward of the trajectories that vote.", REWARDS),
    "trajectory_turns": histogram("Turns of a trajectory.", COUNTS),
    "trajectory_searches": histogram("Searches of a trajectory.", COUNTS),
    "response_length_tokens": histogram("Tokens that the policy sampled in a trajectory.", TOKENS),
    # engines
    "engines_routable": gauge("Engines that take requests of this server."),
    "engine_strikes": gauge("Strikes against all engines: they fade with time, and too many put an engine aside."),
    "engine_*": counter("Requests to engines that failed, by cause.", "cause", name="engine_errors"),
    "failovers": counter("Turns that went on at another engine."),
    "tokens_continued": counter("Tokens of a failed request that were kept, and continued elsewhere."),
    "tokens_discarded": counter("Tokens thrown away because the engine that sent them answered nonsense."),
    "tokens_unattributed": counter("Tokens thrown away because their policy version could not be known."),
    "turns_waiting": gauge("Turns that wait for an engine."),
    "requests_in_flight": gauge("Requests that engines are working on for this server."),
    # searches and tools
    "searches": counter("Searches that the policy asked for."),
    "search_errors_*": counter("Searches that failed, by cause.", "kind"),
    "search_faults_*": counter("Attempts at a search that failed, by cause; most are tried again.", "kind"),
    "search_outcome_*": counter(
        "Searches that were answered, by what they brought.", "outcome", name="search_outcomes"
    ),
    "search_seconds": histogram("Seconds from a search's request to its result, retries included.", SECONDS),
    "search_seconds_mean": gauge("Mean seconds of the last 256 searches."),
    "search_retries": counter("Attempts at a search after the first."),
    "searches_shared": counter("Searches that joined an equal one already in flight."),
    "search_outages": counter("Times that no retriever could be used."),
    "search_window": gauge("Requests that may be in flight at all usable retrievers together."),
    "search_breaker": gauge("Circuit breaker of the search: 0 is closed, 0.5 half open, 1 open."),
    "searches_in_flight": gauge("Requests in flight at retrievers."),
    "searches_queued": gauge("Searches queued for a retriever."),
    "retrievers": gauge("Retrievers that are configured."),
    "retrievers_healthy": gauge("Retrievers that can be used."),
    "retriever_ejections": counter("Ejections of a retriever that failed."),
    "retriever_fingerprints": gauge("Different indexes that the retrievers serve; more than 1 is a mistake."),
    "tool_calls_*": counter("Calls of a tool.", "tool"),
    "tool_invalid_calls_*": counter("Calls of a tool that the policy made wrongly.", "tool"),
    "tool_errors_*": counter("Calls in which a tool failed.", "tool"),
    "tool_failures_*": counter("Calls in which a tool failed, by cause.", "tool", "cause"),
    # the process
    "event_loop_lag_s": gauge("Seconds by which the event loop was late at its last turn of one second."),
    "redis_refused": counter("Calls that Redis refused as forbidden or impossible."),
}

NODE: Table = {
    "updates": counter("Weight updates that the engine took up."),
    "updates_distributed": counter("Weight updates that came by broadcast; the others were read from files."),
    "views_failed": counter("Broadcasts of weights in which this engine failed."),
    "restarts": counter("Times that the engine process was lost and started again."),
    "strikes": counter("Failures of the engine that its node saw: enough in a row restart or quarantine it."),
    "hangs": counter("Times that the engine did not answer for so long that it was judged to hang."),
    "rechecks": counter("Times that the engine was asked again which weights it holds."),
    "found_paused": counter("Times that the engine was found paused for long: its weights were loaded again."),
    "pause_s": gauge("Seconds that generation stood still for the last weight update."),
    "load_s": gauge("Seconds that the engine took to load the last weights."),
    "event_loop_lag_s": ROLLOUT["event_loop_lag_s"],
    "redis_refused": ROLLOUT["redis_refused"],
}

TABLES: Mapping[str, Table] = {"rollout": ROLLOUT, "node": NODE}
"""By `MetricsSnapshot.process`."""
