"""`foray serve` and `foray.serve` with real processes: the demo's model behind OpenAI's API, and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import foray
from deploy.run.run_dir import is_held
from foray.commands import serve as command
from foray.evaluation.targets import ServingOptions, Target
from protocol.errors import ForayError, UserError
from tests.support.waiting import wait_until

QUESTION = [{"role": "user", "content": "what is the birthplace of iris xenia ?"}]


class Library:
    def search(self, query: str) -> list[dict[str, str]]:
        return [{"title": "iris xenia", "text": "iris xenia left wendel henna and serves iris lotta ."}]


@pytest.fixture(scope="module")
def server(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[foray.PolicyServer]:
    out = tmp_path_factory.mktemp("serving")
    overrides = ["rollout.episode.template=demo", "rollout.episode.max_context=256", "rollout.stream_interval=1"]
    with foray.serve(warm_model, name="demo", search_engine=Library(), out=out, overrides=overrides) as served:
        yield served


def post(server: foray.PolicyServer, **body: Any) -> urllib.request.Request:
    data = json.dumps({"messages": QUESTION, "temperature": 0} | body).encode()
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    return urllib.request.Request(f"{server.url}/chat/completions", data, headers)


def ask(server: foray.PolicyServer, **body: Any) -> dict[str, Any]:
    with urllib.request.urlopen(post(server, **body), timeout=120) as response:
        return json.load(response)  # type: ignore[no-any-return]


def request_of(server: foray.PolicyServer, path: str) -> urllib.request.Request:
    url = server.url.removesuffix("/v1") + path
    return urllib.request.Request(url, headers={"Authorization": f"Bearer {server.token}"})


def metrics(server: foray.PolicyServer) -> dict[str, float]:
    with urllib.request.urlopen(request_of(server, "/metrics"), timeout=60) as response:
        lines = [line.rpartition(" ") for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demos_model_searches_and_answers_64_clients(server: foray.PolicyServer) -> None:
    assert server.models == ("demo", "demo-bare") and "demo-bare" in repr(server)
    with ThreadPoolExecutor(64) as clients:
        looped = list(clients.map(lambda _: ask(server, model="demo"), range(64)))
        bare = list(clients.map(lambda _: ask(server, model="demo-bare", max_tokens=12), range(64)))
    assert all(answer["foray"]["searches"] for answer in looped)
    found = looped[0]["foray"]["searches"][0]["passages"][0]
    assert found == {"title": "iris xenia", "text": Library().search("")[0]["text"], "score": 0.0}
    assert {answer["choices"][0]["message"]["content"] for answer in looped} == {"wendel henna"}
    assert {answer["usage"]["completion_tokens"] for answer in bare} <= set(range(1, 13))
    assert all(answer["foray"]["version"] is None for answer in (*looped, *bare)), "a model has no step"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_that_leaves_ends_the_engines_request(server: foray.PolicyServer) -> None:
    with urllib.request.urlopen(post(server, model="demo-bare", temperature=9.0, seed=1, stream=True), timeout=60):
        pass  # leaves at the first byte
    wait_until(lambda: metrics(server)["foray_rollout_chat_in_progress"] == 0, "a free place")
    assert metrics(server)["foray_rollout_requests_in_flight"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_in_progress_is_served_by_its_own_engines(server: foray.PolicyServer, tmp_path: Path) -> None:
    run = Path(server.directory) / "serve"
    assert is_held(run)
    with foray.Run(run).serve(out=tmp_path / "out") as second:
        answer = ask(second, model=second.models[0])
        assert answer["choices"][0]["message"]["content"] == "wendel henna" and answer["foray"]["version"] == 0
        with urllib.request.urlopen(request_of(second, "/v1/models"), timeout=60) as response:
            assert {model["foray"]["version"] for model in json.load(response)["data"]} == {0}
    assert is_held(run) and ask(server, model="demo")["choices"], "it goes on"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_ends_with_the_program_that_started_it(warm_model: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "foray", "serve", str(warm_model), "--json", "--until-stdin-ends", "--port", "0"]
    argv += ["--dir", str(tmp_path), "--no-search", "rollout.episode.template=demo", "rollout.episode.max_context=256"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["token"].startswith("sk-") and told["models"][1].endswith("-bare")
        served = foray.PolicyServer(told["url"], told["token"], told["models"], tmp_path, process, None)
        assert ask(served, model=told["models"][0])["foray"]["searches"][0]["passages"] == []
        process.stdin.close()
        assert process.wait(120) == 0
    assert not is_held(tmp_path / "serve")
    with pytest.raises(ForayError, match=r"(?s)foray serve failed.*max_context = 40 is too small"):
        foray.serve(warm_model, out=tmp_path, overrides=["rollout.episode.max_context=40"])


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    for where, why in (("nothing", "cannot serve .*nothing"), ("http://host:1/v1", "cannot serve http")):
        with pytest.raises(UserError, match=why):
            command.run(Namespace(policy=where if "://" in where else str(tmp_path / where)))


def test_the_token_is_given_or_made_and_leaves_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, own = command._token()
    assert own and len(made) > 40 and made != command._token()[0]
    given = "0123456789abcdefghijABCDEFGHIJKL"
    (tmp_path / "token").write_text(given + "\n")
    for name, value in ((command.TOKEN, given), (f"{command.TOKEN}_FILE", str(tmp_path / "token"))):
        monkeypatch.setenv(name, value)
        assert command._token() == (given, False) and name not in os.environ
    monkeypatch.setenv(command.TOKEN, "short")
    with pytest.raises(UserError, match="FORAY_SERVE_TOKEN is too weak"):
        command._token()


def test_an_origin_is_what_browsers_send() -> None:
    assert command._origin("https://Example.org/") == "https://example.org" and command._origin("*") == "*"
    assert command._origin("http://127.0.0.1:8650") == "http://127.0.0.1:8650"
    for wrong in ("example.org", "https://example.org/page", "https://", "null"):
        with pytest.raises(UserError, match="is no origin"):
            command._origin(wrong)


def test_a_retriever_is_started_only_if_one_is_configured(tmp_path: Path) -> None:
    model = Target("model", str(tmp_path))

    def searches(*overrides: str, retriever: str = "") -> bool:
        return command._searches(model, ServingOptions(None, overrides, retriever))

    assert not searches() and searches(retriever="http://host:1") and searches("retriever.corpus=c.jsonl")
    assert searches("rollout.search.urls=[http://host:1]") and not searches("rollout.search.type=none")
    assert command._searches(Target("run", str(tmp_path)), ServingOptions())
