"""The dashboard over HTTP: routes, events, access, headers, and that texts of a run stay texts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from foray.dashboard import app as app_module
from foray.dashboard import events as events_module
from foray.dashboard import files as files_module
from foray.dashboard.app import HEADERS, STATIC, TYPES, build_app
from foray.dashboard.openapi import ROUTES, describe
from foray.dashboard.source import RunData
from protocol.codec import encode
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState
from protocol.runtime.http.auth import ROLES, Access, Role
from protocol.runtime.http.openapi import EVENTS
from protocol.runtime.http.server import listening
from tests.support.dashboard_run import (
    EVIL,
    EVIL_IMAGE,
    dashboard,
    events,
    group,
    located,
    write_journal,
    write_run,
    write_stuffed,
)

TOKENS: dict[Role, str] = {role: secrets.token_urlsafe(32) for role in ROLES}
READS = [
    path.replace("{seq}", "7").replace("{place}", "0") + ("?names=loss" if path == "/api/steps" else "")
    for path, route in ROUTES.items()
    if path not in ("/health", "/ready") and route.kind != EVENTS and route.method == "get"
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


async def test_every_route_answers_for_a_finished_run(run_dir: Path) -> None:
    async with dashboard(run_dir) as url, aiohttp.ClientSession(url) as session:
        for path in (*READS, "/health", "/ready"):
            async with session.get(path) as answer:
                assert answer.status == 200, (path, await answer.text())
        async with session.get("/api/overview") as answer:
            seen = await answer.json()
        assert seen["state"] == "done" and seen["healthy"] and seen["last"]["step"] == 4
        assert seen["index"] == {"groups": 12, "trajectories": 24, "journal": 12}
        async with session.get("/api/steps", params={"names": "reward_mean,seconds/wait"}) as answer:
            assert (await answer.json())["columns"] == {"reward_mean": [0.1, 0.2, 0.3, 0.4], "seconds/wait": [0.5] * 4}
        async with session.get("/api/evaluations") as answer:
            assert (await answer.json())["validations"][0]["suites"]["held_out"]["em"] == 0.5


async def test_the_diagnosis_is_that_of_the_command(run_dir: Path) -> None:
    write_stuffed(run_dir)
    async with (
        dashboard(run_dir) as url,
        aiohttp.ClientSession(url) as session,
        session.get("/api/diagnosis") as answer,
    ):
        (found,) = (await answer.json())["findings"]
    assert found["name"] == "keyword-stuffing" and found["trajectories"][0]["seq"] == 32


async def test_logs_are_shown_from_their_end_and_settings_beside_their_defaults(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(run_dir / "logs" / "rollout-1.log", (1, 1))
    async with dashboard(run_dir) as url, aiohttp.ClientSession(url) as session:

        async def read(path: str) -> Any:
            async with session.get(path) as answer:
                return await answer.json()

        newest = await read("/api/logs")
        assert [file["name"] for file in newest["files"]] == ["learner", "rollout-1"] and newest["name"] == "learner"
        (entry,) = newest["entries"]
        assert entry["error"] and "error: no model" in entry["text"] and "pw" not in entry["text"]
        entries = (await read("/api/logs?name=rollout-1"))["entries"]
        assert [(one["level"], one["error"]) for one in entries] == [("INFO", False), ("ERROR", True), ("INFO", False)]
        assert "stopped" in entries[0]["text"] and entries[0]["at"] > entries[2]["at"]
        for wrong in ("engine-9", "../run", "%2e%2e%2fresolved"):
            assert "there is no log" in (await read(f"/api/logs?name={wrong}"))["error"]
        monkeypatch.setattr(files_module, "LOG_BYTES", 80)
        (entry,) = (await read("/api/logs?name=rollout-1"))["entries"]
        assert "stopped" in entry["text"], "half a line is left out"

        settings = {one["name"]: one for one in (await read("/api/settings"))["settings"]}
        assert (settings["run.steps"]["value"], settings["run.max_lag"]["value"]) == ("4", "0")
        assert (
            settings["run.steps"]["default"] != "4" and settings["run.seed"]["value"] == settings["run.seed"]["default"]
        )
        other = {"run": {"id": "test", "dir": str(run_dir)}, "engine": {"kind": {"type": "sglang"}}}
        (run_dir / "resolved.yaml").write_text(json.dumps(other))
        settings = {one["name"]: one for one in (await read("/api/settings"))["settings"]}
        assert (settings["engine.kind.type"]["value"], settings["engine.kind.type"]["default"]) == ("sglang", "cpu")
        assert settings["engine.kind.max_running"]["value"] == settings["engine.kind.max_running"]["default"] == "256"
        (run_dir / "resolved.yaml").write_text(json.dumps({"run": {"id": "test", "of_another_version": 1}}))
        found = await read("/api/settings")
        assert "of_another_version" in found["note"]
        assert {one["name"]: one["default"] for one in found["settings"]}["run.of_another_version"] is None


@pytest.mark.parametrize(
    "path",
    [
        *("/api/trajectories?order=x", "/api/trajectories?limit=-", "/api/groups/99", "/api/groups/x", "/api/steps"),
        *("/api/groups/7/99/tokens", "/export/groups/7/99", "/api/groups/7?epoch=-1", "/api/groups/²"),
    ],
)
async def test_a_wrong_request_is_explained(run_dir: Path, path: str) -> None:
    async with dashboard(run_dir) as url, aiohttp.ClientSession() as session, session.get(url + path) as answer:
        said = await answer.json()
        assert answer.status == 400 and said["error"] and "Traceback" not in json.dumps(said)


async def test_unknown_paths_and_methods_are_json_and_leave_the_folder_alone(run_dir: Path) -> None:
    async with dashboard(run_dir) as url, aiohttp.ClientSession() as session:
        for path in ("/no", "/../app.py", "/%2e%2e/app.py", "/vendor/SHA256SUMS", "/static/index.html", "/vendor/"):
            async with session.get(url + path) as answer:
                assert answer.status == 404 and (await answer.json())["error"], path
        for method in ("POST", "PUT", "DELETE"):
            async with session.request(method, url + "/api/overview") as answer:
                assert answer.status == 405


def test_the_document_lists_the_routes(run_dir: Path) -> None:
    app = build_app(RunData(located(run_dir)), Access())
    served = {r.canonical for r in app.router.resources()} - {"/", *(f"/{p}" for p in static_files())}
    assert served == set(describe()["paths"]) == set(ROUTES)


async def test_what_is_new_is_sent_once_and_again_to_those_who_missed_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "INTERVAL_S", 0.05)
    async with dashboard(run_dir) as url, aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(30)) as session:
        async with session.get("/events") as stream:
            assert stream.headers["Content-Type"] == "text/event-stream"
            first = await events(stream, 6)
            assert [one["event"] for one in first] == ["hello", "step", "state", "version", "engines", "problems"]
            assert json.loads(first[1]["data"])["step"] == 4
            await events(stream, 1)  # the index
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 5, "epoch": 1, "reward_mean": 0.9}) + "\n")
            (new,) = await events(stream, 1)
            assert new["event"] == "step" and json.loads(new["data"])["reward_mean"] == 0.9
        async with session.get("/events", headers={"Last-Event-ID": first[2]["id"]}) as stream:
            kinds = [one["event"] for one in await events(stream, 6)]
            assert kinds == ["hello", "version", "engines", "problems", "index", "step"], "what came after the id"
        for foreign in ("0000-3", "nonsense", f"{new['id'].partition('-')[0]}-{'9' * 30}"):
            async with session.get("/events", headers={"Last-Event-ID": foreign}) as stream:
                assert (await events(stream, 1))[0]["event"] == "reload"


async def test_a_client_that_missed_too_much_reloads(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "INTERVAL_S", 0.05)
    monkeypatch.setattr(events_module, "KEPT", 2)
    async with dashboard(run_dir) as url, aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(30)) as session:
        async with session.get("/events") as stream:
            hello, *_ = await events(stream, 2)
        async with session.get("/events", headers={"Last-Event-ID": hello["id"]}) as stream:
            assert (await events(stream, 1))[0]["event"] == "reload"


async def test_a_client_that_missed_one_event_reloads(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "INTERVAL_S", 0.05)
    monkeypatch.setattr(events_module, "KEPT", 2)
    async with dashboard(run_dir) as url, aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(30)) as session:

        async def first(last_id: str = "") -> dict[str, str]:
            async with session.get("/events", headers={"Last-Event-ID": last_id} if last_id else {}) as stream:
                return (await events(stream, 1))[0]

        async with session.get("/events") as stream:
            while (await events(stream, 1))[0]["event"] != "index":
                pass  # the last event of a run at rest
        boot, _, count = (await first())["id"].partition("-")
        kept = [f"{boot}-{int(count) - missed}" for missed in range(3)]
        assert [(await first(last_id))["event"] for last_id in kept] == ["hello"] * 3
        assert (await first(f"{boot}-{int(count) - 3}"))["event"] == "reload", "one of its three is no longer kept"


async def test_a_silent_run_sends_heartbeats(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "HEARTBEAT_S", 0.05)
    patient = aiohttp.ClientTimeout(30)
    async with (
        dashboard(run_dir) as url,
        aiohttp.ClientSession(timeout=patient) as session,
        session.get(f"{url}/events") as stream,
    ):
        found = await events(stream, 12)
    assert [one["event"] for one in found].count("") >= 2


async def test_the_number_of_listeners_is_bounded(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "CLIENTS", 1)
    async with dashboard(run_dir) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/events") as stream:
            await events(stream, 1)
            async with session.get("/events") as second:
                assert second.status == 503
        async with asyncio.timeout(20):
            while True:  # the server notices that the first has left
                async with session.get("/events") as third:
                    if third.status == 200:
                        break
                await asyncio.sleep(0.02)


async def test_nothing_is_looked_at_while_nobody_listens(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(app_module, "WATCHED_S", 0.0)
    monkeypatch.setattr(app_module, "INDEX_S", 0.01)
    looks: list[str] = []
    monkeypatch.setattr(RunData, "snapshot", lambda self: looks.append("snapshot"))
    async with dashboard(run_dir):
        monkeypatch.setattr("foray.dashboard.index.TrajectoryIndex.update", lambda self: looks.append("index"))
        await asyncio.sleep(0.3)
    assert not looks


async def test_the_index_grows_while_someone_looks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "INDEX_S", 0.05)
    async with dashboard(run_dir) as url, aiohttp.ClientSession(url) as session:
        write_journal(run_dir, [(5, group(13, 5))])
        async with asyncio.timeout(30):
            total = 24
            while total == 24:
                async with session.get("/api/trajectories") as answer:
                    total = (await answer.json())["total"]
                await asyncio.sleep(0.02)
        assert total == 26


async def test_a_live_run_shows_its_engines_and_problems(
    tmp_path: Path, client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "INTERVAL_S", 0.05)
    monkeypatch.setattr("foray.dashboard.source.FRESH_S", 0.0)
    directory, keys = write_run(tmp_path / "run", redis_url=redis_url), Keys("test")
    (directory / "run.json").write_text('{"id": "test", "state": "running"}')
    client.set(keys.metrics("learner", "l"), encode(MetricsSnapshot(process="learner", id="l", values={"step": 3.0})))
    client.zadd(keys.processes, {"learner:l": client.time()[0] + 60})
    async with dashboard(directory) as url, aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(30)) as session:
        async with session.get("/api/overview") as answer:
            seen = await answer.json()
        assert not seen["healthy"] and all(p["what"] and p["todo"] for p in seen["problems"])
        assert seen["figures"]["step"] == 3
        async with session.get("/events") as stream:
            await events(stream, 7)
            info = EngineInfo(id="e<1>", url="http://127.0.0.1:1", state=NodeState.READY, epoch=1, step=3)
            client.hset(keys.engine("e<1>"), "b", encode(info))
            client.zadd(keys.engines, {"e<1>": client.time()[0] + 60})
            found = {one["event"]: one["data"] for one in await events(stream, 2)}
        assert json.loads(found["engines"])[0] | {"running": 0, "waiting": 0} == {
            "id": "e<1>", "state": "ready", "version": "1.3", "running": 0, "waiting": 0,
        }  # fmt: skip
        async with session.get("/api/letters") as answer:
            assert (await answer.json())["letters"] == []
        assert seen["operator"], "without tokens everyone is"
        for engine, status in (("e%3C1%3E", 200), ("none", 400)):
            async with session.post(f"/api/engines/{engine}/drain", json={}) as answer:
                assert answer.status == status, await answer.text()
        assert client.smembers(keys.drain) == {b"e<1>"}
        ((_, entry),) = client.xrevrange(keys.events, count=1)
        assert entry[b"kind"] == b"drain-asked" and entry[b"text"] == b"engine e<1>"


async def test_only_an_operator_drains(tmp_path: Path, client: redis.Redis, redis_url: str) -> None:
    directory, keys = write_run(tmp_path / "run", redis_url=redis_url), Keys("test")
    info = EngineInfo(id="e", url="http://127.0.0.1:1", state=NodeState.READY, epoch=1, step=3)
    client.hset(keys.engine("e"), "b", encode(info))
    client.zadd(keys.engines, {"e": client.time()[0] + 60})
    async with dashboard(directory, Access(TOKENS)) as url, aiohttp.ClientSession(url) as session:
        for role, status in (("viewer", 403), ("node", 403), ("operator", 200)):
            headers = {"Authorization": f"Bearer {TOKENS[role]}"}
            async with session.get("/api/overview", headers=headers) as answer:
                assert (await answer.json())["operator"] == (role == "operator")
            async with session.post("/api/engines/e/drain", json={}, headers=headers) as answer:
                assert answer.status == status
            assert client.sismember(keys.drain, "e") == (role == "operator")
    async with dashboard(directory) as url, aiohttp.ClientSession(url) as session:
        for headers in ({"Origin": "http://evil.example"}, {"Content-Type": "text/plain"}):
            async with session.post("/api/engines/e/drain", data="{}", headers=headers) as answer:
                assert answer.status in (403, 415), "a page of another origin"


async def _status(url: str, path: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url + path, headers=headers) as answer:
        return answer.status


async def test_with_tokens_data_needs_one_and_the_page_asks_for_it(run_dir: Path) -> None:
    async with dashboard(run_dir, Access(TOKENS)) as url:
        for path in ("/", "/main.js", "/health"):
            assert await _status(url, path) == 200, "the page has no data of the run"
        for path in (*READS, "/events", "/no/such"):
            assert await _status(url, path) == 401, path
            assert await _status(url, path, Authorization=f"Bearer {secrets.token_urlsafe(32)}") == 401, path
        for path in READS:
            for token in TOKENS.values():
                assert await _status(url, path, Authorization=f"Bearer {token}") == 200, path
    async with dashboard(run_dir, Access({"node": TOKENS["node"]})) as url:
        assert await _status(url, "/api/overview") == 401


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}],
    ids=str,
)
async def test_a_foreign_page_reads_nothing(run_dir: Path, headers: dict[str, str]) -> None:
    async with dashboard(run_dir) as url:
        for path in (*READS, "/", "/main.js", "/events"):
            assert await _status(url, path, **headers) == 403, path
        assert await _status(url, "/", Host="localhost:80") == 200


async def test_without_a_token_it_listens_on_loopback_only(run_dir: Path) -> None:
    app = build_app(RunData(located(run_dir)), Access())
    with pytest.raises(UserError, match="without a token"):
        async with listening(app, "0.0.0.0", 0, access=Access(), setting="--host", todo=""):
            pass


async def test_every_answer_has_the_security_headers(run_dir: Path) -> None:
    async with dashboard(run_dir) as url, aiohttp.ClientSession() as session:
        for path in ("/", "/main.js", "/api/overview", "/no", "/api/groups/x", "/events", "/export/groups/7"):
            async with session.get(url + path) as answer:
                for name, value in HEADERS.items():
                    if name not in ("Cache-Control", "Content-Security-Policy"):
                        assert answer.headers[name] == value, path
                assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'"), path
                assert "unsafe" not in answer.headers["Content-Security-Policy"] or path.startswith("/export")
        async with session.get(url + "/main.js") as answer:
            tag = answer.headers["ETag"]
        assert await _status(url, "/main.js", **{"If-None-Match": tag}) == 304


def static_files() -> list[str]:
    return sorted(p.relative_to(STATIC).as_posix() for p in STATIC.rglob("*") if p.suffix in TYPES)


def test_the_pages_build_text_only_and_load_nothing_from_elsewhere() -> None:
    """No function that parses HTML or runs a text, no inline script or style, no address of another host."""
    own = [p for p in STATIC.rglob("*") if p.is_file() and p.parent.name != "vendor"]
    assert len(own) > 10
    banned = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|\beval\s*\("
        r"|new Function|srcdoc|\bimport\(|setTimeout\(\s*[\"'`]"
    )
    foreign = re.compile(r"https?:(?!//www\.w3\.org/2000/svg)|[\"'(]//\w")
    for path in own:
        text = path.read_text()
        assert not banned.findall(text) and not foreign.findall(text), path
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", page)


def test_vendored_files_are_as_they_came() -> None:
    folder = STATIC / "vendor"
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    files = {p.name for p in folder.iterdir()} - {"SHA256SUMS"}
    assert files == listed.keys() and any(name.endswith("LICENSE") for name in files)
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert sum(p.stat().st_size for p in STATIC.rglob("*") if p.is_file()) < 300_000


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("path", ["/export/groups/7", "/export/groups/7/0"])
async def test_an_exported_page_holds_hostile_passages_as_text(run_dir: Path, path: str) -> None:
    async with dashboard(run_dir) as url, aiohttp.ClientSession() as session, session.get(url + path) as answer:
        assert answer.headers["Content-Disposition"].startswith('attachment; filename="seq-7')
        html = await answer.text()
    found = Elements()
    found.feed(html)
    assert EVIL in found.text and EVIL_IMAGE in found.text, "the passages are there, as text"
    assert not {tag for tag, _ in found.tags} & {"script", "img", "iframe", "link", "object", "a"}
    assert not [
        name for _, attrs in found.tags for name, _ in attrs if name.startswith("on") or name in ("src", "href")
    ]
    assert found.text.count("reward 1") == 1 and "gold answers" in found.text


async def test_hostile_texts_are_json_strings(run_dir: Path) -> None:
    async with dashboard(run_dir) as url, aiohttp.ClientSession() as session:
        for path in ("/api/groups/7", "/api/groups/7/0/tokens"):
            async with session.get(url + path) as answer:
                assert answer.content_type == "application/json" and EVIL in json.dumps(await answer.json())


def test_the_command_serves_a_run_until_ctrl_c(run_dir: Path) -> None:
    call = [sys.executable, "-m", "foray", "dashboard", str(run_dir), "--port", "0"]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"run test: (http://127\.0\.0\.1:\d+)/ ", line)
        assert found, line
        assert asyncio.run(_status(found[1], "/api/overview")) == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and not process.stderr.read()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.communicate()
