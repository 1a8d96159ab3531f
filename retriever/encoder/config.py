"""Settings of the encoders: fields only. `retriever.encoder.config.REGISTRY` maps each class to its implementation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

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
    """Fields that decide where and how fast vectors are made, not what they are (`encoder_identity` omits them)."""

    type: str


class HashedEncoderSettings(EncoderBase):
    """Lexical vectors from hashed words and character n-grams: no model, no download, the same on every machine."""

    type: Literal["hashed"] = "hashed"
    dim: int = Field(default=384, ge=8, le=65536)
    """Width of a vector."""
    ngram: int = Field(default=4, ge=2, le=8)
    """Length of the character n-grams (within words, which are padded with one `#` on each side)."""


class ComputeSettings(Settings):
    """Where and how a model runs: speed and last bits, never what a vector means."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset({"device", "dtype", "batch_tokens", "threads"})

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (a GPU where there is one), cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of weights and activations. auto: float32 on CPUs, float16 on GPUs (bfloat16 for models trained in it)."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens, padding included, in one forward pass."""
    threads: int = Field(default=0, ge=0)
    """Threads of torch, for the whole process; 0: torch's own choice. Take 1 where others share the machine."""


class TransformerEncoderSettings(ComputeSettings, EncoderBase):
    """A transformer from a folder: e5, bge, contriever, DPR, gte, any sentence-transformers or AutoModel layout.

    Prefixes, pooling, normalisation and lengths: what is set here, else what the folder says about itself, else the row
    of the model's family in `encoder.families`. Nothing is downloaded, and code that comes with a model is not run.
    """

    type: Literal["transformer"] = "transformer"
    model: Path = Path("encoder")
    """Folder of the model: config.json, tokenizer, weights. For DPR that of the context encoder."""
    query_model: Path | None = None
    """Folder of the model for queries where that is another one: DPR's question encoder."""
    family: FamilyName = "auto"
    """Row of the table. auto: found by the folder's name, or by the name in its config.json."""
    query_prefix: str | None = None
    """Put before every query, in place of the folder's or the family's. Blanks count: end it with one where needed."""
    passage_prefix: str | None = None
    """Put before every passage, in place of the folder's or the family's."""
    pooling: Literal["mean", "cls", "last", "pooler", "max"] | None = None
    """How token vectors become one, where the folder does not say (what contradicts the folder is refused)."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1. false is refused where the folder says that they are."""
    max_query_tokens: int | None = Field(default=None, ge=4)
    """Queries are cut to this many tokens, prefix and special tokens included."""
    max_passage_tokens: int | None = Field(default=None, ge=4)
    """Passages are cut to this many tokens, prefix and special tokens included."""


class OpenAIEncoderSettings(EncoderBase):
    """Vectors by a service that speaks OpenAI's `POST /v1/embeddings`: TEI, infinity, vLLM, SGLang, OpenAI, Foray."""

    PLACEMENT: ClassVar[frozenset[str]] = frozenset(
        {"url", "send_dimensions", "batch", "timeout_s", "retries", "backoff_s", "api_key_variable"}
    )

    type: Literal["openai"] = "openai"
    url: str = Field(default="http://127.0.0.1:8080/v1", pattern=r"^https?://[^\s/?#]+[^\s?#]*$")
    """Base address; `/embeddings` is appended. Redirects are not followed."""
    model: str = Field(default="embedding", min_length=1)
    """Name of the model in the request. It stands for the model in the index's manifest: no two models one name."""
    dim: int = Field(default=384, ge=1, le=65536)
    """Width of a vector. An answer of another width is refused."""
    send_dimensions: bool = False
    """Ask for vectors of `dim` numbers, which some models can shorten (`dimensions` in the request)."""
    query_prefix: str = ""
    """Put before every query, e.g. `query: ` for e5. The service does not know what is a query."""
    passage_prefix: str = ""
    """Put before every passage, e.g. `passage: ` for e5."""
    normalize: bool = True
    """Scale vectors to length 1, whatever length the service gives them."""
    max_chars: int = Field(default=8192, ge=16)
    """Texts are cut to this many characters, prefix included: services refuse what is too long for their model."""
    batch: int = Field(default=64, ge=1, le=2048)
    """Most texts in one request."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Longest wait for the connection, and for each piece of an answer."""
    retries: int = Field(default=3, ge=0, le=20)
    """Further attempts after no connection, no answer, or 408, 409, 429 and 5xx."""
    backoff_s: float = Field(default=0.5, ge=0)
    """First pause before another attempt; doubled each time up to 30 s, times a random number from 0.5 to 1.
    A longer Retry-After of the service is obeyed, up to 60 s."""
    api_key_variable: str = Field(default="", pattern=r"^([A-Z_][A-Z0-9_]*)?$")
    """NAME of the environment variable that holds the key (sent as a bearer token). Empty: no key."""


REGISTRY: dict[type[EncoderBase], str] = {
    HashedEncoderSettings: "retriever.encoder.hashed:HashedEncoder",
    TransformerEncoderSettings: "retriever.encoder.transformer:TransformerEncoder",
    OpenAIEncoderSettings: "retriever.encoder.openai:OpenAIEncoder",
}
"""Settings class to encoder class, which is imported when it is needed: only a transformer imports torch."""

if TYPE_CHECKING:
    EncoderSettings = EncoderBase
else:
    EncoderSettings = union_of(REGISTRY)
