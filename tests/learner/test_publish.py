"""Published weights: loadable, whole, checked, and not kept for ever."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.config.learner import (
    AdapterPublishSettings,
    DiskPublishSettings,
    DistributedPublishSettings,
    LearnerSettings,
    PublishSettings,
)
from learner.config.model import LoraSettings
from learner.weights import build_publisher, snapshots
from learner.weights import disk as module
from learner.weights.base import Announcement, BadWeights, WeightPublisher
from learner.weights.checks import WeightCheck
from learner.weights.snapshots import SnapshotWriter
from protocol.errors import UserError
from protocol.messages import EngineInfo, NodeState, WeightUpdate
from protocol.runtime.config import section
from protocol.runtime.files import model_digest
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support.waiting import wait_until


@pytest.fixture
def run(tmp_path: Path) -> RunSettings:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"a": 1}')
    (tmp_path / "m" / "tokenizer.json").write_text("t" * 5000)
    return RunSettings(id="t1", dir=tmp_path / "run", model=tmp_path / "m")


@pytest.fixture
def publisher(run: RunSettings) -> WeightPublisher:
    return build_publisher(LearnerSettings().publish, run, sorted(run.model.iterdir()), RecordingLink())


class RecordingLink(list):
    """A link that keeps what was announced over it."""

    def target(self, update: WeightUpdate, state: str) -> None:
        self.append((update, state))


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [("b", torch.full((3, 2), value, dtype=torch.bfloat16)), ("a", torch.arange(4.0))]


def test_a_version_is_a_loadable_directory_that_its_manifest_describes(
    publisher: WeightPublisher, run: RunSettings
) -> None:
    update = publisher.publish(PolicyVersion(3, 12), weights())
    path = Path(update.path)
    assert path.is_absolute() and path.name == "v3.12"
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    tensors = load_file(path / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights())
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["version"], manifest["tensors"], manifest["digest"]) == ("3.12", 2, update.digest)
    for name, facts in manifest["files"].items():
        raw = (path / name).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (facts["bytes"], facts["sha256"])
    assert update.digest == manifest["files"]["model.safetensors"]["sha256"]
    assert (update.run, update.version, update.num_bytes) == (
        "t1",
        (3, 12),
        manifest["files"]["model.safetensors"]["bytes"],
    )


def test_a_version_is_written_hashed_and_checked_in_one_pass(
    publisher: WeightPublisher, run: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[tuple[int, int]] = []
    checked: list[str] = []
    read: list[str] = []

    class Counting:
        def __init__(self, start: bytes) -> None:
            self._real = real(start)
            hashed.append((len(start), threading.get_ident()))
            self.hexdigest = self._real.hexdigest

        def update(self, raw: memoryview) -> None:
            hashed.append((raw.nbytes, threading.get_ident()))
            self._real.update(raw)

    real, add = hashlib.sha256, WeightCheck.add
    monkeypatch.setattr(module.hashlib, "sha256", Counting)
    monkeypatch.setattr(module, "sha256_file", lambda path: read.append(path.name) or "")
    monkeypatch.setattr(WeightCheck, "add", lambda self, *given: checked.append(given[0]) or add(self, *given))
    shapes = {"tokens": (64, 8), "head": (64, 8), "norm": (8,), "empty": (0, 8), "scale": ()}
    given = {name: torch.rand(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    update = publisher.publish(PolicyVersion(1, 1), (given | {"last": torch.arange(3), "tied": given["head"]}).items())
    assert sum(size for size, _ in hashed) == update.num_bytes and len(hashed) == 8
    assert {thread for _, thread in hashed[1:]}.isdisjoint({threading.get_ident()}), "while the file is written"
    assert sorted(checked) == sorted([*given, "last", "tied"]) and "model.safetensors" not in read
    found = load_file(f"{update.path}/model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items()) and len(found) == 7
    plain = given | {"last": torch.arange(3), "tied": given["head"].clone()}
    save_file(plain, run.dir / "theirs", metadata={"format": "pt"})
    assert (run.dir / "theirs").read_bytes() == (Path(update.path) / "model.safetensors").read_bytes()


def test_a_real_model_can_be_loaded_from_it(run: RunSettings) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    config.save_pretrained(run.model)
    publisher = build_publisher(LearnerSettings().publish, run, sorted(run.model.iterdir()), RecordingLink())
    update = publisher.publish(PolicyVersion(1, 0), model.state_dict().items())  # with the tied head twice
    again = AutoModelForCausalLM.from_pretrained(update.path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def stored(run: RunSettings, dtype: torch.dtype = torch.bfloat16) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in weights()}
    save_file(tensors, run.model / "model.safetensors")


@pytest.mark.parametrize("kind", [DiskPublishSettings(), DistributedPublishSettings()])
def test_the_initial_model_is_announced_and_not_written(run: RunSettings, kind: PublishSettings) -> None:
    stored(run)
    publisher = build_publisher(kind, run, [], RecordingLink())
    given = ((name, tensor.to("meta")) for name, tensor in weights())
    update = publisher.initial(PolicyVersion(1, 0), given)
    assert update is not None and update.is_initial and update.version == (1, 0)
    assert update.path == str(run.model) and update.digest == f"initial-{model_digest(run.model)}"
    assert not list(run.weights_dir.iterdir()) and next(given, None) is None
    publisher.close()


def test_a_new_group_can_be_proven_with_the_initial_model(run: RunSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy group sends one tensor first that all engines hold: here one of `run.model`, in the policy's dtype."""
    named = [("b.norm.weight", torch.arange(6.0)), ("a.norm.weight", torch.arange(3.0)), ("c.weight", torch.ones(2))]
    save_file(dict(named), run.model / "model.safetensors")
    monkeypatch.setattr("learner.weights.broadcast.is_lazy", lambda backend: True)
    publisher = build_publisher(DistributedPublishSettings(), run, [], RecordingLink())
    update = publisher.initial(PolicyVersion(1, 0), ((name, tensor.to("meta")) for name, tensor in named))
    assert update is not None
    publisher.announce(update, "ready")
    facts = {"url": "u", "state": NodeState.READY, "epoch": 1, "step": 0, "proves": True}
    proof = publisher._proof.of([EngineInfo(id="e", **facts)])
    assert proof.bucket.names == ("a.norm.weight",)
    assert proof.flat.view(torch.float32).tolist() == [0.0, 1.0, 2.0]
    assert publisher._proof.of([EngineInfo(id="e", **facts | {"step": 1})]) is None
    publisher.close()


