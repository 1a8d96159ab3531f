"""Agents that fail in every way: the trajectory has a cause, the others and the gateway go on."""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ConnectionTimeoutError, web

from protocol.errors import UserError
from protocol.messages import Question, Segment, Status, Trajectory
from rollout_server.agents import run
from rollout_server.agents.config import CommandAgentSettings, HttpAgentSettings, PythonAgentSettings
from rollout_server.agents.runners import AgentAccess, AgentResult, HttpRunner
from rollout_server.config import RolloutSettings
from rollout_server.environment.environment import Environment
from tests.support.agents import QUESTION, client_of, playing
from tests.support.environments import make_environment
from tests.support.fake_engine import FakeEngine, Play
from tests.support.scripted_server import ScriptedServer
from tests.support.waiting import eventually

USER = {"role": "user", "content": QUESTION.text}
CALL = """
import json, os, sys, time, urllib.request
def call(path="/chat/completions", body=None):
    body = body or {"model": "policy", "messages": [{"role": "user", "content": os.environ["FORAY_QUESTION"]}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers={
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
"""


def answering(environment: Environment, **facts: Any) -> FakeEngine:
    ids = environment.tokenizer.encode_trusted("<answer> c </answer>")
    return FakeEngine(lambda request, turn: Play(ids, **facts))


def command(program: str, **options: Any) -> CommandAgentSettings:
    return CommandAgentSettings(command=(sys.executable, "-c", CALL + program), **options)


@pytest.mark.parametrize(
    ("program", "options", "status", "cause"),
    [
        ("call(); print('log'); print(json.dumps({'answer': 'c'}))", {}, Status.ANSWERED, ""),
        ("call(); sys.exit('broken')", {}, Status.FAILED, "agent_exit"),
        ("call(); os.kill(os.getpid(), 15)", {}, Status.FAILED, "agent_exit"),
        ("call(); print('garbage')", {}, Status.FAILED, "agent_result"),
        ("call(); print('[1, 2]')", {}, Status.FAILED, "agent_result"),
        ("call(); print('{\"answer\": 7}')", {}, Status.FAILED, "agent_result"),
        ("call(); print('{\"reward\": NaN}')", {"reward": "agent"}, Status.FAILED, "agent_result"),
        ("call(); print('{}')", {"reward": "agent"}, Status.FAILED, "agent_result"),
        ("call(); sys.stdout.buffer.write(bytes(range(256)) * 20000)", {}, Status.FAILED, "agent_result"),
        ("print('{}')", {}, Status.FAILED, "agent_silent"),
        ("call(); x = bytearray(1 << 30)", {"memory_mb": 200}, Status.FAILED, "agent_memory"),
        ("call(); time.sleep(60)", {"deadline_s": 2.0}, Status.FAILED, "agent_timeout"),
        ("call(body={'messages': [], 'n': 3})", {}, Status.FAILED, "agent_refused"),
        # a child that keeps the pipes open does not outlive the agent
        ("call(); os.fork() or time.sleep(60); print('{}')", {}, Status.ANSWERED, ""),
    ],
)
async def test_every_end_of_a_command_has_a_cause(
    tmp_path: Path, program: str, options: dict[str, Any], status: Status, cause: str
) -> None:
    environment = make_environment(tmp_path)
    events: list[Segment | Trajectory] = []
    async with playing(environment, settings=command(program, **options)) as table:
        trajectory = await table.play(answering(environment), on_progress=events.append)
        assert (trajectory.status, trajectory.cause) == (status, cause)
        assert table.agents.running == 0 and table.agents.places._value == 8
    # accounting: what was counted as generated is in the trajectory, which ends once
    generated = sum(len(one.ids) for one in events if isinstance(one, Segment))
    assert generated == trajectory.num_sampled and [e for e in events if isinstance(e, Trajectory)] == [trajectory]
    if cause:
        assert table.stats.counts[f"agent_failures_{cause}"] == 1 and trajectory.reward == 0.0


