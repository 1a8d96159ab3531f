"""Checkpoints: policy, optimiser and delivery state in one directory, renamed into place and named in `CURRENT`.

Write order: temporary directory, manifest last, flush, confirm the lease, rename, replace CURRENT. Entries may be
acknowledged only after `commit` has returned. A crash at any point leaves the previous checkpoint current and every
entry since then pending.

The manifest lists every file with its sha256 and is signed with the run's key (`learner.checkpoint.signing`), so a
learner resumes only from an unmodified checkpoint of this run. An unsigned checkpoint (from an older version, or from
another program: the two cannot be distinguished) is refused like a foreign one. If you know its origin, pass
--trust-checkpoint once; the next checkpoint is signed.

The manifest contains the checkpoint's name, step and epoch. `CURRENT` is not signed: edit it to go back to an older
checkpoint of the run. Anyone with write access to the folder can do the same; a newer checkpoint that is skipped is
logged. Every rank reads the state from its files after they were hashed. `confirm_unchanged` checks again after all
have read, and refuses files that were written or exchanged meanwhile. It cannot detect a writer that resets
timestamps or writes below the file system.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from learner.checkpoint.signing import SIGNATURE, RunKey
from protocol.errors import Fenced, ForayError, UserError
from protocol.run_meta import LINEAGE_FIELD, lineage_id_in
from protocol.runtime.files import (
    atomic_write,
    below,
    durable_mkdir,
    folder_lock,
    fsync_path,
    fsync_tree,
    open_regular,
    sha256_file,
    sha256_stream,
)
from protocol.runtime.progress import Progress, Say
from protocol.versions import PolicyVersion

log = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT = 1
CURRENT = "CURRENT"
MANIFEST = "manifest.json"
STATE = "state"
WRITTEN = "written"
"""A rank of the train engine may leave `written.RANK.json` in a folder of its state: file name -> {bytes, sha256} of
the files that it has written, flushed and hashed. They are removed from the checkpoint."""
PLANNED = "planned.json"
"""Rank 0 may leave this list of the files that all ranks together must leave in the folder. It is removed likewise."""
VISIBLE_S = 90.0
"""Patience for files of other ranks, in seconds: NFS caches a directory and its files for up to 60 s (acdirmax)."""
LOOK_S = 0.1
"""Pause between two looks for them."""
HASHING = min(8, os.cpu_count() or 1)
"""Threads that hash files. hashlib releases the interpreter lock: about 1.8 GB/s each."""
FileStamp = tuple[int, ...]
"""Device, inode, size, mtime and ctime of a file or folder."""
_NAME = re.compile(r"^step_([0-9]{1,18})\.e([0-9]{1,18})(?:\.r([0-9]{1,9}))?$")
"""Step, epoch and revision; one step can have several revisions, for decisions between two steps."""


class CheckpointFailed(ForayError):
    """Nothing was committed; the previous checkpoint is still current."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed and verified checkpoint.

    path     its directory; `path / "state"` belongs to the train engine
    epoch    number of the learner start that wrote it
    lineage  first version of each learner start
    facts    the whole manifest: ledger, counters, step and the learner's additions
    looks    stamp of every file and folder when it was hashed
    """

    path: Path
    epoch: int
    lineage: tuple[PolicyVersion, ...]
    facts: dict[str, Any]
    looks: Mapping[Path, FileStamp]

    def confirm_unchanged(self) -> None:
        """Raise UserError if the files changed since they were verified. Call it after the state was read."""
        for path, look in self.looks.items():
            if (now := _look(path)) != look:
                raise UserError(
                    f"the checkpoint changed while it was read: {path}",
                    why="a file was written, moved or removed after its sha256 was checked"
                    if now
                    else "it no longer exists",
                    todo="find the process that writes to this directory, stop it, and start the learner again",
                )


@dataclass(frozen=True)
class PartialCheckpoint:
    """A checkpoint that is being written.

    path      its temporary directory
    epoch     number of the learner start that writes it
    manifest  content of the manifest, without the files
    """

    name: str
    path: Path
    epoch: int
    manifest: dict[str, Any]

    @property
    def state(self) -> Path:
        """Return the train engine's directory."""
        return self.path / STATE


