"""Agents on published libraries, unmodified but for base URL and key, through the gateway.

The policy is scripted: two searches, then an answer. Libraries that return what they got keep one sequence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from protocol.messages import Owner, Question, Sampling, Status, Trajectory, VersionSpan
from protocol.search import Passage
from rollout_server.agents.config import CommandAgentSettings
from rollout_server.environment.environment import Environment
from rollout_server.rollout.trajectory import run_trajectory
from tests.support.agents import QUESTION, playing
from tests.support.environments import make_environment
from tests.support.fake_engine import FakeEngine, Play, in_turn
from tests.support.fake_search import FakeSearch

CLIENTS = Path(__file__).parent / "clients"
SEARCH, ANSWER = "<think> b </think> <search> a </search>", "<think> b </think> <answer> c </answer>"
FINAL = "<think> b </think> <final_answer> c </final_answer>"


def peers_python() -> str:
    """The interpreter that has the clients."""
    return os.environ["FORAY_PEERS_PYTHON"]


def node_client(tmp_path: Path, name: str) -> tuple[str, str]:
    """The command of a client on Node, in a folder that sees the packages in FORAY_PEERS_NODE."""
    modules = Path(os.environ.get("FORAY_PEERS_NODE", "")) / "node_modules"
    if not (modules / "openai").is_dir():
        pytest.skip("FORAY_PEERS_NODE names no folder with `npm install openai ai @ai-sdk/openai`")
    (tmp_path / "node_modules").symlink_to(modules)
    client = tmp_path / f"{name}.mjs"
    client.write_text((CLIENTS / client.name).read_text())
    return "node", str(client)


def plays_of(environment: Environment, *texts: str) -> list[Play]:
    """These turns, with other log-probs and versions for each token."""
    plays = []
    for number, ids in enumerate(map(environment.tokenizer.encode_trusted, texts)):
        ends = [(number, 0, 2), (number + 1, 2, len(ids))]
        spans = tuple(VersionSpan(epoch=1, step=step, start=start, end=end) for step, start, end in ends)
        plays.append(Play(ids, logprobs=[-0.1 * (i + number) for i in range(len(ids))], spans=spans))
    return plays


async def assert_as_builtin(environment: Environment, plays: list[Play], question: str, ours: Trajectory) -> None:
    """AssertionError unless tokens, mask, log-probs and versions are those of the built-in loop for the same text."""
    search = FakeSearch(otherwise=[Passage(id="p", contents="a\nb c")])
    asked = Question(id="q", text=question, answers=("c",))
    engine = FakeEngine(in_turn(*plays))
    builtin = await run_trajectory(environment, asked, engine, search, Sampling(), session="s", group="g")
    for name in ("ids", "mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(builtin, name), name)


@pytest.mark.parametrize(
    ("words", "last", "sequences"),
    [
        ("agent_openai chat plain", ANSWER, 1),
        ("agent_openai chat stream", ANSWER, 1),
        ("agent_openai responses plain", ANSWER, 1),
        ("agent_openai responses stream", ANSWER, 1),
        ("agent_sdk responses plain", ANSWER, 1),
        ("agent_sdk responses stream", ANSWER, 1),
        ("agent_sdk chat plain", ANSWER, 1),
        ("agent_langgraph plain", ANSWER, 1),
        ("agent_langgraph stream", ANSWER, 1),
        ("agent_smolagents", FINAL, 3),
        ("agent_node openai plain", ANSWER, 1),
        ("agent_node openai stream", ANSWER, 1),
        ("agent_node ai responses", ANSWER, 1),
        ("agent_node ai chat", ANSWER, 1),
    ],
)
async def test_an_agent_of_a_library(
    tmp_path: Path, did: Callable[[str, str], None], words: str, last: str, sequences: int
) -> None:
    environment = make_environment(tmp_path, more_words=["<final_answer>", "</final_answer>"])
    name, *arguments = words.split()
    command: tuple[str, ...] = (peers_python(), str(CLIENTS / f"{name}.py"), *arguments)
    if name == "agent_node":
        command = (*node_client(tmp_path, name), *arguments)
    plays = plays_of(environment, SEARCH, SEARCH, last)
    left = iter(plays)
    async with playing(environment, settings=CommandAgentSettings(command=command, deadline_s=300)) as table:
        trajectory = await table.play(FakeEngine(lambda request, turn: next(left)))
    assert (trajectory.status, trajectory.cause, trajectory.answer.strip(), trajectory.turns) == (
        Status.ANSWERED,
        "",
        "c",
        3,
    )
    begun = [segment.finish_reason for segment in trajectory.segments if segment.owner is Owner.PROMPT]
    assert len(begun) == sequences and trajectory.reward == 1.0
    assert [s.query for s in trajectory.segments if s.query] == (["a", "a"] if sequences == 1 else [])
    if sequences == 1:
        system = "answer\n\n" if name == "agent_sdk" else ""  # instructions are the start of the question
        await assert_as_builtin(environment, plays, system + QUESTION.text, trajectory)
    counts = {name: int(count) for name, count in table.stats.counts.items() if count and "ignored" in name}
    did(words, f"3 turns, {len(begun)} sequences {[reason for reason in begun if reason]} {counts}")
