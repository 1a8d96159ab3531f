"""Environments and tool servers of others with Foray: the examples of examples/agents."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.messages import Status
from rollout_server.agents.config import CommandAgentSettings
from rollout_server.tools import build_tool
from rollout_server.tools.mcp import McpSettings
from tests.support.agents import QUESTION, playing
from tests.support.environments import make_environment
from tests.support.fake_engine import FakeEngine, Play
from tests.support.waiting import wait_until

Did = Callable[[str, str], None]
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
CLIENTS = Path(__file__).parent / "clients"
ALLOW = {"search": 'passages, {"query": "..."}', "read": 'a document, {"id": "..."}'}


def test_each_example_is_short() -> None:
    assert all(len(path.read_text().splitlines()) <= 60 for path in EXAMPLES.glob("*.py"))


@contextmanager
def mcp_server(retriever: str, log: Path) -> Iterator[str]:
    """The example's MCP server, by HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [os.environ["FORAY_PEERS_PYTHON"], str(EXAMPLES / "mcp_retriever.py"), retriever, "--port", str(port)]
    with log.open("wb") as output, subprocess.Popen(argv, stdout=output, stderr=output) as process:

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        try:
            wait_until(listens, "the MCP server listens", said=log.read_text)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


async def test_a_retriever_as_an_mcp_server_and_mcp_as_a_tool(retriever: str, tmp_path: Path, did: Did) -> None:
    with mcp_server(retriever, tmp_path / "log") as url:
        tool = build_tool(McpSettings(url=url, allow=ALLOW), ())
        found = await tool('search {"query": "number3"}')
        document = await tool('read {"id": "d3"}')
        wrong = await tool('search {"words": "number3"}')
        gone = await tool('read {"id": "nowhere"}')
        await tool.close()
    did("mcp 2.3.0 MCPServer", "2 tools called, 2 mistakes reported")
    assert "Of number3 and more." in found.text and found.text.startswith("[d3]") and not found.error
    assert document.text == '"Title 3"\nOf number3 and more.'
    assert wrong.mistake == gone.mistake == "tool_error" and not wrong.error


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("answer", "reward"), [("c", 1.0), ("b", 0.0)])
async def test_an_environment_of_skyrl_gym(
    retriever: str, tmp_path: Path, did: Did, answer: str, reward: float
) -> None:
    environment = make_environment(tmp_path, more_words=["number3"])
    command = (os.environ["FORAY_PEERS_PYTHON"], str(CLIENTS / "agent_skyrl.py"), retriever)
    turns = ["<think> b </think> <search> number3 </search>", f"<answer> {answer} </answer>"]
    plays = iter([Play(environment.tokenizer.encode_trusted(text)) for text in turns])
    settings = CommandAgentSettings(command=command, deadline_s=240, reward="agent")
    async with playing(environment, settings=settings) as table:
        trajectory = await table.play(FakeEngine(lambda request, turn: next(plays)))
    did("skyrl-gym 0.4.0 search", f"{trajectory.turns} turns, reward {trajectory.reward}")
    assert (trajectory.status, trajectory.cause, trajectory.turns) == (Status.ANSWERED, "", 2)
    assert (trajectory.answer.strip(), trajectory.reward) == (answer, reward)
    text = environment.tokenizer.decode([i for s in trajectory.segments for i in s.ids.tolist()])
    assert text.count("number3") >= 2, "the passage is shown"


@pytest.mark.skipif(
    "FORAY_VERIFIERS_PYTHON" not in os.environ, reason="verifiers needs openai < 3: an environment apart"
)
@pytest.mark.timeout(600)
async def test_a_taskset_of_verifiers(tmp_path: Path, did: Did) -> None:
    """FORAY_VERIFIERS_PYTHON: an interpreter with `pip install verifiers==0.4.0 uv`."""
    environment = make_environment(tmp_path)
    command = (os.environ["FORAY_VERIFIERS_PYTHON"], str(EXAMPLES / "verifiers_agent.py"), "foray_lakes")
    given = {"env": {"PYTHONPATH": str(CLIENTS)}, "deadline_s": 500, "reward": "agent", "memory_mb": 8192}
    settings = CommandAgentSettings.model_validate({"command": command} | given)
    turn = Play(environment.tokenizer.encode_trusted("<think> b </think> <answer> c </answer>"))
    async with playing(environment, settings=settings) as table:
        question = QUESTION.model_copy(update={"id": "1"})
        trajectory = await table.play(FakeEngine(lambda request, number: turn), question=question)
    did("verifiers 0.4.0 vf-eval", f"{trajectory.turns} turn, reward {trajectory.reward}")
    assert (trajectory.status, trajectory.cause, trajectory.reward) == (Status.ANSWERED, "", 1.0)
    assert environment.tokenizer.decode(trajectory.segments[0].ids.tolist()).endswith("a b ?"), "the second task"
