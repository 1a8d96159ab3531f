"""Weights by broadcast: a real Redis, real gloo, real nodes with CPU engines in separate processes.

Every test runs twice: with gloo, and with a group that behaves as NCCL does (`tests.support.lazy_group`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config.learner import AdapterPublishSettings, DistributedPublishSettings
from learner.delivery.store import RunStore
from learner.weights import buckets, build_publisher
from learner.weights.base import BadWeights
from learner.weights.process_group import GroupSender
from protocol.errors import Fenced
from protocol.messages import EngineInfo, ViewAnswer
from protocol.versions import PolicyVersion
from protocol.weights import WeightBucket
from tests.support.fleet import Fleet, Weights, make_model, step, two_engines
from tests.support.lazy_group import lazy_groups
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(params=["gloo", "lazy"])
def fleet(engines: Fleet, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """`engines`, whatever the test before did to them."""
    engines.start_missing("a", "b")
    with lazy_groups(monkeypatch) if request.param == "lazy" else contextlib.nullcontext():
        yield engines
        engines.forget()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, redis_socket: str) -> Iterator[Fleet]:
    """Two engines, `a` and `b`, for all tests of this file."""
    with two_engines(tmp_path_factory.mktemp("fleet"), redis_socket) as made:
        yield made


@pytest.mark.parametrize("flattened", [True, False])
def test_two_engines_hold_what_was_sent_bit_for_bit(fleet: Fleet, flattened: bool) -> None:
    _, publisher, epoch = fleet.learner(flattened=flattened)
    first = step(publisher, PolicyVersion(epoch, 0), fleet.weights)
    assert first.transport == "disk" and first.path, "the first version of an epoch goes by files"
    fleet.ready("a", "b", at=first.version)
    groups = set()
    for number in (1, 2):
        update = step(publisher, PolicyVersion(epoch, number), fleet.shifted(number / 8))
        assert (update.transport, update.path) == ("distributed", "")
        fleet.ready("a", "b", at=update.version)
        groups.add(fleet.view().group)
        assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.shifted(number / 8))
    assert len(groups) == 1, "the group is kept while its members are the same"
    assert (fleet.view().number, fleet.view().committed) == (2, (1,))
    facts = publisher.facts()
    assert (facts["publish_distributed"], facts["publish_fallbacks"], facts["publish_members"]) == (2, 0, 2)
    assert facts["publish_bytes"] == sum(t.numel() * 4 for t in fleet.weights.values())
    assert not list(fleet.run.weights_dir.glob(f"v{epoch}.1")), "nothing was written"
    publisher.announce(update, "done")
    last = fleet.target()
    assert (last.version, last.transport) == (update.version, "distributed")
    assert Path(last.path, "model.safetensors").is_file(), "at the end of a run its weights are on the disk"
    assert fleet.checksums("a") == fleet.expected(fleet.shifted(2 / 8))


def on_the_wire(weights: Weights, then: Callable[[], object]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights; `then` is called before the last one, when the first buckets are on their way."""
    named = list(weights.items())
    yield from named[:-1]
    time.sleep(0.3)
    then()
    yield named[-1]


@pytest.mark.fault(16, 18)
def test_after_a_member_crash_during_a_transfer_one_version_is_loaded_from_files(fleet: Fleet) -> None:
    _, publisher, epoch = fleet.learner()
    v = [PolicyVersion(epoch, n) for n in range(7)]
    step(publisher, v[0], fleet.weights)
    fleet.ready("a", "b", at=v[0])
    began = time.monotonic()
    update = publisher.publish(v[1], on_the_wire(fleet.shifted(0.5), fleet.nodes["b"].kill))
    assert time.monotonic() - began < 5, "no deadline had to pass"
    publisher.announce(update, "ready")
    assert (update.transport, publisher.facts()["publish_fallbacks"]) == ("disk", 1)
    fleet.ready("a", at=v[1])
    assert fleet.checksums("a") == fleet.expected(fleet.shifted(0.5))
    fleet.nodes["b"].wait()
    wait_until(lambda: fleet.info("b") is None, "the lease of b ends", said=fleet.logs)
    old = fleet.view().group
    assert step(publisher, v[2], fleet.shifted(0.25)).transport == "distributed", "the next view is tried at once"
    fleet.ready("a", at=v[2])
    assert fleet.view().group != old
    # a joiner: the target has no files until it is seen
    fleet.start("b")
    fleet.ready("a", "b", at=v[2])
    assert fleet.target().path and publisher.facts()["publish_snapshots"] == 1
    assert fleet.checksums("b") == fleet.expected(fleet.shifted(0.25))
    assert step(publisher, v[3], fleet.shifted(0.75)).transport == "distributed"
    fleet.ready("a", "b", at=v[3])
    assert len(fleet.view().members) == 2, "the joiner is in the next view"
    assert (fleet.view().number, fleet.view().committed) == (3, (2,)), "the first one failed"
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.shifted(0.75))


