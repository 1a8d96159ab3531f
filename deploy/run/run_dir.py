"""The launcher's part of the run directory (lock, run.json), and the selection of a run by command arguments.

The lock is a `flock`, so the kernel releases it if the launcher is killed.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deploy.run.snapshot import ENDS, RunSnapshot, read_ledger_totals
from deploy.secrets.env import login_at, redis_url_for
from protocol.errors import UserError
from protocol.run_meta import LINEAGE_FILE
from protocol.runtime.config import SettingsTree, expand, read_tree, section, with_overrides
from protocol.runtime.files import atomic_write, lineage_of, try_lock
from protocol.runtime.http.auth import read_access
from protocol.runtime.lifecycle import has_ended, pid_here, process_token
from protocol.runtime.redis.url import parse_redis_url, place_of
from protocol.runtime.service_cli import add_config_arguments, config_and_overrides
from protocol.settings import REDIS_URL_VARIABLE, RunSettings

if TYPE_CHECKING:
    from deploy.config import RunConfig
    from learner.config.model import ModelSettings

RECORD, RESOLVED, LOCK = "run.json", "resolved.yaml", "launcher.lock"
SCRIPTS = "slurm"
"""Folder with the scripts of the jobs that `foray submit` submitted."""


def unique_id(stem: str) -> str:
    """Return a run id that is unique with high probability: two runs with one id in one Redis are refused."""
    return f"{stem[:58]}-{secrets.token_hex(2)}"


@contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Hold the lock of `directory`. Raises UserError while another launcher holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("a") as lock:
        try:
            free = try_lock(lock.fileno())
        except OSError as error:
            raise UserError(
                f"{directory} cannot be locked: {error}",
                todo="use a directory on a file system with locks: run.dir=...",
            ) from None
        if not free:
            raise UserError(
                f"a run is already active in {directory} (launcher process {launcher_pid(directory) or 'unknown'})",
                todo=f"stop it with `foray down {directory}`, or use another directory: run.dir=...",
            )
        lock.truncate(0)
        lock.write(process_token())
        lock.flush()
        yield


def _holder(directory: Path) -> str:
    """Return the token of the process that took the lock of `directory` last, "" if none did."""
    try:
        return (directory / LOCK).read_text(errors="replace")
    except OSError:
        return ""


def launcher_pid(directory: Path) -> int | None:
    """Return the pid of the launcher that holds the lock of `directory`, None if it is not a process of this machine.

    run.json has the pid of the last start that came that far, which may be a stranger's by now.
    """
    return None if has_ended(token := _holder(directory)) else pid_here(token)


def discard(directory: Path) -> None:
    """Remove a run directory in which nothing was started; one with other files, such as logs, stays."""
    for name in (RESOLVED, LINEAGE_FILE, LOCK):
        (directory / name).unlink(missing_ok=True)
    for folder in (directory / "redis", directory):
        with suppress(OSError):
            folder.rmdir()


def is_held(directory: Path) -> bool:
    """Return whether a launcher is running in `directory`."""
    path = directory / LOCK
    if not path.exists():
        return False
    with path.open("rb") as lock:  # works on a file system that is read-only
        try:
            return not try_lock(lock.fileno(), shared=True)
        except OSError:
            return True


def runs_elsewhere(directory: Path) -> bool:
    """Return whether a launcher on another host has started in `directory` and not ended, as its record says.

    A file system need not show the lock of another host.
    """
    record = read_record(directory)
    token = str(record.get("launcher", ""))
    return bool(token) and pid_here(token) is None and record.get("state") not in ENDS


def wait_until_free(directory: Path, timeout_s: float) -> bool:
    """Return whether the launcher of `directory` ended within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while is_held(directory) or runs_elsewhere(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Replace run.json. It names this process, for `live_record`."""
    atomic_write(directory / RECORD, json.dumps(record | {"launcher": process_token()}, indent=2) + "\n", durable=False)


def read_record(directory: Path) -> dict[str, Any]:
    """Return run.json, {} if there is none or it is no JSON object."""
    try:
        record = json.loads((directory / RECORD).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def live_record(directory: Path) -> dict[str, Any]:
    """Return run.json if the launcher that wrote it is running, else {}: other processes may have its addresses now."""
    record = read_record(directory) if is_held(directory) else {}
    return record if record.get("launcher") == _holder(directory) else {}


def latest(root: Path = Path("runs")) -> Path | None:
    """Return the run directory below `root` whose run.json was written last."""
    records = sorted(root.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime)
    return records[-1].parent if records else None


def require(directory: Path | None) -> Path:
    """Return `directory`, or the latest run if None. Raises UserError if it is not a run directory."""
    chosen = directory or latest()
    if chosen is None:
        raise UserError("no run directory is given, and ./runs contains none", todo="name one: foray COMMAND RUN_DIR")
    if not (chosen / RECORD).exists() and configuration_of(chosen) is None:
        what = "is not a run directory (it contains no configuration)" if chosen.exists() else "does not exist"
        todo = (
            "give the directory that `foray up` printed (run.dir), or the configuration file of a run started manually"
        )
        raise UserError(f"{chosen} {what}", todo=todo)
    return chosen


def configuration_of(directory: Path) -> Path | None:
    """Return the configuration in a run directory: the one that `foray up` resolved, else the only YAML file."""
    if (directory / RESOLVED).is_file():
        return directory / RESOLVED
    found = [path for path in sorted(directory.glob("*.yaml")) if _is_configuration(path)]
    return found[0] if len(found) == 1 else None


def read_configuration(path: Path, directory: Path) -> SettingsTree:
    """Return the tree in `path`, with paths below `run.dir` moved to `directory`: the run may have been moved."""
    tree = read_tree(path)
    before, now = str((tree.get("run") or {}).get("dir", "")), str(directory.absolute())

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: walk(item) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, str) and (value == before or value.startswith((f"{before}/", f"unix://{before}/"))):
            return value.replace(before, now, 1)
        return value

    return SettingsTree(walk(tree) if before else tree, tree.spelt, recorded=True)


def _is_configuration(path: Path) -> bool:
    try:
        return "run" in read_tree(path)
    except UserError:
        return False


@dataclass(frozen=True)
class Located:
    """A run: shared settings, Redis URL, directory, and run.json ({} if it was started manually)."""

    run: RunSettings
    redis_url: str
    directory: Path
    record: dict[str, Any]
    locate: Callable[[], Located] | None = None
    is_own: bool = False
    """The user named this Redis, or it is on this machine: the address is not only the word of files in `directory`."""

    def urls(self, seen: RunSnapshot, process: str) -> list[str]:
        """Return the registered addresses of a kind of process, to which this process may send its tokens; [] if it
        has some and the Redis is not `is_own`: otherwise the author of the files could receive the tokens.
        """
        return seen.urls(process) if self.is_own or read_access(os.environ).open else []

    def refreshed(self) -> Located:
        """Return this run as it is located now, if it was started again."""
        started = read_record(self.directory).get("launcher")
        return self if self.locate is None or started == self.record.get("launcher") else self.locate()


def add_arguments(parser: ArgumentParser) -> None:
    """Add RUN_DIR or CONFIG, and overrides."""
    what = "run directory (default: the latest below ./runs), or the configuration of a run started manually"
    add_config_arguments(parser, what, "run.redis_url=redis://host:6379/0", metavar="RUN_DIR | CONFIG")


def locate(args: Namespace, *, without_redis: bool = False) -> Located:
    """Return the run that the arguments name.

    Raises UserError if there is none, or if its Redis is unknown; `without_redis` leaves the URL empty in that case.
    """
    path, overrides = config_and_overrides(args)
    if path is not None and not path.is_dir() and (path.is_file() or path.suffix in (".yaml", ".yml")):
        tree, moved, original = read_tree(path), None, None
    else:
        moved = require(path)
        if (found := configuration_of(moved)) is None:
            raise UserError(f"{moved} contains no configuration", todo="give the file that the run was started with")
        if (original := _original_of(found, moved)) and not without_redis:
            raise UserError(
                f"{moved} is a copy of the run directory {original}",
                why="Redis has the state of that run",
                todo=f"name {original}; `foray report` and `foray dashboard` show the files of the copy",
            )
        tree = read_configuration(found, moved)
    tree = expand(with_overrides(tree, overrides), os.environ)
    run = section(tree, "run", RunSettings)
    directory = moved or run.dir
    record = read_record(directory)
    by_secrets, exported = _by_secrets(tree, directory), os.environ.get(REDIS_URL_VARIABLE, "")
    url = by_secrets or run.redis_url or exported
    named = moved is None or bool(by_secrets) or url == exported or f"run.redis_url={url}" in overrides
    if original is not None:
        url = ""
    if not url and not without_redis:
        raise UserError(
            f"the Redis of run {run.id} is unknown",
            why="run.redis_url is empty in its configuration (URLs with passwords are not saved)",
            todo=f"export {REDIS_URL_VARIABLE}=redis://...",
        )
    this = Namespace(given=[str(moved or path), *overrides], config=None)  # not the latest run of that time
    again = partial(locate, this, without_redis=without_redis)
    is_own = named or (bool(url) and parse_redis_url(url).is_loopback)
    return Located(run, url, directory, record, again, is_own)


def _original_of(configuration: Path, directory: Path) -> Path | None:
    """Return the run directory that `directory` is a copy of; None if it is none, or the original is gone."""
    original = Path(str((read_tree(configuration).get("run") or {}).get("dir") or directory))
    same_run = lineage_of(original) == lineage_of(directory) != ""
    return original if same_run and not original.samefile(directory) else None


def _by_secrets(tree: dict[str, Any], directory: Path) -> str:
    """Return the URL of the Redis that `foray up` recorded, with the login of FORAY_REDIS_URL or of the viewer.

    "" for a run without `launch.secrets`. The address in a role's file may differ: that Redis may not exist yet.
    """
    secrets = (tree.get("launch") or {}).get("secrets")
    place, given = read_record(directory).get("redis_url", ""), os.environ.get(REDIS_URL_VARIABLE, "")
    if not secrets or (given and not place):
        return ""
    own = given or redis_url_for(Path(secrets), "viewer", "")
    return login_at(_vouched(place, own), own) if place else own


def _vouched(recorded: str, own: str) -> str:
    """Return where the login of the URL `own` may be sent. `recorded`, in a file of the run directory, is only accepted
    for this machine, for the host of `own`, and for a host that its certificate authority verifies.
    """
    where, known = parse_redis_url(recorded), parse_redis_url(own)
    if where.is_loopback or where.kind != "server" or known.kind != "server":
        return recorded if where.is_loopback else place_of(own)
    host, port = where.hosts[0]
    if host != known.hosts[0][0] and not known.verifies:
        return place_of(own)
    return urlsplit(place_of(own))._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").geturl()


def finished(config: RunConfig) -> bool:
    """Return whether the run of this configuration has ended with its last step."""
    totals = read_ledger_totals(config.run.dir) if read_record(config.run.dir).get("state") == "done" else None
    return config.launch.learner and totals is not None and totals.step == config.run.steps


def saved(directory: Path, again: str) -> list[str]:
    """Return lines about what was saved. `again`: the command that started the run, "" if unknown."""
    totals = read_ledger_totals(directory)
    if totals is None:
        lines = [f"no checkpoint was written yet; logs are in {directory / 'logs'}"]
    else:
        lines = [f"saved: the checkpoint of step {totals.step}, in {directory / 'checkpoints'}"]
    if again:
        lines.append(f"resume {'from it' if totals else 'from the start'} with: {again}")
    return lines


def model_settings(where: Path, config: Path | None) -> tuple[Path | None, ModelSettings]:
    """Return run.model and learner.model of a run directory or a checkpoint; (None, defaults) without a configuration.

    The run's own come first: adapters belong to the model and the scale with which they were trained. `config` is for
    a run that has no configuration, and says where a model is that is not at its place any more.
    """
    from learner.config.learner import LearnerSettings

    # a checkpoint is in RUN_DIR/checkpoints
    directories = (where, where.resolve().parent.parent)
    own = next(((path, d) for d in directories if (path := configuration_of(d)) is not None), None)
    trees = [read_configuration(*own)] if own is not None else []
    trees += [read_tree(config)] if config is not None else []
    if not trees:
        return None, LearnerSettings().model
    models = [section(tree, "run", RunSettings).model for tree in trees]
    model = next((model for model in models if (model / "config.json").is_file()), models[-1])
    return model, section(trees[0], "learner", LearnerSettings).model
