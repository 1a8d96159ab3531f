"""What is relied on is on the device first: before it is renamed into place, acknowledged, announced.

`Device` records every fsync, and so knows what a power cut would leave; the tests ask it at each rename, at each
acknowledgement and at each announcement.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from learner.checkpoint import journal as journal_module
from learner.checkpoint.checkpoint import Checkpoints
from learner.checkpoint.journal import GroupJournal, all_locations, index_of
from learner.checkpoint.signing import run_key
from learner.config.learner import AdapterPublishSettings, DiskPublishSettings, LearnerSettings, PublishSettings
from learner.delivery.store import RunStore
from learner.weights import build_publisher
from learner.weights.base import EngineLink
from protocol.header import read_header, seal
from protocol.ledger import Ledger
from protocol.messages import WeightUpdate
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support import tiny_learner
from tests.support.messages import make_group

BEST_EFFORT = {"metrics.jsonl", "training.json", "dead_letters.jsonl", "skipped", "tiny.jsonl"}
"""What no promise is built on."""


class Device:
    """What each inode held when it was flushed last: the bytes of a file, the names in a folder.

    renamed  (target, what a power cut would have taken at that moment of the source, and of what CURRENT is to name)
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
        self._base = base
        self._held: dict[int, Any] = {base.stat().st_ino: self._content(base)}
        self.renamed: list[tuple[Path, list[str]]] = []
        fsync = os.fsync

        def flushed(handle: int) -> None:
            fsync(handle)
            self._held[os.fstat(handle).st_ino] = self._content(Path(os.readlink(f"/proc/self/fd/{handle}")))

        monkeypatch.setattr(os, "fsync", flushed)
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._watching(getattr(os, name)))

    def _watching(self, move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any, **more: Any) -> None:
            inside = [p for p in (Path(source), *Path(source).rglob("*")) if not self._kept(p)]
            if self._base in Path(source).parents and Path(target).name not in BEST_EFFORT:
                gone = [str(p.relative_to(self._base)) for p in inside]
                if Path(target).name == "CURRENT":
                    gone += self.lost(Path(target).parent / Path(source).read_text().strip())
                self.renamed.append((Path(target), gone))
            move(source, target, **more)

        return moved

    @staticmethod
    def _content(path: Path) -> Any:
        return {p.name: p.stat().st_ino for p in path.iterdir()} if path.is_dir() else path.read_bytes()

    def _kept(self, path: Path) -> bool:
        """Whether all of a file is on the device, or every name that a folder holds."""
        held, present = self._held.get(path.stat().st_ino), self._content(path)
        return held is not None and (held == present if path.is_file() else present.items() <= held.items())

    def lost(self, root: Path) -> list[str]:
        """What a power cut would take of `root`: files that are not whole there, and names, from the base down."""
        above = [p for p in root.parents if p == self._base or self._base in p.parents]
        way = [root, *above]
        gone = [c for c, f in pairwise(way) if self._names(f).get(c.name) != c.stat().st_ino]
        return [str(p.relative_to(self._base)) for p in (*gone, *self._below(root))]

    def _below(self, root: Path) -> list[Path]:
        if root.is_file():
            return [] if self._kept(root) else [root]
        found = []
        for path in sorted(root.iterdir()):
            if path.name in BEST_EFFORT:
                continue
            found += [path] if self._names(root).get(path.name) != path.stat().st_ino else []
            found += self._below(path)
        return found

    def _names(self, folder: Path) -> dict[str, int]:
        return dict(self._held.get(folder.stat().st_ino, {}))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    return Device(monkeypatch, tmp_path)


def save(directory: Path) -> None:
    (directory / "policy").mkdir()
    (directory / "policy" / "master.safetensors").write_bytes(b"m" * 1000)
    (directory / "ranks.json").write_text("{}")


@pytest.mark.fault(9)
def test_a_checkpoint_is_on_the_device_before_it_is_in_force(device: Device, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=2, key=run_key(tmp_path / "run", {}))
    assert device.lost(tmp_path / "run" / "run.key") == []
    for step in (1, 2):
        facts = {"ledger": {}, "run": "t"}
        path = checkpoints.write(
            facts, step=step, epoch=1, lineage=[PolicyVersion(1, 0)], save=save, confirm=lambda: None
        )
        assert device.lost(path) == []
        assert device.lost(path.parent) == [], "CURRENT too, and the way to it"
    targets = [target.name for target, _ in device.renamed]
    assert targets == ["run.key", *(n for s in (1, 2) for n in ("manifest.json", f"step_{s}.e1", "CURRENT"))]
    assert [(target.name, lost) for target, lost in device.renamed if lost] == []


ADAPTER = [("m.q_proj.lora_A.weight", torch.ones(2, 4)), ("m.q_proj.lora_B.weight", torch.ones(4, 2))]


