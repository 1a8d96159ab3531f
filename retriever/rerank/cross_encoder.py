"""Query and document through one model together (cross-encoder; Nogueira and Cho 2019, arXiv 1901.04085).

    (query, its texts) .. --> pairs --> tokens (the longer one cut) --> length buckets --> logits --> one score per pair

Pairs of different queries share batches. The score is the logit of the
only label, or that of the second label minus the first, which orders documents as the softmax of the two does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from protocol.errors import UserError
from retriever.encoder.base import HALF, check_finite
from retriever.encoder.folder import read_folder
from retriever.encoder.transformer import BATCH_TOKENS, forward, load_model, load_tokenizer
from retriever.rerank.base import Scores
from retriever.rerank.config import CrossEncoderSettings

MAX_TOKENS = 512
"""Maximum tokens of query and document together, including special tokens; the longer one is cut first."""
_CHUNK = 4096
"""Pairs tokenised at a time: the ids of a whole burst with 50 candidates per query would take gigabytes."""


class CrossEncoder:
    """See the module's docstring. Created and used by one thread."""

    def __init__(self, settings: CrossEncoderSettings) -> None:
        self._limit = min(MAX_TOKENS, read_folder(settings.model).positions or MAX_TOKENS)
        self._name = settings.model.name
        self._tokenizer = load_tokenizer(settings.model)
        self._model = load_model(settings.model, settings, kind="AutoModelForSequenceClassification")
        if self._model.config.num_labels not in (1, 2):
            raise UserError(
                f"{settings.model} is not a reranker",
                why=f"it has {self._model.config.num_labels} labels; a reranker has one or two",
            )

    def scores(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[Scores]:
        """See `base.Reranker`. Raises NotFinite if the model overflows."""
        queries = [query for query, texts in pairs for _ in texts]
        texts = [text for _, own in pairs for text in own]
        parts = [slice(start, start + _CHUNK) for start in range(0, len(texts), _CHUNK)]
        flat = np.concatenate([np.zeros(0, np.float32), *(self._score(queries[part], texts[part]) for part in parts)])
        check_finite(flat, texts, f"the reranker {self._name}", HALF)
        ends = np.cumsum([len(own) for _, own in pairs])
        return [flat[end - len(own) : end] for end, (_, own) in zip(ends, pairs, strict=True)]

    def _score(self, queries: list[str], texts: list[str]) -> Scores:
        """Return float32 [n] of n pairs."""
        scores = np.zeros(len(texts), dtype=np.float32)
        tokens = self._tokenizer(queries, texts, truncation="longest_first", max_length=self._limit)
        with torch.inference_mode():
            for rows, output, _ in forward(
                self._model, tokens, self._tokenizer.pad_token_id, self._limit, BATCH_TOKENS
            ):
                logits = output.logits.float()
                one = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
                scores[rows] = one.cpu().numpy()
        return scores
