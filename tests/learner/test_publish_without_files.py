"""Engines on a host without the learner's run directory: every version reaches them by broadcast, whatever fails.

`b` and `c` are such engines: the run directory is hidden from them by a mount namespace. As
`test_publish_distributed.py` each test runs with gloo, and with a group that behaves as NCCL does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from learner.weights import membership
from learner.weights.base import WeightPublisher
from protocol.messages import NEEDS_BROADCAST, EngineInfo, NodeState, ViewAnswer
from protocol.versions import PolicyVersion
from tests.learner.test_publish_distributed import on_the_wire
from tests.support.fleet import Fleet, Weights, step, two_engines
from tests.support.hosts import require_mounts
from tests.support.lazy_group import lazy_groups
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(params=["gloo", "lazy"])
def fleet(engines: Fleet, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """`engines`, without a target: `a` reads files, `b` does not."""
    engines.start_missing("a")
    if "b" not in engines.nodes or engines.nodes["b"].poll() is not None:
        engines.start("b", blind=True)
    # a machine that is busy must not exclude an engine for a minute
    monkeypatch.setattr(membership, "EXCLUDE_SLOW_MEMBER_S", 1.0)
    with lazy_groups(monkeypatch) if request.param == "lazy" else contextlib.nullcontext():
        yield engines
        engines.forget()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, redis_socket: str) -> Iterator[Fleet]:
    with two_engines(tmp_path_factory.mktemp("fleet"), redis_socket) as made:
        made.run.dir.mkdir(exist_ok=True)
        require_mounts(made.run.dir)
        yield made


def waits(fleet: Fleet, name: str, state: NodeState | None = None) -> EngineInfo:
    """The engine, once it says that it waits for a broadcast."""

    def true() -> bool:
        info = fleet.info(name)
        return info is not None and info.needs_broadcast and state in (None, info.state)

    wait_until(true, f"{name} waits for a broadcast", said=fleet.logs)
    info = fleet.info(name)
    assert info is not None
    return info


def send_again(publisher: WeightPublisher, fleet: Fleet, weights: Weights) -> None:
    """What the learner does while it waits for data, until it has sent the announced version again."""
    before = publisher.facts()["publish_again"]

    def sent() -> bool:
        publisher.send_again(weights.items())
        return publisher.facts()["publish_again"] > before

    wait_until(sent, "the version is sent again", said=fleet.logs)


def both_hold(fleet: Fleet, version: PolicyVersion, weights: Weights) -> None:
    fleet.ready("a", "b", at=version)
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(weights)


def start(fleet: Fleet, **settings: Any) -> tuple[WeightPublisher, list[PolicyVersion]]:
    """The next learner, its first version at both engines."""
    _, publisher, epoch = fleet.learner(**settings)
    v = [PolicyVersion(epoch, n) for n in range(6)]
    step(publisher, v[0], fleet.weights)
    waits(fleet, "b")
    send_again(publisher, fleet, fleet.weights)
    both_hold(fleet, v[0], fleet.weights)
    return publisher, v


def test_an_engine_without_the_files_gets_every_version(fleet: Fleet) -> None:
    _, publisher, epoch = fleet.learner()
    v = [PolicyVersion(epoch, n) for n in range(3)]
    publisher.send_again(fails_if_read())
    first = step(publisher, v[0], fleet.weights)
    assert first.path and first.broadcast, "the first version of an epoch is written"
    fleet.ready("a", at=v[0])
    info = waits(fleet, "b")
    assert info.detail == f"{NEEDS_BROADCAST} {first.path} is not on this host, or cannot be read"
    assert info.state in (NodeState.SYNCING, NodeState.READY) and info.version < v[0], "it serves no new version"
    send_again(publisher, fleet, fleet.weights)
    both_hold(fleet, v[0], fleet.weights)
    assert [m.partition("/")[0] for m in fleet.view().members] == ["b"], "a went on generating"
    publisher.send_again(fails_if_read())
    for number in (1, 2):
        assert step(publisher, v[number], fleet.shifted(number / 8)).transport == "distributed"
        both_hold(fleet, v[number], fleet.shifted(number / 8))
        assert len(fleet.view().members) == 2
    facts = publisher.facts()
    assert (facts["publish_again"], facts["publish_fallbacks"], facts["publish_snapshots"]) == (1, 0, 0)


def test_an_engine_that_joins_is_in_the_next_view_at_whatever_version_it_is(fleet: Fleet) -> None:
    publisher, v = start(fleet)
    step(publisher, v[1], fleet.shifted(0.5))
    both_hold(fleet, v[1], fleet.shifted(0.5))
    fleet.start("c", blind=True)
    try:
        info = waits(fleet, "c", NodeState.SYNCING)
        assert info.version == PolicyVersion(0, 0)
        assert step(publisher, v[2], fleet.shifted(0.25)).transport == "distributed"
        fleet.ready("a", "b", "c", at=v[2])
        assert fleet.checksums("c") == fleet.expected(fleet.shifted(0.25))
        assert publisher.facts()["publish_again"] == 1, "only the first version"
        assert fleet.view().committed == tuple(range(1, fleet.view().number)), "also the one that was sent again"
    finally:
        leave(fleet, "c")


def fails_if_read() -> Iterator[tuple[str, torch.Tensor]]:
    raise AssertionError("nobody waits: the weights must not be gathered")
    yield


def leave(fleet: Fleet, name: str) -> None:
    node = fleet.nodes.pop(name)
    node.terminate()
    assert node.wait(20) == 0


def test_a_failed_transfer_costs_it_one_version_and_nothing_else(fleet: Fleet) -> None:
    publisher, v = start(fleet)
    before = fleet.info("b")
    update = publisher.publish(v[1], on_the_wire(fleet.shifted(0.5), fleet.nodes["a"].kill))
    publisher.announce(update, "ready")
    assert (update.transport, publisher.facts()["publish_fallbacks"]) == ("disk", 1)
    info = waits(fleet, "b")
    held = {NodeState.READY: v[0], NodeState.QUARANTINED: PolicyVersion(0, 0)}  # whether it had received all of it
    assert held[info.state] == info.version
    fleet.nodes["a"].wait()
    wait_until(lambda: fleet.info("a") is None, "the lease of a ends", said=fleet.logs)
    # no data may come from b alone: the version is sent again, without a next step
    send_again(publisher, fleet, fleet.shifted(0.5))
    fleet.ready("b", at=v[1])
    assert fleet.checksums("b") == fleet.expected(fleet.shifted(0.5))
    assert step(publisher, v[2], fleet.shifted(0.25)).transport == "distributed"
    fleet.ready("b", at=v[2])
    after = fleet.info("b")
    assert before is not None and after is not None and after.incarnation == before.incarnation, "it was not restarted"


def test_one_that_holds_a_mix_is_mended_in_place_by_the_next_broadcast(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, v = start(fleet)
    before = fleet.info("b")
    with monkeypatch.context() as patch:
        store = fleet.stores[-1]
        told, tells = store.answers, store.next_answers

        def next_answers(*what: Any) -> Any:
            found, last = tells(*what)
            return with_a_wrong_sum(found), last

        patch.setattr(store, "answers", lambda epoch, number: with_a_wrong_sum(told(epoch, number)))
        patch.setattr(store, "next_answers", next_answers)
        assert step(publisher, v[1], fleet.shifted(0.5)).transport == "disk"
    fleet.ready("a", at=v[1])
    info = waits(fleet, "b", NodeState.QUARANTINED)
    assert info.version == PolicyVersion(0, 0)
    assert step(publisher, v[2], fleet.shifted(0.25)).transport == "distributed", "b is in the view as it is"
    both_hold(fleet, v[2], fleet.shifted(0.25))
    after = fleet.info("b")
    assert before is not None and after is not None and after.incarnation == before.incarnation, "it was not restarted"


def with_a_wrong_sum(answers: dict[str, ViewAnswer]) -> dict[str, ViewAnswer]:
    wrong = {m: a.model_copy(update={"checksum": "0" * 64}) for m, a in answers.items() if m[0] == "b" and a.checksum}
    return answers | wrong


def test_after_a_joiner_crash_in_its_first_transfer_the_others_load_one_version_from_files(fleet: Fleet) -> None:
    publisher, v = start(fleet)
    fleet.start("c", blind=True)
    waits(fleet, "c", NodeState.SYNCING)
    joiner = fleet.nodes.pop("c")
    update = publisher.publish(v[1], on_the_wire(fleet.shifted(0.5), joiner.kill))
    publisher.announce(update, "ready")
    assert (update.transport, publisher.facts()["publish_fallbacks"]) == ("disk", 1)
    assert "c" in {member.partition("/")[0] for member in fleet.view().members}
    fleet.ready("a", at=v[1])
    waits(fleet, "b")
    assert joiner.wait(20) != 0
    wait_until(lambda: fleet.info("c") is None, "the lease of c ends", said=fleet.logs)
    assert step(publisher, v[2], fleet.shifted(0.25)).transport == "distributed", "the next one is tried at once"
    both_hold(fleet, v[2], fleet.shifted(0.25))


@pytest.mark.parametrize("stopped", ["node", "engine"])
def test_a_joiner_that_hangs_is_left_out_until_it_is_back(fleet: Fleet, stopped: str) -> None:
    publisher, v = start(fleet, prepare_s=4.0, stall_s=3.0)
    fleet.start("c", blind=True)
    try:
        waits(fleet, "c", NodeState.SYNCING)
        pid = fleet.nodes["c"].pid if stopped == "node" else fleet.engine_pid("c")
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert step(publisher, v[1], fleet.shifted(0.5)).transport == "disk"
            assert time.monotonic() - began < 15, "training goes on"
            fleet.ready("a", at=v[1])
            waits(fleet, "b")
        finally:
            os.kill(pid, signal.SIGCONT)
        send_again(publisher, fleet, fleet.shifted(0.5))
        both_hold(fleet, v[1], fleet.shifted(0.5))
        arrives(fleet, publisher, "c", v[1], fleet.shifted(0.5))
    finally:
        leave(fleet, "c")


def arrives(fleet: Fleet, publisher: WeightPublisher, name: str, version: PolicyVersion, weights: Weights) -> None:
    """What the learner does while it waits, until the engine holds the version."""

    def true() -> bool:
        publisher.send_again(weights.items())
        info = fleet.info(name)
        return info is not None and (info.state, info.version) == (NodeState.READY, version)

    wait_until(true, f"{name} READY at {version.label}", said=fleet.logs)
    assert fleet.checksums(name) == fleet.expected(weights)


def test_a_learner_that_resumes_with_only_such_engines_goes_on(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    start(fleet)
    leave(fleet, "a")
    fleet.forget()
    _, publisher, epoch = fleet.learner(prepare_s=1.5)
    first = step(publisher, PolicyVersion(epoch, 3), fleet.shifted(0.5))
    info = waits(fleet, "b")
    assert first.transport == "disk" and info.epoch == epoch - 1, "no engine generates for this learner"
    # the first attempt fails, too: its node hangs
    fleet.nodes["b"].send_signal(signal.SIGSTOP)
    try:
        publisher.send_again(fleet.shifted(0.5).items())
    finally:
        fleet.nodes["b"].send_signal(signal.SIGCONT)
    assert publisher.facts()["publish_again"] == 0
    publisher.send_again(fails_if_read())  # at once: it waits before the next attempt
    arrives(fleet, publisher, "b", first.version, fleet.shifted(0.5))
    assert step(publisher, PolicyVersion(epoch, 4), fleet.shifted(0.25)).transport == "distributed"
    fleet.ready("b", at=PolicyVersion(epoch, 4))


def test_an_evaluation_holds_it_back(fleet: Fleet) -> None:
    publisher, v = start(fleet)
    keys = fleet.stores[-1].keys
    fleet.db.set(keys.evaluation, "x")
    try:
        assert step(publisher, v[1], fleet.shifted(0.5)).transport == "disk"
        publisher.send_again(fails_if_read())
        fleet.ready("a", "b", at=v[0])
    finally:
        fleet.db.delete(keys.evaluation)
    info = waits(fleet, "b")
    assert (info.state, info.version) == (NodeState.READY, v[0]), "it serves what it has, as max_engine_lag permits"
    send_again(publisher, fleet, fleet.shifted(0.5))
    both_hold(fleet, v[1], fleet.shifted(0.5))


def test_files_that_appear_are_loaded(fleet: Fleet) -> None:
    publisher, v = start(fleet)
    hidden_away = fleet.folder / "elsewhere"
    fleet.db.set(fleet.stores[-1].keys.evaluation, "x")
    update = publisher.publish(v[1], fleet.shifted(0.5).items())
    fleet.db.delete(fleet.stores[-1].keys.evaluation)
    path = fleet.run.weights_dir / f"v{v[1].label}"
    hidden_away.mkdir(exist_ok=True)
    path.rename(hidden_away / path.name)
    publisher.announce(update, "ready")
    waits(fleet, "a")
    (hidden_away / path.name).rename(path)
    fleet.ready("a", at=v[1])
    assert fleet.checksums("a") == fleet.expected(fleet.shifted(0.5))
