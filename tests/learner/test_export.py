"""Exports equal what is published, byte for byte, whatever wrote the state; and nothing half-written is left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from foray import cli
from learner.checkpoint.checkpoint import Checkpoints
from learner.config.model import CriticSettings, DeepSpeedSettings, LoraSettings, ModelSettings, OptimSettings
from learner.engine import DeepSpeedEngine
from learner.model.export import export_adapter, export_model, find_state
from learner.model.loading import load_policy
from learner.model.lora import merged, scale_of
from learner.model.policy import PREFIX
from protocol.errors import UserError
from protocol.versions import PolicyVersion

LORA = LoraSettings(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny Qwen2 with dropout in its configuration, a tokenizer and a chat template beside it."""
    config = transformers.Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=None, eos_token_id=None, attention_dropout=0.25,
    )  # fmt: skip
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"any": "thing"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def trained(model: Path, settings: ModelSettings, stage: int = 0, *, head: bool = False) -> DeepSpeedEngine:
    """An engine after three updates, with an average that lags behind."""
    critic = CriticSettings(backbone="policy") if head else None
    engine = DeepSpeedEngine(
        load_policy(model, settings, critic=critic), optim=OptimSettings(lr=0.02),
        engine=DeepSpeedSettings(zero_stage=stage), dtype=settings.dtype, total_updates=9, seed=0,
    )  # fmt: skip
    engine.start_ema()
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(9).repeat(2, 1)
    for _ in range(3):
        scores = engine.forward(ids, positions, None, torch.arange(17), ids.flatten()[1:], 1.0, False)
        engine.backward(-scores.logprobs.mean() + (0 if scores.values is None else (scores.values - 1).square().mean()))
        assert engine.step().applied
        engine.update_ema(0.5)
    return engine


def published(engine: DeepSpeedEngine, settings: ModelSettings) -> dict[str, torch.Tensor]:
    weights = ((n.removeprefix(PREFIX), t) for n, t in engine.iter_weights() if n.startswith(PREFIX))
    return dict(merged(weights, scale_of(settings.lora)) if settings.lora.rank else weights)


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].equal(tensor), name


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    causal = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return dict(causal.named_parameters())


@pytest.mark.parametrize(
    ("rank", "stage", "dtype"),
    [
        (0, 1, "bfloat16"),
        (LORA.rank, 3, "float32"),
        *(
            pytest.param(rank, stage, dtype, marks=pytest.mark.slow)
            for rank, stage, dtype in [
                *((0, 0, "float32"), (0, 3, "float32"), (0, 3, "bfloat16")),
                *((LORA.rank, 0, "float32"), (LORA.rank, 1, "bfloat16"), (LORA.rank, 3, "bfloat16")),
            ]
        ),
    ],
)
def test_an_export_is_what_was_published(model, stage, dtype, rank, tmp_path):
    settings = ModelSettings(dtype=dtype, lora=LORA if rank else LoraSettings())
    engine = trained(model, settings, stage)
    engine.save_state(tmp_path / "state")
    export_model(tmp_path / "state", model, settings, tmp_path / "out")
    expected = published(engine, settings)
    assert_same_bits(loaded(tmp_path / "out"), expected)
    start = loaded(model)
    assert any(not tensor.float().equal(start[name]) for name, tensor in expected.items())


