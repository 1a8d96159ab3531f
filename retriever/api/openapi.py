"""The OpenAPI 3.1 document of the retriever, generated from the request models. Pure."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from protocol.runtime.http.openapi import (
    OPEN,
    REF,
    REFUSALS,
    TEXT,
    Object,
    document,
    failures,
    operation,
    parameter,
    response,
    serve_document,
)
from protocol.search import Passage, SearchRequest
from retriever.api.flashrag import ManyQueries, OneQuery
from retriever.api.openai import EmbeddingRequest

BODIES: dict[str, type[BaseModel]] = {
    "/retrieve": SearchRequest,
    "/search": OneQuery,
    "/batch_search": ManyQueries,
    "/v1/embeddings": EmbeddingRequest,
}

DOCUMENT: Object = {"$ref": REF.format(model="Passage")}
SCORED: Object = {
    "type": "object",
    "required": ["document", "score"],
    "properties": {"document": DOCUMENT, "score": {"type": "number"}},
}
RESULT: Object = {
    "type": "object",
    "required": ["result"],
    "properties": {
        "result": {"type": "array", "items": {"type": "array", "items": {"anyOf": [SCORED, DOCUMENT]}}},
        "errors": {"type": "array", "items": {"type": ["string", "null"]}},
    },
}
ARRAY: Object = {"type": "array"}
ERROR: Object = {"type": "object", "required": ["error"], "properties": {"error": {"type": ["string", "object"]}}}
EMBEDDINGS: Object = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"type": "object", "required": ["object", "index", "embedding"]}},
        "model": {"type": "string"},
        "usage": {"type": "object"},
    },
}
MODELS: Object = {"type": "object", "required": ["object", "data"]}
ANSWERS: dict[str, Object] = {
    "/retrieve": RESULT,
    "/search": ARRAY,
    "/batch_search": ARRAY,
    "/v1/embeddings": EMBEDDINGS,
}
SUMMARIES = {
    "/retrieve": "Search-R1's dialect: passages for queries.",
    "/search": "FlashRAG's dialect: documents for one query.",
    "/batch_search": "FlashRAG's dialect: documents for queries.",
    "/v1/embeddings": "OpenAI's dialect: vectors of texts, by the index's encoder.",
}
FAILURES = {
    **REFUSALS,
    "400": "the error in the request",
    "404": "not found",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "429": "overloaded; see Retry-After",
    "500": "the index failed",
    "502": "a provider failed",
    "503": "not open, or stopping",
}


def describe() -> Object:
    """Return the OpenAPI document."""
    models = [(model, "validation") for model in (*BODIES.values(), Passage)]
    _, definitions = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
    failed, state, name = failures(FAILURES, ERROR), {"type": "object"}, {"type": "string", "minLength": 1}

    def get(summary: str, answer: Object, *parameters: Object) -> Object:
        return {"get": operation({"200": answer} | failed, summary=summary, parameters=parameters)}

    document_of = response("the document", DOCUMENT)
    ready = {"200": response("ready", state), "503": response("not open", ERROR)}
    paths: Object = {
        path: {
            "post": operation(
                {"200": response("found", ANSWERS[path])} | failed,
                summary=SUMMARIES[path],
                body={"$ref": REF.format(model=model.__name__)},
            )
        }
        for path, model in BODIES.items()
    }
    paths |= {
        "/v1/models": get("The encoder's name, in OpenAI's form.", response("one model", MODELS)),
        "/passages": get("A document by `?id=`.", document_of, parameter("id", "query", name)),
        "/passages/{id}": get("A document by its id.", document_of, parameter("id", "path", name)),
        "/info": get("What is served, and its limits.", response("state", state)),
        "/health": {
            "get": operation({"200": response("healthy", state)}, summary="The process is alive.", security=OPEN)
        },
        "/ready": {"get": operation(ready, summary="Searches are answered.", security=OPEN)},
        "/metrics": get("Prometheus.", response("metrics", {"type": "string"}, TEXT)),
        "/openapi.json": get("This document.", response("OpenAPI", state)),
    }
    return document("Foray retriever", paths, schemas=definitions["$defs"])


openapi = serve_document(describe)
