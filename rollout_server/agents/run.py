"""Run an agent for a trajectory: its model calls are recorded, its failures have causes, its end is that of the record.

`Agents` has the parameters of `run_trajectory`, so groups and episodes play with an agent as with the built-in loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from protocol.messages import Segment, Status, Trajectory
from protocol.runtime.timing import loop_timeout
from rollout_server.agents.config import REGISTRY, AgentSettingsBase, OwnAgentSettings
from rollout_server.agents.gateway import Gateway
from rollout_server.agents.native import build_renderer
from rollout_server.agents.recorded import Recorded
from rollout_server.agents.renderer import Renderer
from rollout_server.agents.runners import CAUSES, AgentAccess, AgentError, AgentResult, Runner
from rollout_server.environment.environment import Environment
from rollout_server.metrics import Stats
from rollout_server.rewards.base import TurnText
from rollout_server.rewards.composite import TrajectoryReward
from rollout_server.rollout.live import LiveTrajectory
from rollout_server.rollout.trajectory import End, Play

log = logging.getLogger(__name__)

COUNTERS = ("agent_calls", "agent_retries", "agent_refusals", "agent_late_calls")
"""Counters that exist from the start, as 0."""
LEAVE_S = 5.0
"""Time for a cancelled agent to end."""
WINDOW, FEWEST, MOST_FAILED, AGAIN_S = 256, 40, 0.05, 600.0
"""Warn when more than this share of the last trajectories failed because of the agent, at most this often."""


def build_agents(settings: AgentSettingsBase, environment: Environment, stats: Stats) -> Agents | None:
    """Return what plays with the agent of the settings; None for the built-in loop. Raises UserError."""
    if not isinstance(settings, OwnAgentSettings):
        return None
    renderer = build_renderer(settings, environment)
    verdict = renderer.verdict()
    log.log(logging.WARNING if verdict.sequences == "no_tools" else logging.INFO, "rollout.agent: %s", verdict)
    return Agents(settings, renderer, stats)


class Agents:
    """Plays trajectories with the agent of the settings.

    `listening` serves the gateway; trajectories may be played inside its block.
    """

    def __init__(self, settings: OwnAgentSettings, renderer: Renderer, stats: Stats) -> None:
        """Build the runner. Raises UserError if the agent cannot be used."""
        self.settings, self.renderer, self.stats = settings, renderer, stats
        self.gateway = Gateway(stats.counts)
        self.runner: Runner = resolve_name(REGISTRY[type(settings)])(settings)
        self.places = asyncio.Semaphore(settings.concurrency)
        self.running = self.waiting = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._warned_at = -AGAIN_S
        for name in (*COUNTERS, *(f"agent_failures_{cause}" for cause in CAUSES)):
            stats.counts[name] += 0
        stats.gauges |= {"agents_running": lambda: self.running, "agents_waiting": lambda: self.waiting}

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Serve the gateway while the block runs, and close the runner. Yields the port."""
        try:
            async with self.gateway.listening(self.settings) as port:
                log.info("agents call http://%s:%d/v1", self.settings.host, port)
                yield port
        finally:
            await self.runner.close()

    async def __call__(
        self, *given: Any, session: str, live: LiveTrajectory | None = None, **options: Any
    ) -> Trajectory:
        """Play one trajectory, as `run_trajectory`. Further causes are those of `rollout_server.agents.runners`."""
        shown = live or LiveTrajectory(session)
        return await AgentPlay(*given, agents=self, session=session, live=shown, **options).finish()

    def count(self, cause: str) -> None:
        """Count how an agent ended: a cause of AgentError, or "" for none."""
        self._recent.append(bool(cause))
        if not cause:
            return
        self.stats.counts[f"agent_failures_{cause}"] += 1
        share = sum(self._recent) / len(self._recent)
        now = time.monotonic()
        if len(self._recent) >= FEWEST and share > MOST_FAILED and now - self._warned_at >= AGAIN_S:
            self._warned_at = now
            log.warning(
                "%.0f %% of the last %d trajectories failed because of the agent, lately by %s. They are not trained "
                "on, so a policy that makes the agent fail is not corrected. The warnings before this one say why",
                *(100 * share, len(self._recent), cause),
            )


