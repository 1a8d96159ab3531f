"""Thousands of malformed requests to each service; afterwards it must answer, hold no more resources than before, and
have logged no traceback."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

from fuzz_raw import Requests, Tally, send_all
from fuzz_services import KINDS
from fuzz_watch import Held, Service

SHARES = {"retriever": 0.4, "rollout": 0.2, "engine": 0.4}
"""Of all requests; an episode costs more than a search."""
DRAWN = 0.25
"""Share of the requests that schemathesis draws: what it makes takes ten times as long."""
WARM = 150
"""Requests before the first measurement: pools fill, caches are made, modules are imported."""
GROWTH_MB = 64.0
"""What a service may hold more in the end, in memory."""
THREADS = 8
"""What it may hold more in threads: those of asyncio's pool, which fills as it is needed."""


@dataclass
class Campaign:
    """Results of one service. `wrong` is empty if there is no finding."""

    kind: str
    raw: int = 0
    drawn: int = 0
    seconds: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    before: Held | None = None
    after: Held | None = None
    wrong: list[str] = field(default_factory=list)


def drawing() -> bool:
    """Whether schemathesis is installed (extra `fuzz`)."""
    return importlib.util.find_spec("schemathesis") is not None


def campaign(kind: str, count: int, seed: int, *, drawn: bool, warm: int = WARM) -> Campaign:
    """`count` requests to one service, DRAWN of them by schemathesis where `drawn`."""
    found, begun = Campaign(kind), time.monotonic()
    with Service(kind) as service:
        document = service.document()
        asyncio.run(_raw(service, document, seed + 1, warm))
        found.before = service.steady()
        tallies: list[Tally] = []
        if drawn:
            from fuzz_schema import send_drawn

            tallies.append(send_drawn(kind, service.url, document, round(count * DRAWN), seed))
            found.drawn = tallies[0].sent
        # few shapes of a request can be drawn of some operations: the rest is raw
        tallies.append(asyncio.run(_raw(service, document, seed, count - found.drawn)))
        found.raw = tallies[-1].sent
        found.statuses = dict(sum((tally.statuses for tally in tallies), Counter[str]()).most_common())
        found.wrong += [f"{what}: {raw[:400]!r}" for tally in tallies for what, raw in tally.bad]
        _let_go_on(service)
        found.after = service.settled(found.before)
        found.wrong += _leaks(found.before, found.after)
        found.wrong += [f"a traceback in its log: {line}" for line in service.tracebacks()]
        found.wrong += [] if service.healthy() else ["it does not answer /health with 200"]
    found.wrong += [f"it ended with {service.code}"] if service.code else []
    found.seconds = time.monotonic() - begun
    return found


def _leaks(before: Held, after: Held) -> list[str]:
    wrong = []
    if after.rss_mb - before.rss_mb > GROWTH_MB:
        wrong.append(f"{after.rss_mb - before.rss_mb:.0f} MB more in memory")
    if after.fds > before.fds or after.tasks > before.tasks or after.threads > before.threads + THREADS:
        wrong.append(f"it holds {after}, before it was {before}")
    return wrong


async def _raw(service: Service, document: dict[str, object], seed: int, count: int) -> Tally:
    """Send raw requests, and resume the engine meanwhile: a request may pause it, and it would not answer."""
    going = asyncio.create_task(_going_on(service))
    try:
        return await send_all(
            service.kind, service.port, Requests(random.Random(f"{seed}/{service.kind}"), document), count
        )
    finally:
        going.cancel()


async def _going_on(service: Service) -> None:
    while True:
        await asyncio.to_thread(_let_go_on, service)
        await asyncio.sleep(0.2)


def _let_go_on(service: Service) -> None:
    if service.kind == "engine":
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{service.url}/continue_generation", data=b"{}", headers=headers)
        urllib.request.urlopen(request, timeout=20).close()


def all_campaigns(count: int, seed: int, *, drawn: bool) -> list[Campaign]:
    """One a service."""
    return [campaign(kind, round(count * SHARES[kind]), seed, drawn=drawn) for kind in KINDS]
