"""OpenAI's `POST /v1/embeddings` and `GET /v1/models`, with the encoder of the served index.

    {"input": "text" | ["text", ..], "model": "..", "encoding_format": "float" | "base64", "input_type": "passage"}
    -> {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [..]}], "model", "usage"}

`input_type` is an extension of Foray: E5 encoders use different prefixes for queries and passages. A text may be given
as a list of token ids (`retriever.token_ids`). Texts and searches share one queue limit. Errors have OpenAI's shape:
{"error": {"message", "type", "code"}}.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from retriever.api.base import (
    NOT_OPEN,
    SERVICE,
    ApiError,
    EmbeddingInput,
    EmbeddingService,
    RetrieverState,
    api_error,
    json_response,
    overloaded,
    request_body,
)
from retriever.backends.base import Kind, QueryFailure
from retriever.serving.admission import Overloaded
from retriever.serving.batcher import ServiceStopped

MAX_CHARS, MAX_TEXTS = 32768, 4096
"""Maximum characters of a text (encoders truncate much earlier, by tokens), and maximum texts per request."""

_Text = Annotated[str, Field(max_length=MAX_CHARS, min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1, max_length=MAX_CHARS)]
_Item = Annotated[
    Annotated[_Text, Tag("text")] | Annotated[_Ids, Tag("ids")],
    Discriminator(lambda item: "ids" if isinstance(item, list) else "text"),
]
_OFF_LOOP = 16
"""Responses with more vectors than this are rendered in a thread."""


def _as_list(given: object) -> object:
    """Wrap a single text, or the token ids of one, in a list, so that validation errors are those of a list."""
    one_text = isinstance(given, str) or (isinstance(given, list) and bool(given) and isinstance(given[0], int))
    return [given] if one_text else given


class EmbeddingRequest(BaseModel):
    """Body of `POST /v1/embeddings`. `model` is not checked: there is one encoder, which the response names."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    input: Annotated[list[_Item], BeforeValidator(_as_list), Field(min_length=1, max_length=MAX_TEXTS)]
    model: str = Field(default="", max_length=512)
    encoding_format: Literal["float", "base64"] = "float"
    input_type: Kind = "passage"
    dimensions: int | None = None


async def embeddings(request: web.Request) -> web.Response:
    """Handle `POST /v1/embeddings`."""
    service = request.app[SERVICE]
    async with request_body(EmbeddingRequest, request) as body:
        embedding = _embedding(service)
        # decoding may be long: not on the event loop
        texts = [
            item if isinstance(item, str) else await asyncio.to_thread(_decoded, item, embedding.tokenizer)
            for item in body.input
        ]
        keys = [EmbeddingInput(body.input_type, text) for text in texts]
        try:
            found = await embedding.texts.submit(keys)
        except Overloaded as error:
            raise overloaded(service, error) from None
        except ServiceStopped as error:
            raise ApiError(503, str(error), retry_after_s=1) from None
    vectors = []
    for key in keys:
        outcome = found[key]
        if isinstance(outcome, QueryFailure):
            raise api_error(outcome)
        vectors.append(outcome)
    if body.dimensions is not None and body.dimensions != len(vectors[0]):
        raise ApiError(400, f"dimensions: this encoder has {len(vectors[0])}")
    rendering = (vectors, texts, body, body.model or embedding.model)
    rendered = await asyncio.to_thread(render, *rendering) if len(vectors) > _OFF_LOOP else render(*rendering)
    return json_response(rendered)


async def models(request: web.Request) -> web.Response:
    """Handle `GET /v1/models`."""
    embedding = _embedding(request.app[SERVICE])
    entry = {"id": embedding.model, "object": "model", "created": 0, "owned_by": "foray"}
    return web.json_response({"object": "list", "data": [entry]})


def _embedding(service: RetrieverState) -> EmbeddingService:
    if not service.ready:
        raise ApiError(503, NOT_OPEN, retry_after_s=1)
    if service.embedding is None:
        raise ApiError(404, "the served index has no encoder", cause="model_not_found")
    return service.embedding


def _decoded(ids: list[int], tokenizer: Any) -> str:
    """Return the text of token ids. Raises ApiError if they cannot be decoded."""
    if tokenizer is None:
        raise ApiError(
            400,
            "input: token ids are refused, because they say nothing without their tokenizer; send text (LangChain: "
            "check_embedding_ctx_length=False), or name the clients' tokenizer in retriever.token_ids",
        )
    text: str = tokenizer.decode(ids) if max(ids) < tokenizer.get_vocab_size() else ""
    if not 0 < len(text) <= MAX_CHARS:
        raise ApiError(400, f"input: no ids of a text of 1 to {MAX_CHARS} characters with retriever.token_ids")
    return text


def render(
    vectors: Sequence[npt.NDArray[np.float32]], texts: Sequence[str], body: EmbeddingRequest, model: str
) -> bytes:
    """Return the response body. Tokens are counted as words: the encoder's count is not available here."""
    words = sum(len(text.split()) for text in texts)
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": _spelt(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": words, "total_tokens": words}
    return json.dumps({"object": "list", "data": data, "model": model, "usage": usage}).encode()


def _spelt(vector: npt.NDArray[np.float32], form: str) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
