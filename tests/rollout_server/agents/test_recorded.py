"""Calls of an agent become sequences of tokens: which calls continue one, and what is recorded of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.messages import Owner, Question, Sampling, Segment, Status, Trajectory, VersionSpan
from protocol.search import Passage
from rollout_server.agents.runners import AgentAccess
from rollout_server.environment.environment import Environment
from rollout_server.rollout.live import LiveTrajectory
from rollout_server.rollout.trajectory import run_trajectory
from tests.support.agents import QUESTION, Client, client_of, playing
from tests.support.environments import make_environment
from tests.support.fake_engine import FakeEngine, Play, in_turn
from tests.support.fake_search import FakeSearch
from tests.support.waiting import eventually

FOUND = Passage(id="p1", contents="a\nb c")
USER = {"role": "user", "content": QUESTION.text}


def turns(environment: Environment, *texts: str, latency_s: float = 0.0) -> FakeEngine:
    """An engine that says these texts, one a call, whatever the session."""
    plays = iter([Play(environment.tokenizer.encode_trusted(text), latency_s=latency_s) for text in texts])
    return FakeEngine(lambda request, turn: next(plays))


def owners(trajectory: Trajectory) -> str:
    """One letter a segment: (P)rompt, p(o)licy, (E)nvironment."""
    return "".join({Owner.PROMPT: "P", Owner.POLICY: "o", Owner.ENVIRONMENT: "E"}[s.owner] for s in trajectory.segments)


async def loop(client: Client, found: str = "( a ) b c", **options: Any) -> str:
    """An agent: call the model, answer its calls, until it answers."""
    messages: list[dict[str, Any]] = [dict(USER)]
    while True:
        said = await client.chat(messages, **options)
        messages.append(said)
        if not said.get("tool_calls"):
            return str(said["content"])
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": found} for call in said["tool_calls"]]


async def test_ids_mask_logprobs_and_versions_are_those_of_the_builtin_loop(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    said = ["i need <search> a </search>", "<think> b </think> <search> d </search>", "<answer> c </answer> <eos>"]
    plays = []
    for number, text in enumerate(said):
        ids = environment.tokenizer.encode_trusted(text)
        spans = (
            VersionSpan(epoch=1, step=number, start=0, end=1),
            VersionSpan(epoch=1, step=number + 1, start=1, end=len(ids)),
        )
        plays.append(Play(ids, logprobs=[-0.1 * (i + number) for i in range(len(ids))], spans=spans))
    search = FakeSearch({"a": [FOUND], "d": [FOUND]})
    options: Any = {"session": "s", "group": "g"}
    builtin = await run_trajectory(environment, QUESTION, FakeEngine(in_turn(*plays)), search, Sampling(), **options)

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            return await loop(client)

    async with playing(environment, agent) as table:
        engine = FakeEngine(in_turn(*plays))
        ours = await table.play(engine)
    assert ours.ids.tolist() == builtin.ids.tolist() and len(ours.ids) > 30
    for name in ("mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(builtin, name))
    same = ("status", "answer", "reward", "rewards", "turns", "searches")
    assert [getattr(ours, n) for n in same] == [getattr(builtin, n) for n in same]
    assert [s.query for s in ours.segments] == [s.query for s in builtin.segments] == ["", "", "a", "", "d", ""]
    assert all((r.session, r.group) == ("s", "g") for r in engine.requests)


async def test_a_client_that_drops_reasoning_and_reorders_arguments_continues(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            said = await client.chat([USER])
            call = said["tool_calls"][0]
            assert said["reasoning_content"] == "i need" and json.loads(call["function"]["arguments"]) == {"query": "a"}
            spaced = {**call, "function": {"name": "search", "arguments": '{  "query":"a" }'}, "index": 0}
            history = {"role": "assistant", "content": None, "tool_calls": [spaced]}
            parts = [{"type": "text", "text": "( a ) "}, {"type": "text", "text": "b c"}]
            answer = await client.chat([USER, history, {"role": "tool", "tool_call_id": call["id"], "content": parts}])
            return str(answer["content"])

    async with playing(environment, agent) as table:
        trajectory = await table.play(turns(environment, "i need <search> a </search>", "<answer> c </answer>"))
    assert (owners(trajectory), trajectory.status, trajectory.answer) == ("PoEo", Status.ANSWERED, "c")
    assert table.stats.counts["agent_calls"] == 2 and not table.stats.counts["agent_sequences_message_differs"]


def _call(said: dict[str, Any], content: str = "b") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": content}


async def _edited(client: Client) -> None:
    said = await client.chat([USER])
    await client.chat([{**USER, "content": "c d ?"}, said, _call(said)])


async def _same_prompt(client: Client) -> None:
    await client.chat([USER])
    await client.chat([USER])


async def _parallel(client: Client) -> None:
    await asyncio.gather(*(client.chat([USER]) for _ in range(2)))


async def _other_tools(client: Client) -> None:
    said = await client.chat([USER])
    await client.chat([USER, said, _call(said)], tools=())


async def _own_text(client: Client) -> None:
    said = await client.chat([USER])
    await client.chat([USER, said, _call(said), {"role": "assistant", "content": "b"}, USER])


async def _in_use(client: Client) -> None:
    said = await client.chat([USER])
    await asyncio.gather(*(client.chat([USER, said, _call(said, text)]) for text in ("a", "b")))


@pytest.mark.parametrize(
    ("agent_calls", "label", "reason"),
    [
        (_edited, "message_differs", "message 0 differs"),
        (_same_prompt, "same_prompt", "same prompt again"),
        (_parallel, "in_use", "parallel to another call"),
        (_other_tools, "other_tools", "other tools"),
        (_own_text, "assistant_text", "assistant's text by the agent"),
        (_in_use, "in_use", "in use by another call"),
    ],
)
async def test_a_call_that_continues_nothing_begins_a_sequence_and_says_why(
    tmp_path: Path, agent_calls: Any, label: str, reason: str
) -> None:
    environment = make_environment(tmp_path)

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            await agent_calls(client)
            return "c"

    async with playing(environment, agent) as table:
        trajectory = await table.play(turns(environment, *["<search> a </search>"] * 3, latency_s=0.05))
    prompts = [segment for segment in trajectory.segments if segment.owner is Owner.PROMPT]
    assert [segment.finish_reason for segment in prompts] == ["", reason] and trajectory.reward == 1.0
    assert table.stats.counts[f"agent_sequences_{label}"] == 1
    # each sampled token is in one sequence, once
    assert trajectory.num_sampled == trajectory.turns * 3


async def test_a_failed_call_leaves_no_trace_and_its_repetition_continues(tmp_path: Path) -> None:
    """A request that its template refuses fails between two turns; the next one continues the sequence."""
    environment = make_environment(tmp_path)

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            said = await client.chat([USER])
            wrong = await client.chat([USER, said, _call(said)], n=2)
            assert wrong["error"]["param"] == "n"
            answer = await client.chat([USER, said, _call(said)])
            return str(answer["content"])

    async with playing(environment, agent) as table:
        trajectory = await table.play(turns(environment, "<search> a </search>", "<answer> c </answer>"))
    assert (owners(trajectory), trajectory.reward) == ("PoEo", 1.0)


async def test_a_repetition_gets_the_running_or_finished_turn(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    asked: list[dict[str, Any]] = []

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            first = asyncio.create_task(client.chat([USER]))
            await eventually(lambda: bool(engine.requests), "the turn runs")
            first.cancel()
            asked.append(await client.chat([USER], retry=1))  # of the running turn
            asked.append(await client.chat([USER], retry=2))  # of the finished one
            return str((await client.chat([USER, asked[0], _call(asked[0])]))["content"])

    plays = [
        Play(environment.tokenizer.encode_trusted("<search> a </search>"), latency_s=0.3),
        Play(environment.tokenizer.encode_trusted("<answer> c </answer>")),
    ]
    engine = FakeEngine(in_turn(*plays))
    async with playing(environment, agent) as table:
        trajectory = await table.play(engine)
    assert asked[0] == asked[1] and owners(trajectory) == "PoEo"
    assert table.stats.counts["agent_retries"] == 2 and table.stats.counts["agent_calls"] == 2


async def test_a_client_without_the_header_gets_its_turn_after_it_went_away(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            first = asyncio.create_task(client.chat([USER]))
            await eventually(lambda: bool(engine.requests), "the turn runs")
            first.cancel()
        (record,) = table.agents.gateway._recorded.values()
        await eventually(lambda: all(reply.abandoned for reply in record._replies.values()), "its client is gone")
        async with client_of(access) as client:
            return await loop(client)

    plays = [
        Play(environment.tokenizer.encode_trusted("<search> a </search>"), latency_s=0.3),
        Play(environment.tokenizer.encode_trusted("<answer> c </answer>")),
    ]
    engine = FakeEngine(in_turn(*plays))
    async with playing(environment, agent) as table:
        trajectory = await table.play(engine)
    assert owners(trajectory) == "PoEo" and table.stats.counts["agent_retries"] == 1


async def test_limits_end_the_trajectory_whatever_the_agent_then_does(tmp_path: Path) -> None:
    environment = make_environment(tmp_path, max_turns=1)

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            try:
                await loop(client)
            except KeyError:
                assert client.statuses == [200, 200, 400]
            return "c"

    async with playing(environment, agent) as table:
        trajectory = await table.play(turns(environment, *["<search> a </search>"] * 3))
    assert (trajectory.status, trajectory.cause, trajectory.answer) == (Status.OUT_OF_TURNS, "", "")
    assert (owners(trajectory), trajectory.reward) == ("PoEo", 0.0)

    environment = make_environment(tmp_path / "short", max_context=40, reserve_tokens=4)

    async def crashes(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            return await loop(client, "b " * 60)

    async with playing(environment, crashes) as table:
        trajectory = await table.play(turns(environment, *["<search> a </search>"] * 3))
    assert (trajectory.status, trajectory.cause) == (Status.TRUNCATED, "context") and owners(trajectory) == "Po"

    async def pastes(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            return await loop(client, "b" * 3000)  # refused before it is tokenised

    async with playing(environment, pastes) as table:
        trajectory = await table.play(turns(environment, *["<search> a </search>"] * 3))
    assert (trajectory.status, trajectory.cause) == (Status.TRUNCATED, "context") and owners(trajectory) == "Po"

    async def asks_too_much(question: Question, access: AgentAccess) -> None:
        async with client_of(access) as client:
            await client.chat([{**USER, "content": "a " * 50}])

    async with playing(environment, asks_too_much) as table:
        trajectory = await table.play(turns(environment))
    assert (trajectory.status, trajectory.cause) == (Status.FAILED, "prompt_too_long")


async def test_a_trajectory_that_is_too_old_ends_at_once(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)

    async def hangs(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            said = await client.chat([USER])
            await client.chat([USER, said, _call(said)])
            assert client.statuses == [200, 409]
            await asyncio.Event().wait()
            return ""

    async with playing(environment, hangs) as table:
        trajectory = await table.play(turns(environment, "<search> a </search>"), should_stop=lambda first: True)
    assert (trajectory.status, trajectory.cause) == (Status.STALE, "max_lag")


async def test_searches_through_the_gateway_are_recorded_with_their_passages(tmp_path: Path) -> None:
    environment = make_environment(tmp_path, rewards=[{"type": "em"}, {"type": "retrieval_hit", "weight": 0.5}])

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            said = await client.chat([USER])
            found = await client.post("/search", {"query": "a"})
            assert found["passages"] == [{"id": "p1", "title": "a", "text": "b c", "contents": "a\nb c"}]
            return str((await client.chat([USER, said, _call(said, "b c")]))["content"])

    async with playing(environment, agent) as table:
        trajectory = await table.play(
            turns(environment, "<search> a </search>", "<answer> d </answer>"), FakeSearch(otherwise=[FOUND])
        )
    seen = trajectory.segments[2]
    assert (seen.query, seen.passage_ids, trajectory.searches) == ("a", ("p1",), 1)
    assert trajectory.rewards == {"em": 0.0, "retrieval_hit": 1.0} and trajectory.reward == 0.5


async def test_searches_of_an_agent_that_rewrites_its_history_count_too(tmp_path: Path) -> None:
    environment = make_environment(tmp_path, rewards=[{"type": "retrieval_hit"}])

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            await client.chat([USER])
            await client.post("/search", {"query": "a"})
            text = {"role": "assistant", "content": "Calling tools: [...]"}
            seen = {"role": "user", "content": "Observation: b c"}
            return str((await client.chat([USER, text, seen]))["content"])

    async with playing(environment, agent) as table:
        trajectory = await table.play(
            turns(environment, "<search> a </search>", "<answer> d </answer>"), FakeSearch(otherwise=[FOUND])
        )
    assert (owners(trajectory), trajectory.searches, trajectory.reward) == ("PoEPo", 1, 1.0)
    assert len(trajectory.segments[2].ids) == 0 and trajectory.segments[3].finish_reason == "message 1 differs"


async def test_lenient_a_text_with_the_id_of_the_call_stands_for_it(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            said = await client.chat([USER])
            text = {"role": "assistant", "content": f"Calling tools: [{said['tool_calls'][0]['id']}]"}
            return str((await client.chat([USER, text, {"role": "user", "content": "b c"}]))["content"])

    for lenient, expected in ((False, "PoPo"), (True, "PoEo")):
        async with playing(environment, agent, lenient=lenient) as table:
            trajectory = await table.play(turns(environment, "<search> a </search>", "<answer> c </answer>"))
        assert owners(trajectory) == expected


async def test_stop_strings_of_the_agent_end_a_turn_and_are_not_in_its_answer(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            return str((await client.chat([USER], stop=["found"], max_tokens=3))["content"])

    engine = turns(environment, "a b found")
    async with playing(environment, agent) as table:
        trajectory = await table.play(engine)
    assert trajectory.answer == "a b " and len(trajectory.segments[1].ids) == 3
    assert "found" in engine.requests[0].stop and engine.requests[0].max_new_tokens == 3


async def test_watchers_see_the_segments_in_the_order_of_their_recording(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    live = LiveTrajectory("s")
    seen: list[int] = []

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            for _ in range(2):
                await client.chat([USER])
                assert live.transcript is not None
                seen.append(len(live.transcript.segments))
            return "c"

    events: list[Segment | Trajectory] = []
    async with playing(environment, agent) as table:
        trajectory = await table.play(
            turns(environment, *["<search> a </search>"] * 2), live=live, on_progress=events.append
        )
    assert seen == [2, 4] and live.ended is trajectory and live.session != "s"
    assert events == [trajectory.segments[1], trajectory.segments[3], trajectory]
