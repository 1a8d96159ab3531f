"""Settings of the rollout server: section `rollout`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from protocol.settings import Settings
from rollout_server.agents.config import AgentSettings, BuiltinAgentSettings, OwnAgentSettings
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.search import DEFAULT_SEARCH, SearchSettings


class RolloutSettings(Settings):
    """One rollout server. A run may have several: each leases different tasks."""

    id: str = Field(default="", max_length=200)
    """Name in metrics and in the trajectories that it produces. Empty: `<hostname>-<pid>`."""
    host: str = ""
    """Address to listen on (health, status, metrics, episodes). Empty: this machine's on the route to Redis, if the
    process has a token, else loopback."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    concurrency_groups: int = Field(default=32, ge=1)
    """Maximum number of trajectory groups generated at the same time."""
    oversample: int = Field(default=0, ge=0, le=64)
    """Trajectories of a question in addition to `run.group_size`. Once `run.group_size` valid ones have ended, the
    others are cancelled, so that the slowest delay no group. Biased: long trajectories are cancelled more often, so the
    policy is trained on shorter ones than it samples, and the mean reward is that of the first to end."""
    spool_groups: int = Field(default=32, ge=1)
    """Maximum number of finished groups, of 512 MiB together, that wait for Redis before leasing stops. Groups in
    flight still finish, so at most `spool_groups` + `concurrency_groups` groups are held in memory."""
    task_idle_ms: int = Field(default=60_000, ge=300)
    """Lease timeout in milliseconds: a task whose lease was not renewed for this long is taken over by another server.
    Leases are renewed three times per timeout."""
    drain_s: float = Field(default=30.0, ge=0)
    """Time in seconds that groups in flight get to finish after SIGTERM, before their tasks are released."""
    max_engine_lag: int | None = Field(default=None, ge=0)
    """Maximum steps that an engine may be behind the target version and still get training requests. null:
    `run.max_lag`."""
    generate_timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of one turn at one engine, in seconds; then the turn continues at another engine, from the tokens
    received."""
    stream_interval: int = Field(default=8, ge=1, le=1024)
    """Tokens per streamed chunk: the maximum that is lost when an engine fails. Smaller values use more CPU."""
    stall_s: float = Field(default=20.0, gt=0)
    """Timeout in seconds between two chunks of an engine's answer; not applied while the engine loads weights."""
    adaptive: bool = True
    """Limit the requests in flight at each engine, and lower the limit when requests queue there or are retracted."""
    generate_attempts: int = Field(default=4, ge=1)
    """Maximum attempts per turn after timeouts, errors or invalid output. An unreachable engine does not count."""
    engine_wait_s: float = Field(default=600.0, gt=0)
    """Timeout in seconds for a turn that waits for an engine; then its trajectory fails."""
    journal_routes: Path | None = None
    """File to which each engine request is logged as a line of JSON (time, engine, version), for audits. null: no
    log."""
    pin_max_s: float = Field(default=3600.0, gt=0)
    """Maximum time in seconds that evaluations with `"pin": true` may keep engines at one version and so delay new
    weights, consecutive evaluations included. Then the evaluation ends with an error. No limit if engines have the role
    `eval`."""
    fleet_poll_s: float = Field(default=0.5, gt=0)
    """Interval in seconds at which the engine table and the target version are read."""
    episode: EnvironmentSettings = EnvironmentSettings()
    """Multi-turn trajectories: template, limits, rewards, tools."""
    search: SearchSettings = DEFAULT_SEARCH
    """The search service."""
    agent: AgentSettings = BuiltinAgentSettings()
    """What plays a trajectory: the built-in loop, or an agent of yours (docs/agents.md)."""

    @model_validator(mode="after")
    def _rewards_have_what_they_read(self) -> RolloutSettings:
        agent, needy = self.agent, [reward.key for reward in self.episode.rewards if reward.reads_passages]
        own = isinstance(agent, OwnAgentSettings) and agent.reward == "foray" and not agent.gateway_search
        if own and needy:
            raise ValueError(
                f"reward {needy[0]} reads passages, which Foray does not see in an agent of type {agent.type}: let the "
                "agent search by POST /v1/search of the gateway and set agent.gateway_search = true, or remove it"
            )
        return self
