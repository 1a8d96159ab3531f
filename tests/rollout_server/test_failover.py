"""Engines that die, hang, drain or send malformed data during a turn: no token is lost, doubled or wrongly kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import EngineInfo, NodeState, Sampling, Status, TrajectoryGroup
from protocol.runtime.http.body import bounded_session
from protocol.runtime.metrics import WaitTimer
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import Fleet, FleetTable
from rollout_server.engine import decoding as stream
from rollout_server.engine.admission import incarnation_key
from rollout_server.engine.base import Completion, GenerateRequest
from rollout_server.engine.client import SglangClient
from rollout_server.engine.continuation import StopChecker
from rollout_server.engine.router import Router, TurnLimits
from rollout_server.rollout.group import run_group
from tests.support.environments import make_environment
from tests.support.fake_engine import FakeServer, Fault, next_ids, unsaid
from tests.support.fake_search import FakeSearch
from tests.support.messages import make_task
from tests.support.waiting import eventually

V5, V6 = PolicyVersion(1, 5), PolicyVersion(1, 6)


class Table(Fleet):
    """A fleet with scripted tables instead of Redis."""

    def __init__(self) -> None:
        super().__init__(None, WaitTimer(), poll_s=1.0)  # type: ignore[arg-type]

    def publish(self, *engines: EngineInfo, target: PolicyVersion = V6) -> None:
        self.install(FleetTable({e.id: e for e in engines}, target))


def info(name: str, server: FakeServer, **facts: Any) -> EngineInfo:
    version = PolicyVersion.parse(server.version) or V5
    given = {"state": NodeState.READY, "epoch": version.epoch, "step": version.step, "incarnation": "i"} | facts
    return EngineInfo(id=name, url=server.url, **given)


def ask(ids: Sequence[int], *, n: int = 20, pinned: bool = False, stop: Sequence[str] = ()) -> GenerateRequest:
    """A turn of a new trajectory: it goes to the first of the idle engines."""
    session = uuid.uuid4().hex
    return GenerateRequest(
        ids=list(ids), session=session, group=session, max_new_tokens=n, sampling=Sampling(), stop=stop, pinned=pinned
    )


@contextlib.asynccontextmanager
async def routing(table: Table, *, interval: int = 4, **settings: Any) -> AsyncIterator[Router]:
    limits = {"timeout_s": 5.0, "stall_s": 5.0, "wait_s": 10.0}
    limits |= {name: settings.pop(name) for name in [*limits] if name in settings}
    async with bounded_session() as session:

        def connect(engine: EngineInfo) -> SglangClient:
            return SglangClient(session, engine.url, name=engine.id, adapter=engine.adapter, stream_interval=interval)

        yield Router(
            table, connect, WaitTimer(), **{"max_lag": 2, "limits": TurnLimits(**limits), "vocab_size": 1000} | settings
        )


def twenty(body: dict[str, Any]) -> Sequence[int]:
    return next_ids(body["input_ids"], body["sampling_params"]["max_new_tokens"])


def spans_of(done: Completion) -> list[tuple[str, int, int]]:
    return [(s.version.label, s.start, s.end) for s in done.spans]


@pytest.mark.parametrize("kind", [{}, {"incremental": True}, {"exact": True}], ids=["sglang", "incremental", "exact"])
@pytest.mark.parametrize("interval", [1, 4, 64])
@pytest.mark.fault(5)
async def test_an_engine_may_crash_after_any_token(kind: dict[str, bool], interval: int) -> None:
    table, n = Table(), 20
    async with (
        FakeServer(twenty, version="1.5", **kind) as a,
        FakeServer(twenty, version="1.6", **kind) as b,
        routing(table, interval=interval) as router,
    ):
        for k in range(n):
            # a new incarnation each time: what is known of the last one says nothing of it
            table.publish(info("a", a, incarnation=str(k)), info("b", b))
            a.faults["/generate"] = Fault(after=k, drop=True)
            b.tokens_made = 0
            done = await router(ask([k, 2, 3], n=n, pinned=k % 2 == 1))
            assert done.ids == next_ids([k, 2, 3], n) and done.logprobs == [-0.25] * n
            assert spans_of(done) == [("1.5", 0, k)] * bool(k) + [("1.6", k, n)]
            assert (done.engine, done.pieces, done.finish_reason) == ("b", 1 + bool(k), "length")
            assert b.tokens_made == n - k, "what was received is not generated again"
    assert router.counts["failovers"] == n and router.counts["tokens_continued"] == sum(range(n))
    assert router.counts["tokens_unattributed"] == 0 and router.inflight.in_flight == 0


async def test_a_turn_may_pass_through_many_engines_and_be_lost_by_each() -> None:
    table = Table()
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeServer(twenty, version="1.6")) for _ in range(7)]
        router = await stack.enter_async_context(routing(table, interval=1))
        for engine in engines[:6]:
            engine.faults["/generate"] = Fault(after=3, drop=True)
        table.publish(*(info(f"e{i}", engine) for i, engine in enumerate(engines)))
        done = await router(ask([5]))
    assert done.ids == next_ids([5], 20) and done.pieces == 7 and spans_of(done) == [("1.6", 0, 20)]
    assert sum(engine.tokens_made for engine in engines) == 20


@pytest.mark.parametrize(
    ("change", "alone"),
    [
        ({"state": NodeState.SUSPECT}, True),
        ({"state": NodeState.QUARANTINED}, True),
        ({"state": NodeState.GONE}, True),
        ({"incarnation": "another"}, True),
        ({"state": NodeState.DRAINING}, False),
        (None, False),
    ],
    ids=["suspect", "quarantined", "gone", "restarted", "draining", "lapsed"],
)
async def test_the_table_takes_an_engine_away_in_the_middle_of_a_turn(
    change: dict[str, Any] | None, alone: bool
) -> None:
    """`alone`: its turns leave it even when no other engine is there."""
    table = Table()
    async with (
        FakeServer(twenty, version="1.6", pace_s=0.03) as a,
        FakeServer(twenty, version="1.6") as b,
        routing(table, interval=1) as router,
    ):
        table.publish(info("a", a))
        turn = asyncio.create_task(router(ask([7])))
        await eventually(lambda: a.tokens_made >= 5, "the turn is under way")
        changed = [info("a", a, **change)] if change is not None else []
        table.publish(*changed)
        await asyncio.sleep(0.05)
        assert (router.counts["engine_withdrawn"] == 1) is alone
        table.publish(*changed, info("b", b))
        done = await asyncio.wait_for(turn, 1.0)
        await eventually(lambda: a._in_flight == 0, "the first engine is rid of it")
    assert done.ids == next_ids([7], 20) and router.counts["tokens_continued"] >= 3
    assert done.engine == ("a" if change == {"incarnation": "another"} else "b")
    assert router.health.total == 0, "that was not the engine's doing"


async def test_a_draining_engine_without_a_successor_finishes_its_turns() -> None:
    table = Table()
    async with FakeServer(twenty, version="1.6", pace_s=0.01) as a, routing(table) as router:
        table.publish(info("a", a))
        turn = asyncio.create_task(router(ask([7])))
        await eventually(lambda: a.tokens_made >= 5, "the turn is under way")
        table.publish(info("a", a, state=NodeState.DRAINING))
        assert (await turn).pieces == 1


async def test_an_engine_that_aborts_gives_what_it_has() -> None:
    def abort(chunk: dict[str, Any]) -> dict[str, Any]:
        finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return chunk | {"meta_info": chunk["meta_info"] | {"finish_reason": finish}}

    table = Table()
    async with (
        FakeServer(twenty, version="1.5") as a,
        FakeServer(twenty, version="1.6") as b,
        routing(table) as router,
    ):
        table.publish(info("a", a), info("b", b))
        a.faults["/generate"] = Fault(after=6, spoil=abort)
        done = await router(ask([1]))
    assert done.ids == next_ids([1], 20) and spans_of(done) == [("1.5", 0, 9), ("1.6", 9, 20)]


async def test_an_engine_that_loads_weights_may_be_silent_and_one_that_does_not_may_not() -> None:
    table = Table()
    async with (
        FakeServer(twenty, version="1.6", pace_s=0.005) as a,
        FakeServer(twenty, version="1.6") as b,
        routing(table, stall_s=0.25) as router,
    ):
        table.publish(info("a", a))
        turn = asyncio.create_task(router(ask([7])))
        await eventually(lambda: a.tokens_made >= 5, "the turn is under way")
        a._running.clear()
        table.publish(info("a", a, state=NodeState.LOADING), info("b", b))
        await asyncio.sleep(0.8)
        assert not turn.done() and b.requests == []
        table.publish(info("a", a), info("b", b))
        done = await asyncio.wait_for(turn, 3.0)
    assert (done.engine, done.pieces) == ("b", 2) and done.ids == next_ids([7], 20)
    assert router.counts["engine_stalled"] == 1 and router.health.total == 1


@pytest.mark.fault(6)
async def test_all_turns_of_a_suspended_engine_fail_over_also_those_not_begun() -> None:
    table = Table()
    async with (
        FakeServer(twenty, version="1.6", pace_s=0.01) as a,
        FakeServer(twenty, version="1.6") as b,
        # the others must be sent before the first one stalls: an engine that has begun none of its turns may compute
        routing(table, stall_s=1.0, timeout_s=60.0) as router,
    ):
        table.publish(info("a", a))
        turns = [asyncio.create_task(router(ask([7])))]
        await eventually(lambda: a.tokens_made >= 5, "one is begun")
        a._running.clear()
        turns += [asyncio.create_task(router(ask([i]))) for i in (8, 9)]
        await eventually(lambda: a._in_flight == 3, "two are not")
        table.publish(info("a", a), info("b", b))
        done = await asyncio.wait_for(asyncio.gather(*turns), 30.0)
    assert [c.ids for c in done] == [next_ids([i], 20) for i in (7, 8, 9)] and {c.engine for c in done} == {"b"}
    assert router.counts["engine_stalled"] == 3
    assert router.health.total == 1, "it is one hang, however many turns were there"


@pytest.mark.fault(6)
async def test_one_request_that_hangs_does_not_end_younger_ones_before_their_first_token() -> None:
    table = Table()
    async with FakeServer(twenty, version="1.6") as a, routing(table, stall_s=1.0) as router:
        table.publish(info("a", a))
        a.faults["/generate"] = Fault(after=1, hang=True, times=1)
        turns = [asyncio.create_task(router(ask([7])))]
        await eventually(lambda: a.tokens_made == 1, "one hangs")
        await asyncio.sleep(0.6)
        a.latency_s = 0.8  # a prefill: it has not ended when the first one counts as stalled
        turns += [asyncio.create_task(router(ask([i]))) for i in (8, 9, 10)]
        done = await asyncio.wait_for(asyncio.gather(*turns), 10.0)
    assert [c.ids for c in done] == [next_ids([i], 20) for i in (7, 8, 9, 10)]
    assert [c.pieces for c in done] == [2, 1, 1, 1] and len(a.requests) == 5
    assert router.counts["engine_stalled"] == router.health.total == 1


async def test_tokens_whose_version_is_in_doubt_are_sampled_again_and_never_mislabelled() -> None:
    """SGLang says which version sampled which token only at the end. This stream has no end."""
    table = Table()
    async with (
        FakeServer(twenty, version="1.5", pace_s=0.02) as a,
        FakeServer(twenty, version="1.6") as b,
        routing(table, interval=4) as router,
    ):
        table.publish(info("a", a), info("b", b))
        a.faults["/generate"] = Fault(after=14, drop=True)
        turn = asyncio.create_task(router(ask([7])))
        await eventually(lambda: a.tokens_made >= 7, "the turn is under way")
        a.version = "1.6"
        done = await turn
    # chunks of 1, 5 tokens are of 1.5 for sure; that of 9 holds both; 13 and 14 follow it
    assert done.ids == next_ids([7], 20) and spans_of(done) == [("1.5", 0, 5), ("1.6", 5, 20)]
    assert (router.counts["tokens_unattributed"], router.counts["tokens_continued"]) == (9, 5)


async def test_a_swap_in_the_middle_of_a_whole_answer_keeps_every_token() -> None:
    table = Table()
    async with FakeServer(twenty, version="1.5", pace_s=0.02) as a, routing(table, interval=4) as router:
        table.publish(info("a", a))
        turn = asyncio.create_task(router(ask([7])))
        await eventually(lambda: a.tokens_made >= 7, "the turn is under way")
        made, a.version = a.tokens_made, "1.6"
        done = await turn
    assert spans_of(done) == [("1.5", 0, made), ("1.6", made, 20)] and done.pieces == 1


async def test_with_an_adapter_the_table_says_which_version_answers() -> None:
    table = Table()
    async with FakeServer(twenty, version="0.0") as a, routing(table) as router:
        table.publish(info("a", a, epoch=1, step=6, adapter="v1.6"))
        done = await router(ask([7]))
        assert a.requests[0]["lora_path"] == "v1.6" and a.requests[0]["extra_key"] == "1.6"
    assert spans_of(done) == [("1.6", 0, 20)]


class Letters:
    """A vocabulary in which token i is a piece of text."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def say(self, body: dict[str, Any]) -> Sequence[int]:
        """All pieces in order, from where the ids are, and then the last one for ever: no stop string is looked for."""
        said = body["input_ids"][1:]
        rest = range(len(said), len(self.pieces))
        return [*rest, *[len(self.pieces) - 1] * 20][: body["sampling_params"]["max_new_tokens"]]

    def stop_checker(self, *eos: int) -> StopChecker:
        return StopChecker(lambda ids: "".join(self.pieces[i] for i in ids if i < len(self.pieces)), frozenset(eos))


