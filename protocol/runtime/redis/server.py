"""Requirements of a run on its Redis server: the function library, and no eviction when it is full."""

from __future__ import annotations

from importlib.resources import files

from protocol.errors import UserError
from protocol.runtime.redis.url import cli, redacted

SETTING = "maxmemory-policy"
SAFE = "noeviction"


def function_library() -> str:
    """Return Foray's Lua library, for FUNCTION LOAD REPLACE."""
    return (files("protocol") / "functions.lua").read_text()


def eviction_refusal(policy: str, url: str) -> UserError | None:
    """Return the error for the Redis at `url` if its `maxmemory-policy` evicts keys."""
    if policy == SAFE:
        return None
    lost = "leases and registrations" if policy.startswith("volatile") else "work in flight, streams and counts"
    return UserError(
        f"the Redis at {redacted(url)} evicts keys: {SETTING} is {policy}",
        why=f"when it is full it would delete {lost}",
        todo=f"{cli(url)} CONFIG SET {SETTING} {SAFE}",
    )


def unknown_policy(url: str) -> str:
    """Return the log message for a user of `url` who may call neither INFO nor CONFIG GET."""
    return f"cannot read {SETTING} of the Redis at {redacted(url)}: this user lacks INFO; it must be {SAFE}"