def test_a_model_that_engines_cannot_have_is_published(run: RunSettings) -> None:
    publisher = build_publisher(DiskPublishSettings(), run, [], RecordingLink())
    first = PolicyVersion(1, 0)
    assert publisher.initial(first, weights()) is None, "there are no files"
    stored(run, torch.float32)
    assert publisher.initial(first, weights()) is None, "the policy's bfloat16 rounds them"
    assert publisher.initial(first, [(n, t.float()) for n, t in weights()]) is not None
    assert publisher.initial(first, [("b", torch.zeros(2, 3)), ("a", torch.zeros(4))]) is None, "another shape"
    assert publisher.initial(first, [*weights(), ("c", torch.zeros(1))]) is None, "another tensor"
    adapters = build_publisher(AdapterPublishSettings(), run, [], RecordingLink())
    assert adapters.initial(first, weights()) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.fault(40)
def test_weights_that_are_not_finite_are_refused(publisher: WeightPublisher, run: RunSettings, bad: float) -> None:
    with pytest.raises(BadWeights, match="tensor b"):
        publisher.publish(PolicyVersion(1, 1), weights(bad))
    assert list(run.weights_dir.iterdir()) == []


@pytest.mark.fault(42)
def test_a_failed_write_leaves_nothing_that_looks_published(
    publisher: WeightPublisher, run: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_place", full)
    with pytest.raises(OSError, match="No space"):
        publisher.publish(PolicyVersion(1, 1), weights())
    assert list(run.weights_dir.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from learner.config.learner import DiskPublishSettings
from learner.weights import disk
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

run, model = map(Path, sys.argv[1:])
disk._place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
settings = RunSettings(id="t1", dir=run, model=model)
publisher = disk.DiskPublisher(DiskPublishSettings(), settings, sorted(model.iterdir()), None)
publisher.publish(PolicyVersion(1, 1), [("a", torch.arange(4.0))])
"""


@pytest.mark.slow
@pytest.mark.fault(42)
def test_a_learner_that_is_killed_between_two_files_has_published_nothing(run: RunSettings) -> None:
    # a new process: a fork of this one, with torch threads of other tests, would prove nothing
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(run.dir), str(run.model)], stderr=subprocess.PIPE)
    _, said = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, said.decode()
    (left,) = run.weights_dir.iterdir()
    assert left.name == f".v1.1.{child.pid}.tmp" and [p.name for p in left.iterdir()] == ["model.safetensors"]
    publisher = build_publisher(DiskPublishSettings(), run, sorted(run.model.iterdir()), RecordingLink())
    assert list(run.weights_dir.iterdir()) == [], "the next start removes it"
    publisher.publish(PolicyVersion(2, 1), weights())
    assert [p.name for p in run.weights_dir.iterdir()] == ["v2.1"]


@pytest.mark.fault(42)
def test_what_a_killed_learner_left_is_replaced(run: RunSettings) -> None:
    (run.weights_dir / ".v1.1.77.tmp").mkdir(parents=True)
    (run.weights_dir / "v1.1").mkdir()
    (run.weights_dir / "v1.1" / "half").touch()
    publisher = build_publisher(DiskPublishSettings(fsync=False), run, [], RecordingLink())
    publisher.publish(PolicyVersion(1, 1), weights())
    assert sorted(p.name for p in run.weights_dir.rglob("*")) == ["manifest.json", "model.safetensors", "v1.1"]


def test_the_newest_and_those_in_use_are_kept(run: RunSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_VERSIONS", 2)
    publisher = build_publisher(DiskPublishSettings(), run, [], RecordingLink())
    for version in [(1, 9), (1, 10), (2, 5), (2, 6), (2, 7)]:
        publisher.publish(PolicyVersion(*version), weights())
    (run.weights_dir / "vendor").mkdir()
    publisher.collect({PolicyVersion(1, 10), PolicyVersion(0, 0)})
    assert {p.name for p in run.weights_dir.iterdir()} == {"v1.10", "v2.6", "v2.7", "vendor"}


def test_what_nodes_would_refuse_beside_a_model_does_not_travel(
    run: RunSettings, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (".gitattributes", "training_args.bin", "a note (1).md", "merges.txt"):
        (run.model / name).write_text("x")
    update = build_publisher(
        DiskPublishSettings(fsync=False), run, sorted(run.model.iterdir()), RecordingLink()
    ).publish(PolicyVersion(1, 0), weights())
    names = {p.name for p in Path(update.path).iterdir()}
    assert names == {"config.json", "manifest.json", "merges.txt", "model.safetensors", "tokenizer.json"}
    assert "a note (1).md with the weights" in caplog.text and ".gitattributes" not in caplog.text


def test_what_does_not_change_is_written_once(run: RunSettings) -> None:
    publisher = build_publisher(DiskPublishSettings(fsync=False), run, sorted(run.model.iterdir()), RecordingLink())
    for step in range(5):
        publisher.publish(PolicyVersion(1, step), [(f"t{i}", torch.ones(100, 100)) for i in range(20)])
    assert os.stat(run.weights_dir / "v1.0" / "tokenizer.json").st_nlink >= 5, "the tokenizer is written once"


def lora(rank: int = 4) -> list[tuple[str, torch.Tensor]]:
    at = "model.layers.0.self_attn."
    return [
        (f"{at}q_proj.lora_A.weight", torch.randn(rank, 16)),
        (f"{at}q_proj.lora_B.weight", torch.randn(16, rank)),
        (f"base_model.model.{at}v_proj.lora_A.default.weight", torch.randn(rank, 16)),
        (f"base_model.model.{at}v_proj.lora_B.default.weight", torch.randn(8, rank)),
    ]


def test_an_adapter_is_a_directory_in_pefts_layout(run: RunSettings) -> None:
    reported = RecordingLink()
    publisher = build_publisher(
        AdapterPublishSettings(), run, sorted(run.model.iterdir()), reported, LoraSettings(alpha=8)
    )
    given = lora()
    update = publisher.publish(PolicyVersion(1, 3), given)
    path = Path(update.path)
    assert update.transport == "adapter" and path.name == "v1.3"
    assert sorted(p.name for p in path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["target_modules"] == ["self_attn.q_proj", "self_attn.v_proj"]
    tensors = load_file(path / "adapter_model.safetensors")
    for name, tensor in given:
        at = "base_model.model." + name.removeprefix("base_model.model.").replace(".default", "")
        assert torch.equal(tensors.pop(at), tensor)
    assert not tensors
    manifest = json.loads((path / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        raw = (path / name).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (facts["bytes"], facts["sha256"])
    publisher.announce(update, "ready")
    assert reported == [(update, "ready")]


def test_what_is_no_adapter_is_refused(run: RunSettings) -> None:
    publisher = build_publisher(AdapterPublishSettings(), run, [], RecordingLink())
    with pytest.raises(UserError, match="not a LoRA parameter"):
        publisher.publish(PolicyVersion(1, 0), weights())
    with pytest.raises(UserError, match="ranks"):
        publisher.publish(PolicyVersion(1, 0), [*lora(4)[:2], *lora(2)[2:]])
    assert list(run.weights_dir.iterdir()) == []


def test_a_transport_is_chosen_by_its_name_and_files_are_the_default() -> None:
    chosen = section({"learner": {"publish": {"fsync": False}}}, "learner", LearnerSettings).publish
    assert chosen == DiskPublishSettings(fsync=False)
    chosen = section(
        {"learner": {"publish": {"type": "distributed", "bucket_mb": 8}}}, "learner", LearnerSettings
    ).publish
    assert (chosen.type, chosen.fsync) == ("distributed", True)
    with pytest.raises(UserError, match="disk"):
        section({"learner": {"publish": {"type": "pigeon"}}}, "learner", LearnerSettings)


def test_a_path_is_announced_only_for_the_target_and_only_once() -> None:
    link = RecordingLink()
    announcement = Announcement(link)
    updates = [WeightUpdate(run="t1", epoch=1, step=step, digest="d", path="") for step in (1, 2)]
    older, target = (update.model_copy(update={"path": "/w"}) for update in updates)
    assert announcement.add_path(target) is False
    announcement.set(updates[1], "ready")
    assert announcement.add_path(older) is False
    assert announcement.add_path(target) is True and announcement.add_path(target) is False
    assert link == [(updates[1], "ready"), (target, "ready")]


class Engines(RecordingLink):
    """A link with one engine. `looks`: how often it was read."""

    def __init__(self, state: NodeState, detail: str = "", step: int = 3) -> None:
        super().__init__()
        self.engine = EngineInfo(id="e", url="u", state=state, epoch=1, step=step, detail=detail)
        self.looks = 0

    def engines(self) -> list[EngineInfo]:
        self.looks += 1
        return [self.engine]

    def pin(self) -> None:
        return None


@contextlib.contextmanager
def snapshots_for(link: Engines, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> Iterator[list[float]]:
    """Announce a version without files; the seconds until each write."""

    def write(update: WeightUpdate) -> WeightUpdate:
        written.append(time.monotonic() - began)
        return update.model_copy(update={"path": "/v1.4"})

    monkeypatch.setattr(snapshots, "LOOK_S", 0.01)
    announcement, written, began = Announcement(link), [], time.monotonic()
    announcement.set(WeightUpdate(run="t1", epoch=1, step=4, digest="d", path=""), "ready")
    writer = SnapshotWriter(link, announcement, write, patience_s=patience_s)
    try:
        yield written
    finally:
        writer.close()
    assert [update.path for update, _ in link] == ["", *["/v1.4"] * len(written)], "what was written is announced"


def test_a_serving_engine_that_stays_behind_gets_files_once_its_patience_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with snapshots_for(Engines(NodeState.READY), monkeypatch, 0.1) as written:
        wait_until(lambda: written, "the files are written", 10.0)
    assert len(written) == 1 and written[0] >= 0.1


@pytest.mark.parametrize(
    ("link", "needs"),
    [
        (Engines(NodeState.SYNCING, "1.3 is not the target"), True),
        (Engines(NodeState.QUARANTINED, "reading 1.3"), True),
        (Engines(NodeState.SYNCING, "reading 1.3"), False),  # it reads the target again once it is up
        (Engines(NodeState.SYNCING, "launching"), False),
        (Engines(NodeState.QUARANTINED, step=4), False),
        (Engines(NodeState.JOINING), False),
        (Engines(NodeState.LOADING), False),
        (Engines(NodeState.DRAINING), False),
    ],
)
def test_files_are_written_for_engines_that_are_up_and_outside_the_view(
    link: Engines, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with snapshots_for(link, monkeypatch, 60.0) as written:
        wait_until(lambda: written or link.looks > 2, "the engines were read", 10.0)
        assert bool(written) == needs
