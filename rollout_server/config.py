"""Settings of the rollout server: section `rollout` of the tree. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from protocol.settings import Settings
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.search import DEFAULT_SEARCH, SearchSettings


class RolloutSettings(Settings):
    """One rollout server. Several of them may share one run: each leases other tasks."""

    id: str = Field(default="", max_length=200)
    """Name in metrics and on the trajectories it produces. Empty: `<hostname>-<pid>`."""
    host: str = "127.0.0.1"
    """Address to listen on (health, status, metrics, episodes)."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    concurrency_groups: int = Field(default=32, ge=1)
    """Trajectory groups being rolled out at once."""
    spool_groups: int = Field(default=32, ge=1)
    """Finished groups that may wait for Redis before no more work is taken; what is under way still finishes, so that
    at most this many groups and `concurrency_groups` more are held in memory."""
    spool_mb: int = Field(default=512, ge=1)
    """The same bound in MiB of finished groups, for long trajectories: whichever is reached first."""
    task_idle_ms: int = Field(default=60_000, ge=300)
    """A task whose lease was not renewed for so long is taken over by another server. Renewed three times as often."""
    drain_s: float = Field(default=30.0, ge=0)
    """After SIGTERM: seconds that groups in flight may take to finish before they are handed back."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts at one task before it is given up (the learner records its seq as dead)."""
    max_engine_lag: int | None = Field(default=None, ge=0)
    """An engine more steps behind the target takes no training traffic. None: `run.max_lag`."""
    generate_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one turn on one engine; after it the turn goes on elsewhere, from the tokens that have come."""
    stream_interval: int = Field(default=8, ge=1, le=1024)
    """Tokens between two pieces of an engine's answer: the most that is lost when it dies. Less costs more CPU."""
    stall_s: float = Field(default=20.0, gt=0)
    """An engine that has begun to answer and then says nothing for so long is given up, unless it loads weights."""
    adaptive: bool = True
    """Bound the requests in flight at each engine by a limit that shrinks when they queue there or are retracted."""
    generate_attempts: int = Field(default=4, ge=1)
    """Times one turn is tried after time-outs, errors or bad output. An unreachable engine does not count."""
    engine_wait_s: float = Field(default=600.0, gt=0)
    """Seconds that one turn may wait for an engine before its trajectory fails."""
    journal_routes: Path | None = None
    """File that gets one line of JSON for each request to an engine: when, to which, at which version. For audits."""
    pin_max_s: float = Field(default=3600.0, gt=0)
    """Longest time in seconds that engines keep one version for evaluations (`"pin": true`, also one after the other),
    and training waits for new weights to be loaded. After it the evaluation ends with an error.
    No limit where engines of role `eval` serve."""
    fleet_poll_s: float = Field(default=0.5, gt=0)
    """How often the engine table and the target version are read."""
    episode: EnvironmentSettings = EnvironmentSettings()
    """The multi-turn episode: template, budgets, rewards."""
    search: SearchSettings = DEFAULT_SEARCH
    """Where searches go."""
