"""The engine's arithmetic against transformers', over the families, prompt lengths and cache states that it claims."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from learner.model.loading import as_saved
from protocol.errors import UserError
from rollout_server.cpu_engine.config import EngineSettings
from rollout_server.cpu_engine.model.config import read_model_config
from rollout_server.cpu_engine.model.llama import CausalLM
from rollout_server.cpu_engine.model.loader import Weights, WeightsError
from rollout_server.cpu_engine.scheduler.request import Request, SamplingParams
from rollout_server.cpu_engine.scheduler.scheduler import Scheduler, one_of
from rollout_server.cpu_engine.server.app import build_engine
from rollout_server.cpu_engine.weight_sync.session import StagedWeights

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 2500.0,
    "factor": 8.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Of the wavelengths 6, 23 and 85 the first is below 64 / 4 (unchanged), the last above 64 / 2 (scaled)."""
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2 tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2 untied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen3 own head size": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama without groups": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4, "attention_bias": True}),
    "llama 3 rotary": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3, "mlp_bias": True}),
    "linear rotary": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 12}),
    "mistral with a window": (MistralConfig, MistralForCausalLM, {"sliding_window": 16}),
    "qwen2 with late windows": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": 0}),
    "phi3 with a window, partly rotated": (
        Phi3Config,
        Phi3ForCausalLM,
        {"pad_token_id": 0, "sliding_window": 16, "rope_parameters": PARTIAL},
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**MOE, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_moe as the router weighs": (Qwen3MoeConfig, Qwen3MoeForCausalLM, MOE),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe normalized": (
        OlmoeConfig,
        OlmoeForCausalLM,
        {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
    ),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 6}),
    "mixtral with a window": (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_local_experts": 6, "sliding_window": 16, "head_dim": 16},
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**MOE, "head_dim": 12, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    ),
    "qwen2_moe with windows, without biases": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            **{**MOE, "shared_expert_intermediate_size": 24, "norm_topk_prob": True, "qkv_bias": False},
            **{"use_sliding_window": True, "sliding_window": 16},
        },
    ),
    "granitemoe": (
        GraniteMoeConfig,
        GraniteMoeForCausalLM,
        {
            **{"num_local_experts": 6, "embedding_multiplier": 6.0, "attention_multiplier": 0.2},
            **{"residual_multiplier": 0.4, "logits_scaling": 3.0, "attention_bias": True},
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16, "sliding_window_pattern": 2},
    ),
}


def write(path: Path, family: str) -> Any:
    """A random model in `path`, biases and norms not left at their neutral start; returns it."""
    config, kind, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config(**{**SIZES, **extra})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return model


def scheduler(path: Path, **settings: Any) -> Scheduler:
    torch.set_num_threads(1)
    return build_engine(EngineSettings(model_path=path, **settings))[0].scheduler


def request(ids: list[int], tokens: int, seed: int = 0, **fields: Any) -> Request:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return Request(f"r{seed}", ids, params, seed, tokens, lambda *_: None, return_logprob=True, **fields)


def run(s: Scheduler, requests: list[Request] = []) -> None:  # noqa: B006 (never changed)
    for r in requests:
        s.submit(r)
    with torch.inference_mode():
        while s.running or s.waiting:
            s.step()