class Checkpoints:
    """The checkpoints of one run.

    keep   number of newest checkpoints to keep
    key    signs what is written and must have signed what is loaded. None: neither (for read-only use)
    trust  load a checkpoint that the key refuses, with a warning
    kept   returns the names of further checkpoints to keep
    """

    def __init__(self, folder: Path, keep: int, *, key: RunKey | None = None, trust: bool = False) -> None:
        self._folder, self._keep, self._key, self._trust = folder, keep, key, trust
        self.kept: Callable[[], Collection[str]] = tuple

    def current_epoch(self) -> int:
        """Return the epoch in the committed checkpoint's manifest, 0 if there is none: the next epoch is higher.

        Raises UserError as `load` does, but does not check the files.
        """
        facts = self.manifest()
        return 0 if facts is None else int(facts["epoch"])

    def manifest(self) -> dict[str, Any] | None:
        """Return the committed checkpoint's manifest, None if there is none. Raises UserError as `current_epoch`."""
        found = self._current()
        return None if found is None else self._manifest(found)

    def lineage_id(self) -> str | None:
        """Return the lineage in the committed checkpoint's manifest, unverified; "" if an older Foray wrote it, None if
        there is none.
        """
        facts = self.manifest()
        return None if facts is None else lineage_id_in(str(facts.get(LINEAGE_FIELD)))

    def load(self, progress: Say = log.info) -> Checkpoint | None:
        """Return the committed checkpoint with every file verified.

        progress  prints a line, or shows bars
        Raises UserError for a damaged or unlisted file, or an invalid signature.
        """
        found = self._current()
        if found is None:
            return None
        path = self._folder / found[0]
        facts = self._manifest(found)
        self._warn_of_newer(found)
        inside = below(path)
        there = {str(p.relative_to(path)) for p in inside if not p.is_dir() or p.is_symlink()}
        if strange := sorted(there - {MANIFEST, *facts["files"]}):
            raise self._damaged(path / strange[0], "the manifest does not list it, so its content cannot be verified")
        looks = {p: _look(p) for p in (path, *inside) if p.is_dir()}
        files = {path / name: expected for name, expected in facts["files"].items()}
        sizes = {file: expected["bytes"] for file, expected in files.items()}
        name = f"verifying {path.name}"
        looks |= _of_each(sizes, lambda file: self._verified(file, files[file]), name, progress)
        lineage = tuple(PolicyVersion(*pair) for pair in facts["lineage"])
        return Checkpoint(path, int(facts["epoch"]), lineage, facts, looks)

    def write(
        self,
        facts: dict[str, Any],
        *,
        step: int,
        epoch: int,
        lineage: Sequence[PolicyVersion],
        save: Callable[[Path], None],
        confirm: Callable[[], None],
    ) -> Path:
        """Commit a checkpoint and return its directory: `begin`, `fill` and `commit` in one call.

        save  writes the train engine's state into a directory that exists and is empty
        """
        part = self.begin(facts, step=step, epoch=epoch, lineage=lineage)
        self.fill(part, lambda: save(part.state))
        return self.commit(part, confirm)

    def begin(
        self, facts: dict[str, Any], *, step: int, epoch: int, lineage: Sequence[PolicyVersion]
    ) -> PartialCheckpoint:
        """Create the directory of a new checkpoint. Raises CheckpointFailed if the disk is full or fails.

        The current checkpoint is never modified: if it has the same step and epoch, the new one gets the next revision.
        """
        name, revision = f"step_{step}.e{epoch}", 1
        if self.committed(step, epoch) and (found := self._current()):
            revision = _order(found)[2] + 1
            name += f".r{revision}"
        versions = [list(version) for version in lineage]
        place = {"step": step, "epoch": epoch, "revision": revision}
        manifest = {"format": FORMAT, **place, "lineage": versions, **facts}
        part = PartialCheckpoint(name, self._folder / f".{name}.tmp", epoch, manifest)
        with _discarded_unless_complete(part):
            durable_mkdir(self._folder)
            self._remove_unfinished(epoch)  # a killed learner's would fill the disk
            part.state.mkdir(parents=True)
        return part

    def fill(self, part: PartialCheckpoint, save: Callable[[], None]) -> None:
        """Call `save`, which writes into `part.state`, then write the manifest and flush everything.

        Another thread may do this while the training thread goes on. Raises CheckpointFailed as `begin` does.
        """
        with _discarded_unless_complete(part):
            save()
            manifest = part.manifest | {"files": _listing(part.path)}
            if self._key is not None:
                manifest[SIGNATURE] = self._key.sign(manifest)
            atomic_write(part.path / MANIFEST, json.dumps(manifest, indent=1), durable=True)
            fsync_tree(part.path)

    def commit(self, part: PartialCheckpoint, confirm: Callable[[], None]) -> Path:
        """Make the filled `part` the current checkpoint and return its directory.

        confirm  raises Fenced if this learner may no longer commit
        Raises CheckpointFailed as `begin` does.
        """
        name, epoch, final = part.name, part.epoch, self._folder / part.name
        with _discarded_unless_complete(part):
            confirm()
            self._refuse_replaced(epoch)
            shutil.rmtree(final, ignore_errors=True)  # renamed by an earlier attempt that could not replace CURRENT
            part.path.rename(final)
            fsync_path(self._folder)
            try:
                guard = partial(self._moving_the_pointer, epoch)
                atomic_write(self._folder / CURRENT, name + "\n", durable=True, guard=guard)
            except Fenced:
                shutil.rmtree(final, ignore_errors=True)
                raise
        self._collect(name, epoch)
        return final

    def current_name(self) -> str:
        """Return the name of the committed checkpoint, "" if there is none."""
        found = self._current()
        return found[0] if found is not None else ""

    @contextmanager
    def _moving_the_pointer(self, epoch: int, part: Path) -> Iterator[None]:
        """Hold the lock of the folder; a learner of a newer epoch may have committed since the lease was confirmed.

        A learner that is suspended between check and rename must not undo its successor's commit. Its successor waits
        for the lock, and then removes the file that it is about to rename: its rename fails when it wakes.
        """
        with ExitStack() as held:
            try:
                held.enter_context(folder_lock(self._folder))
            except TimeoutError as error:
                log.warning("going on without the lock of a learner that does not move: %s", error)
                for other in self._folder.glob(f".{CURRENT}.*.tmp"):
                    if other != part:
                        other.unlink(missing_ok=True)
            self._refuse_replaced(epoch)
            yield

    def _refuse_replaced(self, epoch: int) -> None:
        """Raise Fenced if a learner of a newer epoch has committed a checkpoint."""
        found = self._current()
        # read its manifest only if the name says so: a damaged one must not block a good one
        if found and int(found[2]) > epoch and (newest := self.current_epoch()) > epoch:
            raise Fenced(f"epoch {newest} has committed a checkpoint, this learner is epoch {epoch}")

    def exists(self, name: str) -> bool:
        """Return whether the checkpoint `name` was committed and not removed since; "" was not."""
        return bool(name) and (self._folder / name / MANIFEST).is_file()

    def committed(self, step: int, epoch: int) -> bool:
        """Return whether the current checkpoint has this step and epoch."""
        found = self._current()
        return found is not None and (int(found[1]), int(found[2])) == (step, epoch)

    def _current(self) -> re.Match[str] | None:
        try:
            name = (self._folder / CURRENT).read_text(errors="replace").strip()
        except FileNotFoundError:
            return None
        found = _NAME.match(name)
        if found is None:
            raise self._damaged(self._folder / CURRENT, f"it names {name[:80]!r}, which is not a checkpoint")
        return found

    def _manifest(self, found: re.Match[str]) -> dict[str, Any]:
        """Return the manifest of the checkpoint that `found` names, with signature and name verified."""
        path = self._folder / found[0]
        try:
            if path.is_symlink():
                raise ValueError("the checkpoint's directory is a link")
            with open_regular(path / MANIFEST) as file:
                facts = _facts(json.loads(file.read()))
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(path / MANIFEST, str(error)) from None
        self._refuse_foreign(path, facts)
        if (facts["epoch"], facts["step"], facts.get("revision", 1)) != _order(found):
            says = f"step {facts['step']} of epoch {facts['epoch']}, revision {facts.get('revision', 1)}"
            raise self._damaged(path / MANIFEST, f"it is for {says}: the directory was renamed or copied")
        return facts

    def _verified(self, file: Path, expected: dict[str, Any]) -> FileStamp:
        """Return the stamp of an intact file. Raises UserError for a damaged file or a link."""
        try:
            with open_regular(file) as opened:
                look = _look(opened.fileno())
                if (
                    os.fstat(opened.fileno()).st_size == expected["bytes"]
                    and sha256_stream(opened) == expected["sha256"]
                ):
                    return look
                why = "it is truncated or altered: its sha256 differs from the manifest's"
        except OSError as error:
            why = f"it is missing or not a regular file: {error.strerror}"
        raise self._damaged(file, why)

    def _warn_of_newer(self, found: re.Match[str]) -> None:
        """Warn if a newer checkpoint is not current: left by a crash, or by a user who went back to an older one."""
        newer = [p.name for p in self._folder.iterdir() if (m := _NAME.match(p.name)) and _order(m) > _order(found)]
        if newer:
            text = "%s names %s, although %s is newer: those steps will be repeated"
            log.warning(text, self._folder / CURRENT, found[0], ", ".join(sorted(newer)))

    def _refuse_foreign(self, path: Path, facts: dict[str, Any]) -> None:
        why = self._key.refuses(facts) if self._key is not None else ""
        if why and self._trust:
            log.warning("--trust-checkpoint: resuming from %s although %s", path, why)
        elif why:
            raise UserError(
                f"the checkpoint {path} is not trusted: {why}",
                why="its policy and delivery state could come from anywhere",
                todo="if you know who wrote it (an older Foray did not sign, a copied run has another run.key), start "
                "once with --trust-checkpoint; otherwise restore the right key or one of your own checkpoints",
            )

    def _damaged(self, file: Path, why: str) -> UserError:
        others = sorted(p.name for p in self._folder.glob("step_*") if p.is_dir() and p not in file.parents)
        older = f", or write the name of an older checkpoint into {self._folder / CURRENT}: {', '.join(others)}"
        return UserError(
            f"cannot resume from the checkpoint: {file} is damaged",
            why=why,
            todo="restore the file" + (older if others else ""),
        )

    def _collect(self, current: str, epoch: int) -> None:
        found = sorted((_order(m), p) for p in self._folder.iterdir() if (m := _NAME.match(p.name)))
        newest, kept = {path for _, path in found[-self._keep :]}, {current, *self.kept()}
        for _, path in found:
            if path not in newest and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
        self._remove_unfinished(epoch)

    def _remove_unfinished(self, epoch: int) -> None:
        """Remove what learners up to `epoch` left unfinished; one checkpoint is written at a time."""
        for left in self._folder.glob(".step_*.tmp"):
            # a successor's directory is still being written
            if (m := _NAME.match(left.name[1:-4])) and int(m[2]) <= epoch:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _discarded_unless_complete(part: PartialCheckpoint) -> Iterator[None]:
    """After an exception remove the files; raise CheckpointFailed for one of the disk."""
    try:
        yield
    # torch reports a full disk as RuntimeError
    except (OSError, RuntimeError) as error:
        shutil.rmtree(part.path, ignore_errors=True)
        raise CheckpointFailed(f"checkpoint {part.name} could not be written: {error}") from error
    except BaseException:
        shutil.rmtree(part.path, ignore_errors=True)
        raise


