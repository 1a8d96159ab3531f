"""Weights by broadcast: a real Redis, real gloo, real nodes with embedded engines in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import load_file

from learner.config import DistributedPublishSettings
from learner.publish.base import Publisher
from learner.redis_client import RunStore
from protocol.codec import decode_as
from protocol.messages import EngineInfo, NodeState, WeightUpdate, WeightView
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from rollout_server.testing import write_tokenizer

Weights = dict[str, torch.Tensor]


def make_model(directory: Path) -> Weights:
    """A Qwen2 of some 0.1 million parameters, whose weights are returned."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    write_tokenizer(directory, "words")
    config = Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


class Fleet:
    """A run with one learner's store and any number of nodes with embedded engines."""

    def __init__(self, folder: Path, socket: str, weights: Weights) -> None:
        self.folder, self.weights = folder, weights
        self.run = RunSettings(id="t1", dir=folder / "run", redis_url=f"unix://{socket}", model=folder / "model")
        self.db = redis.Redis(unix_socket_path=socket)
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.stores: list[RunStore] = []
        self.publishers: list[Publisher] = []

    def learner(self, **settings: Any) -> tuple[RunStore, Publisher, int]:
        """The next learner: its store, its publisher, its epoch. The one before is fenced."""
        store = RunStore(self.run.redis_url, self.run.id)
        store.prepare()
        epoch = store.acquire(f"L{len(self.stores)}", 0, 60_000, takeover=True)
        assert isinstance(epoch, int)
        store.own(epoch, f"L{len(self.stores)}")
        given = {"fsync": False, "bucket_mb": 1, "prepare_s": 10.0, "transfer_s": 10.0, "patience_s": 0.0} | settings
        publisher = DistributedPublishSettings(**given).build(
            self.run, sorted((self.folder / "model").iterdir()), store
        )
        self.stores.append(store)
        self.publishers.append(publisher)
        return store, publisher, epoch

    def start(self, name: str, **settings: Any) -> None:
        """A node in a process of its own."""
        tree = {
            "run": self.run.model_dump(mode="json"),
            "engine": {
                "id": name,
                "poll_s": 0.05,
                "heartbeat_s": 0.2,
                "lease_s": 2.0,
                "probe_s": 0.5,
                "drain_s": 0.5,
                **settings,
            },
        }
        config = self.folder / f"{name}.yaml"
        config.write_text(json.dumps(tree))
        argv = [sys.executable, "-m", "rollout_server.node", "--config", str(config)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.nodes[name] = subprocess.Popen(argv, stdout=log, stderr=log, cwd=self.folder, env=env)

    def info(self, name: str) -> EngineInfo | None:
        found = [e for e in self.stores[-1].engines() if e.id == name]
        return found[0] if found else None

    def until(self, true: Callable[[], object], what: str, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            logs = "\n".join(self.log(name)[-3000:] for name in self.nodes)
            assert time.monotonic() < deadline, f"within {seconds} s: {what}\n{logs}"
            time.sleep(0.02)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def ready(self, *names: str, at: PolicyVersion) -> None:
        def true() -> bool:
            found = [self.info(name) for name in names]
            return all(e is not None and (e.state, e.version) == (NodeState.READY, at) for e in found)

        self.until(true, f"{names} READY at {at.label}")

    def checksums(self, name: str) -> dict[str, str]:
        info = self.info(name)
        assert info is not None
        body = json.dumps({"action": "checksum"}).encode()
        request = urllib.request.Request(info.url + "/weights_checker", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as reply:
            return dict(json.load(reply)["checksums"])

    def shifted(self, by: float) -> Weights:
        return {name: tensor + by for name, tensor in self.weights.items()}

    def expected(self, weights: Weights) -> dict[str, str]:
        import hashlib

        return {n: hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in weights.items()}

    def target(self) -> WeightUpdate:
        return decode_as(WeightUpdate, self.db.hget(self.stores[-1].keys.target, "b"))

    def view(self) -> WeightView:
        return decode_as(WeightView, self.db.get(self.stores[-1].keys.view))

    def forget(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self.publishers.clear()

    def close(self) -> None:
        self.forget()
        for node in self.nodes.values():
            node.terminate()
        for node in self.nodes.values():
            try:
                node.wait(10)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
        for store in self.stores:
            store.close()
        self.db.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, redis_socket: str) -> Iterator[Fleet]:
    """Two engines, `a` and `b`, for all tests of this file."""
    folder = tmp_path_factory.mktemp("fleet")
    made = Fleet(folder, redis_socket, make_model(folder / "model"))
    made.db.flushall()
    try:
        made.start("a")
        made.start("b")
        yield made
    finally:
        made.close()


def step(publisher: Publisher, version: PolicyVersion, weights: Weights, state: str = "ready") -> WeightUpdate:
    update = publisher.publish(version, iter(weights.items()))
    publisher.announce(update, state)
    return update


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
    facts = publisher.facts()
    assert (facts["publish_distributed"], facts["publish_fallbacks"], facts["publish_members"]) == (2, 0, 2)
    assert facts["publish_bytes"] == sum(t.numel() * 4 for t in fleet.weights.values())
    assert not list(fleet.run.weights_dir.glob(f"v{epoch}.1")), "nothing was written"
    last = step(publisher, PolicyVersion(epoch, 2), fleet.shifted(2 / 8), "done")
    assert last.version.step == 2
    fleet.forget()
