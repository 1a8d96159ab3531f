"""Who may attend to whom when rows hold several trajectories: masks for every kind of layer a model has (pure torch).

transformers would guess the blocks from position ids in some cases and not in others (a cache or an all-ones mask
makes it attend across trajectories without a word), so nothing is left to it. Rows that hold one trajectory each need
no mask of ours at all: attention is causal and the padding comes last.
"""

from __future__ import annotations

from typing import Any

import torch

FULL, SLIDING = "full_attention", "sliding_attention"


def block_mask(documents: torch.Tensor) -> torch.Tensor:
    """[R, 1, L, L] bool of documents [R, L]: token t sees s when s <= t and both are of one trajectory (padding sees
    padding).
    """
    same = documents[:, :, None] == documents[:, None, :]
    return torch.tril(same)[:, None]


def layer_kinds(config: Any) -> frozenset[str]:
    """Kinds of attention in the layers of a model with this configuration."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return frozenset(kinds)
    # Without a list of layers there is one kind: Mistral's and Phi 3's say so by the window alone.
    return frozenset([FULL if getattr(config, "sliding_window", None) is None else SLIDING])


def attention_mask(documents: torch.Tensor, config: Any, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
    """What a base model of transformers takes as `attention_mask` for rows of several trajectories.

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
