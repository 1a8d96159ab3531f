"""The findings of the doctor, each with a fix."""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from deploy.config import load_config
from deploy.doctor import engine as doctor_engine
from deploy.doctor import machine
from deploy.doctor.access import binds
from deploy.doctor.data import lengths
from deploy.doctor.finding import Finding
from deploy.doctor.model import agent, family
from deploy.doctor.run import examine
from deploy.hardware.host_memory import memory_needed
from foray.commands import doctor as command
from foray.demo.world import save_tokenizer
from tests.support.environments import write_tokenizer
from tests.support.sandboxes import require_bubblewrap


def findings(tmp_path: Path, *overrides: str) -> dict[str, Finding]:
    files = (f"run.model={tmp_path}/model", f"retriever.corpus={tmp_path}/corpus.jsonl", f"run.dir={tmp_path}/run")
    config = load_config(None, [*files, f"learner.questions={tmp_path}/questions.jsonl", *overrides])
    found = examine(config)
    assert all(f.fix for f in found if f.verdict != "ok"), "a finding has a fix"
    return {f.check: f for f in found}


@pytest.mark.slow
def test_a_machine_that_can_run_it_is_in_order(run_files: Path) -> None:
    assert [f for f in findings(run_files).values() if f.verdict != "ok"] == []


@pytest.mark.slow
def test_missing_files_and_a_taken_port_would_stop_a_run(run_files: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = findings(run_files, "learner.questions=/nowhere.jsonl", f"rollout.port={port}")
    assert found["learner.questions"].verdict == "fail" and "/nowhere.jsonl" in found["learner.questions"].detail
    assert found["ports"].verdict == "fail" and f"rollout.port = {port}" in found["ports"].detail


def test_what_agents_can_do_with_the_chat_template_is_told(tmp_path: Path) -> None:
    config = load_config(None, [f"run.model={tmp_path}", "rollout.agent.type=python", "rollout.agent.target=a:b"])
    (unknown,) = agent(config)
    assert unknown.verdict == "fail" and "tokenizer.json" in unknown.detail
    write_tokenizer(tmp_path, "words")
    (found,) = agent(config)
    assert (found.verdict, found.detail) == ("ok", "a trajectory is one sequence")
    write_tokenizer(tmp_path, "bytes")
    (found,) = agent(config)
    assert found.verdict == "warn" and found.fix and "agents without tools only" in found.detail
    assert not list(agent(load_config(None, [f"run.model={tmp_path}"]))), "the built-in loop has no messages"


def test_questions_that_are_too_long_for_the_context_are_counted(run_files: Path) -> None:
    save_tokenizer(run_files / "model")
    rows = [{"id": str(n), "question": "where " * (3 if n < 300 else 600), "answers": ["Paris"]} for n in range(400)]
    (run_files / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = load_config(None, [f"run.model={run_files}/model", f"learner.questions={run_files}/questions.jsonl"])
    episode = config.rollout.episode.model_copy(update={"max_context": 512, "max_obs_tokens": 64, "reserve_tokens": 16})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"episode": episode})})
    (found,) = lengths(config)
    assert (found.verdict, found.detail) == ("warn", "100 of 400 questions have a prompt of more than 496 tokens")
    assert "max_context" in found.fix and "prompt_too_long" in found.why


def test_rows_of_several_lines_are_named(run_files: Path) -> None:
    (run_files / "q.csv").write_text('id,question,answers\n1,"Heroes who?,a\n2,who is 12",b\n')
    found = findings(run_files, f"learner.questions={run_files / 'q.csv'}")["learner.questions"]
    assert found.verdict == "warn" and "first: lines 2 to 3 of " in found.why and "inspect" in found.fix


