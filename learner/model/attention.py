"""Attention within rows of several trajectories: spans, or masks for every kind of layer.

transformers infers the blocks from position ids in some cases only (a cache or an all-ones mask makes it silently
attend across trajectories), so the blocks are always passed explicitly. Rows with one trajectory each need no mask:
attention is causal and padding comes last.

If every layer sees all previous tokens, a row is computed span by span: causal attention per trajectory, without a
mask. A mask of [L, L] costs what packing saves, because torch also computes the blocks that it hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from learner.model.architecture import FULL, SLIDING, layer_kinds

SPANS = "foray_spans"
"""Name of our attention function in transformers."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions of the trajectories in packed rows. Passed to every layer, so that a layer recomputed for
    its gradient (gradient checkpointing) has them too.

    widths  widths of each row's spans in order, including padding: they add up to L
    held    whether a span is a trajectory, not padding
    """

    widths: tuple[tuple[int, ...], ...]
    held: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, documents: torch.Tensor) -> Spans:
        """Return the spans of documents [R, L] int64, -1 at padding; each document must be contiguous."""
        widths, held = [], []
        for row in documents.cpu():
            found, counts = torch.unique_consecutive(row, return_counts=True)
            widths.append(tuple(counts.tolist()))
            held.append(tuple((found >= 0).tolist()))
        return cls(tuple(widths), tuple(held))


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
    attend = partial(sdpa, module, attention_mask=None, **options | {"is_causal": True})
    rows = zip(*(torch.split(t, 1) for t in (query, key, value)), spans.widths, spans.held, strict=True)
    return torch.cat([_attend_row(attend, *row) for row in rows]), None


def _attend_row(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    widths: tuple[int, ...],
    held: tuple[bool, ...],
) -> torch.Tensor:
    """Return [1, L, heads, V] of one row. The gradient of `split` is one concatenation, that of a slice a row of
    zeros."""
    cuts = zip(*(torch.split(t, list(widths), 2) for t in (query, key, value)), held, strict=True)
    nothing = value.new_zeros(()).expand(1, query.shape[2], query.shape[1], value.shape[-1])
    parts = [attend(q, k, v)[0] if inside else nothing[:, : q.shape[2]] for q, k, v, inside in cuts]
    return torch.cat(parts, 1)


def block_mask(documents: torch.Tensor) -> torch.Tensor:
    """Return [R, 1, L, L] bool of documents [R, L]: token t sees s if s <= t and both are in one trajectory (padding
    sees padding).
    """
    same = documents[:, :, None] == documents[:, None, :]
    return torch.tril(same)[:, None]


def attention_mask(documents: torch.Tensor, config: Any, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return `attention_mask` of a transformers base model for rows of several trajectories.

    documents [R, L] int64, -1 where padding. The masks are [R, 1, L, L]: bool for sdpa, of `dtype` and added to the
    scores for eager attention. One mask, or one per kind of layer if the configuration lists other
    kinds than full attention. Raises ValueError for unsupported kinds.
    """
    kinds = layer_kinds(config)
    if kinds - {FULL, SLIDING}:
        raise ValueError(f"unsupported kinds of attention layers: {', '.join(sorted(kinds - {FULL, SLIDING}))}")
    full = block_mask(documents)
    masks = {FULL: full}
    if SLIDING in kinds:
        place = torch.arange(documents.shape[1], device=documents.device)
        masks[SLIDING] = full & (place[None, :] > place[:, None] - config.sliding_window)
    if config._attn_implementation == "eager":
        masks = {kind: _added(mask, dtype) for kind, mask in masks.items()}
    if SLIDING not in kinds:
        return masks[FULL]
    return masks if getattr(config, "layer_types", None) else masks[SLIDING]


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
