"""What `foray eval` evaluates, and the configuration of what it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import redis

from deploy.run.run_dir import RESOLVED, hold, write_record
from foray.evaluation import targets
from foray.evaluation.targets import STATE, Needs, ServingOptions, find_target, serving, serving_config
from protocol.errors import UserError
from protocol.runtime.config import SettingsTree, read_tree
from protocol.runtime.http.client import ask, read_json
from rollout_server.search.base import NoSearchSettings
from tests.support.registered import registered

EVERYTHING = Needs(policy=True, methods=True, search=True)


def test_a_target_is_known_by_its_files_or_its_url(tmp_path: Path, run_files: Path) -> None:
    checkpoint = tmp_path / "step_4.e1"
    (checkpoint / STATE).parent.mkdir(parents=True)
    (checkpoint / STATE).write_text("{}")
    stopped, copied, running = tmp_path / "stopped", tmp_path / "copied", tmp_path / "running"
    stopped.mkdir()
    write_record(stopped, {})
    with hold(running):
        write_record(running, {})
        shutil.copytree(running, copied)
        assert find_target(str(running)).kind == "run"
    assert find_target(str(stopped)).kind == "checkpoint"
    kinds = {
        str(checkpoint): "checkpoint",
        str(running): "checkpoint",
        str(copied): "checkpoint",
        str(run_files / "model"): "model",
        "http://host:1/": "server",
        "https://host/v1/": "endpoint",
    }
    assert {where: find_target(where).kind for where in kinds} == kinds
    assert find_target("https://host:8/v1").name == "host-8-v1" and find_target(str(checkpoint)).name == "step_4.e1"
    for where in (str(tmp_path), str(tmp_path / "none" / "x")):
        with pytest.raises(UserError, match="cannot evaluate"):
            find_target(where)


def test_the_state_of_a_checkpoint_is_where_the_learner_writes_it() -> None:
    from learner.checkpoint.checkpoint import STATE as FOLDER
    from learner.engine.state import INDEX
    from learner.trainer.models import POLICY

    assert Path(FOLDER, POLICY, INDEX) == STATE


def tree() -> SettingsTree:
    found = read_tree(
        None,
        [
            *("run.id=mine", "run.redis_url=redis://elsewhere:6379/0", "learner.metrics_port=9000", "run.seed=7"),
            *("rollout.host=0.0.0.0", "rollout.port=80", "engine.host=0.0.0.0", "engine.port=81", "engine.role=eval"),
            *("retriever.host=0.0.0.0", "retriever.port=82", "launch.engines=3", "launch.retrievers=2"),
            "launch.eval_engines=2",
            *(
                "launch.secrets=secrets",
                "launch.gpus.learner=[1]",
                "launch.gpus.engines=[0]",
                "rollout.search={type: http, topk: 5}",
            ),
        ],
    )
    return found


def test_what_is_started_listens_on_loopback_has_no_learner_and_its_own_redis(tmp_path: Path) -> None:
    given = tree()
    config = serving_config(given, tmp_path / "m", tmp_path / "serve", EVERYTHING, ServingOptions())
    assert not config.launch.learner and config.launch.redis == "own" and config.launch.secrets is None
    assert (config.run.model, config.run.dir, config.run.redis_url) == (tmp_path / "m", tmp_path / "serve", "")
    assert {config.rollout.host, config.engine.host, config.retriever.host} == {"127.0.0.1"}
    assert (config.rollout.port, config.engine.port, config.engine.role) == (0, 0, "rollout")
    assert "port" not in config.retriever.model_fields_set
    assert (config.launch.engines, config.launch.rollouts, config.num_retrievers) == (3, 1, 2), "as in the run"
    assert list(config.engine_roles.items()) == [(f"engine-{i}", "rollout") for i in (1, 2, 3)], "none for evaluation"
    given["launch"]["engines"] = 0  # those of the run are on other hosts
    alone = serving_config(given, tmp_path / "m", tmp_path / "serve", EVERYTHING, ServingOptions())
    assert alone.engine_roles == {"engine-1": "rollout"}
    given["launch"]["engines"] = 3
    assert config.launch.gpus.engines == (0,) and config.launch.gpus.learner == ()
    assert config.run.seed == 7 and config.rollout.search.model_dump()["topk"] == 5
    again = serving_config(given, tmp_path / "m", tmp_path / "serve", EVERYTHING, ServingOptions())
    assert again.run.id == config.run.id != "mine", "a resume has the same policy"
    assert given == tree(), "the given tree is not changed"


def test_only_what_the_methods_need_is_started(tmp_path: Path) -> None:
    def made(needs: Needs, options: ServingOptions = ServingOptions()) -> tuple[int, int]:  # noqa: B008 (immutable)
        config = serving_config(tree(), tmp_path, tmp_path / "s", needs, options)
        assert needs.search or isinstance(config.rollout.search, NoSearchSettings)
        return config.launch.rollouts, config.num_retrievers

    assert made(Needs(policy=False, methods=True, search=False)) == (0, 0)
    assert made(Needs(policy=True, methods=False, search=False)) == (1, 0)
    options = ServingOptions(retriever="http://host:8000")
    assert made(EVERYTHING, options) == (1, 0)
    config = serving_config(tree(), tmp_path, tmp_path / "s", EVERYTHING, options)
    assert config.rollout.search.model_dump()["urls"] == ("http://host:8000",)


def test_only_a_registered_server_is_asked_whatever_run_json_says(tmp_path: Path, client: redis.Redis) -> None:
    path = client.connection_pool.connection_kwargs["path"]
    (tmp_path / RESOLVED).write_text(f"run: {{id: test, dir: {tmp_path}, redis_url: 'unix://{path}'}}\n")
    needs = Needs(policy=True, methods=False, search=False)

    def served() -> str:
        with serving(find_target(str(tmp_path)), needs, ServingOptions(), tmp_path / "out", print) as found:
            return found.rollout_url

    with hold(tmp_path):
        write_record(tmp_path, {"rollouts": ["http://127.0.0.1:1"]})
        with pytest.raises(UserError, match="no registered rollout server"):
            served()
        with registered(f"unix://{path}", "test", "rollout", "http://127.0.0.1:2"):
            assert served() == "http://127.0.0.1:2"


def test_an_exported_model_is_reused_for_the_same_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_files: Path
) -> None:
    from learner.model import export

    made: list[Path] = []

    def export_model(state: Path, initial: Path, settings: object, out: Path, **_: object) -> None:
        made.append(out)
        out.mkdir()

    monkeypatch.setattr(export, "export_model", export_model)
    monkeypatch.setattr(targets.run_dir, "model_settings", lambda *_: (run_files / "model", None))
    for run in ("a", "b"):
        state = tmp_path / run / "checkpoints" / "step_4.e1" / STATE
        state.parent.mkdir(parents=True)
        state.write_text("{}")
        (state.parent / "master.00000.000.safetensors").write_bytes(run.encode())
    found = [
        targets._exported(tmp_path / run / "checkpoints" / "step_4.e1", ServingOptions(), tmp_path / "out", print)[1]
        for run in ("a", "b", "a")
    ]
    assert found == [made[0], made[1], made[0]] and len(set(made)) == len(made) == 2
    assert all(model.name.startswith("model-step_4.e1-") for model in found)


@pytest.mark.slow
def test_an_endpoint_with_a_configuration_gets_its_retriever_and_no_model(tmp_path: Path, run_files: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"run: {{model: {tmp_path}/none}}\nretriever: {{corpus: {run_files}/corpus.jsonl}}\n")
    needs, options = Needs(policy=False, methods=True, search=True), ServingOptions(config=config, model="m")
    with serving(find_target("http://127.0.0.1:1/v1"), needs, options, tmp_path / "out", print) as served:
        assert served.search is not None
        with ask(f"{served.search.urls[0]}/info", timeout_s=10.0) as response:
            assert read_json(response)["passages"] > 0
