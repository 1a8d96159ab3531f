"""The journal gives back what was trained, also after a crash in the middle of a frame or without its index."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from learner.checkpoint import journal as module
from learner.checkpoint.journal import (
    RECORD_BYTES,
    BatchConditions,
    GroupJournal,
    all_locations,
    frames,
    index_of,
    index_record,
    locations,
    read_journal,
)
from protocol.header import read_header, seal
from protocol.versions import PolicyVersion
from tests.support.messages import make_group


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Callable[[], GroupJournal]]:
    """Opens the journal in tmp_path, as each learner start does."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(GroupJournal(tmp_path)))


def append(journal: GroupJournal, step: int, epoch: int, *seqs: int) -> None:
    journal.append(step, epoch, [seal(make_group(seq)) for seq in seqs])


def seqs(folder: Path, **how: object) -> list[tuple[int, int, int]]:
    return [(e.epoch, e.step, e.group.seq) for e in read_journal(folder, **how)]


def test_groups_come_back_whole_and_in_order(tmp_path: Path) -> None:
    journal = GroupJournal(tmp_path / "j")
    append(journal, 1, 1, 3, 1)
    append(journal, 2, 1, 2)
    assert seqs(tmp_path / "j") == [(1, 1, 3), (1, 1, 1), (1, 2, 2)], "also while the file is open"
    journal.flush()
    journal.close()
    (entry, *_) = read_journal(tmp_path / "j")
    assert (entry.group.trajectories[0].ids == make_group(3).trajectories[0].ids).all()


def test_steps_that_a_crash_rolled_back_are_left_out(tmp_path: Path, journal: Callable[[], GroupJournal]) -> None:
    first, second = journal(), journal()
    for step in (1, 2, 3):
        append(first, step, 1, step)
    append(second, 2, 2, 30)
    append(second, 3, 2, 20)
    assert len(seqs(tmp_path)) == 5
    survived = seqs(tmp_path, lineage=[PolicyVersion(1, 0), PolicyVersion(2, 1)])
    assert survived == [(1, 1, 1), (2, 2, 30), (2, 3, 20)]


@pytest.mark.parametrize("harm", ["cut body", "cut head", "flip"])
def test_a_damaged_frame_ends_its_file_and_no_other(
    tmp_path: Path, journal: Callable[[], GroupJournal], harm: str
) -> None:
    first = journal()
    append(first, 1, 1, 1, 2)
    first.close()
    (path,) = tmp_path.glob("*.bin")
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


