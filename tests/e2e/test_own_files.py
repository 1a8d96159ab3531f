"""Files of data sets as their sources write them: inspected, checked, trained on and evaluated, one command each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.test_reproduce import policy
from tests.support.format_samples import QUESTIONS

FILES = {
    "search_r1": ("train.parquet", "nq"),
    "hotpotqa": ("hotpot_dev_distractor_v1.json", "hotpotqa"),
    "musique": ("musique_ans_v1.0_dev.jsonl", "musique"),
    "strategyqa": ("strategyqa_dev.json", "strategyqa"),
    "simpledeepsearcher": ("2wiki_simpledeepsearcher.json", "2wiki"),
    "2wiki": ("2wiki_dev.json", "2wikimultihopqa"),
}
"""Format -> name of its file, and the source of its questions."""
SMALL = """
run: {{id: own-files, dir: run, model: model, steps: 2, group_size: 2, groups_per_step: 12}}
rollout:
  episode: {{max_turns: 1, max_new_tokens: 8, max_obs_tokens: 64, max_context: 1536}}
  search: {{type: http, topk: 2}}
retriever: {{corpus: {corpus}, index_dir: index, index: {{type: bm25}}}}
learner:
  questions: [{questions}]
  model: {{dtype: float32}}
  engine: {{zero_stage: 0}}
engine: {{kind: {{type: cpu}}}}
launch: {{ready_s: 180}}
"""


def write(folder: Path, form: str) -> Path:
    """Write the first sample of a format several times, with ids of their own."""
    path, first = folder / FILES[form][0], QUESTIONS[form][0][0]
    records: list[dict[str, Any]] = []
    for number in range(4):
        record = json.loads(json.dumps(first))
        for key in ("_id", "id", "qid"):
            if key in record:
                record[key] = f"{record[key]}-{number}"
        if form == "search_r1":
            record["extra_info"]["index"] = number
        records.append(record)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        path.write_text(json.dumps(records))
    return path


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_own_files_of_six_sources_in_one_run_and_one_evaluation(tmp_path: Path) -> None:
    paths = {form: write(tmp_path, form).name for form in FILES}
    policy(tmp_path / "model")
    questions = ", ".join(f"{{path: {path}, weight: 1}}" for path in paths.values())
    (tmp_path / "run.yaml").write_text(SMALL.format(corpus=paths["hotpotqa"], questions=questions))

    def foray(*words: str) -> str:
        command = [sys.executable, "-m", "foray", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    reports = json.loads(foray("data", "inspect", *paths.values(), "--json"))
    assert [report["format"] for report in reports] == list(paths)
    assert foray("doctor", "--config", "run.yaml").count("questions are readable (format ") == len(paths)
    foray("up", "run.yaml")
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    sources = [source for _, source in FILES.values()]
    trained = {source: sum(step.get(f"source_groups/{source}", 0) for step in steps) for source in sources}
    assert [step["step"] for step in steps] == [1, 2] and sum(trained.values()) == 24 and all(trained.values())
    suite = ["--suite", *paths.values(), "--limit", "2", "--out", "result", "--json"]
    report = json.loads(foray("eval", "model", "--config", "run.yaml", *suite))
    assert {cell["data_set"]: cell["episodes"] for cell in report["scores"]} == dict.fromkeys(sources, 2)
    assert {cell["data_set"] for cell in report["scores"] if "yes_no" in cell["metrics"]} == {"strategyqa"}
