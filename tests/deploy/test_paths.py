"""A run directory works from any working directory, and after it was moved or copied."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from deploy.config import load_config
from deploy.run.addresses import Addresses, anchored, settle
from deploy.run.run_dir import read_configuration
from foray.cli import main
from foray.commands import export
from foray.watch.records import read_settings


def test_the_resolved_configuration_holds_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = load_config(
        None,
        [
            "run.dir=runs/x",
            "run.model=runs/x/model",
            "learner.questions=data/q.jsonl",
            "retriever.corpus=data/c.jsonl",
            "retriever.index_dir=data/index",
            "retriever.index={type: faiss_flat, file: e5.index, encoder: {type: transformer, model: e5}}",
            "engine.kind={type: sglang, launcher: requirements/sglang_cpu_launch.py}",
        ],
    )
    settled = settle(given, Addresses("redis://127.0.0.1:1/0", None))
    report = yaml.safe_load(settled.to_yaml())
    assert report["run"]["dir"] == f"{tmp_path}/runs/x" and report["run"]["model"] == f"{tmp_path}/runs/x/model"
    assert report["learner"]["questions"] == f"{tmp_path}/data/q.jsonl"
    retriever = report["retriever"]
    assert (retriever["corpus"], retriever["index_dir"]) == (f"{tmp_path}/data/c.jsonl", f"{tmp_path}/data/index")
    assert retriever["index"]["file"] == f"{tmp_path}/e5.index"
    assert retriever["index"]["encoder"]["model"] == f"{tmp_path}/e5"
    assert report["engine"]["kind"]["launcher"] == "requirements/sglang_cpu_launch.py", (
        "nodes find it in Foray's checkout"
    )
    assert settled.retriever.model_fields_set == given.retriever.model_fields_set | {"port"}, "defaults stay defaults"
    assert anchored(settled) == settled


def test_a_built_index_is_left_to_know_its_settings() -> None:
    """A written default (bm25) would contradict a dense index."""
    given = load_config(None, ["retriever.index_dir=/data/index"])
    settled = settle(given, Addresses("redis://127.0.0.1:1/0", None))
    assert not {"index", "corpus"} & yaml.safe_load(settled.to_yaml())["retriever"].keys()
    chosen = load_config(None, ["retriever.index_dir=/data/index", "retriever.index={type: memory}"])
    report = yaml.safe_load(settle(chosen, Addresses("redis://127.0.0.1:1/0", None)).to_yaml())
    assert report["retriever"]["index"]["type"] == "memory" and "corpus" not in report["retriever"]


@pytest.mark.parametrize("before", ["/old/runs/x", "runs/x"])
def test_a_moved_run_is_read_where_it_is(before: str, tmp_path: Path) -> None:
    tree = {"run": {"id": "x", "dir": before, "model": f"{before}/model", "redis_url": "redis://127.0.0.1:1/0"}}
    tree["learner"] = {"questions": "/data/q.jsonl"}
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(tree))
    moved = read_configuration(tmp_path / "resolved.yaml", tmp_path)
    assert moved["run"]["model"] == f"{tmp_path}/model" and moved["learner"]["questions"] == "/data/q.jsonl"


def test_verbs_find_the_model_of_a_moved_run_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "x"
    (run / "model").mkdir(parents=True)
    (run / "model" / "tokenizer.json").write_text("{}")
    (run / "resolved.yaml").write_text("run: {id: x, dir: runs/x, model: runs/x/model}\n")
    moved = tmp_path / "elsewhere" / "y"
    shutil.copytree(run, moved)
    shutil.rmtree(run)
    monkeypatch.chdir("/")
    assert export.model_settings(moved, None)[0] == moved / "model"
    assert export.model_settings(moved / "checkpoints" / "step_3.e1", None)[0] == moved / "model"
    settings = read_settings(moved)
    assert settings is not None and settings.model == moved / "model"


def test_another_configuration_changes_neither_the_base_nor_the_scale_of_adapters(tmp_path: Path) -> None:
    """`foray eval CHECKPOINT --config OTHER` merges what the run trained, into the model on which it was trained."""
    run, other = tmp_path / "run", tmp_path / "other.yaml"
    for name in ("warm", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    run.mkdir()
    trained = {"run": {"model": f"{tmp_path}/warm"}, "learner": {"model": {"lora": {"rank": 16, "alpha": 32.0}}}}
    (run / "resolved.yaml").write_text(yaml.safe_dump(trained))
    other.write_text(yaml.safe_dump({"run": {"model": f"{tmp_path}/plain"}}))
    for where in (run, run / "checkpoints" / "step_3.e1"):
        model, settings = export.model_settings(where, other)
        assert (model, settings.lora.rank, settings.lora.alpha) == (tmp_path / "warm", 16, 32.0)
    (tmp_path / "warm" / "config.json").unlink()
    model, settings = export.model_settings(run, other)
    assert (model, settings.lora.rank) == (tmp_path / "plain", 16), "says where the model is now"
    (run / "resolved.yaml").unlink()
    model, settings = export.model_settings(run, other)
    assert (model, settings.lora.rank) == (tmp_path / "plain", 0), "stands in for the one that is missing"


def test_export_names_its_own_flag_where_the_model_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "resolved.yaml").write_text("run: {model: gone}\n")
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "--model DIR" in capsys.readouterr().err


def test_a_manually_started_run_is_found_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hand = Path("runs/hand")
    hand.mkdir(parents=True)
    (hand / "demo.yaml").write_text("run: {id: hand, dir: runs/hand, redis_url: 'redis://127.0.0.1:1/0'}\n")
    code = main(["status", "runs/hand", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 1 and report["run"] == "hand" and report["state"] == "down"
    assert main(["status", "runs/hand/demo.yaml", "--json", "run.id=other"]) == 1
    assert json.loads(capsys.readouterr().out)["run"] == "other"


def test_exported_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    from learner.model.export import _write_whole

    def write(folder: Path) -> None:
        (folder / "model.safetensors").touch(mode=0o600)
        (folder / "config.json").touch()

    old = os.umask(0o022)
    try:
        _write_whole(tmp_path / "out", write)
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}
