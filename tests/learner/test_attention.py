"""Packed rows span by span: what each trajectory would give alone, and what the mask gives, gradients included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

from learner.config.model import LoraSettings, ModelSettings
from learner.model import attention
from learner.model.attention import SPANS, Spans, block_mask, takes_spans, use_spans
from learner.model.loading import load_policy
from learner.model.policy import hidden_states
from learner.trainer.critic import CriticSettings, load_critic

KINDS = ("llama", "qwen2", "qwen3")
VOCABULARY = 61
LAYOUTS = {
    "one trajectory": [[9]],
    "odd widths": [[7, 3, 13]],
    "single tokens": [[1, 1, 5, 1]],
    "padding": [[4, 6, -3]],
    "rows that differ": [[5, 11, -1], [1, 1, 9, -6], [17]],
    "a row of padding": [[3, 2], [-5]],
}
"""Widths of the spans of each row; a negative one is padding."""


def document_ids_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack(
        [torch.cat([torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(row)]) for row in rows]
    )


def spans_of(document_ids: torch.Tensor) -> Spans:
    return Spans.of(document_ids, positions_of(document_ids))


def positions_of(document_ids: torch.Tensor) -> torch.Tensor:
    """Positions of documents that are one trajectory each."""
    counts = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in document_ids]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in counts])


def tiny(kind: str, **extra) -> transformers.PreTrainedModel:
    """Two layers, grouped-query attention, weights large enough that attention is not flat."""
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.3, bos_token_id=1,
        eos_token_id=1, pad_token_id=None, **extra,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def attend(tensors: list[torch.Tensor], **options) -> torch.Tensor:
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    function = transformers.AttentionInterface()[SPANS]
    return function(module, *tensors, options.pop("mask", None), scaling=0.5, **options)[0]


@pytest.fixture(autouse=True)
def registered():
    assert use_spans(tiny("llama"))


@pytest.mark.parametrize("values", [8, 6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_spans_equal_the_mask_in_output_and_gradient(name, values):
    document_ids = document_ids_of(LAYOUTS[name])
    torch.manual_seed(1)
    shapes = [
        (len(document_ids), heads, document_ids.shape[1], width) for heads, width in ((4, 8), (2, 8), (2, values))
    ]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found = attend(tensors, spans=spans_of(document_ids))
    query, key, value = tensors
    wide = [t.repeat_interleave(2, 1) for t in (key, value)]
    expected = scaled_dot_product_attention(
        query, *wide, attn_mask=block_mask(document_ids, positions_of(document_ids)), scale=0.5
    ).transpose(1, 2)
    held = document_ids >= 0
    assert found.shape == expected.shape
    torch.testing.assert_close(found[held], expected[held], rtol=1e-12, atol=1e-12)
    assert not found[~held].any(), "padding is zeros"
    weights = torch.randn(found.shape, dtype=torch.float64)
    gradient = torch.autograd.grad((found * weights).sum(), tensors)
    wanted = torch.autograd.grad((expected * weights)[held].sum(), tensors)
    for one, other in zip(gradient, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def by_sequence(query, key, value, bounds, _, longest, __, *, scale, window_size, enable_gqa):
    """torch's variable-length attention, computed on any device one sequence after the other."""
    assert window_size == (-1, 0) and query.shape[0] == bounds[-1] and longest == int(bounds.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    parts = []
    for start, end in pairwise(bounds.tolist()):
        q, k, v = (t[start:end].transpose(0, 1) for t in (query, key, value))
        parts.append(
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(parts)


@pytest.fixture
def no_varlen_left():
    yield
    attention._VARLEN.clear()


def before_grouped_heads(query, key, value, bounds, *longest, scale, window_size):
    """The same in an older torch, 2.11 for one: as many heads of keys as of queries."""
    assert query.shape == key.shape == value.shape
    return by_sequence(query, key, value, bounds, *longest, scale=scale, window_size=window_size, enable_gqa=False)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("varlen", [by_sequence, before_grouped_heads])
@pytest.mark.usefixtures("no_varlen_left")
def test_all_spans_in_one_call_are_what_they_are_one_by_one(name, varlen, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    config = tiny("llama").config
    config._attn_implementation = SPANS
    document_ids = document_ids_of(LAYOUTS[name])
    tensors = [torch.randn(len(document_ids), heads, document_ids.shape[1], 8) for heads in (4, 2, 2)]
    held = (document_ids >= 0)[:, :, None, None]
    alone = attend(tensors, spans=spans_of(document_ids))
    assert attention.use_varlen(config, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(attend(tensors, spans=spans_of(document_ids)) * held, alone * held)


@pytest.mark.usefixtures("no_varlen_left")
def test_a_variable_length_attention_that_is_wrong_or_missing_is_not_used(monkeypatch, caplog):
    config, cpu = tiny("llama").config, torch.device("cpu")
    assert not attention.use_varlen(config, cpu, torch.float32), "the model does not take spans"
    config._attn_implementation = SPANS
    before = torch.get_rng_state()
    with caplog.at_level("INFO"):
        assert not attention.use_varlen(config, cpu, torch.float32), "torch has it for GPUs only"
        assert "cannot run on cpu" in caplog.text
        monkeypatch.setattr(
            "torch.nn.attention.varlen.varlen_attn", lambda q, k, v, *_, **__: q + 0 * (k.sum() + v.sum())
        )
        assert not attention.use_varlen(config, cpu, torch.float32)
        assert "is wrong by" in caplog.text
    assert not attention._VARLEN and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("span", range(4))
@pytest.mark.usefixtures("no_varlen_left")
def test_a_variable_length_attention_that_is_wrong_in_one_span_is_not_used(span, monkeypatch, caplog):
    def wrong(query, key, value, bounds, *longest, scale, window_size, enable_gqa):
        output = by_sequence(
            query, key, value, bounds, *longest, scale=scale, window_size=window_size, enable_gqa=enable_gqa
        )
        factor = torch.ones(len(output), 1, 1)
        factor[bounds[span] : bounds[span + 1]] = 1.5
        return output * factor

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wrong)
    config = tiny("llama").config
    config._attn_implementation = SPANS
    assert not attention.use_varlen(config, torch.device("cpu"), torch.float32)
    assert "is wrong by" in caplog.text


def test_without_spans_rows_are_causal():
    tensors = [torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    one_span = attend(tensors, spans=spans_of(document_ids_of([[5], [5]])))
    torch.testing.assert_close(attend(tensors), one_span, rtol=1e-12, atol=1e-12)


def test_a_model_s_own_mask_is_not_left_out_without_a_word():
    tensors = [torch.randn(1, heads, 5, 8) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match="builds its own mask"):
        attend(tensors, spans=spans_of(document_ids_of([[5]])), mask=torch.zeros(1, 1, 5, 5))


def inputs_of(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    document_ids = document_ids_of(rows)
    ids = torch.randint(0, VOCABULARY, document_ids.shape, generator=torch.Generator().manual_seed(2))
    places = [torch.cat([torch.arange(n) if n > 0 else torch.zeros(-n, dtype=torch.long) for n in row]) for row in rows]
    return ids, torch.stack(places), document_ids


def hidden_and_gradient(causal, ids, positions, document_ids) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of what is no padding [N, H], and the gradient of a fixed weighting of it."""
    causal.zero_grad()
    hidden = hidden_states(causal.base_model, ids, positions, document_ids)[document_ids.flatten() >= 0]
    (hidden * _weights(hidden)).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in causal.named_parameters() if p.grad is not None}


def alone_and_gradient(causal, ids, document_ids) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same by transformers' own forward pass over each trajectory alone."""
    causal.zero_grad()
    texts = [ids[r][row == d] for r, row in enumerate(document_ids) for d in row.unique().tolist() if d >= 0]
    hidden = torch.cat([causal.base_model(text[None], use_cache=False).last_hidden_state[0] for text in texts])
    (hidden * _weights(hidden)).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in causal.named_parameters() if p.grad is not None}


def _weights(hidden: torch.Tensor) -> torch.Tensor:
    return torch.randn(hidden.shape, dtype=hidden.dtype, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_what_it_gives_with_the_mask_and_alone(kind, checkpointing, tmp_path):
    tiny(kind).save_pretrained(tmp_path)
    causal = load_policy(tmp_path, ModelSettings(gradient_checkpointing=checkpointing)).double().train().causal
    assert takes_spans(causal.config)
    ids, positions, document_ids = inputs_of(LAYOUTS["rows that differ"])
    found, gradient = hidden_and_gradient(causal, ids, positions, document_ids)
    causal.set_attn_implementation("sdpa")
    masked = hidden_and_gradient(causal, ids, positions, document_ids)
    alone = alone_and_gradient(causal, ids, document_ids)
    for expected, expected_gradient in (masked, alone):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # norms are float32 in any model
        assert gradient.keys() == expected_gradient.keys()
        for name, wanted in expected_gradient.items():
            torch.testing.assert_close(gradient[name], wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_layers_computed_once_more_for_the_gradient_have_the_spans_too(tmp_path):
    """And it can fail: the same packed row as one span has another gradient."""
    tiny("qwen2").save_pretrained(tmp_path)
    causal = load_policy(tmp_path, ModelSettings(gradient_checkpointing=True)).double().train().causal
    ids, positions, document_ids = inputs_of([[6, 9, 2]])
    seen = []
    attention = causal.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda m, _, kwargs: seen.append(kwargs["spans"]), with_kwargs=True)
    _, right = hidden_and_gradient(causal, ids, positions, document_ids)
    assert [s.widths for s in seen] == [((6, 9, 2),)] * 2
    _, wrong = hidden_and_gradient(causal, ids, torch.arange(17)[None], torch.zeros_like(document_ids))
    assert not torch.allclose(right["model.embed_tokens.weight"], wrong["model.embed_tokens.weight"], atol=1e-3)


SHARED = {
    "three": [(4, (3, 5, 2))],
    "single tokens": [(1, (1, 1, 6))],
    "beside others, padded": [(5, (2, 4)), (0, (6,)), (3, (1, 1, 2))],
}
"""Documents of a row: the width of the prompt, and of each trajectory's rest."""


@pytest.mark.parametrize("spans", [True, False])
@pytest.mark.parametrize("name", SHARED)
def test_trajectories_behind_one_prompt_are_what_they_are_alone(name, spans):
    causal = tiny("qwen3").double()
    if spans:
        assert use_spans(causal)
    draw = torch.Generator().manual_seed(3)
    row: list[tuple[int, int, int]] = []  # id, position, document
    alone = torch.zeros((), dtype=torch.float64)
    expected, weights = [], []
    for number, (prompt, rests) in enumerate(SHARED[name]):
        ids = torch.randint(0, VOCABULARY, (prompt + sum(rests),), generator=draw).tolist()
        row += [(ids[at], at, number) for at in range(prompt)]
        rest = prompt
        for count, width in enumerate(rests):
            own = ids[rest : rest + width]
            row += [(token, prompt + at, number) for at, token in enumerate(own)]
            rest += width
            whole = torch.tensor([[*ids[:prompt], *own]])
            states = causal.model(whole, use_cache=False).last_hidden_state[0]
            kept = states if not count else states[prompt:]
            weight = torch.randn(kept.shape, dtype=torch.float64, generator=draw)
            expected.append(kept)
            weights.append(weight)
            alone = alone + (kept * weight).sum()
    row += [(0, at, -1) for at in range(3)]
    ids_, positions, document_ids = torch.tensor(row).T[:, None]
    wanted = torch.autograd.grad(alone, list(causal.model.parameters()))
    found = hidden_states(causal.base_model, ids_, positions, document_ids)[document_ids.flatten() >= 0]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-9, atol=1e-9)
    gradient = torch.autograd.grad((found * torch.cat(weights)).sum(), list(causal.model.parameters()))
    for one, other in zip(gradient, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_a_window_sees_the_end_of_the_prompt_and_no_further():
    causal = tiny("mistral", sliding_window=4).double()
    prompt, rests = [5, 9, 11, 3, 7, 2], ([8, 1, 6], [4, 12])
    ids, positions = [*prompt, *rests[0], *rests[1]], [*range(6), *range(6, 9), *range(6, 8)]
    row = (torch.tensor([ids]), torch.tensor([positions]), torch.zeros(1, len(ids), dtype=torch.long))
    found = hidden_states(causal.base_model, *row)
    alone = [causal.model(torch.tensor([[*prompt, *rest]]), use_cache=False).last_hidden_state[0] for rest in rests]
    torch.testing.assert_close(found, torch.cat([alone[0], alone[1][6:]]), rtol=1e-9, atol=1e-9)


def test_bfloat16_with_padding_stays_finite(tmp_path):
    tiny("qwen3").save_pretrained(tmp_path)
    causal = load_policy(tmp_path, ModelSettings(dtype="bfloat16")).causal
    ids, positions, document_ids = inputs_of(LAYOUTS["a row of padding"])
    hidden = hidden_states(causal.base_model, ids, positions, document_ids)
    assert hidden.isfinite().all()
    hidden.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in causal.parameters() if p.grad is not None)


FULL_KINDS = {
    **{kind: {} for kind in (*KINDS, "gemma", "granite", "olmo2", "mixtral", "gpt2", "gpt_neox")},
    "mistral": {"sliding_window": None},
}


@pytest.mark.parametrize("kind", FULL_KINDS)
def test_models_whose_layers_all_see_everything_before_them_take_spans(kind, tmp_path):
    tiny(kind, **FULL_KINDS[kind]).save_pretrained(tmp_path)
    assert takes_spans(load_policy(tmp_path, ModelSettings()).causal.config)
    assert takes_spans(load_policy(tmp_path, ModelSettings(), packed=False).causal.config)
    assert not takes_spans(load_policy(tmp_path, ModelSettings(attention="eager")).causal.config)


def test_critics_and_adapted_policies_take_spans(tmp_path):
    tiny("qwen2").save_pretrained(tmp_path)
    adapted = ModelSettings(lora=LoraSettings(rank=2))
    assert takes_spans(load_policy(tmp_path, adapted).causal.config)
    assert takes_spans(load_critic(tmp_path, CriticSettings(), adapted).backbone.config)


def test_windows_keep_their_mask(tmp_path):
    tiny("mistral", sliding_window=5).save_pretrained(tmp_path)
    assert load_policy(tmp_path, ModelSettings()).causal.config._attn_implementation == "sdpa"


def test_a_model_that_spans_would_mix_up_gets_the_mask(tmp_path, monkeypatch):
    """One of the types that are checked: here its spans are lost, as in a model that does not hand them on."""
    tiny("granite").save_pretrained(tmp_path)
    monkeypatch.setattr("learner.model.policy.Spans.of", lambda document_ids, positions: None)
    causal = load_policy(tmp_path, ModelSettings()).causal
    assert causal.config._attn_implementation == "sdpa"
    ids, positions, document_ids = inputs_of([[6, 9, -2]])
    found, _ = hidden_and_gradient(causal, ids, positions, document_ids)
    expected, _ = alone_and_gradient(causal, ids, document_ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