async def test_a_cancelled_trajectory_leaves_no_process(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    program = (
        "call(); child = os.fork() or time.sleep(60)\n"
        "open(os.environ['PIDS'] + '.new', 'w').write(f'{os.getpid()} {child}')\n"
        "os.rename(os.environ['PIDS'] + '.new', os.environ['PIDS']); time.sleep(60)"
    )
    pids = tmp_path / "pids"
    async with playing(environment, settings=command(program, env={"PIDS": str(pids)})) as table:
        playing_one = asyncio.create_task(table.play(answering(environment)))
        await eventually(pids.exists, "the agent has a child")
        playing_one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing_one
    for pid in map(int, pids.read_text().split()):
        await eventually(partial(gone, pid), "the process has ended")


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


async def test_a_command_gets_no_secret_of_foray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORAY_OPERATOR_TOKEN", "x" * 40)
    environment = make_environment(tmp_path)
    program = "call(); print(json.dumps({'answer': ' '.join(sorted(n for n in os.environ if n.startswith('FORAY_')))}))"
    async with playing(environment, settings=command(program)) as table:
        trajectory = await table.play(answering(environment))
    assert trajectory.answer == "FORAY_QUESTION FORAY_QUESTION_ID FORAY_TASK"


async def test_time_in_calls_does_not_count_for_the_deadline(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)

    async def agent(question: Question, access: AgentAccess) -> None:
        async with client_of(access) as client:
            await asyncio.gather(*(client.chat([{**USER, "content": text}]) for text in ("a", "b")))

    async with playing(environment, agent, deadline_s=0.4) as table:
        trajectory = await table.play(answering(environment, latency_s=0.8))
    assert trajectory.status is Status.ANSWERED and trajectory.turns == 2


async def test_an_agent_that_refuses_to_end_fails_and_its_late_calls_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LEAVE_S", 0.05)
    environment = make_environment(tmp_path)
    late = asyncio.Event()
    statuses: list[int] = []

    async def stubborn(question: Question, access: AgentAccess) -> None:
        async with client_of(access) as client:
            await client.chat([USER])
            while not late.is_set():
                try:
                    await late.wait()
                except asyncio.CancelledError:
                    continue
            await client.chat([USER])
            statuses.extend(client.statuses)

    async with playing(environment, stubborn, deadline_s=0.1) as table:
        engine = answering(environment)
        trajectory = await table.play(engine)
        assert (trajectory.status, trajectory.cause) == (Status.FAILED, "agent_timeout")
        late.set()
        await eventually(lambda: bool(statuses), "the late call is answered")
    assert statuses == [200, 404] and len(engine.requests) == 1 and table.stats.counts["agent_late_calls"] == 1


async def test_a_call_in_flight_at_the_end_of_its_agent_is_cancelled(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    statuses: list[int] = []

    async def agent(question: Question, access: AgentAccess) -> str:
        async def call() -> None:
            async with client_of(access) as client:
                await client.chat([{**USER, "content": "d ?"}])
                statuses.extend(client.statuses)

        async with client_of(access) as client:
            await client.chat([USER])
        background.append(asyncio.create_task(call()))
        await eventually(lambda: len(engine.requests) == 2, "the second call")
        return "c"

    background: list[asyncio.Task[None]] = []
    ids = environment.tokenizer.encode_trusted("a")
    engine = FakeEngine(lambda request, turn: Play(ids, latency_s=60.0 * (len(engine.requests) > 1)))
    async with playing(environment, agent) as table:
        trajectory = await table.play(engine)
        await background[0]
    assert statuses == [404] and trajectory.turns == 1 and trajectory.status is Status.ANSWERED


@pytest.mark.parametrize("cause", ["no_engine", "refused"])
async def test_an_engine_that_fails_is_the_cause_and_the_agent_is_ended(tmp_path: Path, cause: str) -> None:
    environment = make_environment(tmp_path)

    async def hangs(question: Question, access: AgentAccess) -> None:
        async with client_of(access) as client:
            for retry in range(2):
                answer = await client.chat([USER], retry=retry)
                assert answer["error"]["code"] == cause
            await asyncio.Event().wait()

    engine = answering(environment, error=cause)
    async with playing(environment, hangs) as table:
        trajectory = await table.play(engine)
    assert (trajectory.status, trajectory.cause) == (Status.FAILED, cause)
    assert len(engine.requests) == 1 and not any(table.stats.counts[f"agent_failures_{c}"] for c in run.CAUSES)


async def test_the_agents_reward_or_forays(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    asked: list[Question] = []

    async def agent(question: Question, access: AgentAccess) -> AgentResult:
        asked.append(question)
        async with client_of(access) as client:
            await client.chat([USER])
        return AgentResult("c", 0.25)

    for reward, expected in (("foray", (1.0, {"em": 1.0, "agent": 0.25})), ("agent", (0.25, {"agent": 0.25}))):
        async with playing(environment, agent, reward=reward) as table:
            trajectory = await table.play(answering(environment))
        assert (trajectory.reward, trajectory.rewards) == expected
    assert [question.answers for question in asked] == [(), ("c",)]


async def test_a_plain_function_runs_in_a_thread(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    settings = PythonAgentSettings(target="tests.rollout_server.agents.test_runners:blocking")
    async with playing(environment, settings=settings) as table:
        trajectory = await table.play(answering(environment))
    assert (trajectory.status, trajectory.answer) == (Status.ANSWERED, "c")


def blocking(question: Question, access: AgentAccess) -> dict[str, str]:
    """A plain function as agent."""
    import json
    import urllib.request

    body = json.dumps({"messages": [USER]}).encode()
    headers = {"Authorization": f"Bearer {access.api_key}"}
    request = urllib.request.Request(f"{access.base_url}/chat/completions", body, headers)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    return {"answer": message["content"]}


def test_a_function_that_cannot_be_called_is_refused_at_the_start(tmp_path: Path) -> None:
    from rollout_server.agents.runners import PythonRunner

    with pytest.raises(UserError, match=r"the agent 'tests.rollout_server.agents.test_runners:nothing' cannot be used"):
        PythonRunner(PythonAgentSettings(target="tests.rollout_server.agents.test_runners:nothing"))


class Service(ScriptedServer):
    """An agent behind HTTP, which answers as the test says."""

    def __init__(self, answer: Any, calls: bool = True) -> None:
        super().__init__()
        self._answer, self._calls = answer, calls
        self.asked: list[dict[str, Any]] = []

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/agent", self._serve)
        return app

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self._calls:
            async with client_of(AgentAccess(body["base_url"], body["api_key"])) as client:
                await client.chat([USER])
        if isinstance(self._answer, web.StreamResponse):
            return self._answer
        assert request.transport is not None
        if self._answer is None:
            request.transport.abort()
        return web.json_response(self._answer)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ({"answer": "c"}, ""),
        (web.Response(status=500, text="broken"), "agent_exit"),
        (web.Response(text="<html>"), "agent_result"),
        (web.Response(body=b'"' + b"x" * (2 << 20)), "agent_result"),
        (None, "agent_exit"),
    ],
)
async def test_an_agent_behind_http(tmp_path: Path, answer: Any, cause: str) -> None:
    environment = make_environment(tmp_path)
    async with Service(answer) as service:
        settings = HttpAgentSettings(target=f"{service.url}/agent")
        async with playing(environment, settings=settings) as table:
            trajectory = await table.play(answering(environment))
    assert trajectory.cause == cause
    assert {name: service.asked[0][name] for name in ("question", "id", "meta")} == {
        "question": QUESTION.text,
        "id": "q",
        "meta": {},
    }


async def test_a_service_that_restarts_is_waited_for(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    service = Service({"answer": "c"})
    async with service:
        pass
    async with playing(environment, settings=HttpAgentSettings(target=f"{service.url}/agent")) as table:
        waiting = asyncio.create_task(table.play(answering(environment)))
        await asyncio.sleep(0.2)
        async with service:
            assert (await waiting).status is Status.ANSWERED


async def test_a_service_too_busy_to_accept_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been sent, so no agent has started: a full listen queue is no failure of the agent."""
    environment = make_environment(tmp_path)
    post, refused = HttpRunner._post, [ConnectionTimeoutError("busy")]

    async def busy(self: HttpRunner, body: dict[str, Any]) -> AgentResult:
        if refused:
            raise refused.pop()
        return await post(self, body)

    monkeypatch.setattr(HttpRunner, "_post", busy)
    async with Service({"answer": "c"}) as service:
        settings = HttpAgentSettings(target=f"{service.url}/agent")
        async with playing(environment, settings=settings) as table:
            assert (await table.play(answering(environment))).status is Status.ANSWERED


async def test_a_warning_when_more_than_a_twentieth_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environment = make_environment(tmp_path)

    async def agent(question: Question, access: AgentAccess) -> str:
        return "c"

    async with playing(environment, agent) as table:
        for cause in (*[""] * 60, *["agent_exit"] * 3):
            table.agents.count(cause)
        assert not caplog.messages
        with caplog.at_level(logging.WARNING):
            for cause in ["agent_exit"] * 3:
                table.agents.count(cause)
    assert len(caplog.messages) == 1 and "6 % of the last 64 trajectories failed because of the agent" in caplog.text


@pytest.mark.parametrize("reward", [{"type": "retrieval_hit"}, {"type": "format", "retrieval": 0.1}])
def test_rewards_of_passages_need_the_search_of_the_gateway(reward: dict[str, Any]) -> None:
    agent = {"type": "http", "target": "http://127.0.0.1:1/agent"}
    given = {"episode": {"rewards": [reward]}, "agent": agent}
    with pytest.raises(ValueError, match=r"reads passages, which Foray does not see .* agent.gateway_search = true"):
        RolloutSettings.model_validate(given)
    RolloutSettings.model_validate(given | {"agent": agent | {"gateway_search": True}})
    RolloutSettings.model_validate(given | {"agent": {"type": "builtin"}})
