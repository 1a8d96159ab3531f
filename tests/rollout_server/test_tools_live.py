"""Tools through a whole rollout server: a separate retriever process, a scripted engine, `POST /v1/episodes`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.config import RolloutSettings
from rollout_server.environment.tokenizer import load_tokenizer
from rollout_server.server import serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer
from tests.support.sandboxes import require_bubblewrap

CORPUS = {
    "novels/emma": '"Emma"\nEmma is a novel of 1815.',
    "novels/emma#2": '"Emma, continued"\nThe author of Emma is Jane Austen.',
    "whales": '"Whales"\nWhales sing.',
}


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`python -m retriever` over a few passages whose ids hold slashes and signs."""
    directory = tmp_path_factory.mktemp("retriever")
    corpus, port_file = directory / "corpus.jsonl", directory / "port"
    corpus.write_text("".join(json.dumps({"id": i, "contents": text}) + "\n" for i, text in CORPUS.items()))
    argv = [sys.executable, "-m", "retriever", f"retriever.corpus={corpus}", "retriever.port=0"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*argv, "--port-file", str(port_file)], stdout=log, stderr=log, cwd=directory)
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.terminate()
        process.wait(20)


async def episode_of(
    world: Any, directory: Path, url: str, turns: Sequence[str], tools: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, float], list[Any]]:
    """One episode whose policy says `turns`: (the episode, the server's values, requests to the engine)."""
    model = write_tokenizer(directory / "model", "bytes")
    tokens = load_tokenizer(model)
    written = [tokens.encode_trusted(turn) for turn in turns]
    asked: list[int] = []

    def say(body: dict[str, Any]) -> Sequence[int]:
        asked.append(1)
        return written[len(asked) - 1]

    run = RunSettings(id=world.keys.run, dir=directory, redis_url=world.url, model=model)
    settings = RolloutSettings.model_validate(
        {
            "fleet_poll_s": 0.05,
            "search": {"type": "http", "urls": [url], "topk": 1},
            "episode": {"tools": tools, "rewards": [{"type": "em"}, {"type": "turn_retrieval"}], "max_context": 8192},
        }
    )
    stop, port_file = ShutdownSignal(), directory / "port"
    async with FakeServer(say, version="0.0") as engine, aiohttp.ClientSession() as session:
        world.register("e", engine.url, PolicyVersion(0, 0))
        serving = asyncio.create_task(serve(run, settings, port_file=port_file, stop=stop))
        try:
            async with asyncio.timeout(30):
                while not port_file.exists():
                    assert not serving.done(), await serving
                    await asyncio.sleep(0.01)
            base = f"http://127.0.0.1:{port_file.read_text().strip()}"
            question = {"id": "q", "question": "who wrote emma ?", "answers": ["Jane Austen", "137846528820"]}
            async with session.post(f"{base}/v1/episodes", json={"questions": [question], "pin": True}) as response:
                assert response.status == 200, await response.text()
                body = await response.json()
            async with session.get(f"{base}/status") as response:
                values = (await response.json())["values"]
            return body["episodes"][0], values, list(engine.requests)
        finally:
            stop.requested.set()
            stop.forced.set()
            async with asyncio.timeout(15):
                await serving


async def test_a_policy_searches_fetches_a_document_by_its_id_and_answers(
    world: Any, tmp_path: Path, retriever: str
) -> None:
    turns = [
        "<think>who?</think><search> emma novel </search>",
        "<think>more</think><fetch> novels/emma#2 </fetch>",
        "<think>and</think><fetch> novels/nothing </fetch>",
        "<think>so</think><answer> Jane Austen </answer>",
    ]
    environment, values, requests = await episode_of(world, tmp_path, retriever, turns, [{"type": "fetch"}])
    assert (environment["status"], environment["answer"], environment["searches"]) == ("answered", "Jane Austen", 1)
    assert environment["tool_calls"] == {"fetch": 2} and environment["rewards"] == {"em": 1.0, "turn_retrieval": 1.0}
    seen = [s for s in environment["segments"] if s["owner"] == "environment"]
    assert [(s["tool"], s["query"], s["passage_ids"], s["error"]) for s in seen] == [
        ("", "emma novel", ["novels/emma"], ""),
        ("fetch", "novels/emma#2", ["novels/emma#2"], ""),
        ("fetch", "novels/nothing", [], ""),
    ]
    assert seen[0]["text"].startswith('\n\n<information>Doc 1(Id: novels/emma Title: "Emma")')
    assert "The author of Emma is Jane Austen." in seen[1]["text"]
    assert seen[2]["text"] == "\n\n<information>There is no document with this id.</information>\n\n"
    assert "by <fetch> id </fetch>" in environment["segments"][0]["text"]
    assert requests[0]["sampling_params"]["stop"] == ["</search>", "</answer>", "</fetch>"]
    counted = {name: n for name, n in values.items() if name.startswith("tool_")}
    assert counted == {"tool_calls_fetch": 2.0, "tool_invalid_calls_fetch": 1.0, "tool_errors_fetch": 0.0}
    assert values["searches"] == 1.0


@pytest.mark.slow
async def test_a_policy_computes_with_python_and_answers(world: Any, tmp_path: Path, retriever: str) -> None:
    turns = [
        "<think>count</think><python>\nimport math\nprint(math.comb(40, 20))\n</python>",
        "<think>so</think><answer> 137846528820 </answer>",
    ]
    require_bubblewrap()
    tools = [{"type": "python", "deadline_s": 20}]
    environment, values, _ = await episode_of(world, tmp_path, retriever, turns, tools)
    assert (environment["status"], environment["answer"], environment["searches"]) == ("answered", "137846528820", 0)
    assert environment["tool_calls"] == {"python": 1} and environment["rewards"] == {"em": 1.0, "turn_retrieval": 0.0}
    assert environment["segments"][2]["text"] == "\n\n<information>137846528820</information>\n\n"
    assert values["tool_calls_python"] == 1.0 and values["searches"] == 0.0
