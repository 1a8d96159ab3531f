"""Model families: the table of prefixes, pooling, normalisation and lengths.

Values defined in a model's folder (`folder.ModelFolder`) take precedence over its row here; explicit settings take
precedence over both. The family is determined by a pattern of whole words in the model's name. (Search-R1's server
matches the substring "e5" and its index builder the exact name "e5", so an index of "e5-large" is built without the
prefix that queries get.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Pooling = Literal["mean", "cls", "last", "pooler", "max"]
"""mean: of all tokens; cls: the first; last: the last; pooler: the model's own `pooler_output`; max: per coordinate."""


@dataclass(frozen=True)
class EncoderFamily:
    """One row. Lengths in tokens, including special tokens and the prefix."""

    name: str
    pattern: str
    """Regular expression, searched for in the lower-case name of the model."""
    query_prefix: str
    passage_prefix: str
    pooling: Pooling
    normalize: bool
    max_query: int
    max_passage: int
    source: str


_ASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
_START, _END = r"(?:^|[^a-z0-9])", r"(?:[^a-z0-9]|$)"


def _word(inside: str) -> str:
    return _START + "(?:" + inside + ")" + _END


FAMILIES = (
    # the first matching pattern wins: special rows come before general ones
    EncoderFamily("e5_mistral", _word("e5-mistral"), _ASK, "", "last", True, 512, 512,
           "Wang et al. 2024, arXiv 2401.00368, and the model card of intfloat/e5-mistral-7b-instruct"),
    EncoderFamily("e5_instruct", _START + r"e5[^/]*-instruct", _ASK, "", "mean", True, 512, 512,
           "model card of intfloat/multilingual-e5-large-instruct"),
    EncoderFamily("e5", _word("e5"), "query: ", "passage: ", "mean", True, 256, 256,
           "Wang et al. 2022, arXiv 2212.03533, section 3; lengths of Search-R1's server"),
    EncoderFamily("bge_m3", _word("bge-m3"), "", "", "cls", True, 512, 512,
           "model card of BAAI/bge-m3: no instruction, dense vectors from the first token"),
    EncoderFamily("bge_zh", _START + r"bge-[^/]*zh", "为这个句子生成表示以用于检索相关文章：", "", "cls", True,
           512, 512, "model card of BAAI/bge-large-zh-v1.5"),
    EncoderFamily("bge", _START + r"bge-(?:small|base|large)",
           "Represent this sentence for searching relevant passages: ", "",
           "cls", True, 512, 512, "model card of BAAI/bge-large-en-v1.5 (Xiao et al. 2023, arXiv 2309.07597)"),
    EncoderFamily("contriever", _word("m?contriever"), "", "", "mean", False, 512, 512,
           "Izacard et al. 2022, arXiv 2112.09118, appendix A, and `mean_pooling` of its repository"),
    EncoderFamily("dpr", _word("dpr"), "", "", "pooler", False, 256, 256,
           "Karpukhin et al. 2020, arXiv 2004.04906, section 3; `sequence_length: 256` of its repository, which gives "
           "title and text as a pair: here as in Search-R1 they are one text"),
    EncoderFamily("gte_qwen", _START + r"gte-qwen", _ASK, "", "last", True, 512, 512,
           "model card of Alibaba-NLP/gte-Qwen2-1.5B-instruct"),
    EncoderFamily("gte_cls", _START + r"gte-[^/]*(?:v1\.5|modernbert|multilingual)", "", "", "cls", True, 512, 512,
           "model cards of Alibaba-NLP/gte-base-en-v1.5, gte-modernbert-base and gte-multilingual-base"),
    EncoderFamily("gte", _START + r"gte-(?:tiny|small|base|large)", "", "", "mean", True, 512, 512,
           "Li et al. 2023, arXiv 2308.03281, section 3, and the model card of thenlper/gte-base"),
    EncoderFamily("plain", r"(?!)", "", "", "mean", True, 512, 512,
           "sentence-transformers' default for a model without settings: mean of the tokens, cosine similarity"),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}


def family_of(name: str) -> EncoderFamily | None:
    """Return the family of a model's name, None if unknown. `name`: of a folder or on a hub."""
    lower = name.lower().replace("_", "-")
    return next((family for family in FAMILIES if re.search(family.pattern, lower)), None)
