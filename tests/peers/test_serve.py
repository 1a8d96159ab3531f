"""Published clients against `foray serve`, with the search loop on the server: openai, lm-evaluation-harness.

The policy is scripted: it searches once and answers, whatever it is asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.runtime.http.server import ThreadedServer, listening
from protocol.search import Passage
from rollout_server.agents.tagged import TaggedRenderer
from rollout_server.chat.answers import Answers
from rollout_server.chat.app import ChatApp, ChatOptions
from rollout_server.engine.base import Completion, GenerateRequest
from rollout_server.metrics import Stats
from tests.support.environments import make_environment
from tests.support.fake_engine import FakeEngine, Play
from tests.support.fake_search import FakeSearch

Client = Callable[..., Any]
Did = Callable[[str, str], None]
TOKEN = "sk-0123456789abcdefghijABCDEFGHIJ-peers"
SEARCH, ANSWER = "<think> b </think> <search> a </search>", "<think> d </think> <answer> c e </answer>"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The base URL of a policy that writes a token at a time; it answers when it has seen what a search found."""
    environment = make_environment(tmp_path, max_new_tokens=64)
    encode, written = environment.tokenizer.encode_trusted, dict[str, list[int]]()

    async def write(request: GenerateRequest) -> Completion:
        seen = "</information>" in environment.tokenizer.decode(request.ids)
        ids, so_far = encode(ANSWER if seen else SEARCH), written.setdefault(request.session, [])
        so_far.clear()
        for one in ids:
            await asyncio.sleep(0.02)
            so_far.append(one)
        del written[request.session]
        return await FakeEngine(lambda *_: Play(ids))(request)

    search = FakeSearch(otherwise=[Passage(id="p", contents='"e"\nc e')])
    answers = Answers(
        *(environment, TaggedRenderer(environment), write, search),
        turn_so_far=lambda session: ("fake", written[session]) if session in written else None,
    )
    app = ChatApp(answers, ChatOptions("p", "policy", TOKEN), Stats("rollout", "test"), "r")

    @asynccontextmanager
    async def serving() -> Any:
        where = listening(app.build(), "127.0.0.1", 0, access=None, setting="--host", todo="")
        async with where as listener:
            yield listener

    server = ThreadedServer(serving(), "served")
    yield f"{server.url}/v1"
    server.close()


def test_openais_client_streams_a_search_and_runs_tools_of_its_own(peer: Client, served: str, did: Did) -> None:
    found = peer("openai_served", served, TOKEN, "p", "a b ?")
    streamed, facts = found["streamed"], found["foray"]
    did(f"openai {found['version']}, foray serve", f"{len(facts['searches'])} search, streamed and not")
    assert found["models"] == ["p", "p-bare"]
    assert found["message"]["content"] == streamed["content"] == "c e"
    assert found["message"]["reasoning_content"] == streamed["thoughts"] == "b\n\nd"
    passage = {"title": "e", "text": "c e", "score": None}
    assert facts["searches"] == [{"query": "a", "passages": [passage], "error": None}] and facts["turns"] == 2
    assert streamed["searches"] == ["a"] and streamed["finish"] == "stop" and streamed["foray"] == facts
    assert found["usage"] == streamed["usage"] > 0
    assert found["closed"]["searches"][0]["passages"] == []
    assert found["calls"] == [{"query": "a"}] and found["second"] > 0, "the history of a call and its result"
    assert found["refused"] == ["invalid_api_key", "model_not_found", "unsupported_value"]


def test_lm_eval_generates_with_the_loop_inside(peer: Client, served: str, tmp_path: Path, did: Did) -> None:
    data, folder = tmp_path / "data.jsonl", tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": "a b ?", "answer": "c e"}, {"question": "b ?", "answer": "wrong"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "served_until.yaml").write_text(
        "task: served_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\noutput_type: generate_until\n"
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        "metric_list: [{metric: exact_match}]\n"
        'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 200, temperature: 0}\n'
    )
    found = peer("lm_eval_served", served, TOKEN, "p", str(folder), timeout_s=240)
    did(f"lm-evaluation-harness {found['version']}, foray serve", f"exact match {found['score']} of 2 questions")
    assert found["resps"] == [[["c e"]], [["c e"]]] or found["resps"] == [["c e"], ["c e"]]
    assert found["score"] == 0.5
