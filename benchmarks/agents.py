"""`foray bench agents`: what a call through the gateway costs, with many agents in one rollout server.

Every agent is a coroutine of this process that speaks HTTP to the gateway, without a client library: one question,
`turns` searches, an answer. The engine is a `Generate` in this process that waits `engine_s` and returns fixed tokens.
The baseline is the same number of tasks that call it directly, with ids. Two figures are compared: seconds from a call
to its answer at full concurrency, and CPU time of this process per call, which contains the client's share. The
built-in loop on the same engine is a third row.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from benchmarks.base import BenchResult, BenchSettings, Say, Target

if TYPE_CHECKING:
    from rollout_server.engine.base import GenerateRequest
    from rollout_server.environment.environment import Environment

WORDS = "the policy reads what a search returned and thinks about it before it asks again or answers "
SEARCH = f"<think> {WORDS * 8}</think> <search> the policy </search>"
ANSWER = f"<think> {WORDS * 8}</think> <answer> the policy </answer>"
FOUND = WORDS * 20


class AgentsBench(BenchSettings):
    """Settings of `foray bench agents`."""

    help: ClassVar[str] = "overhead of a call through the gateway, against the engine bare"
    quick: ClassVar[dict[str, Any]] = {"agents": 8, "turns": 1, "engine_s": 0.01}
    targets: ClassVar[tuple[Target, ...]] = (
        Target("ratio", 0.8, "time of a call at the engine / through the gateway"),
    )
    modules: ClassVar[tuple[str, ...]] = ("rollout_server/agents", "rollout_server/rollout", "benchmarks/agents.py")

    agents: int = Field(default=500, ge=1)
    """Agents at the same time."""
    turns: int = Field(default=4, ge=1)
    """Searches of each agent; it makes one more call."""
    engine_s: float = Field(default=5.0, gt=0)
    """Seconds that the engine takes for a turn; the agents' calls are spread over that time."""

    def measure(self, say: Say) -> BenchResult:
        """Run the three ways one after another."""
        return asyncio.run(_measure(self, say))


async def _measure(settings: AgentsBench, say: Say) -> BenchResult:
    from protocol.messages import Question, Sampling
    from protocol.search import Passage
    from rollout_server.agents.config import PythonAgentSettings
    from rollout_server.agents.run import Agents
    from rollout_server.agents.tagged import TaggedRenderer
    from rollout_server.metrics import Stats
    from rollout_server.rollout.trajectory import run_trajectory
    from tests.support.environments import make_environment
    from tests.support.fake_search import FakeSearch

    with tempfile.TemporaryDirectory(prefix="foray-bench-") as directory:
        given: dict[str, Any] = {
            "max_turns": settings.turns,
            "max_context": 1 << 20,
            "max_obs_tokens": 1024,
            "max_new_tokens": 4096,
        }
        environment = make_environment(Path(directory), "bytes", **given)
        agent = {"target": "benchmarks.agents:agent", "concurrency": settings.agents, "deadline_s": 3600.0}
        agents = Agents(
            PythonAgentSettings.model_validate(agent), TaggedRenderer(environment), Stats("rollout", "bench")
        )
        search = FakeSearch(otherwise=[Passage(id="p", contents=f"t\n{FOUND}")])
        question, engine = Question(id="q", text=WORDS, answers=("the policy",)), _Engine(environment, settings)
        play: Any = (environment, question, engine, search, Sampling())

        async def loop(player: Any, number: int) -> None:
            played = await player(*play, session=f"{number:032x}", group="g")
            assert played.reward == 1.0 and played.turns == settings.turns + 1, played.cause

        rows = {"engine": await _row(settings, lambda number: _bare(engine, environment, settings, number))}
        rows["loop"] = await _row(settings, lambda number: loop(run_trajectory, number))
        async with agents.listening():
            rows["gateway"] = await _row(settings, lambda number: loop(agents, number))
        for name, row in rows.items():
            say(f"{name}: " + ", ".join(f"{what} {value:.4f}" for what, value in row.items()))
    bare, ours = rows["engine"], rows["gateway"]
    details = {f"{name}_{what}": value for name, row in rows.items() for what, value in row.items()}
    return BenchResult(
        value=1000 * (ours["cpu_s"] - bare["cpu_s"]),
        unit="ms of CPU per call more than at the engine",
        baseline={"name": "the engine called directly, with ids", "call_s": bare["call_s"], "cpu_s": bare["cpu_s"]},
        ratio=bare["call_s"] / ours["call_s"],
        details={"calls": settings.agents * (settings.turns + 1), **details},
    )


class _Engine:
    """Takes `engine_s` for a turn. `seconds`: from each call of an agent to its answer, which callers append."""

    def __init__(self, environment: Environment, settings: AgentsBench) -> None:
        from protocol.messages import VersionSpan
        from rollout_server.engine.base import Completion

        self._engine_s, self._turns = settings.engine_s, settings.turns
        self._seen: dict[str, int] = {}
        encode = environment.tokenizer.encode_trusted
        self._plays = []
        for text in (SEARCH, ANSWER):
            ids = encode(text)
            spans = (VersionSpan(epoch=1, step=0, start=0, end=len(ids)),)
            self._plays.append(Completion(ids, [-0.5] * len(ids), spans, "stop"))

    async def __call__(self, request: GenerateRequest) -> Any:
        turn = self._seen[request.session] = self._seen.get(request.session, -1) + 1
        await asyncio.sleep(self._engine_s)
        if turn == self._turns:
            del self._seen[request.session]
        return self._plays[turn == self._turns]


async def _row(settings: AgentsBench, one: Callable[[int], Awaitable[None]]) -> dict[str, float]:
    """Run all agents at once, spread over the time of one turn. Return seconds and CPU seconds of a call."""
    calls = settings.agents * (settings.turns + 1)
    seconds: list[float] = []

    async def run(number: int) -> None:
        await asyncio.sleep(settings.engine_s * number / settings.agents)
        began = time.monotonic()
        await one(number)
        seconds.append((time.monotonic() - began) / (settings.turns + 1))

    cpu = time.process_time()
    await asyncio.gather(*map(run, range(settings.agents)))
    cpu = time.process_time() - cpu
    slowest = quantiles(seconds, n=100)[98] if len(seconds) > 1 else seconds[0]
    mean = sum(seconds) / len(seconds)
    return {"call_s": mean, "call_p99_s": slowest, "cpu_s": cpu / calls}


async def _bare(engine: _Engine, environment: Environment, settings: AgentsBench, number: int) -> None:
    """Call the engine as often as an agent does."""
    from protocol.messages import Sampling
    from rollout_server.engine.base import GenerateRequest

    ids = environment.prompt(WORDS)
    for _ in range(settings.turns + 1):
        request = GenerateRequest(ids, f"{number:032x}", "g", 4096, Sampling())
        ids = [*ids, *(await engine(request)).ids]


async def agent(question: Any, access: Any) -> str:
    """Search until the policy answers, over plain HTTP."""
    import aiohttp

    tool = {"type": "function", "function": {"name": "search", "parameters": {"properties": {"query": {}}}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    headers = {"Authorization": f"Bearer {access.api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        while True:
            body = {"model": "policy", "messages": messages, "tools": [tool]}
            async with session.post(f"{access.base_url}/chat/completions", json=body) as response:
                said = (await response.json())["choices"][0]["message"]
            if "tool_calls" not in said:
                return str(said["content"])
            found = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": FOUND}
            messages += [said, found]
