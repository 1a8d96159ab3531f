"""The check at load: what would be scored wrongly is refused with its reason, and nothing that is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deploy.config import load_config
from deploy.doctor import engine as doctor
from learner.config.model import ModelSettings
from learner.model import parity_check
from learner.model.architecture import length_limit, refuse_context
from learner.model.attention import block_mask
from learner.model.loading import load_causal, load_policy, load_settled
from learner.model.policy import PolicyModel
from learner.model.stored_weights import StoredWeights, empty_model
from protocol.errors import UserError
from tests.families.measure import FAMILIES, batch, by_learner, by_transformers, compared, write


@pytest.fixture
def family(tmp_path: Path):
    """Write a tiny model of a family, with other settings in its config.json."""

    def make(name: str, **changed: Any) -> Path:
        directory = tmp_path / name
        if not directory.exists():
            write(name, directory)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        return directory

    return make


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_quantised_checkpoints_are_refused_before_any_weight_is_read(family, method: str) -> None:
    directory = family("qwen3", quantization_config={"quant_method": method})
    for sharded in (False, True):
        with pytest.raises(UserError, match=f"quantised qwen3 model .{method}") as caught:
            load_policy(directory, ModelSettings(), sharded=sharded)
        assert "bfloat16" in caught.value.todo


def test_codes_without_their_scales_are_no_stored_weights(family) -> None:
    """Of a configuration that does not say that its files are quantised."""
    directory = family("qwen3")
    codes = {
        name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(codes, directory / "model.safetensors", {"format": "pt"})
    causal = empty_model(transformers.AutoConfig.from_pretrained(directory), dtype=torch.float32)
    assert StoredWeights.of(directory, causal) is None


@pytest.mark.parametrize("name", ["llama dynamic", "phi3 longrope"])
def test_a_rotary_embedding_that_depends_on_the_batch_is_trained_up_to_its_original_length_only(
    family, name: str
) -> None:
    directory = family(name)
    policy = load_policy(directory, ModelSettings(), shared=True)
    assert length_limit(policy.causal.config) == 32
    with pytest.raises(UserError, match="cannot be trained on 33 tokens") as caught:
        policy(*rows(33))
    assert "max_context to 32" in caught.value.todo
    alone = policy(*rows(20)).logprobs
    ids, positions, _, index, *rest = rows(20)
    padded = policy(
        torch.nn.functional.pad(ids, (0, 45)), torch.nn.functional.pad(positions, (0, 45)), None, index, *rest
    )
    torch.testing.assert_close(padded.logprobs, alone)
    given = json.loads((directory / "config.json").read_text())
    for config in (policy.causal.config, type("Facts", (), given)):
        refuse_context(directory, config, 32)
        with pytest.raises(UserError, match="33 tokens"):
            refuse_context(directory, config, 33)


def rows(length: int) -> tuple[Any, ...]:
    ids = torch.arange(length)[None] % 100
    return ids, torch.arange(length)[None], None, torch.arange(length), ids[0], 1.0, False


def test_padding_does_not_move_the_angles_of_a_batch() -> None:
    for micro_batch in batch(150).micro_batches:
        assert micro_batch.positions[micro_batch.document_ids < 0].max(initial=0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_transformers_wrong_second_chunk_is_found_though_it_begins_beyond_the_texts(family, name: str) -> None:
    directory = family(name, chunk_size=256)
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 19):  # it is right there
        load_policy(directory, ModelSettings(), packed=False)
        return
    with pytest.raises(UserError, match="scored wrongly") as caught:
        load_policy(directory, ModelSettings(), packed=False)
    assert "second chunk" in caught.value.why


@pytest.mark.parametrize("name", ["bamba", "minimax", "llama4_text", "mixtral"])
def test_what_is_right_row_by_row_is_accepted(family, name: str) -> None:
    """Also with chunks and router noise, and where transformers' base model has another name."""
    load_policy(family(name), ModelSettings(), packed=False)


def test_a_position_bias_cannot_share_prompts_but_be_packed(family) -> None:
    directory, settings = family("mpt"), ModelSettings(attention="eager")
    load_policy(directory, settings)
    with pytest.raises(UserError, match="cannot share a prompt") as caught:
        load_policy(directory, settings, shared=True)
    assert "share_prompts to false" in caught.value.todo


@pytest.mark.parametrize(("name", "why"), [("phimoe", "samples the experts"), ("falcon alibi", "twice")])
def test_types_without_a_certain_score_are_refused(family, name: str, why: str) -> None:
    with pytest.raises(UserError, match="cannot be trained") as caught:
        load_policy(family(name), ModelSettings(), packed=False)
    assert why in caught.value.why


def test_a_model_without_a_place_for_masks_is_trained_row_by_row(family) -> None:
    directory, settings = family("bloom"), ModelSettings(attention="eager")
    with pytest.raises(UserError, match="several trajectories in one row") as caught:
        load_policy(directory, settings)
    assert "row_tokens to 0" in caught.value.todo
    load_policy(directory, settings, packed=False)


