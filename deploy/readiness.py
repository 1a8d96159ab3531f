"""Whether a started process can be relied on: one short question to it, or to Redis about it."""

from __future__ import annotations

import urllib.error
import urllib.request

from deploy.plan import ProcessSpec, Ready
from deploy.redis_child import connect, ping
from protocol.codec import decode_as
from protocol.errors import ProtocolError
from protocol.keys import Keys
from protocol.messages import EngineInfo, NodeState

ANSWER_S = 1.0
"""Longest wait for one answer; a process that is starting is asked again."""


class Readiness:
    """Judge of the processes of run `run_id`, whose Redis is at `redis_url`."""

    def __init__(self, redis_url: str, run_id: str) -> None:
        self._url, self._keys = redis_url, Keys(run_id)

    def __call__(self, spec: ProcessSpec) -> bool:
        match spec.ready:
            case Ready.PING:
                return not ping(self._url, timeout_s=ANSWER_S)
            case Ready.HTTP:
                return answers(f"{spec.url}/ready")
            case Ready.ALIVE:
                return answers(f"{spec.url}/health")
            case Ready.ENGINE:
                return self._engine_is_ready(spec.name)
            case Ready.RUNNING:
                return True

    def _engine_is_ready(self, name: str) -> bool:
        import redis

        client = connect(self._url, self._keys.run, timeout_s=ANSWER_S)
        try:
            raw = client.hget(self._keys.engine(name), "b")
            return isinstance(raw, bytes) and decode_as(EngineInfo, raw).state is NodeState.READY
        except (redis.RedisError, OSError, ProtocolError):
            return False
        finally:
            client.close()


def answers(url: str) -> bool:
    """Whether GET `url` gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
