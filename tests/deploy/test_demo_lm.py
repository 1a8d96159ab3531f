"""`foray demo-lm`: phases run once and continue after a stop; missing files are named; the table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.demo_lm import bound, command, results
from benchmarks.demo_lm.command import FILES, LARGER, VARIABLE, find_data, prepare
from benchmarks.demo_lm.phases import Phase, phases_exit_code, read_phases, run_phases
from deploy.hardware.speed import cores_at_once
from foray.cli import main
from foray.evaluation.store import EPISODES, RECIPE
from learner.data.questions import load_questions
from tests.support.sft_model import tiny_chat_model
from tests.support.small_machine import AVX2
from tests.support.waiting import wait_until

TOWNS = 220
PARTS = ("validation", "held_out", "shown", "train")


def python(name: str, code: str) -> Phase:
    return Phase(name, name, ("-c", code))


def data(folder: Path, towns: int = TOWNS) -> Path:
    """Questions of one search each, and their passages in the form of the real data, which is converted."""
    folder.mkdir()
    asked = [
        {"id": f"q{n}", "question": f"Where is Town{n} ?", "golden_answers": [f"river{n}"], "supporting_ids": [f"p{n}"]}
        for n in range(towns)
    ]
    passages = [{"id": f"p{n}", "title": f"Town{n}", "text": f"Town{n} lies on river{n}."} for n in range(towns)]
    for kind, records in (("train", asked[10:]), ("dev", asked[:10]), ("corpus", passages)):
        (folder / FILES[kind]).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_finished_phase_is_skipped_and_a_failed_one_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    counts = f"from pathlib import Path; p = Path({str(tmp_path)!r}) / 'n'; p.open('a').write('x'); print('one line')"
    burns = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    fails = f"import sys; from pathlib import Path; sys.exit(0 if (Path({str(tmp_path)!r}) / 'go').exists() else 3)"
    phases = [python("first", counts), python("burns", burns), python("last", fails)]
    log = tmp_path / "logs" / "last.log"
    assert phases_exit_code(lambda: run_phases(phases, tmp_path, said.append), again="again") == 3
    assert capsys.readouterr().err == f"error: last failed (exit code 3); its output: {log}; again\n"
    assert "  one line" in said
    (tmp_path / "go").touch()
    assert phases_exit_code(lambda: run_phases(phases, tmp_path, said.append)) == 0
    record = read_phases(tmp_path)
    assert (tmp_path / "n").read_text() == "x", "the finished phases did not run again"
    assert {name: (used["starts"], used["done"]) for name, used in record.items()} == {
        "first": (1, True), "burns": (1, True), "last": (2, True),
    }  # fmt: skip
    assert record["burns"]["cpu_seconds"] >= 0.3 and (tmp_path / "logs" / "first.log").read_text() == "one line\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_reaches_the_phase_and_the_same_command_continues(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "phase.py").write_text(
        "import signal, sys, time\nfrom pathlib import Path\nhere = Path(__file__).parent\n"
        "def stop(number, frame):\n    (here / 'stopped').write_text(str(number))\n    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)\n"
        "(here / 'up').touch()\nwhile not (here / 'stopped').exists(): time.sleep(0.01)\n"
    )
    code = (
        "import sys; from pathlib import Path; from benchmarks.demo_lm.phases import *\n"
        f"here = Path({str(tmp_path)!r})\n"
        "phases = [Phase('long', 'long', (str(here / 'phase.py'),))]\n"
        "sys.exit(phases_exit_code(lambda: run_phases(phases, here, print)))\n"
    )
    argv, where = [sys.executable, "-c", code], Path(__file__).parents[2]
    with subprocess.Popen(argv, cwd=where, stderr=subprocess.PIPE, text=True) as child:
        wait_until(lambda: (tmp_path / "up").exists(), "the phase has started", 60)
        os.kill(child.pid, number)
        _, error = child.communicate(timeout=60)
    assert child.returncode == (130 if number is signal.SIGINT else 1)
    assert error == f"long was stopped; what is finished is in {tmp_path}; the same command continues\n"
    assert (tmp_path / "stopped").read_text() == str(int(number))
    assert read_phases(tmp_path)["long"]["done"] is False
    run_phases([Phase("long", "long", (str(tmp_path / "phase.py"),))], tmp_path, print)
    assert read_phases(tmp_path)["long"]["done"] is True


def test_without_data_the_command_says_what_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main(["demo-lm", "--dir", str(tmp_path / "run")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["demo-lm", "--data", str(tmp_path / "empty"), "--dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "no questions are given" in error and "has no questions_train.jsonl, questions_dev.jsonl" in error
    assert error.count("foray data get") == 2 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("inside", ["multihop", ""])
def test_the_larger_data_is_taken_where_the_folder_has_it(tmp_path: Path, inside: str) -> None:
    folder = data(tmp_path / "data")
    assert find_data(folder)["corpus"] == folder / "corpus_multihop.jsonl"
    larger = folder / inside
    larger.mkdir(exist_ok=True)
    for kind, name in LARGER.items():
        (larger / name).write_bytes((folder / FILES[kind]).read_bytes())
    assert find_data(folder) == {kind: larger / name for kind, name in LARGER.items()}


def test_validation_has_its_own_questions_and_a_limit_leaves_out_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "cpu_speed", lambda: None)
    monkeypatch.setattr(command, "cores_at_once", float)
    folder, run = data(tmp_path / "data", 700), tmp_path / "run"
    asked = [{"id": f"d{n}", "question": f"who {n}?", "answers": ["a"], "source": str(n // 50)} for n in range(150)]
    (folder / FILES["dev"]).write_text("".join(json.dumps(q) + "\n" for q in asked))
    args = argparse.Namespace(fresh=False, model=None, seed=0, engine="cpu", overrides=[])
    facts = prepare(args, run, find_data(folder))
    parts = {name: load_questions(run / "questions" / f"{name}.jsonl").questions for name in (*PARTS, "dev")}
    assert [len(part) for part in parts.values()] == [69, 200, 210, 211, 150]
    assert len({q.id for part in parts.values() for q in part}) == 840
    assert {q.source for q in parts["dev"][:20]} == {"0", "1", "2"}
    (suite,) = yaml.safe_load((run / "demo-lm.yaml").read_text())["learner"]["eval"]["suites"]
    assert suite["path"] == str(run / "questions" / "validation.jsonl") and (suite["name"], suite["limit"]) == (
        "validation",
        64,
    )
    assert facts["sizes"]["limit"] <= 200


def test_the_expected_time_is_that_of_the_questions_that_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "cpu_speed", lambda: None)  # only the fixed seconds count
    monkeypatch.setattr(command, "cores", lambda: 2)
    monkeypatch.setattr(command, "cores_at_once", float)
    few, many = (command.chosen_sizes(command.PARAMETERS, asked) for asked in ([200, 100], [200, 500]))
    # 50 steps of 80 CPU seconds, and half a CPU second for each of 4 policies and each question, on two cores
    assert "about 38 min" in few["expected"] and "about 45 min" in many["expected"]
    monkeypatch.setattr(command, "cores_at_once", lambda cores: 1.25)  # two threads of one physical core
    slower = command.chosen_sizes(command.PARAMETERS, [200, 100])
    assert "about 61 min" in slower["expected"] and "2 cores, at once 1.2 times" in slower["expected"]


def test_what_two_threads_compute_at_once_is_measured() -> None:
    assert 1.0 <= cores_at_once(2) != 2.0  # 2: without torch, or if the measurement fails


SMALL = (
    *("run.steps=2", "run.group_size=2", "run.groups_per_step=2", "learner.filter.metric=''", "sft.max_steps=2"),
    *("learner.eval.every=100", "rollout.episode.max_new_tokens=40", "rollout.episode.max_context=2048"),
    *("sft.max_tokens=4096", "launch.ready_s=180"),
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_phases_on_avx2_with_a_tiny_model_a_kill_and_the_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AVX2.items():
        monkeypatch.setenv(name, value)
    folder, run = data(tmp_path / "data"), tmp_path / "run"
    model = tiny_chat_model(tmp_path / "model")
    argv = [
        "demo-lm",
        "--data",
        str(folder),
        "--dir",
        str(run),
        "--model",
        str(model),
        "--limit",
        "2",
        "--json",
        *SMALL,
    ]
    line = [sys.executable, "-m", "foray", *argv]

    def killed(when: Callable[[], bool], what: str) -> None:
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            try:
                wait_until(when, what, 180)
            finally:
                child.terminate()
            assert child.wait(60) == 1

    killed(lambda: (run / "eval" / "untrained" / EPISODES).exists(), "an evaluation is in progress")
    done = subprocess.run(line, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert json.loads((run / "result.json").read_text()) == result
    parts = [load_questions(run / "questions" / f"{name}.jsonl").questions for name in PARTS]
    assert [len(part) for part in parts] == [21, 105, 42, 42]
    assert len({q.text for part in parts for q in part}) == 210
    assert list(result["policies"]) == ["untrained", "naive RAG", "warm start", "GRPO"]
    assert {sets["dev"]["em"]["n"] for sets in result["policies"].values()} == {2}
    assert [point["step"] for point in result["curve"]] == [0, 2]
    assert all(used["done"] for used in result["phases"].values())
    assert "AVX2, without bfloat16 instructions" in done.stderr and "questions of each set: about" in done.stderr
    resolved = yaml.safe_load((run / "grpo" / "resolved.yaml").read_text())
    assert (resolved["learner"]["model"]["dtype"], resolved["engine"]["kind"]["dtype"]) == ("float32", "float32")
    assert result["phases"]["eval-untrained"]["starts"] == 2 and result["phases"]["grpo"]["starts"] == 1
    again = subprocess.run([*line, "run.steps=3"], capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "holds a demo with another overrides" in again.stderr
    control = subprocess.run([*line, "--control", "shuffled-reward"], capture_output=True, text=True, timeout=900)
    assert control.returncode == 0, control.stderr[-3000:]
    found = json.loads(control.stdout)
    assert list(found["policies"])[-1] == "GRPO, rewards shuffled" and len(found["control_curve"]) == 2
    assert found["phases"]["grpo"]["starts"] == 1
    assert {(row["from"], row["to"]) for row in found["differences"]} == set(results.DIFFERENCES)
    assert bound.main([str(run), "--policies", "everything", "--retrievers", "finds", "demo"]) == 0
    alone = json.loads((run / "bound.json").read_text())["rows"]
    assert [(row["policy"], row["retriever"]) for row in alone[::2]] == [
        ("supervised on everything", retriever) for retriever in ("as in the demo", "finds")
    ]
    assert bound.main([str(run)]) == 0
    limits = json.loads((run / "bound.json").read_text())
    asked = [(row["policy"], row["retriever"], row["data_set"], row["n"]) for row in limits["rows"]]
    assert asked == [(p, r, s, 2) for p in bound.POLICIES for r in bound.RETRIEVERS for s in ("held_out", "dev")]
    corpus = (run / "bound" / "corpus.jsonl").read_text().splitlines()
    supporting = {name for q in parts[1] for name in q.supporting} | {f"p{n}" for n in range(10)}
    assert {json.loads(line)["id"] for line in corpus} == supporting, "of held_out and dev"
    assert f"| {result['seed']} | GRPO | finds, uncut | dev | " in bound.table([limits])


def row(question: str, em: float, *turns: str, method: str = "policy", **more: Any) -> dict[str, Any]:
    segments = [{"owner": "prompt", "text": "?"}, *({"owner": "policy", "text": turn} for turn in turns)]
    return {
        "method": method, "data_set": "dev", "question_id": question, "index": 0, "question": question,
        "answers": ["a"], "status": "answered", "metrics": {"em": em, "f1": em}, "searches": len(turns) - 1,
        "evidence": em > 0,
        "tokens_generated": 10, "tokens_read": 90, "segments": segments,
    } | more  # fmt: skip


def test_the_table_counts_what_its_columns_say(tmp_path: Path) -> None:
    search, answer = "<think> t </think> <search> q </search>", "<think> t </think> <answer> a </answer>"
    rows = {
        "untrained": [
            row("q1", 0, "hello"), row("q2", 1, answer), row("q1", 0, method="rag"), row("q2", 0, method="rag"),
            row("q1", 1, answer, status="failed", index=1),
        ],
        "warm": [row("q1", 0, search, answer), row("q2", 1, search, "<answer> a </answer>", evidence=None)],
        "grpo": [row("q1", 1, search, search, answer), row("q2", 1, search, answer)],
    }  # fmt: skip
    for name, episodes in rows.items():
        folder = tmp_path / "eval" / name
        folder.mkdir(parents=True)
        (folder / RECIPE).write_text("{}")
        (folder / EPISODES).write_text("".join(json.dumps(r) + "\n" for r in episodes))
    asked = [
        {"id": "q1", "question": "?", "answers": ["a"], "source": "musique", "hops": 3},
        {"id": "q2", "question": "??", "answers": ["a"], "source": "hotpotqa", "supporting": ["p1", "p2"]},
    ]
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "dev.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked))
    result = results.summary(tmp_path, {})
    means = {
        name: {column: value and value["mean"] for column, value in sets["dev"].items()}
        for name, sets in result["policies"].items()
    }
    assert means["untrained"] == {
        "em": 0.5, "f1": 0.5, "searched": 0, "searches": 0, "well_formed": 0.5, "evidence": 0.5, "tokens": 100,
    }  # fmt: skip
    assert means["warm start"]["well_formed"] == 0.5 and means["warm start"]["searched"] == 1
    assert means["warm start"]["evidence"] == 0, "the unknown one does not count"
    assert means["GRPO"]["em"] == 1 and means["GRPO"]["well_formed"] == 1
    gain = next(r for r in result["differences"] if (r["from"], r["metric"]) == ("warm start", "em"))
    assert gain["difference"] == 0.5 and gain["n"] == 2
    assert result["examples"][0]["question"] == "q1" and "<search>" in result["examples"][0]["text"]["GRPO"]
    shown = results.results_text(result)
    assert "dev        f1        all               2  0.500 -> 1.000: +0.500" in shown
    assert "dev        f1        musique 3         1  0.000 -> 1.000: +1.000" in shown
    assert "dev        searches  hotpotqa 2        1  1.000 -> 1.000" in shown
    assert "naive RAG" in shown and "warm start -> GRPO: +0.500" in shown
