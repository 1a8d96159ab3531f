"""A node in a view: the order of its calls, and the state of the engine however the view ends. The test is the
learner, the engine is scripted and loads in place: after its first bucket it holds weights of no version.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from protocol.codec import decode_as, encode
from protocol.messages import MetricsSnapshot, NodeState, ViewAnswer, WeightUpdate, WeightView
from protocol.runtime.http.auth import Access, member_token
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from protocol.weights import WeightBucket, WeightPlan
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.server import serve
from rollout_server.node.weights import receiver as receive
from tests.support.environments import write_tokenizer
from tests.support.fake_engine import FakeServer, Fault
from tests.support.waiting import eventually

V0, V1, V2 = PolicyVersion(0, 0), PolicyVersion(1, 0), PolicyVersion(1, 1)
BUCKETS = (
    WeightBucket(names=("a", "b"), dtypes=("float32", "bfloat16"), shapes=((2, 3), (4,))),
    WeightBucket(names=("c",), dtypes=("float32",), shapes=((5,),)),
)
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
BEGIN, BUCKET, END = "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"
PAUSE, CONTINUE, FLUSH = "/pause_generation", "/continue_generation", "/flush_cache"
LABEL, CHECK, INFO, DISK = "/update_weight_version", "/weights_checker", "/model_info", "/update_weights_from_disk"
WEIGHTS = {JOIN, LEAVE, BEGIN, BUCKET, END, LABEL, CHECK}


class Member(FakeServer):
    """The scripted engine with the routes of a weight-update group, which only say yes. `bodies`: what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: dict[str, list[dict[str, Any]]] = {}
        self.sums: dict[str, Any] = {"per_engine_checksum": "c0ffee"}
        self.facts: dict[str, Any] = {}

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/server_info" and self.facts:
            return web.json_response(self.facts)
        if request.path not in WEIGHTS:
            return await super()._faulty(request, handler)  # type: ignore[no-any-return]
        body = await request.json()
        self.bodies.setdefault(request.path, []).append(body)

        async def yes(_: web.Request) -> web.Response:
            if request.path == LABEL:
                self.version = body["new_version"]
            return web.json_response({"success": True, "message": "", **(self.sums if request.path == CHECK else {})})

        return await super()._faulty(request, yes)  # type: ignore[no-any-return]

    def swap(self) -> list[str]:
        """The calls that pause, load and go on, in order."""
        return [c for c in self.calls if c in WEIGHTS | {PAUSE, CONTINUE, FLUSH, DISK}]


