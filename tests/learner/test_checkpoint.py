"""Checkpoints: all or nothing, in whatever moment the writer dies, and never silently wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import ANY, MagicMock, Mock

import pytest

from learner.checkpoint import checkpoint as module
from learner.checkpoint.checkpoint import CheckpointFailed, Checkpoints
from learner.checkpoint.signing import RunKey, run_key
from learner.checkpointing import CheckpointWriter
from learner.config.learner import LearnerSettings
from learner.delivery.state import DeliveryState
from learner.main import resumed_engine
from protocol.errors import Fenced, UserError
from protocol.ledger import Outcome
from protocol.runtime import files
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

LINEAGE = [PolicyVersion(1, 0), PolicyVersion(2, 4)]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "c", keep=2)


def save(directory: Path) -> None:
    (directory / "ranks").mkdir()
    (directory / "model.pt").write_bytes(b"m" * 1000)
    (directory / "ranks" / "0.pt").write_bytes(b"o" * 10)


def write(checkpoints: Checkpoints, step: int, epoch: int = 2, **over: Any) -> Path:
    delivery = DeliveryState(step=step)
    arguments = {"save": save, "confirm": lambda: None, "lineage": LINEAGE} | over
    return checkpoints.write(delivery.to_state() | {"run": "t"}, step=step, epoch=epoch, **arguments)


def test_what_was_written_is_loaded(checkpoints: Checkpoints, tmp_path: Path) -> None:
    assert checkpoints.load() is None and checkpoints.current_epoch() == 0
    path = write(checkpoints, 7)
    assert path.name == "step_7.e2" and (tmp_path / "c" / "CURRENT").read_text() == "step_7.e2\n"
    found = checkpoints.load()
    assert found and (found.epoch, found.facts["step"], list(found.lineage)) == (2, 7, LINEAGE)
    assert set(found.facts["files"]) == {"state/model.pt", "state/ranks/0.pt"}
    assert (found.path / "state" / "model.pt").read_bytes() == b"m" * 1000
    assert checkpoints.current_epoch() == 2 and checkpoints.committed(7, 2) and not checkpoints.committed(7, 1)


def test_the_newest_two_are_kept_and_the_committed_one_always(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for step in (30, 40):
        write(checkpoints, step, epoch=1)
    write(checkpoints, 35, epoch=2)  # a successor that began at 30
    left = {p.name for p in (tmp_path / "c").iterdir()}
    assert left == {"CURRENT", "step_40.e1", "step_35.e2"}
    again = [write(checkpoints, 35).name for _ in range(2)]
    assert again == ["step_35.e2.r2", "step_35.e2.r3"], "what is in force is never touched"
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"CURRENT", *again}
    found = checkpoints.load()
    assert found is not None and found.path.name == again[-1] and checkpoints.committed(35, 2)


@pytest.mark.fault(9)
@pytest.mark.parametrize("moment", ["save", "listing", "manifest", "confirm", "rename", "current"])
def test_dying_at_any_moment_leaves_the_previous_one_in_force(
    checkpoints: Checkpoints, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    write(checkpoints, 4)
    over: dict[str, Any] = {moment: die} if moment in ("save", "confirm") else {}
    real = module.atomic_write
    if moment in ("manifest", "current"):
        wanted = "manifest.json" if moment == "manifest" else "CURRENT"
        monkeypatch.setattr(module, "atomic_write", lambda p, t, **k: die() if p.name == wanted else real(p, t, **k))
    if moment == "listing":
        monkeypatch.setattr(module, "_listing", die)
    if moment == "rename":
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda p, t: die() if p.name == ".step_8.e2.tmp" else rename(p, t))
    # SIGKILL runs no cleanup.
    monkeypatch.setattr(module.shutil, "rmtree", lambda *a, **k: None)
    with pytest.raises(Killed):
        write(checkpoints, 8, **over)
    monkeypatch.undo()
    assert checkpoints.load().facts["step"] == 4
    write(checkpoints, 8)
    assert checkpoints.load().facts["step"] == 8


@pytest.mark.fault(41)
def test_a_full_disk_is_reported_and_leaves_no_files(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def full(directory: Path) -> None:
        save(directory)
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    write(checkpoints, 4)
    with pytest.raises(CheckpointFailed, match=r"step_8\.e2 could not be written"):
        write(checkpoints, 8, save=full)
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"CURRENT", "step_4.e2"}


def listed_by_a_rank(directory: Path) -> None:
    save(directory)
    digest = hashlib.sha256(b"o" * 10).hexdigest()
    (directory / "ranks" / "written.00003.json").write_text(json.dumps({"0.pt": {"bytes": 10, "sha256": digest}}))


def test_a_file_that_its_rank_has_hashed_is_not_read_again(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    hashed = module.sha256_file
    monkeypatch.setattr(module, "sha256_file", lambda path: (read.append(path.name), hashed(path))[1])
    path = write(checkpoints, 8, save=listed_by_a_rank)
    assert read == ["model.pt"]
    found = checkpoints.load()
    assert found is not None and set(found.facts["files"]) == {"state/model.pt", "state/ranks/0.pt"}
    assert not list(path.rglob("written.*"))


def planned_by_rank_0(directory: Path) -> None:
    listed_by_a_rank(directory)
    (directory / "ranks" / module.PLANNED).write_text('["0.pt", "1.pt", "written.00003.json", "written.00004.json"]')


def written_by_the_other_rank(directory: Path) -> None:
    (directory / "ranks" / "1.pt").write_bytes(b"1" * 4)
    entry = {"1.pt": module.written_file(directory / "ranks" / "1.pt")}
    (directory / "ranks" / "written.00004.json").write_text(json.dumps(entry))


@pytest.mark.fault(62)
def test_files_of_ranks_without_the_shared_folder_commit_nothing_and_remove_nothing(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VISIBLE_S", 0.2)
    write(checkpoints, 4)
    for step in (8, 12, 16):
        with pytest.raises(CheckpointFailed, match=r"is not here .*1\.pt.*share the folder"):
            write(checkpoints, step, save=planned_by_rank_0)
    found = checkpoints.load()
    assert found is not None and found.facts["step"] == 4, "the older ones stay"


def test_files_that_another_host_shows_late_are_waited_for(checkpoints: Checkpoints) -> None:
    late: list[threading.Timer] = []

    def save(directory: Path) -> None:
        planned_by_rank_0(directory)
        late.append(threading.Timer(0.3, written_by_the_other_rank, [directory]))
        late[0].start()

    path = write(checkpoints, 4, save=save)
    found = checkpoints.load()
    assert found is not None
    assert set(found.facts["files"]) == {"state/model.pt", "state/ranks/0.pt", "state/ranks/1.pt"}
    assert not [*path.rglob("written.*"), *path.rglob(module.PLANNED)]


@pytest.mark.fault(9)
def test_what_killed_learners_left_unfinished_is_removed_before_the_next_one_is_written(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = write(checkpoints, 4).parent
    for name in (".step_5.e1.tmp", ".step_6.e2.tmp", ".step_7.e9.tmp"):
        (folder / name / "state").mkdir(parents=True)

    def save(directory: Path) -> None:
        assert sorted(p.name for p in folder.glob(".step_*")) == [".step_7.e9.tmp", directory.parent.name]
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointFailed):
        write(checkpoints, 8, epoch=3, save=save)


def test_what_a_rank_has_hashed_is_what_must_be_there(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VISIBLE_S", 0.1)

    def altered(directory: Path) -> None:
        listed_by_a_rank(directory)
        (directory / "ranks" / "0.pt").write_bytes(b"x" * 10)

    def cut_short(directory: Path) -> None:
        listed_by_a_rank(directory)
        (directory / "ranks" / "0.pt").write_bytes(b"o" * 9)

    write(checkpoints, 4)
    with pytest.raises(CheckpointFailed, match="has 9 bytes, but its rank wrote 10"):
        write(checkpoints, 8, save=cut_short)
    assert checkpoints.load().facts["step"] == 4
    write(checkpoints, 8, save=altered)
    with pytest.raises(UserError, match=r"0\.pt is damaged"):
        checkpoints.load()


def test_a_current_that_could_not_be_moved_is_moved_by_the_next_try(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.atomic_write

    def full(path: Path, text: str, *, durable: bool, **_: Any) -> None:
        if path.name == "CURRENT":
            raise OSError(28, "No space left on device")
        real(path, text, durable=durable)

    monkeypatch.setattr(module, "atomic_write", full)
    with pytest.raises(CheckpointFailed):
        write(checkpoints, 8)
    assert checkpoints.load() is None
    monkeypatch.undo()
    write(checkpoints, 8)
    assert checkpoints.load().facts["step"] == 8


def test_a_fenced_learner_commits_nothing(checkpoints: Checkpoints) -> None:
    def fenced() -> None:
        raise Fenced("gone")

    write(checkpoints, 4)
    with pytest.raises(Fenced):
        write(checkpoints, 8, confirm=fenced)
    assert checkpoints.load().facts["step"] == 4


@pytest.mark.fault(9)
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "added", "manifest", "format", "directory", "current"])
def test_damage_is_refused_by_the_name_of_the_file(checkpoints: Checkpoints, tmp_path: Path, harm: str) -> None:
    write(checkpoints, 4)
    path = write(checkpoints, 8)
    file = path / "state" / "model.pt"
    if harm == "flip":
        file.write_bytes(b"m" * 999 + b"n")
    elif harm == "cut":
        file.write_bytes(b"m" * 999)
    elif harm == "remove":
        file.unlink()
    elif harm == "added":
        (file := path / "state" / "model-2.pt").touch()
    elif harm == "manifest":
        (file := path / "manifest.json").write_text("{")
    elif harm == "format":
        file = path / "manifest.json"
        file.write_text(json.dumps({"format": 99}))
    elif harm == "directory":
        file = path / "manifest.json"
        shutil.rmtree(path)
    else:
        (file := tmp_path / "c" / "CURRENT").write_text("../../etc")
    with pytest.raises(UserError) as caught:
        checkpoints.load()
    assert str(file) in caught.value.what and "step_4.e2" in caught.value.todo


# --- signatures ---


KEY = RunKey("k" * 64, "the test")


@pytest.fixture
def signed(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "c", keep=2, key=KEY)


def test_a_signed_checkpoint_is_loaded_by_its_key_and_by_those_who_only_look(
    signed: Checkpoints, tmp_path: Path
) -> None:
    path = write(signed, 4)
    found = signed.load()
    assert found and found.facts["signature"] == {"key": KEY.name, "hmac_sha256": ANY}
    assert Checkpoints(tmp_path / "c", keep=2).load()
    # the same content in another order is the same content
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(dict(reversed(manifest.items()))))
    assert signed.load()


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("unsigned", "it is not signed"),
        ("other key", "signed with another key .*; this run.s key is .* from the test"),
        ("changed", "its signature is invalid"),
        ("half", "its signature is invalid"),
    ],
)
def test_a_checkpoint_that_the_key_refuses_is_loaded_only_with_trust_checkpoint(
    signed: Checkpoints, tmp_path: Path, harm: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = {"unsigned": None, "other key": RunKey("o" * 16, "elsewhere")}.get(harm, KEY)
    path = write(Checkpoints(tmp_path / "c", keep=2, key=key), 4)
    manifest = json.loads((path / "manifest.json").read_text())
    if harm == "changed":
        manifest["tally"]["redelivered"] = 1
    if harm == "half":
        manifest["signature"] = {"key": KEY.name}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=why) as caught:
        signed.load()
    assert str(path) in caught.value.what and "--trust-checkpoint" in caught.value.todo
    trusting = Checkpoints(tmp_path / "c", keep=2, key=KEY, trust=True)
    assert trusting.load() and "--trust-checkpoint: resuming" in caplog.text
    write(trusting, 8)
    assert signed.load().facts["step"] == 8, "what is written from then on is signed"


def test_a_checkpoint_under_another_ones_name_is_refused_and_its_epoch_is_no_floor(
    signed: Checkpoints, tmp_path: Path
) -> None:
    write(signed, 4)
    write(signed, 8).rename(tmp_path / "c" / "step_999999.e77")
    (tmp_path / "c" / "CURRENT").write_text("step_999999.e77\n")
    for look in (signed.load, signed.current_epoch):
        with pytest.raises(UserError) as caught:
            look()
        assert "it is for step 8 of epoch 2" in caught.value.why and "step_4.e2" in caught.value.todo
    write(signed, 12, epoch=78)
    assert signed.current_epoch() == 78, "a good one may follow"


def test_going_back_to_an_older_checkpoint_is_logged(
    signed: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (4, 8):
        write(signed, step)
    assert signed.load().facts["step"] == 8 and not caplog.records
    (tmp_path / "c" / "CURRENT").write_text("step_4.e2\n")
    assert signed.load().facts["step"] == 4
    assert "CURRENT names step_4.e2, although step_8.e2 is newer" in caplog.text


@pytest.mark.parametrize("what", ["state/model.pt", "state/ranks", "manifest.json", "."])
def test_a_link_is_refused_whatever_it_leads_to(signed: Checkpoints, tmp_path: Path, what: str) -> None:
    write(signed, 4)
    target = write(signed, 8) / what
    elsewhere = tmp_path / "elsewhere"
    target.rename(elsewhere)
    (tmp_path / "c" / "step_8.e2" / what).symlink_to(elsewhere)
    with pytest.raises(UserError, match="is damaged") as caught:
        signed.load()
    assert str(tmp_path / "c" / "step_8.e2") in caught.value.what


@pytest.mark.parametrize("harm", ["written", "exchanged", "exchanged and put back", "folder put back", "removed"])
def test_what_changes_between_check_and_use_is_refused(signed: Checkpoints, tmp_path: Path, harm: str) -> None:
    path = write(signed, 8)
    found = signed.load()
    found.confirm_unchanged()
    time.sleep(0.02)  # a tick of the file system's clock
    state = path / "state"
    file = state / "model.pt"
    if harm == "written":
        file.write_bytes(b"n" * 1000)
    elif harm == "removed":
        file.unlink()
    elif harm == "folder put back":
        state.rename(tmp_path / "aside")
        state.mkdir()
        state.rmdir()
        (tmp_path / "aside").rename(state)
    else:
        file.rename(tmp_path / "aside")
        file.write_bytes(b"m" * 1000)
        if harm == "exchanged and put back":
            (tmp_path / "aside").rename(file)
    with pytest.raises(UserError, match="the checkpoint changed while it was read"):
        found.confirm_unchanged()


def test_a_learner_refuses_a_state_that_changed_while_it_was_read(signed: Checkpoints) -> None:
    class Slow:
        def load_state(self, directory: Path) -> None:
            time.sleep(0.02)
            (directory / "model.pt").write_bytes(b"n" * 1000)

    write(signed, 8)
    run, settings = RunSettings(id="t"), LearnerSettings()
    with pytest.raises(UserError, match=r"the checkpoint changed while it was read: .*model\.pt"):
        resumed_engine(lambda *_: Slow(), run, settings, signed.load())  # type: ignore[arg-type,return-value]


@pytest.mark.fault(11)
def test_a_learner_suspended_between_lease_check_and_rename_moves_no_pointer(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    def sleep_while_a_successor_commits() -> None:
        write(Checkpoints(tmp_path / "c", keep=2), 5, epoch=3)

    write(checkpoints, 4)
    with pytest.raises(Fenced, match="epoch 3 has committed"):
        write(checkpoints, 8, confirm=sleep_while_a_successor_commits)
    assert checkpoints.load().facts["step"] == 5
    assert not list((tmp_path / "c").glob(".*.tmp"))


@pytest.mark.fault(11)
def test_a_learner_suspended_before_it_moves_the_pointer_keeps_its_successor_waiting(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    successor = threading.Thread(target=lambda: write(Checkpoints(tmp_path / "c", keep=2), 5, epoch=3))
    moves: list[str] = []

    def sleeping(path: Path, text: str, *, durable: bool, guard: Any = None) -> None:
        with guard(path) if guard else nullcontext():
            if path.name == "CURRENT" and not moves:
                successor.start()
                successor.join(0.3)
                assert successor.is_alive() and not moves, "its own commit waits"
            if path.name == "CURRENT":
                moves.append(text)
            atomic_write(path, text, durable=durable)

    atomic_write = module.atomic_write
    monkeypatch.setattr(module, "atomic_write", sleeping)
    write(checkpoints, 8)
    successor.join(10)
    assert moves == ["step_8.e2\n", "step_5.e3\n"] and checkpoints.load().facts["step"] == 5


def test_a_learner_suspended_while_it_moves_the_pointer_is_fenced_and_moves_nothing_afterwards(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(checkpoints, 4)
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.1)
    refuse, checks = checkpoints._refuse_replaced, []

    def sleep_under_the_lock(epoch: int) -> None:
        refuse(epoch)
        checks.append(epoch)
        if len(checks) == 2:
            write(Checkpoints(tmp_path / "c", keep=2), 5, epoch=3)

    monkeypatch.setattr(checkpoints, "_refuse_replaced", sleep_under_the_lock)
    with pytest.raises(CheckpointFailed, match=r"No such file or directory: .*\.CURRENT\."):
        write(checkpoints, 8)
    assert "going on without the lock of a learner that does not move" in caplog.text
    assert checkpoints.load().facts["step"] == 5
    assert not list((tmp_path / "c").glob(".*"))


def test_the_runs_key_is_made_once_and_only_we_can_read_it(tmp_path: Path) -> None:
    first = run_key(tmp_path / "run", {})
    file = tmp_path / "run" / "run.key"
    assert file.stat().st_mode & 0o777 == 0o600 and len(file.read_text().strip()) == 64
    assert run_key(tmp_path / "run", {}).name == first.name and first.source == str(file)
    assert file.read_text().strip() not in repr(vars(first).keys()) + first.name
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"run.key"}


def test_the_key_may_come_from_the_environment_or_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("f" * 32 + "\n")
    named = run_key(tmp_path / "run", {"FORAY_RUN_KEY_FILE": str(tmp_path / "secret")})
    given = run_key(tmp_path / "run", {"FORAY_RUN_KEY": "f" * 32, "FORAY_RUN_KEY_FILE": "/nowhere"})
    assert named.name == given.name and not (tmp_path / "run").exists(), "no key is made where one is given"
    for environ, what in (
        ({"FORAY_RUN_KEY_FILE": str(tmp_path / "missing")}, "cannot read the run key"),
        ({"FORAY_RUN_KEY": "short"}, "5 characters"),
    ):
        with pytest.raises(UserError, match=what):
            run_key(tmp_path / "run", environ)


def writer(**checkpoints: Any) -> CheckpointWriter:
    """The writer of a learner at step 3 of a run, over the given calls to its checkpoints."""
    ctx = MagicMock(checkpoints=Mock(**checkpoints))
    ctx.delivery.configure_mock(step=3, **{"has_uncommitted.return_value": False})
    ctx.delivery.ledger.configure_mock(settled=12, counts={Outcome.DEAD: 0})
    ctx.delivery.counters.skipped_steps, ctx.run.groups_per_step = 0, 4
    ctx.settings.configure_mock(checkpoint_every=3, checkpoint_s=1e9)
    return CheckpointWriter(ctx, Mock(), [])


def test_a_state_that_its_checkpoint_contains_counts_as_written() -> None:
    made = writer(**{"committed.return_value": True})
    assert made.begin() is True and made.checkpoint() is True
    made.ctx.checkpoints.begin.assert_not_called()


def test_a_checkpoint_that_failed_is_unfinished_until_it_is_written() -> None:
    made = writer(**{"committed.return_value": False, "begin.side_effect": CheckpointFailed("no space")})
    assert not made.advance()
    assert not made.begin() and made.advance()
