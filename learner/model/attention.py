"""Who may attend to whom when rows hold several trajectories: spans, or masks for every kind of layer a model has.

transformers would guess the blocks from position ids in some cases and not in others (a cache or an all-ones mask
makes it attend across trajectories without a word), so nothing is left to it. Rows that hold one trajectory each need
no mask of ours at all: attention is causal and the padding comes last.

Where every layer sees all that came before, a row is computed span by span: each trajectory by causal attention of its
own, without a mask. A mask of [L, L] costs what packing saves, and with it torch computes the blocks that it hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from learner.model.architecture import FULL, SLIDING, layer_kinds

SPANS = "foray_spans"
"""The name under which transformers knows our attention function."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the trajectories of packed rows lie. An argument of every layer, so that a layer computed once more for
    its gradient (gradient checkpointing) has it too.

    widths  of each row's spans in order, padding among them: they add up to L
    held    whether a span is a trajectory, and not padding
    """

    widths: tuple[tuple[int, ...], ...]
    held: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, documents: torch.Tensor) -> Spans:
        """Of documents [R, L] int64, -1 where padding; each document must be in one piece."""
        widths, held = [], []
        for row in documents.cpu():
            found, counts = torch.unique_consecutive(row, return_counts=True)
            widths.append(tuple(counts.tolist()))
            held.append(tuple((found >= 0).tolist()))
        return cls(tuple(widths), tuple(held))


def use_spans(causal: Any) -> bool:
    """Let a transformers model take `spans` beside its other inputs; False where it has no place for our function.

    Without `spans` it then computes as with sdpa, and builds no mask: rows are causal, padding must come last.
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
    """[R, L, heads, V], as transformers wants it, of query [R, heads, L, D], key [R, groups, L, D], value
    [R, groups, L, V].

    Padding gets zeros, and gives no gradient. Raises ValueError for spans with a mask, which would be left out.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    if spans is None:
        return sdpa(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if attention_mask is not None:
        raise ValueError("the model makes a mask of its own, which spans leave out")
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
    """[1, L, heads, V] of one row. The gradient of `split` is one concatenation, that of a slice a row of zeros."""
    cuts = zip(*(torch.split(t, list(widths), 2) for t in (query, key, value)), held, strict=True)
    nothing = value.new_zeros(()).expand(1, query.shape[2], query.shape[1], value.shape[-1])
    parts = [attend(q, k, v)[0] if inside else nothing[:, : q.shape[2]] for q, k, v, inside in cuts]
    return torch.cat(parts, 1)


def block_mask(documents: torch.Tensor) -> torch.Tensor:
    """[R, 1, L, L] bool of documents [R, L]: token t sees s when s <= t and both are of one trajectory (padding sees
    padding).
    """
    same = documents[:, :, None] == documents[:, None, :]
    return torch.tril(same)[:, None]


def attention_mask(documents: torch.Tensor, config: Any, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return what a base model of transformers takes as `attention_mask` for rows of several trajectories.

    documents [R, L] int64, -1 where padding. The masks are [R, 1, L, L]: bool for sdpa, of `dtype` and added to the
    scores for eager attention. One mask, or one for each kind of layer where the configuration lists layers of more
    kinds than the full one. Raises ValueError for kinds that have no mask here.
    """
    kinds = layer_kinds(config)
    if kinds - {FULL, SLIDING}:
        raise ValueError(f"no mask is known for {', '.join(sorted(kinds - {FULL, SLIDING}))}")
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
