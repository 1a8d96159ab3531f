"""Wrong starts: the errors of `foray up` and `foray doctor` before any process of the run is started.

Each case is one error in a run that could start otherwise. The real commands run in this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from deploy.config import load_config
from deploy.launch.plan import ProcessSpec
from deploy.launch.supervisor import Supervisor
from deploy.run.run_dir import RECORD
from foray.cli import main
from foray.commands.init import presets
from learner.config.learner import LearnerSettings
from learner.delivery.store import RunStore
from learner.interfaces import TrainEngine
from learner.main import serve as serve_learner
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.run_meta import LINEAGE_FILE, RunMeta
from protocol.runtime.redis.aio import RedisClient
from protocol.runtime.service_cli import EXIT_USER
from protocol.settings import RunSettings
from rollout_server.config import RolloutSettings
from rollout_server.search.base import NoSearchSettings
from rollout_server.server import serve as serve_rollouts
from tests.support.environments import write_tokenizer

QWEN_3B = {
    **{"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008},
    **{"num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True},
    **{"max_position_embeddings": 32768, "sliding_window": 32768, "use_sliding_window": False},
}
SMALL = {
    **{"model_type": "stablelm", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 8192, "sliding_window": 512},
    "layer_types": ["sliding_attention", "full_attention"],
}
CAPPED = SMALL | {"model_type": "gemma2", "attn_logit_softcapping": 50.0}
LINEAR = SMALL | {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
STRETCHED = SMALL | {"model_type": "phi3", "rope_scaling": {"type": "longrope"}}
SEARCH_R1 = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Question: who ?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada"]}},
    "extra_info": {"split": "train", "index": 0},
}


@dataclass
class Start:
    """A run that could start; a case makes one thing wrong."""

    directory: Path
    redis_url: str
    admin: redis.Redis
    patch: pytest.MonkeyPatch
    overrides: list[str] = field(default_factory=list)

    @property
    def argv(self) -> list[str]:
        """A configuration file and overrides."""
        given = {
            "run": {"id": "wrong", "dir": str(self.directory / "run"), "model": str(self.directory / "model")},
            "retriever": {"corpus": str(self.directory / "corpus.jsonl")},
            "learner": {"questions": str(self.directory / "questions.jsonl")},
        }
        path = self.directory / "run.yaml"
        path.write_text(json.dumps(given))
        return [str(path), *self.overrides]

    def write(self, name: str, content: Any) -> Path:
        """Bytes as they are, other values as JSON."""
        path = self.directory / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path


@pytest.fixture
def start(run_files: Path, redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.delenv("FORAY_REDIS_URL", raising=False)
    yield Start(run_files, redis_url, client, monkeypatch)
    client.config_set("maxmemory", 0)
    client.config_set("maxmemory-policy", "noeviction")


def configured(*overrides: str) -> Callable[[Start], None]:
    return lambda start: start.overrides.extend(overrides)


def holds(name: str, content: Any) -> Callable[[Start], None]:
    def make(start: Start) -> None:
        start.write(name, content)

    return make


def parquet(row: dict[str, Any]) -> Callable[[Start], None]:
    def make(start: Start) -> None:
        path = start.directory / "train.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
        start.overrides.append(f"learner.questions={path}")

    return make


def evicting(start: Start) -> None:
    start.admin.config_set("maxmemory-policy", "allkeys-lru")
    start.overrides.append(f"run.redis_url={start.redis_url}")


def another_run(start: Start) -> None:
    meta = RunMeta(facts={"host": "elsewhere", "dir": "/runs/theirs"}, lineage_id="f" * 32).fields()
    start.admin.hset(Keys("wrong").meta, mapping=meta)
    start.overrides.append(f"run.redis_url={start.redis_url}")


def full(start: Start) -> None:
    # a large value by a small command: the buffer of a large one would count, and be freed a moment later
    start.admin.setrange("ballast", 32 << 20, b"x")
    start.admin.config_set("maxmemory", int(start.admin.info("memory")["used_memory"]))
    start.overrides.append(f"run.redis_url={start.redis_url}")


def no_directory(start: Start) -> None:
    start.overrides.append(f"run.dir={start.write('file', b'') / 'run'}")


def no_tracker(start: Start) -> None:
    start.patch.setitem(sys.modules, "wandb", None)
    start.overrides.append("learner.trackers=[wandb]")


def bare_python(start: Start) -> None:
    """An interpreter without any installed package."""
    python = start.write("bare", f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n'.encode())
    python.chmod(0o755)
    start.overrides.append(f"engine.kind={{type: sglang, python: {python}}}")


def no_cuda(start: Start) -> None:
    start.patch.setenv("CUDA_VISIBLE_DEVICES", "")
    start.overrides += ["learner.publish={type: distributed, backend: nccl}", "launch.engines=0"]


def served_elsewhere(facts: dict[str, Any], *overrides: str) -> Callable[[Start], None]:
    """A model for the learner alone."""

    def make(start: Start) -> None:
        start.write("model/config.json", facts)
        start.overrides += ["launch.engines=0", *overrides]

    return make


def half_a_model(start: Start) -> None:
    path = start.directory / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


WRONG: dict[str, tuple[Callable[[Start], None], list[str]]] = {
    # error: how it is caused, texts in the first error message
    "parquet of unknown columns": (
        parquet({"query": "who ?", "gold": "Ada"}),
        ["unknown format of questions", "train.parquet", "gold, query", "--question query --answers gold"],
    ),
    "a passage file as questions": (
        holds("questions.jsonl", [{"id": "0", "contents": "Ada"}]),
        ["unknown format of questions", "contents, id"],
    ),
    "a question without an answer": (
        holds("questions.jsonl", b'{"question": "who ?", "answer": "Ada"}\n\n{"question": "who ?"}\n'),
        [
            "line 3 of the questions",
            "no answer: none of the fields answers, golden_answers, answer",
            '"answers": ["..."]',
        ],
    ),
    "a bad corpus": (
        holds("corpus.jsonl", b'{"id": "1", "contents": "x"}\n{"id": "2", "passage": "y"}\n'),
        ["retriever.corpus", "line 2 of", "missing contents", '"id" and "contents"'],
    ),
    "an empty corpus": (holds("corpus.jsonl", b""), ["retriever.corpus", "has no passages"]),
    "a corpus too large to index at the start": (
        configured("retriever.build_limit_mb=0"),
        ["no index found at", "build_limit_mb = 0", "foray index build"],
    ),
    "a 3B model on the CPU engine": (
        holds("model/config.json", QWEN_3B),
        [
            "3,085.7 million parameters: too large for the CPU engine",
            "up to 1,000 million",
            "engine.kind={type: sglang}",
        ],
    ),
    "stablelm on the CPU engine": (
        holds("model/config.json", SMALL),
        ["the CPU engine", "'stablelm' is not supported", "engine.kind={type: sglang}"],
    ),
    "deepseek on the CPU engine": (
        holds("model/config.json", QWEN_3B | {"model_type": "deepseek_v3"}),
        ["'deepseek_v3' is not supported", "engine.kind={type: sglang}"],
    ),
    "a stretched rotation on the CPU engine": (
        holds("model/config.json", STRETCHED),
        ["rotary scaling 'longrope' is not supported", "engine.kind={type: sglang}"],
    ),
    "rows that cannot be packed": (
        served_elsewhere(LINEAR, "learner.batch.row_tokens=512"),
        ["several trajectories in one row", "a state from one token to the next", "learner.batch.row_tokens to 0"],
    ),
    "capped attention under sdpa": (
        served_elsewhere(CAPPED),
        ["caps its attention scores", "learner.model.attention to eager"],
    ),
    "weights that are cut off": (half_a_model, ["not a complete safetensors file", "copy it again"]),
    "max_context over the model's": (
        configured("rollout.episode.max_context=8192"),
        ["max_context = 8192 exceeds the 4096 positions", "rollout.episode.max_context=4096"],
    ),
    "a tracker that is not installed": (
        no_tracker,
        ["wandb cannot be used", "not installed: wandb", "pip install wandb"],
    ),
    "an evicting Redis": (evicting, ["evicts keys", "delete work in flight", "maxmemory-policy noeviction"]),
    "no Redis there": (
        configured("run.redis_url=redis://127.0.0.1:1/0"),
        ["no Redis answers at redis://127.0.0.1:1/0"],
    ),
    "a run.dir below a file": (no_directory, ["run.dir", "file is not a directory", "run.dir=DIR"]),
    "a run.dir where nothing can be written": (configured("run.dir=/proc/foray"), ["run.dir", "/proc", "run.dir=DIR"]),
    "no interpreter of the engine": (
        configured("engine.kind={type: sglang, python: /nowhere/python}"),
        ["there is no interpreter at /nowhere/python", "it is set in engine.kind.python", "make sglang-env"],
    ),
    "an interpreter without SGLang": (
        bare_python,
        ["SGLang is not installed", "cannot import the package sglang", "make sglang-env"],
    ),
    "nccl to a CPU engine": (
        configured("learner.publish={type: distributed, backend: nccl}"),
        ["backend is nccl", "only gloo", "learner.publish.backend=gloo"],
    ),
    "nccl without CUDA": (
        no_cuda,
        ["no CUDA device was found", "learner.publish.backend=gloo"],
    ),
    "a second run of one id": (
        another_run,
        ["already holds another run named 'wrong'", "lineage ffffffff", "host elsewhere", "run.id"],
    ),
    "groups of one for a group's baseline": (
        configured("run.group_size=1"),
        ["run.group_size is 1", "type grpo compares a trajectory with its group", "group_size to 2 or more", "ppo"],
    ),
    "a full Redis": (full, ["Redis is full", "refuse the tasks of a new run", "CONFIG SET maxmemory"]),
}


class Spawned(Exception):
    """A process would have been started."""


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(self: Supervisor, spec: ProcessSpec) -> None:
        raise Spawned(spec.name)

    monkeypatch.setattr(Supervisor, "spawn", spawn)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_start_is_refused_before_anything_is_started(
    start: Start, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = WRONG[name]
    make(start)
    assert main(["up", *start.argv]) == EXIT_USER
    said = capsys.readouterr().err
    first = said.partition("\nerror: ")[0]
    assert said.startswith("error: ") and said.endswith("\nnothing was started\n")
    assert [word for word in words if word not in first] == [] and "\n   do: " in first, said
    assert not os.path.exists(start.directory / "run" / "logs") and not os.path.exists(start.directory / "run" / RECORD)

    assert main(["doctor", *start.argv]) == 1
    said = capsys.readouterr().out
    assert [word for word in words if word not in said] == [], said
    assert main(["up", *start.argv, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "\n# fail: " in said and [word for word in words if word not in said] == [], said


def test_a_right_start_gets_as_far_as_its_first_process(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the wrong thing refuses the starts above."""
    with pytest.raises(Spawned, match="redis"):
        main(["up", *start.argv])
    assert main(["up", *start.argv, "--dry-run"]) == 0
    assert "# fail" not in capsys.readouterr().out
    assert main(["up", *start.argv, "--dry-run", "--json", "learner.questions=/nowhere"]) == 0
    found, changed = json.loads(capsys.readouterr().out)["findings"]
    assert found["check"] == "learner.questions" and found["verdict"] == "fail"
    assert changed["check"] == "settings" and "-> /nowhere" in changed["detail"]


