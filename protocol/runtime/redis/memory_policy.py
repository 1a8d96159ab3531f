"""What a Redis does when it is full. A run needs one that refuses writes and evicts nothing."""

from __future__ import annotations

from protocol.errors import UserError
from protocol.runtime.redis.url import cli, redacted

SETTING = "maxmemory-policy"
SAFE = "noeviction"


def eviction_refusal(policy: str, url: str) -> UserError | None:
    """The error for the Redis at `url` when its `maxmemory-policy` evicts keys, None when it does not."""
    if policy == SAFE:
        return None
    lost = "leases and registrations" if policy.startswith("volatile") else "work in flight, streams and books"
    return UserError(
        f"the Redis at {redacted(url)} evicts keys: {SETTING} is {policy}",
        why=f"when it is full it would throw away {lost}",
        todo=f"{cli(url)} CONFIG SET {SETTING} {SAFE}",
    )


def unknown_policy(url: str) -> str:
    """What to log where the user of `url` may ask Redis neither INFO nor CONFIG GET."""
    return f"cannot read {SETTING} of the Redis at {redacted(url)}: this user lacks INFO; it must be {SAFE}"