@pytest.mark.fault(16, 19)
@pytest.mark.parametrize("stopped", ["node", "engine"])
def test_a_member_that_hangs_is_left_out_and_gets_files(fleet: Fleet, stopped: str) -> None:
    _, publisher, epoch = fleet.learner(prepare_s=1.0 if stopped == "node" else 4.0)
    v = [PolicyVersion(epoch, n) for n in range(4)]
    step(publisher, v[0], fleet.weights)
    fleet.ready("a", "b", at=v[0])
    pid = fleet.nodes["b"].pid if stopped == "node" else fleet.engine_pid("b")
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        update = step(publisher, v[1], fleet.shifted(0.5))
        assert (update.transport, time.monotonic() - began < 4) == ("disk", True)
        fleet.ready("a", at=v[1])
        assert step(publisher, v[2], fleet.shifted(0.25)).transport == "distributed"
        assert [m.partition("/")[0] for m in fleet.view().members] == ["a"]
    finally:
        os.kill(pid, signal.SIGCONT)
    fleet.ready("a", "b", at=v[2])
    assert fleet.target().path, "files were written for b"
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.shifted(0.25))


@pytest.mark.fault(16, 19)
def test_an_engine_that_hangs_in_the_transfer_is_found_by_the_others_being_done(fleet: Fleet) -> None:
    _, publisher, epoch = fleet.learner(stall_s=1.5)
    v = [PolicyVersion(epoch, n) for n in range(3)]
    step(publisher, v[0], fleet.weights)
    fleet.ready("a", "b", at=v[0])
    pid = fleet.engine_pid("b")
    try:
        began = time.monotonic()
        frozen = on_the_wire(fleet.shifted(0.5), lambda: os.kill(pid, signal.SIGSTOP))
        update = publisher.publish(v[1], frozen)
        publisher.announce(update, "ready")
        assert (update.transport, time.monotonic() - began < 6) == ("disk", True)
        fleet.ready("a", at=v[1])
        update = step(publisher, v[2], fleet.shifted(0.25))
        fleet.ready("a", at=v[2])
    finally:
        os.kill(pid, signal.SIGCONT)
    fleet.ready("a", "b", at=v[2])
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.shifted(0.25))


