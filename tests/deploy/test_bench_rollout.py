"""`foray bench rollout`: draws, script, the model of an engine, the oracle, routing policies, and a whole small run."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.rollout.batching import BatchingEngine, BlockCache, Decoding, Speed
from benchmarks.rollout.bench import OBSERVATION_TOKENS, RolloutBench, check
from benchmarks.rollout.latency_engine import LatencyEngine
from benchmarks.rollout.latency_search import LatencySearch
from benchmarks.rollout.oracle import bound_s, oracle_s
from benchmarks.rollout.ring import Played
from benchmarks.rollout.routing import BROKEN, OURS, POLICIES
from benchmarks.rollout.script import Draws, Faults, Script, ScriptPosition
from foray.cli import main
from protocol.errors import ForayError
from rollout_server.engine.selection import Candidate, Work, pick_engine
from rollout_server.environment.tokenizer import load_tokenizer
from tests.support.environments import write_tokenizer
from tests.support.messages import make_group

DRAWS = Draws(trajectories=4, turns=3, turn_tokens=20, scale=0.05)
SPEEDS = (Speed(slowness=0.05), Speed(slowness=0.1))


@pytest.fixture
def script(tmp_path: Path) -> Script:
    script = Script(tmp_path, DRAWS, group_size=2, speeds=SPEEDS, seeds=(0, 9))
    write_tokenizer(tmp_path, "words", more_words=script.words)
    (tmp_path / "claims").mkdir()
    return script


def test_draws_follow_from_seed_trajectory_and_turn_and_have_the_right_distribution() -> None:
    draws = Draws(trajectories=2000, turns=2)
    tokens = [draws.tokens(3, t, u) for t in range(2000) for u in range(2)]
    assert tokens == [draws.tokens(3, t, u) for t in range(2000) for u in range(2)] and len(set(tokens)) > 150
    assert statistics.median(tokens) == pytest.approx(64, rel=0.05)
    assert statistics.stdev(map(math.log, tokens)) == pytest.approx(0.5, rel=0.05)
    assert min(tokens) >= 16 and max(tokens) <= 400
    searches = [draws.search_s(3, t, 0) for t in range(2000)]
    assert statistics.median(searches) == pytest.approx(0.1, rel=0.08) and draws.search_s(4, 0, 0) != searches[0]


def run(engine: BatchingEngine, *requests: Decoding) -> float:
    """Seconds until all are done."""
    for request in requests:
        engine.add(request)
    seconds = 0.0
    while engine.busy:
        seconds += engine.step()[0]
    return seconds


def test_a_step_takes_longer_with_more_requests_and_each_gets_one_token() -> None:
    speed = Speed(slowness=2.0, step_s=1.0, request_s=0.1, prefill_s=0.0)
    assert run(BatchingEngine(speed), Decoding([1], [0] * 5)) == pytest.approx(2 * 5 * 1.1)
    pair = Decoding([1], [0] * 5), Decoding([1], [0] * 3)
    assert run(BatchingEngine(speed), *pair) == pytest.approx(2 * (3 * 1.2 + 2 * 1.1))


def test_requests_beyond_the_limit_wait_for_a_place() -> None:
    engine = BatchingEngine(Speed(step_s=1.0, request_s=0.0, prefill_s=0.0, max_running=2))
    assert run(engine, *(Decoding([1], [0] * 4) for _ in range(5))) == pytest.approx(12.0)


def test_a_prompt_costs_what_the_prefix_cache_does_not_hold() -> None:
    speed = Speed(step_s=0.0, request_s=0.0, prefill_s=1.0)
    engine = BatchingEngine(speed)
    first, again = Decoding(range(64), [7] * 16), Decoding(range(64), [7])
    assert run(engine, first) == 64 and run(engine, again) == 1 and (first.cached, again.cached) == (0, 64)
    later = Decoding([*range(64), *[7] * 16, *range(100, 120)], [0])
    assert run(engine, later) == 20 and later.cached == 80, "what it wrote is in the cache too"
    engine.cache.clear()
    assert run(engine, Decoding(range(64), [7])) == 64
    assert run(BatchingEngine(speed, BlockCache(32)), Decoding(range(64), [7]), Decoding(range(64), [7])) == 128


def test_a_long_prompt_is_computed_in_pieces_between_the_tokens_of_others() -> None:
    engine = BatchingEngine(Speed(step_s=1.0, request_s=0.0, prefill_s=0.0, prefill_chunk=10))
    short, long = Decoding([1], [0] * 6), Decoding(range(35), [0] * 2)
    engine.add(short)
    engine.add(long)
    written = []
    while engine.busy:
        engine.step()
        written.append((short.written, long.written))
    assert written == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2), (6, 2)]


def test_a_dropped_request_leaves_its_place() -> None:
    engine = BatchingEngine(Speed(max_running=1))
    first, second = Decoding([1], [0] * 9), Decoding([1], [0])
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.drop(first)
    assert engine.step()[1] == [second] and not engine.busy
    engine.add(second)
    engine.drop(second)
    assert not engine.busy


def test_the_bound_is_the_longest_trajectory_or_all_the_work() -> None:
    own = [sum(DRAWS.tokens(1, t, u) for u in range(3)) for t in range(4)]
    alone = [0.05 * 0.0205 * n + sum(DRAWS.search_s(1, t, u) for u in range(2)) for t, n in enumerate(own)]
    assert bound_s(DRAWS, 1, SPEEDS, 300) == pytest.approx(max(alone))
    many = Draws(trajectories=400, turns=2, scale=0.05)
    tokens = sum(many.tokens(1, t, u) for t in range(400) for u in range(2))
    work = tokens * (0.02 / 32 + 0.0005) + 400 * 300 * 0.0001
    assert bound_s(many, 1, SPEEDS, 300) == pytest.approx(work / (20 + 10))
    faults = Faults(down=0, away_s=3.0, swaps_s=(1.0, 2.0), pause_s=0.5)
    assert bound_s(many, 1, SPEEDS, 300, faults) == pytest.approx((work + 4.0 * 20 + 1.0 * 10) / (20 + 10))


@pytest.mark.slow
def test_the_oracle_is_close_to_the_bound_and_never_below_it() -> None:
    bench = RolloutBench()
    draws = Draws(bench.trajectories, bench.turns, bench.turn_tokens)
    speeds = [Speed(slowness=slowness) for slowness in bench.slowness]
    faults = Faults(down=1, down_s=10.0, away_s=6.0, swaps_s=(5.0, 20.0), pause_s=0.5)
    for seed, given in ((0, Faults()), (1, faults)):
        bound = bound_s(draws, seed, speeds, OBSERVATION_TOKENS, given)
        assert bound <= oracle_s(draws, seed, speeds, OBSERVATION_TOKENS, given) < 1.15 * bound


@pytest.mark.slow
def test_one_engine_for_everything_is_less_than_half_of_the_figure() -> None:
    """Even the oracle's schedule, on the fastest engine alone."""
    bench = RolloutBench()
    draws = Draws(bench.trajectories, bench.turns, bench.turn_tokens)
    speeds = [Speed(slowness=slowness) for slowness in bench.slowness]
    together = oracle_s(draws, 0, speeds, OBSERVATION_TOKENS)
    assert together / oracle_s(draws, 0, speeds[:1], OBSERVATION_TOKENS) < 0.4


