"""Create what a run needs in Redis: the functions, two streams, their groups.

Checks before it writes: a full Redis refuses to load functions and create streams even if they exist, and a learner
that cannot start on a full Redis would never acknowledge the entries that fill it.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.exceptions import NoPermissionError

from protocol import functions
from protocol.errors import UserError
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.runtime.redis.errors import translate_errors
from protocol.runtime.redis.server import function_library


def prepare(db: redis.Redis, keys: Keys) -> bool:
    """Create what is missing; return whether a stream or a group was missing. Idempotent.

    Raises the errors of `protocol.runtime.redis.errors`.
    """
    made = False
    with translate_errors():
        try:
            if not _has_functions(db):
                db.function_load(function_library(), replace=True)
        except redis.ResponseError as error:
            if "unknown command" not in str(error):
                raise
            raise UserError(
                "this Redis has no functions", why="its version is below 7.0", todo="upgrade Redis"
            ) from error
    for stream, group in ((keys.tasks, TASK_GROUP), (keys.traj, TRAJ_GROUP)):
        with translate_errors(stream):
            made |= not _has_group(db, stream, group) and _create(db, stream, group)
    return made


def _has_functions(db: redis.Redis) -> bool:
    """Return whether exactly our functions are loaded; False without permission."""
    try:
        found: Any = db.function_list(library=functions.LIBRARY, withcode=True)
    except NoPermissionError:  # an ACL file of an older Foray
        return False
    return function_library().encode() in [part for library in found for part in library]


def _has_group(db: redis.Redis, stream: str, group: str) -> bool:
    try:
        return any(found["name"] == group.encode() for found in db.xinfo_groups(stream))
    except redis.ResponseError as error:
        if "no such key" not in str(error):
            raise
        return False


def _create(db: redis.Redis, stream: str, group: str) -> bool:
    try:
        db.xgroup_create(stream, group, id="0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
        return False
    return True
