"""Vectors by a transformer: e5, bge, contriever, DPR, gte, any sentence-transformers or AutoModel folder.

    texts --> prefix --> tokens (cut to a length) --> length buckets --> model --> pooling --> Dense? --> length 1?

What happens at each step is the `recipe`; passages and queries differ in prefix and length, and for DPR in the model.

A vector depends on its text alone up to float noise. Padding depends on the text alone (`batches`), so in float32 with
one CPU thread vectors are equal to the bit, whatever the batch; with several threads or on a GPU the last bits can move
with the number of rows (measured with 2 threads: at most 2e-7 a coordinate). Ranks of passages whose scores are that
near may then change places between a fresh answer and a cached one; nothing else does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from protocol.errors import UserError
from protocol.safe_weights import refuse_pickled
from retriever.config_encoder import TransformerEncoderSettings
from retriever.encoder.base import HALF, Vectors, check_finite
from retriever.encoder.folder import Folder
from retriever.encoder.forward import forward
from retriever.encoder.loading import load_model, load_tokenizer
from retriever.encoder.pooling import Dense, pool
from retriever.encoder.recipe import Recipe, resolve


class TransformerEncoder:
    """See the module's docstring. Made, and used, by one thread."""

    def __init__(self, settings: TransformerEncoderSettings) -> None:
        self.recipe, passages, queries = resolve(settings)
        self.normalized = self.recipe.normalize
        self._passages = _Tower(passages, self.recipe, settings)
        self._queries = self._passages if queries is passages else _Tower(queries, self.recipe, settings)
        self.dim = self._passages.dim
        if self._queries.dim != self.dim:
            raise UserError(
                f"{settings.query_model} and {settings.model} do not belong together",
                why=f"their vectors have {self._queries.dim} and {self.dim} numbers",
            )

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dim]. NotFinite where the model overflows."""
        return self._passages.encode([self.recipe.passage_prefix + text for text in texts], self.recipe.max_passage)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dim]. NotFinite where the model overflows."""
        return self._queries.encode([self.recipe.query_prefix + text for text in texts], self.recipe.max_query)


class _Tower:
    """One model with its tokenizer."""

    def __init__(self, folder: Folder, recipe: Recipe, settings: TransformerEncoderSettings) -> None:
        self._pooling, self._normalize, self._budget = recipe.pooling, recipe.normalize, settings.batch_tokens
        self._lower_case = folder.lower_case
        self._tokenizer = load_tokenizer(folder.path)
        # models that were trained without a pooler are often saved without one; only `pooler` reads it
        unused = () if recipe.pooling == "pooler" else ("pooler.",)
        self._model = load_model(folder.path, settings, unused=unused)
        self._dense = [_dense(path).to(self._model.device) for path in folder.dense]
        self._name = folder.path.name
        self.dim = self._probe()

    def encode(self, texts: list[str], limit: int) -> Vectors:
        """float32 [len(texts), dim] of texts with their prefix, cut to `limit` tokens. No token: the zero vector."""
        vectors: Vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        if not texts:
            return vectors
        tokens = self._tokenizer(
            [text.lower() for text in texts] if self._lower_case else texts, truncation=True, max_length=limit
        )
        with torch.inference_mode():
            for rows, output, mask in forward(self._model, tokens, self._tokenizer.pad_token_id, limit, self._budget):
                vectors[rows] = self._finish(pool(self._pooling, output, mask)).cpu().numpy()
        check_finite(vectors, texts, f"the encoder {self._name}", HALF)
        return vectors

    def _finish(self, pooled: torch.Tensor) -> torch.Tensor:
        for step in self._dense:
            pooled = step(pooled)
        return torch.nn.functional.normalize(pooled, dim=1) if self._normalize else pooled

    def _probe(self) -> int:
        """Width of a vector, found by making one. UserError where the model cannot be pooled as asked."""
        tokens: Any = self._tokenizer(["a"])
        with torch.inference_mode():
            for _, output, mask in forward(self._model, tokens, self._tokenizer.pad_token_id, 8, 8):
                try:
                    return int(self._finish(pool(self._pooling, output, mask)).shape[1])
                except (ValueError, AttributeError, RuntimeError) as error:
                    raise UserError(
                        f"the model in {self._name} does not give what pooling `{self._pooling}` needs",
                        why=str(error).splitlines()[0],
                        todo="set encoder.pooling or encoder.family to what the model was trained with",
                    ) from error
        raise UserError(f"the tokenizer in {self._name} gives no token for the text 'a'")


def _dense(folder: Path) -> Dense:
    """A Dense step of sentence-transformers: config.json and model.safetensors."""
    refuse_pickled(folder)
    try:
        said = json.loads((folder / "config.json").read_bytes())
        state = load_file(folder / "model.safetensors")
        name = str(said.get("activation_function", "torch.nn.Tanh"))
        activation = getattr(torch.nn, name.rpartition(".")[2]) if name.startswith("torch.nn.") else None
        linear = torch.nn.Linear(said["in_features"], said["out_features"], bias="linear.bias" in state)
        if (
            activation is None
            or said.get("use_residual")
            or said.get("module_input_name", "sentence_embedding") != ("sentence_embedding")
        ):
            raise ValueError(f"its configuration is not one of ours: {said}")
        linear.load_state_dict({key.removeprefix("linear."): value.float() for key, value in state.items()})
        return Dense(linear, activation()).eval()
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"cannot load the Dense step in {folder}", why=str(error).splitlines()[0]) from error
