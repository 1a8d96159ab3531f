"""Compatibility of a process with the run: the learner's meta, compared at the start and at every change."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

import rollout_server.server
from protocol.codec import SCHEMA_MAJOR, SCHEMA_MINOR, decode_as
from protocol.errors import UserError
from protocol.keys import TASK_GROUP
from protocol.messages import Task, TrajectoryGroup
from protocol.run_meta import (
    LINEAGE_FIELD,
    LINEAGE_FILE,
    SEQUENCES,
    RunMeta,
    incompatibility,
    parse_run_meta,
    tokenizer_digest,
)
from protocol.runtime.lifecycle import ShutdownSignal
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.dispatch.fleet import RunCompatibility
from rollout_server.node.config import AttachedEngine, NodeSettings
from rollout_server.node.server import serve as serve_node
from tests.support import rollout_process
from tests.support.fake_engine import FakeServer
from tests.support.messages import make_task
from tests.support.waiting import eventually

GOLDEN = Path(__file__).parent.parent / "golden"
V5 = PolicyVersion(1, 5)
OTHER = "0" * 64
MINE = (SCHEMA_MAJOR, SCHEMA_MINOR)


def digest(model: Path) -> str:
    return tokenizer_digest((model / "tokenizer.json").read_bytes())


def test_what_is_written_is_what_is_read() -> None:
    meta = RunMeta((1, 9), "abc", {"group_size": "8", "max_lag": "2"}, "0f" * 16)
    raw = {name.encode(): value.encode() for name, value in meta.fields().items()}
    assert parse_run_meta(raw) == meta and parse_run_meta(raw | {b"colour": b"red"}).facts["colour"] == "red"
    assert parse_run_meta({}) is None, "an older learner, or none yet"
    for spoilt in (b"", b"1", b"one.two", b"1.-1", b"1.2.3", b"9" * 30 + b".1", b"1." + b"9" * 19, b"\xff"):
        assert parse_run_meta({b"schema": spoilt}) is None
    assert parse_run_meta({b"schema": b"1." + b"9" * 18}) == RunMeta((1, 10**18 - 1))


def test_the_name_of_a_tokenizer_is_of_what_it_says_and_not_of_how_it_is_written(tmp_path: Path) -> None:
    spec = {"model": {"vocab": {"a": 0, "ü": 1}}, "version": "1.0"}
    shuffled = json.dumps(dict(reversed(spec.items())), indent=3, ensure_ascii=False).encode()
    assert tokenizer_digest(json.dumps(spec).encode()) == tokenizer_digest(shuffled)
    spec["model"]["vocab"]["b"] = 2
    assert tokenizer_digest(json.dumps(spec).encode()) != tokenizer_digest(shuffled)
    assert tokenizer_digest(b"{") == "" and tokenizer_digest(b"[" * 100_000) == ""


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            RunMeta((SCHEMA_MAJOR + 1, 0)),
            f"schema {SCHEMA_MAJOR + 1}.0, this process reads {SCHEMA_MAJOR}.{SCHEMA_MINOR}",
        ),
        (RunMeta((0, 9)), "upgrade the learner"),
        (RunMeta(MINE, OTHER), f"another tokenizer: {OTHER[:16]}, not {'f' * 16}"),
        (RunMeta((SCHEMA_MAJOR, SCHEMA_MINOR + 5), "f" * 64), ""),
        (RunMeta(MINE, ""), ""),
    ],
)
def test_another_major_and_another_tokenizer_are_refused_and_another_minor_is_not(theirs: RunMeta, words: str) -> None:
    error = incompatibility(theirs, run="r", tokenizer="f" * 64)
    assert (words in error.render() and error.todo) if error is not None else not words


@pytest.mark.fault(22, 31)
@pytest.mark.parametrize("late", [False, True], ids=["at the start", "while it runs"])
async def test_a_rollout_server_with_another_tokenizer_refuses_to_work(world, model: Path, tokens, late: bool) -> None:
    world.target(V5)
    wrong = RunMeta(MINE, OTHER).fields()
    world.sync.hset(world.keys.meta, mapping=RunMeta(MINE, digest(model)).fields() if late else wrong)
    async with rollout_process.talker(tokens) as engine:
        world.register("e", engine.url, V5)
        life = asyncio.create_task(rollout_process.life(world, model, ShutdownSignal()))
        if late:
            world.issue(make_task(1, group_size=2))
            await eventually(world.published, "it fits, and works")
            world.sync.hset(world.keys.meta, mapping=wrong)
        with pytest.raises(UserError, match=f"another tokenizer: {OTHER[:16]}, not {digest(model)[:16]}"):
            await asyncio.wait_for(life, 20)


@pytest.mark.fault(22, 31)
@pytest.mark.parametrize(
    ("meta", "words"),
    [(RunMeta(MINE, OTHER), "another tokenizer"), (RunMeta((SCHEMA_MAJOR + 1, 0)), "schema 2.0")],
    ids=["tokenizer", "major"],
)
async def test_a_node_that_does_not_fit_refuses_to_work(world, model: Path, meta: RunMeta, words: str) -> None:
    world.sync.hset(world.keys.meta, mapping=meta.fields())
    run = RunSettings(id=world.keys.run, dir=model.parent / "run", redis_url=world.url, model=model)
    async with FakeServer() as engine:
        settings = NodeSettings(id="e", kind=AttachedEngine(url=engine.url), poll_s=0.02)
        with pytest.raises(UserError, match=words):
            await asyncio.wait_for(serve_node(run, settings), 20)
    assert world.registered("e") is None, "it takes itself off the list"


@pytest.mark.fault(52)
async def test_a_newer_learner_of_the_same_major_is_accepted_and_logged_once(
    world, model: Path, tokens, caplog: pytest.LogCaptureFixture
) -> None:
    world.target(V5)
    newer = RunMeta((SCHEMA_MAJOR, SCHEMA_MINOR + 1), digest(model), {"max_lag": "5", "new_setting": "1"})
    world.sync.hset(world.keys.meta, mapping=newer.fields())
    with caplog.at_level(logging.WARNING, "rollout_server.dispatch.fleet"):
        async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model):
            world.register("e", engine.url, V5)
            world.issue(make_task(1, group_size=2), make_task(2, group_size=2))
            await eventually(lambda: len(world.published()) == 2, "it works")
            await asyncio.sleep(0.3)  # it has read meta several more times
    told = [record.getMessage() for record in caplog.records if record.name == "rollout_server.dispatch.fleet"]
    assert len(told) == 2, told
    assert f"schema {SCHEMA_MAJOR}.{SCHEMA_MINOR + 1}" in told[0]
    assert "run.max_lag is 2 in this process and 5 in the learner" in told[1]


@pytest.mark.fault(52)
async def test_an_upgraded_rollout_server_works_for_a_learner_that_is_not(world, model: Path, tokens) -> None:
    """No meta, functions that know nothing of tokens, a task in the bytes of schema 1.0."""
    world.target(V5)
    world.sync.function_load((GOLDEN / "functions-before-tokens.lua").read_text(), replace=True)
    try:
        raw = (GOLDEN / "v1.0-task.msgpack").read_bytes()
        assert b"\x92\x01\x00" in raw, "its envelope says [1, 0]"
        task = decode_as(Task, raw)
        world.sync.xadd(world.keys.tasks, {"seq": task.seq, "b": raw})
        async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model):
            world.register("e", engine.url, V5)
            await eventually(world.published, "it is rolled out and published")
        (group,) = world.published()
        assert isinstance(group, TrajectoryGroup) and (group.seq, group.question) == (task.seq, task.question)
        ((_, fields),) = world.sync.xrange(world.keys.traj)
        assert set(fields) == {b"seq", b"h", b"b"} and not world.sync.exists(world.keys.tokens)
        assert world.sync.xpending(world.keys.tasks, TASK_GROUP)["pending"] == 0
    finally:
        world.create_functions()


@pytest.mark.parametrize("late", [False, True], ids=["at the start", "after a takeover"])
def test_a_learner_that_would_train_several_sequences_as_one_is_refused(tmp_path: Path, late: bool) -> None:
    def meta(*schema: int) -> dict[bytes, bytes]:
        return {name.encode(): value.encode() for name, value in RunMeta((schema[0], schema[1])).fields().items()}

    run = RunSettings(id="r", dir=tmp_path, redis_url="redis://h:1/0", model=tmp_path)
    compatibility = RunCompatibility(run, needs=SEQUENCES)
    compatibility.check({})
    assert not compatibility.is_met, "no learner yet, or one of before there was meta: nothing is leased"
    if late:
        compatibility.check(meta(*SEQUENCES))
        compatibility.check(meta(SCHEMA_MAJOR, SCHEMA_MINOR + 1))
        assert compatibility.is_met
    with pytest.raises(UserError, match=r"reads schema 1\.6, this process needs 1\.7") as refused:
        compatibility.check(meta(1, 6))
    assert "upgrade the learner" in refused.value.todo
    without = RunCompatibility(run)
    assert without.is_met
    without.check(meta(1, 6))


async def test_a_server_whose_groups_may_have_sequences_leases_nothing_before_it_knows_the_learner(
    world, model: Path, tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bool] = []

    class NeedsSequences(RunCompatibility):
        def __init__(self, run: RunSettings, **facts: object) -> None:
            super().__init__(run, **(facts | {"needs": SEQUENCES}))

        def check(self, raw) -> None:
            super().check(raw)
            checked.append(self.is_met)

    monkeypatch.setattr(rollout_server.server, "RunCompatibility", NeedsSequences)
    world.target(V5)
    world.issue(make_task(1, group_size=2))
    async with rollout_process.talker(tokens) as engine, rollout_process.server(world, model):
        world.register("e", engine.url, V5)
        await eventually(lambda: len(checked) > 4, "it reads Redis")
        assert not any(checked) and world.sync.xpending(world.keys.tasks, TASK_GROUP)["pending"] == 0
        world.sync.hset(world.keys.meta, mapping=RunMeta(SEQUENCES, digest(model)).fields())
        await eventually(world.published, "it is rolled out and published")


ONE, TWO = "1" * 32, "2" * 32


def test_a_process_belongs_to_the_lineage_of_its_directory_or_to_the_first_that_it_sees(tmp_path: Path) -> None:
    def meta(lineage_id: str) -> dict[bytes, bytes]:
        fields = RunMeta(MINE, "", {"host": "far", "dir": "/runs/theirs"}, lineage_id).fields()
        return {name.encode(): value.encode() for name, value in fields.items()}

    run = RunSettings(id="r", dir=tmp_path, redis_url="redis://:sesame@h:1/0", model=tmp_path)
    elsewhere = RunCompatibility(run)
    for raw in ({}, meta(""), meta(ONE), meta(""), meta(ONE)):
        elsewhere.check(raw)
    with pytest.raises(UserError, match=r"named 'r' \(lineage 22222222, host far, run.dir /runs/theirs\)") as refused:
        elsewhere.check(meta(TWO))
    assert "lineage 11111111" in refused.value.why and "sesame" not in refused.value.render()
    assert "restart this process" in refused.value.todo
    at_home = RunCompatibility(run)
    at_home.check(meta(ONE))
    (tmp_path / LINEAGE_FILE).write_text(TWO + "\n")
    at_home.check(meta(TWO))
    with pytest.raises(UserError, match="lineage 11111111"):
        at_home.check(meta(ONE))
    with pytest.raises(UserError, match="lineage 11111111"):
        RunCompatibility(run).check({LINEAGE_FIELD.encode(): ONE.encode()})


@pytest.mark.parametrize("late", [False, True], ids=["at the start", "after a takeover"])
async def test_a_rollout_server_of_another_lineage_leases_nothing_and_ends(
    world, model: Path, tokens, late: bool
) -> None:
    world.target(V5)
    (model.parent / LINEAGE_FILE).write_text(ONE + "\n")
    mine, other = (RunMeta(MINE, digest(model), {}, lineage_id).fields() for lineage_id in (ONE, TWO))
    world.sync.hset(world.keys.meta, mapping=mine if late else other)
    if not late:
        world.issue(make_task(1, group_size=2))
    async with rollout_process.talker(tokens) as engine:
        world.register("e", engine.url, V5)
        life = asyncio.create_task(rollout_process.life(world, model, ShutdownSignal()))
        if late:
            world.issue(make_task(1, group_size=2))
            await eventually(world.published, "it fits, and works")
            world.sync.hset(world.keys.meta, mapping=other)
        with pytest.raises(UserError, match=r"another run named .* .lineage 22222222"):
            await asyncio.wait_for(life, 20)
    if not late:
        assert world.sync.xpending(world.keys.tasks, TASK_GROUP)["pending"] == 0 and not world.published()


async def test_a_node_of_another_lineage_ends_and_its_engine_is_off_the_list(world, model: Path) -> None:
    run = RunSettings(id=world.keys.run, dir=model.parent / "run", redis_url=world.url, model=model)
    run.dir.mkdir()
    (run.dir / LINEAGE_FILE).write_text(ONE + "\n")
    world.sync.hset(world.keys.meta, mapping=RunMeta(MINE, digest(model), {}, TWO).fields())
    async with FakeServer() as engine:
        settings = NodeSettings(id="e", kind=AttachedEngine(url=engine.url), poll_s=0.02)
        with pytest.raises(UserError, match=r"another run named .* .lineage 22222222"):
            await asyncio.wait_for(serve_node(run, settings), 20)
    assert world.registered("e") is None
