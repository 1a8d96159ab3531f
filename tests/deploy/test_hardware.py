"""Every preset on every hardware profile is either in order, or refused with the memory needed and there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.pages.hardware import SHAPES, on_profile, page, pairs
from deploy.config import from_tree, load_config
from deploy.doctor import engine as doctor_engine
from deploy.doctor import model as doctor_model
from deploy.doctor.access import binds
from deploy.doctor.redis import memory
from deploy.hardware.assign import needs, place
from deploy.hardware.host_memory import memory_needed
from deploy.hardware.inventory import HARDWARE
from deploy.hardware.memory import USABLE
from deploy.hardware.profiles import choices
from deploy.launch.plan import plan
from deploy.run.addresses import preview
from foray.cli import main
from foray.commands.init import presets
from foray.demo.world import save_tokenizer
from protocol.errors import UserError

DOCS = Path(__file__).parents[2] / "docs"
NO_GPU_HERE = {"gpus", "engine", "tokenizer", "learner.publish"}
"""Checks of the machine and of files that are not there: GPUs, SGLang, tokenizer.json, CUDA for NCCL."""
REFUSED = {
    *((preset, "Qwen2.5-7B", "1x24gb") for preset in ("research_base_grpo", "research_grpo", "search_r1_grpo")),
    ("search_r1_pp", "Qwen2.5-7B", "1x24gb"),
    *((preset, "Qwen2.5-3B", "1x24gb") for preset in ("search_r1_ppo", "search_r1_v03_ppo")),
    ("search_r1_ppo", "Qwen2.5-7B", "1x24gb"),
    ("search_r1_quickstart", "Llama-3.2-3B", "1x24gb"),
}
"""7B models and separate critics do not fit on 24 GB."""


@pytest.mark.parametrize(("preset", "model", "profile"), sorted(set(pairs()) - REFUSED))
def test_a_pair_passes_the_checks_that_need_no_gpu(preset: str, model: str, profile: str, tmp_path: Path) -> None:
    found = on_profile(preset, model, profile, tmp_path, f"run.dir={tmp_path}/run")
    config = found.config
    there = min(gpu.memory for host in HARDWARE[profile] for gpu in host.gpus)
    shared = sum({a.need.kind: a.need.memory for a in found.placement.assignments}.values())
    assert (
        shared if config.launch.gpus.share else max(a.need.memory for a in found.placement.assignments)
    ) < USABLE * there
    ids = [gpu.id for a in found.placement.assignments for gpu in a.gpus]
    assert config.launch.gpus.share or len(ids) == len(set(ids))
    specs = plan(config, preview(config, environ={}), python="py", resolved=tmp_path, placement=found.placement)
    assert all("CUDA_VISIBLE_DEVICES" in s.env for s in specs if s.kind != "redis")
    kind, learner = config.engine.kind, config.learner
    assert kind.type == "sglang" and kind.python == ".venv-engine/bin/python"
    stated = choices(found, SHAPES[model])
    assert stated["engines run in"] == kind.python and float(stated["main memory of the learner"].split()[0]) >= 0
    assert stated["ZeRO stage"] == str(learner.engine.zero_stage) and stated["weights by"] in (
        "nccl",
        "disk",
        "adapter",
    )
    # from GPU to GPU where engine and learner have their own; NCCL refuses two ranks on one
    own = {"type": "distributed", "backend": "nccl"}
    wanted = {"type": "adapter"} if learner.model.lora.rank else {"type": "disk"} if config.launch.gpus.share else own
    assert wanted.items() <= learner.publish.model_dump().items()
    if learner.engine.zero_stage == 3:
        with pytest.raises(UserError):
            two = {"learner": {**found.tree["learner"], "engine": {**found.tree["learner"]["engine"], "zero_stage": 2}}}
            at_two = from_tree({**found.tree, **two})
            place(at_two, HARDWARE[profile], needs(at_two, SHAPES[model]))
    assert "all" not in kind.args and "lm_head" not in kind.args
    assert config.launch.rollouts == -(-config.launch.engines // 4)
    assert config.launch.ready_s >= 600 and config.engine.start_timeout_s == config.launch.ready_s
    assert config.rollout.episode.max_context <= config.learner.batch.micro_batch_tokens
    checks = [
        *(*doctor_engine.engine(config), *doctor_engine.learner(config), *doctor_model.teacher(config), *binds(config)),
        memory(memory_needed(config), config.launch.redis_maxmemory_mb << 20, "launch.redis_maxmemory_mb"),
    ]
    # the recipes sample with top_p, which is reported and not refused
    assert [f for f in checks if f.verdict != "ok" and f.check not in {*NO_GPU_HERE, "sampling"}] == []


@pytest.mark.parametrize(("preset", "model", "profile"), sorted(REFUSED))
def test_a_pair_that_does_not_fit_is_refused_with_the_numbers(
    preset: str, model: str, profile: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"1x24gb: GPU 0: [\d.]+ GiB needed, 21\.7 GiB of 23\.6 GiB usable") as caught:
        on_profile(preset, model, profile, tmp_path)
    assert re.search(r"engine-1 [\d.]+ GiB and learner [\d.]+ GiB", caught.value.why)


def test_the_page_lists_them() -> None:
    assert (DOCS / "hardware.md").read_text() == page(), "make reference"


@pytest.mark.parametrize("profile", [name for name, hosts in HARDWARE.items() if len(hosts) > 1])
def test_several_machines_have_a_placement_only(profile: str, tmp_path: Path) -> None:
    found = on_profile("search_r1_grpo", "Qwen2.5-7B", profile, tmp_path)
    learner = [a for a in found.placement.assignments if a.need.name == "learner"]
    assert sum(len(a.gpus) for a in learner) == found.config.launch.learner_ranks
    assert {len(a.gpus) for a in learner} == {8}, "whole machines, as torchrun needs"
    (finding,) = doctor_engine.gpus(found.config)
    assert finding.verdict == "fail" and "starts one" in finding.detail


@pytest.mark.parametrize("profile", ["1x24gb", "8xh100"])
def test_a_file_for_a_machine_is_short_and_reads_back(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPES["Qwen2.5-3B"]))
    path = tmp_path / "run.yaml"
    files = ["--model", f"{tmp_path}/model", "--data", f"{tmp_path}/q.jsonl", "--index", f"{tmp_path}/index"]
    given = ["--preset", "search_r1_grpo", "--hardware", profile, *files, "run.steps=7"]
    assert main(["init", str(path), *given]) == 0
    said = capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES" in said and re.search(
        r"engines run in \S+, ZeRO stage \d, weights by \w+, main", said
    )
    assert len(path.read_text().splitlines()) <= 40
    config = load_config(path)
    assert config.launch.hardware == profile and config.run.steps == 7
    assert (config.run.model, config.retriever.index_dir) == (tmp_path / "model", tmp_path / "index")
    assert config.learner.questions == tmp_path / "q.jsonl" and config.learner.algorithm.minibatches == 10
    assert config.engine.kind.type == "sglang" and config.learner.optim.lr == (1e-5 if profile == "1x24gb" else 1e-6)
    assert bool(config.learner.model.lora.rank) == (config.learner.publish.type == "adapter") == (profile == "1x24gb")


@pytest.mark.parametrize("preset", presets())
def test_every_preset_is_made_small_enough_for_two_cores(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "model")
    facts = SHAPES["Qwen2.5-0.5B"] | {"hidden_size": 56, "intermediate_size": 128, "num_hidden_layers": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": 2048}))
    given = ["--hardware", "cpu", "--model", "model", "--data", "q.jsonl", "--index", "index"]
    assert main(["init", "run.yaml", "--preset", preset, *given]) == 0
    assert "CUDA" not in capsys.readouterr().out
    assert len(Path("run.yaml").read_text().splitlines()) <= 60
    config = load_config(Path("run.yaml"))
    assert config.engine.kind.type == "cpu" and config.learner.model.dtype == "float32"
    assert config.learner.engine.zero_stage == 0 and config.learner.algorithm.minibatches == 1
    assert (config.launch.engines, config.launch.rollouts, config.launch.learner_ranks) == (1, 1, 1)
    assert config.run.groups_per_step <= 8 and config.rollout.episode.max_context <= 2048
    checks = [*doctor_engine.engine(config), *doctor_engine.learner(config), *doctor_engine.gpus(config)]
    assert [f for f in checks if f.verdict != "ok" and f.check != "sampling"] == []


def test_a_model_that_does_not_fit_or_is_unknown_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["Qwen2.5-7B"]))
    path = tmp_path / "run.yaml"
    given = ["init", str(path), "--preset", "search_r1_ppo", "--hardware", "1x24gb", "--model", str(tmp_path)]
    assert main(given) == 2 and "GiB needed" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    assert main(given) == 2 and "the memory of a gemma2" in capsys.readouterr().err
    (tmp_path / "config.json").unlink()
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "has no config.json" in said and "--model DIR" in said and "another family" not in said
    assert main(["init", str(path), "--hardware", "1x24gb"]) == 2 and "--preset" in capsys.readouterr().err
    assert not path.exists()


def test_a_profile_and_secrets_are_written_by_one_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["Qwen2.5-3B"]))
    given = ["--preset", "search_r1_grpo", "--hardware", "8xh100", "--model", str(tmp_path), "--secure", "--no-tls"]
    assert main(["init", str(tmp_path / "run.yaml"), *given]) == 0
    config = load_config(tmp_path / "run.yaml")
    assert config.launch.hardware == "8xh100" and config.launch.secrets == tmp_path / "secrets"
    assert (tmp_path / "secrets" / "node.env").is_file()


def test_the_flags_of_the_engine_in_the_file_are_kept_and_share_the_gpus(tmp_path: Path) -> None:
    args = "engine.kind.args=['--tp-size','2']"
    found = on_profile("search_r1_grpo", "Qwen2.5-7B", "8xh100", tmp_path, f"run.dir={tmp_path}/run", args)
    kind = found.tree["engine"]["kind"]
    assert kind["args"][-2:] == ["--tp-size", "2"] and "--mem-fraction-static" in kind["args"]
    assert found.config.launch.engines == 2
    engine = next(a for a in found.placement.assignments if a.need.kind == "engine")
    assert len(engine.gpus) == 2
