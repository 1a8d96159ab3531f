"""Scores are those of log_softmax, gradients included, in float64, whole or in chunks, plain or fused."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from learner.model.logprobs import Scores, ScoringLinear, Wanted, can_score, score_fused, score_hidden, score_logits

N, H, V, K = 7, 5, 11, 3
TEMPERATURE = 0.7


def made_up(dtype: torch.dtype = torch.float64, *, bias: bool = False) -> tuple[torch.Tensor, torch.nn.Linear]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(H, V, bias=bias, dtype=dtype)
    return torch.randn(N, H, dtype=dtype, requires_grad=True), layer


def ids() -> tuple[torch.Tensor, torch.Tensor]:
    """Targets, and k ids at each place, the target among them at some and one id twice at one."""
    generator = torch.Generator().manual_seed(1)
    targets, at = torch.randint(0, V, (N,), generator=generator), torch.randint(0, V, (N, K), generator=generator)
    at[0, 0] = targets[0]
    at[1, 1] = at[1, 2]
    return targets, at


def fused_scores(hidden, layer, *, chunk_bytes=1 << 20, entropy=True, top=0, at_ids=None) -> Scores:
    assert can_score(layer)
    layer.__class__ = ScoringLinear
    targets, _ = ids()
    return score_fused(layer, hidden, Wanted(targets, at_ids, 1 / TEMPERATURE, entropy, top, chunk_bytes))


def plain_scores(hidden, layer, *, chunk_bytes=1 << 20, entropy=True, top=0, at_ids=None) -> Scores:
    return score_hidden(
        hidden, ids()[0], layer, temperature=TEMPERATURE, vocabulary=V, chunk_bytes=chunk_bytes,
        entropy_gradient=entropy, top=top, at_ids=at_ids,
    )  # fmt: skip


WAYS = {"plain": plain_scores, "fused": fused_scores}
CHUNKS = {"one row": 1, "some rows": 3 * 8 * V * 3, "all": 1 << 20}


def by_log_softmax(hidden, layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets, at = ids()
    table = torch.log_softmax(layer(hidden) / TEMPERATURE, -1)
    return table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1), table.gather(-1, at)


def weighted(logprobs, entropy, at) -> torch.Tensor:
    """A loss in which every number has a different weight."""
    total = torch.zeros((), dtype=torch.float64)
    for number, part in enumerate((logprobs, entropy, at)):
        if part is not None:
            total = total + (part * torch.linspace(0.3, 1.9, part.numel()).double().sin().view_as(part)).sum() * (
                number + 1
            )
    return total


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("bias", [False, True])
def test_scores_and_gradients_are_those_of_log_softmax(way, chunk, bias):
    hidden, layer = made_up(bias=bias)
    expected = by_log_softmax(hidden, layer)
    weighted(*expected).backward()
    wanted = [hidden.grad, *(p.grad for p in layer.parameters())]
    hidden, layer = made_up(bias=bias)
    found = WAYS[way](hidden, layer, chunk_bytes=CHUNKS[chunk], top=2, at_ids=ids()[1])
    assert found.logprobs.dtype == torch.float64
    torch.testing.assert_close((found.logprobs, found.entropy, found.at), expected, rtol=1e-12, atol=1e-12)
    weighted(found.logprobs, found.entropy, found.at).backward()
    torch.testing.assert_close([hidden.grad, *(p.grad for p in layer.parameters())], wanted, rtol=1e-10, atol=1e-12)
    assert found.top.equal((layer(hidden)).topk(2).indices)
    assert found.values is None


@pytest.mark.parametrize("way", WAYS)
def test_gradcheck(way):
    hidden, layer = made_up(bias=True)
    at = ids()[1]

    def scores(h, weight, bias):
        if way == "plain":
            return plain_scores(h, lambda x: torch.nn.functional.linear(x, weight, bias), at_ids=at)[:3]
        fresh = torch.nn.Linear(H, V).double()
        del fresh.weight, fresh.bias
        fresh.weight, fresh.bias = weight, bias
        return fused_scores(h, fresh, chunk_bytes=700, at_ids=at)[:3]

    weight, bias = (p.detach().requires_grad_() for p in (layer.weight, layer.bias))
    assert gradcheck(scores, (hidden, weight, bias))


@pytest.mark.parametrize("way", WAYS)
def test_without_its_gradient_the_entropy_is_the_same_and_a_constant(way):
    hidden, layer = made_up()
    found = WAYS[way](hidden, layer, entropy=False)
    assert not found.entropy.requires_grad
    torch.testing.assert_close(found.entropy, by_log_softmax(hidden, layer)[1], rtol=1e-12, atol=1e-12)
    assert (found.at, found.top) == (None, None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", ["layer", "hidden"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_gets_its_own(way, frozen):
    hidden, layer = made_up()
    weighted(*by_log_softmax(hidden, layer)).backward()
    expected = hidden.grad if frozen == "layer" else layer.weight.grad
    hidden, layer = made_up()
    (layer.weight if frozen == "layer" else hidden).requires_grad_(False)
    found = WAYS[way](hidden, layer, at_ids=ids()[1])
    weighted(found.logprobs, found.entropy, found.at).backward()
    moving, still = (hidden, layer.weight) if frozen == "layer" else (layer.weight, hidden)
    torch.testing.assert_close(moving.grad, expected, rtol=1e-10, atol=1e-12)
    assert still.grad is None


def test_only_one_of_the_outputs_need_be_in_the_loss():
    for name in ("logprobs", "entropy", "at"):
        gradients = []
        for way in WAYS.values():
            hidden, layer = made_up()
            getattr(way(hidden, layer, at_ids=ids()[1]), name).sum().backward()
            gradients.append((hidden.grad, layer.weight.grad))
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_tied_weights_get_both_gradients():
    gradients = []
    for way in WAYS.values():
        _, layer = made_up()
        embedding = torch.nn.Embedding(V, H, dtype=torch.float64)
        embedding.weight = layer.weight
        way(embedding(ids()[0]).tanh(), layer).logprobs.sum().backward()
        gradients.append(layer.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_float32_and_gradients_of_the_weights_dtype(way, dtype):
    hidden, layer = made_up(dtype)
    expected = by_log_softmax(hidden.detach().float(), layer.float())
    hidden, layer = made_up(dtype)
    found = WAYS[way](hidden, layer, at_ids=ids()[1], chunk_bytes=200)
    assert {found.logprobs.dtype, found.entropy.dtype, found.at.dtype} == {torch.float32}
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(
        (found.logprobs, found.entropy, found.at), tuple(e.float() for e in expected), rtol=tolerance, atol=tolerance
    )
    found.logprobs.sum().backward()
    assert (hidden.grad.dtype, layer.weight.grad.dtype) == (dtype, dtype)


def half(count: int = 40, vocabulary: int = 300) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    """States and a layer in bfloat16 with logits of deviation 3, and targets."""
    torch.manual_seed(4)
    layer = torch.nn.Linear(64, vocabulary, dtype=torch.bfloat16)
    torch.nn.init.normal_(layer.weight, std=3 / 8)
    hidden = torch.randn(count, 64).bfloat16().requires_grad_()
    return hidden, layer, torch.randint(0, vocabulary, (count,))


def float32_scores(way: str, hidden: torch.Tensor, layer: torch.nn.Linear, targets: torch.Tensor, chunk: int) -> Scores:
    layer.__class__ = ScoringLinear
    layer.fp32 = True
    if way == "fused":
        return score_fused(layer, hidden, Wanted(targets, None, 1 / TEMPERATURE, True, 0, chunk))
    given = {"temperature": TEMPERATURE, "vocabulary": layer.out_features, "chunk_bytes": chunk}
    return score_hidden(hidden, targets, layer, entropy_gradient=True, **given)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [1, 20_000, 1 << 20])
def test_float32_logits_of_bfloat16_weights_have_no_rounding_but_the_gradients(way, chunk):
    hidden, layer, targets = half()
    exact = [
        hidden.detach().double().requires_grad_(),
        *(p.detach().double().requires_grad_() for p in layer.parameters()),
    ]
    table = torch.log_softmax(torch.nn.functional.linear(*exact) / TEMPERATURE, -1)
    wanted = table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)
    weighted(*wanted, None).backward()
    found = float32_scores(way, hidden, layer, targets, chunk)
    assert found.logprobs.dtype == torch.float32
    torch.testing.assert_close((found.logprobs.double(), found.entropy.double()), wanted, rtol=0, atol=2e-5)
    weighted(found.logprobs, found.entropy, None).backward()
    of_float32 = torch.full((64, 64), 1.001)
    assert ((of_float32 @ of_float32).double() - 64 * 1.001**2).abs().max() < 1e-4, "other products stay float32"
    for ours, theirs in zip([hidden, *layer.parameters()], exact, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        # each number rounded once; a weight's once for each chunk that it is summed over
        assert (ours.grad.double() - theirs.grad).norm() < (0.02 if chunk == 1 else 0.006) * theirs.grad.norm()


def test_a_wider_layer_is_left_as_it_is():
    for dtype in (torch.float32, torch.float64):
        hidden, layer = made_up(dtype)
        plain = fused_scores(hidden, layer)
        layer.fp32 = True
        assert all(torch.equal(a, b) for a, b in zip(fused_scores(hidden, layer)[:2], plain[:2], strict=True))
        assert layer(hidden).dtype == dtype


def test_the_weight_is_converted_once_for_all_chunks(monkeypatch):
    converted = []
    original = torch.Tensor.float

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        converted.append(tuple(tensor.shape))
        return original(tensor)

    hidden, layer, targets = half()
    monkeypatch.setattr(torch.Tensor, "float", counted)
    float32_scores("fused", hidden, layer, targets, 1).logprobs.sum().backward()
    assert converted.count((300, 64)) == 2, "in the forward and in the backward pass"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the product of bfloat16 with a float32 output is CUDA's")
@pytest.mark.parametrize("way", WAYS)
def test_float32_logits_on_cuda(way):
    hidden, layer, targets = half()
    expected = float32_scores(way, hidden, layer, targets, 20_000)
    moved = float32_scores(way, hidden.detach().cuda(), layer.cuda(), targets.cuda(), 20_000)
    torch.testing.assert_close(moved.logprobs.cpu(), expected.logprobs, rtol=0, atol=2e-5)


def test_a_forbidden_token_adds_nothing_and_a_nan_shows():
    logits = torch.tensor([[1.0, 2.0, -torch.inf]])
    found, plain = score_logits(logits, torch.tensor([1]), 1.0), score_logits(logits[:, :2], torch.tensor([1]), 1.0)
    torch.testing.assert_close(found, plain)
    for way in WAYS.values():
        hidden, layer = made_up()
        with torch.no_grad():
            hidden[2, 1] = torch.nan
            hidden[3, 1] = torch.inf
        logprobs = way(hidden, layer, chunk_bytes=1).logprobs
        assert logprobs.isfinite().tolist() == [True, True, False, False, True, True, True]


@pytest.mark.parametrize("way", WAYS)
def test_no_tokens_are_no_problem(way):
    hidden, layer = made_up()
    if way == "fused":
        layer.__class__ = ScoringLinear
        found = score_fused(layer, hidden[:0], Wanted(torch.zeros(0, dtype=torch.long), None, 1.0, True, 0, 1 << 20))
    else:
        found = score_hidden(
            hidden[:0], torch.zeros(0, dtype=torch.long), layer, temperature=1.0, vocabulary=V, chunk_bytes=1 << 20
        )
    found.logprobs.sum().backward()
    assert found.logprobs.shape == (0,)
    assert not layer.weight.grad.any()


def test_little_is_kept_for_the_backward_pass():
    count, vocabulary = 64, 512
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    hidden, layer = torch.randn(count, H, requires_grad=True), torch.nn.Linear(H, vocabulary, bias=False)
    layer.__class__ = ScoringLinear
    targets = torch.zeros(count, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        score_fused(layer, hidden, Wanted(targets, None, 1.0, True, 0, 1 << 16))
        fused, kept = max(kept), []
        score_logits(layer(hidden), targets, 1.0)
    assert fused <= layer.weight.numel()
    assert max(kept) == count * vocabulary