def test_what_lies_beside_the_weights_comes_along(model, tmp_path):
    settings = ModelSettings(dtype="bfloat16")
    trained(model, settings, 1).save_state(tmp_path / "state")
    export_model(tmp_path / "state", model, settings, tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files >= {"tokenizer.json", "chat_template.jinja", "config.json", "model.safetensors"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["attention_dropout"]) == ("bfloat16", 0.25)


def test_the_average(model, tmp_path):
    settings = ModelSettings()
    engine = trained(model, settings, 2)
    engine.save_state(tmp_path / "state")
    out = tmp_path / "models" / "of today" / "out"  # its parents are made
    export_model(tmp_path / "state", model, settings, out, average=True)
    expected = {name.removeprefix(PREFIX): tensor for name, tensor in engine.iter_state("ema")}
    assert_same_bits(loaded(out), expected)
    assert not expected["model.norm.weight"].equal(published(engine, settings)["model.norm.weight"])


def test_no_average_is_a_user_error(model, tmp_path):
    settings = ModelSettings()
    engine = DeepSpeedEngine(
        load_policy(model, settings), optim=OptimSettings(), engine=DeepSpeedSettings(), dtype="float32",
        total_updates=1, seed=0,
    )  # fmt: skip
    engine.save_state(tmp_path / "state")
    with pytest.raises(UserError, match="no moving average"):
        export_model(tmp_path / "state", model, settings, tmp_path / "out", average=True)
    with pytest.raises(UserError, match="no adapters"):
        export_adapter(tmp_path / "state", model, settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_value_head_stays_behind(model, tmp_path):
    settings = ModelSettings()
    engine = trained(model, settings, head=True)
    engine.save_state(tmp_path / "state")
    export_model(tmp_path / "state", model, settings, tmp_path / "out")
    assert_same_bits(loaded(tmp_path / "out"), published(engine, settings))


@pytest.mark.parametrize("stage", [0, 3])
def test_peft_loads_the_adapter_and_computes_the_same(model, stage, tmp_path):
    from peft import PeftModel

    settings = ModelSettings(lora=LORA)
    engine = trained(model, settings, stage)
    engine.save_state(tmp_path / "state")
    export_adapter(tmp_path / "state", model, settings, tmp_path / "out")
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out")
    export_model(tmp_path / "state", model, settings, tmp_path / "whole")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(
            whole(ids).logits, transformers.AutoModelForCausalLM.from_pretrained(model)(ids).logits
        )
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == LORA.alpha


def test_another_model_and_a_damaged_file_are_user_errors(model, tmp_path):
    settings = ModelSettings()
    trained(model, settings).save_state(tmp_path / "state")
    for layers in (1, 3):
        config = transformers.AutoConfig.from_pretrained(model)
        config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
        with pytest.raises(UserError, match="does not belong to the model"):
            export_model(tmp_path / "state", tmp_path / "other", settings, tmp_path / "out")
    file = next((tmp_path / "state").glob("master*"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="missing or damaged"):
        export_model(tmp_path / "state", model, settings, tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="already exists"):
        export_model(tmp_path / "state", model, settings, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out", "state"], "no half of an export is left"


def commit(engine: DeepSpeedEngine, run: Path) -> Path:
    return Checkpoints(run / "checkpoints", keep=2).write(
        {}, step=3, epoch=1, lineage=[PolicyVersion(1, 0)], confirm=lambda: None,
        save=lambda directory: engine.save_state(directory / "policy"),
    )  # fmt: skip


def test_the_command_takes_a_run_or_one_of_its_checkpoints(model, tmp_path, capsys):
    settings = ModelSettings(lora=LORA)
    engine = trained(model, settings)
    run = tmp_path / "run"
    checkpoint = commit(engine, run)
    tree = {"run": {"model": str(model)}, "learner": {"model": {"lora": {"rank": LORA.rank, "alpha": LORA.alpha}}}}
    (run / "resolved.yaml").write_text(yaml.safe_dump(tree))
    for number, where in enumerate((run, checkpoint)):
        out = tmp_path / f"out{number}"
        assert cli.main(["export", str(where), str(out)]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        assert_same_bits(loaded(out), published(engine, settings))
    assert cli.main(["export", str(run), str(tmp_path / "adapter"), "--adapter", "--ema"]) == 0
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj.lora_B"
    average = dict(engine.iter_state("ema"))[f"{PREFIX}{name}.default.weight"]
    assert found[f"base_model.model.{name}.weight"].equal(average)
    assert cli.main(["export", str(run), str(tmp_path / "narrow"), "--dtype", "bfloat16"]) == 0
    assert {t.dtype for t in loaded(tmp_path / "narrow").values()} == {torch.bfloat16}


def test_what_the_command_cannot_know_it_asks_for(model, tmp_path, capsys):
    commit(trained(model, ModelSettings()), tmp_path / "run")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "--model DIR" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--model", str(model)]) == 0
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out"), "--model", str(model)]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_a_damaged_checkpoint_of_a_run_is_found_out(model, tmp_path):
    checkpoint = commit(trained(model, ModelSettings()), tmp_path)
    file = next((checkpoint / "state" / "policy").glob("exp_avg.*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="damaged"):
        find_state(tmp_path)


@pytest.mark.slow
def test_a_state_that_two_ranks_wrote(model, tmp_path, zygote):
    zygote.run_ranks(__file__, [str(model), str(tmp_path)], tmp_path, 2)
    settings = ModelSettings(dtype="bfloat16")
    assert len(list((tmp_path / "state").glob("master*"))) == 2
    export_model(tmp_path / "state", model, settings, tmp_path / "out")
    assert_same_bits(loaded(tmp_path / "out"), load_file(tmp_path / "published.safetensors"))


def be_a_rank(model: Path, directory: Path) -> None:
    """One of two ranks at stage 3."""
    from safetensors.torch import save_file

    from learner.engine import leave_ranks

    settings = ModelSettings(dtype="bfloat16")
    engine = trained(model, settings, 3)
    engine.save_state(directory / "state")
    weights = published(engine, settings)
    if engine.rank == 0:
        save_file(weights, directory / "published.safetensors")
    engine.close()
    leave_ranks()


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]), Path(sys.argv[2]))
