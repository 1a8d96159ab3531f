"""Log-probs and entropies of sampled tokens from logits or hidden states, in bounded memory (pure torch).

`ScoringLinear` fuses output layer, log-softmax and their gradients: it keeps one
number per token for the backward pass.

Plain autograd keeps logits, their float32 copies and a weight gradient per chunk. Here logits are recomputed
in the backward pass, chunk by chunk, turned into their own gradient in place, and added into the gradients of hidden
states and weight. With p = softmax(z), z = W h + b over the temperature, H the entropy:

    d log p_t / d z_j = [j = t] - p_j          d H / d z_j = -p_j (log p_j + H)

Logits of bfloat16 weights and states are float32 if the layer is `fp32`: exact products, summed and kept in
float32. On CUDA that is one matrix product with a float32 output and costs nothing; elsewhere the weight is converted
once for all chunks of a pass, and its float32 copy (4 bytes x V x H) lives as long as the pass. Models that cap their
logits (Gemma 2) go through `_Float32Linear` instead, which converts in every chunk, and again where a chunk is
recomputed. The gradient of the logits is float32, and rounded once, to the weight's dtype, for its two products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

BUFFERS = 5
"""Number of [rows, V] tensors alive in `score_logits` and its backward pass."""


class Scores(NamedTuple):
    """Scores of N tokens, float32 (float64 if the inputs are).

    logprobs [N]     of the tokens
    entropy  [N]     in nats, of their distributions
    at       [N, k]  log-probs of the k given ids at each position; without given ids those of `top`, without gradient
    top      [N, k]  int64, the k likeliest ids at each position, most likely first; None if not requested
    values   [N]     the critic's values, None if the policy has no value head
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    at: torch.Tensor | None = None
    top: torch.Tensor | None = None
    values: torch.Tensor | None = None


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32; float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def score_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    top: int = 0,
    at_ids: torch.Tensor | None = None,
    among: int | None = None,
) -> Scores:
    """Return the scores of softmax(logits / temperature), in float32; `top` is chosen from the first `among` ids (None:
    all).

    logits [N, V] of any float dtype, targets [N] int64, at_ids [N, k] int64. The temperature is the engines': without
    it the log-probs would belong to another distribution than the sampled one. The entropy
    has a gradient only on request, because that keeps another [N, V] alive until the backward pass.
    """
    scaled = wide(logits) / temperature
    normaliser = torch.logsumexp(scaled, dim=-1)
    chosen = scaled.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        # 0 * -inf is NaN: a forbidden token adds nothing to the entropy
        mean = (torch.softmax(scaled, dim=-1) * scaled.clamp(min=torch.finfo(scaled.dtype).min)).sum(-1)
        entropy = normaliser - mean
    at = None if at_ids is None else scaled.gather(-1, at_ids) - normaliser[:, None]
    likeliest = scaled.detach()[:, :among].topk(top, dim=-1).indices if top else None
    if at_ids is None and likeliest is not None:
        at = (scaled.gather(-1, likeliest) - normaliser[:, None]).detach()
    return Scores(chosen - normaliser, entropy, at, likeliest)


