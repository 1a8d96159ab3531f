"""Evaluation over HTTP: requests, scores, and errors when no server answers."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.run.run_dir import RESOLVED, hold, write_record
from foray.cli import main as foray
from foray.evaluation.store import EPISODES, read_rows, sole_writer
from protocol.errors import ForayError, UserError
from protocol.run_meta import LINEAGE_FILE
from protocol.runtime import episodes as module
from protocol.runtime.episodes import RECONNECTS, Dropped, EvalScore, answered, evaluate
from rollout_server.api.episodes import EpisodesRequest, EpisodesSummary
from tests.support.messages import make_question
from tests.support.registered import registered


class Answers(http.server.BaseHTTPRequestHandler):
    """Reads each request with the rollout server's own model, and streams one right and one failed episode a question.

    policy  what the episodes say of the policy
    script  what the connections do, one after the other: version of their episodes, and how they end
    """

    asked: list[EpisodesRequest]
    script: list[tuple[str, str]]
    policy: dict[str, str]
    status = 200

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

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
    assert EpisodesSummary(mixed).values()["em"] == 1.0


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


@pytest.fixture(autouse=True)
def runs_redis(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORAY_REDIS_URL", redis_url)


def command_run(url: str, tmp_path: Path, *more: str) -> int:
    """`foray eval` of a run directory whose rollout server is at `url`."""
    lines = [json.dumps({"id": q.id, "question": q.text, "answers": q.answers}) for q in QUESTIONS]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    given = ["--suite", str(tmp_path / "asked.jsonl"), "--out", str(tmp_path / "out"), *more]
    (tmp_path / RESOLVED).write_text(f"run: {{id: r, dir: {tmp_path}}}\n")
    with hold(tmp_path), registered(os.environ["FORAY_REDIS_URL"], "r", "rollout", url):
        write_record(tmp_path, {"id": "r"})
        return foray(["eval", str(tmp_path), *given])


def stored(tmp_path: Path) -> list[dict[str, Any]]:
    return read_rows(tmp_path / "out")


def test_the_command_finds_the_server_of_a_run_directory_and_names_the_version(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_run(server[0], tmp_path, "--limit", "1", "--n", "2", "--json") == 1, "an episode failed"
    report = json.loads(capsys.readouterr().out)
    (cell,) = report["scores"]
    assert (cell["method"], cell["data_set"], cell["episodes"], cell["failed"]) == ("policy", "asked", 2, 1)
    assert report["versions"] == {"1.5": 1} and report["protocol"]["sampler"]["temperature"] == 0.0
    assert [(e["index"], e["version"], e["rewards"]["em"]) for e in stored(tmp_path)] == [(0, "1.5", 1.0), (1, "", 0.0)]
    (tmp_path / "more").mkdir()
    assert command_run(server[0], tmp_path / "more") == 0
    shown = capsys.readouterr().out
    assert "policy, asked" in shown and str(tmp_path / "more" / "out" / "report.html") in shown
    assert "Recipe" in (tmp_path / "more" / "out" / "report.md").read_text()


def test_a_mixture_of_versions_is_called_one_and_is_no_success(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server[1].script += [("1.5", "cut"), ("1.6", "summary")]
    assert command_run(server[0], tmp_path) == 1
    assert "of several policy versions: the scores are valid for none" in capsys.readouterr().out


def test_resume_asks_what_is_not_stored(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server[1].script += [("1.5", "error")]
    assert command_run(server[0], tmp_path) == 1
    assert len(stored(tmp_path)) == 1 and "continue with: foray eval" in capsys.readouterr().err
    with (tmp_path / "out" / EPISODES).open("a") as file:
        file.write('{"question_id": "half')
    assert command_run(server[0], tmp_path, "--resume", "--json") == 0
    assert [len(asked.questions) for asked in server[1].asked] == [3, 2]
    assert sorted(e["question_id"] for e in stored(tmp_path)) == sorted(q.id for q in QUESTIONS)
    assert json.loads(capsys.readouterr().out)["scores"][0]["episodes"] == 3
    assert command_run(server[0], tmp_path, "--resume", "--temperature", "1") == 2
    assert "sampler.temperature: 0.0 and 1.0" in capsys.readouterr().err
    assert command_run(server[0], tmp_path, "--resume", "--limit", "1") == 2, "other data"
    assert len(server[1].asked) == 2 and len(stored(tmp_path)) == 3


def test_failed_episodes_are_asked_again(server: tuple[str, type[Answers]], tmp_path: Path) -> None:
    assert command_run(server[0], tmp_path, "--n", "2") == 1
    assert command_run(server[0], tmp_path, "--n", "2", "--resume") == 1
    assert [len(asked.questions) for asked in server[1].asked] == [3, 3] and len(stored(tmp_path)) == 6


@pytest.mark.parametrize(("name", "value"), [("model", "n"), ("lineage_id", "1")])
def test_resume_refuses_the_answers_of_another_policy(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    server[1].script += [("1.5", "error")]
    command_run(server[0], tmp_path)
    before = stored(tmp_path)
    server[1].policy = server[1].policy | {name: value}
    assert command_run(server[0], tmp_path, "--resume") == 2
    assert f"another policy: {name} " in capsys.readouterr().err and stored(tmp_path) == before


@pytest.mark.parametrize("field", ["run", "lineage_id"])
def test_the_answers_of_another_run_at_the_runs_port_are_refused(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    (tmp_path / LINEAGE_FILE).write_text("a" * 32)
    server[1].policy = server[1].policy | {"lineage_id": "a" * 32} | {field: "b" * 32}
    assert command_run(server[0], tmp_path, "--limit", "1") == 2
    said = capsys.readouterr().err
    assert f"{server[0]} serves another run than {tmp_path}" in said and f"its {field} is bbb" in said
    assert stored(tmp_path) == []


def test_a_second_evaluation_into_one_directory_is_refused(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sole_writer(tmp_path / "out"):
        assert command_run(server[0], tmp_path) == 2
    assert "another process evaluates into" in capsys.readouterr().err and not server[1].asked
    assert command_run(server[0], tmp_path) == 0


def test_results_are_not_overwritten_and_are_reported_again_without_a_server(
    server: tuple[str, type[Answers]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_run(server[0], tmp_path) == 0
    before = (tmp_path / "out" / EPISODES).read_bytes()
    for url in (server[0], "http://127.0.0.1:1"):
        assert command_run(url, tmp_path) == 2 and "already holds results" in capsys.readouterr().err
    assert (tmp_path / "out" / EPISODES).read_bytes() == before and len(server[1].asked) == 1
    (tmp_path / "b").mkdir()
    assert command_run(server[0], tmp_path / "b", "--no-search") == 0
    out, other = str(tmp_path / "out"), str(tmp_path / "b" / "out")
    assert foray(["eval", out, "--against", other]) == 0
    shown = capsys.readouterr().out
    assert "Compared with out" in shown and "search: False and True" in shown and len(server[1].asked) == 2
    assert foray(["eval", out, "--against", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere-here"], "cannot evaluate nowhere-here"),
        (["http://127.0.0.1:1"], "no rollout server answers"),
        (["http://127.0.0.1:1", "--methods", "rag"], "only --methods policy"),
        (["http://127.0.0.1:1", "--methods", "rga"], "unknown method 'rga'"),
        (["http://127.0.0.1:1/v1"], "cannot list the models"),
        ([".", "--methods", "rag", "launch.engines=2"], "cannot evaluate ."),
        (["http://127.0.0.1:1/v1", "--model", "m"], "the methods need a retriever"),
        (["http://127.0.0.1:1", "--judge", "http://127.0.0.1:2/v1"], "--judge needs the name of a model"),
    ],
)
def test_what_cannot_be_evaluated_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.jsonl").write_text('{"id": "1", "question": "?", "answers": ["a"]}\n')
    assert foray(["eval", *given, "--suite", "q.jsonl"]) == 2
    shown = capsys.readouterr().err
    assert said in shown and "--resume" not in shown
    assert foray(["eval", "http://127.0.0.1:1"]) == 2 and "no questions are given" in capsys.readouterr().err
