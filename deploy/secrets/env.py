"""The secrets of each process, in `secrets/ROLE.env`, and how `foray up` distributes them.

A line is `NAME=value`, without quotes or spaces, so that a shell (`set -a; . FILE`), systemd (`EnvironmentFile=`) and
containers (`--env-file`) can read the same file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from protocol.errors import UserError
from protocol.redaction import remember_environment
from protocol.runtime.http.auth import ROLES, variable
from protocol.runtime.redis.url import parse_redis_url, with_login
from protocol.settings import REDIS_URL_VARIABLE

RUN_KEY_VARIABLE = "FORAY_RUN_KEY"
ROLE_OF_KIND: Mapping[str, str] = {
    "retriever": "retriever",
    "engine": "node",
    "rollout": "rollout",
    "learner": "learner",
}
"""Kind of process -> name of its file. Redis gets the ACL file and no environment variables."""
_NAMES = (*(variable(role) for role in ROLES), RUN_KEY_VARIABLE)
SECRET_VARIABLES = (REDIS_URL_VARIABLE, *_NAMES, *(f"{name}_FILE" for name in _NAMES))
"""Variables that a process with an environment file must not inherit."""
_LINE = re.compile(r"([A-Z_][A-Z0-9_]*)=([^\s'\"\\]*)")


def read_env(directory: Path, role: str) -> dict[str, str]:
    """Return the variables in `ROLE.env`. Raises UserError if it is missing or invalid."""
    path = directory / f"{role}.env"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path}",
            why=f"launch.secrets = {directory}; {getattr(error, 'strerror', '') or 'it is not text'}",
            todo="`foray init run.yaml --secure` writes that directory",
        ) from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise UserError(
                f"{path}, line {number}, is not NAME=value", todo="write no quotes, no spaces and no `export`"
            )
        found[matched[1]] = matched[2]
    remember_environment(found)
    return found


def env_of(directory: Path, kind: str, place: str) -> dict[str, str]:
    """Return the variables for a process of `kind`; `place`: actual Redis URL ("": as in the file). {} for Redis."""
    role = ROLE_OF_KIND.get(kind)
    if role is None:
        return {}
    found = read_env(directory, role)
    if place and REDIS_URL_VARIABLE in found:
        found[REDIS_URL_VARIABLE] = login_at(place, found[REDIS_URL_VARIABLE])
    return found


def redis_url_for(directory: Path, role: str, place: str) -> str:
    """Return the URL with the login of `role` for the Redis at `place` ("": as in its file)."""
    url = read_env(directory, role).get(REDIS_URL_VARIABLE, "")
    if not url:
        todo = "an older Foray wrote it: make new secrets with `foray init run.yaml --secure --force`"
        raise UserError(f"{directory / role}.env has no {REDIS_URL_VARIABLE}", todo=todo)
    return login_at(place, url) if place else url


def login_at(place: str, url: str) -> str:
    """Return `place` with the user and password of `url`."""
    login = parse_redis_url(url)
    return with_login(place, login.username or "", login.password or "")