class Liar:
    """A link on which one member's checksum is another one."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
        return self._heard(self._store.answers(epoch, number))

    def next_answers(self, epoch: int, number: int, after: str, wait_s: float) -> tuple[dict[str, ViewAnswer], str]:
        found, last = self._store.next_answers(epoch, number, after, wait_s)
        return self._heard(found), last

    def _heard(self, found: dict[str, ViewAnswer]) -> dict[str, ViewAnswer]:
        wrong = {m: a.model_copy(update={"checksum": "0" * 64}) for m, a in found.items() if m[0] == "b" and a.checksum}
        return found | wrong


def test_members_that_hold_different_weights_are_quarantined_and_load_files_in_place(fleet: Fleet) -> None:
    store, publisher, epoch = fleet.learner()
    publisher.close()
    settings = DistributedPublishSettings(fsync=False, bucket_mb=1, max_norm_jump=0)
    publisher = build_publisher(settings, fleet.run, sorted(fleet.run.model.glob("*.json")), Liar(store))
    fleet.publishers.append(publisher)
    v = [PolicyVersion(epoch, n) for n in range(2)]
    step(publisher, v[0], fleet.weights)
    fleet.ready("a", "b", at=v[0])
    before = {name: fleet.info(name).incarnation for name in "ab"}
    update = publisher.publish(v[1], fleet.shifted(0.5).items())
    assert update.transport == "disk"
    # until the new version is announced there are files of the old one
    fleet.ready("a", "b", at=v[0])
    assert all("quarantined at 0.0: " + v[1].label in fleet.log(name) for name in "ab"), "weights of no version"
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.weights)
    publisher.announce(update, "ready")
    fleet.ready("a", "b", at=v[1])
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.shifted(0.5))
    assert before == {name: fleet.info(name).incarnation for name in "ab"}, "neither engine was restarted"


class Only:
    """A link on which there is one engine. blind: it does not say what it holds tensor by tensor, as SGLang."""

    def __init__(self, store: RunStore, engine: str, *, blind: bool) -> None:
        self._store, self._engine, self._blind = store, engine, blind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def engines(self) -> list[EngineInfo]:
        found = [e for e in self._store.engines() if e.id == self._engine]
        return [e.model_copy(update={"dtype": ""}) for e in found] if self._blind else found

    def answers(self, epoch: int, number: int) -> dict[str, ViewAnswer]:
        return self._heard(self._store.answers(epoch, number))

    def next_answers(self, epoch: int, number: int, after: str, wait_s: float) -> tuple[dict[str, ViewAnswer], str]:
        found, last = self._store.next_answers(epoch, number, after, wait_s)
        return self._heard(found), last

    def _heard(self, found: dict[str, ViewAnswer]) -> dict[str, ViewAnswer]:
        return {m: a.model_copy(update={"tensors_sha256": ""}) for m, a in found.items()} if self._blind else found


@pytest.mark.parametrize("wrong", ["packed", "packed for one that cannot say", "sent"])
def test_one_engine_that_does_not_hold_what_the_policy_has_gets_files(
    fleet: Fleet, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no other engine to be compared with: the learner's own tensors say what it must hold."""
    store, publisher, epoch = fleet.learner()
    publisher.close()
    settings = DistributedPublishSettings(fsync=False, bucket_mb=1, max_norm_jump=0)
    link = Only(store, "a", blind="cannot say" in wrong)
    publisher = build_publisher(settings, fleet.run, sorted(fleet.run.model.glob("*.json")), link)
    fleet.publishers.append(publisher)
    v = [PolicyVersion(epoch, n) for n in range(3)]
    step(publisher, v[0], fleet.weights)
    fleet.ready("a", at=v[0])

    def swapped(bucket: WeightBucket) -> list[int]:
        starts = real_starts(bucket)
        first, second = (bucket.names.index(f"model.layers.0.self_attn.{n}_proj.weight") for n in "qo")
        starts[first], starts[second] = starts[second], starts[first]
        return starts

    def flipped(self: GroupSender, tensors: Sequence[torch.Tensor]) -> Future[None]:
        harmed = [tensor.clone() for tensor in tensors]
        harmed[0].view(torch.uint8).reshape(-1)[5] ^= 1
        return real_send(self, harmed)

    real_starts, real_send = buckets._starts, GroupSender.send
    with monkeypatch.context() as patch:
        if wrong == "sent":
            patch.setattr(GroupSender, "send", flipped)
        else:
            patch.setattr(
                buckets, "_starts", lambda b: swapped(b) if any("layers.0" in n for n in b.names) else real_starts(b)
            )
        update = publisher.publish(v[1], fleet.shifted(0.5).items())
    assert (update.transport, publisher.facts()["publish_fallbacks"]) == ("disk", 1)
    publisher.announce(update, "ready")
    fleet.ready("a", at=v[1])
    assert fleet.checksums("a") == fleet.expected(fleet.shifted(0.5)), "neither the files are of what was packed"
    assert step(publisher, v[2], fleet.shifted(0.25)).transport == "distributed", "the next one goes over a group again"
    fleet.ready("a", at=v[2])
    assert fleet.checksums("a") == fleet.expected(fleet.shifted(0.25))


def test_an_engine_of_another_dtype_and_with_a_head_that_is_tied_is_compared_all_the_same(fleet: Fleet) -> None:
    half = {name: tensor.bfloat16() for name, tensor in fleet.weights.items()}
    half["lm_head.weight"] = half["model.embed_tokens.weight"].clone()
    _, publisher, epoch = fleet.learner()
    v = [PolicyVersion(epoch, n) for n in range(2)]
    for version in v:
        update = step(publisher, version, half)
        fleet.ready("a", "b", at=version)
    assert (update.transport, publisher.facts()["publish_fallbacks"]) == ("distributed", 0)
    answers = fleet.stores[-1].answers(epoch, fleet.view().number).values()
    assert all(answer.tensors_sha256 and answer.unused == ("lm_head.weight",) for answer in answers)
    assert fleet.checksums("a") == fleet.expected({n: half[n].float() for n in fleet.weights})


