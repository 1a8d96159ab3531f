"""Atomic files: a reader sees the old content or the new; durable ones are flushed, file and folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.runtime.files import atomic_write, below, create_once, durable_mkdir, entries, fsync_tree


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was flushed, in order."""
    names: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return names


@pytest.mark.parametrize(("data", "read"), [("é", b"\xc3\xa9"), (b"\0", b"\0"), ((b"a", b"b"), b"ab")])
def test_the_content_is_replaced(tmp_path: Path, data: str | bytes, read: bytes) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    atomic_write(path, data, durable=False)
    assert path.read_bytes() == read and os.listdir(tmp_path) == ["f"]


def test_durable_content_is_flushed_before_its_name(tmp_path: Path, flushed: list[str]) -> None:
    atomic_write(tmp_path / "a", "x", durable=False)
    assert flushed == []
    atomic_write(tmp_path / "b", "x", durable=True)
    assert flushed[0].startswith(".b.") and flushed[1:] == [tmp_path.name]


def test_what_fails_half_way_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    def torn() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "No space left on device")

    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, torn(), durable=True)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["f"]


def test_a_file_is_created_once(tmp_path: Path) -> None:
    assert create_once(tmp_path / "f", "first", mode=0o600) and not create_once(tmp_path / "f", "second")
    assert (tmp_path / "f").read_text() == "first" and (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["f"]


def test_missing_parents_are_created_and_flushed(tmp_path: Path, flushed: list[str]) -> None:
    durable_mkdir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and flushed == [tmp_path.name, "a"]


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "e1").touch()
    (tmp_path / "other").touch()
    assert entries(tmp_path, "e*") == [tmp_path / "e1"] and entries(tmp_path / "absent", "*") == []
    with pytest.raises(NotADirectoryError):
        entries(tmp_path / "e1", "*")


def test_a_tree_with_a_folder_that_cannot_be_listed_is_not_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").touch()
    assert below(tmp_path) == [tmp_path / "in", tmp_path / "in" / "file"]
    scan = os.scandir

    def failing(path: str) -> object:
        if Path(path).name == "in":
            raise OSError(errno.EIO, "Input/output error", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", failing)  # root may list every folder
    with pytest.raises(OSError, match="Input/output error"):
        below(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        fsync_tree(tmp_path)