def test_what_the_policies_choose() -> None:
    a, b, c = Candidate("a", 100), Candidate("b", 5), Candidate("c", 50, failures=1)
    policies = {name: make() for name, make in POLICIES.items()}
    assert policies[OURS] is pick_engine
    work = Work(prompt=10, answer=50)
    asked = {name: [policy([c, b, a], ["a", ""], work) for _ in range(20)] for name, policy in policies.items()}
    assert asked["round_robin"] == ["a", "b"] * 10 and set(asked["random"]) == {"a", "b"}
    assert set(asked["least_loaded"]) == {"b"} and set(asked["sticky"]) == {"a"} and set(asked[BROKEN]) == {"a"}
    assert policies["sticky"]([a, b], ["", "a"], 10) == "b", "a new trajectory does not follow its group"
    assert policies["sticky"]([c], ["a", ""], 10) == "c"


def test_the_ids_alone_say_where_a_request_is_and_what_is_missing(script: Script) -> None:
    tokens = load_tokenizer(script.directory)
    prompt = tokens.encode_trusted("question : " + script.question(0, 9, 1))
    place, first = script.rest(prompt)
    assert place == ScriptPosition(0, seed=9, trajectory=2, turn=0, written=0) and len(first) == DRAWS.tokens(9, 2, 0)
    assert tokens.decode(first).endswith("<search> 9 2 0 </search>")
    assert script.rest(prompt + first[:7]) == (ScriptPosition(0, 9, 2, 0, 7), first[7:]), (
        "a turn that broke off is continued"
    )
    seen = prompt + first + tokens.encode_trusted("<information> a b </information>")
    assert script.rest(seen)[0] == ScriptPosition(0, 9, 2, 1, 0)
    last = script.rest(seen + script.rest(seen)[1] + tokens.encode_trusted("<information> nothing </information>"))
    assert last[0] == ScriptPosition(0, 9, 2, 2, 0) and tokens.decode(last[1]).endswith("<answer> 2 </answer>")


