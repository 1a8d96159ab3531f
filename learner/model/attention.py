"""Attention within rows of several trajectories: spans, or masks for every kind of layer.

transformers infers the blocks from position ids in some cases only (a cache or an all-ones mask makes it silently
attend across trajectories), so the blocks are always passed explicitly. Rows with one trajectory each need no mask:
attention is causal and padding comes last.

If every layer sees all previous tokens, a row is computed span by span: causal attention per trajectory, without a
mask. A mask of [L, L] costs what packing saves, because torch also computes the blocks that it hides.

On a GPU all spans are one call of torch's variable-length attention, if `use_varlen` found at load that it agrees with
the computation span by span. Both have run on an H100.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch

from learner.model.architecture import FULL, SLIDING, layer_kinds

SPANS = "foray_spans"
"""Name of our attention function in transformers."""
VARLEN_TOLERANCE = 0.1
"""Largest difference of outputs and gradients of random rows, of the order of 1: bfloat16 rounds them to 0.01."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions of the trajectories in packed rows. Passed to every layer, so that a layer recomputed for
    its gradient (gradient checkpointing) has them too.

    widths  widths of each row's spans in order, including padding: they add up to L
    held    whether a span is a trajectory, not padding
    shared  of each span with several trajectories behind one prompt: the widths of the prompt and of what follows it
            in each; () of all others
    bounds  [spans + 1] int32, where the spans begin and end in the flattened rows, on the device of the rows
    """

    widths: tuple[tuple[int, ...], ...]
    held: tuple[tuple[bool, ...], ...]
    shared: tuple[tuple[tuple[int, ...], ...], ...]
    bounds: torch.Tensor = field(compare=False)

    @classmethod
    def of(cls, document_ids: torch.Tensor, positions: torch.Tensor) -> Spans:
        """Return the spans of document_ids and positions [R, L] int64, as in `learner.data.batch.MicroBatch`.

        Each document must be contiguous. Where positions go back, another trajectory continues the prompt.
        """
        widths, held, shared = [], [], []
        for row, places in zip(document_ids.cpu(), positions.cpu(), strict=True):
            found, counts = torch.unique_consecutive(row, return_counts=True)
            widths.append(tuple(counts.tolist()))
            held.append(tuple((found >= 0).tolist()))
            spans = zip(torch.split(places, list(widths[-1])), held[-1], strict=True)
            shared.append(tuple(_branches(span) if inside else () for span, inside in spans))
        bounds = torch.tensor([0, *accumulate(width for row in widths for width in row)], dtype=torch.int32)
        return cls(tuple(widths), tuple(held), tuple(shared), bounds.to(document_ids.device))


def _branches(positions: torch.Tensor) -> tuple[int, ...]:
    """Return (width of the prompt, width of each continuation) of a document, () if it is one trajectory."""
    cuts = ((positions.diff() != 1).nonzero().flatten() + 1).tolist()
    if not cuts:
        return ()
    prompt = int(positions[cuts[0]])
    ends = [prompt, *cuts, len(positions)]
    return prompt, *(end - start for start, end in pairwise(ends))


def use_spans(causal: Any) -> bool:
    """Let a transformers model accept `spans`; return False if it does not support a custom attention function.

    Without `spans` it then computes as with sdpa, without a mask: rows are causal, padding must come last.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(SPANS, _attend_spans)
    causal.set_attn_implementation(SPANS)
    return takes_spans(causal.config)


def takes_spans(config: Any) -> bool:
    """Return whether a model with this configuration is computed span by span."""
    return bool(config._attn_implementation == SPANS)