@pytest.mark.parametrize("after", range(1, 7))
async def test_a_stop_string_may_lie_across_the_border_of_two_engines(after: int) -> None:
    """The second engine sees only its own half and would go on to the limit."""
    words = Letters("go", " ", "</", "se", "ar", "ch>", " and", " on")
    table = Table()
    async with (
        FakeServer(words.say, version="1.5") as a,
        FakeServer(words.say, version="1.6", pace_s=0.01) as b,
        routing(table, stop_checker=words.stop_checker(), interval=1) as router,
    ):
        table.publish(info("a", a), info("b", b))
        a.faults["/generate"] = Fault(after=after, drop=True)
        done = await router(ask([0], n=100, stop=["</search>"]))
        made = b.tokens_made
    assert done.ids == [0, 1, 2, 3, 4, 5] and len(done.logprobs) == 6
    assert (done.finish_reason, done.matched) == ("stop", "</search>")
    assert spans_of(done) == [("1.5", 0, after)] + [("1.6", after, 6)] * (after < 6)
    assert made < 20, "the rest is left, not awaited"
    assert (len(b.requests) == 0) is (after == 6), "nothing is asked when only the last chunk was lost"


def unfinished(chunk: dict[str, Any]) -> dict[str, Any]:
    return chunk | {"meta_info": chunk["meta_info"] | {"finish_reason": None}}


