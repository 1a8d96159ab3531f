"""`foray bench rollout`: the draws, the scripted policy, the engine that takes its time, and a whole small run."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from deploy.bench.draws import Draws
from deploy.bench.latency_engine import LatencyEngine
from deploy.bench.latency_search import LatencySearch
from deploy.bench.ring import Played
from deploy.bench.rollout import check
from deploy.bench.script import Place, Script
from deploy.cli import main
from protocol.errors import ForayError
from protocol.testing import make_group
from rollout_server.testing import write_tokenizer
from rollout_server.tokens import load_tokens

DRAWS = Draws(trajectories=4, turns=3, scale=0.05)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    script = Script(tmp_path, DRAWS, group_size=2, turn_tokens=20, seeds=(0, 9))
    write_tokenizer(tmp_path, "words", more_words=script.words)
    (tmp_path / "claims").mkdir()
    return script


def test_draws_follow_from_seed_trajectory_and_turn_and_have_the_distribution_asked_for() -> None:
    draws = Draws(trajectories=2000, turns=2)
    times = [draws.decode_s(3, t, u) for t in range(2000) for u in range(2)]
    assert times == [draws.decode_s(3, t, u) for t in range(2000) for u in range(2)] and len(set(times)) == 4000
    assert statistics.median(times) == pytest.approx(2.0, rel=0.05)
    assert statistics.stdev(map(math.log, times)) == pytest.approx(0.8, rel=0.05)
    searches = [draws.search_s(3, t, 0) for t in range(2000)]
    assert statistics.median(searches) == pytest.approx(0.1, rel=0.08) and draws.decode_s(4, 0, 0) != times[0]


def test_the_bounds_are_the_longest_trajectory_and_the_slowest_of_every_turn() -> None:
    decode = [[DRAWS.decode_s(1, t, u) for u in range(3)] for t in range(4)]
    search = [[DRAWS.search_s(1, t, u) for u in range(2)] for t in range(4)]
    assert DRAWS.bound_s(1) == pytest.approx(max(sum(d) + sum(s) for d, s in zip(decode, search, strict=True)))
    slowest = sum(max(column) for column in zip(*decode, strict=True))
    assert DRAWS.barrier_bound_s(1) == pytest.approx(slowest + sum(search[0]))


def test_the_ids_alone_say_where_a_request_is_and_what_is_missing(script: Script) -> None:
    tokens = load_tokens(script.directory)
    prompt = tokens.own("question : " + script.question(0, 9, 1))
    place, first = script.rest(prompt)
    assert place == Place(seed=9, trajectory=2, turn=0, written=0) and len(first) == 20
    assert tokens.decode(first).endswith("<search> 9 2 0 </search>")
    assert script.rest(prompt + first[:7]) == (Place(9, 2, 0, 7), first[7:]), "a turn that broke off is continued"
    seen = prompt + first + tokens.own("<information> a b </information>")
    assert script.rest(seen)[0] == Place(9, 2, 1, 0)
    last = script.rest(seen + script.rest(seen)[1] + tokens.own("<information> nothing </information>"))
    assert last[0] == Place(9, 2, 2, 0) and tokens.decode(last[1]).endswith("<answer> 2 </answer>")


def test_each_first_turn_of_a_group_gets_a_number_of_its_own(script: Script) -> None:
    tokens = load_tokens(script.directory)
    prompt = tokens.own("question : " + script.question(0, 0, 1))
    assert [script.rest(prompt)[0].trajectory for _ in range(2)] == [2, 3]
    with pytest.raises(ValueError, match="one more asks"):
        script.rest(prompt)
    again = tokens.own("question : " + script.question(1, 0, 1))
    assert script.rest(again)[0].trajectory == 2, "another play on the same draws counts anew"


async def served(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_the_engine_takes_the_drawn_time_whole_or_in_chunks(script: Script) -> None:
    ids = load_tokens(script.directory).own("question : " + script.question(0, 0, 0))
    body = {"rid": "r", "input_ids": ids, "sampling_params": {"max_new_tokens": 500, "stream_interval": 8}}
    runner, url = await served(LatencyEngine(script).app())
    try:
        async with aiohttp.ClientSession() as session:
            begun = time.monotonic()
            async with session.post(f"{url}/generate", json=body) as response:
                whole = await response.json()
            assert DRAWS.decode_s(0, 0, 0) <= time.monotonic() - begun < DRAWS.decode_s(0, 0, 0) + 0.5
            assert len(whole["output_ids"]) == 20 == len(whole["meta_info"]["output_token_logprobs"])
            begun, lengths, last = time.monotonic(), [], {}
            async with session.post(f"{url}/generate", json=body | {"stream": True}) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        last = json.loads(line[6:])
                        lengths.append(len(last["output_ids"]))
                        assert (last["meta_info"]["finish_reason"] is None) == (lengths[-1] < 20)
            assert lengths == [1, 9, 17, 20] and time.monotonic() - begun >= DRAWS.decode_s(0, 1, 0)
            assert last["output_ids"][1:17] == whole["output_ids"][1:17], "same words, the number of another trajectory"
    finally:
        await runner.cleanup()


async def test_a_search_takes_the_time_of_its_lowest_trajectory(script: Script) -> None:
    runner, url = await served(LatencySearch(script).app())
    try:
        async with aiohttp.ClientSession() as session:
            begun = asyncio.get_running_loop().time()
            async with session.post(f"{url}/retrieve", json={"queries": ["0 3 1", "0 1 1"], "topk": 3}) as response:
                result = (await response.json())["result"]
            assert asyncio.get_running_loop().time() - begun >= DRAWS.search_s(0, 1, 1)
            assert [len(hits) for hits in result] == [3, 3]
    finally:
        await runner.cleanup()


def test_a_run_in_which_a_trajectory_got_lost_is_no_figure(script: Script) -> None:
    with pytest.raises(ForayError, match="trajectories answered"):
        check(Played(1.0, 0.1, 0.1, 0.0, [make_group()]), script)


@pytest.mark.slow
def test_a_small_run_beats_the_barrier_and_not_the_critical_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rollout", "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (seed,) = told["by_seed"]
    assert 0.3 < told["value"] <= 1.0 and told["ratio"] > 1.0
    assert seed["barrier_seconds"] >= seed["barrier_bound_s"] > seed["bound_s"]
    assert told["cpu_ms_per_turn"] > 0 and told["baseline"]["cpu_ms_per_turn"] > 0