def _listing(part: Path) -> dict[str, dict[str, Any]]:
    """Return name -> {bytes, sha256} of every file below `part`, from the ranks' lists where they have them; remove the
    lists. Raises OSError for a file that is not here, or not as long as its rank wrote it, after VISIBLE_S.
    """
    lists, known = _visible_lists(part)
    for path in lists:
        path.unlink()
    files = [p for p in below(part) if p.is_file()]
    rest = [p for p in files if p not in known]
    known |= _of_each({p: p.stat().st_size for p in rest}, written_file, f"hashing {part.name}", log.info)
    return {str(p.relative_to(part)): known[p] for p in files}


def _visible_lists(part: Path) -> tuple[list[Path], dict[Path, dict[str, Any]]]:
    """Return `_lists_of_ranks` as soon as this host sees everything. Raises OSError after VISIBLE_S."""
    deadline = time.monotonic() + VISIBLE_S
    while True:
        try:
            return _lists_of_ranks(part)
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise OSError(f"a rank's file is not here ({error}): do all ranks share the folder?") from None
        time.sleep(LOOK_S)


def _lists_of_ranks(part: Path) -> tuple[list[Path], dict[Path, dict[str, Any]]]:
    """Return the lists below `part`, and the entries in them. Raises OSError if a planned or listed file is not whole,
    ValueError if a list is not."""
    plans, lists = ([p for p in below(part) if fnmatch(p.name, name)] for name in (PLANNED, f"{WRITTEN}.*.json"))
    known: dict[Path, dict[str, Any]] = {}
    for path in lists:
        known |= {path.parent / name: entry for name, entry in json.loads(path.read_text()).items()}
    planned = [plan.parent / name for plan in plans for name in json.loads(plan.read_text())]
    for path in (*planned, *known):
        if (size := path.stat().st_size) != (entry := known.get(path, {"bytes": size}))["bytes"]:
            raise OSError(f"{path} has {size} bytes, but its rank wrote {entry['bytes']}")
    return [*plans, *lists], known