def test_files_are_rotated(
    tmp_path: Path, journal: Callable[[], GroupJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 100)
    written = journal()
    for step in range(1, 4):
        append(written, step, 1, step)
    assert sorted(p.name for p in tmp_path.glob("*.bin")) == [f"groups-{n:05d}.bin" for n in (1, 2, 3)]
    assert [step for _, step, _ in seqs(tmp_path)] == [1, 2, 3]


def test_a_step_can_be_found_and_read_alone(tmp_path: Path, journal: Callable[[], GroupJournal]) -> None:
    written = journal()
    conditions = BatchConditions(1, (PolicyVersion(1, 0),), 0.7, 2, ((1, 9),))
    append(written, 1, 1, 9)
    written.append(2, 1, [seal(make_group(s)) for s in (5, 4)], conditions)
    wanted = [p for p in all_locations(tmp_path) if p.step == 2]
    assert [p.seq for p in wanted] == [5, 4]
    for location, frame in frames(reversed(wanted)):
        assert BatchConditions.from_plain(frame["batch"]) == conditions
        assert read_header(frame["h"]).seq == location.seq


@pytest.mark.parametrize("harm", ["none", "missing", "short", "cut", "flip", "off by one", "ahead"])
def test_a_damaged_or_missing_index_is_rebuilt_identically(
    tmp_path: Path, journal: Callable[[], GroupJournal], harm: str
) -> None:
    written = journal()
    append(written, 1, 1, 3, 1, 2)
    (data,) = tmp_path.glob("*.bin")
    index, whole = index_of(data), locations(data)
    assert [p.seq for p in whole] == [3, 1, 2]
    good = index.read_bytes()
    harmed = {
        "none": good,
        "missing": b"",
        "short": good[: 2 * len(good) // 3],
        "cut": good[:-7],
        "flip": good[:50] + bytes([good[50] ^ 1]) + good[51:],
        "off by one": good[:RECORD_BYTES] + index_record(whole[1]._replace(offset=whole[1].offset - 1)),
        "ahead": good + good[-RECORD_BYTES:],  # names what the data does not hold
    }[harm]
    index.write_bytes(harmed)
    if harm == "missing":
        index.unlink()
    assert locations(data) == whole
    append(journal(), 2, 2, 7)
    assert index.read_bytes() == good, "the next learner start repairs it"


def test_a_damaged_group_costs_no_other_when_the_index_knows_where_they_are(
    tmp_path: Path, journal: Callable[[], GroupJournal]
) -> None:
    append(journal(), 1, 1, 3, 1, 2)
    (data,) = tmp_path.glob("*.bin")
    raw, location = bytearray(data.read_bytes()), locations(data)[1]
    raw[location.offset + 100] ^= 1
    data.write_bytes(raw)
    assert [seq for _, _, seq in seqs(tmp_path)] == [3, 2]


def test_a_journal_of_limited_size_loses_its_oldest_steps_but_none_that_is_needed(tmp_path: Path) -> None:
    one = len(seal(make_group(1))[1])
    with closing(GroupJournal(tmp_path, max_bytes=8 * one)) as written:
        for step in range(1, 21):
            append(written, step, 1, step)
        written.prune(needed_from=4)
        assert {step for _, step, _ in seqs(tmp_path)} >= set(range(4, 21))
        written.prune(needed_from=21)
        left = [step for _, step, _ in seqs(tmp_path)]
        assert left == list(range(left[0], 21)) and 3 < len(left) < 9
        size = sum(p.stat().st_size for p in tmp_path.iterdir())
        assert size <= 8 * one
        append(written, 21, 1, 21)
    assert seqs(tmp_path)[-1] == (1, 21, 21)


def test_a_full_disk_is_reported_once_and_damages_nothing(tmp_path: Path, journal: Callable[[], GroupJournal]) -> None:
    written = journal()
    append(written, 1, 1, 1)
    (data,) = tmp_path.glob("*.bin")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (data.stat().st_size + 500, hard))
    try:
        with pytest.raises(OSError):
            append(written, 2, 1, 2, 3)
        written.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append(journal(), 2, 2, 4)
    assert seqs(tmp_path) == [(1, 1, 1), (2, 2, 4)]


@pytest.mark.parametrize("how", [{"last": 6}, {"seq": 3}, {"last": 1, "seq": 3}])
def test_a_part_of_a_journal_is_read_without_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, int]
) -> None:
    """Groups decoded, and files of the index read, in a short and in a long run."""
    monkeypatch.setattr(module, "FILE_BYTES", 4_000)
    decoded: list[object] = []
    looked: set[Path] = set()
    decode, look = module.decode_as, module.locations
    monkeypatch.setattr(module, "decode_as", lambda *given: decoded.append(given) or decode(*given))
    monkeypatch.setattr(module, "locations", lambda path: looked.add(path) or look(path))
    costs = []
    for steps in (10, 80):
        folder = tmp_path / f"j{steps}"
        with closing(GroupJournal(folder)) as journal:
            for step in range(1, steps + 1):
                append(journal, step, 1, 2 * step - 1, 2 * step)
        whole = seqs(folder)
        decoded.clear()
        looked.clear()
        expected = [entry for entry in whole if how.get("seq") in (None, entry[2])][-how.get("last", 0) :]
        assert seqs(folder, **how) == expected
        costs.append((len(decoded), len(looked) if "seq" not in how else 0))
    assert costs[0] == costs[1] and costs[0][0] == len(expected)


def test_the_last_groups_are_those_of_steps_that_survived(tmp_path: Path, journal: Callable[[], GroupJournal]) -> None:
    first, second = journal(), journal()
    for step in (1, 2, 3):
        append(first, step, 1, step)
    append(second, 2, 2, 30)
    lineage = (PolicyVersion(1, 0), PolicyVersion(2, 1))
    assert seqs(tmp_path, lineage=lineage, last=2) == [(1, 1, 1), (2, 2, 30)]
    assert seqs(tmp_path, lineage=lineage, last=9) == [(1, 1, 1), (2, 2, 30)]