@dataclass(kw_only=True)
class AgentPlay(Play):
    """One trajectory of an agent."""

    agents: Agents
    record: Recorded = field(init=False)
    result: AgentResult | None = None

    def __post_init__(self) -> None:
        settings = self.agents.settings
        self.record = Recorded(self, self.agents.renderer, self.agents.stats.counts, lenient=settings.lenient)
        self.live.transcript = self.record

    def recorded(self) -> tuple[Sequence[Segment], Sequence[TurnText]]:
        sequences = self.record.sequences
        segments = [segment for sequence in sequences for segment in sequence.transcript.segments]
        return segments, [turn for sequence in sequences for turn in sequence.turns]

    async def run(self) -> End:
        """Run the agent to its end and return that of the trajectory."""
        agents, record = self.agents, self.record
        agents.waiting += 1
        try:
            await agents.places.acquire()
        finally:
            agents.waiting -= 1
        agents.running += 1
        failure: AgentError | None = None
        try:
            with agents.gateway.admitting(record) as access:
                self.result = await self._result(access)
        except AgentError as error:
            failure = error
        finally:
            agents.running -= 1
            agents.places.release()
            ended = record.ended
            await record.close()
            self.searches = record.searches
        agents.stats.distribute("trajectory_sequences", len(record.sequences))
        if ended is None:
            failure = failure or self._complaint()
        agents.count(failure.cause if failure and ended is None else "")
        if failure is not None:
            log.warning("trajectory %s: %s%s", self.session, failure, "" if ended is None else f", after {ended}")
        if ended is not None:
            return ended
        if failure is not None:
            return End(Status.FAILED, failure.cause)
        given = self.result.answer if self.result else None
        self.answer = given if given is not None else record.last.said.content if record.last else None
        return End(Status.ANSWERED) if self.answer else End(Status.OUT_OF_TURNS, "no_answer")

    def _complaint(self) -> AgentError | None:
        """Return what is wrong with an agent that ended by itself."""
        if not self.record.last:
            cause = "agent_refused" if self.record.refusal else "agent_silent"
            return AgentError(cause, self.record.refusal or "no call of the model")
        if self.agents.settings.reward == "agent" and (self.result is None or self.result.reward is None):
            return AgentError("agent_result", "no `reward`, and rollout.agent.reward is agent")
        return None

    async def _result(self, access: AgentAccess) -> AgentResult | None:
        """Run the agent until it ends, or until its trajectory is invalid: then return None. Raises AgentError."""
        hidden = {} if self.agents.settings.reward == "agent" else {"answers": ()}
        told = self.question.model_copy(update=hidden)
        deadline_s = self.agents.settings.deadline_s
        running = asyncio.ensure_future(self.agents.runner(told, access))
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, if nobody waits
        over = asyncio.ensure_future(self.record.over.wait())
        try:
            async with loop_timeout(deadline_s) as self.record.timer:
                await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise AgentError("agent_timeout", f"it did not end within {deadline_s:g} s") from None
        finally:
            self.record.timer = None
            over.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait({running}, timeout=LEAVE_S)
        if not running.done() or running.cancelled():
            if self.record.ended is None:
                raise AgentError("agent_exit", "it cancelled itself")
            return None
        try:
            return running.result()
        except AgentError as error:
            if error.cause == "agent_exit" and self.record.refusal:
                raise AgentError("agent_refused", f"{self.record.refusal}; then {error}") from error
            raise

    async def score(self, status: Status) -> TrajectoryReward:
        """Return the agent's reward if the settings say so, or else Foray's, with the agent's as a part."""
        given = self.result.reward if self.result else None
        if self.agents.settings.reward == "agent":
            return TrajectoryReward(given or 0.0, {"agent": given or 0.0}, ())
        score = await super().score(status)
        return score if given is None else TrajectoryReward(score.reward, score.parts | {"agent": given}, score.turns)
