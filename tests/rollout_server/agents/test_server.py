"""A rollout server whose trajectories an agent plays: groups, failures, episodes; the books balance."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from protocol.messages import GroupFailed, Owner, Question, Status, TrajectoryGroup
from protocol.run_meta import SEQUENCES, RunMeta, tokenizer_digest
from protocol.versions import PolicyVersion
from rollout_server.agents.runners import AgentAccess
from tests.support import rollout_process
from tests.support.agents import client_of
from tests.support.fake_engine import Fault
from tests.support.messages import make_task
from tests.support.waiting import eventually

V5 = PolicyVersion(1, 5)
AGENT = {
    "type": "python",
    "target": "tests.rollout_server.agents.test_server:searcher",
    "gateway_search": True,
}


async def searcher(question: Question, access: AgentAccess, fails: str = "") -> str:
    """An agent that searches through the gateway, and fails for a question with the text `fails`."""
    async with client_of(access) as client:
        messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
        while (said := await client.chat(messages)).get("tool_calls"):
            messages.append(said)
            for call in said["tool_calls"]:
                found = await client.post("/search", {"query": "a b"})
                text = "( b ) " + found["passages"][0]["text"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        if fails and fails in question.text:
            raise RuntimeError("broken")
        return str(said["content"])


async def values_of(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as response:
        return (await response.json())["values"]  # type: ignore[no-any-return]


def know_learner(world: Any, model: Path) -> None:
    """Write what a learner writes at its start: without it nothing is leased for an agent."""
    tokenizer = tokenizer_digest((model / "tokenizer.json").read_bytes())
    world.sync.hset(world.keys.meta, mapping=RunMeta(SEQUENCES, tokenizer).fields())


async def test_a_group_survives_an_engine_that_dies_in_the_middle_of_calls(world, model: Path, tokens) -> None:
    world.target(V5)
    know_learner(world, model)
    dying, other = rollout_process.talker(tokens, pace_s=0.01), rollout_process.talker(tokens)
    dying.faults["/generate"] = Fault(drop=True, after=2, times=4)
    rewards = {"rewards": [{"type": "em"}, {"type": "retrieval_hit", "weight": 0.0}]}
    episode = {"template": "demo", "max_turns": 4, **rewards}
    async with dying, other, rollout_process.server(world, model, agent=AGENT, episode=episode) as (url, _):
        world.register("dying", dying.url, V5)
        world.issue(make_task(1, group_size=4))
        await eventually(lambda: dying.faults["/generate"].times == 0, "calls were cut")
        world.register("other", other.url, V5)
        await eventually(lambda: len(world.published()) == 1, "the group is published")
        values = await values_of(url)
    (group,) = world.published()
    assert isinstance(group, TrajectoryGroup) and values["failovers"] >= 4
    for trajectory in group.trajectories:
        assert [s.owner for s in trajectory.segments] == [Owner.PROMPT, Owner.POLICY, Owner.ENVIRONMENT, Owner.POLICY]
        _, search, found, answer = trajectory.segments
        assert search.ids.tolist() == tokens.encode_trusted("<search> a b </search>"), "no token lost or repeated"
        assert answer.ids.tolist() == tokens.encode_trusted("<answer> c </answer>")
        assert found.query == "a b" and found.passage_ids and "d e f" in tokens.decode(found.ids.tolist())
        assert (trajectory.status, trajectory.answer, trajectory.searches) == (Status.ANSWERED, "c", 1)
    assert values["tokens_generated"] == sum(t.num_sampled for t in group.trajectories)
    assert values["trajectories"] == 4 and values["trajectories_in_flight"] == values["agents_running"] == 0
    assert world.pending() == 0


async def test_a_group_whose_agents_fail_is_tried_again_and_then_reported(world, model: Path, tokens) -> None:
    world.target(V5)
    know_learner(world, model)
    agent = AGENT | {"options": {"fails": "q"}}
    async with (
        rollout_process.talker(tokens) as engine,
        rollout_process.server(world, model, agent=agent) as (url, _),
    ):
        world.register("e", engine.url, V5)
        task = make_task(1, group_size=2)
        world.issue(task.model_copy(update={"question": task.question.model_copy(update={"text": "q"})}))
        await eventually(lambda: len(world.published()) == 1, "the failure is published")
        values = await values_of(url)
    (failed,) = world.published()
    assert isinstance(failed, GroupFailed) and failed.reason == "agent_exit"
    # the tokens of all attempts are accounted for
    assert values["tokens_generated"] == 3 * failed.generated_tokens > 0
    assert values["agent_failures_agent_exit"] == values["trajectories"] == 6


async def test_episodes_play_with_the_agent(world, model: Path, tokens) -> None:
    world.target(V5)
    know_learner(world, model)
    async with (
        rollout_process.talker(tokens) as engine,
        rollout_process.server(world, model, agent=AGENT) as (url, _),
        aiohttp.ClientSession() as session,
    ):
        world.register("e", engine.url, V5)
        body = {"questions": [{"id": "q", "question": "a ?", "answers": ["c"]}], "n": 2, "pin": True}
        async with asyncio.timeout(20), session.post(f"{url}/v1/episodes", json=body) as response:
            answer = await response.json()
        assert (await values_of(url))["agent_calls"] == 4
    assert answer["em"] == 1.0 and [episode["searches"] for episode in answer["episodes"]] == [1, 1]
    assert [segment["owner"] for segment in answer["episodes"][0]["segments"]] == [
        *("prompt", "policy", "environment", "policy")
    ]
