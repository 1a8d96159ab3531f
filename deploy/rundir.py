"""The run directory as the launcher keeps it: who runs here (a lock), and run.json for people and other commands.

The lock is the kernel's (`flock`), so it cannot outlive the launcher, whatever killed that.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from protocol.settings import Tree, read_tree

RECORD, RESOLVED, LOCK = "run.json", "resolved.yaml", "launcher.lock"


def unique_id(stem: str) -> str:
    """A run id that no other run is likely to have: two runs of one id in one Redis are refused."""
    return f"{stem[:58]}-{secrets.token_hex(2)}"


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Be the only launcher of `directory`; raises UserError while another one lives."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = read_record(directory).get("pid", "unknown")
            raise UserError(
                f"a run is already going on in {directory} (launcher process {pid})",
                todo=f"stop it with `foray down {directory}`, or take another directory: run.dir=...",
            ) from None
        yield


def is_held(directory: Path) -> bool:
    """Whether a launcher lives in `directory` now."""
    path = directory / LOCK
    if not path.exists():
        return False
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def wait_until_free(directory: Path, timeout_s: float) -> bool:
    """Whether the launcher of `directory` ended within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while is_held(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` in one step, so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Replace run.json."""
    write_atomically(directory / RECORD, json.dumps(record, indent=2) + "\n")


def read_record(directory: Path) -> dict[str, Any]:
    """run.json, {} where there is none (yet)."""
    try:
        record: dict[str, Any] = json.loads((directory / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record


def latest(root: Path = Path("runs")) -> Path | None:
    """The run directory below `root` whose run.json was written last."""
    records = sorted(root.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime)
    return records[-1].parent if records else None


def require(directory: Path | None) -> Path:
    """`directory`, or the latest run where none is given; raises UserError when that is no run directory."""
    chosen = directory or latest()
    if chosen is None:
        raise UserError("no run directory was given and ./runs holds none", todo="name one: foray <verb> RUN_DIR")
    if not (chosen / RECORD).exists() and configuration_of(chosen) is None:
        what = "is not a run directory (it holds no configuration)" if chosen.exists() else "does not exist"
        todo = "give the directory that `foray up` printed (run.dir), or for a run started by hand its configuration"
        raise UserError(f"{chosen} {what}", todo=todo)
    return chosen


def configuration_of(directory: Path) -> Path | None:
    """The configuration in a run directory: what `foray up` resolved, else the only one that lies there."""
    if (directory / RESOLVED).is_file():
        return directory / RESOLVED
    found = [path for path in sorted(directory.glob("*.yaml")) if _is_configuration(path)]
    return found[0] if len(found) == 1 else None


def read_configuration(path: Path, directory: Path) -> Tree:
    """The tree in `path`; what it says to be below `run.dir` is below `directory`, to which the run may have moved."""
    tree = read_tree(path)
    before, now = str((tree.get("run") or {}).get("dir", "")), str(directory.absolute())

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: walk(item) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, str) and (value == before or value.startswith(f"{before}/")):
            return now + value.removeprefix(before)
        return value

    return Tree(walk(tree), tree.spelt) if before else tree


def _is_configuration(path: Path) -> bool:
    try:
        return "run" in read_tree(path)
    except UserError:
        return False