async def test_a_turn_that_is_complete_but_for_its_last_chunk_is_not_asked_for_again() -> None:
    table = Table()
    words = Letters("a", "b", "c", "$")
    async with (
        FakeServer(words.say, version="1.5") as a,
        FakeServer(words.say, version="1.6") as b,
        routing(table, stop_checker=words.stop_checker(3), interval=1) as router,
    ):
        table.publish(info("a", a), info("b", b))
        a.faults["/generate"] = Fault(after=4, drop=True)
        ended = await router(ask([0], n=50))
        assert (ended.ids, ended.finish_reason, ended.matched) == ([0, 1, 2, 3], "stop", 3)
        table.publish(info("a", a, incarnation="j"), info("b", b))
        cut = await router(ask([0], n=5))
        assert (cut.ids, cut.finish_reason) == ([0, 1, 2, 3], "stop")
        a.faults["/generate"] = Fault(after=2, spoil=unfinished)
        table.publish(info("a", a, incarnation="k"), info("b", b))
        full = await router(ask([0], n=3))
        assert (full.ids, full.finish_reason, full.matched) == ([0, 1, 2], "length", None)
    assert b.requests == [] and router.counts["failovers"] == 0


def nan(chunk: dict[str, Any]) -> dict[str, Any]:
    chunk["meta_info"]["output_token_logprobs"][-1][0] = float("nan")
    return chunk


