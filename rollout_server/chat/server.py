"""Serve a policy to OpenAI's clients on the engines of a run: the parts of a rollout server, without tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from protocol.errors import UserError
from protocol.runtime.http.server import Listener, listening
from protocol.runtime.lifecycle import unwrap_user_error
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.agents.config import OwnAgentSettings
from rollout_server.agents.native import build_renderer
from rollout_server.agents.renderer import Renderer
from rollout_server.agents.run import build_agents
from rollout_server.agents.tagged import TaggedRenderer
from rollout_server.chat.answers import Answers
from rollout_server.chat.app import ChatApp, ChatOptions
from rollout_server.config import RolloutSettings
from rollout_server.dispatch.fleet import Fleet, RunCompatibility
from rollout_server.environment.environment import Environment
from rollout_server.instrumentation import InstrumentedSearch
from rollout_server.metrics import Stats
from rollout_server.rollout.trajectory import run_trajectory
from rollout_server.server import build_router, opened

log = logging.getLogger(__name__)


@asynccontextmanager
async def serving_chat(run: RunSettings, settings: RolloutSettings, options: ChatOptions) -> AsyncIterator[Listener]:
    """Serve while the block runs. Answers are not scored. Raises UserError for what the user must fix."""
    stats = Stats("rollout", "serve")
    unscored = settings.model_copy(update={"episode": settings.episode.model_copy(update={"rewards": ()})})
    async with opened(run, unscored, stats) as parts:
        environment, waits = parts.environment, stats.waits
        fleet = Fleet(parts.redis, waits, poll_s=settings.fleet_poll_s, compatibility=RunCompatibility(run))
        router = build_router(run, settings, environment, fleet, stats, parts.session)
        agents = build_agents(settings.agent, environment, stats)

        def version(sampled: PolicyVersion | None) -> int | None:
            if not options.trains:
                return options.version
            return max((e.step for e in fleet.table.pinned()), default=None) if sampled is None else sampled.step

        answers = Answers(
            *(environment, _renderer(settings, environment), router, InstrumentedSearch(parts.search, stats)),
            turn_so_far=router.turn_so_far,
            version=version,
            play_one=agents or run_trajectory,
        )
        app = ChatApp(answers, options, stats, run.id).build()
        with unwrap_user_error():
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(one) for one in (fleet.follow(), parts.following) if one is not None]
                async with (
                    agents.listening() if agents else nullcontext(),
                    # the token is checked in the application, on any address
                    listening(
                        *(app, options.host, options.port),
                        access=None,
                        setting="--host",
                        todo="give another --port; 0 selects a free one",
                    ) as listener,
                ):
                    yield listener
                for loop in loops:
                    loop.cancel()


def _renderer(settings: RolloutSettings, environment: Environment) -> Renderer:
    """Return the renderer of the policy alone: its chat template, else the tags of the episode's template."""
    agent = settings.agent if isinstance(settings.agent, OwnAgentSettings) else OwnAgentSettings(type="builtin")
    try:
        return build_renderer(agent, environment)
    except UserError as error:
        log.warning("%s (%s): messages are rendered by the tags of rollout.episode", error.what, error.why)
        return TaggedRenderer(environment)