def score_hidden(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    *,
    temperature: float,
    vocabulary: int,
    chunk_bytes: int,
    entropy_gradient: bool = False,
    top: int = 0,
    at_ids: torch.Tensor | None = None,
    among: int | None = None,
) -> Scores:
    """Return the scores of `project(hidden)`, as `score_logits`, with at most `chunk_bytes` for logits and derived
    values.

    hidden [N, H], targets [N] int64, at_ids [N, k] int64. If one chunk does not suffice, each is recomputed in
    the backward pass.
    """
    rows = max(1, chunk_bytes // (BUFFERS * wide(hidden[:0]).element_size() * vocabulary))

    def chunk(part: torch.Tensor, wanted: torch.Tensor, ids: torch.Tensor | None) -> Scores:
        given: dict[str, Any] = {"entropy_gradient": entropy_gradient, "top": top, "at_ids": ids, "among": among}
        return score_logits(project(part), wanted, temperature, **given)

    if len(targets) <= rows:
        return chunk(hidden, targets, at_ids)
    starts = range(0, len(targets), rows)
    parts = [
        (hidden[s : s + rows], targets[s : s + rows], None if at_ids is None else at_ids[s : s + rows]) for s in starts
    ]
    if torch.is_grad_enabled():
        scores = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    else:
        scores = [chunk(*part) for part in parts]
    return Scores(
        torch.cat([s.logprobs for s in scores]),
        torch.cat([s.entropy for s in scores]),
        None if at_ids is None and not top else torch.cat([s.at for s in scores if s.at is not None]),
        torch.cat([s.top for s in scores if s.top is not None]) if top else None,
    )


class Wanted(NamedTuple):
    """Requested scores of N hidden states. Fields as the arguments of `score_hidden`; scale multiplies the logits."""

    targets: torch.Tensor
    at_ids: torch.Tensor | None
    scale: float
    entropy_gradient: bool
    top: int
    chunk_bytes: int
    among: int | None = None


class ScoringLinear(torch.nn.Linear):
    """A linear output layer that also scores. Its class replaces that of an existing layer, which keeps its name,
    parameters and DeepSpeed's hooks: at ZeRO stage 3 those gather the weight around `forward` and its backward pass.

    fp32  whether logits of bfloat16 weights are float32
    """

    fp32 = False

    def forward(self, input: torch.Tensor, wanted: Wanted | None = None) -> Any:
        """Return logits; or, with `wanted`, the tuple (log-probs, entropy, at or empty, top or empty)."""
        input = input.to(self.weight.dtype)  # Falcon Mamba's hidden states are float32 beside bfloat16 weights
        if wanted is not None:
            return _Score.apply(input, self.weight, self.bias, wanted, self.fp32)  # type: ignore[no-untyped-call]
        if self.fp32 and self.weight.dtype == torch.bfloat16:
            return _Float32Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return F.linear(input, self.weight, self.bias)


def can_score(layer: Any) -> bool:
    """Return whether `layer` can become a `ScoringLinear`: not if it has an adapter or a customised forward."""
    return type(layer) in (torch.nn.Linear, ScoringLinear)


def score_fused(layer: ScoringLinear, hidden: torch.Tensor, wanted: Wanted) -> Scores:
    """Return the scores of softmax(scale * layer(hidden)), in chunks of at most `chunk_bytes`."""
    logprobs, entropy, at, top = layer(hidden, wanted)
    return Scores(logprobs, entropy, at if at.shape[1] else None, top if wanted.top else None)


def _chunks(count: int, weight: torch.Tensor, chunk_bytes: int) -> Iterator[slice]:
    # Logits in the weight's dtype, plus two copies in float32.
    bytes_of_row = len(weight) * (weight.element_size() + 2 * max(4, weight.element_size()))
    rows = max(1, chunk_bytes // bytes_of_row)
    return (slice(start, start + rows) for start in range(0, count, rows))


@contextmanager
def exact_bfloat16_products(apply: bool) -> Iterator[None]:
    """Let oneDNN multiply float32 tensors that hold bfloat16 numbers with bfloat16 instructions, if `apply`.

    The products are exact and summed in float32, at three times the speed on a CPU with AVX512_BF16 or AMX; without
    these and on a GPU nothing changes. The setting is of the process: no other thread may compute meanwhile.
    """
    precision: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = precision.fp32_precision
    if apply:
        precision.fp32_precision = "bf16"
    try:
        yield
    finally:
        precision.fp32_precision = before


class _Output(NamedTuple):
    """Output layer of one pass.

    fp32   float32 logits from a weight that is not float32
    exact  `weight` is a float32 copy of a bfloat16 one
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    fp32: bool = False
    exact: bool = False

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, *, fp32: bool) -> _Output:
        """Convert the weight if there is no bfloat16 product with float32 output."""
        if not fp32 or weight.dtype != torch.bfloat16:
            return cls(weight, bias)
        if weight.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
            return cls(weight, bias, fp32=True)
        return cls(weight.float(), None if bias is None else bias.float(), exact=True)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] of hidden states [n, H]."""
        if not self.fp32:
            with exact_bfloat16_products(self.exact and hidden.dtype == torch.bfloat16):
                return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        logits: torch.Tensor = torch.mm(hidden, self.weight.T, out_dtype=torch.float32)
        return logits if self.bias is None else logits.add_(self.bias)


def _scaled_logits(hidden: torch.Tensor, layer: _Output, scale: float) -> torch.Tensor:
    """Return a new [n, V] tensor in float32 (float64 stays); forbidden ids (-inf) become very unlikely."""
    logits = wide(layer.logits(hidden))
    return logits.mul_(scale).clamp_(min=torch.finfo(logits.dtype).min / 2)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Wanted, fp32: bool
    ) -> Any:
        count, k = len(hidden), wanted.top if wanted.at_ids is None else wanted.at_ids.shape[1]
        dtype = wide(hidden[:0]).dtype
        logprobs, entropy, normaliser = (hidden.new_empty(count, dtype=dtype) for _ in range(3))
        at = hidden.new_empty((count, k), dtype=dtype)
        top = hidden.new_empty((count, wanted.top), dtype=torch.long)
        layer = _Output.of(weight, bias, fp32=fp32)
        for part in _chunks(count, weight, wanted.chunk_bytes):
            z = _scaled_logits(hidden[part], layer, wanted.scale)
            if wanted.top:
                top[part] = z[:, : wanted.among].topk(wanted.top, dim=-1).indices
            peak = z.amax(-1, keepdim=True)
            z -= peak
            chosen = z.gather(-1, wanted.targets[part, None]).squeeze(-1)
            if k:
                at[part] = z.gather(-1, (top if wanted.at_ids is None else wanted.at_ids)[part])
            p = z.exp()
            total = p.sum(-1)
            mean = p.mul_(z).sum(-1) / total
            logs = total.log()
            logprobs[part], entropy[part] = chosen - logs, logs - mean
            at[part] -= logs[:, None]
            normaliser[part] = logs + peak.squeeze(-1)
            del z, p  # otherwise they live beside the next chunk's
        ctx.save_for_backward(hidden, weight, bias, wanted.targets, wanted.at_ids, normaliser, entropy)
        ctx.wanted, ctx.fp32 = wanted, fp32
        fixed = (*(() if wanted.entropy_gradient else (entropy,)), *((at,) if wanted.at_ids is None else ()))
        ctx.mark_non_differentiable(top, *fixed)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, at, top

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_logprobs: Any, g_entropy: Any, g_at: Any, _: Any) -> Any:
        hidden, weight, bias, targets, at_ids, normaliser, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        layer = _Output.of(weight, bias, fp32=ctx.fp32)
        g_hidden = torch.empty_like(hidden) if needs_hidden else None
        g_weight = torch.zeros_like(weight) if needs_weight else None
        g_bias = torch.zeros_like(bias) if needs_bias else None
        if g_logprobs is None:
            g_logprobs = torch.zeros_like(normaliser)
        for part in _chunks(len(hidden), weight, ctx.wanted.chunk_bytes):
            z = _scaled_logits(hidden[part], layer, ctx.wanted.scale).sub_(normaliser[part, None])
            at = None if g_at is None or at_ids is None else (at_ids[part], g_at[part])
            g = _gradient(
                z,
                (targets[part, None], g_logprobs[part, None]),
                at,
                None if g_entropy is None else (entropy[part, None], g_entropy[part, None]),
            )
            del z
            g = g.mul_(ctx.wanted.scale).to(weight.dtype)
            if g_hidden is not None:
                torch.mm(g, weight, out=g_hidden[part])
            if g_weight is not None:
                g_weight.addmm_(g.T, hidden[part])
            if g_bias is not None:
                g_bias += g.sum(0)
            del g
        return g_hidden, g_weight, g_bias, None, None


