"""The HTTP of the gateway: keys, refusals, bounds, streams, the two dialects."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Question, Status
from rollout_server.agents import gateway
from rollout_server.agents.runners import AgentAccess
from tests.support.agents import QUESTION, SEARCH, Client, client_of, playing
from tests.support.environments import make_environment
from tests.support.fake_engine import FakeEngine, Play
from tests.support.fake_search import FakeSearch

USER = {"role": "user", "content": QUESTION.text}
BODY = {"model": "policy", "messages": [USER]}


async def within(tmp_path: Path, act: Any, *texts: str, latency_s: float = 0.0, error: str = "", **options: Any) -> Any:
    """Play one trajectory whose agent does `act(client)`; the trajectory and what `act` returned."""
    environment = make_environment(tmp_path)
    encode, results = environment.tokenizer.encode_trusted, []
    plays = iter([Play(encode(text), latency_s=latency_s, error=error) for text in texts])

    async def agent(question: Question, access: AgentAccess) -> str:
        async with client_of(access) as client:
            results.append(await act(client))
            return "c"

    async with playing(environment, agent, **options) as table:
        trajectory = await table.play(FakeEngine(lambda request, turn: next(plays)), FakeSearch(failures=["timeout"]))
    assert len(results) == 1, trajectory
    return trajectory, results[0], table.stats.counts


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/chat/completions", {**BODY, "n": 2}, "n"),
        ("/chat/completions", {**BODY, "logprobs": True}, "logprobs"),
        ("/chat/completions", {**BODY, "response_format": {"type": "json_object"}}, "response_format"),
        ("/chat/completions", {**BODY, "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ("/chat/completions", {**BODY, "max_tokens": 0}, "max_tokens"),
        ("/chat/completions", {**BODY, "stop": [""]}, "stop"),
        ("/chat/completions", {"messages": []}, "messages"),
        ("/chat/completions", {"messages": [{"role": "boss", "content": ""}]}, "messages.0.role"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.list[Part].0.type",
        ),
        ("/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/responses", {"input": [{"type": "item_reference", "id": "rs_1"}]}, "input"),
        ("/responses", {"input": [{"type": "computer_call"}]}, "input.0.type"),
        ("/responses", {"input": [{"type": ["message"]}]}, "input.0.type"),
        ("/responses", {"input": "a", "tools": [{"type": "web_search_preview", "name": "x"}]}, "tools.0.type"),
        ("/responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text"),
        ("/search", {"q": "a"}, "query"),
    ],
)
async def test_a_refusal_names_the_field(tmp_path: Path, path: str, body: Any, field: str) -> None:
    async def act(client: Client) -> Any:
        answer = await client.post(path, body)
        assert client.statuses == [400]
        return answer["error"]

    trajectory, error, counts = await within(tmp_path, act)
    assert error["param"].startswith(field.split(".list")[0]) and field.split(".")[0] in error["message"]
    assert (trajectory.status, trajectory.cause) == (Status.FAILED, "agent_refused")
    assert counts["agent_refusals"] == 1


async def test_garbage_and_bodies_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(gateway, "MAX_BODY_BYTES", 4096)

    async def act(client: Client) -> list[int]:
        for body in (b"", b"{", b"\xff\xfe", b"[" * 3000, b"[]", b'{"messages": "' + b"x" * 9000 + b'"}'):
            await client.post("/chat/completions", body)
        lone = b'{"messages": [{"role": "user", "content": "a \\ud800 b ?"}]}'
        await client.post("/chat/completions", lone)
        return client.statuses

    trajectory, statuses, _ = await within(tmp_path, act, "<answer> c </answer>")
    assert statuses == [400, 400, 400, 400, 400, 413, 200] and trajectory.status is Status.ANSWERED


async def test_only_a_key_in_use_is_answered(tmp_path: Path) -> None:
    kept: list[AgentAccess] = []

    async def act(client: Client) -> None:
        kept.append(client.access)
        await client.chat([USER])
        for key in ("", "sk-" + "x" * 43):
            other = Client(AgentAccess(client.access.base_url, key), client.session)
            for path in ("/chat/completions", "/responses", "/search"):
                assert (await other.post(path, BODY))["error"]["code"] == "not_found"
            assert other.statuses == [404] * 3
        async with client.session.get(f"{client.access.base_url}/models") as response:
            assert response.status == 404
        headers = {"Authorization": f"Bearer {client.access.api_key}"}
        async with client.session.get(f"{client.access.base_url}/models", headers=headers) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["policy"]

    trajectory, _, counts = await within(tmp_path, act, "<answer> c </answer>")
    assert trajectory.status is Status.ANSWERED and counts["agent_late_calls"] == 7
    assert len(kept[0].api_key) > 40


async def test_parameters_of_sampling_are_ignored_and_counted(tmp_path: Path) -> None:
    async def act(client: Client) -> Any:
        return await client.chat([USER], temperature=0, top_p=0.5, tool_choice="required", user="me", seed=None)

    _, message, counts = await within(tmp_path, act, "<answer> c </answer>")
    assert message["content"] == "c"
    ignored = {name: count for name, count in counts.items() if name.startswith("agent_ignored")}
    assert ignored == {f"agent_ignored_{name}": 1 for name in ("temperature", "top_p", "tool_choice", "other")}


async def stream(client: Client, path: str, body: dict[str, Any]) -> str:
    headers = {"Authorization": f"Bearer {client.access.api_key}"}
    url, sent = client.access.base_url + path, {**body, "stream": True}
    async with client.session.post(url, json=sent, headers=headers) as response:
        assert response.content_type == "text/event-stream"
        return (await response.read()).decode()


async def test_equal_calls_are_two_turns_though_the_client_leaves_at_the_end(tmp_path: Path, leaving: None) -> None:
    async def act(client: Client) -> list[bytes]:
        headers = {"Authorization": f"Bearer {client.access.api_key}"}
        answers = []
        for _ in range(2):
            url = f"{client.access.base_url}/chat/completions"
            async with client.session.post(url, json={**BODY, "stream": True}, headers=headers) as response:
                answers.append(await response.content.readuntil(b"data: [DONE]\n\n"))
        return answers

    trajectory, answers, counts = await within(tmp_path, act, "<answer> c </answer>", "<answer> d </answer>")
    assert [b'"c"' in answers[0], b'"d"' in answers[1]] == [True, True], answers
    assert (counts["agent_calls"], counts["agent_retries"]) == (2, 0) and trajectory.status is Status.ANSWERED


async def test_a_stream_is_kept_open_until_the_turn_is_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(gateway, "ALIVE_S", 0.05)

    async def act(client: Client) -> str:
        body = {**BODY, "tools": [SEARCH], "stream_options": {"include_usage": True}}
        return await stream(client, "/chat/completions", body)

    _, text, _ = await within(tmp_path, act, "i need <search> a </search>", latency_s=0.2)
    assert text.startswith(": alive\n\n") and text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[1] == {"reasoning_content": "i need"}
    assert deltas[2]["tool_calls"][0]["function"]["name"] == "search" and deltas[2]["tool_calls"][0]["index"] == 0
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
async def test_an_error_in_an_open_stream_is_an_event(tmp_path: Path, monkeypatch: Any, path: str) -> None:
    monkeypatch.setattr(gateway, "ALIVE_S", 0.05)
    environment = make_environment(tmp_path)
    background: list[asyncio.Task[str]] = []

    async def agent(question: Question, access: AgentAccess) -> None:
        # a task of its own: the agent is ended as soon as its trajectory has failed
        background.append(asyncio.create_task(read(access)))
        await asyncio.Event().wait()

    async def read(access: AgentAccess) -> str:
        async with client_of(access) as client:
            return await stream(client, path, {**BODY, "input": "a"})

    async with playing(environment, agent) as table:
        trajectory = await table.play(FakeEngine(lambda *_: Play(error="no_engine", latency_s=0.2)))
        assert trajectory.cause == "no_engine" and '"code": "no_engine"' in await background[0]


async def test_responses_keep_their_items_for_references(tmp_path: Path) -> None:
    tool = {"type": "function", **SEARCH["function"], "strict": True}  # type: ignore[dict-item]

    async def act(client: Client) -> Any:
        asked = {"model": "policy", "instructions": "a", "input": [USER], "tools": [tool], "include": []}
        first = await client.post("/responses", asked)
        reasoning, call = first["output"]
        assert reasoning["summary"][0]["text"] == "i need" and first["status"] == "completed"
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "b c"}
        items = [USER, {"type": "item_reference", "id": reasoning["id"]}, {"type": "item_reference", "id": call["id"]}]
        text = await stream(client, "/responses", {**asked, "input": [*items, output]})
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        last = events[-1]["response"]["output"][-1]
        # the plain messages say the same
        items[1:] = [reasoning, call]
        final = await client.post("/responses", {**asked, "input": [*items, output, last, USER]})
        assert client.statuses == [200, 200]
        return final["output"][0]["content"][0]["text"]

    said = ["i need <search> a </search>", "<answer> c </answer>", "<answer> d </answer>"]
    trajectory, text, _ = await within(tmp_path, act, *said)
    assert text == "d" and [str(s.owner) for s in trajectory.segments].count("prompt") == 1


async def test_a_failed_search_is_reported_and_the_trajectory_goes_on(tmp_path: Path) -> None:
    async def act(client: Client) -> Any:
        await client.chat([USER])
        return await client.post("/search", {"query": "a"})

    trajectory, answer, _ = await within(tmp_path, act, "<answer> c </answer>")
    assert answer == {"passages": [], "error": "timeout"} and trajectory.status is Status.ANSWERED
