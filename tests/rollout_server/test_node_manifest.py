"""A directory that others can write to: only files in the manifest are accepted, and they are verified."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from protocol.messages import WeightUpdate
from rollout_server.node.weights import manifest as module
from rollout_server.node.weights.manifest import WeightsCorrupt, verify

Harm = Callable[[Path], object]


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A sound version of two files."""
    path = tmp_path / "weights" / "v1.7"
    path.mkdir(parents=True)
    files = {"model.safetensors": b"w" * 5000, "config.json": b"{}"}
    for name, raw in files.items():
        (path / name).write_bytes(raw)
    listed = {name: {"bytes": len(raw), "sha256": sha256(raw).hexdigest()} for name, raw in files.items()}
    (path / "manifest.json").write_text(json.dumps({"version": "1.7", "digest": "d", "files": listed, "tensors": 1}))
    return path


def update(path: Path) -> WeightUpdate:
    return WeightUpdate(run="r", epoch=1, step=7, digest="d", path=str(path))


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """The manifest, changed by another user with write access."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def list_as(name: str) -> Harm:
    """The weights under another name."""
    return lambda path: rewrite(path, lambda m: m["files"].update({name: m["files"]["model.safetensors"]}))


def link_out(path: Path) -> None:
    outside = path.parent.parent / "secret"
    (path / "model.safetensors").rename(outside)
    (path / "model.safetensors").symlink_to(outside)


def pipe(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


def nested(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 200_000)


def test_a_sound_version_passes_and_hidden_files_of_the_file_system_do_not_matter(version: Path) -> None:
    (version / ".nfs0000001").touch()
    assert verify(update(version)) == version


@pytest.mark.fault(42, 43)
@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda p: (p / "model.safetensors").write_bytes(b"w" * 4999), "4999 bytes, but 5000 in the manifest"),
        (lambda p: (p / "model.safetensors").write_bytes(b"w" * 4999 + b"v"), "sha256 differs"),
        (lambda p: (p / "model.safetensors").write_bytes(b"w" * 2500 + b"u" * 2500), "sha256 differs"),
        (lambda p: (p / "model.safetensors").write_bytes(b"o" * 5000), "sha256 differs"),
        (lambda p: rewrite(p, lambda m: m.update(version="1.6", digest="c")), "the manifest is of 1.6 c, not of 1.7"),
        (lambda p: (p / "model.safetensors").unlink(), "No such file"),
        (lambda p: (p / "manifest.json").unlink(), "cannot use its manifest"),
        (lambda p: (p / "manifest.json").write_text('{"version": "1.7"'), "cannot use its manifest"),
    ],
    ids=["cut", "flipped", "swapped", "old bytes", "old version", "missing", "no manifest", "half a manifest"],
)
def test_what_a_crash_or_a_bad_disk_leaves_is_refused(version: Path, harm: Harm, why: str) -> None:
    harm(version)
    with pytest.raises(WeightsCorrupt, match=why):
        verify(update(version))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (list_as("../../secret.safetensors"), "not a plain file name"),
        (list_as("/etc/passwd"), "not a plain file name"),
        (list_as(".."), "not a plain file name"),
        (list_as("a\nb"), "not a plain file name"),
        (list_as("x" * 300), "not a plain file name"),
        (list_as("manifest.json"), "not a plain file name"),
        (list_as("pytorch_model.bin"), "only safetensors are allowed"),
        (link_out, "Too many levels of symbolic links"),
        (pipe, "not a regular file"),
        (lambda p: (p / "pytorch_model.bin").touch(), "'pytorch_model.bin' is not listed in the manifest"),
        (lambda p: (p / "sub").mkdir(), "'sub' is not listed"),
        (lambda p: rewrite(p, lambda m: m["files"]["config.json"].update(bytes=-1)), "exceed the limits"),
        (lambda p: rewrite(p, lambda m: m["files"]["config.json"].update(bytes=1 << 60)), "exceed the limits"),
        (lambda p: rewrite(p, lambda m: m.update(files=["model.safetensors"])), "cannot use its manifest"),
        (nested, "cannot use its manifest"),
    ],
    ids=["up", "absolute", "parent", "newline", "long", "itself", "pickle", "link", "pipe", "unlisted", "folder",
         "negative", "huge", "list", "nested"],
)  # fmt: skip
def test_unlisted_and_invalid_files_are_refused(version: Path, harm: Harm, why: str) -> None:
    harm(version)
    with pytest.raises(WeightsCorrupt, match=why):
        verify(update(version))


def test_a_manifest_of_any_size_is_not_read(version: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANIFEST_BYTES", 100)
    with pytest.raises(WeightsCorrupt, match="larger than 100 bytes"):
        verify(update(version))


def test_a_version_that_is_a_link_is_refused(version: Path, tmp_path: Path) -> None:
    (tmp_path / "weights" / "v1.8").symlink_to(version)
    with pytest.raises(WeightsCorrupt, match="is a symbolic link"):
        verify(update(tmp_path / "weights" / "v1.8"))