class Learner:
    """The learner's side of the protocol, scripted."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.view = WeightView(
            run=world.keys.run, epoch=1, step=1, number=1, phase="prepare", members=(), rank_offsets=(1,),
            group="g", address="127.0.0.1", port=1, world_size=2, buckets=BUCKETS,
        )  # fmt: skip

    def say(self, phase: str, *, left_s: float = 10.0, **more: Any) -> None:
        info = self.world.registered("e")
        seconds, micros = self.world.sync.time()
        given = {"phase": phase, "deadline": seconds + micros / 1e6 + left_s, "members": (f"e/{info.incarnation}",)}
        self.view = self.view.model_copy(update=given | more)
        self.world.sync.set(self.world.keys.view, encode(self.view))
        self.wake()

    def heard(self) -> ViewAnswer | None:
        found = self.world.sync.hgetall(self.world.keys.answers(self.view.epoch, self.view.number))
        answers = [decode_as(ViewAnswer, raw) for raw in found.values()]
        return answers[0] if answers else None

    async def hears(self, phase: str) -> ViewAnswer:
        def true() -> bool:
            answer = self.heard()
            return answer is not None and answer.phase == phase and (phase == "failed" or not answer.detail)

        await eventually(true, f"the answer {phase}")
        answer = self.heard()
        assert answer is not None
        return answer

    def announce(self, version: PolicyVersion, redis: Any = None) -> None:
        update = WeightUpdate(
            run=self.world.keys.run,
            epoch=version.epoch,
            step=version.step,
            digest="d",
            transport="distributed",
            path="",
        )
        (redis or self.world.sync).hset(self.world.keys.target, mapping={"b": encode(update), "state": "ready"})
        self.wake(redis)

    def wake(self, redis: Any = None) -> None:
        (redis or self.world.sync).xadd(self.world.keys.wake, {"n": 1}, maxlen=8)


@contextlib.asynccontextmanager
async def ring(
    world: Any, tmp_path: Path, *, facts: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Member, Learner]]:
    """An engine with a node, READY at V1 which was loaded from files, and its learner. `calls` begin after that.
    facts: what the engine reports of itself."""
    run = RunSettings(
        id=world.keys.run, dir=tmp_path / "run", redis_url=world.url, model=write_tokenizer(tmp_path / "model", "words")
    )
    given = {"poll_s": 0.02, "heartbeat_s": 0.1, "drain_s": 0.0, "probe_s": 60.0} | settings
    stop = ShutdownSignal()
    async with Member() as engine:
        engine.facts = facts or {}
        node = NodeSettings(id="e", kind=AttachedEngine(url=engine.url), **given)
        serving = asyncio.create_task(serve(run, node, stop=stop))
        try:
            await eventually(lambda: world.registered("e") is not None, "it is registered")
            world.publish_weights(tmp_path / "weights", V1)
            await eventually(has_state(world, NodeState.READY, V1), "READY at V1")
            engine.calls.clear()
            yield engine, Learner(world)
        finally:
            stop.requested.set()
            await asyncio.wait_for(serving, 10)


def counts(world: Any) -> dict[str, float]:
    raw = world.sync.get(world.keys.metrics("node", "e"))
    return dict(decode_as(MetricsSnapshot, raw).values) if raw else {}


def has_state(world: Any, state: NodeState, version: PolicyVersion) -> Callable[[], bool]:
    def true() -> bool:
        info = world.registered("e")
        return info is not None and (info.state, info.version) == (state, version)

    return true


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_the_calls_of_a_view_and_their_order(world, tmp_path: Path, mode: str) -> None:
    async with ring(world, tmp_path, pause_mode=mode) as (engine, learner):
        learner.say("prepare")
        answer = await learner.hears("prepared")
        assert engine.swap() == [JOIN] and not engine.paused and not answer.touched
        assert engine.bodies[JOIN][0] == {
            "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
            "group_name": "g", "backend": "gloo",
        }  # fmt: skip
        learner.say("transfer")
        answer = await learner.hears("loaded")
        flush = [FLUSH] if mode == "retract" else []
        await eventually(lambda: len(engine.swap()) == 7 + len(flush), "the cache is flushed")
        assert engine.swap() == [JOIN, PAUSE, BEGIN, BUCKET, BUCKET, END, CHECK, *flush] and engine.paused
        assert (answer.checksum, answer.touched) == ("c0ffee", True)
        assert (answer.tensors_sha256, answer.unused) == ("", ()), "SGLang holds them in another layout"
        named = [body.get("algorithm") for body in (*engine.bodies[BEGIN], *engine.bodies[CHECK])]
        assert named == [None, None], "SGLang's requests have no such field"
        assert 0 < answer.transfer_s < answer.pause_s
        # the state is registered after the answer
        await eventually(has_state(world, NodeState.LOADING, V1), "LOADING before the commit")
        assert engine.bodies[BUCKET][0] == {
            "names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 3], [4]], "group_name": "g",
            "flush_cache": False, "abort_all_requests": False, "load_format": "flattened_bucket",
        }  # fmt: skip
        learner.announce(V2)
        learner.say("commit", buckets=())
        await eventually(has_state(world, NodeState.READY, V2), "READY at V2")
        assert engine.swap()[7 + len(flush) :] == [LABEL, CONTINUE] and not engine.paused
        assert engine.bodies[LABEL] == [{"new_version": "1.1", "abort_all_requests": False}]
        info = world.registered("e")
        assert info.updates == 2 and info.pause_s >= answer.pause_s
        await eventually(lambda: counts(world).get("updates") == 2.0, "both updates are counted")
        assert counts(world)["updates_distributed"] == 1.0
        # the next view of the same group: no second joining
        engine.calls.clear()
        learner.say("prepare", number=2, step=2, buckets=BUCKETS, flattened=False)
        await learner.hears("prepared")
        learner.say("transfer")
        await learner.hears("loaded")
        learner.announce(PolicyVersion(1, 2))  # the announcement alone is the commit
        await eventually(has_state(world, NodeState.READY, PolicyVersion(1, 2)), "READY at the next one")
        assert engine.swap() == [PAUSE, BEGIN, BUCKET, BUCKET, END, CHECK, *flush, LABEL, CONTINUE]
        assert engine.bodies[BUCKET][-1]["load_format"] is None


async def test_an_engine_that_says_what_it_holds_is_summed_up_over_what_was_sent(world, tmp_path: Path) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        sums = {"a": "11", "c": "33", "not of this view": "44"}
        engine.sums = {"ranks": [{"rank": 0, "checksums": sums}], "checksums": sums}
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer")
        answer = await learner.hears("loaded")
        assert answer.tensors_sha256 == hashlib.sha256(b"a 11\nc 33\n").hexdigest()
        assert answer.unused == ("b",) and len(answer.checksum) == 64


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            {"checksum": "blake3"},
            "unknown checksum 'blake3', known are sha256, xxh3_128: install the learner's version",
        ),
        ({"buckets": (), "plan": "0" * 64}, "another learner has written its own"),
    ],
)
async def test_a_view_that_a_node_cannot_follow_is_refused_and_the_next_is_found_without_a_wake_up(
    world, tmp_path: Path, more: dict[str, Any], why: str
) -> None:
    plan = encode(WeightPlan(buckets=BUCKETS))
    async with ring(world, tmp_path) as (engine, learner):
        world.sync.set(world.keys.plan, plan)
        learner.say("prepare", **more)
        assert why in (await learner.hears("failed")).detail
        await eventually(has_state(world, NodeState.READY, V1), "READY at what it held")
        assert engine.swap() == []
        learner.wake = lambda *_: None  # type: ignore[method-assign]
        given = {"number": 2, "checksum": "sha256", "buckets": (), "plan": hashlib.sha256(plan).hexdigest()}
        learner.say("prepare", **given)
        await learner.hears("prepared")
        world.sync.delete(world.keys.plan)  # it is read once
        learner.say("transfer")
        await learner.hears("loaded")
        assert [body["names"] for body in engine.bodies[BUCKET]] == [["a", "b"], ["c"]]


PROOF = WeightBucket(names=("norm.weight",), dtypes=("bfloat16",), shapes=((4,),))


async def test_the_proof_of_a_group_comes_before_the_answer_and_changes_nothing(world, tmp_path: Path) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        learner.say("prepare", proof=PROOF)
        answer = await learner.hears("prepared")
        assert engine.swap() == [JOIN, PAUSE, BEGIN, BUCKET, END, CONTINUE] and not engine.paused
        assert engine.bodies[BUCKET][0]["names"] == ["norm.weight"] and engine.bodies[BUCKET][0]["group_name"] == "g"
        assert not answer.touched
        await eventually(has_state(world, NodeState.READY, V1), "READY at the version before")
        learner.say("transfer")
        await learner.hears("loaded")
        assert engine.swap()[6:12] == [PAUSE, BEGIN, BUCKET, BUCKET, END, CHECK]
        learner.announce(V2)
        await eventually(has_state(world, NodeState.READY, V2), "READY at V2")
        # a group that is known is not proven again
        engine.calls.clear()
        learner.say("prepare", number=2, step=2, buckets=BUCKETS, proof=PROOF)
        await learner.hears("prepared")
        assert engine.swap() == []


@pytest.mark.parametrize("route", [BEGIN, BUCKET, END])
async def test_an_engine_that_cannot_give_the_proof_says_so_and_is_whole(world, tmp_path: Path, route: str) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        target = world.sync.hgetall(world.keys.target)
        world.sync.delete(world.keys.target)
        engine.faults[route] = Fault(status=400, times=1)
        learner.say("prepare", proof=PROOF)
        answer = await learner.hears("failed")
        assert "400" in answer.detail and answer.touched is (route == END)
        if route == END:  # the session may be open, and what is unpacked in it
            await eventually(has_state(world, NodeState.QUARANTINED, V0), "QUARANTINED, at no version")
            assert engine.paused
            world.sync.hset(world.keys.target, mapping=target)
            await eventually(has_state(world, NodeState.READY, V1), "READY by files")
        await eventually(lambda: not engine.paused and has_state(world, NodeState.READY, V1)(), "READY at V1 again")


async def test_every_answer_has_the_token_of_the_run(world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = secrets.token_urlsafe(32)
    monkeypatch.setenv("FORAY_NODE_TOKEN", token)
    async with ring(world, tmp_path) as (_, learner):
        learner.say("prepare")
        answer = await learner.hears("prepared")
        assert answer.token == member_token(Access({"node": token}), answer.member, "g")


@pytest.mark.parametrize("route", [JOIN, BEGIN, PAUSE])
async def test_what_fails_before_the_first_tensor_leaves_the_engine_at_its_version(
    world, tmp_path: Path, route: str
) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        engine.faults[route] = Fault(status=400, times=1)
        learner.say("prepare")
        if route != JOIN:
            await learner.hears("prepared")
            learner.say("transfer")
        answer = await learner.hears("failed")
        assert not answer.touched and "400" in answer.detail
        await eventually(has_state(world, NodeState.READY, V1), "READY at V1 again")
        assert not engine.paused and BUCKET not in engine.calls
        # and the next view is taken part in
        learner.say("prepare", number=2, group="h")
        await learner.hears("prepared")
        assert engine.bodies[JOIN][-1]["group_name"] == "h"


@pytest.mark.fault(16)
async def test_a_session_that_a_dead_node_left_open_is_closed(world, tmp_path: Path) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        world.sync.delete(world.keys.target)
        message = "a weight-update session is already open; call end_weight_update() first"
        engine.faults[BEGIN] = Fault(body={"success": False, "message": message}, times=1)
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer")
        assert (await learner.hears("failed")).touched, "it is unknown what was sent in it"
        assert engine.swap() == [JOIN, PAUSE, BEGIN, END] or engine.swap() == [JOIN, PAUSE, BEGIN, END, LEAVE]
        world.publish_weights(tmp_path / "weights", V2)
        await eventually(has_state(world, NodeState.READY, V2), "READY by files")
        learner.say("prepare", number=2, step=2, group="h")
        await learner.hears("prepared")


@pytest.mark.fault(15)
@pytest.mark.parametrize("route", [BUCKET, END, CHECK])
async def test_what_fails_after_it_quarantines_the_engine_until_files_are_loaded_in_place(
    world, tmp_path: Path, route: str
) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        world.sync.delete(world.keys.target)  # no files to turn to for now
        engine.faults[route] = Fault(status=400, times=1)
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer")
        answer = await learner.hears("failed")
        assert answer.touched and "400" in answer.detail
        await eventually(has_state(world, NodeState.QUARANTINED, V0), "QUARANTINED, at no version")
        assert engine.paused and CONTINUE not in engine.calls, "it must not go on with what it holds"
        assert engine.calls.count(END) == 1, "no session stays open"
        incarnation = world.registered("e").incarnation
        learner.announce(V2)
        await asyncio.sleep(0.2)
        assert has_state(world, NodeState.QUARANTINED, V0)(), "a version without files is nothing to turn to"
        path = world.publish_weights(tmp_path / "weights", V2)
        await eventually(has_state(world, NodeState.READY, V2), "READY at V2 by files")
        assert (engine.loaded, engine.paused) == (str(path), False)
        assert world.registered("e").incarnation == incarnation, "the engine was not restarted"


async def test_an_engine_that_stages_leaves_the_group_before_it_ends_a_session_in_the_middle(
    world, tmp_path: Path
) -> None:
    async with ring(world, tmp_path, facts={"engine": "foray-cpu"}) as (engine, learner):
        world.sync.delete(world.keys.target)
        engine.faults[BUCKET], engine.faults[END] = Fault(status=400, times=1), Fault(status=400, times=1)
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer")
        assert not (await learner.hears("failed")).touched
        # what is registered may still be the READY of before
        await eventually(lambda: CONTINUE in engine.swap(), "it goes on")
        await eventually(has_state(world, NodeState.READY, V1), "READY at what it held")
        assert engine.bodies[BEGIN][0]["algorithm"] == learner.view.checksum
        # the end of a session waits for the bucket in progress, and that for a trainer that may hang
        assert engine.swap() == [JOIN, BEGIN, BUCKET, LEAVE, PAUSE, END, CONTINUE]


async def test_a_quarantined_engine_that_does_not_load_is_lost(world, tmp_path: Path) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        world.sync.delete(world.keys.target)
        engine.faults[BUCKET] = Fault(status=400)
        engine.faults[PAUSE] = Fault(status=500, times=0)
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer")
        await learner.hears("failed")
        incarnation = world.registered("e").incarnation
        engine.faults[PAUSE] = Fault(status=500, times=1)
        world.publish_weights(tmp_path / "weights", V2)
        await eventually(has_state(world, NodeState.READY, V2), "READY at V2 in another incarnation")
        assert world.registered("e").incarnation != incarnation and not engine.paused


@pytest.mark.fault(15)
@pytest.mark.parametrize("again", [False, True], ids=["next", "again"])
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "aborted"])
async def test_a_node_that_missed_the_end_of_its_view_learns_from_the_next_one_whether_it_was_committed(
    world, tmp_path: Path, committed: bool, again: bool
) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        world.sync.delete(world.keys.target)
        if again:
            learner.announce(V2)  # the view sends the target again
        learner.say("prepare")
        await learner.hears("prepared")
        learner.say("transfer")
        await learner.hears("loaded")
        later = PolicyVersion(1, 2)
        numbers = (1, 3) if committed else (3,)
        view = learner.view.model_copy(
            update={"number": 4, "step": 3, "phase": "prepare", "members": (), "committed": numbers}
        )
        with world.sync.pipeline(transaction=True) as both:  # as after a sleep: nothing in between is seen
            learner.announce(later, both)
            both.set(world.keys.view, encode(view))
            both.execute()
        if committed:
            await eventually(has_state(world, NodeState.READY, V2), "READY at what it received")
            assert engine.swap()[-2:] == [LABEL, CONTINUE] and not engine.paused
        else:
            await eventually(has_state(world, NodeState.QUARANTINED, V0), "QUARANTINED")
            assert engine.paused and LABEL not in engine.calls
        world.publish_weights(tmp_path / "weights", later)
        await eventually(has_state(world, NodeState.READY, later), "READY by files")


@pytest.mark.fault(15)
@pytest.mark.parametrize("end", ["deadline", "abort", "another view", "a newer epoch", "files of the version"])
@pytest.mark.parametrize("after", ["prepared", "loaded"])
async def test_every_end_of_a_view_but_a_commit(
    world, tmp_path: Path, end: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        world.sync.delete(world.keys.target)
        left_s = 0.5 if end == "deadline" else 10.0
        learner.say("prepare", left_s=left_s if after == "prepared" else 10.0)
        await learner.hears("prepared")
        if after == "loaded":
            learner.say("transfer", left_s=left_s)
            await learner.hears("loaded")
        new = PolicyVersion(2, 0) if end == "a newer epoch" else V2
        if end == "files of the version":
            # what the engine was sent may be the very reason for it
            world.publish_weights(tmp_path / "weights", new)
            await eventually(has_state(world, NodeState.READY, new), "READY by files")
            assert DISK in engine.calls and LABEL not in engine.calls
            return
        if end == "abort":
            learner.say("abort")
        elif end == "another view":
            learner.say("transfer", number=2)
        elif end == "a newer epoch":
            world.publish_weights(tmp_path / "weights", new)
        if end == "a newer epoch":
            await eventually(has_state(world, NodeState.READY, new), "READY at the newer epoch's")
        elif after == "prepared":
            await eventually(lambda: LEAVE in engine.calls, "it left the group")
            await eventually(has_state(world, NodeState.READY, V1), "READY at what it held")
            assert PAUSE not in engine.calls
        else:
            await eventually(has_state(world, NodeState.QUARANTINED, V0), "QUARANTINED")
            world.publish_weights(tmp_path / "weights", new)
            await eventually(has_state(world, NodeState.READY, new), "READY by files")
        assert not engine.paused


async def test_a_group_without_members_costs_the_deadline_only(world, tmp_path: Path) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        engine.faults[JOIN] = Fault(hang=True, times=1)
        learner.say("prepare", left_s=0.3)
        await eventually(lambda: learner.heard() is not None, "it says that it is there")
        assert (learner.heard().phase, learner.heard().detail) == ("prepared", receive.JOINING)
        assert not (await learner.hears("failed")).touched
        assert has_state(world, NodeState.READY, V1)()


@pytest.mark.fault(18)
async def test_an_engine_that_is_not_ready_or_not_meant_stays_out(world, tmp_path: Path) -> None:
    async with ring(world, tmp_path) as (engine, learner):
        learner.say("prepare", members=("e/other",))
        await asyncio.sleep(0.15)
        learner.say("prepare", left_s=-1.0)
        await asyncio.sleep(0.15)
        learner.say("prepare", epoch=0)
        await asyncio.sleep(0.15)
        learner.say("prepare", epoch=1, step=0)
        await asyncio.sleep(0.15)
        assert engine.swap() == [] and learner.heard() is None
        world.sync.set(world.keys.evaluation, "x")
        learner.say("prepare", number=3, step=1)
        answer = await learner.hears("failed")
        assert (answer.touched, answer.detail) == (False, "an evaluation is running")
        assert engine.swap() == []
