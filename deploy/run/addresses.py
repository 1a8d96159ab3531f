"""Choose the Redis of a run, and write it to the configuration of the processes. Services register there themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from deploy.config import RunConfig
from deploy.run.redis_server import child_url, find_server, socket_url
from deploy.secrets.env import redis_url_for
from protocol.errors import UserError
from protocol.runtime.config import read_tree
from protocol.runtime.http.auth import LOOPBACK, is_loopback
from protocol.runtime.net import require_free
from protocol.runtime.redis.url import FILE, parse_redis_url, place_of
from protocol.settings import REDIS_URL_VARIABLE, Settings

REDIS_URL_FILE = "redis.url"
"""File in the run directory with the URL of a Redis that serves other hosts (`launch.redis_host`)."""
ROOT = Path(__file__).parents[2]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Addresses:
    """Address of the run's Redis. All other processes choose a port on their host and register it there.

    redis_url  the configured Redis, or the one that the launcher starts
    server     program of the Redis that the launcher starts, None for a configured one
    """

    redis_url: str
    server: Path | None


def anchored(config: M) -> M:
    """Return `config` with absolute paths, so that it is valid from any directory.

    A path that exists only in Foray's checkout (`engine.kind.launcher`) is kept: nodes search for it there.
    """
    values = {name: _anchored(value) for name, value in config}
    return type(config).model_construct(_fields_set=set(config.model_fields_set), **values)


def _anchored(value: Any) -> Any:
    match value:
        case BaseModel():
            return anchored(value)
        case Path():
            only_in_checkout = not value.exists() and (ROOT / value).exists()
            return value if only_in_checkout or str(value).startswith("synthetic:") else value.absolute()
        case tuple():
            return tuple(map(_anchored, value))
        case _:
            return value


def choose(config: RunConfig, *, environ: Mapping[str, str] = os.environ) -> Addresses:
    """Choose the Redis. Raises UserError without one, or if a configured port is taken."""
    first = config.retriever.port if "port" in config.retriever.model_fields_set else 0
    for service, count, given in (
        ("retriever", config.num_retrievers, first),
        ("rollout", config.launch.rollouts, config.rollout.port),
    ):
        if count and given:
            require_free(getattr(config, service).host or LOOPBACK, given, f"{service}.port")
    if config.launch.learner and config.learner.metrics_port:
        require_free(config.learner.metrics_host or LOOPBACK, config.learner.metrics_port, "learner.metrics_port")
    return Addresses(*_redis(config, environ))


def preview(config: RunConfig, *, environ: Mapping[str, str] = os.environ) -> Addresses:
    """Return the Redis like `choose`, without searching for a server."""
    url = "" if config.launch.redis == "own" else config.run.redis_url or environ.get(REDIS_URL_VARIABLE, "")
    return Addresses(url or socket_url(config.run.dir / "redis"), None if url else Path("redis-server"))


def reachable(config: RunConfig, host: str) -> RunConfig:
    """Return `config` with a Redis that serves other hosts at this host's address; "" for this machine alone.

    Raises UserError if that would expose it without users.
    """
    launch = config.launch
    if not host or launch.redis_host:
        return config
    if launch.secrets is None and not is_loopback(host):
        raise UserError(
            f"the run's processes are on several hosts, but launch.secrets is not set: {host} is a network address",
            todo="`foray init run.yaml --secure` makes users and tokens; set launch.secrets to its directory",
        )
    return config.model_copy(update={"launch": launch.model_copy(update={"redis_host": host})})


def dated(config: RunConfig, resolved: Path) -> RunConfig:
    """Return `config` with `run.date`: as set, else that of an earlier start (`resolved`), else today (UTC)."""
    if config.run.date is not None:
        return config
    try:
        day = date.fromisoformat(str(read_tree(resolved)["run"]["date"]))
    except (UserError, KeyError, TypeError, ValueError):  # the first start, or one of an older version
        day = datetime.now(UTC).date()
    return config.model_copy(update={"run": config.run.model_copy(update={"date": day})})


def settle(config: RunConfig, addresses: Addresses) -> RunConfig:
    """Return `config` with the URL of its Redis and with absolute paths.

    A Redis URL from the environment is not included, because it may contain a password.
    """
    config = anchored(config)
    launch: dict[str, Any] = {"retrievers": config.num_retrievers}
    update: dict[str, Settings] = {}
    if addresses.server is not None:
        # so that `foray up` with the resolved file starts it again
        launch["redis"] = "own"
    if config.launch.secrets is not None or _holds_password(config.run.redis_url):
        # each process gets URL and login from the environment: a setting would override it, and be written to a file
        update["run"] = config.run.model_copy(update={"redis_url": ""})
    elif addresses.server is not None:
        url = redis_file_url(config.run.dir) if config.launch.redis_host else addresses.redis_url
        update["run"] = config.run.model_copy(update={"redis_url": url})
    if config.num_retrievers:
        if "port" not in config.retriever.model_fields_set:
            update["retriever"] = config.retriever.model_copy(update={"port": 0})
        if config.rollout.search.type == "http":  # those that register
            search = config.rollout.search.model_copy(update={"urls": ()})
            update["rollout"] = config.rollout.model_copy(update={"search": search})
    update["launch"] = config.launch.model_copy(update=launch)
    return config.model_copy(update=update)


def _holds_password(url: str) -> bool:
    found = parse_redis_url(url) if url else None
    return found is not None and bool(found.password or found.sentinel_password)


def redis_file_url(directory: Path) -> str:
    """Return the URL of the Redis that the file in a run directory names."""
    return f"{FILE}{quote(str(directory.absolute() / REDIS_URL_FILE))}"


def seen_from_here(config: RunConfig, place: str) -> str:
    """Return the URL that the launcher and viewers use for the Redis at `place`."""
    return redis_url_for(config.launch.secrets, "viewer", place) if config.launch.secrets else place


def choose_redis(config: RunConfig, environ: Mapping[str, str]) -> str:
    """Return the URL of the configured Redis; "" if `foray up` starts one. Raises UserError if it is missing.

    With `launch.secrets` the URL has no login: each role has its own.
    """
    wanted, secrets = config.launch.redis, config.launch.secrets
    url = config.run.redis_url or environ.get(REDIS_URL_VARIABLE, "")
    if wanted == "configured" and not url and secrets:
        url = redis_url_for(secrets, "viewer", "")
    if wanted == "configured" and not url:
        raise UserError(
            "launch.redis is `configured`, but no Redis URL is set",
            todo=f"set run.redis_url or the environment variable {REDIS_URL_VARIABLE}, or launch.redis=auto",
        )
    if wanted == "own" or not url:
        return ""
    return place_of(url) if secrets else url


def _redis(config: RunConfig, environ: Mapping[str, str]) -> tuple[str, Path | None]:
    url = choose_redis(config, environ)
    if url:
        return url, None
    directory = config.run.dir / "redis"
    directory.mkdir(parents=True, exist_ok=True)
    server = find_server()
    return child_url(directory, config.launch.redis_host, config.launch.secrets), server.path