@pytest.mark.fault(42)
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("settings", [DiskPublishSettings(), AdapterPublishSettings()])
def test_weights_are_on_the_device_before_they_are_renamed_and_announced(
    device: Device, tmp_path: Path, settings: PublishSettings, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(1, "this file system has no hard links")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_text("t" * 5000)
    run = RunSettings(id="t1", dir=tmp_path / "run", model=tmp_path / "m")
    lost: list[list[str]] = []

    class RecordingLink:
        def target(self, update: WeightUpdate, _: str) -> None:
            lost.append(device.lost(Path(update.path)))

    link: EngineLink = RecordingLink()  # type: ignore[assignment]
    publisher = build_publisher(settings, run, [tmp_path / "m" / "tokenizer.json"], link)
    for step in range(2):
        publisher.announce(publisher.publish(PolicyVersion(1, step), ADAPTER), "ready")
    assert lost == [[], []]
    moves = [(target.name, gone) for target, gone in device.renamed if target.name.startswith("v")]
    assert moves == [("v1.0", []), ("v1.1", [])]


def test_without_fsync_nothing_of_the_weights_is_flushed(device: Device, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    run = RunSettings(id="t1", dir=tmp_path / "run", model=tmp_path / "m")
    publisher = build_publisher(DiskPublishSettings(fsync=False), run, [], None)  # type: ignore[arg-type]
    path = Path(publisher.publish(PolicyVersion(1, 0), ADAPTER).path)
    assert str((path / "model.safetensors").relative_to(tmp_path)) in device.lost(path), "the recorder sees what is not"


def test_every_file_of_the_journal_is_on_the_device_when_it_was_flushed(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "FILE_BYTES", 100)
    folder = tmp_path / "run" / "journal"
    for start in range(2):
        journal = GroupJournal(folder)
        for step in range(1, 4):
            journal.append(step, 1 + start, [seal(make_group(3 * start + step))])
        journal.flush()
        assert len(list(folder.glob("*.bin"))) == 3 + 3 * start
        assert device.lost(folder) == []
        journal.close()
        index_of(folder / "groups-00001.bin").write_bytes(b"cut")  # which the next start repairs


@pytest.mark.fault(7, 9)
def test_whatever_is_relied_on_is_on_the_device_first(
    run: RunSettings,
    settings: LearnerSettings,
    serve: Callable[..., int],
    address: dict[str, Any],
    db: redis.Redis,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole run: asked when the epoch is used first, at every announcement and at every acknowledgement."""
    monkeypatch.setattr(journal_module, "FILE_BYTES", 2000)
    relied: list[tuple[str, list[str]]] = []
    unknown: list[int] = []
    own, target, ack = RunStore.set_owner, RunStore.target, RunStore.ack

    def owning(self: RunStore, epoch: int, token: str) -> None:
        relied.append(("epoch", device.lost(run.checkpoint_dir / "epochs" / f"e{epoch}")))
        own(self, epoch, token)

    def announcing(self: RunStore, update: WeightUpdate, state: str) -> None:
        relied.append(("target", device.lost(Path(update.path))))
        target(self, update, state)

    def acknowledging(self: RunStore, ids: list[bytes]) -> int:
        if ids:
            name = (run.checkpoint_dir / "CURRENT").read_text().strip()
            saved = int(name.partition(".")[0].removeprefix("step_"))
            # later steps, trained while the checkpoint was written, are not acknowledged
            later = {p.path for p in all_locations(run.dir / "journal") if p.step > saved}
            later -= {p.path for p in all_locations(run.dir / "journal") if p.step <= saved}
            names = {str(p.relative_to(run.dir.parent)) for path in later for p in (path, index_of(path))}
            relied.append(("ack", [lost for lost in device.lost(run.dir) if lost not in names]))
            ledger = Ledger.from_state(json.loads((run.checkpoint_dir / name / "manifest.json").read_text())["ledger"])
            entries = [fields for id_ in ids for _, fields in db.xrange(self.keys.traj, id_, id_)]
            unknown.extend(seq for e in entries if (seq := read_header(e[b"h"]).seq) not in ledger)
        return ack(self, ids)

    monkeypatch.setattr(RunStore, "set_owner", owning)
    monkeypatch.setattr(RunStore, "target", announcing)
    monkeypatch.setattr(RunStore, "ack", acknowledging)
    with tiny_learner.Player(address, run.id):
        assert serve(run, settings) == 0
    assert len(list((run.dir / "journal").glob("*.bin"))) > 2, "the journal rolled over"
    kinds = [kind for kind, _ in relied]
    assert kinds.count("epoch") == 1 and kinds.count("target") >= run.steps and kinds.count("ack") >= 3
    assert [(kind, lost) for kind, lost in relied if lost] == []
    assert unknown == [], "acknowledged, and no checkpoint says what became of it"
    moved = [(target.name, [path for path in lost if path.startswith("run/")]) for target, lost in device.renamed]
    assert [move for move in moved if move[1]] == []
