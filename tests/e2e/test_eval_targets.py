"""`foray eval` of a model folder, a checkpoint and an endpoint: it starts what it needs, and leaves nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deploy.run.run_dir import read_record
from foray.cli import main as foray
from foray.evaluation.store import read_rows
from tests.support.waiting import wait_until

SMALL = ("run.steps=2", "run.groups_per_step=4", "run.group_size=8", "learner.checkpoint_every=1")
LIMIT = 24


def prepared(tmp_path: Path, warm_model: Path) -> tuple[Path, Path]:
    """The directory of a demo with a warm-started model, and a file with some of its questions, of one and two hops."""
    run_dir = tmp_path / "run"
    assert foray(["demo", "--prepare-only", "--dir", str(run_dir), "--model", str(warm_model), *SMALL]) == 0
    lines = (run_dir / "world" / "held_out.jsonl").read_text().splitlines()
    questions = tmp_path / "world.jsonl"
    questions.write_text("\n".join(lines[:: len(lines) // LIMIT][:LIMIT]))
    return run_dir, questions


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "foray", "eval", *map(str, words)]


def evaluate(tmp_path: Path, *words: object) -> dict[str, Any]:
    done = subprocess.run(command(*words, "--json"), capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def living(directory: Path) -> list[str]:
    """The processes of a serving run that still run."""
    return [p["name"] for p in read_record(directory).get("processes", []) if Path(f"/proc/{p['pid']}").exists()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_and_its_checkpoint_are_evaluated_beside_baselines_and_compared(
    tmp_path: Path, warm_model: Path
) -> None:
    run_dir, questions = prepared(tmp_path, warm_model)
    methods = ["--methods", "policy", "direct", "rag"]
    before = evaluate(tmp_path, run_dir / "model", "--suite", questions, *methods, "--out", "before")
    cells = {cell["method"]: cell for cell in before["scores"]}
    assert {name: (cell["episodes"], cell["failed"]) for name, cell in cells.items()} == dict.fromkeys(
        ("policy", "direct", "rag"), (LIMIT, 0)
    )
    assert (
        before["versions"] == {"0.0": 3 * LIMIT}
        and before["protocol"]["methods"]["policy"]["template"]["name"] == "demo"
    )
    assert before["protocol"]["retriever"]["fingerprint"] and before["protocol"]["limits"]["max_turns"] == 3
    assert cells["direct"]["searches"] == 0.0 and cells["rag"]["searches"] == 1.0
    assert {"no_search"} >= cells["direct"]["failures"].keys(), "a direct answer of the demo's model is well formed"
    assert not living(tmp_path / "before" / "serve")

    trained = subprocess.run(
        [sys.executable, "-m", "foray", "up", str(run_dir / "demo.yaml")], capture_output=True, text=True, timeout=300
    )
    assert trained.returncode == 0, trained.stderr
    after = evaluate(tmp_path, run_dir, "--suite", questions, "--out", "after", "--against", "before")
    subject = after["protocol"]["subject"]
    assert subject["kind"] == "checkpoint" and subject["checkpoint"].startswith("step_2")
    assert subject["model"] != before["protocol"]["subject"]["model"] and (tmp_path / "after" / "report.html").is_file()
    assert after["protocol_differences"] == {"before": []}
    pairs = {(c["first"], c["second"]): c["n"] for c in after["comparisons"]}
    assert pairs == {(f"before: {name}", "after: policy"): LIMIT for name in ("policy", "direct", "rag")}
    assert not living(tmp_path / "after" / "serve")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_evaluation_that_ends_in_the_middle_is_resumed_and_counts_nothing_twice(
    tmp_path: Path, warm_model: Path, number: signal.Signals
) -> None:
    run_dir, questions = prepared(tmp_path, warm_model)
    words = command(
        run_dir / "model", "--suite", questions, "--methods", "rag", "policy", "--n", "8", "--concurrency", "2"
    )
    words += ["--temperature", "1", "--out", "out"]
    episodes = tmp_path / "out" / "episodes.jsonl"
    with (tmp_path / "eval.log").open("w") as log:
        process = subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log)
        try:
            wait_until(lambda: episodes.exists() and episodes.read_bytes().count(b"\n") > 20, "some episodes", 120)
            process.send_signal(number)
            code = process.wait(180)  # four stages of a stop may take 20 s each on a busy machine
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)
    wait_until(lambda: not living(tmp_path / "out" / "serve"), "what it started ends with it", 60)
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL), (tmp_path / "eval.log").read_text()
    if number == signal.SIGINT:
        assert "continue with: foray eval" in (tmp_path / "eval.log").read_text()
    had = {(r["method"], r["question_id"], r["index"]): r["seconds"] for r in read_rows(tmp_path / "out")}
    assert 20 <= len(had) < 2 * 8 * LIMIT
    report = evaluate(tmp_path, *words[4:], "--resume")
    rows = read_rows(tmp_path / "out")
    assert len(rows) == 2 * 8 * LIMIT == len(episodes.read_text().splitlines())
    complete = {key for key, count in Counter((m, q) for m, q, _ in had).items() if count == 8}
    kept = {(r["method"], r["question_id"], r["index"]): r["seconds"] for r in rows}
    assert complete and all(kept[key] == had[key] for key in had if key[:2] in complete), "they were not asked again"
    assert {c["episodes"] for c in report["scores"]} == {8 * LIMIT} and not report["mixed_versions"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_is_an_openai_endpoint_too(tmp_path: Path, warm_model: Path) -> None:
    run_dir, questions = prepared(tmp_path, warm_model)
    log = (tmp_path / "up.log").open("w")
    up = [sys.executable, "-m", "foray", "up", str(run_dir / "demo.yaml"), "launch.learner=false"]
    process = subprocess.Popen(up, cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_until(lambda: read_record(run_dir).get("state") == "running", "it runs", 120)
        status = subprocess.run(
            [sys.executable, "-m", "foray", "status", str(run_dir), "--json"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        (engine,) = json.loads(status.stdout)["engines"]
        # the demo's context is short, and its model never writes "the answer is"
        methods = ["direct", "rag", "{type: flare, sentences: 2}"]
        words = ["--suite", questions, "--api", "completions", "--limit", "4", "--config", run_dir / "demo.yaml"]
        report = evaluate(tmp_path, f"{engine['url']}/v1", *words, "--methods", *methods, "--out", "e")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(180)
        log.close()
    assert {c["method"]: (c["episodes"], c["failed"]) for c in report["scores"]} == dict.fromkeys(
        ("direct", "rag", "flare"), (4, 0)
    )
    assert report["protocol"]["subject"]["model"] == "model" and report["protocol"]["retriever"]["fingerprint"]
    assert all(r["tokens_generated"] and r["tokens_read"] for r in read_rows(tmp_path / "e"))
