"""A log of every request and the engine that it went to, one line of JSON each.

Off unless `rollout.journal_routes` names a file: one line a turn is much for a long run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from protocol.messages import EngineInfo
from rollout_server.dispatch.fleet import Fleet

Client = TypeVar("Client")


def with_request_log(
    connect: Callable[[EngineInfo], Client], path: Path, fleet: Fleet
) -> Callable[[EngineInfo], Client]:
    """Wrap `connect` to log a line for each call: the engine as the router saw it, and the target at that moment."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def connect_and_log(engine: EngineInfo) -> Client:
        target = fleet.table.target
        line = {
            "at": time.time(),
            "engine": engine.id,
            "incarnation": engine.incarnation,
            "state": str(engine.state),
            "version": engine.version.label,
            "target": target.label if target else None,
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return connect(engine)

    return connect_and_log
