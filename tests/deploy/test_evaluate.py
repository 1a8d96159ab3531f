"""Evaluation over HTTP: requests, scores, and errors when no server answers."""

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
from deploy.launcher.run_dir import write_record
from deploy.monitor import evaluate as module
from deploy.monitor.evaluate import RECONNECTS, Dropped, EvalScore, answered, evaluate
from protocol.errors import ForayError, UserError
from rollout_server.api.episodes import EpisodesRequest, summarise
from tests.support.messages import make_question


class Answers(http.server.BaseHTTPRequestHandler):
    """Reads each request with the rollout server's own model, and streams one right and one failed episode a question.

    policy  what the episodes say of the policy
    script  what the connections do, one after the other: version of their episodes, and how they end
    """

    asked: list[EpisodesRequest]
    script: list[tuple[str, str]]
    policy: dict[str, str]
    status = 200

    def do_POST(self) -> None:
        wanted = EpisodesRequest.model_validate_json(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(wanted)
        self.send_response(self.status)
        self.end_headers()
        if self.status != 200:
            self.wfile.write(json.dumps({"error": "full"}).encode())
            return
        version, end = self.script.pop(0) if self.script else ("1.5", "summary")
        questions = wanted.questions if end == "summary" else wanted.questions[:1]
        for episode in (e for q in questions for e in episodes(q.id, version, wanted.n)):
            self.wfile.write(f"data: {json.dumps(episode | self.policy)}\n\n".encode())
        if end == "error":
            self.wfile.write(b'event: error\ndata: {"error": "no engine holds it"}\n\n')
        elif end == "summary":
            self.wfile.write(b"event: summary\ndata: {}\n\n")

    def log_message(self, *args: object) -> None:
        pass


def episodes(question: str, version: str, n: int) -> list[dict[str, Any]]:
    """Those of index 0 are right; the others fail in requests of more than one episode a question and temperature 1."""
    right = {"status": "answered", "rewards": {"em": 1.0, "f1": 0.5}, "searches": 2, "turns": 3, "version": version}
    wrong = {"status": "failed", "rewards": {"em": 0.0}, "searches": 0, "turns": 1, "version": ""}
    made = [right, *([right] * (n - 2)), wrong] if n > 1 else [right]
    return [{"question_id": question, "index": i} | e for i, e in enumerate(made)]


@pytest.fixture
def server() -> Iterator[tuple[str, type[Answers]]]:
    handler = type("Handler", (Answers,), {"asked": [], "script": [], "policy": {"run": "r", "model": "m"}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", handler
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECONNECT_S", 0.01)


QUESTIONS = [make_question(seq) for seq in range(1, 4)]


def test_all_questions_go_in_one_request_that_holds_one_version(server: tuple[str, type[Answers]]) -> None:
    url, handler = server
    ended: list[str] = []
    score = evaluate(
        url,
        QUESTIONS,
        n=2,
        temperature=0.0,
        top_p=0.9,
        top_k=7,
        search=False,
        concurrency=2,
        each=lambda e: ended.append(e["question_id"]),
    )
    (asked,) = handler.asked
    assert [q.id for q in asked.questions] == [q.id for q in QUESTIONS]
    assert asked.questions[0].question == QUESTIONS[0].text and asked.questions[0].answers == QUESTIONS[0].answers
    assert (asked.n, asked.temperature, asked.search, asked.pin, asked.stream) == (2, 0.0, False, True, True)
    assert (asked.concurrency, asked.top_p, asked.top_k) == (2, 0.9, 7)
    assert len(ended) == 6 and score.versions == {"1.5": 3}


def test_failed_episodes_say_nothing_of_the_policy(server: tuple[str, type[Answers]]) -> None:
    score = evaluate(server[0], QUESTIONS[:1], n=2)
    assert score.means == {"em": 1.0, "f1": 0.5} and score.failed == 1 and score.mean("searches") == 1.0
    assert EvalScore().means == {} and EvalScore().mean("searches") == 0.0


def test_a_mean_is_over_the_episodes_that_have_the_reward_as_on_the_server() -> None:
    mixed = [
        *episodes("q1", "1.5", 1),
        {**episodes("q2", "1.5", 1)[0], "rewards": {"f1": 0.0}, "tokens_generated": 1},
    ]
    mixed[0]["tokens_generated"] = 1
    assert EvalScore(mixed).means == {"em": 1.0, "f1": 0.25}
    assert summarise(mixed)["em"] == 1.0


def test_a_prompt_that_is_too_long_is_final_and_says_nothing_of_the_policy() -> None:
    long = {"question_id": QUESTIONS[0].id, "index": 0, "status": "failed", "cause": "prompt_too_long", "version": ""}
    score = EvalScore([long, *episodes(QUESTIONS[1].id, "1.5", 1)])
    assert (score.failed, score.too_long, score.means["em"], score.versions) == (0, 1, 1.0, {"1.5": 1})
    assert answered(QUESTIONS, score.episodes, 1) == score.episodes, "it is not asked again"


def test_a_connection_that_breaks_asks_only_what_was_not_answered(server: tuple[str, type[Answers]]) -> None:
    server[1].script += [("1.5", "cut"), ("1.5", "cut")]
    score = evaluate(server[0], QUESTIONS)
    assert [len(asked.questions) for asked in server[1].asked] == [3, 2, 1]
    assert [e["question_id"] for e in score.episodes] == [q.id for q in QUESTIONS] and score.versions == {"1.5": 3}


def test_a_connection_that_never_brings_anything_is_given_up(server: tuple[str, type[Answers]]) -> None:
    server[1].script += [("1.5", "cut")] * 9
    with pytest.raises(Dropped, match="before its summary"):
        evaluate(server[0], QUESTIONS, n=2)
    assert len(server[1].asked) == RECONNECTS + 1, "its one question failed each time, and nothing else came"


def test_versions_that_changed_between_two_connections_are_shown(server: tuple[str, type[Answers]]) -> None:
    server[1].script += [("1.5", "cut"), ("1.6", "summary")]
    assert evaluate(server[0], QUESTIONS).versions == {"1.5": 1, "1.6": 2}


def test_an_evaluation_whose_version_was_lost_is_an_error(server: tuple[str, type[Answers]]) -> None:
    server[1].script += [("1.5", "error")]
    ended: list[dict[str, Any]] = []
    with pytest.raises(ForayError, match="ended early: no engine holds it"):
        evaluate(server[0], QUESTIONS, each=ended.append)
    assert len(ended) == 1 and len(server[1].asked) == 1


def test_two_questions_of_one_id_are_refused(server: tuple[str, type[Answers]]) -> None:
    with pytest.raises(UserError, match="are not unique"):
        evaluate(server[0], [QUESTIONS[0], QUESTIONS[0]])


def test_a_refusal_is_reported_with_the_servers_message(server: tuple[str, type[Answers]]) -> None:
    server[1].status = 503
    with pytest.raises(ForayError, match=r"answered 503: .*full"):
        evaluate(server[0], [make_question(1)])


def test_a_missing_server_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no rollout server answers"):
        evaluate("http://127.0.0.1:1", [make_question(1)])


def command_run(url: str, tmp_path: Path, **given: Any) -> int:
    write_record(tmp_path, {"rollouts": [url]})
    lines = [json.dumps({"id": q.id, "question": q.text, "answers": q.answers}) for q in QUESTIONS]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(lines))
    args = {
        "where": str(tmp_path),
        "questions": questions,
        "limit": None,
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
    }
    args |= {"no_search": False, "concurrency": 64, "timeout": 10.0, "out": None, "resume": False, "json": True}
    return command.run(argparse.Namespace(**args | given))


def test_the_command_finds_the_server_of_a_run_directory_and_names_the_version(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert command_run(server[0], tmp_path, limit=1, n=2, out=out) == 1, "an episode failed"
    report = json.loads(capsys.readouterr().out)
    assert report["questions"] == 1 and report["em"] == 1.0 and report["failed"] == 1
    assert report["version"] == "1.5" and report["versions"] == {"1.5": 1}
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(e["index"], e["version"], e["temperature"], e["top_p"]) for e in lines] == [
        (0, "1.5", 1.0, 1.0),
        (1, "", 1.0, 1.0),
    ]
    assert command_run(server[0], tmp_path, json=False) == 0
    assert "version      1.5\n" in capsys.readouterr().out


def test_a_mixture_of_versions_is_called_one_and_is_no_success(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server[1].script += [("1.5", "cut"), ("1.6", "summary")]
    assert command_run(server[0], tmp_path, json=False) == 1
    report = capsys.readouterr()
    assert "versions     1.5 (1 episodes), 1.6 (2 episodes)" in report.out and "\nversion " not in report.out
    assert "mixes several policy versions" in report.err


def test_resume_asks_what_the_file_does_not_answer(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    server[1].script += [("1.5", "error")]
    with pytest.raises(ForayError):
        command_run(server[0], tmp_path, out=out)
    assert len(out.read_text().splitlines()) == 1 and "--resume" in capsys.readouterr().err
    with out.open("a") as file:
        file.write('{"question_id": "half')
    assert command_run(server[0], tmp_path, out=out, resume=True) == 0
    assert [len(asked.questions) for asked in server[1].asked] == [3, 2]
    assert [json.loads(line)["question_id"] for line in out.read_text().splitlines()] == [q.id for q in QUESTIONS]
    assert json.loads(capsys.readouterr().out)["episodes"] == 3
    with pytest.raises(UserError, match=r"was written with temperature 1\.0"):
        command_run(server[0], tmp_path, out=out, resume=True, temperature=0.0)
    with pytest.raises(UserError, match=r"was written with top_p 1\.0"):
        command_run(server[0], tmp_path, out=out, resume=True, top_p=0.9)


def test_resume_keeps_what_a_limit_leaves_out(server: tuple[str, type[Answers]], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert command_run(server[0], tmp_path, out=out) == 0
    assert command_run(server[0], tmp_path, out=out, resume=True, limit=1) == 0
    assert len(server[1].asked) == 1 and len(out.read_text().splitlines()) == len(QUESTIONS)


@pytest.mark.parametrize(("name", "value"), [("run", "another"), ("model", "n"), ("lineage_id", "1")])
def test_resume_refuses_the_answers_of_another_policy(
    server: tuple[str, type[Answers]], tmp_path: Path, name: str, value: str
) -> None:
    out = tmp_path / "out.jsonl"
    assert command_run(server[0], tmp_path, out=out, limit=1) == 0
    before = out.read_text()
    server[1].policy = server[1].policy | {name: value}
    with pytest.raises(UserError, match=f"another policy: {name} "):
        command_run(server[0], tmp_path, out=out, resume=True)
    assert out.read_text() == before


@pytest.mark.parametrize("change", [{"text": "another ?"}, {"answers": ("another",)}])
def test_resume_refuses_questions_that_were_changed(
    server: tuple[str, type[Answers]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    out = tmp_path / "out.jsonl"
    assert command_run(server[0], tmp_path, out=out) == 0
    monkeypatch.setitem(globals(), "QUESTIONS", [QUESTIONS[0].model_copy(update=change), *QUESTIONS[1:]])
    with pytest.raises(UserError, match="another text or other answers"):
        command_run(server[0], tmp_path, out=out, resume=True)


def test_a_file_of_episodes_is_not_overwritten(server: tuple[str, type[Answers]], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert command_run(server[0], tmp_path, out=out) == 0
    before = out.read_text()
    for url in (server[0], "http://127.0.0.1:1"):
        with pytest.raises(UserError, match="already exists"):
            command_run(url, tmp_path, out=out)
    assert out.read_text() == before and len(server[1].asked) == 1
    with pytest.raises(UserError, match="no rollout server"):
        command_run("http://127.0.0.1:1", tmp_path, out=out, resume=True, n=2)
    assert out.read_text() == before
