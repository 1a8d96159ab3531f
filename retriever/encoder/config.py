"""Settings of the encoders: fields only. `retriever.encoder.config.REGISTRY` maps each class to its implementation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from protocol.settings import Settings, union_of

FamilyName = Literal[
    "auto",
    "e5_mistral",
    "e5_instruct",
    "e5",
    "bge_m3",
    "bge_zh",
    "bge",
    "contriever",
    "dpr",
    "gte_qwen",
    "gte_cls",
    "gte",
    "plain",
]
"""Rows of `encoder.families`."""


class EncoderBase(Settings):
    """Base of the encoders' settings."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset()
    """Fields that affect where and how fast vectors are computed, not their values (`encoder_identity` omits them)."""
    RETIRED: ClassVar[Mapping[str, Any]] = {}
    """Values of fields that were removed and are still part of the identity, so that built indexes still match."""

    type: str


class HashedEncoderSettings(EncoderBase):
    """Lexical vectors from hashed words and character n-grams: no model, no download, the same on every machine."""

    type: Literal["hashed"] = "hashed"
    dim: int = Field(default=384, ge=8, le=65536)
    """Dimension of a vector."""
    ngram: int = Field(default=4, ge=2, le=8)
    """Length of the character n-grams (within words, padded with one `#` on each side)."""


class ComputeSettings(Settings):
    """Device, dtype and batch size of a model: affects speed and rounding only."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"device", "dtype"})

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device: auto (a GPU if there is one), cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Dtype of weights and activations. auto: float32 on CPUs, float16 on GPUs (bfloat16 for models trained in it)."""


class TransformerEncoderSettings(ComputeSettings, EncoderBase):
    """A transformer from a folder: e5, bge, contriever, DPR, gte, any sentence-transformers or AutoModel layout.

    Prefixes, pooling, normalisation and lengths: the values set here, else those in the folder, else the row
    of the model's family in `encoder.families`. Nothing is downloaded, and code in a model's folder is not run.
    """

    type: Literal["transformer"] = "transformer"
    model: Path = Path("encoder")
    """Folder of the model: config.json, tokenizer, weights. For DPR that of the context encoder."""
    query_model: Path | None = None
    """Folder of the query model if it differs: DPR's question encoder."""
    family: FamilyName = "auto"
    """Model family. auto: determined from the folder's name, or from the name in its config.json."""
    query_prefix: str | None = None
    """Prefix of queries, instead of the folder's or the family's. Blanks count: end it with one if needed."""
    passage_prefix: str | None = None
    """Prefix of passages, instead of the folder's or the family's."""
    pooling: Literal["mean", "cls", "last", "pooler", "max"] | None = None
    """Pooling of token vectors, if the folder does not define it (a contradiction is refused)."""
    normalize: bool | None = None
    """Scale vectors to length 1. false is refused if the folder defines normalisation."""
    max_query_tokens: int | None = Field(default=None, ge=4)
    """Maximum tokens of a query, including prefix and special tokens; longer ones are cut."""
    max_passage_tokens: int | None = Field(default=None, ge=4)
    """Maximum tokens of a passage, including prefix and special tokens; longer ones are cut."""


class OpenAIEncoderSettings(EncoderBase):
    """Vectors from a service with OpenAI's `POST /v1/embeddings`: TEI, infinity, vLLM, SGLang, OpenAI, Foray."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset(
        {"url", "send_dimensions", "timeout_s", "retries", "api_key_variable"}
    )
    RETIRED: ClassVar[Mapping[str, Any]] = {"max_chars": 8192}

    type: Literal["openai"] = "openai"
    url: str = Field(default="http://127.0.0.1:8080/v1", pattern=r"^https?://[^\s/?#]+[^\s?#]*$")
    """Base address; `/embeddings` is appended. Redirects are not followed."""
    model: str = Field(default="embedding", min_length=1)
    """Name of the model in the request. It identifies the model in the index's manifest: use different names for
    different models."""
    dim: int = Field(default=384, ge=1, le=65536)
    """Dimension of a vector. Responses with another dimension are refused."""
    send_dimensions: bool = False
    """Send `dim` as `dimensions` in the request; some models can shorten their vectors."""
    query_prefix: str = ""
    """Prefix of queries, e.g. `query: ` for e5. The service does not distinguish queries from passages."""
    passage_prefix: str = ""
    """Prefix of passages, e.g. `passage: ` for e5."""
    normalize: bool = True
    """Scale vectors to length 1, independent of the service."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Timeout for the connection and for each chunk of a response, in seconds."""
    retries: int = Field(default=3, ge=0, le=20)
    """Retries after no connection, no response, or 408, 409, 429 and 5xx."""
    api_key_variable: str = Field(default="", pattern=r"^([A-Z_][A-Z0-9_]*)?$")
    """Name of the environment variable with the key (sent as a bearer token). Empty: no key."""


REGISTRY: dict[type[EncoderBase], str] = {
    HashedEncoderSettings: "retriever.encoder.hashed:HashedEncoder",
    TransformerEncoderSettings: "retriever.encoder.transformer:TransformerEncoder",
    OpenAIEncoderSettings: "retriever.encoder.openai:OpenAIEncoder",
}
"""Settings class -> encoder class, imported on demand: only a transformer imports torch."""

if TYPE_CHECKING:
    EncoderSettings = EncoderBase
else:
    EncoderSettings = union_of(REGISTRY)
