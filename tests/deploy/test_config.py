"""The whole tree: sections, paths from the environment, errors that help."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import foray
from deploy.config import from_tree, load_config
from foray.commands.init import PRESETS
from foray.demo.run import CONFIG
from foray.settings_file import document
from protocol.errors import UserError
from protocol.runtime.config import expand

ROOT = Path(__file__).parent.parent.parent


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run: {steps: 7}\n")
    assert foray.load_config(str(tmp_path / "run.yaml")).run.steps == 7
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert foray.read_steps(str(tmp_path / "metrics.jsonl")) == {1: {"step": 1}}
    assert list(foray.read_journal(str(tmp_path))) == []
    with pytest.raises(UserError, match="tokenizer"):
        foray.load_tokenizer(str(tmp_path))


def test_every_shipped_configuration_can_be_read() -> None:
    files = [CONFIG, *PRESETS.glob("*.yaml"), *(ROOT / "examples").glob("*/run.yaml")]
    assert len(files) > 8
    for path in files:
        load_config(path, environ={"FORAY_DATA": "/data"})


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("retriever.memory={reuse_above: 0.9}", "retriever.cache_mb"),
        ("rollout.search={type: http, run: r}", "answer all runs alike"),
        ("retriever.online={type: bing, base_url: 'http://b.example'}", "ended on 11 August 2025; use `serper`"),
    ],
)
def test_a_removed_setting_is_answered_with_what_to_do(given: str, advice: str) -> None:
    with pytest.raises(UserError, match=r"it was removed|no longer") as refused:
        load_config(None, [given])
    assert advice in refused.value.what


def test_a_path_from_the_environment_is_expanded_only_at_the_beginning() -> None:
    tree = {"a": "${DATA}/x", "b": ["${DATA}"], "c": "costs ${DATA}/x", "d": {"e": 3}, "f": "${DATA}x"}
    expanded = expand(tree, {"DATA": "/data"})
    assert expanded == {"a": "/data/x", "b": ["/data"], "c": "costs ${DATA}/x", "d": {"e": 3}, "f": "${DATA}x"}


def test_an_unset_variable_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UserError) as caught:
        expand({"retriever": {"corpus": "${NOWHERE}/c.jsonl"}}, {})
    text = caught.value.render()
    assert "retriever.corpus" in text and "export NOWHERE=" in text


def test_an_override_makes_the_variable_unnecessary(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("retriever: {corpus: '${NOWHERE}/c.jsonl'}\n")
    config = load_config(path, ["retriever.corpus=/here.jsonl"], environ={})
    assert config.retriever.corpus == Path("/here.jsonl")


@pytest.mark.parametrize("key", ["rollout.concurency_groups", "launch.engine", "learner.checkpoint_evry", "engine.kid"])
def test_a_misspelt_key_of_any_section_is_refused_with_the_right_one(key: str) -> None:
    with pytest.raises(UserError, match="did you mean"):
        load_config(None, [f"{key}=1"])


def test_the_resolved_file_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(None, ["run.steps=7", "learner.optim.lr=1e-4", "engine.kind.type=cpu"])
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml())
    again = load_config(path)
    assert again.model_dump() == config.model_dump()
    assert again.run.steps == 7 and again.learner.optim.lr == 1e-4


def test_a_retriever_is_started_unless_searches_go_elsewhere() -> None:
    assert load_config(None).num_retrievers == 1
    assert load_config(None, ["rollout.search.type=http", "rollout.search.urls=http://other:8000"]).num_retrievers == 0
    assert (
        load_config(
            None, ["rollout.search.type=http", "rollout.search.urls=http://other:8000", "launch.retrievers=2"]
        ).num_retrievers
        == 2
    )
    assert load_config(None, ["rollout.search.type=none"]).num_retrievers == 0


def test_the_explained_file_says_every_setting_and_changes_none(tmp_path: Path) -> None:
    config = from_tree({"run": {"steps": 7}, "learner": {"optim": {"lr": 0.5}}})
    text = document(config)
    tree = yaml.safe_load(text)
    assert {name: value for name, value in tree.items() if value} == {
        "run": {"steps": 7},
        "learner": {"optim": {"lr": 0.5}},
    }
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert load_config(path).model_dump() == config.model_dump()
    # it can be read with every setting uncommented, so every name in it is valid
    bare = "\n".join(
        line[1:] if line.startswith("# ") is False and line.startswith("#") else line for line in text.split("\n")
    )
    path.write_text(bare)
    assert load_config(path).model_dump() == config.model_dump()


def test_wrong_keys_of_all_sections_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, ["run.stepps=1", "engine.kid=cpu", "launch.engine=2"])
    assert all(key in caught.value.what for key in ("run.stepps", "engine.kid", "launch.engine"))


def test_the_example_of_an_override_is_a_setting() -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, ["foo"])
    load_config(None, [caught.value.todo.split()[-1]])


def test_trackers_may_be_named_by_their_type_alone() -> None:
    assert [tracker.type for tracker in load_config(None, ["learner.trackers=[wandb]"]).learner.trackers] == ["wandb"]
