"""Asking questions over HTTP: what is sent, how scores add up, and what happens when nobody answers."""

from __future__ import annotations

import argparse
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.commands import eval as command
from deploy.evaluate import Score, evaluate
from deploy.rundir import write_record
from protocol.errors import ForayError, UserError
from protocol.testing import make_question
from rollout_server.episodes import EpisodesRequest


class Answers(http.server.BaseHTTPRequestHandler):
    """Reads each request with the rollout server's own model, and answers one right and one failed episode."""

    asked: list[EpisodesRequest]
    status = 200

    def do_POST(self) -> None:
        wanted = EpisodesRequest.model_validate_json(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(wanted)
        body = {"episodes": [e for q in wanted.questions for e in episodes(q.id)]}
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps(body if self.status == 200 else {"error": "full"}).encode())

    def log_message(self, *args: object) -> None:
        pass


def episodes(question: str) -> list[dict[str, Any]]:
    return [
        {"question_id": question, "status": "answered", "rewards": {"em": 1.0, "f1": 0.5}, "searches": 2, "turns": 3},
        {"question_id": question, "status": "failed", "rewards": {"em": 0.0}, "searches": 0, "turns": 1},
    ]


@pytest.fixture
def server() -> Iterator[tuple[str, type[Answers]]]:
    handler = type("Handler", (Answers,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", handler
        finally:
            listening.shutdown()
            thread.join()


def test_questions_go_in_blocks_that_the_rollout_server_understands(server: tuple[str, type[Answers]]) -> None:
    url, handler = server
    done: list[int] = []
    questions = [make_question(seq) for seq in range(1, 4)]
    evaluate(url, questions, n=2, temperature=0.0, search=False, block=2, progress=done.append)
    assert [len(r.questions) for r in handler.asked] == [2, 1] and done == [2, 3]
    first = handler.asked[0]
    assert first.questions[0].question == questions[0].text and first.questions[0].answers == questions[0].answers
    assert (first.n, first.temperature, first.search, first.pin) == (2, 0.0, False, True)


def test_failed_episodes_say_nothing_of_the_policy(server: tuple[str, type[Answers]]) -> None:
    score = evaluate(server[0], [make_question(1)])
    assert score.means == {"em": 1.0, "f1": 0.5} and score.failed == 1 and score.mean("searches") == 1.0
    assert Score().means == {} and Score().mean("searches") == 0.0


def test_a_refusal_is_told_with_what_the_server_said(server: tuple[str, type[Answers]]) -> None:
    server[1].status = 503
    with pytest.raises(ForayError, match=r"answered 503: .*full"):
        evaluate(server[0], [make_question(1)])


def test_nobody_there_is_a_users_error() -> None:
    with pytest.raises(UserError, match="no rollout server answers"):
        evaluate("http://127.0.0.1:1", [make_question(1)])


def test_the_command_finds_the_server_of_a_run_directory(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path, {"rollouts": [server[0]]})
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "who?", "answers": ["she"]}\n{"question": "what?", "answers": ["it"]}\n')
    args = {"where": str(tmp_path), "questions": questions, "limit": 1, "n": 1, "temperature": 1.0, "no_search": False}
    args |= {"block": 64, "timeout": 10.0, "out": tmp_path / "out.jsonl", "json": True}
    assert command.run(argparse.Namespace(**args)) == 1, "an episode failed"
    told = json.loads(capsys.readouterr().out)
    assert told["questions"] == 1 and told["em"] == 1.0 and told["failed"] == 1
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
