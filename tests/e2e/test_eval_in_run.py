"""`foray eval` during training, and of a model that is only served, with all processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.run.learning import learning_problems
from deploy.run.run_dir import locate, read_record
from deploy.run.snapshot import RunSnapshot
from foray.cli import main as foray
from foray.demo.warmstart import new_model, save_model
from foray.evaluation.store import read_rows
from foray.watch import status
from learner.validation.results import ValidationFiles
from tests.support.registered import registered_urls
from tests.support.waiting import wait_until

SMALL = ("run.steps=500", "run.groups_per_step=2", "run.group_size=2", "run.max_lag=8", "learner.checkpoint_every=50")
QUESTIONS = 160


@contextmanager
def running(tmp_path: Path, *settings: str) -> Iterator[Path]:
    """The directory of a demo's run, with a model that has learned nothing; stopped at the end."""
    save_model(new_model(0), tmp_path / "model")
    run_dir = tmp_path / "run"
    assert foray(["demo", "--prepare-only", "--dir", str(run_dir), "--model", str(tmp_path / "model"), *settings]) == 0
    with (tmp_path / "up.log").open("w") as log:
        up = [sys.executable, "-m", "foray", "up", str(run_dir / "demo.yaml")]
        process = subprocess.Popen(up, cwd=tmp_path, stdout=log, stderr=log)
        try:
            wait_until(
                lambda: read_record(run_dir).get("state") == "running" or process.poll() is not None, "it runs", 120
            )
            assert process.poll() is None, (tmp_path / "up.log").read_text()
            yield run_dir
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def look(run_dir: Path) -> RunSnapshot:
    return status.look(locate(Namespace(given=[str(run_dir)], config=None)))


def step(run_dir: Path) -> int:
    """Steps that the learner has done."""
    learner = look(run_dir).learner
    return int(learner.values.get("step", 0)) if learner else 0