class _Float32Linear(torch.autograd.Function):
    """Float32 logits [..., V] of bfloat16 states and weights, for models that transform their logits."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        logits = _Output.of(weight, bias, fp32=True).logits(hidden.flatten(0, -2))
        return logits.view(*hidden.shape[:-1], len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        g = g.to(weight.dtype).flatten(0, -2)
        return (
            torch.mm(g, weight).view_as(hidden) if needs_hidden else None,
            torch.mm(g.T, hidden.flatten(0, -2)) if needs_weight else None,
            g.sum(0) if needs_bias else None,
        )


Weighted = tuple[torch.Tensor, torch.Tensor]


def _gradient(logs: torch.Tensor, chosen: Weighted, at: Weighted | None, entropy: Weighted | None) -> torch.Tensor:
    """Return [n, V], the gradient of the scaled logits; `logs` [n, V] are log-probs, modified in place.

    chosen, at  ids [n, k] and the gradients [n, k] of their log-probs
    entropy     entropies [n, 1] and their gradients [n, 1]
    """
    p = logs.exp()
    mass = chosen[1] if at is None else chosen[1] + at[1].sum(-1, keepdim=True)
    if entropy is None:
        p.mul_(-mass)
    else:
        p.mul_(logs.add_(entropy[0]).mul_(-entropy[1]).sub_(mass))
    p.scatter_add_(-1, *chosen)
    if at is not None:
        p.scatter_add_(-1, *at)
    return p
