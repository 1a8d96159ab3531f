"""Custom rewards: imported at the start, run where they cannot block, with validated results."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UserError
from protocol.messages import Question, Status
from rollout_server.rewards import build_reward, custom
from rollout_server.rewards.base import Reward, RewardError, RewardInput, TurnText
from rollout_server.rewards.custom import CustomSettings
from rollout_server.rewards.resources import RewardResources
from tests.support.environments import make_environment

MODULE = """
import asyncio, threading, time

seen = []

def plain(outcome):
    seen.append(threading.current_thread().name)
    return len(outcome.turns)

def scaled(outcome, *, by, plus=0):
    return by * outcome.searches + plus

async def waits(outcome, seconds=0.0):
    seen.append(threading.current_thread().name)
    await asyncio.sleep(seconds)
    return 0.5

def blocks(outcome, seconds):
    time.sleep(seconds)
    return 1

def gives(outcome, what):
    return what

def breaks(outcome):
    raise KeyError("inside")

class Stateful:
    async def __call__(self, outcome):
        return 0.25

stateful = Stateful()
not_callable = 3
"""
OUTCOME = RewardInput(Question(id="q", text="?"), Status.ANSWERED, "x", (TurnText("a"), TurnText("b")), 3)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_rewards", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def build(function: str, **settings: Any) -> Reward:
    return build_reward(CustomSettings(target=f"own_rewards:{function}", **settings), RewardResources())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("function", "options", "value"),
    [
        ("plain", {}, 2.0),
        ("scaled", {"by": 0.5, "plus": 1}, 2.5),
        ("waits", {}, 0.5),
        ("stateful", {}, 0.25),
        ("gives", {"what": True}, 1.0),
    ],
)
async def test_functions_of_every_kind_are_called_with_outcome_and_options(
    function: str, options: dict[str, Any], value: float
) -> None:
    assert await build(function, options=options)(OUTCOME) == value


async def test_a_plain_function_runs_in_a_thread_and_an_async_one_in_the_loop() -> None:
    await build("plain", name="mine")(OUTCOME)
    await build("waits")(OUTCOME)
    assert sys.modules["own_rewards"].seen == ["mine", threading.current_thread().name]


async def test_a_blocking_function_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "THREADS", 4)
    reward = build("blocks", options={"seconds": 0.3})
    started = time.monotonic()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert await asyncio.gather(*(reward(OUTCOME) for _ in range(8))) == [1.0] * 8
    ticking.cancel()
    assert 0.6 <= time.monotonic() - started < 2.2  # eight calls, four at once
    assert ticks > 5


@pytest.mark.parametrize(("function", "seconds"), [("blocks", 2.0), ("waits", 60)])
async def test_no_result_within_the_deadline_is_an_error(function: str, seconds: float) -> None:
    started = time.monotonic()
    with pytest.raises(RewardError, match=rf"{function}: no result within 0.1 s"):
        await build(function, options={"seconds": seconds}, deadline_s=0.1)(OUTCOME)
    assert time.monotonic() - started < 1.5


async def test_functions_that_hang_never_take_more_threads_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "THREADS", 2)
    before = threading.active_count()
    reward = build("blocks", options={"seconds": 0.5}, deadline_s=0.05)
    lost = await asyncio.gather(*(reward(OUTCOME) for _ in range(20)), return_exceptions=True)
    assert all(isinstance(error, RewardError) for error in lost)
    assert threading.active_count() - before <= 2
    await asyncio.sleep(0.7)
    # their places are free again
    with pytest.raises(RewardError, match="no result"):
        await reward(OUTCOME)


@pytest.mark.parametrize("what", [None, "high", [1.0], {}])
async def test_a_result_that_is_no_number_is_an_error(what: Any) -> None:
    with pytest.raises(RewardError, match="gives: "):
        await build("gives", options={"what": what})(OUTCOME)


async def test_what_it_raises_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardError, match="breaks: KeyError: 'inside'"):
        await build("breaks")(OUTCOME)


@pytest.mark.parametrize(
    ("target", "options", "why"),
    [
        ("own_nowhere:f", {}, "No module named 'own_nowhere'"),
        ("own_broken:f", {}, "RuntimeError: at import"),
        ("own_rewards:missing", {}, "no attribute 'missing'"),
        ("own_rewards:not_callable", {}, "not a callable"),
        ("own_rewards:scaled", {}, "argument: 'by'"),  # Python 3.12 says which kind
        ("own_rewards:plain", {"by": 1}, "unexpected keyword argument 'by'"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, target: str, options: dict[str, Any], why: str
) -> None:
    rewards = [{"type": "custom", "target": target, "options": options}]
    with pytest.raises(UserError, match="cannot be used") as caught:
        make_environment(tmp_path, rewards=rewards)
    assert why in caught.value.why and target in caught.value.what