def asked(run_dir: Path, tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    questions = tmp_path / "questions.jsonl"
    lines = [json.dumps({"id": f"q{n}", "question": "the mayor of x ?", "answers": ["y"]}) for n in range(QUESTIONS)]
    questions.write_text("\n".join(lines))
    command = [sys.executable, "-m", "foray", "eval", str(run_dir), "--suite", str(questions), "--json", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)


def asked_and_watched(
    run_dir: Path, tmp_path: Path, *more: str
) -> tuple[subprocess.CompletedProcess[str], list[RunSnapshot], list[str]]:
    """Evaluate, and return snapshots of the run taken during the evaluation, and the machinery's problems that two in
    a row have. One alone may have caught the only engine between two loads: these steps take a tenth of a second, so it
    may be max_lag of them behind before it sees the new version.
    """
    seen: list[RunSnapshot] = []
    problems: list[str] = []
    ended = threading.Event()

    def watch() -> None:
        before: set[str] = set()
        while not ended.wait(0.5):
            if (now := look(run_dir)).evaluations:
                seen.append(now)
                learning = learning_problems(now.history)  # an untrained model has them, and rightly
                # at once: the age of what a snapshot shows counts from now
                found = {problem.what for problem in status.problems(now, max_lag=8) if problem not in learning}
                problems.extend(found & before)
                before = found

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        return asked(run_dir, tmp_path, *more), seen, problems
    finally:
        ended.set()
        watching.join()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_an_evaluation_during_training_is_of_one_version_while_the_policy_moves_on(tmp_path: Path) -> None:
    with running(tmp_path, *SMALL) as run_dir:
        wait_until(lambda: step(run_dir) >= 2, "it trains", 120)
        before = step(run_dir)
        out = tmp_path / "out"
        done, during, problems = asked_and_watched(run_dir, tmp_path, "--concurrency", "2", "--out", str(out))
        after = step(run_dir)
        assert done.returncode == 0, done.stderr
        assert during and {status.state(now) for now in during} == {"training"}
        assert not any("no engine is ready" in what for what in problems)
        report = json.loads(done.stdout)
        episodes, (version,) = read_rows(out), report["versions"]
        assert {e["version"] for e in episodes} == {version} and len(episodes) == QUESTIONS
        assert report["versions"] == {version: QUESTIONS} and report["scores"][0]["failed"] == 0
        evaluated = int(version.partition(".")[2])
        assert after >= before + 3, "the policy was updated several times meanwhile"
        wait_until(
            lambda: any(e.step > max(evaluated, before) for e in look(run_dir).engines), "engines load again after it"
        )


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_an_engine_for_evaluation_serves_it_alone_while_the_others_load_new_weights(tmp_path: Path) -> None:
    with running(tmp_path, *SMALL, "launch.eval_engines=1") as run_dir:
        wait_until(lambda: step(run_dir) >= 2, "it trains", 120)
        out = tmp_path / "out"
        done, during, problems = asked_and_watched(run_dir, tmp_path, "--concurrency", "2", "--out", str(out))
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        (version,) = report["versions"]
        assert {e["version"] for e in read_rows(out)} == {version} and report["versions"] == {version: QUESTIONS}
        assert report["scores"][0]["failed"] == 0
        assert during and not problems and not any(now.pinned_evaluations for now in during)
        trained = [e.step for now in during for e in now.engines if e.role == "rollout"]
        assert max(trained) > min(trained) and max(trained) > int(version.partition(".")[2]), "it loads meanwhile"
        (node,) = [p for p in look(run_dir).of("node") if p.id == "engine-1"]
        assert not node.waits.get("eval"), "no new weights waited"
        assert all(status.seq_balance(now).closes for now in (*during, look(run_dir)) if now.learner)
        wait_until(
            lambda: any(e.role == "eval" and e.version.label != version for e in look(run_dir).engines),
            "the engine for evaluation loads again after it",
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_without_a_learner_is_served_evaluated_and_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, *SMALL, "launch.learner=false") as run_dir:
        url = registered_urls(run_dir, "rollout")[0]
        body = json.dumps({"questions": [{"id": "q", "question": "the mayor of x ?"}]}).encode()
        request = urllib.request.Request(f"{url}/v1/episodes", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            (episode,) = json.load(response)["episodes"]
        assert episode["status"] not in ("failed", "stale") and episode["version"] == "0.0"
        done = asked(run_dir, tmp_path, "--limit", "8")
        assert done.returncode == 0 and json.loads(done.stdout)["versions"] == {"0.0": 8}, done.stderr
        done = asked(run_dir, tmp_path, "--limit", "8", "--methods", "direct", "rag")
        assert done.returncode == 0 and json.loads(done.stdout)["versions"] == {"0.0": 16}, done.stderr
        wait_until(lambda: not look(run_dir).evaluations, "its end is reported", 120)
        capsys.readouterr()
        assert foray(["status", str(run_dir)]) == 0 and ": serving, healthy\n" in capsys.readouterr().out
        assert foray(["top", str(run_dir), "--once"]) == 0
        shown = capsys.readouterr().out
        assert ": serving\n" in shown and "problem" not in shown and "rollout servers wait for Redis" not in shown


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_validated_while_it_trains_and_a_killed_learner_continues_the_validation(tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"q{n}", "question": "the mayor of x ?", "answers": ["y"]}) for n in range(24)]
    (tmp_path / "dev.jsonl").write_text("\n".join(lines))
    validation = {"suites": [{"path": str(tmp_path / "dev.jsonl"), "name": "dev"}], "every": 30, "concurrency": 1}
    settings = ("run.steps=90", "launch.eval_engines=1", "launch.restart_learner=1", "learner.lease_s=3")
    with running(tmp_path, *SMALL, *settings, f"learner.eval={json.dumps(validation)}") as run_dir:
        current = run_dir / "checkpoints" / "CURRENT"

        def halfway() -> bool:
            learner = look(run_dir).learner
            says = learner.text.get("validating", "") if learner else ""
            asked = int(says.split()[2]) if says.startswith("step 30: ") else 0
            return asked > 3 and current.exists() and current.read_text() == "step_30.e1\n"

        wait_until(halfway, "the validation of step 30 is in progress", 300)
        during = step(run_dir)
        learner = next(p for p in read_record(run_dir)["processes"] if p["name"] == "learner")
        os.kill(learner["pid"], signal.SIGKILL)
        wait_until(lambda: read_record(run_dir).get("state") == "done", "the run is done", 300)
        ended = look(run_dir)
        assert during > 30, "the policy was updated during its validation"
        assert status.seq_balance(ended).closes
        assert ended.learner is None or ended.learner.text["validation"].startswith("step 90: dev em ")
    files = ValidationFiles(run_dir)
    records = files.records()
    steps = [record["step"] for record in records]
    assert {30, 90} <= set(steps) <= {0, 30, 60, 90} and len(steps) == len(set(steps))
    for record in records:
        rows = files.episodes(record["name"])
        assert sorted(e["question_id"] for e in rows) == sorted(f"q{n}" for n in range(24))
        assert not any(e["status"] in ("failed", "stale") for e in rows)
        versions = {e["version"] for e in rows if e["version"]}
        assert versions == ({"1.30", "2.30"} if record["step"] == 30 else {record["version"]}), "the same weights"
    waited = sum(
        json.loads(line)["seconds"]["validation"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    )
    assert waited == 0.0, "no step waited for a validation"
