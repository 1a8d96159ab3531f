"""`POST /v1/episodes`: episodes through the engines, and versions that stand still meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from foray.evaluation.methods import parse_methods
from foray.evaluation.runner import AskOptions, EvalJob, ask_all
from foray.evaluation.store import open_store
from foray.evaluation.suites import data_set
from foray.evaluation.targets import Served, monitoring
from protocol.messages import NodeState, Question, supporting_meta
from protocol.runtime.episodes import evaluate
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.runtime.progress import Progress
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion, VersionPin
from rollout_server.api import app
from rollout_server.api import evaluation_pin as pin
from rollout_server.api.episodes import Episodes
from rollout_server.config import RolloutSettings
from rollout_server.environment.tokenizer import load_tokenizer
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.server import serve as serve_node
from rollout_server.server import model_digest, serve
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer
from tests.support.fake_search import canned_retriever
from tests.support.waiting import eventually

V3 = PolicyVersion(1, 3)
QUESTIONS = [{"id": "q1", "question": "a ?", "answers": ["c"]}, {"id": "q2", "text": "b ?", "answers": ["d"]}]


@contextlib.asynccontextmanager
async def serving(
    world, tmp_path: Path, *, latency_s: float = 0.0, **more: Any
) -> AsyncIterator[tuple[Any, FakeServer]]:
    """A server with one engine that searches once and answers c; yields (post, engine). more: of its settings."""
    model = write_tokenizer(tmp_path / "model", "words")
    tokens = load_tokenizer(model)
    mark = tokens.encode_trusted("</information>")[0]

    def say(body: dict[str, Any]) -> Sequence[int]:
        return tokens.encode_trusted("<answer> c </answer>" if mark in body["input_ids"] else "<search> a b </search>")

    run = RunSettings(id=world.keys.run, dir=tmp_path, redis_url=world.url, model=model)
    stop, port_file = ShutdownSignal(), tmp_path / "port"
    async with (
        FakeServer(say, latency_s=latency_s, version="1.3") as engine,
        canned_retriever("t\nd e f") as retriever,
        aiohttp.ClientSession() as session,
    ):
        settings = {
            "fleet_poll_s": 0.05,
            "search": {"type": "http", "urls": retriever.url},
            "episode": {"template": "demo"},
        } | more
        world.register("e", engine.url, V3)
        task = asyncio.create_task(serve(run, RolloutSettings.model_validate(settings), port_file=port_file, stop=stop))
        try:
            while not port_file.exists():
                assert not task.done(), await task
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{port_file.read_text().strip()}/v1/episodes"
            yield lambda body: session.post(url, json=body), engine
        finally:
            stop.requested.set()
            stop.forced.set()
            await asyncio.wait_for(task, 15)


async def test_episodes_come_back_scored_in_the_order_of_the_questions(world, tmp_path: Path) -> None:
    async with serving(world, tmp_path) as (post, engine):
        async with post(
            {"questions": QUESTIONS, "n": 2, "pin": True, "temperature": 0, "top_p": 0.9, "top_k": 7}
        ) as response:
            assert response.status == 200
            body = await response.json()
        sent = [r["sampling_params"] for r in engine.requests]
        assert {(s["temperature"], s["top_p"], s["top_k"]) for s in sent} == {(0.0, 0.9, 7)}
    assert body["em"] == 0.5 and (body["count"], body["failed"]) == (4, 0)
    assert [(e["question_id"], e["index"]) for e in body["episodes"]] == [("q1", 0), ("q1", 1), ("q2", 0), ("q2", 1)]
    first = body["episodes"][0]
    assert (first["status"], first["answer"], first["rewards"]["em"]) == ("answered", "c", 1.0)
    assert (first["searches"], first["turns"]) == (1, 2)
    assert "<search> a b </search>" in first["text"] and "d e f" in first["text"]
    assert [s["owner"] for s in first["segments"]] == ["prompt", "policy", "environment", "policy"]
    assert [s["version"] for s in first["segments"]] == ["", "1.3", "", "1.3"]
    assert (first["run"], first["lineage_id"]) == (world.keys.run, "")
    assert first["model"] == model_digest(tmp_path / "model")
    assert first["tokens"] == sum(s["tokens"] for s in first["segments"])
    assert world.published() == [], "episodes have no seq and no place in the ledger"


async def test_foray_eval_sends_what_the_rewards_need_of_each_question(world, tmp_path: Path) -> None:
    """The retriever's passage has the title t: it supports the question of one data set and not that of the other."""
    sets = [
        data_set(name, [Question(id="q", text="a ?", answers=("c",), meta={"supporting_ids": supporting_meta([name])})])
        for name in ("t", "u")
    ]
    store = open_store(tmp_path / "result", {"format": 1, "subject": {}}, resume=False)
    rewards = [{"type": "em"}, {"type": "retrieval_hit", "by": "passage"}]
    async with serving(world, tmp_path, episode={"template": "demo", "rewards": rewards}):
        url = f"http://127.0.0.1:{(tmp_path / 'port').read_text().strip()}"
        served = Served({"kind": "server"}, monitoring(lambda: None, print), url)
        methods = parse_methods(["policy"])
        with contextlib.closing(store), Progress(print).task("evaluating", 2, "episodes") as task:
            await asyncio.to_thread(ask_all, EvalJob(served, methods, sets, AskOptions(timeout_s=60)), store, task)
        assert task.done == 2
    assert {row["data_set"]: row["rewards"] for row in store.rows} == {
        "t": {"em": 1.0, "retrieval_hit": 1.0},
        "u": {"em": 1.0, "retrieval_hit": 0.0},
    }


