"""The journal gives back what was trained, also after a crash in the middle of a frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from learner import journal as module
from learner.journal import Journal, read_journal
from protocol.header import seal
from protocol.testing import make_group
from protocol.versions import PolicyVersion


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Callable[[], Journal]]:
    """Opens the journal in tmp_path, as each learner start does."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(Journal(tmp_path)))


def append(journal: Journal, step: int, epoch: int, *seqs: int) -> None:
    journal.append(step, epoch, [seal(make_group(seq)) for seq in seqs])


def seqs(folder: Path, **how: object) -> list[tuple[int, int, int]]:
    return [(e.epoch, e.step, e.group.seq) for e in read_journal(folder, **how)]


def test_groups_come_back_whole_and_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    append(journal, 1, 1, 3, 1)
    append(journal, 2, 1, 2)
    assert seqs(tmp_path / "j") == [(1, 1, 3), (1, 1, 1), (1, 2, 2)], "also while the file is open"
    journal.flush()
    journal.close()
    (entry, *_) = read_journal(tmp_path / "j")
    assert (entry.group.trajectories[0].ids == make_group(3).trajectories[0].ids).all()


def test_steps_that_a_crash_rolled_back_are_left_out(tmp_path: Path, journal: Callable[[], Journal]) -> None:
    first, second = journal(), journal()
    for step in (1, 2, 3):
        append(first, step, 1, step)
    append(second, 2, 2, 30)
    append(second, 3, 2, 20)
    assert len(seqs(tmp_path)) == 5
    survived = seqs(tmp_path, lineage=[PolicyVersion(1, 0), PolicyVersion(2, 1)])
    assert survived == [(1, 1, 1), (2, 2, 30), (2, 3, 20)]


@pytest.mark.parametrize("harm", ["cut body", "cut head", "flip"])
def test_a_damaged_frame_ends_its_file_and_no_other(tmp_path: Path, journal: Callable[[], Journal], harm: str) -> None:
    first = journal()
    append(first, 1, 1, 1, 2)
    first.close()
    (path,) = tmp_path.iterdir()
    raw = path.read_bytes()
    if harm == "cut body":
        path.write_bytes(raw[:-5])
    elif harm == "cut head":
        path.write_bytes(raw + b"\x01\x02\x03")
    else:
        path.write_bytes(raw[:-50] + bytes([raw[-50] ^ 1]) + raw[-49:])
    append(journal(), 2, 2, 3)
    kept = [(1, 1, 1), (1, 1, 2)] if harm == "cut head" else [(1, 1, 1)]
    assert seqs(tmp_path) == [*kept, (2, 2, 3)]


def test_files_are_rotated(tmp_path: Path, journal: Callable[[], Journal], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 100)
    written = journal()
    for step in range(1, 4):
        append(written, step, 1, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"groups-{n:05d}.bin" for n in (1, 2, 3)]
    assert [step for _, step, _ in seqs(tmp_path)] == [1, 2, 3]
