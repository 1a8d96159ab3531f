"""Weights as they stand in a model's files, where transformers holds them otherwise: experts, which it stacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def as_saved(causal: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` of `causal` under the names and in the shapes that `save_pretrained` would write: what engines read.

    One tensor may become several: parts of it, not copied where they are contiguous. For most models nothing changes.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        for saved, part in revert_weight_conversion(causal, {name: tensor}).items():
            yield saved, part.contiguous()
