"""An index: ranks passages by the number of words that they share with the query.

Its line in `retriever.index.config.REGISTRY`: `OverlapSettings: "examples.extensions.index:OverlapIndex"`
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from retriever.index.base import Hits, PassageSource, top_rows
from retriever.index.config import IndexBase


class OverlapSettings(IndexBase):
    type: Literal["overlap"] = "overlap"


class OverlapIndex:
    encoder = None

    def __init__(self, settings: OverlapSettings, directory: Path, *, threads: int) -> None:
        self._passages = [set(words) for words in json.loads((directory / "words.json").read_text())]
        self.ntotal = len(self._passages)

    @staticmethod
    def build(settings: OverlapSettings, source: PassageSource, directory: Path) -> None:
        (directory / "words.json").write_text(json.dumps([re.findall(r"\w+", text.lower()) for text in source.texts()]))

    def search(self, queries: Sequence[str], k: int) -> Hits:
        k = min(k, self.ntotal)
        asked = [set(re.findall(r"\w+", query.lower())) for query in queries]
        scores = [np.array([len(words & passage) for passage in self._passages], np.float32) for words in asked]
        rows = [top_rows(row, k) for row in scores]
        best = [row[chosen] for row, chosen in zip(scores, rows, strict=True)]
        return Hits(np.array(rows, np.int64).reshape(-1, k), np.array(best, np.float32).reshape(-1, k))