DYING = """
import os, sys, json, time, torch
from pathlib import Path
from safetensors.torch import load_file
from learner.config.learner import AdapterPublishSettings, DistributedPublishSettings
from learner.delivery.store import RunStore
from learner.weights import build_publisher
from protocol.messages import NodeState
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
run = RunSettings.model_validate_json(sys.argv[1])
store = RunStore(run.redis_url, run.id)
epoch = store.acquire("dying", 0, 60_000, takeover=True)
store.set_owner(epoch, "dying")
settings = DistributedPublishSettings(fsync=False, bucket_mb=1)
publisher = build_publisher(settings, run, sorted(run.model.glob("*.json")), store)
weights = load_file(run.model / "model.safetensors")
publisher.announce(publisher.publish(PolicyVersion(epoch, 0), weights.items()), "ready")
while sum(e.version == (epoch, 0) and e.state is NodeState.READY for e in store.engines()) < 2:
    time.sleep(0.02)
def dies():
    yield from list(weights.items())[:-1]
    time.sleep(0.3)
    os._exit(9)
publisher.publish(PolicyVersion(epoch, 1), dies())
"""


@pytest.mark.fault(15)
def test_after_a_learner_crash_during_a_transfer_the_next_learner_finds_complete_engines(fleet: Fleet) -> None:
    fleet.learner()
    argv = [sys.executable, "-c", DYING, fleet.run.model_dump_json()]
    died = subprocess.run(argv, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    assert died.returncode == 9, died.stderr.decode()
    assert fleet.view().phase == "transfer"
    _, publisher, epoch = fleet.learner()
    update = step(publisher, PolicyVersion(epoch, 1), fleet.shifted(0.5))
    fleet.ready("a", "b", at=update.version)
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.shifted(0.5))
    update = step(publisher, PolicyVersion(epoch, 2), fleet.shifted(0.25))
    assert update.transport == "distributed"
    fleet.ready("a", "b", at=update.version)
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.shifted(0.25))


@pytest.mark.fault(11, 13)
def test_a_fenced_learner_can_neither_call_a_view_nor_announce(fleet: Fleet) -> None:
    _, old, epoch = fleet.learner(prepare_s=1.0)
    v0 = step(old, PolicyVersion(epoch, 0), fleet.weights).version
    fleet.ready("a", "b", at=v0)
    fleet.learner()
    keys = fleet.stores[-1].keys
    before = fleet.db.mget(keys.view, keys.plan), fleet.db.xlen(keys.wake)
    with pytest.raises(Fenced):
        old.publish(PolicyVersion(epoch, 1), fleet.shifted(1.0).items())
    assert (fleet.db.mget(keys.view, keys.plan), fleet.db.xlen(keys.wake)) == before
    fleet.ready("a", "b", at=v0)


@pytest.mark.fault(40)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param(math.nan, "contains a non-finite value", id="not finite"),
        pytest.param(1e6, "the norm of all weights is at least", id="grown"),
    ],
)
def test_weights_that_are_no_policys_end_the_view(fleet: Fleet, value: float, words: str) -> None:
    _, publisher, epoch = fleet.learner(max_norm_jump=4.0)
    v0 = step(publisher, PolicyVersion(epoch, 0), fleet.weights).version
    fleet.ready("a", "b", at=v0)
    bad = fleet.shifted(1e-3)
    list(bad.values())[-1].view(-1)[3] = value
    with pytest.raises(BadWeights, match=words):
        publisher.publish(PolicyVersion(epoch, 1), bad.items())
    assert fleet.view().phase == "abort"
    fleet.ready("a", "b", at=v0)
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.weights), "as they were"


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_training_engine_holds_is_what_arrives(fleet: Fleet, stage: int) -> None:
    from learner.config.learner import LearnerSettings
    from learner.main import build_trainer

    settings = LearnerSettings.model_validate({"engine": {"zero_stage": stage, "threads": 1}})
    trainer = build_trainer(fleet.run, settings)  # not closed: one process group serves all tests of this process
    _, publisher, epoch = fleet.learner()
    v = [PolicyVersion(epoch, n) for n in range(2)]
    publisher.announce(publisher.publish(v[0], trainer.iter_weights()), "ready")
    fleet.ready("a", "b", at=v[0])
    update = publisher.publish(v[1], trainer.iter_weights())
    publisher.announce(update, "ready")
    assert update.transport == "distributed"
    fleet.ready("a", "b", at=v[1])
    assert fleet.checksums("a") == fleet.checksums("b") == fleet.expected(fleet.weights)


