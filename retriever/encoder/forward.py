"""Tokens through a model in length buckets; encoder and reranker share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from retriever.encoder.batches import batches


def forward(
    model: Any, tokens: Mapping[str, Sequence[Sequence[int]]], pad_id: int | None, limit: int, budget: int
) -> Iterator[tuple[list[int], Any, torch.Tensor]]:
    """(positions, the model's output, mask int64 [n, length]) of every batch; to be used under `inference_mode`.

    tokens  what a tokenizer gave for the texts, unpadded: input_ids and perhaps token_type_ids. A text without a token
            is in no batch.
    limit   longest text in tokens;  budget  most padded tokens in a batch
    """
    ids = tokens["input_ids"]
    full = [position for position, row in enumerate(ids) if len(row)]
    for chosen, length in batches([len(ids[position]) for position in full], limit, budget):
        positions = [full[i] for i in chosen]
        mask = torch.zeros((len(positions), length), dtype=torch.int64)
        for row, position in enumerate(positions):
            mask[row, : len(ids[position])] = 1
        mask = mask.to(model.device)
        inputs = {"input_ids": _padded(ids, positions, length, pad_id or 0), "attention_mask": mask}
        if "token_type_ids" in tokens:
            inputs["token_type_ids"] = _padded(tokens["token_type_ids"], positions, length, 0)
        output = model(**{name: value.to(model.device) for name, value in inputs.items()})
        yield positions, output, mask


def _padded(rows: Sequence[Sequence[int]], positions: list[int], length: int, value: int) -> torch.Tensor:
    """int64 [len(positions), length], padded on the right."""
    return torch.tensor([[*rows[i], *[value] * (length - len(rows[i]))] for i in positions], dtype=torch.int64)
