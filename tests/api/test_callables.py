"""Search engines and rewards of a notebook, asked by the real clients of a rollout server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from foray.api.callables import CallableServer, as_document
from protocol.errors import UserError
from protocol.messages import Question, Status
from protocol.search import Passage
from rollout_server.rewards import build_reward
from rollout_server.rewards.base import RewardError, RewardInput, TurnText
from rollout_server.rewards.http import HttpRewardSettings, outcome_json, read_outcome
from rollout_server.rewards.resources import RewardResources
from rollout_server.search import build_search
from rollout_server.search.client import HttpSearchSettings

OUTCOME = RewardInput(
    Question(id="q", text="who wrote Emma?", answers=("Jane Austen",), meta={"source": "books"}),
    Status.ANSWERED,
    "Jane Austen\u2028",
    (TurnText("<search>emma", "a book", "emma", ("1",), ("Emma",), 9), TurnText("<answer>", tool="python", tokens=3)),
    1,
)


class Books:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def search(self, query: str) -> list[Any]:
        self.asked.append(query)
        if "fire" in query:
            raise RuntimeError("on fire")
        return [Passage(id="7", contents="one"), {"title": "T", "text": "two"}, {"id": 3, "contents": "three"}, "four"]


def by_searches(outcome: RewardInput) -> float:
    if outcome.answer == "wrong type":
        raise ValueError("a bug of the notebook")
    return outcome.searches + (outcome == OUTCOME) / 4


@pytest.fixture
def server() -> Iterator[CallableServer]:
    served = CallableServer(Books(), by_searches)
    yield served
    served.close()


def test_an_outcome_arrives_as_it_was_sent() -> None:
    assert read_outcome(outcome_json(OUTCOME)) == OUTCOME
    none = RewardInput(Question(id="", text=""), Status.FAILED, None, (), 0)
    assert read_outcome(outcome_json(none)) == none


async def test_a_reward_function_of_this_process_scores_a_trajectory(server: CallableServer) -> None:
    resources = RewardResources()
    settings = HttpRewardSettings(url=server.reward_url, name="by_searches", attempts=1)
    reward: Any = build_reward(settings, resources)
    assert (reward.name, await reward(OUTCOME)) == ("by_searches", 1.25)
    broken = RewardInput(OUTCOME.question, Status.ANSWERED, "wrong type", OUTCOME.turns, 1)
    with pytest.raises(RewardError, match="ValueError: a bug of the notebook"):
        await reward(broken)
    assert isinstance(server.failure, ValueError)
    server.close()
    with pytest.raises(RewardError):  # the notebook is gone: a failure, never a score
        await reward(OUTCOME)
    await resources.close()


async def test_a_search_engine_of_this_process_answers_a_rollout_server(server: CallableServer) -> None:
    settings = HttpSearchSettings(urls=(server.search_url,), topk=3, attempts=1, outage_wait_s=0)
    search = build_search(settings)
    found = await search("emma")
    assert [p.contents for p in found.passages] == ["one", '"T"\ntwo', "three"], "topk of them, best first"
    failed = await search("the house is on fire")
    assert failed.passages == () and "callable" in failed.error
    assert isinstance(server.failure, RuntimeError)
    await search.close()


def test_other_users_of_the_machine_cannot_call_the_functions(server: CallableServer) -> None:
    base = server.search_url.rpartition("/")[0]
    for path in ("/reward", "/retrieve", "/guess/reward"):
        with pytest.raises(HTTPError, match="404"):
            urlopen(Request(base + path, data=b"{}", method="POST"), timeout=5)


def test_what_a_search_may_return() -> None:
    assert as_document("text", 4) == {"id": "4", "contents": "text"}
    with pytest.raises(UserError, match="a search returned a int"):
        as_document(3, 0)  # type: ignore[arg-type]