async def test_without_search_nothing_is_found(world, tmp_path: Path) -> None:
    async with serving(world, tmp_path) as (post, _):
        body = await _json(post({"questions": QUESTIONS[:1], "search": False, "pin": True}))
    assert "nothing was found" in body["episodes"][0]["text"] and "d e f" not in body["episodes"][0]["text"]


async def test_a_stream_sends_each_episode_as_it_ends(world, tmp_path: Path) -> None:
    body = {"questions": QUESTIONS, "pin": True, "stream": True}
    async with serving(world, tmp_path) as (post, _), post(body) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        events = [block for block in (await response.text()).split("\n\n") if block]
    finished = [json.loads(e.removeprefix("data: ")) for e in events[:-1]]
    assert {e["question_id"] for e in finished} == {"q1", "q2"}
    name, _, data = events[-1].partition("\n")
    assert name == "event: summary" and json.loads(data.removeprefix("data: "))["em"] == 0.5


async def test_a_stream_reports_that_a_slow_episode_runs(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client limits the silence of the server, and not the time of an episode on a slow machine."""
    monkeypatch.setattr("rollout_server.api.app.ALIVE_S", 0.05)
    async with serving(world, tmp_path, latency_s=0.3):
        url, questions = (tmp_path / "port").read_text().strip(), [Question(id="q", text="a ?", answers=("c",))]
        given = {"timeout_s": 0.25, "temperature": 0.0}
        score = await asyncio.to_thread(lambda: evaluate(f"http://127.0.0.1:{url}", questions, **given))
        assert score.means == {"em": 1.0}
    async with (
        serving(world, tmp_path / "more", latency_s=0.2) as (post, _),
        post({"questions": QUESTIONS[:1], "stream": True, "pin": True}) as response,
    ):
        assert ": episodes run" in await response.text()


async def test_no_more_episodes_run_at_once_than_were_asked_for(world, tmp_path: Path) -> None:
    async with serving(world, tmp_path, latency_s=0.05) as (post, engine):
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, engine._in_flight)
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        async with post({"questions": QUESTIONS[:1], "n": 8, "pin": True, "concurrency": 2}) as response:
            assert (await response.json())["count"] == 8
        watching.cancel()
    assert most == 2


@pytest.mark.parametrize(
    ("more", "training", "least", "most"),
    [({}, True, 4, 5), ({}, False, 8, 12), ({"pin": True}, True, 8, 12), ({"concurrency": 1}, True, 2, 2)],
)
async def test_evaluations_without_a_pin_leave_half_of_the_places_to_training(
    world, tmp_path: Path, more: dict[str, Any], training: bool, least: int, most: int
) -> None:
    async with serving(world, tmp_path, latency_s=0.05) as (post, engine):
        world.register("e", engine.url, V3, max_running=8, incarnation="b")
        if training:
            world.target(V3)
        await asyncio.sleep(0.3)  # it reads the table every 0.05 s
        seen = 0

        async def watch() -> None:
            nonlocal seen
            while True:
                seen = max(seen, engine._in_flight)
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        asked = {"questions": QUESTIONS[:1], "n": 8, "concurrency": 6} | more
        bodies = await asyncio.gather(_json(post(asked)), _json(post(asked)))
        watching.cancel()
    assert [body["count"] for body in bodies] == [8, 8]
    assert least <= seen <= most, "half of 8, and at least one each; later turns may exceed an engine's limit by half"


@pytest.mark.parametrize("count", [20, 80])
async def test_a_streamed_evaluation_holds_no_episode_that_was_sent(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    alive, most, describe = 0, 0, Episodes._describe

    class Tracked(dict[str, Any]):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def tracked(self: Episodes, *args: Any) -> Any:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return Tracked(describe(self, *args))

    monkeypatch.setattr(Episodes, "_describe", tracked)
    asked = {"questions": QUESTIONS[:1], "n": count, "concurrency": 4, "stream": True}
    async with serving(world, tmp_path) as (post, _), post(asked) as response:
        text = await response.text()
    assert text.count("data: ") == count + 1 and json.loads(text.rpartition("data: ")[2])["count"] == count
    assert most <= 2 * 4 + 2, "those in flight, and those that ended and are being sent"


async def test_the_pin_is_held_and_renewed_for_the_time_of_the_request(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin, "PIN_MS", 3000)  # renewed every 0.6 s
    key, lives = world.keys.evaluation, []
    async with serving(world, tmp_path, latency_s=0.6) as (post, engine):
        request = asyncio.create_task(_json(post({"questions": QUESTIONS[:1], "pin": True})))
        other = asyncio.create_task(_json(post({"questions": QUESTIONS[:1], "pin": True})))
        await eventually(lambda: world.sync.exists(key), "it is pinned")
        while len(engine.requests) < 4 or engine._in_flight:
            lives.append(world.sync.pttl(key))
            assert lives[-1] > 0, "the pin lapsed during the request"
            await asyncio.sleep(0.02)
        await asyncio.gather(request, other)
        assert not world.sync.exists(key), "it is removed before the answer"
    assert any(after > before for before, after in itertools.pairwise(lives)), "it was renewed"


async def _json(posting: Any) -> Any:
    async with posting as response:
        return await response.json()


async def test_a_client_that_leaves_takes_its_episodes_and_its_pin_with_it(world, tmp_path: Path) -> None:
    async with serving(world, tmp_path, latency_s=30.0) as (post, engine):
        request = asyncio.create_task(_json(post({"questions": QUESTIONS, "n": 4, "pin": True})))
        await eventually(lambda: engine._in_flight == 8, "all run")
        request.cancel()
        await eventually(lambda: engine._in_flight == 0, "the engine is rid of them")
        await eventually(lambda: not world.sync.exists(world.keys.evaluation), "and the pin is gone")


async def test_unpinned_episodes_wait_for_an_engine_at_the_target(world, tmp_path: Path) -> None:
    world.target(PolicyVersion(2, 3))
    async with serving(world, tmp_path) as (post, engine):
        request = asyncio.create_task(_json(post({"questions": QUESTIONS[:1]})))
        await asyncio.sleep(0.3)
        assert engine.requests == [], "the engine holds (1, 3)"
        world.register("e", engine.url, PolicyVersion(2, 3), state=NodeState.READY)
        assert (await asyncio.wait_for(request, 5))["count"] == 1


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({}, "questions"),
        ({"questions": []}, "questions"),
        ({"questions": QUESTIONS, "pni": True}, "pni"),
        ({"questions": QUESTIONS, "n": 0}, "n"),
        ({"questions": [{"id": "q"}]}, "questions.0.question"),
        ({"questions": QUESTIONS, "temperature": -1}, "temperature"),
        ({"questions": QUESTIONS, "top_p": 0}, "top_p"),
        ({"questions": QUESTIONS, "top_k": -2}, "top_k"),
    ],
)
async def test_a_wrong_body_is_refused_with_the_field_that_is_wrong(
    body: dict[str, Any], hint: str, world, tmp_path: Path
) -> None:
    async with serving(world, tmp_path) as (post, _), post(body) as response:
        assert response.status == 400
        assert hint in (await response.json())["error"]


async def test_a_pin_that_redis_cannot_take_is_an_error_and_not_a_mixture(own_world, tmp_path: Path) -> None:
    async with serving(own_world, tmp_path) as (post, engine):
        own_world.process.kill()
        async with post({"questions": QUESTIONS, "pin": True}) as response:
            assert response.status == 503 and "pinned" in (await response.json())["error"]
        assert engine.requests == []
        await asyncio.to_thread(own_world.process.start)


V4, V5 = PolicyVersion(1, 4), PolicyVersion(1, 5)


def changed(world, engine: FakeServer, version: PolicyVersion) -> None:
    """The engine and its node are at another version, as after a swap."""
    engine.version = version.label
    world.register("e", engine.url, version)


async def test_only_engines_at_the_version_of_the_pin_serve(world, tmp_path: Path) -> None:
    async with FakeServer(version="1.4") as newer, serving(world, tmp_path) as (post, engine):
        world.register("f", engine.url, V3)  # a second one at 1.3, so most engines are there
        world.register("a", newer.url, V4)  # which would be asked first
        body = await _json(post({"questions": QUESTIONS, "n": 4, "pin": True}))
        assert newer.requests == [] and len(engine.requests) == 16
    assert body["versions"] == {"1.3": 8} and {e["version"] for e in body["episodes"]} == {"1.3"}


async def test_a_swap_that_had_begun_before_the_pin_is_repeated_at_the_version_after_it(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin, "PIN_MS", 500)
    async with serving(world, tmp_path, latency_s=0.2) as (post, engine):
        asking = asyncio.create_task(_json(post({"questions": QUESTIONS, "n": 2, "pin": True})))
        await eventually(lambda: len(engine.requests) > 4, "second turns run at 1.3")
        changed(world, engine, V4)
        body = await asyncio.wait_for(asking, 15)
    assert body["versions"] == {"1.4": 4} and body["failed"] == 0
    assert len(engine.requests) > 8, "what was sampled at 1.3 was sampled again"


async def test_an_evaluation_is_of_one_version_while_the_learner_publishes_others(world, tmp_path: Path) -> None:
    async with serving(world, tmp_path, latency_s=0.02) as (post, engine):
        run = RunSettings(id=world.keys.run, dir=tmp_path / "node", redis_url=world.url, model=tmp_path / "model")
        settings = NodeSettings(id="e", kind=AttachedEngine(url=engine.url), poll_s=0.02, heartbeat_s=0.1, drain_s=1.0)
        stop = ShutdownSignal()
        node = asyncio.create_task(serve_node(run, settings, stop=stop))
        try:
            world.publish_weights(tmp_path / "weights", PolicyVersion(2, 0))
            await eventually(lambda: world.registered("e").version == PolicyVersion(2, 0), "the node has loaded it")
            asked = {"questions": QUESTIONS, "n": 20, "pin": True, "concurrency": 4, "stream": True}
            async with post(asked) as response:
                for step in range(1, 5):
                    await response.content.readline()
                    world.publish_weights(tmp_path / "weights", PolicyVersion(2, step))
                last = (await response.text()).rpartition("data: ")[2]
            assert json.loads(last)["versions"] == {"2.0": 40}
            await eventually(lambda: world.registered("e").version == PolicyVersion(2, 4), "then it loads the newest")
            assert engine.calls.count("/update_weights_from_disk") == 2
        finally:
            stop.requested.set()
            await asyncio.wait_for(node, 10)


async def test_an_evaluation_ends_without_mixing_versions_when_no_engine_has_its_version(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin, "PIN_MS", 500)
    async with serving(world, tmp_path, latency_s=0.2) as (post, engine):
        asked = {"questions": QUESTIONS, "n": 4, "pin": True, "concurrency": 1, "stream": True}
        async with post(asked) as response:
            first = json.loads((await response.content.readline()).removeprefix(b"data: "))
            assert first["version"] == "1.3"
            changed(world, engine, V4)  # its node was restarted, and came back with the newest weights
            rest = await asyncio.wait_for(response.text(), 15)
        assert "event: summary" not in rest and rest.endswith('"no engine holds version 1.3 any more"}\n\n')
        assert '"version": "1.4"' not in rest
        body = await _json(post({"questions": QUESTIONS, "pin": True}))
        assert body["versions"] == {"1.4": 2}, "the next evaluation begins at the version that is there"


async def test_a_pin_has_an_end_and_the_swaps_that_waited_come_first(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin, "PIN_MS", 500)
    monkeypatch.setattr(pin, "REST_S", 0.4)  # `test_pin.py` measures it
    world.target(V4)
    key = world.keys.evaluation
    async with serving(world, tmp_path, latency_s=30.0, pin_max_s=0.5) as (post, _):
        async with post({"questions": QUESTIONS, "pin": True}) as response:
            assert response.status == 503 and "rollout.pin_max_s" in (await response.json())["error"]
        assert not world.sync.exists(key)
        again = asyncio.create_task(_json(post({"questions": QUESTIONS, "pin": True})))
        await eventually(lambda: world.sync.exists(key), "then it is pinned again")
        again.cancel()


async def test_without_a_ready_engine_nothing_is_pinned_that_one_would_wait_for(world, tmp_path: Path) -> None:
    async with serving(world, tmp_path, engine_wait_s=0.4) as (post, engine):
        world.register("e", engine.url, V3, state=NodeState.SYNCING)
        async with post({"questions": QUESTIONS, "pin": True}) as response:
            assert response.status == 503 and "no engine became ready within 0.4 s" in (await response.json())["error"]
            assert not world.sync.exists(world.keys.evaluation)


async def test_the_pin_of_another_server_does_not_go_with_ours(world, tmp_path: Path) -> None:
    key = world.keys.evaluation
    async with serving(world, tmp_path) as (post, _):
        world.sync.set(key, "another", px=60_000)
        body = await _json(post({"questions": QUESTIONS, "pin": True}))
        assert body["count"] == 2 and world.sync.get(key), "it lapses by itself, and the other renews it"


async def test_engines_for_evaluation_let_the_others_load(world, tmp_path: Path) -> None:
    async with serving(world, tmp_path, latency_s=0.2, pin_max_s=0.1) as (post, engine):
        world.register("e", engine.url, V3, role="eval")
        world.register("trains", "http://127.0.0.1:1", V4)
        asking = asyncio.create_task(_json(post({"questions": QUESTIONS, "pin": True})))
        await eventually(lambda: engine.requests, "the engine for evaluation serves")
        assert world.sync.get(world.keys.evaluation).startswith(b"eval-engines:")
        body = await asking
    assert body["versions"] == {"1.3": 2} and body["failed"] == 0, "training waits for nothing, so there is no limit"


async def test_a_wanted_version_is_pinned_at_once_and_awaited(world, tmp_path: Path) -> None:
    world.target(V4)
    wanted = {"questions": QUESTIONS, "pin": True, "version": "1.4"}
    async with serving(world, tmp_path) as (post, engine):
        asking = asyncio.create_task(_json(post(wanted)))
        await eventually(lambda: world.sync.get(world.keys.evaluation), "it is pinned")
        held = VersionPin.parse(world.sync.get(world.keys.evaluation))
        assert held.version == V4 and not held.holds_back("rollout", V4) and held.holds_back("rollout", V5)
        assert not engine.requests and not asking.done(), "the engine still holds 1.3"
        engine.version = "1.4"
        world.register("e", engine.url, V4)
        body = await asking
        assert body["versions"] == {"1.4": 2} and body["episodes"][0]["metrics"] == {
            "em": 1.0,
            "f1": 1.0,
            "cover_em": 1.0,
        }
        async with post(wanted | {"version": "1.3"}) as response:
            assert response.status == 503 and "later versions than 1.3" in (await response.json())["error"]
        async with post({"questions": QUESTIONS, "version": "1.4"}) as response:
            assert response.status == 400 and "version needs pin" in (await response.json())["error"]
        assert not world.sync.exists(world.keys.evaluation)


async def test_an_engine_that_cannot_load_a_wanted_version_any_more_is_not_awaited(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin, "PIN_MS", 300)
    world.target(V5)
    async with (
        serving(world, tmp_path) as (post, _),
        post({"questions": QUESTIONS, "pin": True, "version": "1.4"}) as response,
    ):
        assert response.status == 503 and "no engine loads version 1.4" in (await response.json())["error"]


async def test_two_versions_cannot_be_pinned_at_the_same_time(world, tmp_path: Path) -> None:
    async with serving(world, tmp_path, latency_s=0.5) as (post, engine):
        asking = asyncio.create_task(_json(post({"questions": QUESTIONS, "pin": True})))
        await eventually(lambda: engine.requests, "one runs")
        async with post({"questions": QUESTIONS, "pin": True, "version": "1.4"}) as response:
            assert response.status == 503 and "another evaluation holds version 1.3" in (await response.json())["error"]
        assert (await asking)["versions"] == {"1.3": 2}


async def test_unpinned_episodes_need_no_learner(world, tmp_path: Path) -> None:
    async with serving(world, tmp_path) as (post, _):
        body = await asyncio.wait_for(_json(post({"questions": QUESTIONS})), 5)
    assert body["versions"] == {"1.3": 2} and body["failed"] == 0


async def test_without_redis_unpinned_episodes_are_refused_in_the_end(
    own_world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_world.process.kill()
    monkeypatch.setattr(own_world, "register", lambda *_: None)
    async with (
        asyncio.timeout(40),
        serving(own_world, tmp_path, engine_wait_s=0.4) as (post, _),
        post({"questions": QUESTIONS}) as response,
    ):
        assert response.status == 503
        assert "Redis did not return the list of engines within 0.4 s" in (await response.json())["error"]


async def test_a_client_that_reads_nothing_is_left_and_its_pin_goes(
    world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "READ_S", 0.3)
    questions = [{"id": str(n), "question": "a " * 8000} for n in range(40)]
    body = json.dumps({"questions": questions, "pin": True, "stream": True}).encode()
    async with serving(world, tmp_path):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int((tmp_path / "port").read_text())))
        client.setblocking(False)
        _, writer = await asyncio.open_connection(sock=client, limit=1024)
        head = "POST /v1/episodes HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await eventually(lambda: world.sync.exists(world.keys.evaluation), "it is pinned", 10)
        await eventually(lambda: not world.sync.exists(world.keys.evaluation), "and let go", 20)
        writer.close()