def test_each_first_turn_of_a_group_gets_a_unique_number(script: Script) -> None:
    tokens = load_tokenizer(script.directory)
    prompt = tokens.encode_trusted("question : " + script.question(0, 0, 1))
    assert [script.rest(prompt)[0].trajectory for _ in range(2)] == [2, 3]
    with pytest.raises(ValueError, match="another first turn was requested"):
        script.rest(prompt)
    again = tokens.encode_trusted("question : " + script.question(1, 0, 1))
    assert script.rest(again)[0].trajectory == 2, "another play on the same draws starts its own count"
    script.release(ScriptPosition(0, 0, 2, 0, 0), sent=False)
    assert script.rest(prompt)[0].trajectory == 2, "a number of which nobody saw a token is free again"


def test_a_number_that_was_sent_but_not_received_is_given_again(script: Script) -> None:
    tokens = load_tokenizer(script.directory)
    prompt = tokens.encode_trusted("question : " + script.question(0, 0, 1))
    first = [script.rest(prompt) for _ in range(2)]
    for place, _ in first:
        script.release(place, sent=True)
    script.rest(prompt + first[0][1][:3])
    assert script.rest(prompt)[0].trajectory == 3, "2 was received: its client goes on with it"
    with pytest.raises(ValueError, match="another first turn was requested"):
        script.rest(prompt)


