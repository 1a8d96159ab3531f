"""Agents in tests: a function of the test as the agent, plain HTTP as its client, and a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from protocol.messages import Question, Sampling, Trajectory
from rollout_server.agents.config import OwnAgentSettings, PythonAgentSettings
from rollout_server.agents.renderer import Renderer
from rollout_server.agents.run import Agents
from rollout_server.agents.runners import AgentAccess
from rollout_server.agents.tagged import TaggedRenderer
from rollout_server.engine.base import Generate
from rollout_server.environment.environment import Environment
from rollout_server.metrics import Stats
from rollout_server.search.base import LocalSearch, NoSearch

QUESTION = Question(id="q", text="a b ?", answers=("c",))
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
Agent = Callable[[Question, AgentAccess], Awaitable[Any]]
_agents: dict[str, Agent] = {}


async def scripted(question: Question, access: AgentAccess, name: str) -> Any:
    """The target of every python agent of the tests."""
    return await _agents[name](question, access)


@dataclass
class Client:
    """A client of the gateway without a library."""

    access: AgentAccess
    session: aiohttp.ClientSession
    statuses: list[int] = field(default_factory=list)

    async def post(self, path: str, body: Any, *, retry: int = 0, timeout_s: float | None = None) -> dict[str, Any]:
        """Send `body` and return the answer, of any status."""
        headers = {"Authorization": f"Bearer {self.access.api_key}", "x-stainless-retry-count": str(retry)}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = self.access.base_url + path
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(url, headers=headers, timeout=timeout, **data) as response:
            self.statuses.append(response.status)
            return await response.json()  # type: ignore[no-any-return]

    async def chat(self, messages: list[dict[str, Any]], *, tools: Any = (SEARCH,), **more: Any) -> dict[str, Any]:
        """One call; the answer's message."""
        options = {name: more.pop(name) for name in ("retry", "timeout_s") if name in more}
        body = {"model": "policy", "messages": messages, "tools": list(tools), **more}
        answer = await self.post("/chat/completions", body, **options)
        return answer["choices"][0]["message"] if "choices" in answer else answer  # type: ignore[no-any-return]


@asynccontextmanager
async def client_of(access: AgentAccess) -> AsyncIterator[Client]:
    """A client for one trajectory."""
    async with aiohttp.ClientSession() as session:
        yield Client(access, session)


@dataclass
class Table:
    """An `Agents` that listens, and what its trajectories need."""

    agents: Agents
    environment: Environment
    stats: Stats

    async def play(self, generate: Generate, search: LocalSearch | None = None, **options: Any) -> Trajectory:
        """One trajectory."""
        given = {"session": "s", "group": "g", "question": QUESTION} | options
        question = given.pop("question")
        return await self.agents(self.environment, question, generate, search or NoSearch(), Sampling(), **given)


@asynccontextmanager
async def playing(
    environment: Environment,
    agent: Agent | None = None,
    settings: OwnAgentSettings | None = None,
    renderer: Renderer | None = None,
    **options: Any,
) -> AsyncIterator[Table]:
    """Serve a gateway for `agent`, a function of the test, or for the agent of `settings`."""
    if settings is None:
        assert agent is not None
        name = f"agent-{len(_agents)}"
        _agents[name] = agent
        target = {"target": "tests.support.agents:scripted", "options": {"name": name}}
        settings = PythonAgentSettings.model_validate(target | options)
    stats = Stats("rollout", "test")
    agents = Agents(settings, renderer or TaggedRenderer(environment), stats)
    async with agents.listening():
        yield Table(agents, environment, stats)