def too_few(chunk: dict[str, Any]) -> dict[str, Any]:
    return chunk | {"output_ids": chunk["output_ids"][:-1]}


def other_words(chunk: dict[str, Any]) -> dict[str, Any]:
    """Ids that are all equal and decode to no known word."""
    n = len(chunk["output_ids"])
    chunk["meta_info"]["output_token_logprobs"] = [[-0.25, 999, None]] * n
    return chunk | {"output_ids": [999] * n}


def too_many(chunk: dict[str, Any]) -> dict[str, Any]:
    entries = chunk["meta_info"]["output_token_logprobs"] * 100
    meta = chunk["meta_info"] | {"output_token_logprobs": entries, "completion_tokens": len(entries)}
    return {"text": "", "output_ids": chunk["output_ids"] * 100, "meta_info": meta}


FAULTS: dict[str, tuple[Fault, str]] = {
    "dies at once": (Fault(drop=True), "unreachable"),
    "dies after three tokens": (Fault(after=3, drop=True), "cut"),
    "dies in the middle of a line": (Fault(after=3, raw=b'data: {"text": "', drop=True), "cut"),
    "hangs": (Fault(hang=True), "timeout"),
    "hangs after three tokens": (Fault(after=3, hang=True), "stalled"),
    "answers 500": (Fault(status=500), "http_500"),
    "asks for a key": (Fault(status=401), "denied"),
    "is a web page": (Fault(raw=b"<html>hello</html>", content_type="text/html"), "bad_output"),
    "garbage at once": (Fault(raw=b"\x00\xff" * 100, content_type="text/event-stream"), "bad_output"),
    "garbage after three tokens": (Fault(after=3, raw=b"\x00\xff" * 100 + b"\n"), "bad_output"),
    "a line without end": (Fault(after=3, raw=b"data: " + b"x" * (1 << 20)), "bad_output"),
    "an error in the stream": (Fault(after=3, raw=b'data: {"error": {"message": "oops"}}\n\n'), "http_500"),
    "the stream ended early": (Fault(raw=b"data: [DONE]\n\n", content_type="text/event-stream"), "cut"),
    "nothing but brackets": (Fault(body={}), "bad_output"),
    "NaN": (Fault(after=3, spoil=nan), "bad_output"),
    "wrong lengths": (Fault(after=3, spoil=too_few), "bad_output"),
    "another vocabulary": (Fault(after=0, spoil=other_words), "bad_output"),
    "takes back what it said": (Fault(after=3, spoil=other_words), "bad_output"),
    "more than it was asked for": (Fault(after=3, spoil=too_many), "bad_output"),
}