def test_the_run_that_fills_redis_may_go_on(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Only its own learner can make room; that it has the name is no obstacle to itself."""
    another_run(start)
    full(start)
    (start.directory / "run").mkdir()
    (start.directory / "run" / LINEAGE_FILE).write_text("f" * 32)
    start.admin.config_set("maxmemory", 0)
    start.admin.xadd(Keys("wrong").traj, {"b": "x"})
    start.admin.config_set("maxmemory", int(start.admin.info("memory")["used_memory"]))
    with pytest.raises(Spawned, match="retriever-1"):
        main(["up", *start.argv])
    assert "warning: redis room: Redis is full" in capsys.readouterr().out


def test_all_that_is_wrong_is_said_at_once(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    parquet({"query": "who ?"})(start)
    bare_python(start)
    assert main(["up", *start.argv]) == EXIT_USER
    said = capsys.readouterr().err
    assert said.count("error: ") == 2 and "unknown format of questions" in said and "SGLang is not installed" in said


def test_the_doctor_reads_the_rows_of_search_r1(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    parquet(SEARCH_R1)(start)
    assert main(["doctor", *start.argv]) == 0
    assert "train.parquet: the first 1 questions are readable (format search_r1)" in capsys.readouterr().out


def test_weights_of_unknown_size_give_no_line_about_the_disk(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *start.argv]) == 0
    assert " disk " in capsys.readouterr().out
    (start.directory / "model" / "model.safetensors").unlink()
    assert main(["doctor", *start.argv]) == 1
    said = capsys.readouterr().out
    assert "no weights (*.safetensors)" in said and " disk " not in said


def test_what_a_preparation_will_make_is_not_missed(start: Start) -> None:
    none = [f"run.model={start.directory}/none", f"retriever.corpus={start.directory}/none.jsonl"]
    prepare = f"launch.prepare={json.dumps([[sys.executable, '-c', 'raise SystemExit(3)']])}"
    start.overrides += [*none, prepare]
    assert main(["up", *start.argv]) == 1, "the preparation ran, and failed"


@pytest.mark.parametrize("preset", presets())
def test_a_preset_fails_its_own_doctor_for_what_this_machine_lacks(
    start: Start, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of billions on the CPU engine is not among it."""
    path = start.directory / "preset.yaml"
    files = [f"run.model={start.directory}/model", f"learner.questions={start.directory}/questions.jsonl"]
    corpus = [f"retriever.corpus={start.directory}/corpus.jsonl", f"run.dir={start.directory}/run"]
    python = f"engine.kind.python={start.directory}/none"
    assert main(["init", str(path), "--preset", preset, *files, *corpus, python]) == 0
    facts = json.loads((start.directory / "model" / "config.json").read_bytes())
    start.write("model/config.json", facts | {"max_position_embeddings": 32768})
    capsys.readouterr()
    assert main(["doctor", str(path), "--json"]) == 1
    findings = {f["check"]: f for f in json.loads(capsys.readouterr().out)["findings"] if f["verdict"] == "fail"}
    assert findings.keys() == {"engine"} and "there is no interpreter" in findings["engine"]["detail"]


def settings_of(start: Start) -> tuple[RunSettings, LearnerSettings]:
    config = load_config(None, [f"run.model={start.directory}/model", f"run.dir={start.directory}/run", "run.id=test"])
    questions = LearnerSettings(questions=start.directory / "questions.jsonl")
    return config.run.model_copy(update={"redis_url": start.redis_url}), questions


def test_a_manually_started_learner_refuses_an_evicting_redis(start: Start) -> None:
    def engine(*_: object) -> TrainEngine:
        raise Spawned("train engine")

    run, settings = settings_of(start)
    with pytest.raises(Spawned):
        serve_learner(run, settings, make_engine=engine)
    start.admin.config_set("maxmemory-policy", "volatile-lru")
    before = set(start.admin.keys("*"))
    with pytest.raises(UserError, match="evicts keys: maxmemory-policy is volatile-lru") as refused:
        serve_learner(run, settings, make_engine=engine)
    assert "CONFIG SET maxmemory-policy noeviction" in refused.value.todo
    assert set(start.admin.keys("*")) == before, "no lease was taken"


async def test_a_manually_started_rollout_server_refuses_an_evicting_redis(start: Start) -> None:
    start.admin.config_set("maxmemory-policy", "allkeys-lru")
    run, _ = settings_of(start)
    write_tokenizer(start.directory / "model", "words")
    with pytest.raises(UserError, match="evicts keys: maxmemory-policy is allkeys-lru"):
        async with asyncio.timeout(30):
            await serve_rollouts(run, RolloutSettings(search=NoSearchSettings()))


@pytest.mark.parametrize(
    ("rights", "policy"), [("+info", "allkeys-lru"), ("+config|get", "allkeys-lru"), ("+ping", "")]
)
async def test_the_policy_is_read_as_far_as_the_user_may(start: Start, rights: str, policy: str) -> None:
    start.admin.config_set("maxmemory-policy", "allkeys-lru")
    start.admin.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">geheim", "-@all", rights)
    url = start.redis_url.replace("//", "//limited:geheim@")
    store, rollouts = RunStore(url, "test"), RedisClient(url, Keys("test"))
    try:
        assert store.eviction_policy() == policy
        assert await rollouts.eviction_policy() == policy
    finally:
        store.close()
        await rollouts.aclose()
        start.admin.acl_deluser("limited")