def test_what_the_page_of_models_says_of_this_one_is_one_line(run_files: Path) -> None:
    (run_files / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    (said,) = family(load_config(None, [f"run.model={run_files / 'model'}"]))
    assert "exact: one trajectory per row, packed rows, " in said.detail and "yes: CPU engine" in said.detail
    assert said.detail.endswith("; otherwise with qwen2 fp8, qwen2 yarn (docs/models.md)"), (
        "not those with its verdicts"
    )
    assert len(said.detail) < 250


@pytest.mark.parametrize(("kind", "size", "refused"), [("olmoe", 2, True), ("olmoe", 1, False), ("qwen3", 2, False)])
def test_a_model_that_sglang_cannot_divide_among_gpus_is_refused(
    run_files: Path, kind: str, size: int, refused: bool
) -> None:
    (run_files / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    args = f"engine.kind={{type: sglang, args: ['--tp-size', '{size}']}}"
    found = findings(run_files, args, f"run.model={run_files / 'model'}").get("engine.kind.args")
    assert (found is not None and found.verdict == "fail" and "--tp-size" in found.fix) == refused


def test_more_minibatches_than_groups_are_named(run_files: Path) -> None:
    given = ("run.groups_per_step=1", "learner.algorithm={type: grpo, minibatches: 10}")
    found = findings(run_files, *given)["learner.algorithm.minibatches"]
    assert found.verdict == "warn" and "1 groups a step make 1, not 10" in found.detail


def test_a_sandbox_that_is_missing_is_named(run_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tool python" not in findings(run_files)
    monkeypatch.setattr("rollout_server.tools.sandbox.bubblewrap.shutil", SimpleNamespace(which=lambda tool: None))
    found = findings(run_files, "rollout.episode.tools=[python]")["tool python"]
    assert found.verdict == "fail" and found.why == "bwrap is not installed" and "apt-get install" in found.fix
    service = "[{type: python, sandbox: {type: service, url: 'http://127.0.0.1:1', attempts: 1}}]"
    found = findings(run_files, f"rollout.episode.tools={service}")["tool python"]
    assert found.verdict == "fail" and "127.0.0.1:1/run_code: unreachable" in found.why


def test_a_sandbox_that_works_is_in_order(run_files: Path) -> None:
    require_bubblewrap()
    found = findings(run_files, "rollout.episode.tools=[{type: python, deadline_s: 20}]")["tool python"]
    assert (found.verdict, found.detail) == ("ok", "a sandbox of type bubblewrap computes 6 * 7 = 42")


def test_memory_is_the_bound_of_the_design_and_is_compared_with_the_limit(run_files: Path) -> None:
    config = load_config(
        None, ["run.max_lag=2", "learner.checkpoint_every=25", "run.groups_per_step=64", "run.group_size=8"]
    )
    # 28 * 64 groups of 8 * 4096 tokens, 10 bytes each: the 0.6 GB of the research, to within the rounding there
    assert memory_needed(config) == 53 * 64 * 8 * 4096 * 10
    learner = config.learner.model_copy(update={"async_checkpoints": False})
    assert memory_needed(config.model_copy(update={"learner": learner})) == 28 * 64 * 8 * 4096 * 10
    assert findings(run_files, "launch.redis_maxmemory_mb=16")["redis memory"].verdict == "warn"


def test_parts_that_no_reward_brings_are_refused(run_files: Path) -> None:
    assert "learner.algorithm.parts" not in findings(run_files, "learner.algorithm.parts={em: 1.0}")
    found = findings(run_files, "learner.algorithm.parts={em: 1.0, format: 0.2}")["learner.algorithm.parts"]
    assert (found.verdict, found.detail) == ("fail", "rollout.episode.rewards has no reward named format")


def test_a_teacher_has_the_ids_of_the_policy_or_more(run_files: Path, tmp_path: Path) -> None:
    teacher, extra = (
        tmp_path / "teacher",
        ("learner.algorithm.type=distill", f"learner.reference.model={tmp_path}/teacher"),
    )
    shutil.copytree(run_files / "model", teacher)
    spec, facts = (json.loads((teacher / f"{name}.json").read_text()) for name in ("tokenizer", "config"))
    size = facts["vocab_size"]
    for ids, verdict in ((size, None), (size + 128, None), (size - 1, "fail")):
        (teacher / "config.json").write_text(json.dumps(facts | {"vocab_size": ids}))
        found = findings(run_files, *extra).get("learner.reference.model")
        assert (found and found.verdict) == verdict, found
    (teacher / "config.json").write_text(json.dumps(facts))
    first, second, *_ = spec["model"]["vocab"]
    words = spec["model"]["vocab"]
    words[first], words[second] = words[second], words[first]
    (teacher / "tokenizer.json").write_text(json.dumps(spec))
    assert "2 tokens of" in findings(run_files, *extra)["learner.reference.model"].detail
    assert "learner.reference.model" not in findings(run_files, f"learner.reference.model={teacher}"), (
        "none is asked for"
    )


def test_engine_and_learner_round_their_logits_alike(run_files: Path) -> None:
    bfloat16 = ("learner.model.dtype=bfloat16", "learner.engine.zero_stage=1")
    for here, there in ((True, True), (True, False), (False, True), (False, False)):
        extra = (f"learner.model.fp32_lm_head={here}", f"engine.kind={{type: sglang, fp32_lm_head: {there}}}")
        assert ("fp32_lm_head" in findings(run_files, *bfloat16, *extra)) == (here != there)
        assert "fp32_lm_head" not in findings(run_files, *extra), "a float32 learner rounds nothing"


def test_engines_for_evaluation_are_checked_as_engines(run_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checks(engines: int, eval_engines: int, *more: str) -> dict[str, str]:
        given = (f"launch.engines={engines}", f"launch.eval_engines={eval_engines}", "engine.host=0.0.0.0", *more)
        config = load_config(None, [f"run.model={run_files}/model", "launch.rollouts=0", *given])
        parts = (doctor_engine.engine, doctor_engine.gpus, doctor_engine.learner, binds)
        found = [f for part in parts for f in part(config)]
        return {f"{f.check}: {f.detail}": f.verdict for f in found}

    for more in (
        (),
        ("learner.publish={type: distributed, backend: nccl}",),
        (
            *("engine.kind.type=sglang", "learner.model.dtype=bfloat16"),
            *("learner.model.fp32_lm_head=false", "learner.engine.zero_stage=1"),
        ),
    ):
        assert checks(0, 1, *more) == checks(1, 0, *more) != checks(0, 0, *more)
    monkeypatch.setitem(machine.NEEDED, "rollout server", ("no_such_package",))
    for engines, verdict in ((1, "fail"), (0, "warn")):
        config = load_config(None, ["launch.rollouts=0", "launch.engines=0", f"launch.eval_engines={engines}"])
        (found,) = [f for f in machine.packages(config) if f.check == "rollout server packages"]
        assert found.verdict == verdict


def test_an_mlflow_without_what_its_files_need_is_found_before_the_start(
    run_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mlflow-skinny: it can be imported, and has neither of the packages behind `sqlite:///`."""
    (tmp_path / "slim" / "mlflow").mkdir(parents=True)
    (tmp_path / "slim" / "mlflow" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "slim")
    for absent in ("sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, absent, None)
    found = findings(run_files, "learner.trackers=[mlflow]")["learner.trackers"]
    assert (found.verdict, found.why) == ("fail", "not installed: sqlalchemy, alembic")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    remote = findings(run_files, "learner.trackers=[mlflow]")
    assert remote["learner.trackers"].verdict == "ok", "a server keeps them"


def test_sampling_from_a_part_of_the_distribution_is_pointed_out(run_files: Path) -> None:
    assert "sampling" not in findings(run_files)
    for given in ("run.top_p=0.95", "run.top_k=50"):
        found = findings(run_files, given)["sampling"]
        assert found.verdict == "warn" and given.replace("=", " = ") in found.detail


def test_a_redis_that_would_evict_is_refused(run_files: Path, client: redis.Redis, redis_url: str) -> None:
    assert findings(run_files, f"run.redis_url={redis_url}")["redis policy"].verdict == "ok"
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = findings(run_files, f"run.redis_url={redis_url}")["redis policy"]
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    assert found.verdict == "fail" and "CONFIG SET maxmemory-policy noeviction" in found.fix


def test_a_redis_that_is_away_is_a_finding(run_files: Path) -> None:
    assert findings(run_files, "run.redis_url=redis://127.0.0.1:1/0")["redis"].verdict == "fail"


def test_the_command_prints_json_and_its_exit_code_is_the_verdict(
    run_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(argparse.Namespace(given=[], config=None, json=True)) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["healthy"] is True and {"check", "verdict", "detail", "fix", "why"} == page["findings"][0].keys()
    config = run_files / "c.yaml"
    config.write_text("run: {model: /nowhere}\n")
    assert command.run(argparse.Namespace(given=[], config=config, json=False)) == 1
    assert "do: give a directory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "settings"),
    [
        (
            {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]},
            ("eager",),
        ),
        ({"model_type": "falcon_mamba"}, ("eager", "row_tokens to 0")),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, ("eager",)),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, ("row_tokens to 0",)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_model_that_engine_and_learner_cannot_take_is_found_by_its_configuration(
    run_files: Path, facts: dict[str, Any], settings: tuple[str, ...]
) -> None:
    path = run_files / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    found = findings(run_files, "learner.batch.row_tokens=4096")
    assert found["engine"].verdict == "fail" and "cannot serve" in found["engine"].detail
    assert found["learner"].verdict == "fail"
    assert all(setting in found["learner"].fix for setting in settings)