def test_an_evaluation_holds_the_group_back(fleet: Fleet) -> None:
    store, publisher, epoch = fleet.learner()
    v0 = step(publisher, PolicyVersion(epoch, 0), fleet.weights).version
    fleet.ready("a", "b", at=v0)
    fleet.db.set(store.keys.evaluation, "x")
    try:
        update = step(publisher, PolicyVersion(epoch, 1), fleet.shifted(0.5))
        assert (update.transport, publisher.facts()["publish_fallbacks"]) == ("disk", 0)
        time.sleep(0.3)
        fleet.ready("a", "b", at=v0)
    finally:
        fleet.db.delete(store.keys.evaluation)
    fleet.ready("a", "b", at=update.version)


def test_an_evaluation_on_an_engine_of_its_own_leaves_the_group_to_the_others(fleet: Fleet) -> None:
    store, publisher, epoch = fleet.learner()
    fleet.start("e", role="eval")
    try:
        v0 = step(publisher, PolicyVersion(epoch, 0), fleet.weights).version
        fleet.ready("a", "b", "e", at=v0)
        fleet.db.set(store.keys.evaluation, "eval-engines:x")
        for n in (1, 2):
            update = step(publisher, PolicyVersion(epoch, n), fleet.shifted(0.5 * n))
            assert update.transport == "distributed"
            fleet.ready("a", "b", at=update.version)
        time.sleep(1.0)
        fleet.ready("e", at=v0)
        facts = publisher.facts()
        assert (facts["publish_fallbacks"], facts["publish_snapshots"]) == (0, 0), "no files: nobody could load them"
        fleet.db.delete(store.keys.evaluation)
        fleet.ready("e", at=update.version)
        assert fleet.checksums("e") == fleet.checksums("a") == fleet.expected(fleet.shifted(1.0))
    finally:
        fleet.db.delete(store.keys.evaluation)
        node = fleet.nodes.pop("e")
        node.terminate()
        node.wait(20)


def test_an_adapter_reaches_a_real_engine_and_means_what_it_says(
    tmp_path_factory: pytest.TempPathFactory, redis_socket: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    fleet = Fleet(folder, redis_socket, make_model(folder / "model"), run="t2")
    try:
        _, publisher, epoch = fleet.learner_of(AdapterPublishSettings(fsync=False))
        torch.manual_seed(1)
        policies = {}
        for number in range(2):
            model = AutoModelForCausalLM.from_pretrained(fleet.run.model)
            adapter = []
            for name, weight in model.named_parameters():
                if name.endswith(("q_proj.weight", "down_proj.weight")):
                    a, b = torch.randn(4, weight.shape[1]) / 8, torch.randn(weight.shape[0], 4) / 8
                    weight.data += 8.0 / 4 * b @ a
                    at = name.removesuffix(".weight")
                    adapter += [(f"{at}.lora_A.weight", a), (f"{at}.lora_B.weight", b)]
            version = PolicyVersion(epoch, number)
            update = publisher.publish(version, adapter)
            publisher.announce(update, "ready")
            assert update.num_bytes < 100_000, "an adapter is small"
            if not number:
                fleet.start("a")  # it launches with the initial model
            fleet.ready("a", at=version)
            info = fleet.info("a")
            assert info is not None and info.adapter == version.label and info.pause_s == 0
            policies[version.label] = model
        for label, model in policies.items():  # both are there: requests that began with the older one go on
            assert_same_logprobs(info.url, label, model)
    finally:
        fleet.close()


def assert_same_logprobs(url: str, adapter: str, model: Any) -> None:
    ids = [5, 6, 7, 8]
    body = {
        "input_ids": ids, "lora_path": adapter, "return_logprob": True,
        "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True},
    }  # fmt: skip
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        answer = json.load(reply)
    given = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
    whole = [*ids, *answer["output_ids"]]
    with torch.inference_mode():
        logits = model(torch.tensor([whole])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    expected = logits[torch.arange(len(given)), torch.tensor(answer["output_ids"])]
    assert torch.allclose(torch.tensor(given), expected, atol=1e-3)
