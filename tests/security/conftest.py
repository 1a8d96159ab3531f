"""The HTTP services, each in a separate process: `fuzz_services` starts them as their commands do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

from fuzz_services import KINDS
from fuzz_watch import Service

BODY_S = 3.0


@pytest.fixture(scope="session", params=KINDS)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """Without tokens; a body must come within BODY_S."""
    with Service(request.param, body_s=BODY_S) as running:
        yield running