@pytest.mark.parametrize("name", [*FAULTS, "drips", "a different tokenizer"])
@pytest.mark.fault(5, 6, 20, 21, 22)
async def test_a_bad_engine_is_struck_and_named_and_the_group_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(stream, "LONGEST_LINE", 1 << 18)
    caplog.set_level(logging.WARNING)
    fault, cause = FAULTS.get(name, (None, {"drips": "timeout"}.get(name, "")))
    environment = make_environment(tmp_path, max_new_tokens=40)
    own = environment.tokenizer.encode_trusted
    turns = own("i need to search a b c d e f g h <search> a b </search>"), own("so h g f e d c <answer> c </answer>")
    mark = own("</information>")[0]

    def say(body: dict[str, Any]) -> Sequence[int]:
        return unsaid(turns[body["input_ids"].count(mark)], body["input_ids"])

    table = Table()
    async with (
        FakeServer(say, version="1.6", pace_s=0.15 if name == "drips" else 0.0) as bad,
        FakeServer(say, version="1.6") as good,
        routing(
            table,
            interval=2,
            timeout_s=0.9 if cause == "timeout" else 60,  # only what is to run into it may
            stall_s=0.5,
            vocab_size=len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]),
            tokenizer="ours",
            stop_checker=StopChecker(environment.tokenizer.decode, environment.tokenizer.eos_ids),
        ) as router,
    ):
        if fault is not None:
            bad.faults["/generate"] = fault
        first = info("bad", bad, tokenizer="theirs" if name == "a different tokenizer" else "ours")
        table.publish(first, info("good", good, tokenizer="ours"))
        task = make_task(1, group_size=8)
        group = await run_group(environment, task, router, FakeSearch(), run="r", producer="p")
        asked = len([path for path in bad.calls if path == "/generate"])

    assert isinstance(group, TrajectoryGroup), group
    for trajectory in group.trajectories:
        assert trajectory.status is Status.ANSWERED
        policy = [s for s in trajectory.segments if s.owner == "policy"]
        assert [s.ids.tolist() for s in policy] == list(turns), "token by token what was to be said"
        assert all(s.logprobs.tolist() == [-0.25] * len(s.ids) for s in policy)
    said = [record.getMessage() for record in caplog.records]
    if name == "a different tokenizer":
        assert asked == 0 and router.unroutable_reason(first) == "a different tokenizer"
        assert any("engine bad: a different tokenizer" in line for line in said)
    else:
        assert asked > 0 and router.health.total > 0 and router.counts[f"engine_{cause}"] > 0, router.counts
        assert any(f"engine bad: {cause}" in line for line in said), said
        assert router.health.last_error(incarnation_key(first)).startswith(f"{cause} at bad")
        assert not any("engine good" in line for line in said)


@pytest.mark.fault(21)
async def test_earlier_tokens_of_a_malformed_answer_are_dropped_too() -> None:
    table = Table()
    async with (
        FakeServer(twenty, version="1.5") as a,
        FakeServer(twenty, version="1.6") as b,
        routing(table, interval=1) as router,
    ):
        table.publish(info("a", a), info("b", b))
        a.faults["/generate"] = Fault(after=6, spoil=nan)
        done = await router(ask([1]))
    assert done.ids == next_ids([1], 20) and spans_of(done) == [("1.6", 0, 20)]
    assert router.counts["tokens_continued"] == 0 and router.counts["tokens_discarded"] > 0
