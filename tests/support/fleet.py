"""A learner's publisher, and nodes with CPU engines in separate processes, over a real Redis."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
import torch
from safetensors.torch import load_file

from learner.config.learner import AdapterPublishSettings, DistributedPublishSettings
from learner.config.model import LoraSettings
from learner.delivery.store import RunStore
from learner.weights import build_publisher
from learner.weights.base import WeightPublisher
from protocol.codec import decode_as
from protocol.messages import EngineInfo, NodeState, WeightUpdate, WeightView
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support.environments import write_tokenizer
from tests.support.hosts import hidden
from tests.support.waiting import wait_until

Weights = dict[str, torch.Tensor]
ADMIN_KEY = "of-the-engines-in-these-tests"


def make_model(directory: Path) -> Weights:
    """A Qwen2 of 3 MB, so that it travels in several buckets; its weights are returned."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    write_tokenizer(directory, "words")
    config = Qwen2Config(
        vocab_size=4096, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


class Fleet:
    """A run with one learner's store and any number of nodes with CPU engines."""

    def __init__(self, folder: Path, socket: str, weights: Weights, run: str = "t1") -> None:
        self.folder, self.weights = folder, weights
        self.run = RunSettings(id=run, dir=folder / "run", redis_url=f"unix://{socket}", model=folder / "model")
        self.db = redis.Redis(unix_socket_path=socket)
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.stores: list[RunStore] = []
        self.publishers: list[WeightPublisher] = []

    def learner(self, **settings: Any) -> tuple[RunStore, WeightPublisher, int]:
        """The next learner: its store, its publisher, its epoch. The one before is fenced."""
        given = {
            "fsync": False,
            "max_norm_jump": 0.0,
            "bucket_mb": 1,
            "prepare_s": 10.0,
            "transfer_s": 10.0,
            "patience_s": 0.0,
        } | settings
        return self.learner_of(DistributedPublishSettings(**given))

    def learner_of(
        self, settings: DistributedPublishSettings | AdapterPublishSettings
    ) -> tuple[RunStore, WeightPublisher, int]:
        store = RunStore(self.run.redis_url, self.run.id)
        store.prepare()
        epoch = store.acquire(f"L{len(self.stores)}", 0, 60_000, takeover=True)
        assert isinstance(epoch, int)
        store.set_owner(epoch, f"L{len(self.stores)}")
        files = sorted(self.run.model.glob("*.json"))
        publisher = build_publisher(settings, self.run, files, store, LoraSettings(alpha=8.0))
        self.stores.append(store)
        self.publishers.append(publisher)
        return store, publisher, epoch

    def start(self, name: str, *, blind: bool = False, **settings: Any) -> None:
        """A node in a separate process. `blind`: it finds the run directory empty, as on another host."""
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
        argv = [*hidden(self.run.dir), *argv] if blind else argv
        # given, so that the test can use the control routes, too: by default a node generates a secret one
        env = {**os.environ, "OMP_NUM_THREADS": "1", "FORAY_ENGINE_ADMIN_KEY": ADMIN_KEY}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.nodes[name] = subprocess.Popen(argv, stdout=log, stderr=log, cwd=self.folder, env=env)

    def start_missing(self, *names: str) -> None:
        """Start those of these nodes that do not run."""
        for name in names:
            if name not in self.nodes or self.nodes[name].poll() is not None:
                self.start(name)

    def engine_pid(self, name: str) -> int:
        """The process that listens where the engine's URL says."""
        info = self.info(name)
        assert info is not None
        port = info.url.rpartition(":")[2]
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            except OSError:
                continue  # it ended
            if b"rollout_server.cpu_engine" in words and port.encode() in words and b"-S" not in words:
                return int(folder.name)
        raise AssertionError(f"no engine listens on port {port}")

    def info(self, name: str) -> EngineInfo | None:
        found = [e for e in self.stores[-1].engines() if e.id == name]
        return found[0] if found else None

    def logs(self) -> str:
        return "\n".join(self.log(name)[-3000:] for name in self.nodes)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def ready(self, *names: str, at: PolicyVersion) -> None:
        def true() -> bool:
            found = [self.info(name) for name in names]
            return all(e is not None and (e.state, e.version) == (NodeState.READY, at) for e in found)

        wait_until(true, f"{names} READY at {at.label}", said=self.logs)

    def checksums(self, name: str) -> dict[str, str]:
        info = self.info(name)
        assert info is not None
        body = json.dumps({"action": "checksum"}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN_KEY}"}
        request = urllib.request.Request(info.url + "/weights_checker", body, headers)
        with urllib.request.urlopen(request, timeout=20) as reply:
            return dict(json.load(reply)["checksums"])

    def shifted(self, by: float) -> Weights:
        return {name: tensor + by for name, tensor in self.weights.items()}

    def expected(self, weights: Weights) -> dict[str, str]:
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


@contextlib.contextmanager
def two_engines(folder: Path, redis_socket: str) -> Iterator[Fleet]:
    """A fleet for all tests of a file, without nodes yet."""
    made = Fleet(folder, redis_socket, make_model(folder / "model"))
    made.db.flushall()
    try:
        yield made
    finally:
        made.close()


def step(publisher: WeightPublisher, version: PolicyVersion, weights: Weights, state: str = "ready") -> WeightUpdate:
    update = publisher.publish(version, iter(weights.items()))
    publisher.announce(update, state)
    return update