def test_windows_that_are_not_tested_are_called_so(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("exaone_moe", sliding_window=8)
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="several trajectories in one row") as caught:
        load_policy(tmp_path, ModelSettings())
    assert "not tested" in caught.value.why


def test_a_wrong_window_of_thousands_of_tokens_is_found(family, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = family("mistral", sliding_window=4096)
    load_policy(directory, ModelSettings())
    monkeypatch.setattr(
        "learner.model.policy.attention_mask", lambda document_ids, positions, *_: block_mask(document_ids, positions)
    )
    with pytest.raises(UserError, match="several trajectories in one row"):
        load_policy(directory, ModelSettings())


def test_noise_and_a_wrong_gradient_are_found(family, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, in_rows = family("qwen3"), parity_check._in_rows
    for wrong, why in (
        (lambda scores: scores + 0.01 * torch.randn(1).double(), "two equal calls"),
        (lambda scores: scores.detach() + 0.5 * (scores - scores.detach()), "gradient"),
    ):
        monkeypatch.setattr(parity_check, "_in_rows", lambda *given, wrong=wrong: wrong(in_rows(*given)))
        with pytest.raises(UserError, match="scored wrongly") as caught:
            load_policy(directory, ModelSettings())
        assert why in caught.value.why


def test_a_large_model_is_checked_on_its_first_layers_and_left_as_it_was(
    family, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, depths = family("qwen3_moe window", num_hidden_layers=2), []
    differences = parity_check.differences

    def seen(policy: PolicyModel, **given: Any) -> dict[str, float]:
        config = policy.causal.config
        depths.append((config.num_hidden_layers, config.sliding_window, len(policy.causal.lm_head.weight)))
        return differences(policy, **given)

    monkeypatch.setattr(parity_check, "differences", seen)
    monkeypatch.setattr(parity_check, "LARGE", 0)
    monkeypatch.setattr(parity_check, "IDS", 50)
    monkeypatch.setattr(parity_check, "first_layers", lambda config: 1)
    before = torch.get_rng_state()
    policy = load_policy(directory, ModelSettings(), shared=True)
    assert depths == [(1, parity_check.SHORT, 50)]
    config = policy.causal.config
    assert (config.num_hidden_layers, config.sliding_window, len(policy.causal.lm_head.weight)) == (2, 8, 128)
    assert torch.equal(before, torch.get_rng_state())
    assert compared(by_learner(policy, batch(150, share=True)), by_transformers(reference(directory)))[0] == "exact"


def test_a_small_model_is_checked_in_all_its_layers(family, monkeypatch: pytest.MonkeyPatch) -> None:
    depths, differences = [], parity_check.differences

    def seen(policy: PolicyModel, **given: Any) -> dict[str, float]:
        depths.append(policy.causal.config.num_hidden_layers)
        return differences(policy, **given)

    monkeypatch.setattr(parity_check, "differences", seen)
    monkeypatch.setattr(parity_check, "first_layers", lambda config: 1)
    load_settled(family("qwen3"), ModelSettings(), packed=False)
    assert depths == [2]


def test_a_model_that_cannot_run_at_all_is_not_said_to_need_rows_of_its_own(
    family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_rows(*_: Any) -> torch.Tensor:
        raise ValueError("no such layer")

    monkeypatch.setattr(parity_check, "_in_rows", broken_rows)
    for packed in (True, False):
        with pytest.raises(UserError, match="which the learner cannot run") as caught:
            load_policy(family("qwen3"), ModelSettings(), packed=packed)
        assert caught.value.why == "ValueError: no such layer"


def reference(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")


def test_hidden_states_of_another_dtype_than_the_output_layer_have_a_gradient(family) -> None:
    settings = ModelSettings(attention="eager", dtype="bfloat16")
    policy = load_policy(family("falcon_mamba"), settings, packed=False)
    _, gradients = by_learner(policy, batch(0))
    assert gradients and all(bool(g.isfinite().all()) for g in gradients.values())


def broken(directory: Path, kind: str) -> str:
    """Break a model; return what the error says."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if kind == "unknown type":
        path.write_text(json.dumps(config | {"model_type": "kimi_k2"}))
        return "transformers does not know"
    if kind == "its own code":
        code = {"AutoConfig": "configuration_new.NewConfig", "AutoModelForCausalLM": "modeling_new.NewModel"}
        path.write_text(json.dumps(config | {"model_type": "new", "auto_map": code}))
        return "transformers does not know"
    if kind == "no weights":
        (directory / "model.safetensors").unlink()
        return "transformers cannot load"
    if kind == "missing tensors":
        tensors = load_file(directory / "model.safetensors")
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return "lack 1 tensors"
    if kind in ("much larger", "other shapes"):
        size = config["intermediate_size"] * 50 if kind == "much larger" else config["intermediate_size"] + 1
        path.write_text(json.dumps(config | {"intermediate_size": size}))
        return "describes .* weights, its files have" if kind == "much larger" else "transformers cannot load"
    path.write_text(json.dumps(config | {"model_type": "qwen3_vl", "vision_config": {"hidden_size": 8}}))
    return "a vision_config"


BROKEN = (
    "unknown type",
    "its own code",
    "no weights",
    "missing tensors",
    "much larger",
    "other shapes",
    "more than text",
)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_model_that_cannot_be_loaded_is_one_error_with_a_remedy(family, kind: str) -> None:
    directory = family("qwen3")
    said = broken(directory, kind)
    for sharded in (False, True):
        with pytest.raises(UserError, match=said) as caught:
            load_causal(directory, ModelSettings(), sharded=sharded)
        assert caught.value.why and caught.value.todo and "\n" not in caught.value.why


CASES = [
    *(("qwen3", overrides) for overrides in ((), ("learner.batch.row_tokens=8192",), ("learner.engine.zero_stage=3",))),
    *((name, ("learner.batch.row_tokens=8192",)) for name in ("qwen3_next", "falcon_h1", "nemotron_h", "llama4_text")),
    *(("mpt", ("learner.model.attention=eager", f"learner.batch.share_prompts={on}")) for on in (True, False)),
    *((name, ()) for name in ("phimoe", "zamba2", "gemma2", "bamba", "qwen2 fp8")),
    ("bamba", ("learner.batch.share_prompts=true",)),
    *((kind, ()) for kind in BROKEN),
]


@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_the_doctor_gives_the_learners_verdict(family, name: str, overrides: tuple[str, ...]) -> None:
    directory = family("qwen3" if name in BROKEN else name)
    if name in BROKEN:
        broken(directory, name)
    config = load_config(None, [f"run.model={directory}", *overrides])
    learner, expected = config.learner, None
    try:
        load_policy(directory, learner.model, **learner.batch.rows, sharded=learner.engine.zero_stage == 3)
    except UserError as error:
        expected = (error.what, error.why, error.todo)
    (found,) = doctor.check_model(config)
    assert (found.verdict == "fail") == (expected is not None)
    assert expected is None or (found.detail, found.why, found.fix) == expected
    early = [f for f in doctor.learner(config) if f.check == "learner" and f.verdict == "fail"]
    assert not early or expected is not None, "the quick check refuses nothing else"
    if "row_tokens" in str(overrides) or "share_prompts=true" in str(overrides):
        assert bool(early) == (expected is not None and name != "qwen3")


@pytest.mark.parametrize("kind", ["falcon", "nemotron", "diffllama", "qwen3"])
def test_attention_is_compared_with_eager_also_where_a_type_chooses_it_when_it_is_built(
    kind: str, family, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, attend = family(kind), torch.nn.functional.scaled_dot_product_attention
    load_settled(directory, ModelSettings(), packed=False)

    def sharper(query: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        return attend(1.5 * query, *others, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sharper)
    with pytest.raises(UserError, match="attention sdpa computes wrongly"):
        load_settled(directory, ModelSettings(), packed=False)
    load_settled(directory, ModelSettings(attention="eager"), packed=False)


def test_the_doctor_checks_the_models_of_reference_and_critic(family) -> None:
    good, bad = family("qwen3"), family("phimoe")
    kl, ppo = "learner.algorithm.kl={type: k3, coefficient: 0.1}", "learner.algorithm.type=ppo"
    for overrides, checks in (
        ((kl, f"learner.reference.model={bad}"), {"learner check": "ok", "reference check": "fail"}),
        ((f"learner.reference.model={bad}",), {"learner check": "ok"}),
        ((kl,), {"learner check": "ok"}),
        (
            ("learner.algorithm.type=ppo", f"learner.critic.model={bad}"),
            {"learner check": "ok", "critic check": "fail"},
        ),
        ((ppo,), {"learner check": "ok"}),
    ):
        config = load_config(None, [f"run.model={good}", *overrides])
        found = list(doctor.check_model(config))
        assert {one.check: one.verdict for one in found} == checks
        assert all("phimoe" in one.detail for one in found if one.verdict == "fail")


def test_the_doctor_refuses_a_context_beyond_the_original_length(family) -> None:
    directory = family("phi3 longrope")
    for context, verdict in ((4096, "fail"), (32, "ok")):
        given = [f"rollout.episode.max_context={context}", "rollout.episode.reserve_tokens=8"]
        config = load_config(None, [f"run.model={directory}", "rollout.episode.max_obs_tokens=16", *given])
        (found,) = [f for f in doctor.learner(config) if f.check == "learner"]
        assert found.verdict == verdict


def test_an_export_of_a_quantised_model_is_refused(family) -> None:
    with pytest.raises(UserError, match="quantised"):
        load_causal(family("qwen2 fp8"), ModelSettings())
    assert "quantization_config" in FAMILIES["families"]["qwen2 fp8"]
    shutil.rmtree(family("qwen2 fp8"))
