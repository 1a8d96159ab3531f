"""A few hundred malformed requests to each real service; `make fuzz REQUESTS=20000` is the long form."""

from __future__ import annotations

import fuzz_http
import pytest
from fuzz_services import KINDS
from fuzz_watch import Held

REQUESTS = 150


@pytest.mark.slow
@pytest.mark.fault(37)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_requests_are_refused_and_leave_nothing_behind(kind: str) -> None:
    found = fuzz_http.campaign(kind, REQUESTS, 0, drawn=False, warm=60)
    assert found.wrong == []
    assert found.raw >= REQUESTS and found.statuses.get("400", 0) > 20 and found.statuses.get("200", 0) > 5


def test_leftover_resources_are_reported() -> None:
    before = Held(rss_mb=100, fds=10, tasks=3, threads=2)
    assert fuzz_http._leaks(before, Held(rss_mb=150, fds=10, tasks=3, threads=4)) == []
    assert fuzz_http._leaks(before, Held(rss_mb=200, fds=10, tasks=3, threads=2)) == ["100 MB more in memory"]
    assert len(fuzz_http._leaks(before, Held(rss_mb=100, fds=11, tasks=3, threads=2))) == 1
    assert len(fuzz_http._leaks(before, Held(rss_mb=100, fds=10, tasks=4, threads=2))) == 1


@pytest.mark.skipif(not fuzz_http.drawing(), reason="schemathesis is not installed (extra `fuzz`)")
@pytest.mark.timeout(300)
def test_requests_drawn_from_the_description_are_answered_as_it_says() -> None:
    found = fuzz_http.campaign("retriever", 32, 0, drawn=True, warm=20)
    assert found.wrong == [] and found.drawn > 4
