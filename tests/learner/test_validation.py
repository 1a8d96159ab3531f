"""Validation while training: one version, in the background, nothing counted twice, the best checkpoint kept."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

from foray.cli import main as foray
from learner.checkpoint.checkpoint import Checkpoints
from learner.config.learner import LearnerSettings
from learner.config.validation import ValidationSettings
from learner.validation import asking, validator
from learner.validation.results import ValidatedPolicy, ValidationFiles, best_of, suite_means
from learner.validation.validator import Validator, load_suites
from protocol.codec import decode_as, encode
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, Question, WeightUpdate
from protocol.settings import RunSettings
from tests.support.tiny_learner import Crash, Player, TinyEngine, surviving

Serve = Callable[..., int]


class Rollouts(http.server.BaseHTTPRequestHandler):
    """A rollout server whose policy is right about a question as often as `right(version)` says.

    asked    the requests
    answers  called with (request, number of the episode) before each; may wait, or raise ConnectionError
    refuses  called with the request: an error to answer with, "" for none
    """

    asked: list[dict[str, Any]]
    answers: Callable[[dict[str, Any], int], None]
    refuses: Callable[[dict[str, Any]], str]
    right: Callable[[str], float]

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(wanted)
        if error := self.refuses(wanted):
            self.send_response(503)
            self.end_headers()
            self.wfile.write(json.dumps({"error": error}).encode())
            return
        self.send_response(200)
        self.end_headers()
        asked = [(q["id"], index) for q in wanted["questions"] for index in range(wanted["n"])]
        for number, (question, index) in enumerate(asked):
            try:
                self.answers(wanted, number)
            except ConnectionError:
                return
            em = float(number < self.right(wanted["version"]) * len(asked))
            episode = {
                "question_id": question, "index": index, "version": wanted["version"], "status": "answered",
                "metrics": {"em": em, "f1": em}, "reward": em, "searches": 1, "turns": 2, "tokens_generated": 9,
            }  # fmt: skip
            self.wfile.write(f"data: {json.dumps(episode)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"event: summary\ndata: {}\n\n")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def rollouts(run: RunSettings, db: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Rollouts]]:
    """A server that the run's Redis lists."""
    monkeypatch.setattr(asking, "PAUSE_S", 0.05)
    nothing = {"asked": [], "answers": staticmethod(lambda *_: None), "refuses": staticmethod(lambda _: "")}
    handler = type("Handler", (Rollouts,), nothing | {"right": staticmethod(lambda _: 0.5)})
    keys = Keys(run.id)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{listening.server_port}"
        db.set(keys.metrics("rollout", "r"), encode(MetricsSnapshot(process="rollout", id="r", text={"url": url})))
        db.zadd(keys.processes, {"rollout:r": time.time() + 3600})
        try:
            yield handler
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture
def validated(settings: LearnerSettings, tmp_path: Path) -> LearnerSettings:
    """Validation every 2 steps with two suites of 4 and 2 questions."""
    for name, count in (("nq", 4), ("musique", 2)):
        lines = [json.dumps({"id": f"q{i}", "question": f"{name} {i}?", "answers": ["x"]}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    suites = [{"path": str(tmp_path / f"{name}.jsonl"), "name": name} for name in ("nq", "musique")]
    wanted = ValidationSettings.model_validate({"suites": suites, "every": 2})
    return settings.model_copy(update={"eval": wanted, "checkpoint_every": 100, "keep_checkpoints": 1})


def rows_of(run: RunSettings, name: str) -> list[tuple[str, str, int]]:
    """(suite, question, index) of every stored episode."""
    return [(e["suite"], e["question_id"], e["index"]) for e in ValidationFiles(run.dir).episodes(name)]


def test_the_policy_is_validated_every_few_steps_and_the_best_checkpoint_is_kept(
    run: RunSettings,
    validated: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    rollouts: type[Rollouts],
    db: redis.Redis,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rollouts.right = staticmethod(lambda version: {"1.4": 1.0, "1.0": 0.0}.get(version, 0.5))
    with Player(address, run.id):
        assert serve(run, validated, before=validation_ends) == 0
    records = ValidationFiles(run.dir).records()
    assert [(r["name"], r["step"], r["version"]) for r in records] == [
        ("initial", 0, "1.0"), *((f"step_{n}.e1", n, f"1.{n}") for n in (2, 4, 6, 8)),
    ]  # fmt: skip
    assert [r["suites"]["nq"]["em"] for r in records] == [0.0, 0.75, 1.0, 0.75, 0.75], "3 of 6 are among the first 4"
    assert {len(asked["questions"]) for asked in rollouts.asked} == {6}
    assert all(asked["pin"] and asked["temperature"] == 0.0 for asked in rollouts.asked)
    kept = sorted(p.name for p in run.checkpoint_dir.glob("step_*"))
    assert kept == ["step_4.e1", "step_8.e1"], "the best one, and the newest"
    assert Checkpoints(run.checkpoint_dir, 1).load().facts["step"] == 8
    assert "validation of step 4: nq em 1.000 f1 1.000, musique em 1.000 f1 1.000\n" in capsys.readouterr().out
    last = decode_as(MetricsSnapshot, db.get(Keys(run.id).metrics("learner", "0")))
    assert last.values["validation/nq/em"] == 0.75 and last.values["validation_step"] == 8
    assert last.text["validation"].endswith("; best em 1.000 at step 4 (step_4.e1)")
    assert foray(["curves", str(run.dir), "--metric", "validation/nq/em", "--json"]) == 0
    curve = json.loads(capsys.readouterr().out)["curves"][str(run.dir)]
    assert curve == {"0": 0.0, "2": 0.75, "4": 1.0, "6": 0.75, "8": 0.75}
    seqs = [seq for batch in surviving(run.dir).values() for seq in batch]
    assert len(seqs) == len(set(seqs)) == 32


def validation_ends(*_: object) -> None:
    """Wait until no validation is in progress, nor the checkpoint without which its result is not collected."""
    deadline = time.monotonic() + 30
    others = {"validation", "checkpoint"} - {threading.current_thread().name}
    while any(thread.name in others for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_best_is_never_a_checkpoint_that_could_not_be_written(
    run: RunSettings,
    validated: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    rollouts: type[Rollouts],
    db: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts.right = staticmethod(lambda version: {"1.2": 1.0, "1.0": 0.0}.get(version, 0.5))
    save, recorded = TinyEngine.save_state, list[list[str]]()

    def fails_late(self: TinyEngine, directory: Path) -> None:
        if self.updates == 2:
            validation_ends()  # it is asked while this is written
            time.sleep(0.3)
            recorded.append([r["name"] for r in ValidationFiles(run.dir).records()])
            raise OSError(28, "No space left on device")
        save(self, directory)

    monkeypatch.setattr(TinyEngine, "save_state", fails_late)
    with Player(address, run.id):
        assert serve(run, validated, before=lambda step: time.sleep(0.2)) == 0
    assert recorded == [["initial"]], "it is not recorded under a name that may never exist"
    records = {r["name"]: r["checkpoint"] for r in ValidationFiles(run.dir).records()}
    assert records["step_2.e1"] == "" and {name for name, at in records.items() if at} >= {"step_8.e1"}
    last = decode_as(MetricsSnapshot, db.get(Keys(run.id).metrics("learner", "0")))
    best = last.text["validation"].rpartition("(")[2].rstrip(")")
    assert best != "step_2.e1" and (run.checkpoint_dir / best).is_dir()


def test_training_goes_on_during_a_validation_and_one_that_is_due_meanwhile_is_reported(
    run: RunSettings,
    validated: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    rollouts: type[Rollouts],
    db: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained = threading.Event()
    rollouts.answers = staticmethod(lambda *_: trained.wait(60))
    with Player(address, run.id):
        assert serve(run, validated, before=lambda step: trained.set() if step == 7 else None) == 0
    assert [r["step"] for r in ValidationFiles(run.dir).records()] == [0, 8], "the first outlived 7 steps"
    assert "step 2 is not validated: the validation of step 0 is in progress" in caplog.text
    pinned = decode_as(WeightUpdate, db.get(Keys(run.id).validated))
    assert pinned.version == (1, 8)


def test_a_validation_is_over_once_its_checkpoint_is_written(
    run: RunSettings,
    validated: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    rollouts: type[Rollouts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checkpoint is written while step 4 trains, and the policy of step 4 is validated all the same."""
    written, fill = threading.Event(), Checkpoints.fill

    def slowly(checkpoints: Checkpoints, part: Any, save: Any) -> None:
        assert part.manifest["step"] != 2 or written.wait(30)
        fill(checkpoints, part, save)

    def before(step: int) -> None:
        if step == 3:
            written.set()
        if step != 2:
            validation_ends()

    monkeypatch.setattr(Checkpoints, "fill", slowly)
    with Player(address, run.id):
        assert serve(run, validated, before=before) == 0
    assert [r["step"] for r in ValidationFiles(run.dir).records()] == [0, 2, 4, 6, 8]


def test_a_killed_validation_continues_with_its_questions_and_counts_none_twice(
    run: RunSettings, validated: LearnerSettings, serve: Serve, address: dict[str, Any], rollouts: type[Rollouts]
) -> None:
    half, checkpoint = threading.Event(), run.checkpoint_dir / "CURRENT"

    def stop_after_three(wanted: dict[str, Any], number: int) -> None:
        if wanted["version"] == "1.4" and number == 3:
            half.set()
            raise ConnectionError

    def die(step: int) -> None:
        if step < 4:
            validation_ends()
        elif half.wait(30) and checkpoint.exists() and checkpoint.read_text() == "step_4.e1\n":
            raise Crash

    rollouts.answers = staticmethod(stop_after_three)
    with Player(address, run.id):
        with pytest.raises(Crash):
            serve(run, validated, before=die)
        begun = rows_of(run, "step_4.e1")
        assert 3 <= len(begun) < 6 and ValidationFiles(run.dir).unfinished() == ["step_4.e1"]
        asked = len(rollouts.asked)
        assert serve(run, validated, before=validation_ends) == 0
    again = [a for a in rollouts.asked[asked:] if a["version"] == "2.4"]
    assert sum(len(a["questions"]) for a in again) == 6 - len(set(begun)), "the same weights in a new epoch"
    rows = rows_of(run, "step_4.e1")
    assert len(rows) == len(set(rows)) == 6
    record = next(r for r in ValidationFiles(run.dir).records() if r["step"] == 4)
    assert (record["suites"]["nq"]["questions"], record["suites"]["nq"]["failed"]) == (4, 0)
    assert [r["step"] for r in ValidationFiles(run.dir).records()] == [0, 2, 4, 6, 8]


def test_a_version_that_the_engines_left_is_reported_and_a_later_one_validated(
    run: RunSettings,
    validated: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    rollouts: type[Rollouts],
    db: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validator, "RETRIES", 2)
    engine = EngineInfo(id="e", url="u", epoch=1, step=3, state=NodeState.READY, role="eval", incarnation="a")

    def gone(wanted: dict[str, Any]) -> str:
        if wanted["version"] != "1.2":
            return ""
        db.hset(Keys(run.id).engine("e"), "b", encode(engine))
        db.zadd(Keys(run.id).engines, {"e": time.time() + 60})
        return "the version cannot be pinned: the engines hold later versions than 1.2"

    def pace(step: int) -> None:
        validation_ends()

    rollouts.refuses = staticmethod(gone)
    with Player(address, run.id):
        assert serve(run, validated, before=pace) == 0
    assert "step 2 is not validated: the engines hold later versions than 1.2" in caplog.text
    steps = [r["step"] for r in ValidationFiles(run.dir).records()]
    assert 2 not in steps and steps[0] == 0 and steps[-1] == 8 and set(steps) & {3, 4, 5}


def test_failed_episodes_are_asked_again_and_then_counted(
    run: RunSettings, validated: LearnerSettings, serve: Serve, address: dict[str, Any], rollouts: type[Rollouts]
) -> None:
    class Failing(Rollouts):
        def do_POST(self) -> None:
            wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.asked.append(wanted)
            self.send_response(200)
            self.end_headers()
            for q in wanted["questions"]:
                bad = q["question"] == "nq 0?" or (q["question"] == "nq 1?" and len(self.asked) == 1)
                episode = {
                    "question_id": q["id"], "index": 0, "version": wanted["version"], "reward": 1.0,
                    "status": "failed" if bad else "answered", "metrics": {"em": 1.0},
                }  # fmt: skip
                self.wfile.write(f"data: {json.dumps(episode)}\n\n".encode())
            self.wfile.write(b"event: summary\ndata: {}\n\n")

    rollouts.do_POST = Failing.do_POST  # type: ignore[method-assign]
    once = validated.model_copy(update={"eval": validated.eval.model_copy(update={"every": 100})})
    with Player(address, run.id):
        assert serve(run, once, before=validation_ends) == 0
    assert [len(asked["questions"]) for asked in rollouts.asked[: asking.ROUNDS]] == [6, 2, 1]
    first = ValidationFiles(run.dir).records()[0]["suites"]["nq"]
    assert (first["questions"], first["failed"], first["em"]) == (4, 1, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["[]", "{", "{}", '{"question_id": "0"}', '{"question_id": "unasked", "index": 0}'])
def test_an_answer_that_is_no_episode_is_reported_and_the_server_asked_again(
    run: RunSettings,
    validated: LearnerSettings,
    serve: Serve,
    address: dict[str, Any],
    rollouts: type[Rollouts],
    caplog: pytest.LogCaptureFixture,
    sent: str,
) -> None:
    normal, refused = rollouts.do_POST, []

    def answer(self: Rollouts) -> None:
        if refused:
            normal(self)
            return
        refused.append(sent)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {sent}\n\n".encode())

    rollouts.do_POST = answer  # type: ignore[method-assign]
    once = validated.model_copy(update={"eval": validated.eval.model_copy(update={"every": 100})})
    with Player(address, run.id):
        assert serve(run, once, before=validation_ends) == 0
    assert refused and "sent what is no episode of these questions" in caplog.text
    first = ValidationFiles(run.dir).records()[0]["suites"]["nq"]
    assert (first["questions"], first["failed"]) == (4, 0)


def test_means_are_over_questions_and_a_failed_episode_does_not_count() -> None:
    questions = [Question(id=f"q{i}", text="?") for i in range(3)]

    def episode(question: str, em: float, **more: Any) -> dict[str, Any]:
        return {"question_id": question, "status": "answered", "metrics": {"em": em}, "reward": em / 2, **more}

    means = suite_means(
        questions,
        [
            *(episode("q0", 1.0), episode("q0", 0.0)),
            *(episode("q1", 1.0), episode("q1", 0.0, status="failed")),
            episode("q2", 0.0, status="failed"),
        ],
    )
    assert means["em"] == 0.75 and means["reward"] == 0.375
    assert (means["questions"], means["failed"]) == (3.0, 1.0)
    assert means["em_stderr"] == pytest.approx((((0.5 - 0.75) ** 2 + (1 - 0.75) ** 2) / 1 / 2) ** 0.5)
    too_long = episode("q0", 0.0, status="failed", cause="prompt_too_long")
    assert suite_means(questions[:1], [too_long]) == {"em": 0.0, "questions": 1.0, "failed": 0.0}


def test_the_best_is_the_first_with_the_highest_mean_over_the_suites() -> None:
    def record(step: int, *values: float) -> dict[str, Any]:
        return {"step": step, "suites": {str(i): {"em": value} for i, value in enumerate(values)}}

    records = [record(0, 0.2, 0.6), record(2, 0.5, 0.5), record(4, 0.9, 0.1), record(6)]
    assert best_of(records, "em")["step"] == 2
    assert best_of(records, "f1") is None and best_of([], "em") is None


def test_a_line_that_a_crash_cut_off_is_left_out_and_the_next_one_begins_a_new_line(tmp_path: Path) -> None:
    files = ValidationFiles(tmp_path)
    files.episodes("step_2.e1")
    files.path("step_2.e1").write_text('{"question_id": "a"}\n{"questio')
    assert files.episodes("step_2.e1") == [{"question_id": "a"}]
    assert files.path("step_2.e1").read_text() == '{"question_id": "a"}\n'
    assert files.unfinished() == ["step_2.e1"]
    files.add({"name": "step_2.e1", "step": 2})
    files.add({"name": "step_2.e1", "step": 2})
    assert files.unfinished() == [] and len(files.records()) == 1


def test_suites_are_named_by_their_records_and_cut_to_their_limit(tmp_path: Path) -> None:
    rows = [{"id": f"{s}{i}", "question": f"{s} {i}?", "answers": ["x"], "source": s} for s in "ab" for i in range(3)]
    both = tmp_path / "dev.jsonl"
    both.write_text("\n".join(map(json.dumps, rows)))
    settings = ValidationSettings.model_validate({"suites": [{"path": str(both), "limit": 2}]})
    assert {name: [q.id for q in found] for name, found in load_suites(settings).items()} == {
        "a": ["a0", "a1"],
        "b": ["b0", "b1"],
    }
    twice = ValidationSettings.model_validate({"suites": [str(both), str(both)]})
    with pytest.raises(UserError, match=r"two of learner\.eval\.suites are named 'a'"):
        load_suites(twice)


@pytest.mark.parametrize(("eval_step", "train_step", "lost"), [(2, 5, False), (3, 2, True)])
def test_a_version_is_lost_when_the_engines_for_evaluation_have_left_it(
    eval_step: int, train_step: int, lost: bool, tmp_path: Path
) -> None:
    engines = [
        EngineInfo(id=role, url="u", epoch=1, step=step, state=NodeState.READY, role=role, incarnation="a")
        for role, step in (("eval", eval_step), ("rollout", train_step))
    ]
    link = SimpleNamespace(engines=lambda: engines)
    policy = ValidatedPolicy("step_2.e1", 2, 1, "1.2")
    made = asking.Asking(
        policy, WeightUpdate(run="t1", epoch=1, step=2, digest="d", path="/w"), {}, ValidationSettings(),
        cast(asking.RunLink, link), ValidationFiles(tmp_path), threading.Event(), lambda done, of: None,
    )  # fmt: skip
    with pytest.raises(asking.ValidationLost) if lost else nullcontext():
        made._check_version()


def test_the_initial_model_is_the_best_if_no_checkpoint_that_is_kept_is_better(tmp_path: Path) -> None:
    suite, files, shown = tmp_path / "dev.jsonl", ValidationFiles(tmp_path), list[str]()
    suite.write_text(json.dumps({"id": "q", "question": "?", "answers": ["x"], "source": "nq"}) + "\n")
    for step, em, checkpoint in ((0, 0.5, ""), (2, 0.4, "step_2.e1"), (4, 0.9, "step_4.e1")):
        suites = {"nq": {"em": em, "questions": 1.0, "failed": 0.0}}
        record = {"name": checkpoint or "initial", "step": step, "checkpoint": checkpoint, "suites": suites}
        files.add(record | {"epoch": 1, "version": f"1.{step}", "seconds": 1.0})
    reporter = SimpleNamespace(show_validation=lambda step, text, suites: shown.append(text))
    settings = ValidationSettings.model_validate({"suites": [str(suite)], "best": "em"})
    for there, best, kept in (({"step_2.e1"}, "the initial model", set()), ({"step_4.e1"}, "step_4.e1", {"step_4.e1"})):
        made = Validator(settings, files, cast(Any, None), cast(Any, reporter), cast(Any, None), there.__contains__)
        assert made.kept() == kept and shown.pop().endswith(f"({best})")
