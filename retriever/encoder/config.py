"""Settings of the encoders. The union below is the registry: a new encoder is one file and one line here.

Every member has a lazy `build`, so that torch is imported only where a model needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from protocol.settings import Settings

if TYPE_CHECKING:
    from retriever.encoder.base import Encoder

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
"""Rows of `encoder.table`."""


class EncoderBase(Settings):
    """What every encoder's settings can do."""

    def identity(self) -> dict[str, Any]:
        """What decides a vector, as JSON-compatible values: model, prefixes, pooling, length; not device or batch size.

        The manifest of an index holds it, and serving refuses an index whose passages were encoded otherwise.
        """
        return self.model_dump(mode="json")


class HashedEncoderSettings(EncoderBase):
    """Lexical vectors from hashed words and character n-grams: no model, no download, the same on every machine."""

    type: Literal["hashed"] = "hashed"
    dim: int = Field(default=384, ge=8, le=65536)
    """Width of a vector."""
    ngram: int = Field(default=4, ge=2, le=8)
    """Length of the character n-grams (within words, which are padded with one `#` on each side)."""

    def build(self) -> Encoder:
        """The encoder."""
        from retriever.encoder.hashed import HashedEncoder

        return HashedEncoder(self)


class Compute(Settings):
    """Where and how a model runs: speed and last bits, never what a vector means."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (a GPU where there is one), cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of weights and activations. auto: float32 on CPUs, float16 on GPUs (bfloat16 for models trained in it)."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens, padding included, in one forward pass."""
    threads: int = Field(default=0, ge=0)
    """Threads of torch, for the whole process; 0: torch's own choice. Take 1 where others share the machine."""


class TransformerEncoderSettings(Compute, EncoderBase):
    """A transformer from a folder: e5, bge, contriever, DPR, gte, any sentence-transformers or AutoModel layout.

    Prefixes, pooling, normalisation and lengths: what is set here, else what the folder says about itself, else the row
    of the model's family in `encoder.table`. Nothing is downloaded, and code that comes with a model is not run.
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
    """Queries are cut to so many tokens, prefix and special tokens included."""
    max_passage_tokens: int | None = Field(default=None, ge=4)
    """Passages are cut to so many tokens, prefix and special tokens included."""

    def identity(self) -> dict[str, Any]:
        """Fingerprints of the models and the resolved recipe. UserError where the folder is missing or unclear.

        Not the place of the folder, and not device, dtype or batch: an index that a GPU built in float16 is meant to be
        served by a CPU in float32. Measured on MiniLM over 16,793 passages, queries in float16 keep 99.9 % of float32's
        ten best hits (vectors move by 1.2e-3), in bfloat16 99.3 % (9e-3).
        """
        from dataclasses import asdict

        from retriever.encoder.folder import fingerprint, resolve

        recipe = asdict(resolve(self)[0])
        recipe.pop("family")  # a name for the rest
        models = {"model": fingerprint(self.model)}
        if self.query_model is not None:
            models["query_model"] = fingerprint(self.query_model)
        return {"type": self.type, **models, **recipe}

    def build(self) -> Encoder:
        """Load the model. To be called in the thread that will use it. UserError where it cannot be."""
        from retriever.encoder.transformer import TransformerEncoder

        return TransformerEncoder(self)


class OpenAIEncoderSettings(EncoderBase):
    """Vectors by a service that speaks OpenAI's `POST /v1/embeddings`: TEI, infinity, vLLM, SGLang, OpenAI, ours."""

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
    """Texts are cut to so many characters, prefix included: services refuse what is too long for their model."""
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

    def identity(self) -> dict[str, Any]:
        """The named model, prefixes, width, cut and normalisation; not where the service is or how it is asked."""
        deciding = {"type", "model", "dim", "query_prefix", "passage_prefix", "normalize", "max_chars"}
        return self.model_dump(mode="json", include=deciding)

    def build(self) -> Encoder:
        """The client; connects with the first text. UserError where the key is missing."""
        from retriever.encoder.openai import OpenAIEncoder

        return OpenAIEncoder(self)


EncoderSettings = Annotated[
    HashedEncoderSettings | TransformerEncoderSettings | OpenAIEncoderSettings, Field(discriminator="type")
]
