"""`foray eval` of an OpenAI-compatible endpoint and with a judge: over HTTP, with a retriever of its own."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foray.cli import main as foray
from foray.evaluation.models import EpisodeFailed, cut_at_stop, read_reply
from foray.evaluation.store import read_rows

PASSAGES = [{"document": {"id": "p1", "contents": '"Emma"\nEmma is by Jane Austen.'}, "score": 1.0}]


class Services(http.server.BaseHTTPRequestHandler):
    """An endpoint, a judge and a retriever at one port. `answer`: what the model says to a request's body."""

    bodies: list[dict[str, Any]]
    keys: list[str]
    answers: list[str]
    down = False

    def do_GET(self) -> None:
        known = {"/v1/models": {"data": [{"id": "m"}]}, "/info": {"fingerprint": "abc", "passages": 1}}
        self._send(known.get(self.path, {"status": "ok"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/retrieve":
            return self._send({"result": [PASSAGES for _ in body["queries"]]})
        if self.down:
            return self._send({"error": "bad"}, 400)
        self.bodies.append(body)
        self.keys.append(self.headers.get("Authorization", ""))
        if body["model"] == "judge":
            right = "Jane Austen" in json.loads(body["messages"][1]["content"])["candidate_answer"]
            return self._send(chat(json.dumps({"rationale": "r", "score": float(right)})))
        said = self.answers[min(len(self.bodies) - 1, len(self.answers) - 1)]
        text, stopped = cut_at_stop(said, body.get("stop", []))
        if self.path == "/v1/completions":
            listed = {"tokens": [text], "token_logprobs": [-0.01]}
            return self._send(
                {"choices": [{"text": text, "finish_reason": "stop", "logprobs": listed}], "usage": USAGE}
            )
        return self._send(chat(text, "stop" if stopped else "length"))

    def _send(self, value: Any, status: int = 200) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: object) -> None:
        pass


USAGE = {"prompt_tokens": 20, "completion_tokens": 5}


def chat(text: str, finish: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": USAGE}


@pytest.fixture
def services() -> Iterator[tuple[str, type[Services]]]:
    handler = type("Handler", (Services,), {"bodies": [], "keys": [], "answers": ["Jane Austen"]})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", handler
        finally:
            listening.shutdown()
            thread.join()


def evaluate(url: str, tmp_path: Path, *more: str) -> int:
    questions = [{"id": str(n), "question": f"Who wrote Emma, {n}?", "answers": ["Jane Austen"]} for n in range(3)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    suite = ["--suite", str(tmp_path / "q.jsonl"), "--out", str(tmp_path / "out")]
    return foray(["eval", f"{url}/v1", *suite, "--retriever", url, *more])


def test_an_endpoint_is_evaluated_by_every_method_that_it_can_serve(
    services: tuple[str, type[Services]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    url, handler = services
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0")
    handler.answers = ["So the answer is: Jane Austen."]
    assert evaluate(url, tmp_path, "--methods", "direct", "cot", "rag", "iter_retgen", "ircot", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    means = {s["method"]: s["metrics"]["em"]["mean"] for s in report["scores"]}
    assert means == dict.fromkeys(("direct", "cot", "rag", "iter_retgen", "ircot"), 1.0)
    assert {s["method"]: s["searches"] for s in report["scores"]}["iter_retgen"] == 3
    assert report["protocol"]["subject"]["model"] == "m" == handler.bodies[0]["model"]
    assert report["protocol"]["retriever"] == {"topk": 3, "fingerprint": "abc", "passages": 1}
    assert set(handler.keys) == {"Bearer sk-0"} and {c["tokens_read"] for c in report["scores"]} == {20.0, 60.0}
    assert all(body["temperature"] == 0.0 for body in handler.bodies)


def test_the_policys_loop_runs_over_messages(services: tuple[str, type[Services]], tmp_path: Path) -> None:
    url, handler = services
    turns = [
        "<think> hm </think> <search> Emma </search>",
        "no action",
        "<think> so </think> <answer> Jane Austen </answer>",
    ]
    handler.answers = turns
    assert evaluate(url, tmp_path, "--limit", "1") == 0
    (row,) = read_rows(tmp_path / "out")
    assert (row["answer"], row["searches"], row["turns"], row["failure"]) == ("Jane Austen", 1, 3, "")
    roles = [[m["role"] for m in body["messages"]] for body in handler.bodies]
    assert roles[2] == ["user", "assistant", "user", "assistant", "user"]
    said = [m["content"] for m in handler.bodies[2]["messages"]]
    assert said[1].endswith("</search>"), "the stop string is part of the turn"
    assert "<information>Doc 1(Title: " in said[2] and "previous action is invalid" in said[4]


def test_flare_needs_completions_with_log_probs(
    services: tuple[str, type[Services]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = services
    handler.answers = ["So the answer is: Jane Austen."]
    assert evaluate(url, tmp_path, "--methods", "flare") == 2
    assert "use --api completions" in capsys.readouterr().err
    assert evaluate(url, tmp_path, "--methods", "flare", "--api", "completions", "--out", str(tmp_path / "b")) == 0
    assert handler.bodies[0]["logprobs"] == 1 and {r["searches"] for r in read_rows(tmp_path / "b")} == {0}


def test_a_judge_grades_answers_once(
    services: tuple[str, type[Services]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = services
    handler.answers = ["the novelist Jane Austen", "Dickens"]
    judge = ["--judge", f"{url}/v1", "--judge-model", "judge", "--methods", "direct"]
    assert evaluate(url, tmp_path, *judge, "--concurrency", "1", "--json") == 0
    (cell,) = json.loads(capsys.readouterr().out)["scores"]
    assert cell["metrics"]["judge"]["mean"] == pytest.approx(1 / 3) and cell["metrics"]["em"]["mean"] == 0.0
    calls = len(handler.bodies)
    assert evaluate(url, tmp_path, *judge, "--concurrency", "1", "--resume") == 0
    assert len(handler.bodies) == calls, "nothing is asked twice"


def test_a_judge_that_fails_is_named(
    services: tuple[str, type[Services]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = services
    handler.answers = ["the novelist Jane Austen"]
    judge = ["--judge", "http://127.0.0.1:1/v1", "--judge-model", "judge", "--methods", "direct"]
    assert evaluate(url, tmp_path, *judge) == 1
    assert "the judge failed: " in capsys.readouterr().err


def test_an_endpoint_that_refuses_ends_the_evaluation_and_a_resume_completes_it(
    services: tuple[str, type[Services]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = services
    handler.down = True
    assert evaluate(url, tmp_path, "--methods", "direct", "--n", "10") == 1
    assert "20 episodes failed one after the other, the last with: endpoint" in capsys.readouterr().err
    handler.down = False
    assert evaluate(url, tmp_path, "--methods", "direct", "--n", "10", "--resume") == 0
    assert len(read_rows(tmp_path / "out")) == 30


@pytest.mark.parametrize("reply", [{}, {"choices": []}, chat(None), {"choices": [{"text": 3}]}, [], "x"])  # type: ignore[arg-type]
def test_an_unusable_reply_is_no_text(reply: Any) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        read_reply(reply, [])


@pytest.mark.parametrize("counts", [{"completion_tokens": 10**30}, {"prompt_tokens": -5}])
def test_a_usage_that_cannot_be_is_no_usage(counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="usage of"):
        read_reply(chat("text") | {"usage": USAGE | counts}, [])


def test_an_endpoint_that_drips_is_given_up_after_the_timeout(
    services: tuple[str, type[Services]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = services
    over = threading.Event()

    def drip(self: Services, value: Any, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        while not over.wait(0.02):
            self.wfile.write(b" ")

    send = Services._send
    monkeypatch.setattr(handler, "_send", lambda self, v, s=200: drip(self, v) if "choices" in v else send(self, v, s))
    try:
        assert evaluate(url, tmp_path, "--methods", "direct", "--limit", "1", "--timeout", "0.3") == 1
    finally:
        over.set()
    (row,) = read_rows(tmp_path / "out")
    assert (row["status"], row["cause"], row["detail"]) == ("failed", "timeout", "it took more than 0.3 s (--timeout)")


def test_a_failure_names_its_cause() -> None:
    assert str(EpisodeFailed("endpoint", "status 400")) == "endpoint: status 400"