async def served(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def body_of(script: Script, text: str, interval: int = 8) -> dict[str, object]:
    ids = load_tokenizer(script.directory).encode_trusted(text)
    return {"rid": "r", "input_ids": ids, "sampling_params": {"max_new_tokens": 500, "stream_interval": interval}}


async def chunks(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    lines = [line async for line in response.content if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines]


async def test_the_engine_takes_the_time_of_its_steps_and_sends_chunks(script: Script) -> None:
    body = body_of(script, "question : " + script.question(0, 0, 0))
    runner, url = await served(LatencyEngine(script, 1).app())
    try:
        async with aiohttp.ClientSession() as session:
            begun = time.monotonic()
            async with session.post(f"{url}/generate", json=body) as response:
                got = await chunks(response)
            n = DRAWS.tokens(0, 0, 0)
            assert time.monotonic() - begun >= n * SPEEDS[1].alone_s
            assert [len(chunk["output_ids"]) for chunk in got] == [*range(1, n, 8), n]
            assert [chunk["meta_info"]["finish_reason"] is None for chunk in got] == [True] * (len(got) - 1) + [False]
            assert got[-1]["meta_info"]["weight_versions"] == [{"version": "1.0", "start": 0, "end": n}]
            assert len(got[-1]["meta_info"]["output_token_logprobs"]) == n
    finally:
        await runner.cleanup()


async def test_a_swap_pauses_and_names_the_version_of_each_token(script: Script) -> None:
    body = body_of(script, "question : " + script.question(0, 0, 0), interval=1)
    runner, url = await served(LatencyEngine(script, 1).app())
    try:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
            seen = [json.loads((await response.content.readuntil(b"\n\n"))[6:]) for _ in range(3)]
            begun = time.monotonic()
            async with session.post(f"{url}/bench/swap", json={"version": "1.1", "seconds": 0.2}) as swapped:
                assert swapped.status == 200
            got = seen + await chunks(response)
            spans = got[-1]["meta_info"]["weight_versions"]
            assert time.monotonic() - begun >= 0.2 and [span["version"] for span in spans] == ["1.0", "1.1"]
            assert spans[0]["end"] == spans[1]["start"] >= 3 and spans[1]["end"] == DRAWS.tokens(0, 0, 0)
    finally:
        await runner.cleanup()


async def test_an_engine_that_is_down_ends_its_streams_and_refuses_requests(script: Script) -> None:
    text = "question : " + script.question(0, 0, 0)
    runner, url = await served(LatencyEngine(script, 1).app())
    try:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/generate", json=body_of(script, text, interval=1)) as response:
                first = json.loads((await response.content.readuntil(b"\n\n"))[6:])
                async with session.post(f"{url}/bench/down", json={"seconds": 0.2}) as done:
                    assert done.status == 200
                with pytest.raises(aiohttp.ClientPayloadError):
                    await chunks(response)
            assert len(first["output_ids"]) == 1 and first["meta_info"]["finish_reason"] is None
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{url}/v1/loads")
            await asyncio.sleep(0.25)
            async with session.get(f"{url}/v1/loads") as response:
                load = (await response.json())["loads"][0]
            assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (0, 0, 0.0)
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
    with pytest.raises(ForayError, match="1 different answers"):
        check(Played(1.0, 0.1, 0.1, 0.1, 0.0, 0.0, [make_group()]), script)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_a_small_run_under_faults(broken: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Every trajectory arrives under every policy; one engine for everything is at most half of the figure."""
    given = ["--trajectories", "128", "--slowness", "1,1,1", "--seeds", "0", "--scale", "0.2"]
    assert main(["bench", "rollout", *given, "--broken", str(broken), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plays = {play["policy"]: play for play in report["by_play"]}
    assert list(plays) == ["foray", "random", "round_robin", "least_loaded", "sticky", "turn_barrier"]
    assert plays["random"]["failovers"] > 0, "an engine was away"
    assert all(play["seconds"] >= play["bound_s"] for name, play in plays.items() if name != "turn_barrier")
    oracle = plays["foray"]["oracle_s"]
    if broken:
        assert report["value"] <= 0.5 * max(oracle / plays[name]["seconds"] for name in ("random", "least_loaded"))
    else:
        assert plays["foray"]["engines_a_trajectory"] < plays["random"]["engines_a_trajectory"]


@pytest.mark.slow
def test_a_small_run_at_two_scales_has_the_standstill_at_a_death_and_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "rollout_scale", "--quick", "--turns", "4", "--tokens", "80", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["baseline"]["name"] == "no death" and 0 < report["gap_cpu_s"] <= report["longest_gap_s"] * 2
    assert [target["figure"] for target in report["targets"]] == ["allowed_over_gap", "steady_cpu_ratio"]
    for engines in ("2", "16"):
        assert report["steady"][engines]["in_flight"] == 64 and report["steady"][engines]["failovers"] == 0
        assert report["steady"][engines]["cpu_ms_per_turn"] > 0