def _of_each(sizes: Mapping[Path, int], work: Callable[[Path], T], name: str, progress: Say) -> dict[Path, T]:
    """Return file -> `work(file)`, several at a time."""
    found: dict[Path, T] = {}
    with ThreadPoolExecutor(HASHING) as pool, Progress.of(progress).task(name, sum(sizes.values()), "B") as task:
        for (path, size), result in zip(sizes.items(), pool.map(work, sizes), strict=True):
            found[path] = result
            task(task.done + size)
    return found


def written_file(path: Path) -> dict[str, Any]:
    """Return the entry of a file in the manifest."""
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _look(at: Path | int) -> FileStamp:
    """Return a stamp that changes if the file is written, exchanged or moved; () if it does not exist."""
    try:
        found = os.stat(at, follow_symlinks=False) if isinstance(at, Path) else os.fstat(at)
    except FileNotFoundError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _order(name: re.Match[str]) -> tuple[int, int, int]:
    """Return epoch, step and revision; the newer of two checkpoints compares greater."""
    return int(name[2]), int(name[1]), int(name[3] or 1)


def _facts(found: Any) -> dict[str, Any]:
    """Return `found` as a manifest. Raises ValueError if a field that `load` needs is missing or has a wrong type."""
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, not an object")
    if found.get("format") != FORMAT:
        raise ValueError(f"format {str(found.get('format'))[:80]} is not {FORMAT}, which this version reads")
    files, lineage = found.get("files"), found.get("lineage")
    numbers = [type(found.get(name)) for name in ("step", "epoch")]
    if numbers != [int, int] or not isinstance(files, dict) or not isinstance(lineage, list):
        raise ValueError("step, epoch, lineage or files is missing")
    if not all(isinstance(f, dict) and type(f.get("bytes")) is int and "sha256" in f for f in files.values()):
        raise ValueError("a file without size or sha256")
    if not all(isinstance(pair, list) and [type(n) for n in pair] == [int, int] for pair in lineage):
        raise ValueError("the lineage contains an invalid version")
    return found
