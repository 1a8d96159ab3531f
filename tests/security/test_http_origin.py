"""Without tokens no web page can use a service of this machine, by its own name or across origins; clients can."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import aiohttp
import pytest
from fuzz_watch import Service

from learner.observability.metrics_server import metrics_page, serve_prometheus
from protocol.messages import MetricsSnapshot

JSON = {"Content-Type": "application/json"}
GENERATE = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2}}
EPISODES = {"questions": [{"id": "q", "question": "a ?", "answers": ["c"]}], "n": 1}
POSTS: dict[str, dict[str, Any]] = {
    "retriever": {"/retrieve": {"queries": ["number3"], "topk": 1}, "/search": {"query": "number3"}},
    "rollout": {"/v1/episodes": EPISODES},
    "engine": {"/generate": GENERATE, "/abort_request": {"rid": "none"}},
}
GETS = {
    "retriever": ("/info", "/metrics", "/passages/d3", "/openapi.json"),
    "rollout": ("/status", "/metrics", "/v1/live", "/openapi.json"),
    "engine": ("/server_info", "/get_model_info", "/metrics", "/health_generate"),
}
PAGES = [
    {"Host": "evil.example"},
    {"Host": "127.0.0.1.evil.example:80"},
    {"Origin": "http://evil.example"},
    {"Origin": "http://localhost.evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"},
]
"""Headers that a browser sends for a page of another origin, or for one whose name was pointed here."""
OWN = [
    {},
    {"Host": "localhost:8000"},
    {"Host": "[::1]:8000"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
]
SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain; json", "")
"""Media types that a page can send to any origin without asking first."""


@pytest.fixture(scope="module")
def metrics() -> Iterator[int]:
    """Port of a learner's metrics."""
    with pytest.MonkeyPatch.context() as patch:
        for role in ("VIEWER", "NODE", "OPERATOR"):
            patch.delenv(f"FORAY_{role}_TOKEN", raising=False)
        page = metrics_page("r", lambda: MetricsSnapshot(process="learner", id="l"))
        with closing(serve_prometheus("127.0.0.1", 0, page.text)) as endpoint:
            yield endpoint.port


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def posts(service: Service) -> Iterator[tuple[str, bytes]]:
    for path, body in POSTS[service.kind].items():
        yield path, json.dumps(body).encode()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: "+".join(page.values()))
def test_a_web_page_is_refused_on_every_route(service: Service, page: dict[str, str]) -> None:
    for path, body in posts(service):
        assert ask(service.port, "POST", path, body, **JSON | page)[0] == 403, path
    for path in (*GETS[service.kind], "/no/such"):
        assert ask(service.port, "GET", path, **page)[0] == 403, path
    assert ask(service.port, "GET", "/health", **page)[0] == 200, "probes are answered, and learn nothing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: "+".join(page.values()))
def test_a_web_page_reads_no_metrics_of_a_learner(metrics: int, page: dict[str, str]) -> None:
    assert ask(metrics, "GET", "/metrics", **page)[0] == 403
    assert ask(metrics, "GET", "/metrics")[0] == 200


@pytest.mark.parametrize("own", OWN, ids=lambda own: "+".join(own.values()) or "plain")
def test_who_is_of_this_machine_is_answered(service: Service, own: dict[str, str]) -> None:
    for path, body in posts(service):
        assert ask(service.port, "POST", path, body, **JSON | own)[0] == 200, path
    for path in GETS[service.kind]:
        assert ask(service.port, "GET", path, **own)[0] == 200, path


@pytest.mark.parametrize("kind", SIMPLE)
def test_a_body_that_any_page_could_send_is_refused(service: Service, kind: str) -> None:
    for path, body in posts(service):
        assert ask(service.port, "POST", path, body, **{"Content-Type": kind} if kind else {})[0] == 415, (path, kind)


def test_json_is_taken_however_its_type_is_written(service: Service) -> None:
    for path, body in posts(service):
        for kind in ("application/json; charset=utf-8", "Application/JSON"):
            assert ask(service.port, "POST", path, body, **{"Content-Type": kind})[0] == 200, (path, kind)


async def test_clients_of_every_kind_are_served(service: Service) -> None:
    """aiohttp's `json=`, httpx' (as the openai package sends), curl with and without chunks."""
    import httpx

    async with aiohttp.ClientSession() as session, httpx.AsyncClient() as client:
        for path, body in POSTS[service.kind].items():
            async with session.post(service.url + path, json=body) as answer:
                assert answer.status == 200
            assert (await client.post(service.url + path, json=body)).status_code == 200
            for more in ([], ["-H", "Transfer-Encoding: chunked"]) if shutil.which("curl") else ():
                call = ["curl", "-sf", "-H", "Content-Type: application/json", *more, "-d", json.dumps(body)]
                await asyncio.to_thread(subprocess.run, [*call, service.url + path], check=True, capture_output=True)


@pytest.mark.parametrize("service", ["rollout", "engine"], indirect=True)
def test_events_are_streamed(service: Service) -> None:
    path, body = next(iter(POSTS[service.kind].items()))
    status, text = ask(service.port, "POST", path, json.dumps(body | {"stream": True}).encode(), **JSON)
    assert status == 200 and text.startswith(b"data: ")