def _attend_spans(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    spans: Spans | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return [R, L, heads, V], as transformers expects, from query [R, heads, L, D], key [R, groups, L, D], value
    [R, groups, L, V].

    Padding gets zeros and no gradient. Raises ValueError for spans with a mask, which would be ignored.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if spans is None:
        return sdpa(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if attention_mask is not None:
        raise ValueError("the model builds its own mask, which spans would ignore")
    several = any(branches for row in spans.shared for branches in row)
    if _kind(query, key, value) in _VARLEN and not several and not options.get("dropout"):
        return _attend_varlen(query, key, value, spans, options.get("scaling")), None
    attend = partial(sdpa, module, **options)
    rows = zip(*(torch.split(t, 1) for t in (query, key, value)), spans.widths, spans.held, spans.shared, strict=True)
    return torch.cat([_attend_row(attend, *row) for row in rows]), None


def _attend_row(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    widths: tuple[int, ...],
    held: tuple[bool, ...],
    shared: tuple[tuple[int, ...], ...],
) -> torch.Tensor:
    """Return [1, L, heads, V] of one row. The gradient of `split` is one concatenation, that of a slice a row of
    zeros."""
    cuts = zip(*(torch.split(t, list(widths), 2) for t in (query, key, value)), held, shared, strict=True)
    nothing = value.new_zeros(()).expand(1, query.shape[2], query.shape[1], value.shape[-1])
    parts: list[torch.Tensor] = []
    for q, k, v, inside, branches in cuts:
        if branches:
            parts += _attend_shared(attend, q, k, v, branches)
        else:
            parts.append(attend(q, k, v, None, is_causal=True)[0] if inside else nothing[:, : q.shape[2]])
    return torch.cat(parts, 1)


def _attend_shared(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    branches: tuple[int, ...],
) -> Iterator[torch.Tensor]:
    """Yield [1, widths, heads, V] of trajectories that share a prompt: the prompt with the first, then each other one,
    which attends to the prompt and to itself (arXiv 2506.05433, section 3).
    """
    prompt, first, *_ = branches
    queries, keys, values = (torch.split(t, [prompt + first, *branches[2:]], 2) for t in (query, key, value))
    yield attend(queries[0], keys[0], values[0], None, is_causal=True)[0]
    for q, k, v in zip(queries[1:], keys[1:], values[1:], strict=True):
        seen = [torch.cat([whole[:, :, :prompt], own], 2) for whole, own in ((keys[0], k), (values[0], v))]
        mask = torch.ones(q.shape[2], seen[0].shape[2], dtype=torch.bool, device=q.device).tril(prompt)
        yield attend(q, *seen, mask[None, None], is_causal=False)[0]


_VARLEN: set[tuple[Any, ...]] = set()
"""Kinds of tensors for which `use_varlen` has found torch's variable-length attention right."""


def _kind(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    return query.device.type, query.dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3]


@cache
def _takes_grouped_heads(attend: Callable[..., Any]) -> bool:
    return "enable_gqa" in signature(attend).parameters


def _attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, scaling: float | None
) -> torch.Tensor:
    """Return [R, L, heads, V] as `_attend_spans`; padding attends to itself."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [R * L, heads, D]
    longest = max(width for row in spans.widths for width in row)
    if _takes_grouped_heads(varlen_attn):
        grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    else:  # older torch has no grouped heads here
        grouped = {}
        k, v = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (k, v))
    found = varlen_attn(
        q,
        k,
        v,
        spans.bounds,
        spans.bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),  # causal
        **grouped,
    )
    assert isinstance(found, torch.Tensor)
    return found.reshape(query.shape[0], query.shape[2], *found.shape[1:])


def use_varlen(config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Use torch's variable-length attention on `device` for a model computed span by span, if its output and gradients
    on random rows agree with those of the computation span by span. Return whether it is used.
    """
    if not takes_spans(config):
        return False
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    document_ids = torch.tensor([[0] * 5 + [1] * 40 + [2] * 19, [0] * 50 + [-1] * 14], device=device)
    positions = torch.tensor([[*range(5), *range(40), *range(19)], [*range(50), *range(14)]], device=device)
    spans, scaling = Spans.of(document_ids, positions), width**-0.5
    generator = torch.Generator(device).manual_seed(0)  # not torch's own: the run's random state must not change

    def rows(count: int) -> torch.Tensor:
        return torch.randn((2, count, 64, width), generator=generator, device=device, dtype=dtype)

    given = (rows(heads), rows(groups), rows(groups))
    weight = (document_ids >= 0)[:, :, None, None] * rows(heads).transpose(1, 2)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // groups
    _VARLEN.discard(_kind(*given))
    try:
        one, many = (
            _with_gradients(attend, given, weight)
            for attend in (
                lambda q, k, v: _attend_varlen(q, k, v, spans, scaling),
                lambda q, k, v: _attend_spans(module, q, k, v, None, spans, scaling=scaling)[0],
            )
        )
        wrong = max(float((a - b).abs().max()) for a, b in zip(one, many, strict=True))
    except (ImportError, TypeError, RuntimeError, ValueError, NotImplementedError) as error:
        log.info(
            "attention span by span: torch's variable-length attention cannot run on %s: %s", device, str(error)[:200]
        )
        return False
    if not wrong <= VARLEN_TOLERANCE:
        log.warning("attention span by span: torch's variable-length attention is wrong by %.2g on %s", wrong, device)
        return False
    log.info("attention: all spans in one call of torch's variable-length attention")
    _VARLEN.add(_kind(*given))
    return True


@torch.enable_grad()
def _with_gradients(
    attend: Callable[..., torch.Tensor], given: tuple[torch.Tensor, ...], weight: torch.Tensor
) -> list[torch.Tensor]:
    """Return the output where `weight` is not 0, and the gradients of the weighted sum, as float32."""
    inputs = [t.clone().requires_grad_() for t in given]
    output = attend(*inputs)
    gradients = torch.autograd.grad((output * weight).sum(), inputs)
    return [(output * (weight != 0)).detach().float(), *(g.float() for g in gradients)]


def block_mask(document_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return [R, 1, L, L] bool of document_ids and positions [R, L]: token t sees s if s <= t and both are in one
    trajectory, or s is in the prompt that t continues (padding sees padding).
    """
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = (positions.diff() != 1) | (document_ids.diff() != 0)
    branch = starts.cumsum(1)
    at = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begun = positions.gather(1, torch.where(starts, at, 0).cummax(1).values)  # where the token's branch starts
    own = branch[:, :, None] == branch[:, None, :]
    prompt = (begun[:, None, :] == 0) & (positions[:, None, :] < begun[:, :, None])
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return torch.tril(same & (own | prompt))[:, None]


def attention_mask(
    document_ids: torch.Tensor, positions: torch.Tensor, config: Any, dtype: torch.dtype
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return `attention_mask` of a transformers base model for rows of several trajectories.

    document_ids, positions [R, L] int64, as in `learner.data.batch.MicroBatch`.
    The masks are [R, 1, L, L]: bool for sdpa, of `dtype` and added to the
    scores for eager attention. One mask, or one per kind of layer if the configuration lists other
    kinds than full attention. Raises ValueError for unsupported kinds.
    """
    kinds = layer_kinds(config)
    if kinds - {FULL, SLIDING}:
        raise ValueError(f"unsupported kinds of attention layers: {', '.join(sorted(kinds - {FULL, SLIDING}))}")
    full = block_mask(document_ids, positions)
    masks = {FULL: full}
    if SLIDING in kinds:
        far = positions[:, None, :] <= positions[:, :, None] - config.sliding_window
        masks[SLIDING] = full & ~far[:, None]
    if config._attn_implementation == "eager":
        masks = {kind: _added(mask, dtype) for kind, mask in masks.items()}
    if SLIDING not in kinds:
        return masks[FULL]
    return masks if getattr(config, "layer_types", None) else masks[SLIDING]


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