def check(model: Any, requests: list[Request]) -> None:
    for r in requests:
        ids = r.prompt_ids + r.output_ids
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        expected = logprobs[len(r.prompt_ids) - 1 : -1].gather(1, torch.tensor(r.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(r.output_logprobs), expected, atol=1e-4, rtol=0)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(31 * i + 17 * salt + i * i) % 96 + 1 for i in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers_for_every_family(tmp_path: Path, family: str) -> None:
    model = write(tmp_path, family)
    s = scheduler(tmp_path)
    requests = [request(prompt(length, length), 20, seed=length) for length in (1, 2, 7, 40, 130)]
    run(s, requests)
    assert all(len(r.output_ids) == 20 for r in requests)
    check(model, requests)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_of_prompts_and_kept_prefixes_change_no_greedy_token(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.cpu_engine.scheduler.scheduler.CHUNK", 16)
    model = write(tmp_path, family)
    s = scheduler(tmp_path)
    params = SamplingParams(ignore_eos=True, top_k=1)
    first = [request(prompt(50, 1)[:length], 12, seed=length) for length in (50, 41, 3)]
    for r in first:
        r.params = params
    run(s, first)
    again = request(first[0].prompt_ids + first[0].output_ids + [5, 6, 7], 12)
    again.params = params
    run(s, [again])
    assert again.cached_tokens > 55
    check(model, [*first, again])
    model.generation_config.eos_token_id = None
    for r in (*first, again):
        ids = torch.tensor([r.prompt_ids])
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert made[0, ids.shape[1] :].tolist() == r.output_ids


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen2 tied")
    s = scheduler(tmp_path, dtype="bfloat16")
    requests = [request(prompt(length), 8, seed=length) for length in (3, 50)]
    run(s, requests)
    for r in requests:
        ids = torch.tensor([r.prompt_ids + r.output_ids])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[0], -1)
        expected = logprobs[len(r.prompt_ids) - 1 : -1].gather(1, torch.tensor(r.output_ids)[:, None])[:, 0]
        assert (torch.tensor(r.output_logprobs) - expected).abs().mean() < 0.2


def test_logits_of_bfloat16_weights_are_not_rounded(tmp_path: Path) -> None:
    write(tmp_path, "qwen2 tied")
    config = read_model_config(tmp_path)
    weights = Weights(config, torch.bfloat16)
    weights.load(tmp_path)
    hidden = torch.randn(3, config.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.double() @ weights.head.double().T
    found = CausalLM(config, weights).logits(hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    of_float32 = torch.full((64, 64), 1.001)
    assert ((of_float32 @ of_float32).double() - 64 * 1.001**2).abs().max() < 1e-4, "other products stay float32"


@pytest.mark.parametrize("family", ["qwen2 tied", "qwen2 untied"])
def test_the_float32_head_is_always_that_of_the_weights(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path, family)
    weights, staging = (maker(read_model_config(tmp_path), torch.bfloat16) for maker in (Weights, StagedWeights))
    weights.load(tmp_path)
    assert torch.equal(weights.float32_head, weights.head.float())
    weights.randomize()
    assert torch.equal(weights.float32_head, weights.head.float())
    for name, tensor in as_saved(model, model.state_dict().items()):
        staging.put(name, tensor)
    renewed = staging.finished()
    assert torch.equal(renewed.float32_head, renewed.head.float())
    # and a step converts nothing but the hidden states
    converted: list[torch.Size] = []
    hidden = torch.zeros(3, renewed.config.hidden, dtype=torch.bfloat16)
    engine_model, plain = CausalLM(renewed.config, renewed), torch.Tensor.float

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        converted.append(tensor.shape)
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "float", counted)
    engine_model.logits(hidden)
    assert converted == [torch.Size([3, renewed.config.hidden])]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_weights_staged_one_by_one_are_those_that_are_loaded_from_disk(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = write(tmp_path, family)
    sent = dict(as_saved(model, model.state_dict().items()))  # as the learner sends them
    loaded = Weights(read_model_config(tmp_path), dtype)
    loaded.load(tmp_path)
    staging = StagedWeights(loaded.config, dtype)
    for name, tensor in sorted(sent.items(), reverse=True):
        staging.put(name, tensor)
    sums = staging.finished().checksums()
    assert sums == loaded.checksums()
    rounded = {name: sent[name].to(dtype).contiguous().view(torch.uint8).numpy().tobytes() for name in sums}
    assert sums == {name: hashlib.sha256(raw).hexdigest() for name, raw in rounded.items()}
    another = StagedWeights(loaded.config, dtype)
    another.put("model.norm.weight", sent["model.norm.weight"])
    with pytest.raises(WeightsError, match="not sent"):
        another.finished()


def test_a_directory_that_lacks_tensors_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "qwen2 tied")
    weights = Weights(read_model_config(tmp_path), torch.float32)
    weights.load(tmp_path)
    before, tensors = weights.checksums(), load_file(tmp_path / "model.safetensors")
    left = {name: tensor + 1 for name, tensor in tensors.items() if not name.startswith("model.layers.1.mlp.")}
    save_file(left, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"3 tensor.s. missing, first 'model\.layers\.1\.mlp\.down_proj"):
        weights.load(tmp_path)
    assert weights.checksums() == before


def test_numbers_are_finite_also_where_their_sum_is_not(tmp_path: Path) -> None:
    write(tmp_path, "qwen2 tied")
    weights = Weights(read_model_config(tmp_path), torch.float32)
    weights.put("model.norm.weight", torch.full([48], 3e38))
    for wrong in (torch.inf, torch.nan):
        with pytest.raises(WeightsError, match="finite"):
            weights.put("model.norm.weight", torch.full([48], 3e38).index_fill_(0, torch.tensor([5]), wrong))


def test_a_prompt_longer_than_one_chunk_is_computed_and_scored_in_pieces(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen2 tied")
    s = scheduler(tmp_path)
    long = request(prompt(2500), 5, logprob_start=700)
    short = request(prompt(9, 3), 12, seed=1)
    run(s, [short, long])
    check(model, [short, long])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([long.prompt_ids])).logits[0], -1)
    expected = logprobs[700:-1].gather(1, torch.tensor(long.prompt_ids[701:])[:, None])[:, 0]
    assert long.input_logprobs is not None
    torch.testing.assert_close(torch.tensor(long.input_logprobs), expected, atol=1e-4, rtol=0)


def test_a_full_cache_retracts_the_newest_and_every_logprob_stays_exact(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen2 tied")
    s = scheduler(tmp_path, max_total_tokens=640)
    requests = [request(prompt(40, i), 90, seed=i) for i in range(8)]
    run(s, requests)
    assert sum(r.retractions for r in requests) > 0
    assert requests[0].retractions == 0
    assert all(len(r.output_ids) == 90 and r.finish == {"type": "length", "length": 90} for r in requests)
    check(model, requests)
    assert s.runner.kv.tokens + s.cache.tokens <= 640


def test_a_newcomer_leaves_room_for_the_next_token_of_rows_that_are_full_to_the_brim(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen2 tied")
    s = scheduler(tmp_path, max_total_tokens=3 * 288)  # three rows of 288 fit, three of the roomier 320 do not
    running = [request(prompt(250, i), 20, seed=i) for i in range(2)]
    for r in running:
        s.submit(r)
    with torch.inference_mode():
        while s.runner.length[0] < 256:
            s.step()
    newcomer = request(prompt(5), 20, seed=2)
    run(s, [newcomer])
    check(model, [*running, newcomer])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_rows_of_every_length_fit_in_a_tight_cache(tmp_path: Path, seed: int) -> None:
    model = write(tmp_path, "qwen2 tied")
    draw = random.Random(seed)
    s = scheduler(tmp_path, max_total_tokens=draw.choice([160, 256, 352]), max_running=draw.choice([3, 8]))
    waiting = [
        request(prompt(draw.choice([1, 31, 32, 33, 63, 64, 90]), i % 5), draw.randrange(1, 60), i) for i in range(24)
    ]
    for r in waiting:
        s.submit(r)
        if draw.random() < 0.5:
            with torch.inference_mode():
                s.step()
    run(s)
    check(model, waiting)
    assert s.runner.kv.tokens + s.cache.tokens <= s.runner.kv.budget


def test_a_group_computes_its_common_prompt_once(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen2 tied")
    s = scheduler(tmp_path)
    group = [request(prompt(64), 10, seed=i) for i in range(8)]
    run(s, group)
    assert [r.cached_tokens for r in group] == [0] + [63] * 7
    assert len({tuple(r.output_ids) for r in group}) > 1
    check(model, group)


def test_a_turn_extends_the_last_ones_keys_and_values(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen2 tied")
    s = scheduler(tmp_path)
    first = request(prompt(30), 20)
    run(s, [first])
    second = request(first.prompt_ids + first.output_ids + [5, 6, 7], 20, seed=1)
    run(s, [second])
    assert second.cached_tokens == 49  # the last token of the turn was sampled but never fed
    check(model, [first, second])
    assert len(s.cache) == 1  # the longer one has taken the shorter one's place


def test_requests_that_end_at_different_times_do_not_disturb_each_other(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen2 untied")
    s = scheduler(tmp_path, max_running=5)
    requests = [request(prompt(3 + 11 * i % 60, i), 1 + 7 * i % 23, seed=i) for i in range(30)]
    for r in requests:
        s.submit(r)
    with torch.inference_mode():
        for _ in range(6):
            s.step()
        s.abort(one_of([requests[1], requests[3], requests[29]]))
        s.retract_all()
    run(s)
    assert all(r.finish for r in requests)
    check(model, [r for r in requests if r.output_ids])


def test_what_was_kept_is_gone_after_new_weights(tmp_path: Path) -> None:
    write(tmp_path, "qwen2 tied")
    s = scheduler(tmp_path)
    run(s, [request(prompt(30), 5)])
    assert s.cache.tokens
    s.weights_changed()
    again = request(prompt(30), 5)
    run(s, [again])
    assert again.cached_tokens == 0


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path, "qwen2 tied")
    s = scheduler(tmp_path)
    unlucky = request(prompt(10), 5)
    s.submit(unlucky)
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(s.runner.model, "logits", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            s.step()
        s.drop_everything("broken")
    assert unlucky.finish is not None and unlucky.finish["status_code"] == 500
    lucky = request(prompt(10), 5, seed=1)
    run(s, [lucky])
    check(model, [lucky])


def test_output_that_is_not_finite_ends_only_its_own_request(tmp_path: Path) -> None:
    write(tmp_path, "qwen2 untied")
    s = scheduler(tmp_path)
    s.runner.model.weights.embed[96] = float("nan")
    sick, well = request([1, 96, 2], 5), request([1, 3, 2], 5, seed=1)
    for r in (sick, well):
        s.submit(r)
    with torch.inference_mode():
        s.step()
    assert sick.finish is not None and sick.finish["status_code"] == 500
    run(s)
    # tokens that `well` draws may be the sick one; before that its log-probs are numbers
    assert well.output_logprobs and all(p == p for p in well.output_logprobs)


def test_a_scored_prompt_that_is_not_finite_fails_and_leaves_nothing_to_reuse(tmp_path: Path) -> None:
    write(tmp_path, "qwen2 untied")
    s = scheduler(tmp_path)
    s.runner.model.weights.embed[96] = float("nan")
    ids = [1, 96, *range(2, 30)]
    sick = request(ids, 0, logprob_start=0)
    run(s, [sick])
    assert sick.finish is not None and sick.finish["status_code"] == 500
    assert sick.input_logprobs is None  # NaN is not JSON
    assert s.cache.find(ids, s._keys(sick, ids), len(ids) - 1) == (None, 0)
    well = [request([1, 3, 2], 1, seed=1), request(prompt(40), 1, seed=2)]  # in the row that the sick one had
    run(s, well)
    assert [r.finish and r.finish["type"] for r in well] == ["length", "length"]


def test_a_score_that_is_not_finite_fails_though_the_last_output_is(tmp_path: Path) -> None:
    write(tmp_path, "qwen2 untied")
    s = scheduler(tmp_path)
    sick = request([1, 96, 2], 3, logprob_start=0)
    s.submit(sick)
    finite = s.runner._score

    def spoilt(scored: Any, start: int, hidden: torch.Tensor) -> None:
        finite(scored, start, hidden)
        scored.scores[0] = -torch.inf

    s.runner._score = spoilt  # type: ignore[method-assign]
    with torch.inference_mode():
        s.step()
    assert sick.finish is not None and sick.finish["status_code"] == 500


@pytest.mark.parametrize(
    ("family", "extra", "left_out"),
    [
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 4}, ["layer_types"]),
        ("qwen2 tied", {"use_sliding_window": True, "max_window_layers": 1}, ["layer_types", "sliding_window"]),
        (
            "qwen3 own head size",
            {"use_sliding_window": True, "max_window_layers": 1},
            ["layer_types", "sliding_window"],
        ),
        ("qwen3_moe", {"use_sliding_window": True}, ["sliding_window"]),
        ("granite", {}, ["attention_multiplier"]),
        ("olmo2", {}, ["rms_norm_eps"]),
        ("olmoe", {}, ["rms_norm_eps"]),
        ("mixtral with a window", {}, ["rms_norm_eps", "sliding_window"]),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 5},
            ["layer_types", "sliding_window", "qkv_bias"],
        ),
        ("phi3", {}, ["rms_norm_eps"]),
        ("llama 3 rotary", {}, ["rms_norm_eps"]),
    ],
)
def test_keys_that_a_config_leaves_out_have_the_defaults_of_transformers(
    tmp_path: Path, family: str, extra: dict[str, Any], left_out: list[str]
) -> None:
    kind, _, own = FAMILIES[family]
    raw = kind(**{**SIZES, **own, **extra}).to_dict()
    raw = {name: value for name, value in raw.items() if name not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    expected = kind(**{name: value for name, value in raw.items() if name != "model_type"})
    found = read_model_config(tmp_path)
    assert found.eps == expected.rms_norm_eps
    assert found.qkv_bias == getattr(expected, "qkv_bias", found.qkv_bias)
    kinds = getattr(expected, "layer_types", None) or ["sliding_attention"] * found.layers
    window = getattr(expected, "sliding_window", None) or 0
    assert [layer.window for layer in found.plan] == [window if k == "sliding_attention" else 0 for k in kinds]
    if family == "granite":
        assert found.attention_scale == expected.attention_multiplier


def test_norms_of_gemma_in_bfloat16_add_one_to_their_weights_in_float32(tmp_path: Path) -> None:
    write(tmp_path, "gemma3")
    weights = Weights(read_model_config(tmp_path), torch.bfloat16)
    weights.load(tmp_path)
    engine_model, x = CausalLM(weights.config, weights), 64 * torch.randn(5, 48).bfloat16()
    norm = Gemma3RMSNorm(48, weights.config.eps).bfloat16()
    norm.weight.data = torch.full((48,), 0.003).bfloat16()  # 1.003 is 1 in bfloat16
    assert torch.equal(engine_model._norm(x, norm.weight.data), norm(x))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "gpt_oss"}, "gpt_oss"),
        ({"model_type": "phi3", "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"final_logit_softcapping": 30.0}, "softcapping"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"vocab_size": None}, "usable"),
    ],
)
def test_a_model_that_the_engine_cannot_run_is_refused_with_its_reason(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    write(tmp_path, "qwen2 tied")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=says) as refused:
        scheduler(tmp_path)
    if "model_type" in change and says == change["model_type"]:
        assert {"gemma3_text", "granite", "olmo2", "phi3", "qwen3_moe", "smollm3"} <= set(
            re.findall(r"\w+", refused.value.todo)
        )
