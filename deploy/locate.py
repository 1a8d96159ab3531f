"""Which run a command means: a run directory, or a configuration file, or the latest run below ./runs."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.config import expand
from deploy.rundir import configuration_of, read_configuration, read_record, require
from deploy.secrets_env import login_at, redis_url_for
from protocol.command_line import add_config_arguments, config_and_overrides
from protocol.errors import UserError
from protocol.settings import REDIS_URL_VARIABLE, RunSettings, read_tree, section, with_overrides


@dataclass(frozen=True)
class Located:
    """A run: its shared settings, where its Redis is, its directory, and run.json ({} when started by hand)."""

    run: RunSettings
    redis_url: str
    directory: Path
    record: dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    """RUN_DIR or CONFIG, and overrides."""
    what = "run directory (default: the latest below ./runs), or the configuration of a run that was started by hand"
    add_config_arguments(parser, what, "run.redis_url=redis://host:6379/0", metavar="RUN_DIR | CONFIG")


def locate(args: Namespace) -> Located:
    """The run that the arguments name; raises UserError when there is none, or its Redis is not known."""
    path, overrides = config_and_overrides(args)
    if path is not None and not path.is_dir() and (path.is_file() or path.suffix in (".yaml", ".yml")):
        tree, moved = read_tree(path), None
    else:
        moved = require(path)
        if (found := configuration_of(moved)) is None:
            raise UserError(f"{moved} holds no configuration", todo="name the one that the run was started with")
        tree = read_configuration(found, moved)
    tree = expand(with_overrides(tree, overrides), os.environ)
    run = section(tree, "run", RunSettings)
    directory = moved or run.dir
    url = _by_secrets(tree, directory) or run.redis_url or os.environ.get(REDIS_URL_VARIABLE, "")
    if not url:
        raise UserError(
            f"it is not known where the Redis of run {run.id} is",
            why="run.redis_url is empty in its configuration (a URL with a password stays in the environment)",
            todo=f"export {REDIS_URL_VARIABLE}=redis://...",
        )
    return Located(run, url, directory, read_record(directory))


def _by_secrets(tree: dict[str, Any], directory: Path) -> str:
    """Where `foray up` noted that the Redis is, by the login of FORAY_REDIS_URL, or else as the viewer.

    "" for a run without `launch.secrets`. The place in a role's file may be another: that of a Redis yet to be.
    """
    secrets = (tree.get("launch") or {}).get("secrets")
    place, given = read_record(directory).get("redis_url", ""), os.environ.get(REDIS_URL_VARIABLE, "")
    if not secrets or (given and not place):
        return ""
    return login_at(place, given) if given else redis_url_for(Path(secrets), "viewer", place)
